"""The resident loop without threads: requests, what it leaves to Python, full mailboxes, and writers that lie."""

from __future__ import annotations

import random
import signal
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.notices import kinds
from tests.helpers.records import tell
from torchkv.bench.scale.loops import PAGE, TOKENS, Pair
from torchkv.core.core import Core
from torchkv.core.loop.codes import (
    ALL_HERE,
    AUX,
    DECIDED,
    DONE,
    GRANT,
    NOBODY,
    OP_DONE,
    OUTSIDE,
    POSTED,
    RECEIVED,
    SEAL,
    SENT,
    STRAY,
    VERDICT,
    WRITTEN,
)
from torchkv.core.loop.limits import MAX_AUX, MAX_EVENTS, MAX_FLOWS, MAX_INTERVALS
from torchkv.core.loop.receiving import cover
from torchkv.host.jit import warm_up


def head(kind: int, first: int = 0, last: int = 0) -> int:
    return kind | first << 8 | last << 32


@pytest.mark.parametrize("aux", [b"", b"first token", bytes(range(256))])
@pytest.mark.parametrize("limits", [{}, {"turn": 1, "window": 9}], ids=["wide", "narrow"])
def test_a_request(aux: bytes, limits: dict[str, int]) -> None:
    pair = Pair(**limits)
    flow = pair.receive(3)
    send = pair.send(flow, [6, 1, 4])
    op = pair.start(send, [2, 7, 0])
    pair.writer.sends.finish(send, 3, aux)
    told, heard = pair.run()
    assert kinds(told) == [OP_DONE, SENT]
    assert kinds(heard) == [RECEIVED]
    assert pair.writer.sends.op_results([op]) == ([3 * 3 * PAGE], 9)
    state = pair.reader.receives.state(flow)
    assert state.nbytes == 3 * 3 * PAGE
    assert [writer.aux for writer in state.writers] == [aux]
    expected = np.full_like(pair.dst, 0xAB)
    expected[:, [6, 1, 4]] = pair.src[:, [2, 7, 0]]
    assert (pair.dst == expected).all()


@pytest.mark.parametrize("seed", range(40))
def test_chunks_in_any_order(seed: int) -> None:
    """Layers and pages by themselves, some twice, with little room in mailboxes and little work in a step."""
    dice = random.Random(seed)
    pair = Pair(layers=5, turn=dice.choice([1, 600, 1 << 20]), window=dice.choice([9, 256]))
    flow = pair.receive(4)
    send = pair.send(flow, [3, 5, 0, 7])
    pages = [1, 2, 6, 4]
    chunks = [(layer, page) for layer in range(5) for page in range(4)]
    chunks += dice.sample(chunks, 3)
    dice.shuffle(chunks)
    for layer, page in chunks:
        pair.start(send, [pages[page]], start=page, layers=[layer])
        if dice.random() < 0.5:
            pair.writer.runner.step()
        if dice.random() < 0.5:
            pair.reader.runner.step()
    pair.writer.sends.finish(send, 4, b"")
    told, heard = pair.run()
    assert sorted(kinds(told)) == sorted([OP_DONE] * len(chunks) + [SENT])
    # Chunks in disorder may leave more holes at a time than the loop keeps: then Python takes over, and loses nothing.
    assert kinds(heard)[-1] == RECEIVED or kinds(heard)[0] == STRAY
    assert (pair.dst[:, [3, 5, 0, 7]] == pair.src[:, pages]).all()


def test_what_is_announced_is_there() -> None:
    """At every moment each layer that the receiver counts as arrived has arrived."""
    pair = Pair(layers=4, turn=1)
    flow = pair.receive(3)
    send = pair.send(flow, [0, 1, 2])
    for layer in (2, 0, 3, 1):
        pair.start(send, [5, 6, 7], layers=[layer])
    seen = 0
    while pair.writer.runner.step() | pair.reader.runner.step():
        for layer, intervals in enumerate(pair.reader.receives.state(flow).writers[0].intervals):
            for lo, hi in intervals:
                seen += 1
                assert (lo, hi) == (0, 3 * TOKENS)
                assert (pair.dst[layer, :3] == pair.src[layer, [5, 6, 7]]).all()
    assert seen


