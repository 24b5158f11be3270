"""The leader of an instance: its ranks succeed together or fail together."""

from __future__ import annotations

from tests.helpers.protocol import GRANT_TIMEOUT, Acts, group_map
from tests.helpers.references.page_transfer import gqa
from torchkv.protocol.instance import InstanceLeader
from torchkv.protocol.messages import (
    MAX_REQUEST_BYTES,
    ControlFrame,
    InstanceVerdict,
    Outcome,
    Post,
    decode_frame,
    encode_frame,
)

PAGE = 4


def leader(size: int = 2) -> InstanceLeader:
    """A leader whose instance is ranks 0 .. size-1; the rank after them writes to them."""
    places = [("d", gqa(r, 4)) for r in range(size)]
    return InstanceLeader(group_map(0, *places, ("p", gqa())), grant_timeout=GRANT_TIMEOUT)


def posted(
    machine: InstanceLeader,
    rank: int,
    generation: int,
    *,
    prefix: int = 0,
    tokens: int = 8,
    page: int = PAGE,
    now: float = 0.0,
) -> None:
    machine.on_post(rank, Post("r", generation, prefix, tokens, page), now)


def done(machine: InstanceLeader, rank: int, generation: int) -> None:
    machine.on_outcome(rank, Outcome("r", generation, "", ""), 0.0)


def failed(machine: InstanceLeader, rank: int, generation: int) -> None:
    machine.on_outcome(rank, Outcome("r", generation, "TransferCancelled", "was cancelled"), 0.0)


def verdicts(machine: InstanceLeader) -> dict[tuple[int, int], str]:
    """(rank, generation) -> kind of the verdict. Checks that each is told once."""
    told = Acts(machine).tells(InstanceVerdict)
    result = {(rank, verdict.generation): verdict.kind for rank, verdict in told}
    assert len(result) == len(told), "told twice"
    return result


def test_success_needs_everybody() -> None:
    machine = leader(3)
    for rank in range(3):
        posted(machine, rank, 10 + rank)
    done(machine, 0, 10)
    done(machine, 2, 12)
    assert verdicts(machine) == {}
    done(machine, 1, 11)
    assert verdicts(machine) == {(0, 10): "", (1, 11): "", (2, 12): ""}
    assert machine._requests == {}


def test_a_verdict_of_a_long_name_decodes() -> None:
    """Of the longest one, each character of which takes four in a message's text."""
    machine, name = leader(), "\x00" * MAX_REQUEST_BYTES
    machine.on_post(0, Post(name, 1, 0, 8, PAGE), 0.0)
    machine.on_outcome(0, Outcome(name, 1, "", ""), 0.0)
    machine.tick(GRANT_TIMEOUT)
    ((_, verdict),) = Acts(machine).tells(InstanceVerdict)
    assert verdict.kind == "TransferTimeout"
    frame = ControlFrame(0, 1, 1, 1, 0, verdict)
    assert decode_frame(encode_frame(frame, b"k" * 32), b"k" * 32) == frame


def test_a_rank_that_is_done_waits_for_one_that_has_not_posted() -> None:
    machine = leader()
    posted(machine, 0, 1)
    done(machine, 0, 1)
    assert verdicts(machine) == {}
    posted(machine, 1, 5)
    assert verdicts(machine) == {}
    done(machine, 1, 5)
    assert verdicts(machine) == {(0, 1): "", (1, 5): ""}


def test_one_failure_fails_all() -> None:
    machine = leader(3)
    for rank in range(3):
        posted(machine, rank, rank)
    done(machine, 1, 1)
    failed(machine, 2, 2)
    assert verdicts(machine) == {(0, 0): "TransferCancelled", (1, 1): "TransferCancelled"}


def test_a_straggler_learns_of_the_failure_when_it_posts() -> None:
    machine = leader()
    posted(machine, 0, 1)
    failed(machine, 0, 1)
    assert verdicts(machine) == {}
    posted(machine, 1, 4)
    assert verdicts(machine) == {(1, 4): "TransferCancelled"}
    assert machine._requests == {}


def test_the_failure_says_who_and_why() -> None:
    machine = leader()
    posted(machine, 0, 1)
    posted(machine, 1, 1)
    failed(machine, 1, 1)
    ((_, verdict),) = Acts(machine).tells(InstanceVerdict)
    assert "rank 1" in verdict.text
    assert "was cancelled" in verdict.text


def test_unequal_prefixes_are_refused() -> None:
    machine = leader()
    posted(machine, 0, 1, prefix=4)
    posted(machine, 1, 1, prefix=8)
    told = Acts(machine).tells(InstanceVerdict)
    assert [(rank, verdict.kind) for rank, verdict in told] == [(0, "ProtocolError"), (1, "ProtocolError")]
    assert "4 and 8" in told[0][1].text


