"""Rounds of an instance between loops without threads: rank 1 leads, rank 2 is of its instance, rank 0 writes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.records import tell
from torchkv.core.core import Core
from torchkv.core.events import Notice
from torchkv.core.loop.codes import AUX, DECIDED, DONE, POSTED, RECEIVED, ROUND_OVER, SEAL, STRAY, VERDICT, WRITTEN
from torchkv.core.loop.limits import MAX_FLOWS
from torchkv.protocol.messages import name_hashes

WRITER, LEADER, MEMBER = range(3)
TOKENS = 16


class Instance:
    """The writer's records are made by hand."""

    def __init__(self) -> None:
        self.cores = [Core(rank) for rank in range(3)]
        for core in self.cores:
            for other in self.cores:
                if other is not core:
                    core.peers.connect(other.rank, other.peers.descriptor())

    def receive(self, rank: int, *, generation: int = 1, told: int = 0) -> int:
        flow = self.cores[rank].receives.reserve()
        assert flow is not None
        sides = [(WRITER, 1, 0, TOKENS)]
        self.cores[rank].receives.open(
            flow, generation=generation, num_tokens=TOKENS, page_size=TOKENS, leader=LEADER, told=told, writers=sides
        )
        return flow

    def grant(self, rank: int, flow: int, *, prefix_tokens: int = 0) -> None:
        pages = np.array([3], dtype=np.int64)
        receives, hashes = self.cores[rank].receives, name_hashes("name")
        receives.grant(flow, b"name", hashes, pages, prefix_tokens=prefix_tokens, writers=1)

    def complete(self, rank: int, flow: int, *, generation: int = 1) -> None:
        """The writer's bytes for this receive arrive, and its seal."""
        self.tell(WRITER, rank, head=WRITTEN | 1 << 32, flows=flow, generation=generation, hi=TOKENS, nbytes=8)
        self.tell(WRITER, rank, head=SEAL, flows=flow, generation=generation, lo=1)

    def tell(self, source: int, rank: int, **words: int) -> None:
        """A record of one rank to another, whatever it says."""
        tell(self.cores[source], rank, **words)

    def run(self) -> list[list[tuple[int, int]]]:
        """Steps until nothing is left to do. What each rank tells: kinds of events, and of their records if strayed."""
        while any(core.runner.step() for core in self.cores):
            pass
        return [[_seen(notice) for notice in core.events.take()] for core in self.cores]

    def open_round(self, *parts: tuple[int, int, int, bool]) -> int:
        index = self.cores[LEADER].rounds.open(list(parts))
        assert index is not None
        return index


def _seen(notice: Notice) -> tuple[int, int]:
    return notice.kind, notice.words[0] & 0xFF if notice.kind == STRAY else 0


RECEIVED_, OVER, VERDICT_ = (RECEIVED, 0), (ROUND_OVER, 0), (STRAY, VERDICT)


@pytest.mark.parametrize("opened", ["before", "between", "after"])
def test_all_succeed_once_the_last_part_is_complete(opened: str) -> None:
    """And not before, whenever the leader's Python comes to open the round."""
    instance = Instance()
    flows = {rank: instance.receive(rank, generation=rank) for rank in (LEADER, MEMBER)}
    members = [(rank, flow, rank, False) for rank, flow in flows.items()]
    dice = np.random.default_rng()
    order = dice.permutation(list(flows))
    told: list[list[tuple[int, int]]] = [[], [], []]
    if opened == "before":
        index = instance.open_round(*members)
    for rank in order:
        assert told == [[], [], []]
        instance.complete(rank, flows[rank], generation=rank)
        told = instance.run()
        if opened == "before" and rank == order[0]:
            assert told == [[], [], []]
        if opened == "between" and rank == order[0]:
            index = instance.open_round(*members)
        if opened == "after" or (opened == "between" and rank == order[0]):
            assert told == [[], [(STRAY, DONE)], []]  # Python is told, and may forget it
            told = [[], [], []]
    if opened == "after":
        index = instance.open_round(*members)
        told = instance.run()
    assert told[WRITER] == [VERDICT_, VERDICT_]
    assert sorted(told[LEADER]) == sorted([RECEIVED_, OVER])
    assert told[MEMBER] == [RECEIVED_]
    instance.cores[LEADER].rounds.end(index)
    assert instance.open_round(*members) == index


def test_a_part_of_which_only_python_knows_counts() -> None:
    instance = Instance()
    flow = instance.receive(LEADER)
    instance.open_round((LEADER, flow, 1, False), (MEMBER, 7, 4, True))
    instance.complete(LEADER, flow)
    told = instance.run()
    assert sorted(told[LEADER]) == sorted([RECEIVED_, OVER])
    assert told[MEMBER] == [(STRAY, DECIDED)]  # for its Python, which serves the request


