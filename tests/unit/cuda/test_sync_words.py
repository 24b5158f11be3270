"""Words between streams and the host: no write is taken for one of another use, and no stream is left waiting."""

from __future__ import annotations

import gc
import random
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.fakes.cuda_driver import FakeDriver, install
from tests.helpers.sync_words import has_passed
from torchkv.cuda import sync_words as sync_words_module
from torchkv.cuda.sync_words import HostReleasedWait, StreamCompletion, SyncWordPool, SyncWords
from torchkv.errors import ProtocolError, TransportUnavailable

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

    monkeypatch.setattr(sync_words_module, "_pinned_words", pinned)
    monkeypatch.setattr(sync_words_module, "_kept", {})
    return driver


def stream(number: int) -> Any:
    return SimpleNamespace(cuda_stream=number)


class FakeStreams:
    """Streams whose operations run in order, but at any time after they were enqueued."""

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
    """For any interleaving of host and device, and any first value, also right before the values wrap around."""
    rng = random.Random(seed)
    memory = np.full(3, start, dtype=np.uint32)
    pool, device = SyncWordPool(memory), FakeStreams(memory)
    sync_words: list[tuple[int, int, tuple[str, int, int]]] = []
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
                    sync_words.append((word, value, op))
                queue.append(op)
            case 2 if sync_words:  # given back, done or not
                word, value, op = sync_words.pop(rng.randrange(len(sync_words)))
                assert pool.reached(word, value) == (not pending(op))
                pool.give_back(word)
            case 3 if holds:
                word, value, op = holds.pop(rng.randrange(len(holds)))
                assert pending(op), "a stream passed a hold that was not opened"
                pool.open(word, value)
                pool.open(word, value)
            case _:
                device.step(rng.randrange(3))
        for word, value, op in sync_words:
            assert pool.reached(word, value) == (not pending(op))
        for word, value, op in holds:
            assert not pool.reached(word, value)
            assert pending(op)
    assert uses > 5
    pool.open_all()
    for word, _, _ in sync_words:
        pool.give_back(word)
    for _ in range(600):
        device.step(rng.randrange(3))
    assert pool.settled()
    assert {pool.take(1)[0] for _ in range(3)} == {0, 1, 2}


def test_the_property_needs_both_the_wait_for_the_last_value_and_values_that_grow() -> None:
    """Negative control: a pool that reuses a word at once takes a write of the earlier use for one of the later."""
    memory = np.zeros(1, dtype=np.uint32)
    pool = SyncWordPool(memory)
    word, first = pool.take(1)
    pool.give_back(word)
    with pytest.raises(ProtocolError):
        pool.take(1)
    memory[word] = first  # the late write
    word, second = pool.take(1)
    assert second != first
    assert not pool.reached(word, second)
    careless = SyncWordPool(memory := np.zeros(1, dtype=np.uint32))
    careless._last = [-1]  # as if every use had the same value
    assert careless.reached(*careless.take(1))


def test_a_completion_is_done_when_its_stream_has_reached_it(fake: FakeDriver) -> None:
    sync_words = SyncWords(GPU)
    first, second, third = sync_words.signal(stream(1)), sync_words.signal(stream(2)), sync_words.signal(stream(1))
    assert [f.done for f in (first, second, third)] == [False] * 3
    assert sync_words.words is fake.words
    fake.run(1, 1)
    assert [f.done for f in (first, second, third)] == [True, False, False]
    assert fake.words[first.index] == first.value
    fake.run(1)
    fake.run(2)
    assert [f.done for f in (first, second, third)] == [True] * 3
    for completion in (first, second, third):
        completion.release()
        completion.release()
        assert completion.done


def test_words_are_reused_thousands_of_times(fake: FakeDriver) -> None:
    sync_words = SyncWords(GPU)
    for _ in range(5000):
        completion = sync_words.signal(stream(1))
        assert not completion.done
        fake.run(1)
        assert completion.done
        completion.release()


def test_a_completion_released_early_keeps_its_word_until_the_write_is_there(fake: FakeDriver) -> None:
    sync_words = SyncWords(GPU)
    signalled = [sync_words.signal(stream(1)) for _ in range(COUNT)]
    for completion in signalled:
        completion.release()
    with pytest.raises(ProtocolError, match="8 stream operations") as caught:
        sync_words.signal(stream(2))
    assert caught.value.retryable
    fake.run(1, 3)
    late = [sync_words.signal(stream(2)) for _ in range(3)]
    assert not any(completion.done for completion in late)
    fake.run(1)
    assert not any(completion.done for completion in late)
    assert not any(completion.done for completion in signalled)
    fake.run(2)
    assert all(completion.done for completion in late)


def test_a_hold_stops_its_stream_until_it_is_opened(fake: FakeDriver) -> None:
    sync_words = SyncWords(GPU)
    for _ in range(COUNT * 3):  # so that words are reused
        hold = sync_words.hold(stream(1))
        behind = sync_words.signal(stream(1))
        assert fake.run(1) == 0
        thread = threading.Thread(target=hold.open)
        thread.start()
        thread.join()
        assert not has_passed(hold)
        assert fake.run(1) == 3
        assert has_passed(hold)
        assert behind.done
        hold.open()  # has no effect any more
        behind.release()
    assert fake.contexts == []


