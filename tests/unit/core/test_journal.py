"""The resident loop's journal: complete, in order, also when its ring has wrapped, and what a reader must not see."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.helpers.notices import ended_ops
from torchkv.bench.scale.loops import PAGE, Pair
from torchkv.core import journal
from torchkv.core.core import Core
from torchkv.core.loop.codes import FINISH, PHASES, START, VERBS
from torchkv.core.operations import Seen
from torchkv.observe.histogram import BOUNDS

SEND_LAYER, SEND_SLICE, FINISHED = (VERBS.index(verb) for verb in ("send_layer", "send_slice", "finish"))
SIZE = 8


def read(core: Core) -> list[Seen]:
    """What the journal has; whatever it has is in order and makes sense."""
    seen = core.operations.read()
    assert [each.number for each in seen] == list(range(seen[0].number, seen[-1].number + 1) if seen else ())
    assert all(before.began <= after.began for before, after in itertools.pairwise(seen))
    assert all(each.ended is None or each.ended >= each.began for each in seen)
    return seen


def test_what_an_operation_says() -> None:
    pair = Pair(recorded=SIZE)
    send = pair.send(pair.receive(3), [6, 1, 4], serial=77)
    pair.start(send, [2, 7, 0], layers=[0, 2], verb=SEND_SLICE)
    pair.start(send, [2, 7, 0], layers=[1])  # not to be recorded
    assert pair.writer.operations.read() == []
    assert [kind for kind, _ in pair.writer.operations.unbegun()] == [START, START]
    pair.writer.sends.finish(send, 3, b"", FINISHED)
    pair.writer.runner.step()
    assert pair.writer.operations.unbegun() == []
    pair.run()
    sent, finished = read(pair.writer)
    assert (sent.verb, sent.serial, sent.first, sent.last, sent.layers, sent.pages) == ("send_slice", 77, 0, 2, 2, 3)
    assert sent.nbytes == 2 * 3 * PAGE
    assert (finished.verb, finished.serial, finished.layers, finished.nbytes) == ("finish", 77, 0, 0)
    assert sent.ended is not None
    assert finished.ended is not None
    counts = {phase: sum(each.counts) for phase, each in pair.writer.operations.phases().items()}
    assert counts == {"grant": 0, "send": 1, "verdict": 1, "receive": 0}


def test_a_receive_and_a_grant_that_the_loop_binds() -> None:
    pair = Pair(recorded=SIZE)
    send = pair.wait()
    pair.writer.world["sends"][send]["serial"] = 5
    pair.start(send, [1, 2], verb=SEND_LAYER)
    assert pair.writer.runner.step() | True
    (waiting,) = read(pair.writer)
    assert waiting.ended is None
    flow = pair.receive(2)
    pair.writer.sends.finish(send, 2, b"")
    pair.grant(flow, [3, 4], serial=9)
    pair.run()
    (sent,) = read(pair.writer)
    assert sent.ended is not None
    (received,) = read(pair.reader)
    assert (received.verb, received.serial, received.pages, received.nbytes) == ("recv_pages", 9, 2, 2 * 3 * PAGE)
    assert received.ended is not None
    assert sum(pair.writer.operations.phases()["grant"].counts) == 1
    assert sum(pair.reader.operations.phases()["receive"].counts) == 1


@pytest.mark.parametrize("seed", range(30))
def test_all_are_there_in_order_until_newer_ones_take_their_place(seed: int) -> None:
    """Ops of several requests, with little room and small turns: every one that has ended says so, and no other."""
    dice = random.Random(seed)
    pair = Pair(layers=4, turn=dice.choice([1, 600, 1 << 20]), window=dice.choice([3, 256]), recorded=SIZE)
    sends = [pair.send(pair.receive(4, generation=g), range(4), generation=g, serial=g) for g in (1, 2, 3)]
    begun: list[tuple[int, int, int]] = []
    open_ops: dict[int, int] = {}  # the op's index -> its number
    for number in range(1, dice.randrange(2 * SIZE, 5 * SIZE)):
        which, layer = dice.randrange(3), dice.randrange(4)
        index = pair.start(sends[which], [1, 5], start=dice.randrange(3), layers=[layer], verb=SEND_LAYER)
        open_ops[index] = number
        begun.append((number, which + 1, layer))
        for core in dice.sample([pair.writer, pair.reader], dice.randrange(3)):
            core.runner.step()
        _check(pair, begun, open_ops)
    pair_done = False
    while not pair_done:
        pair_done = not (pair.writer.runner.step() | pair.reader.runner.step())
        _check(pair, begun, open_ops)
    assert not open_ops
    seen = read(pair.writer)
    assert [(each.number, each.serial, each.first) for each in seen] == begun[-SIZE:]
    assert all(each.ended is not None and each.nbytes == 2 * PAGE for each in seen)


def _check(pair: Pair, begun: list[tuple[int, int, int]], open_ops: dict[int, int]) -> None:
    unbegun = {index for kind, index in pair.writer.operations.unbegun() if kind == START}
    for index in ended_ops(pair.writer.events.take()):
        pair.writer.sends.op_results([index])
        del open_ops[index]
    seen = {each.number: each for each in read(pair.writer)}
    taken = [number for number, _, _ in begun if number not in {open_ops[index] for index in unbegun}]
    assert sorted(seen) == taken[-SIZE:]
    for number, each in seen.items():
        assert (each.ended is None) == (number in open_ops.values())


def test_what_python_takes_back_or_the_loop_writes_at_this_moment_is_not_seen() -> None:
    pair = Pair(recorded=SIZE)
    send = pair.send(pair.receive(1), [6], serial=1)
    first, second = (pair.start(send, [2], layers=[layer], verb=SEND_LAYER) for layer in (0, 1))
    with pair.writer.runner.standing_still():
        pair.writer.settle()
    assert [pair.writer.operations.of_op(index) for index in (first, second)] == [1, 2]
    pair.writer.operations.hand_over(1)
    pair.writer.operations.hand_over(0)
    assert [each.number for each in pair.writer.operations.read()] == [2]
    pair.writer.runner.operations[2 % SIZE, 0] = 0
    assert pair.writer.operations.read() == []


def test_a_loop_without_a_journal_records_nothing() -> None:
    pair = Pair()
    send = pair.send(pair.receive(1), [6], serial=1)
    pair.start(send, [2], verb=SEND_LAYER)
    pair.writer.sends.finish(send, 1, b"", FINISHED)
    pair.run()
    assert pair.writer.operations.read() == []
    assert not any(sum(each.counts) for each in pair.writer.operations.phases().values())
    assert not any(kind == FINISH for kind, _ in pair.writer.operations.unbegun())


@pytest.mark.parametrize("nanoseconds", [0, 10_000, 10_001, 50_000_000_000, 50_000_000_001, 1 << 60])
def test_durations_are_counted_as_histograms_count_them(nanoseconds: int) -> None:
    core = Core(0, recorded=1)
    journal.took(core.world, 1, nanoseconds)
    histogram = core.operations.phases()[PHASES[1]]
    expected = next((at for at, bound in enumerate(BOUNDS) if nanoseconds <= round(bound * 1e9)), len(BOUNDS))
    assert [at for at, count in enumerate(histogram.counts) if count] == [expected]
    assert histogram.total == pytest.approx(nanoseconds / 1e9)


def test_a_loop_that_hangs_is_not_waited_for() -> None:
    core = Core(0, recorded=1)
    with core.runner.standing_still_within(10) as still:
        assert still
        with core.runner.standing_still_within(0) as again:
            assert again
        with core.runner.standing_still():
            pass
        assert core.world["lock"]
    assert not core.world["lock"]
    core.world["lock"] = 1  # as a loop in the middle of its step
    with core.runner.standing_still_within(0.01) as still:
        assert not still
    assert core.world["lock"]
    assert not core.world["wanted"]
