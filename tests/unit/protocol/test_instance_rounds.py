"""The leader of an instance and the resident loop: which rounds it hands over, and when it takes them back."""

from __future__ import annotations

import pytest

from tests.helpers.protocol import GRANT_TIMEOUT, Acts, group_map
from tests.helpers.references.page_transfer import gqa
from torchkv.protocol.instance import InstanceLeader, Part
from torchkv.protocol.messages import InstanceVerdict, Outcome, Post, name_hashes

PAGE = 4
KEY = name_hashes("r")


class Loop:
    """The loop's side of `InstanceRounds`. decides: whether a round that is taken back has succeeded; None: is over."""

    def __init__(self, machine: InstanceLeader) -> None:
        self.machine = machine
        self.open: dict[int, list[tuple[int, int, int, bool]]] = {}
        self.done: set[tuple[int, int, int]] = set()
        self.late: list[tuple[int, Part, int]] = []  # posts by records that `settle` finds
        self.full = False
        self.decides: bool | None = False
        self.opened = 0

    def settle(self) -> None:
        while self.late:
            rank, part, told = self.late.pop(0)
            self.machine.posted(rank, KEY, part, told=told, now=0.0)

    def open_round(self, members: list[tuple[int, int, int, bool]]) -> int | None:
        if self.full:
            return None
        self.opened += 1
        self.open[self.opened] = members
        return self.opened

    def take_back_round(self, index: int) -> bool | None:
        del self.open[index]
        if self.decides is None:
            self.machine.round_over(index, 0.0)
        return self.decides

    def is_done(self, rank: int, flow: int, generation: int) -> bool:
        return (rank, flow, generation) in self.done


def leader(size: int = 2) -> tuple[InstanceLeader, Loop]:
    """A leader whose instance is ranks 0 .. size-1; the rank after them writes to them."""
    places = [("d", gqa(r, 4)) for r in range(size)]
    machine = InstanceLeader(group_map(0, *places, ("p", gqa())), grant_timeout=GRANT_TIMEOUT)
    machine.flows = loop = Loop(machine)
    return machine, loop


def part(generation: int, *, flow: int | None = 7, prefix: int = 0, tokens: int = 8) -> Part:
    return Part(generation, prefix, tokens, PAGE, flow)


def join(machine: InstanceLeader, rank: int, generation: int, *, told: int = 0, prefix: int = 0) -> None:
    machine.posted(rank, KEY, part(generation, prefix=prefix), told=told, now=0.0)


def outcome(machine: InstanceLeader, rank: int, generation: int, kind: str = "") -> None:
    machine.on_outcome(rank, Outcome("r", generation, kind, "it says"), 0.0)


def verdicts(machine: InstanceLeader) -> dict[tuple[int, int], str]:
    return {(rank, verdict.generation): verdict.kind for rank, verdict in Acts(machine).tells(InstanceVerdict)}


def test_a_round_is_handed_over_when_all_have_joined() -> None:
    machine, loop = leader(3)
    machine.on_post(0, Post("r", 4, 0, 8, PAGE, 2), 0.0)
    join(machine, 1, 9)
    assert loop.open == {}
    join(machine, 2, 1)
    assert loop.open == {1: [(0, 2, 4, False), (1, 7, 9, False), (2, 7, 1, False)]}
    machine.round_over(1, 0.0)
    assert verdicts(machine) == {}
    assert machine._requests == machine._parts == machine._on_loop == {}


def test_a_part_without_a_flow_keeps_the_round_in_python() -> None:
    machine, loop = leader()
    join(machine, 1, 9)
    machine.on_post(0, Post("r", 4, 0, 8, PAGE), 0.0)
    assert loop.open == {}
    machine.done(1, 9, 0.0)
    outcome(machine, 0, 4)
    assert verdicts(machine) == {(0, 4): "", (1, 9): ""}