def test_the_host_knows_whether_a_stream_waits_for_it(fake: FakeDriver) -> None:
    sync_words = SyncWords(GPU)
    sync_words.signal(stream(1))
    assert not sync_words.holding
    first, second = sync_words.hold(stream(1)), sync_words.hold(stream(2))
    first.open()
    assert sync_words.holding
    second.open()
    assert not sync_words.holding
    sync_words.hold(stream(1))
    sync_words.close()
    assert not sync_words.holding


def test_no_stream_begins_to_wait_inside_no_blocked_streams(fake: FakeDriver) -> None:
    sync_words = SyncWords(GPU)
    other_group = SyncWords(GPU)
    for holder in (sync_words, other_group):
        hold = holder.hold(stream(1))
        with sync_words.no_blocked_streams() as unblocked:
            assert not unblocked
        hold.open()
    held: list[HostReleasedWait] = []
    late = threading.Thread(target=lambda: held.append(sync_words.hold(stream(2))))
    with sync_words.no_blocked_streams() as unblocked:
        assert unblocked
        late.start()
        late.join(0.05)
        assert not held
        assert not sync_words.holding
        sync_words.signal(stream(3))
    late.join()
    assert sync_words.holding
    held[0].open()


def test_opening_a_hold_again_does_not_open_the_next_one_in_its_word(fake: FakeDriver) -> None:
    sync_words = SyncWords(GPU)
    old = sync_words.hold(stream(1))
    old.open()
    fake.run(1)
    others = [sync_words.hold(stream(2)) for _ in range(COUNT)]
    old.open()
    assert fake.run(2) == 0
    for hold in others:
        hold.open()
    assert fake.run(2) == 2 * COUNT


def test_close_ends_every_wait_and_keeps_the_words_until_streams_have_passed(fake: FakeDriver) -> None:
    sync_words = SyncWords(GPU)
    completion, hold = sync_words.signal(stream(1)), sync_words.hold(stream(1))
    sync_words.close()
    sync_words.close()
    for call in (sync_words.signal, sync_words.hold):
        with pytest.raises(ProtocolError, match="closed"):
            call(stream(1))
    assert len(sync_words_module._kept) == 1
    assert fake.run(1) == 3
    assert completion.done
    assert has_passed(hold)
    SyncWords(GPU).close()
    assert not sync_words_module._kept


def test_dropping_sync_words_ends_every_wait(fake: FakeDriver) -> None:
    sync_words = SyncWords(GPU)
    words = fake.words
    sync_words.hold(stream(1))
    del sync_words
    gc.collect()
    assert len(sync_words_module._kept) == 1, "the device will still write to these words"
    fake.words = words
    assert fake.run(1) == 2
    SyncWords(GPU).close()
    assert not sync_words_module._kept


def test_a_stream_being_captured_is_refused(fake: FakeDriver) -> None:
    sync_words = SyncWords(GPU)
    fake.capturing.add(7)
    for call in (sync_words.signal, sync_words.hold):
        with pytest.raises(ProtocolError, match="GraphGate"):
            call(stream(7))
    assert not fake.streams
    sync_words.signal(stream(1)).release()


def test_failing_driver_calls_leave_no_word_and_no_waiting_stream(fake: FakeDriver) -> None:
    sync_words = SyncWords(GPU)
    for _ in range(COUNT + 1):
        fake.fail = {"cuStreamWriteValue32"}
        with pytest.raises(TransportUnavailable, match="signalling from a stream"):
            sync_words.signal(stream(1))
        fake.fail = {"cuStreamWaitValue32"}
        with pytest.raises(TransportUnavailable, match="holding a stream"):
            sync_words.hold(stream(1))
    assert not fake.streams
    fake.fail = {"cuStreamWriteValue32"}
    with pytest.raises(TransportUnavailable):
        sync_words.hold(stream(1))
    assert fake.run(1) == 1  # the wait that was enqueued has been ended


def test_a_device_without_stream_memory_operations_is_refused(fake: FakeDriver) -> None:
    fake.can["mem_ops"] = 0
    with pytest.raises(TransportUnavailable, match="no stream memory operations"):
        SyncWords(GPU)
    with pytest.raises(ProtocolError, match="cpu"):
        SyncWords(torch.device("cpu"))
    fake.can = {"mem_ops": 1, "flush": 0}
    SyncWords(GPU).hold(stream(1)).open()


def test_many_threads_never_get_the_same_word(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, rounds = 4, 300
    monkeypatch.setattr(sync_words_module, "_pinned_words", lambda index: np.zeros(2 * threads, dtype=np.uint32))
    sync_words = SyncWords(GPU)
    fake.words = sync_words.words
    problems: list[str] = []

    def work(number: int) -> None:
        for _ in range(rounds):
            completion: StreamCompletion = sync_words.signal(stream(number))
            hold: HostReleasedWait = sync_words.hold(stream(number))
            fake.run(number)
            hold.open()
            if not completion.done or fake.run(number) != 2 or not has_passed(hold):
                problems.append(f"stream {number}: completion {completion.done}, hold {has_passed(hold)}")
            completion.release()

    workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()
    assert not problems