def test_a_layer_larger_than_a_group() -> None:
    """Layers are announced in groups of 16 MiB; one that is larger by itself is announced when it is whole."""
    pair = Pair(layers=2, pages=(17 << 20) // PAGE)
    count = pair.src.shape[1]
    send = pair.send(pair.receive(count), range(count))
    pair.start(send, range(count))
    pair.writer.sends.finish(send, count, b"")
    told, heard = pair.run()
    assert kinds(told) == [OP_DONE, SENT]
    assert kinds(heard) == [RECEIVED]
    assert (pair.dst == pair.src).all()


def test_a_seal_alone_is_no_success() -> None:
    pair = Pair()
    flow = pair.receive(2)
    tell(pair.writer, 1, head=SEAL, flows=flow, generation=1, lo=2)
    assert kinds(pair.run()[1]) == [ALL_HERE]


def test_a_hole_is_no_success() -> None:
    pair = Pair(layers=1)
    flow = pair.receive(3)
    for lo, hi in ((0, TOKENS), (2 * TOKENS, 3 * TOKENS)):
        tell(pair.writer, 1, head=head(WRITTEN, 0, 1), flows=flow, generation=1, lo=lo, hi=hi)
    tell(pair.writer, 1, head=SEAL, flows=flow, generation=1, lo=3)
    assert kinds(pair.run()[1]) == [ALL_HERE]


def test_two_writers() -> None:
    """Both must seal. The reader is complete only when both are, and each is told."""
    pair = Pair(layers=1)
    pair.reader.peers.reserve_slot(2, 2)
    flow = pair.receive(1, writers=(0, 2))
    send = pair.send(flow, [0])
    pair.start(send, [1])
    pair.writer.sends.finish(send, 1, b"")
    told, heard = pair.run()
    assert kinds(told) == [OP_DONE]
    assert heard == []


def test_who_may_not_decide_asks() -> None:
    pair = Pair()
    flow = pair.receive(2, leader=NOBODY)
    send = pair.send(flow, [0, 1])
    pair.start(send, [2, 3])
    pair.writer.sends.finish(send, 2, b"")
    told, heard = pair.run()
    assert kinds(told) == [OP_DONE]
    assert kinds(heard) == [ALL_HERE]


def test_records_of_an_earlier_generation_are_strays() -> None:
    """The flow is another request's now: what the first one wrote must not count for it."""
    pair = Pair(layers=1)
    flow = pair.receive(1, generation=1)
    with pair.reader.runner.standing_still():
        pair.reader.receives.close(flow)
        pair.reader.receives.free(flow)
    assert pair.receive(1, generation=2) == flow
    tell(pair.writer, 1, head=head(WRITTEN, 0, 1), flows=flow, generation=1, hi=TOKENS)
    tell(pair.writer, 1, head=SEAL, flows=flow, generation=1, lo=1)
    heard = pair.run()[1]
    assert kinds(heard) == [STRAY, STRAY]
    assert pair.reader.receives.state(flow).writers[0].intervals == [[]]


@pytest.mark.parametrize(
    "words",
    [
        {"head": head(WRITTEN, 0, 4)},
        {"head": head(WRITTEN, 0, 1), "lo": -1, "hi": 16},
        {"head": head(WRITTEN, 0, 1), "hi": 16, "nbytes": -1},
        {"head": head(WRITTEN, 0, 1), "hi": 16, "flows": MAX_FLOWS},
        {"head": head(WRITTEN, 0, 1), "hi": 16, "flows": 0xFFFFFFFF},
        {"head": head(AUX, 33)},
        {"head": SEAL, "lo": 0},
        {"head": SEAL, "lo": -1},
        {"head": SEAL, "lo": 9},
        {"head": SEAL, "lo": 2, "hi": 5},
        {"head": VERDICT},
        {"head": VERDICT, "flows": -1},
        {"head": 99},
        {"head": -1, "flows": -1, "generation": -1},
    ],
)
def test_records_that_make_no_sense_are_left_to_python(words: dict[str, int]) -> None:
    pair = Pair()
    flow = pair.receive(2)
    tell(pair.writer, 1, **{"flows": flow, "generation": 1, **words})
    assert kinds(pair.run()[1]) == [STRAY]
    assert (pair.dst == 0xAB).all()


def test_aux_without_end() -> None:
    pair = Pair()
    flow = pair.receive(2)
    for _ in range(MAX_AUX // 32):
        tell(pair.writer, 1, head=head(AUX, 32), flows=flow, generation=1)
    assert pair.run()[1] == []
    tell(pair.writer, 1, head=head(AUX, 1), flows=flow, generation=1)
    assert kinds(pair.run()[1]) == [STRAY]


WORD = st.integers(-(1 << 63), (1 << 63) - 1)
KINDS = [WRITTEN, AUX, SEAL, VERDICT, GRANT, POSTED, DONE, DECIDED]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(WORD | st.sampled_from(KINDS), WORD, WORD, WORD, WORD), max_size=8))
def test_no_record_crashes_the_reader(records: list[tuple[int, int, int, int, int]]) -> None:
    pair = Pair(layers=1, pages=2)
    pair.receive(1)
    for which, flows, lo, hi, nbytes in records:
        tell(pair.writer, 1, head=which, flows=flows, generation=1, lo=lo, hi=hi, nbytes=nbytes)
    pair.run()
    assert (pair.dst == 0xAB).all()


