"""The ring allocator against a map of cells, and the bugs by which other systems' rings got stuck."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.examples import examples
from torchkv.layout.stage_format import ALIGNMENT
from torchkv.protocol.receiving.stage_allocator import Stage, StagingRing

UNIT = 8


def taken(ring: StagingRing, nbytes: int, owner: object = None) -> Stage:
    stage = ring.allocate(nbytes, owner)
    assert stage is not None, f"{nbytes} bytes do not fit: {ring.stages}"
    return stage


class CellMap:
    """A model of the ring: one flag per unit, searched one by one."""

    def __init__(self, cells: int) -> None:
        self.free = [True] * cells
        self.cursor = 0

    def allocate(self, nbytes: int) -> int | None:
        size = (nbytes + UNIT - 1) // UNIT
        for cell in [*range(self.cursor, len(self.free)), *range(self.cursor)]:
            if cell + size <= len(self.free) and all(self.free[cell : cell + size]):
                self.free[cell : cell + size] = [False] * size
                self.cursor = cell + size
                return cell * UNIT
        return None

    def release(self, stage: Stage) -> None:
        for cell in range(stage.offset // UNIT, (stage.offset + stage.nbytes) // UNIT):
            assert not self.free[cell]
            self.free[cell] = True
        if all(self.free):
            self.cursor = 0


def longest(flags: list[bool]) -> int:
    """The longest run of true flags, in bytes."""
    return max(len(run) for run in "".join("x" if flag else " " for flag in flags).split(" ")) * UNIT


@given(st.integers(0, 24), st.lists(st.tuples(st.integers(0, 5), st.integers(1, 200)), max_size=60))
@settings(max_examples=examples(500), deadline=None)
def test_the_ring_is_a_map_of_cells(cells: int, actions: list[tuple[int, int]]) -> None:
    ring = StagingRing(cells * UNIT + UNIT - 1, alignment=UNIT)
    assert ring.capacity == cells * UNIT
    model, live, held = CellMap(cells), list[Stage](), set[Stage]()
    for action, number in actions:
        if action <= 2:
            stage = ring.allocate(number, number)
            offset = model.allocate(number)
            assert (stage and stage.offset) == offset
            if stage is not None:
                assert stage.nbytes == -(-number // UNIT) * UNIT
                live.append(stage)
        elif live and action <= 4:
            stage = live.pop(number % len(live))
            ring.release(stage)
            model.release(stage)
            held.discard(stage)
        elif live:
            ring.quarantine(live[number % len(live)])
            held.add(live[number % len(live)])
        assert ring.in_use == model.free.count(False) * UNIT
        assert ring.quarantined == sum(stage.nbytes for stage in held)
        assert ring.stages == tuple(live)
        blocked = {at for stage in held for at in range(stage.offset, stage.offset + stage.nbytes, UNIT)}
        assert ring.largest_possible == (longest([at * UNIT not in blocked for at in range(cells)]) if cells else 0)
    for stage in live:
        ring.release(stage)
    assert (ring.in_use, ring.quarantined, ring.largest_possible, ring.stages) == (0, 0, ring.capacity, ())
    if cells:
        assert taken(ring, ring.capacity).offset == 0


def test_a_stage_knows_its_owner_and_is_aligned() -> None:
    ring = StagingRing(10 * ALIGNMENT)
    first, second = taken(ring, 1, ("rank", 3)), taken(ring, ALIGNMENT + 1, "other")
    assert (first.offset, first.nbytes, first.owner) == (0, ALIGNMENT, ("rank", 3))
    assert (second.offset, second.nbytes, second.owner) == (ALIGNMENT, 2 * ALIGNMENT, "other")


def test_an_emptied_ring_that_wraps_is_writable() -> None:
    """sglang#37166: 60 of 100, freed, then 70, which has to wrap: with a FIFO watermark that waited for ever."""
    ring = StagingRing(100, alignment=1)
    ring.release(taken(ring, 60))
    assert taken(ring, 70).offset == 0


@pytest.mark.parametrize("share", [0.5, 0.6, 1.0])
def test_an_emptied_ring_takes_any_stage_that_fits(share: float) -> None:
    """sglang#37166 again: stages larger than half of the ring got stuck."""
    chance = random.Random()
    ring = StagingRing(1000, alignment=1)
    for _ in range(500):
        stages = [taken(ring, chance.randint(1, int(1000 * share)))]
        while (stage := ring.allocate(chance.randint(1, int(1000 * share)), None)) is not None:
            stages.append(stage)
        chance.shuffle(stages)
        for stage in stages:
            ring.release(stage)


def test_a_leaked_stage_costs_its_own_bytes_only() -> None:
    """sglang#31217: one stage that was leaked on abort pinned the ring for every peer."""
    ring = StagingRing(100, alignment=1)
    taken(ring, 30)
    leaked = taken(ring, 10)
    ring.release(ring.stages[0])
    offsets = []
    for _ in range(50):
        stage = taken(ring, 30)
        offsets.append(stage.offset)
        ring.release(stage)
    assert offsets[:4] == [40, 70, 0, 40], "allocation goes round the ring, past the leaked stage"
    assert ring.stages == (leaked,)


def test_stages_given_back_out_of_order_are_one_span_again() -> None:
    ring = StagingRing(100, alignment=10)
    stages = [taken(ring, 20) for _ in range(5)]
    assert ring.allocate(1, None) is None
    for index in (1, 3, 0, 4):
        ring.release(stages[index])
    assert ring.allocate(50, None) is None
    ring.release(stages[2])
    assert taken(ring, 100).offset == 0


def test_a_stage_never_straddles_the_end() -> None:
    ring = StagingRing(100, alignment=1)
    first, _ = taken(ring, 40), taken(ring, 40)
    ring.release(first)
    assert ring.allocate(41, None) is None, "20 bytes at the end and 40 at the start are not 60 in one piece"
    assert taken(ring, 40).offset == 0


def test_what_is_larger_than_the_ring_never_fits() -> None:
    ring = StagingRing(1000, alignment=256)
    assert ring.capacity == 768
    assert ring.allocate(769, None) is None
    assert taken(ring, 768).nbytes == 768
    nothing = StagingRing(255, alignment=256)
    assert (nothing.capacity, nothing.largest_possible) == (0, 0)
    assert nothing.allocate(1, None) is None


def test_a_quarantined_stage_stays_taken_and_out_of_the_room() -> None:
    ring = StagingRing(100, alignment=10)
    stages = [taken(ring, 10) for _ in range(4)]
    ring.quarantine(stages[3])
    ring.quarantine(stages[3])
    assert (ring.largest_possible, ring.quarantined, ring.in_use) == (60, 10, 40)
    for stage in stages[:3]:
        ring.release(stage)
    assert ring.allocate(70, None) is None
    assert taken(ring, 60).offset == 40
    ring.release(stages[3])
    assert (ring.largest_possible, ring.quarantined) == (100, 0)
    assert taken(ring, 40).offset == 0


def test_a_stage_is_given_back_once() -> None:
    ring = StagingRing(100, alignment=10)
    stage = taken(ring, 10)
    ring.release(stage)
    for again in (ring.release, ring.quarantine):
        with pytest.raises(AssertionError, match="not taken"):
            again(stage)
    ring.release(taken(ring, 100))
    taken(ring, 10)
    with pytest.raises(AssertionError, match="not taken"):
        ring.release(Stage(0, 10, None))