def test_a_loop_without_room_leaves_the_round_in_python() -> None:
    machine, loop = leader()
    loop.full = True
    join(machine, 0, 4)
    join(machine, 1, 9)
    machine.done(0, 4, 0.0)
    loop.done.add((1, 7, 9))
    assert verdicts(machine) == {}
    machine.done(1, 9, 0.0)
    assert verdicts(machine) == {(0, 4): "", (1, 9): ""}


def test_what_the_loop_knows_to_be_complete_is_told_when_the_round_is_handed_over() -> None:
    machine, loop = leader()
    loop.done.add((1, 7, 9))
    join(machine, 1, 9)
    join(machine, 0, 4)
    assert loop.open == {1: [(0, 7, 4, False), (1, 7, 9, True)]}


@pytest.mark.parametrize("cause", ["failed", "lost", "timeout"])
def test_trouble_takes_the_round_back_and_fails_it(cause: str) -> None:
    machine, loop = leader()
    join(machine, 0, 4)
    join(machine, 1, 9)
    loop.done.add((1, 7, 9))
    if cause == "failed":
        outcome(machine, 0, 4, "TransferCancelled")
        assert verdicts(machine) == {(1, 9): "TransferCancelled"}
    elif cause == "lost":
        machine.peer_lost(0, 0.0)
        assert verdicts(machine) == {(0, 4): "PeerLost", (1, 9): "PeerLost"}
    else:
        machine.tick(1.0)
        machine.tick(1.0 + GRANT_TIMEOUT - 0.01)
        assert loop.open
        machine.tick(1.0 + GRANT_TIMEOUT)
        assert verdicts(machine) == {(0, 4): "TransferTimeout", (1, 9): "TransferTimeout"}
    assert loop.open == {}
    assert machine._requests == machine._parts == machine._on_loop == {}


@pytest.mark.parametrize("decides", [True, None])
def test_trouble_that_comes_too_late_changes_nothing(decides: bool | None) -> None:
    """The loop has decided: those that it has not told are told, and the same."""
    machine, loop = leader()
    join(machine, 0, 4)
    join(machine, 1, 9)
    loop.decides = decides
    outcome(machine, 1, 9, "TransferCancelled")
    assert verdicts(machine) == ({(0, 4): "", (1, 9): ""} if decides else {})
    assert machine._requests == machine._parts == machine._on_loop == {}


def test_a_part_that_python_has_completed_goes_back_to_the_loop() -> None:
    machine, loop = leader()
    join(machine, 0, 4)
    join(machine, 1, 9)
    outcome(machine, 1, 9)
    assert loop.open == {2: [(0, 7, 4, False), (1, 7, 9, True)]}


def test_a_record_waits_for_the_messages_that_were_sent_before_it() -> None:
    """Else the second call of rank 1 would be taken for its first, which was refused."""
    machine, loop = leader()
    join(machine, 0, 4)
    join(machine, 1, 9, told=1)
    join(machine, 1, 10, told=1)
    assert loop.open == {}
    outcome(machine, 1, 0, "PageOutOfRange")
    assert verdicts(machine) == {(0, 4): "PageOutOfRange"}
    join(machine, 0, 5)
    assert loop.open == {1: [(0, 7, 5, False), (1, 7, 9, False)]}


def test_a_message_waits_for_the_records_that_were_sent_before_it() -> None:
    machine, loop = leader()
    loop.late.append((1, part(9), 0))
    join(machine, 0, 4)
    machine.on_post(1, Post("r", 10, 0, 8, PAGE, 3), 0.0)
    assert loop.open == {1: [(0, 7, 4, False), (1, 7, 9, False)]}
    assert [each.generation for each in machine._requests[KEY].parts[1]] == [9, 10]


def test_posts_that_disagree_are_not_handed_over() -> None:
    machine, loop = leader()
    join(machine, 0, 4, prefix=4)
    join(machine, 1, 9)
    assert loop.opened == 0
    assert set(verdicts(machine).values()) == {"ProtocolError"}


def test_records_of_strangers_are_ignored() -> None:
    machine, loop = leader()
    join(machine, 2, 9)
    machine.done(2, 9, 0.0)
    machine.done(1, 9, 0.0)
    assert machine._requests == {}
    assert loop.opened == 0