def test_a_send_is_taken_back() -> None:
    """What it had announced stays; nothing of it is copied afterwards; its slots are free."""
    pair = Pair(layers=2, turn=1)
    flow = pair.receive(3)
    send = pair.send(flow, [0, 1, 2])
    ops = [pair.start(send, [4, 5, 6], layers=[layer]) for layer in (0, 1)]
    while OP_DONE not in kinds(pair.writer.events.take()):
        pair.writer.runner.step()
    with pair.writer.runner.standing_still():
        pair.writer.settle()
        assert pair.writer.events.take() == []
        assert pair.writer.sends.take_back(send, ops[1:]) is False
    before = pair.dst.copy()
    assert pair.run()[0] == []
    assert (pair.dst == before).all()
    assert (before[0, :3] == pair.src[0, [4, 5, 6]]).all()
    assert not (before[1, :3] == pair.src[1, [4, 5, 6]]).all()


def test_a_full_mailbox_loses_nothing() -> None:
    """The reader does not look for a while: the writer's ops wait, and go on."""
    pair = Pair(layers=1, window=2)
    flow = pair.receive(8)
    send = pair.send(flow, range(8))
    for page in range(8):
        pair.start(send, [page], start=page)
    pair.writer.sends.finish(send, 8, b"")
    for _ in range(100):
        pair.writer.runner.step()
    assert kinds(pair.writer.events.take()) == [OP_DONE] * 2
    told, heard = pair.run()
    assert kinds(told) == [OP_DONE] * 6 + [SENT]
    assert kinds(heard) == [RECEIVED]


INTERVAL = st.tuples(st.integers(0, 40), st.integers(1, 12))