def test_page_counts_must_agree_up_to_a_page() -> None:
    for tokens, page, fine in ((12, PAGE, False), (8, PAGE, True), (16, 16, True), (24, 16, False)):
        machine = leader()
        posted(machine, 0, 1, tokens=8)
        posted(machine, 1, 1, tokens=tokens, page=page)
        assert set(verdicts(machine).values()) == (set() if fine else {"ProtocolError"}), (tokens, page)


def test_a_lost_member_fails_open_rounds_and_later_ones_until_it_is_found() -> None:
    machine = leader()
    posted(machine, 0, 1)
    machine.peer_lost(1, 0.0)
    assert verdicts(machine) == {(0, 1): "PeerLost"}
    posted(machine, 1, 1)
    assert verdicts(machine) == {(1, 1): "PeerLost"}
    posted(machine, 0, 2)
    assert verdicts(machine) == {(0, 2): "PeerLost"}
    machine.peer_found(1)
    posted(machine, 1, 2)
    assert verdicts(machine) == {(1, 2): "PeerLost"}
    for rank in (0, 1):
        posted(machine, rank, 3)
    assert verdicts(machine) == {}
    for rank in (0, 1):
        done(machine, rank, 3)
    assert set(verdicts(machine).values()) == {""}


def test_losing_a_rank_outside_the_instance_changes_nothing() -> None:
    machine = leader()
    posted(machine, 0, 1)
    machine.peer_lost(2, 0.0)
    assert verdicts(machine) == {}


def test_the_kth_receive_meets_the_kth() -> None:
    """Rank 0 fails and posts again before rank 1 has posted at all."""
    machine = leader()
    posted(machine, 0, 1)
    failed(machine, 0, 1)
    posted(machine, 0, 2)
    done(machine, 0, 2)
    assert verdicts(machine) == {}
    posted(machine, 1, 7)
    assert verdicts(machine) == {(1, 7): "TransferCancelled"}
    posted(machine, 1, 8)
    done(machine, 1, 8)
    assert verdicts(machine) == {(0, 2): "", (1, 8): ""}


def test_outcomes_of_other_generations_and_other_ranks_are_ignored() -> None:
    machine = leader()
    done(machine, 0, 1)
    posted(machine, 0, 1)
    posted(machine, 1, 1)
    done(machine, 0, 99)
    failed(machine, 2, 1)
    machine.on_post(2, Post("r", 1, 0, 8, PAGE), 0.0)
    assert verdicts(machine) == {}
    done(machine, 0, 1)
    done(machine, 0, 1)
    assert verdicts(machine) == {}
    done(machine, 1, 1)
    assert set(verdicts(machine).values()) == {""}


def test_a_round_that_a_rank_never_joins_is_forgotten() -> None:
    machine = leader()
    posted(machine, 0, 1, now=5.0)
    failed(machine, 0, 1)
    machine.tick(GRANT_TIMEOUT - 0.1)
    assert machine._requests
    machine.tick(GRANT_TIMEOUT + 5.0)
    assert machine._requests == {}


def test_a_rank_that_keeps_the_others_waiting_fails_the_round_for_all() -> None:
    machine = leader(3)
    posted(machine, 0, 1)
    posted(machine, 1, 2)
    done(machine, 0, 1)
    machine.tick(GRANT_TIMEOUT - 0.1)
    assert verdicts(machine) == {}
    machine.tick(GRANT_TIMEOUT)
    told = dict(Acts(machine).tells(InstanceVerdict))
    assert {rank: verdict.kind for rank, verdict in told.items()} == {0: "TransferTimeout", 1: "TransferTimeout"}
    assert "ranks [1, 2]" in told[0].text
    posted(machine, 2, 3)  # a rank that posts late is told too, and the round ends
    assert {rank for rank, _ in Acts(machine).tells(InstanceVerdict)} >= {2}
    assert machine._requests == {}


def test_a_refused_call_is_that_ranks_part_in_the_round() -> None:
    machine = leader(3)
    posted(machine, 0, 1)
    machine.on_outcome(2, Outcome("r", 0, "PageOutOfRange", "page 99 is outside"), 0.0)
    told = dict(Acts(machine).tells(InstanceVerdict))
    assert {rank: verdict.kind for rank, verdict in told.items()} == {0: "PageOutOfRange"}
    assert "rank 2" in told[0].text
    posted(machine, 1, 2)
    assert verdicts(machine) == {(1, 2): "PageOutOfRange"}
    assert machine._requests == {}
    for rank in range(3):  # the next call of this rank belongs to the next round
        posted(machine, rank, 10 + rank)
        done(machine, rank, 10 + rank)
    assert verdicts(machine) == {(0, 10): "", (1, 11): "", (2, 12): ""}