def test_a_round_that_was_taken_back_decides_nothing() -> None:
    instance = Instance()
    leader = instance.cores[LEADER]
    flows = {rank: instance.receive(rank) for rank in (LEADER, MEMBER)}
    members = [(rank, flow, 1, False) for rank, flow in flows.items()]
    index = instance.open_round(*members)
    instance.complete(LEADER, flows[LEADER])
    assert instance.run() == [[], [], []]
    with leader.runner.standing_still():
        leader.settle()
        assert leader.rounds.take_back(index) is False
    instance.complete(MEMBER, flows[MEMBER])
    assert instance.run() == [[], [(STRAY, DONE)], []]
    assert all(leader.rounds.is_done(rank, flows[rank], 1) for rank in flows)
    assert not leader.rounds.is_done(MEMBER, flows[MEMBER], 2)
    instance.open_round(*members)  # and may be handed over again
    assert instance.run()[MEMBER] == [RECEIVED_]


def test_a_decision_that_finds_no_room_may_be_taken_back_as_a_success() -> None:
    instance = Instance()
    leader = instance.cores[LEADER]
    flow = instance.receive(LEADER)
    index = instance.open_round((LEADER, flow, 1, False), (MEMBER, 7, 4, True))
    leader.world["window"] = 0
    instance.complete(LEADER, flow)
    assert instance.run()[LEADER] == [RECEIVED_]
    with leader.runner.standing_still():
        leader.settle()
        assert leader.rounds.take_back(index) is True
    leader.world["window"] = 8
    assert instance.run()[MEMBER] == []  # Python tells it


def test_what_a_rank_posts_reaches_the_leaders_python() -> None:
    instance = Instance()
    flow = instance.receive(MEMBER, generation=5, told=3)
    instance.grant(MEMBER, flow, prefix_tokens=32)
    while any(core.runner.step() for core in instance.cores):
        pass
    (notice,) = instance.cores[LEADER].events.take()
    head, flows, generation, hash0, hash1, prefix, pages = notice.words
    assert (notice.kind, notice.source, head, flows, generation) == (STRAY, MEMBER, POSTED | 3 << 8, flow, 5)
    assert ((hash0, hash1), prefix, pages) == (name_hashes("name"), 32, 1)


def test_what_the_leader_was_not_told_is_python_s_to_tell() -> None:
    instance = Instance()
    member = instance.cores[MEMBER]
    flow = instance.receive(MEMBER)
    member.world["window"] = 0
    instance.grant(MEMBER, flow)
    instance.run()
    with member.runner.standing_still():
        member.settle()
        assert member.receives.untold(flow) == ([WRITER], True)
        assert member.receives.untold(flow) == ([], False)
    member.world["window"] = 8
    assert instance.run() == [[], [], []]


def test_the_leader_posts_to_nobody() -> None:
    instance = Instance()
    instance.grant(LEADER, instance.receive(LEADER))
    told = instance.run()
    assert told[LEADER] == told[MEMBER] == []


@pytest.mark.parametrize(
    "lie",
    [
        {"head": DECIDED, "flows": MAX_FLOWS, "generation": 1},
        {"head": DECIDED, "flows": 0xFFFFFFFF, "generation": 1},
        {"head": DECIDED, "flows": 0, "generation": 2},
        {"head": DECIDED, "flows": 1, "generation": 1},
        {"head": DONE, "flows": MAX_FLOWS, "generation": 1},
        {"head": DONE, "flows": -1, "generation": 1},
    ],
)
@pytest.mark.parametrize("source", [WRITER, LEADER])
def test_lies_are_left_to_python(lie: dict[str, int], source: int) -> None:
    """Also if they name a receive that waits for the leader, by another generation."""
    instance = Instance()
    flow = instance.receive(MEMBER)
    assert flow == MAX_FLOWS - 1
    instance.complete(MEMBER, flow)
    instance.run()
    instance.tell(source, MEMBER, **lie)
    assert instance.run()[MEMBER] == [(STRAY, lie["head"])]


def test_only_the_leader_decides() -> None:
    instance = Instance()
    flow = instance.receive(MEMBER)
    instance.complete(MEMBER, flow)
    instance.run()
    instance.tell(WRITER, MEMBER, head=DECIDED, flows=flow, generation=1)
    assert instance.run()[MEMBER] == [(STRAY, DECIDED)]
    instance.tell(LEADER, MEMBER, head=DECIDED, flows=flow, generation=1)
    assert instance.run()[MEMBER] == [RECEIVED_]


def test_a_complete_receive_takes_no_more_bytes() -> None:
    """Whoever writes after its seal is judged by Python, which takes the request back."""
    instance = Instance()
    flow = instance.receive(MEMBER)
    instance.complete(MEMBER, flow)
    instance.run()
    for kind in (WRITTEN | 1 << 32, AUX | 4 << 8, SEAL):
        instance.tell(WRITER, MEMBER, head=kind, flows=flow, generation=1)
        assert instance.run()[MEMBER] == [(STRAY, kind & 0xFF)]