@settings(deadline=None)
@given(st.lists(INTERVAL, max_size=30))
def test_coverage_is_the_set_of_what_has_come(added: list[tuple[int, int]]) -> None:
    words = np.zeros(1 + 2 * MAX_INTERVALS, dtype=np.int64)
    expected: set[int] = set()
    for lo, count in added:
        before = words.copy()
        both = expected | set(range(lo, lo + count))
        if cover(words.ctypes.data, lo, lo + count):
            expected = both
        else:
            assert (words == before).all()
            runs = sum(number - 1 not in both for number in both)
            assert runs > MAX_INTERVALS
        got = [(int(words[1 + 2 * i]), int(words[2 + 2 * i])) for i in range(words[0])]
        assert sum(hi - lo for lo, hi in got) == len(expected)
        assert {number for lo, hi in got for number in range(lo, hi)} == expected


def test_who_waits_may_spin_until_there_is_news() -> None:
    core = Core(0)
    core.world["spin"] = 60 * 10**9
    core.news.wait(core.news.count, 1e-6)  # for nothing
    seen = core.news.count
    threading.Timer(0.01, core.news.add).start()
    while core.news.count == seen:  # on a busy machine the other thread may begin late
        core.news.wait(seen, 30)
    assert core.world["sleepers"] == 0
    assert core.news.count == 1


def test_the_ends_of_ops_are_quiet_unless_somebody_listens() -> None:
    pair = Pair()
    flow = pair.receive(3)
    send = pair.send(flow, [6, 1, 4])
    news, listeners = pair.writer.news, "listeners"
    pair.start(send, [2], layers=[0])
    pair.run()
    assert news.count == 0
    pair.writer.world[listeners] = 1  # type: ignore[literal-required]
    pair.start(send, [2], layers=[1])
    assert kinds(pair.run()[0]) == [OP_DONE]
    assert news.count == 1
    pair.writer.world[listeners] = 0  # type: ignore[literal-required]
    pair.start(send, [2, 7, 0])
    pair.writer.sends.finish(send, 3, b"")
    assert kinds(pair.run()[0]) == [OP_DONE, SENT]
    assert news.count == 2


def test_events_are_not_quiet_for_ever() -> None:
    """Nobody asks for anything but the end of the request: its many ops must not fill the ring meanwhile."""
    pair = Pair()
    send = pair.send(pair.receive(3), [6, 1, 4])
    for _ in range(2 * MAX_EVENTS // 4):
        pair.start(send, [2], layers=[0])
        while pair.writer.runner.step():
            pass
        pair.reader.runner.step()
    assert 0 < pair.writer.news.count < 2 * MAX_EVENTS // 4


def test_who_listens_does_not_miss_what_came_just_before() -> None:
    pair = Pair()
    send = pair.send(pair.receive(3), [6, 1, 4])
    seen = pair.writer.news.count
    pair.start(send, [2], layers=[0])
    while pair.writer.runner.step():
        pass
    pair.writer.world["spin"] = 60 * 10**9
    pair.writer.news.wait(seen, 30, listens=True)  # returns at once
    assert pair.writer.world["listeners"] == 0


def test_pages_outside_the_grant_are_never_sent() -> None:
    pair = Pair()
    flow = pair.receive(2)
    send = pair.send(flow, [6, 1])
    inside, outside = pair.start(send, [2, 7]), pair.start(send, [0], start=2)
    pair.writer.sends.finish(send, 2, b"")
    told, heard = pair.run()
    assert [(notice.kind, notice.index) for notice in told] == [(OP_DONE, inside), (OUTSIDE, outside)]
    assert heard == []


def test_a_signal_whose_handler_raises_while_the_loop_is_waited_for_leaves_it_running() -> None:
    """As Ctrl-C does, or a test's time limit."""

    class Interrupted(Exception):
        pass

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    runner = Core(0).runner
    warm_up()  # not while the signal is waited for
    runner.world["lock"] = 1  # as a loop in the middle of its step
    step_ends = threading.Timer(0.2, runner.world.__setitem__, ("lock", 0))
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        step_ends.start()
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Interrupted), runner.standing_still():
            pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    step_ends.join()
    assert not runner.world["lock"]
    assert not runner.world["wanted"]
    with runner.standing_still_within(1) as still:
        assert still
