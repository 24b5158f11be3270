"""An error is as retryable at every rank that is told of it as where it was raised."""

from __future__ import annotations

import pytest

from tests.helpers.protocol import GRANT_TIMEOUT, Acts, grant, group_map, post, receiver, sender, verb
from tests.helpers.references.page_transfer import gqa
from torchkv.errors import KVError, RingExhausted, TransferCancelled
from torchkv.layout.group_map import GroupMap
from torchkv.protocol.instance import InstanceLeader
from torchkv.protocol.messages import (
    Abort,
    Cause,
    ControlFrame,
    InstanceVerdict,
    Outcome,
    Post,
    Refused,
    Revoke,
    cause_of,
    decode_frame,
    encode_frame,
    error_of,
)
from torchkv.protocol.sending import unmet

KEY = b"k" * 32
CASES = {
    "larger than the ring": RingExhausted("no", retryable=False),  # others of its class are
    "the ring is full": RingExhausted("no"),
    "too much at once": TransferCancelled("no", retryable=True),  # others of its class are not
}


@pytest.fixture(params=CASES)
def error(request: pytest.FixtureRequest) -> KVError:
    return CASES[request.param]


def alike(told: Abort | Revoke | Refused | InstanceVerdict, error: KVError) -> bool:
    frame = decode_frame(encode_frame(ControlFrame(0, 1, 1, 1, 0, told), KEY), KEY)
    assert frame.message == told
    known = error_of(told)
    return type(known) is type(error) and known.retryable == error.retryable


def instance(rank: int) -> GroupMap:
    """Rank 2 writes to ranks 0 and 1, each of half the heads."""
    return group_map(rank, ("d", gqa(0, 2)), ("d", gqa(1, 2)), ("p", gqa()))


def test_an_abort_and_what_follows_from_it(error: KVError) -> None:
    machine = receiver(instance(1))
    post(machine, 5, 6, src=(2,))
    Acts(machine)
    machine.on_abort(2, Abort(1, *cause_of(error)))
    acts = Acts(machine)
    assert acts.error("rx").retryable == error.retryable
    ((_, revoke),) = acts.tells(Revoke)
    assert alike(revoke, error)
    ((_, outcome),) = acts.tells(Outcome)
    leader = InstanceLeader(instance(0), grant_timeout=GRANT_TIMEOUT)
    leader.on_post(0, Post("r", 7, 0, 8, 4), 0.0)
    leader.on_post(1, Post("r", 1, 0, 8, 4), 0.0)
    leader.on_outcome(1, outcome, 0.0)
    ((_, verdict),) = Acts(leader).tells(InstanceVerdict)  # to rank 0: rank 1 knows
    assert alike(verdict, error)
    sibling = receiver(instance(1))
    post(sibling, 5, 6, src=(2,))
    sibling.on_instance_verdict(0, InstanceVerdict(1, *cause_of(error_of(verdict))))
    assert Acts(sibling).error("rx").retryable == error.retryable


@pytest.mark.parametrize("kind", [Revoke, Refused])
def test_what_a_sender_is_told(kind: type[Revoke | Refused], error: KVError) -> None:
    machine = sender()
    verb(machine, 2, work="op")
    if kind is Revoke:
        machine.on_grant(1, grant(5, 6), 0.0)
        (op,) = Acts(machine).started
        machine.on_revoke(1, Revoke(1, *cause_of(error)), 0.0)
        machine.op_finished(op, None, flushed=True, now=0.0)
    else:
        machine.grants.on_refused(1, Refused("r", *cause_of(error)), 0.0)
    assert Acts(machine).error("op").retryable == error.retryable


def test_a_grant_for_which_there_is_no_room_may_be_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unmet, "MAX_GRANTS", 1)
    machine = sender()
    for generation in (1, 2):
        machine.on_grant(1, grant(5, 6, generation=generation, request=f"r{generation}"), 0.0)
    ((_, abort),) = Acts(machine).tells(Abort)
    assert error_of(abort).retryable


def test_what_says_nothing_is_as_its_class() -> None:
    told: Cause = ("RingExhausted", "no", None)
    assert error_of(Abort(1, *told)).retryable
    assert not error_of(Abort(1, "TransferCancelled", "no")).retryable
