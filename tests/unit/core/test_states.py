"""States between two loops without threads: behind the layers of a plan, from slot to slot. And hostile words."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import pytest

from tests.helpers.notices import kinds
from tests.helpers.records import tell
from torchkv.bench.scale.loops import PAGE, TOKENS, Pair
from torchkv.core.core import Core
from torchkv.core.loop.codes import (
    ALL_HERE,
    ALONE,
    BOUND,
    GRANTED,
    OP_DONE,
    OUTSIDE,
    RECEIVED,
    SEAL,
    SENT,
    STRAY,
    WAITING,
    WRITTEN,
)
from torchkv.core.loop.grants import IDS_AT
from torchkv.core.loop.state.peers import Grant
from torchkv.core.way import Way
from torchkv.protocol.messages import name_hashes
from torchkv.transfer.loop_geometry import COPIED

LAYERS, STATES, SLOTS = 3, 2, 4
SLOT = 40  # bytes
STATE_POSITIONS = range(LAYERS, LAYERS + STATES)


@dataclass
class Hybrid:
    """`Pair`, with states in some layers."""

    pair: Pair
    src: np.ndarray
    dst: np.ndarray
    way: Way

    @property
    def writer(self) -> Core:
        return self.pair.writer

    @property
    def reader(self) -> Core:
        return self.pair.reader

    def receive(self, pages: int) -> int:
        flow = self.reader.receives.reserve()
        assert flow is not None
        owed = [(0, LAYERS, STATES, TOKENS)]
        about = {"generation": 1, "num_tokens": pages * TOKENS, "page_size": TOKENS, "leader": ALONE}
        self.reader.receives.open(flow, **about, writers=owed)
        return flow

    def grant(self, flow: int, pages: list[int], slot: int | None) -> None:
        ids = np.array(pages, dtype=np.int64)
        self.reader.receives.grant(flow, b"name", name_hashes("name"), ids, prefix_tokens=0, writers=1, slot=slot)

    def wait(self) -> int:
        flow = self.writer.sends.wait_for_grant(self.way, hashes=name_hashes("name"), writers=1)
        assert flow is not None
        return flow

    def start_states(self, flow: int, slot: int, positions: range = STATE_POSITIONS) -> int:
        where = np.array(positions, dtype=np.int64)
        index = self.writer.sends.start_op(flow, where, np.array([slot], dtype=np.int64), 0, of_state=True)
        assert index is not None
        return index

    def check(self, pages: tuple[list[int], list[int]], slots: tuple[int, int] | None) -> None:
        """Everything else is as it was. pages, slots: here and there."""
        expected = np.full_like(self.pair.dst, 0xAB)
        expected[:, pages[1]] = self.pair.src[:, pages[0]]
        assert (self.pair.dst == expected).all()
        states = np.full_like(self.dst, 0xAB)
        if slots is not None:
            states[:, slots[1]] = self.src[:, slots[0]]
        assert (self.dst == states).all()


def hybrid(max_slot: int = SLOTS) -> Hybrid:
    pair = Pair(layers=LAYERS)
    src = np.random.default_rng().integers(0, 256, (STATES, SLOTS, SLOT), dtype=np.uint8)
    dst = np.full_like(src, 0xAB)
    first, words = LAYERS + STATES, pair.geometry[LAYERS + 2 :].tolist()
    for ours, theirs in zip(src, dst, strict=True):
        words += [ours.ctypes.data, theirs.ctypes.data, SLOT, SLOT, 0, 0, 0, 0]
        words += [1, 0, 0, 1, 0, 0, SLOT, 1, 1, 1, 0, -1, 1, 1, 1, *COPIED]
    pair.geometry = np.array([first, *range(first + 1), *words], dtype=np.int64)
    return Hybrid(pair, src, dst, pair.way(max_slot=max_slot))


@pytest.mark.parametrize("granted_first", [False, True])
def test_pages_and_states_of_a_request_that_waits(granted_first: bool) -> None:
    world = hybrid()
    flow, send = world.receive(3), world.wait()
    if granted_first:
        world.grant(flow, [6, 1, 4], 3)
        assert kinds(world.pair.run()[0]) == [BOUND]
    ops = [world.start_states(send, 2), world.pair.start(send, [2, 7, 0])]
    world.writer.sends.finish(send, 3, b"aux")
    if not granted_first:
        assert world.pair.run() == ([], [])
        world.grant(flow, [6, 1, 4], 3)
    told, heard = world.pair.run()
    assert kinds(told) == ([] if granted_first else [BOUND]) + [OP_DONE, OP_DONE, SENT]
    assert kinds(heard) == [RECEIVED]
    assert world.writer.sends.op_results(ops) == ([STATES * SLOT, LAYERS * 3 * PAGE], STATES + LAYERS * 3)
    assert world.writer.sends.bound(send)[3].tolist() == [6, 1, 4]
    assert world.writer.sends.bound(send)[4] == 3
    world.check(([2, 7, 0], [6, 1, 4]), (2, 3))


@pytest.mark.parametrize("waits", [False, True])
def test_states_alone(waits: bool) -> None:
    """Of a request whose pages the receiver holds already: its grant has none."""
    world = hybrid()
    flow = world.receive(0)
    none = np.zeros(0, dtype=np.int64)
    if waits:
        send: int | None = world.wait()
        world.grant(flow, [], 1)
    else:
        send = world.writer.sends.open(world.way, peer_flow=flow, generation=1, pages=none, slot=1)
    assert send is not None
    world.start_states(send, 0)
    world.writer.sends.finish(send, 0, b"")
    told, heard = world.pair.run()
    assert kinds(told)[-2:] == [OP_DONE, SENT]
    assert kinds(heard) == [RECEIVED]
    world.check(([], []), (0, 1))


def test_a_page_outside_a_grant_of_state_alone() -> None:
    world = hybrid()
    send = world.writer.sends.open(
        world.way, peer_flow=world.receive(0), generation=1, pages=np.zeros(0, dtype=np.int64), slot=1
    )
    assert send is not None
    world.pair.start(send, [5])
    assert OUTSIDE in kinds(world.pair.run()[0])
    world.check(([], []), None)


def test_a_seal_does_not_do_for_a_state() -> None:
    """A writer that seals without one of its states: Python is told that all is here, and finds that it is not."""
    world = hybrid()
    flow = world.receive(3)
    about = {"flows": flow, "generation": 1}
    tell(world.pair.writer, 1, head=WRITTEN | LAYERS << 32, lo=0, hi=3 * TOKENS, nbytes=9, **about)
    tell(world.pair.writer, 1, head=WRITTEN | LAYERS << 8 | (LAYERS + 1) << 32, lo=0, hi=1, nbytes=9, **about)
    tell(world.pair.writer, 1, head=SEAL, lo=3, **about)
    assert kinds(world.pair.run()[1]) == [ALL_HERE]
    state = world.reader.receives.state(flow).writers[0]
    assert state.intervals == [[(0, 3 * TOKENS)]] * LAYERS
    assert state.states == [True, False]


@pytest.mark.parametrize("pages", [1, -1, 1 << 60])
def test_a_seal_of_pages_that_were_not_granted(pages: int) -> None:
    world = hybrid()
    flow = world.receive(0)
    about = {"flows": flow, "generation": 1}
    tell(world.pair.writer, 1, head=WRITTEN | LAYERS << 8 | (LAYERS + STATES) << 32, lo=0, hi=1, **about)
    tell(world.pair.writer, 1, head=SEAL, lo=pages, **about)
    assert kinds(world.pair.run()[1]) == [STRAY]


@pytest.mark.parametrize(
    "lie",
    [
        {"head": WRITTEN | LAYERS << 8 | (LAYERS + STATES + 1) << 32, "hi": 1},
        {"head": WRITTEN | LAYERS << 8 | (LAYERS + STATES) << 32, "lo": -1, "hi": 1},
        {"head": WRITTEN | LAYERS << 8 | (LAYERS + STATES) << 32, "hi": 1, "nbytes": -1},
    ],
)
def test_records_that_lie_are_left_to_python(lie: dict[str, int]) -> None:
    world = hybrid()
    flow = world.receive(3)
    tell(world.pair.writer, 1, **{"flows": flow, "generation": 1, **lie})
    assert kinds(world.pair.run()[1]) == [STRAY]
    assert world.reader.receives.state(flow).writers[0].states == [False] * STATES


@pytest.mark.parametrize("slot", [-1, SLOTS, 1 << 62, None])
def test_a_grant_of_a_slot_that_there_is_not(slot: int | None) -> None:
    world = hybrid()
    flow, send = world.receive(2), world.wait()
    world.start_states(send, 0)
    world.grant(flow, [1, 4], slot)
    assert kinds(world.pair.run()[0]) == [GRANTED]
    assert world.writer.world["sends"][send]["state"] == WAITING
    body = world.writer.peers.granted(1, flow, 1)
    assert body is not None
    assert (body.pages.tolist(), body.state_slot) == ([1, 4], slot)
    world.check(([], []), None)


@pytest.mark.parametrize("num_slots", [-1, 2, 1 << 62])
def test_a_grant_of_a_number_of_slots_that_there_is_not(num_slots: int) -> None:
    world = hybrid()
    flow = world.receive(2)
    world.wait()
    world.grant(flow, [1, 4], 0)
    body = world.reader.peers.name_grant(flow, b"name")
    words = np.ctypeslib.as_array((ctypes.c_int64 * (IDS_AT // 8)).from_address(body))
    words[list(Grant.__annotations__).index("num_slots")] = num_slots
    assert kinds(world.pair.run()[0]) == [GRANTED]
    assert world.writer.peers.granted(1, flow, 1) is None


def test_a_slot_that_is_not_needed_is_no_hindrance() -> None:
    """To a writer that owes no state: another one does."""
    world = hybrid(max_slot=0)
    flow = world.pair.receive(2)
    send = world.wait()
    world.grant(flow, [1, 4], 2)
    assert kinds(world.pair.run()[0]) == [BOUND]
    world.pair.start(send, [0, 3])
    world.writer.sends.finish(send, 2, b"")
    assert kinds(world.pair.run()[1]) == [RECEIVED]
    world.check(([0, 3], [1, 4]), None)
