"""Words between streams and the host: no write is ever taken for another use's, and no stream is left waiting."""

from __future__ import annotations

import gc
import random
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_driver import FakeDriver, install
from hypothesis import given, settings
from hypothesis import strategies as st

from torchkv import flags as flags_module
from torchkv.errors import ProtocolError, TransportUnavailable
from torchkv.flags import Flag, Flags, Hold, WordPool

GPU = torch.device("cuda", 0)
COUNT = 8
TOP = 1 << 32


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = install(monkeypatch, FakeDriver())

    def pinned(index: int) -> Any:
        assert driver.contexts[-1] == index
        driver.words = np.zeros(COUNT, dtype=np.uint32)
        return driver.words

    monkeypatch.setattr(flags_module, "_pinned_words", pinned)
    monkeypatch.setattr(flags_module, "_kept", {})
    return driver


def stream(number: int) -> Any:
    return SimpleNamespace(cuda_stream=number)


class Device:
    """Streams of writes to words, each executed in order, any time after it was enqueued."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.streams: dict[int, list[tuple[str, int, int]]] = {0: [], 1: [], 2: []}

    def step(self, number: int) -> None:
        queue = self.streams[number]
        if not queue:
            return
        kind, word, value = queue[0]
        if kind == "wait" and (int(self.memory[word]) - value) % TOP >= TOP // 2:
            return
        if kind == "write":
            self.memory[word] = value
        queue.pop(0)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32), start=st.sampled_from([0, 1, TOP - 2, TOP - 1, TOP // 2 - 1]))
def test_no_write_is_mistaken_and_no_hold_opens_early(seed: int, start: int) -> None:
    """Any interleaving of host and device; values may begin anywhere, also right before they wrap."""
    rng = random.Random(seed)
    memory = np.full(3, start, dtype=np.uint32)
    pool, device = WordPool(memory), Device(memory)
    flags: list[tuple[int, int, tuple[str, int, int]]] = []
    holds: list[tuple[int, int, tuple[str, int, int]]] = []
    uses = 0

    def pending(op: tuple[str, int, int]) -> bool:
        return any(op is other for queue in device.streams.values() for other in queue)

    for _ in range(300):
        match rng.randrange(6):
            case 0 | 1 as steps:
                try:
                    word, value = pool.take(1 + steps)
                except ProtocolError:  # all in use
                    continue
                uses += 1
                queue = device.streams[rng.randrange(3)]
                if steps:
                    pool.hold(word, value)
                    queue.append(("wait", word, value))
                    op = ("write", word, (value + 1) % TOP)
                    holds.append((word, value, op))
                else:
                    op = ("write", word, value)
                    flags.append((word, value, op))
                queue.append(op)
            case 2 if flags:  # given back, seen or not
                word, value, op = flags.pop(rng.randrange(len(flags)))
                assert pool.reached(word, value) == (not pending(op))
                pool.give_back(word)
            case 3 if holds:
                word, value, op = holds.pop(rng.randrange(len(holds)))
                assert pending(op), "a stream passed a hold that nobody opened"
                pool.open(word, value)
                pool.open(word, value)
            case _:
                device.step(rng.randrange(3))
        for word, value, op in flags:
            assert pool.reached(word, value) == (not pending(op))
        for word, value, op in holds:
            assert not pool.reached(word, value)
            assert pending(op)
    assert uses > 5
    pool.open_all()
    for word, _, _ in flags:
        pool.give_back(word)
    for _ in range(600):
        device.step(rng.randrange(3))
    assert pool.settled()
    assert {pool.take(1)[0] for _ in range(3)} == {0, 1, 2}


def test_the_property_needs_both_the_wait_for_the_last_value_and_values_that_grow() -> None:
    """Negative control: a pool that reuses a word at once takes the earlier use's write for the later one's."""
    memory = np.zeros(1, dtype=np.uint32)
    pool = WordPool(memory)
    word, first = pool.take(1)
    pool.give_back(word)
    with pytest.raises(ProtocolError):
        pool.take(1)
    memory[word] = first  # the late write
    word, second = pool.take(1)
    assert second != first
    assert not pool.reached(word, second)
    careless = WordPool(memory := np.zeros(1, dtype=np.uint32))
    careless._last = [-1]  # as if every use had the same value
    assert careless.reached(*careless.take(1))


def test_a_flag_is_done_when_its_stream_got_there(fake: FakeDriver) -> None:
    flags = Flags(GPU)
    first, second, third = flags.signal(stream(1)), flags.signal(stream(2)), flags.signal(stream(1))
    assert [f.done for f in (first, second, third)] == [False] * 3
    assert flags.words is fake.words
    fake.run(1, 1)
    assert [f.done for f in (first, second, third)] == [True, False, False]
    assert fake.words[first.index] == first.value
    fake.run(1)
    fake.run(2)
    assert [f.done for f in (first, second, third)] == [True] * 3
    for flag in (first, second, third):
        flag.release()
        flag.release()
        assert flag.done


def test_words_are_reused_thousands_of_times(fake: FakeDriver) -> None:
    flags = Flags(GPU)
    for _ in range(5000):
        flag = flags.signal(stream(1))
        assert not flag.done
        fake.run(1)
        assert flag.done
        flag.release()


def test_a_flag_released_early_keeps_its_word_until_the_write_is_there(fake: FakeDriver) -> None:
    flags = Flags(GPU)
    early = [flags.signal(stream(1)) for _ in range(COUNT)]
    for flag in early:
        flag.release()
    with pytest.raises(ProtocolError, match="8 stream operations") as caught:
        flags.signal(stream(2))
    assert caught.value.retryable
    fake.run(1, 3)
    late = [flags.signal(stream(2)) for _ in range(3)]
    assert not any(flag.done for flag in late)
    fake.run(1)
    assert not any(flag.done for flag in late)
    assert not any(flag.done for flag in early)
    fake.run(2)
    assert all(flag.done for flag in late)


def test_a_hold_stops_its_stream_until_it_is_opened(fake: FakeDriver) -> None:
    flags = Flags(GPU)
    for _ in range(COUNT * 3):  # words come back
        hold = flags.hold(stream(1))
        behind = flags.signal(stream(1))
        assert fake.run(1) == 0
        thread = threading.Thread(target=hold.open)
        thread.start()
        thread.join()
        assert not hold.passed
        assert fake.run(1) == 3
        assert hold.passed
        assert behind.done
        hold.open()  # too late to mean anything
        behind.release()
    assert fake.contexts == []


def test_the_host_knows_whether_a_stream_waits_for_it(fake: FakeDriver) -> None:
    flags = Flags(GPU)
    flags.signal(stream(1))
    assert not flags.holding
    first, second = flags.hold(stream(1)), flags.hold(stream(2))
    first.open()
    assert flags.holding
    second.open()
    assert not flags.holding
    flags.hold(stream(1))
    flags.close()
    assert not flags.holding


def test_no_stream_begins_to_wait_while_it_is_quiet(fake: FakeDriver) -> None:
    flags = Flags(GPU)
    other_group = Flags(GPU)
    for holder in (flags, other_group):
        hold = holder.hold(stream(1))
        with flags.quiet() as quiet:
            assert not quiet
        hold.open()
    held: list[Hold] = []
    late = threading.Thread(target=lambda: held.append(flags.hold(stream(2))))
    with flags.quiet() as quiet:
        assert quiet
        late.start()
        late.join(0.05)
        assert not held
        assert not flags.holding
        flags.signal(stream(3))
    late.join()
    assert flags.holding
    held[0].open()


def test_opening_a_hold_again_does_not_open_the_next_one_in_its_word(fake: FakeDriver) -> None:
    flags = Flags(GPU)
    old = flags.hold(stream(1))
    old.open()
    fake.run(1)
    others = [flags.hold(stream(2)) for _ in range(COUNT)]
    old.open()
    assert fake.run(2) == 0
    for hold in others:
        hold.open()
    assert fake.run(2) == 2 * COUNT


def test_close_lets_every_stream_go_and_keeps_the_words_until_then(fake: FakeDriver) -> None:
    flags = Flags(GPU)
    flag, hold = flags.signal(stream(1)), flags.hold(stream(1))
    flags.close()
    flags.close()
    for call in (flags.signal, flags.hold):
        with pytest.raises(ProtocolError, match="closed"):
            call(stream(1))
    assert len(flags_module._kept) == 1
    assert fake.run(1) == 3
    assert flag.done
    assert hold.passed
    Flags(GPU).close()
    assert not flags_module._kept


def test_flags_that_are_dropped_let_every_stream_go(fake: FakeDriver) -> None:
    flags = Flags(GPU)
    words = fake.words
    flags.hold(stream(1))
    del flags
    gc.collect()
    assert len(flags_module._kept) == 1, "the device has yet to write to these words"
    fake.words = words
    assert fake.run(1) == 2
    Flags(GPU).close()
    assert not flags_module._kept


def test_a_stream_being_captured_is_refused(fake: FakeDriver) -> None:
    flags = Flags(GPU)
    fake.capturing.add(7)
    for call in (flags.signal, flags.hold):
        with pytest.raises(ProtocolError, match="GraphGate"):
            call(stream(7))
    assert not fake.streams
    flags.signal(stream(1)).release()


def test_failing_driver_calls_leave_no_word_and_no_waiting_stream(fake: FakeDriver) -> None:
    flags = Flags(GPU)
    for _ in range(COUNT + 1):
        fake.fail = {"cuStreamWriteValue32"}
        with pytest.raises(TransportUnavailable, match="signalling from a stream"):
            flags.signal(stream(1))
        fake.fail = {"cuStreamWaitValue32"}
        with pytest.raises(TransportUnavailable, match="holding a stream"):
            flags.hold(stream(1))
    assert not fake.streams
    fake.fail = {"cuStreamWriteValue32"}
    with pytest.raises(TransportUnavailable):
        flags.hold(stream(1))
    assert fake.run(1) == 1  # the wait that had been enqueued is over


def test_a_device_without_stream_memory_operations_is_refused(fake: FakeDriver) -> None:
    fake.can["mem_ops"] = 0
    with pytest.raises(TransportUnavailable, match="no stream memory operations"):
        Flags(GPU)
    with pytest.raises(ProtocolError, match="cpu"):
        Flags(torch.device("cpu"))
    fake.can = {"mem_ops": 1, "flush": 0}
    Flags(GPU).hold(stream(1)).open()


def test_many_threads_never_get_the_same_word(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, rounds = 4, 300
    monkeypatch.setattr(flags_module, "_pinned_words", lambda index: np.zeros(2 * threads, dtype=np.uint32))
    flags = Flags(GPU)
    fake.words = flags.words
    problems: list[str] = []

    def work(number: int) -> None:
        for _ in range(rounds):
            flag: Flag = flags.signal(stream(number))
            hold: Hold = flags.hold(stream(number))
            fake.run(number)
            hold.open()
            if not flag.done or fake.run(number) != 2 or not hold.passed:
                problems.append(f"stream {number}: flag {flag.done}, hold {hold.passed}")
            flag.release()

    workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()
    assert not problems
