"""The parts of a request with layer groups, at the state machines: leases by memory, one failure, absent pages."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from tests.helpers.layer_groups import GROUPS, hybrid
from tests.helpers.protocol import Acts, group_map, pages, sender, verb
from torchkv.errors import PageOutOfRange, ProtocolError, TransferTimeout
from torchkv.layout.layer_groups import Pools, part_name
from torchkv.layout.layout import KVLayout
from torchkv.protocol.actions import SendOp
from torchkv.protocol.messages import (
    Abort,
    Attest,
    Exempt,
    Grant,
    InstanceVerdict,
    Outcome,
    Post,
    Quiesced,
    Revoke,
    Seal,
    pack_pages,
)
from torchkv.protocol.receiving.leases import Wanted
from torchkv.protocol.receiving.receiver import Receiver
from torchkv.protocol.receiving.request import ReceiverRequest
from torchkv.protocol.receiving.stage_allocator import StagingRing
from torchkv.protocol.receiving.staging_credits import StagingCredits

FULL, NEAR, FAR = (part_name("r", group) for group in GROUPS)
APART: Pools = {(group, slots): i for i, (group, slots) in enumerate((g, s) for g in GROUPS for s in (False, True))}
SHARED: Pools = {**APART, ("full", False): 0, ("near", False): 0, ("far", False): 0}


def reading(pools: Pools = SHARED, *places: tuple[str, KVLayout | None], rank: int = 1) -> Receiver:
    numbers = {pool: number for number, pool in enumerate(sorted(set(pools.values())))}
    return Receiver(
        group_map(rank, *(places or (("p", hybrid()), ("d", hybrid())))),
        timeout=10.0,
        grant_timeout=100.0,
        credits=StagingCredits(StagingRing(0), timeout=10.0),
        pools={space: numbers[pool] for space, pool in pools.items()},
    )


def post(
    machine: Receiver, name: str = "r", absent: dict[str, int] | None = None, **lists: list[int]
) -> list[ReceiverRequest]:
    parts = {part_name(name, g): Wanted(pages(*lists.get(g, [])), None, g) for g in GROUPS}
    return machine.posts.post_parts(
        "r", parts, (0,), prefix_tokens=0, absent_tokens=absent or {}, total=None, work="rx", now=0.0
    )


def seal(machine: Receiver, req: ReceiverRequest, num_pages: int) -> None:
    layers = GROUPS[req.group or ""]
    machine.on_attest(0, Attest(req.generation, list(layers), 0, 4 * num_pages, 8, "runs"), 0.0)
    machine.on_seal(0, Seal(req.generation, num_pages, b""), 0.0)


def leased(machine: Receiver, group: str) -> set[int]:
    return set(np.flatnonzero(machine.leases.marks(machine.leases.pools[group, False])).tolist())


# ---------------------------------------------------------------------- leases


def test_a_page_of_shared_memory_is_leased_through_every_group() -> None:
    machine = reading()
    post(machine, full=[1, 2], near=[3, 4], far=[5, 6])
    for group in GROUPS:
        assert leased(machine, group) == {1, 2, 3, 4, 5, 6}
    with pytest.raises(PageOutOfRange, match=f"page 3 is leased to request '{NEAR}'"):
        post(machine, "q", full=[3], near=[7], far=[8])
    assert not machine.requests._named.keys() - {FULL, NEAR, FAR}  # nothing of it was posted


def test_a_page_is_named_once_in_all_groups_of_one_request() -> None:
    machine = reading()
    with pytest.raises(PageOutOfRange, match=r"page 2 is named twice.*full, near, far share their memory"):
        post(machine, full=[1, 2], near=[2, 4], far=[5, 6])
    assert not machine.requests.by_generation
    assert Acts(machine).told == []


def test_the_same_id_is_another_page_in_memory_of_its_own() -> None:
    machine = reading(APART)
    post(machine, full=[1, 2], near=[1, 2], far=[2, 1])
    with pytest.raises(PageOutOfRange, match=f"page 2 is leased to request '{FULL}'"):
        post(machine, "q", full=[2], near=[3], far=[3])
    post(machine, "q", full=[3], near=[3], far=[3])


def test_pages_stay_leased_until_the_last_part_has_ended() -> None:
    machine = reading()
    full, near, far = post(machine, full=[1, 2], near=[3, 4], far=[5, 6])
    for req in (full, near):
        seal(machine, req, 2)
    assert full.ended
    assert leased(machine, "full") == {1, 2, 3, 4, 5, 6}
    seal(machine, far, 2)
    assert leased(machine, "full") == set()
    assert list(Acts(machine).settled.values()) == [None]


# ---------------------------------------------------------------------- one outcome


def test_the_failure_of_one_part_is_that_of_all() -> None:
    machine = reading()
    full, near, far = post(machine, full=[1], near=[2], far=[3])
    seal(machine, full, 1)
    Acts(machine)
    machine.on_abort(0, Abort(near.generation, "RingExhausted", "no room"))
    acts = Acts(machine)
    assert [message.generation for _, message in acts.tells(Revoke)] == [near.generation, far.generation]
    assert str(near.error) == str(far.error) == "no room"
    assert not near.error.pages_safe
    assert machine.leases.quarantined(group="near") == {2: (0,), 3: (0,)}  # one memory, whatever group it is asked by
    machine.on_quiesced(0, Quiesced(near.generation), 0.0)
    assert not near.error.pages_safe
    assert leased(machine, "full") == {1, 2, 3}
    machine.on_quiesced(0, Quiesced(far.generation), 0.0)
    assert near.error.pages_safe
    assert leased(machine, "full") == set()


def test_progress_of_one_part_keeps_the_others_waiting() -> None:
    machine = reading()
    full, near, _ = post(machine, full=[1], near=[2], far=[3])
    for now in (90.0, 99.0, 108.0):
        machine.on_attest(0, Attest(full.generation, [2], 0, 4, 8, "runs"), now)
        machine.tick(now + 1)
    assert near.error is None
    machine.tick(119.0)
    assert isinstance(near.error, TransferTimeout)


def test_a_layer_is_there_when_all_its_groups_are() -> None:
    machine = reading()
    full, near, _ = post(machine, full=[1], near=[2], far=[3])
    assert not machine.layer_done(full, 0)
    machine.on_attest(0, Attest(near.generation, [0], 0, 4, 8, "runs"), 0.0)
    assert machine.layer_done(full, 0)
    assert not machine.layer_done(full, 3)


def test_a_rank_that_holds_nothing_of_a_group_does_its_part() -> None:
    """It grants it to nobody and is complete, so that the other ranks of its instance may succeed."""
    places = ("p", hybrid()), ("d", hybrid(layers=(0, 1, 3, 4))), ("d", hybrid(layers=(2, 5)))
    machine = reading(APART, *places, rank=1)
    full, *_ = post(machine, full=[1], near=[2], far=[3])
    acts = Acts(machine)
    assert {message.request for _, message in acts.tells(Grant)} == {NEAR, FAR}
    assert {message.request for _, message in acts.tells(Post)} == {FULL, NEAR, FAR}
    assert [message.request for _, message in acts.tells(Outcome)] == [FULL]
    assert full.complete_at is not None
    machine.on_instance_verdict(1, InstanceVerdict(full.generation, "", ""))
    assert full.ended


def test_a_writer_is_exempt_from_the_groups_that_it_shares_nothing_of() -> None:
    places = ("p", hybrid(layers=(0, 3))), ("p", hybrid(layers=(1, 2, 4, 5))), ("d", hybrid())
    machine = reading(APART, *places, rank=2)
    parts = {part_name("r", g): Wanted(pages(i), None, g) for i, g in zip(count(1), GROUPS, strict=False)}
    machine.posts.post_parts("r", parts, (0, 1), prefix_tokens=0, absent_tokens={}, total=None, work="rx", now=0.0)
    acts = Acts(machine)
    assert {(rank, message.request) for rank, message in acts.tells(Exempt)} == {(0, FULL), (0, FAR), (1, NEAR)}
    assert {(rank, message.request) for rank, message in acts.tells(Grant)} == {(0, NEAR), (1, FULL), (1, FAR)}


# ---------------------------------------------------------------------- absent pages


def grant(*ids: int, prefix: int = 0, absent: int = 0, name: str = NEAR) -> Grant:
    return Grant(name, 1, prefix, pack_pages(pages(*ids)), [0], None, None, absent)


@pytest.mark.parametrize("first", ["grant", "verb"])
def test_verbs_count_from_before_the_absent_pages(first: str) -> None:
    machine = sender(group_map(0, ("p", hybrid()), ("d", hybrid())))
    granted = grant(7, 8, prefix=8 + 12, absent=12)  # the receiver holds 8 tokens, and needs not the three pages then
    if first == "grant":
        machine.on_grant(1, granted, 0.0)
    machine.admit(NEAR, 1, 0, 5)
    op = SendOp(NEAR, 1, {}, (0, 3), 0, 5, "send", Source())
    machine.submit(op, 0.0)
    if first == "verb":
        machine.on_grant(1, granted, 0.0)
    assert machine.prefix_tokens(NEAR, 1) == 8
    assert (op.start, op.num_pages) == (0, 2)
    machine.check_finish(NEAR, 1)


class Source:
    """Pages of an op, of which some are left out."""

    def behind(self, _held: int) -> Source:
        return self


def test_who_sends_less_than_is_owed_is_told_so() -> None:
    machine = sender(group_map(0, ("p", hybrid()), ("d", hybrid())))
    machine.on_grant(1, grant(6, 7, 8, 9, prefix=8, absent=8), 0.0)
    verb(machine, 2, start=4, request=NEAR, layers=(0, 3))  # its first four pages are absent, too: windows of 5 reach 1
    with pytest.raises(ProtocolError, match=r"layer 0 page 1 .* was not sent"):
        machine.check_finish(NEAR, 1)


def test_a_grant_that_contradicts_itself_is_refused() -> None:
    machine = sender(group_map(0, ("p", hybrid()), ("d", hybrid())))
    with pytest.raises(ProtocolError, match="8 absent tokens of its prefix"):
        machine.on_grant(1, grant(7, prefix=4, absent=8), 0.0)
    with pytest.raises(ProtocolError, match="names no layer group"):
        machine.on_grant(1, grant(7, name="r"), 0.0)
    assert not machine.actions


def test_the_receiver_grants_behind_its_absent_pages() -> None:
    machine = reading()
    post(machine, absent={"near": 8, "far": 4}, full=[1, 2, 3], near=[4], far=[5, 6])
    told = {message.request: message for _, message in Acts(machine).tells(Grant)}
    assert {name: (m.prefix_tokens, m.absent_tokens) for name, m in told.items()} == {
        FULL: (0, 0),
        NEAR: (8, 8),
        FAR: (4, 4),
    }


def test_absent_pages_end_where_a_writers_page_does() -> None:
    machine = reading(APART, ("p", hybrid(page_size=8)), ("d", hybrid()))
    with pytest.raises(ProtocolError, match="4 tokens of absent pages is not a multiple of the page size 8"):
        post(machine, absent={"near": 4}, full=[1, 2, 3], near=[4, 5], far=[6, 7, 8])
    assert not machine.requests.by_generation
