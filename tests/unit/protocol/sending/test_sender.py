"""Sender requests, from the first verb to the verdict or the cancel, without an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from tests.helpers.protocol import GRANT_TIMEOUT, TIMEOUT, Acts, finish, grant, group_map, moved, pair, sender, verb
from tests.helpers.references.page_transfer import gqa
from torchkv.errors import PageOutOfRange, PeerLost, ProtocolError, TransferCancelled, TransferTimeout
from torchkv.protocol.actions import ANYBODY, SendOp, Settle
from torchkv.protocol.messages import Abort, Alive, Attest, Quiesced, Revoke, Seal, Verdict
from torchkv.protocol.sending import open_sends, unmet
from torchkv.protocol.sending.request import SenderRequest
from torchkv.protocol.sending.sender import Sender


def bound(count: int = 2, *, ids: tuple[int, ...] = (5, 6)) -> Sender:
    """A sender whose request is bound to a grant and has ``count`` pages under way."""
    machine = sender()
    machine.on_grant(1, grant(*ids), 0.0)
    verb(machine, count)
    return machine


def sealed() -> Sender:
    machine = bound()
    (op,) = Acts(machine).started
    finish(machine)
    moved(machine, op)
    return machine


# -- from the first verb to the verdict -------------------------------------------------------------------------------


def test_verbs_before_the_grant_wait_and_then_start_in_order() -> None:
    machine = sender()
    first, second = verb(machine, 1, work="a"), verb(machine, 1, start=1, work="b")
    assert Acts(machine).all == []
    machine.on_grant(1, grant(5, 6), 1.0)
    acts = Acts(machine)
    assert acts.started == [first, second]
    assert machine.requests.queued_pages == 0


def test_a_grant_waits_for_the_first_verb() -> None:
    machine = sender()
    machine.on_grant(1, grant(5, 6, prefix=8), 0.0)
    assert machine.prefix_tokens("r", 1) == 8
    assert Acts(machine).all == []
    op = verb(machine, 2)
    assert Acts(machine).started == [op]


def settled(machine: Sender) -> list[str]:
    """The works that a sender settles now, in order."""
    taken = machine.actions[:]
    machine.actions.clear()
    return [action.work for action in taken if isinstance(action, Settle)]


def test_a_withdrawal_completes_after_the_works_that_it_fails() -> None:
    """Who has waited for it may look at them."""
    machine = sender()
    verb(machine, 1)
    assert machine.withdraw("r", "withdrawal") == ["withdrawal"]
    assert settled(machine) == ["send", "withdrawal"]
    machine.on_grant(1, grant(5, 6), 0.0)
    stopped, late = verb(machine, 1, work="stopped"), verb(machine, 1, work="late")
    machine.actions.clear()
    assert machine.withdraw("r", "another") == ["another", "another"]
    machine.op_finished(stopped, TransferCancelled("stopped"), flushed=True, now=0.0)
    assert settled(machine) == ["stopped", "another"]
    machine.op_finished(late, None, flushed=True, now=0.0)
    assert settled(machine) == ["late", "another"]


def test_seal_comes_after_the_last_transfer_and_the_verdict_ends_the_request() -> None:
    machine = bound(1)
    last = verb(machine, 1, start=1)
    first, _ = Acts(machine).started
    finish(machine, aux=b"token")
    assert Acts(machine).all == []
    moved(machine, last)
    acts = Acts(machine)
    assert acts.tells(Seal) == []
    assert [(a.lo, a.hi) for _, a in acts.tells(Attest)] == [(4, 8)], "tokens, not pages"
    moved(machine, first)
    acts = Acts(machine)
    assert [type(message) for _, message in acts.told] == [Attest, Seal], "all is attested before it is sealed"
    assert acts.tells(Seal) == [(1, Seal(1, 2, b"token"))]
    machine.on_verdict(1, Verdict(1))
    assert Acts(machine).settled == {"finish": None}
    assert machine.requests.by_key == {}


def test_the_name_may_be_used_again_afterwards() -> None:
    machine = sealed()
    machine.on_verdict(1, Verdict(1))
    Acts(machine)
    op = verb(machine, 1)
    assert Acts(machine).started == []
    machine.on_grant(1, grant(7, generation=2), 0.0)
    assert Acts(machine).started == [op]


def test_a_verdict_before_the_seal_or_of_another_generation_changes_nothing() -> None:
    machine = bound()
    machine.on_verdict(1, Verdict(1))
    finish(machine)
    machine.on_verdict(1, Verdict(1))
    assert "finish" not in Acts(machine).settled
    machine = sealed()
    Acts(machine)
    machine.on_verdict(1, Verdict(2))
    machine.on_verdict(0, Verdict(1))
    assert Acts(machine).all == []


# -- finish -----------------------------------------------------------------------------------------------------------


def test_finish_with_nothing_sent_is_legal_for_an_empty_grant_only() -> None:
    machine = sender()
    machine.on_grant(1, grant(), 0.0)
    finish(machine)
    assert Acts(machine).tells(Seal) == [(1, Seal(1, 0, b""))]
    machine = sender()
    machine.on_grant(1, grant(5), 0.0)
    with pytest.raises(ProtocolError, match="layer 0 page 0"):
        finish(machine)
    assert machine.requests.by_key == {}


def test_only_the_last_transfer_of_a_finished_request_is_announced() -> None:
    """One `Alive` message for each layer would cost more than it saves."""
    machine = sender()
    machine.on_grant(1, grant(5, 6), 0.0)
    first, second = (verb(machine, 2, layers=(layer,)) for layer in (0, 1))
    machine.announce(second)
    finish(machine)
    machine.announce(second)
    assert Acts(machine).tells(Alive) == []
    moved(machine, first)
    machine.announce(second)
    assert Acts(machine).tells(Alive) == [(1, Alive(1, False))]
    machine.cancel("r", "cancel", 1.0)
    machine.announce(second)
    assert Acts(machine).tells(Alive) == []


@pytest.mark.parametrize(("ids", "fine"), [((), True), ((5,), False)])
def test_finish_with_nothing_sent_before_the_grant_is_judged_by_the_grant(ids: tuple[int, ...], fine: bool) -> None:
    machine = sender()
    finish(machine)
    machine.on_grant(1, grant(*ids), 0.0)
    acts = Acts(machine)
    if fine:
        assert acts.tells(Seal) == [(1, Seal(1, 0, b""))]
    else:
        assert "layer 0 page 0" in str(acts.error("finish"))
        assert [message.kind for _, message in acts.tells(Abort)] == ["ProtocolError"]


@pytest.mark.parametrize("granted", [True, False])
def test_finish_names_the_first_missing_page_and_leaves_the_request_open(granted: bool) -> None:
    machine = sender()
    if granted:
        machine.on_grant(1, grant(5, 6, 7), 0.0)
    verb(machine, 3, layers=(0,))
    verb(machine, 1, layers=(1,))
    verb(machine, 1, start=2, layers=(1,))
    with pytest.raises(ProtocolError, match=r"layer 1 page 1 .*was not sent"):
        finish(machine)
    verb(machine, 1, start=1, layers=(1,))
    if not granted:
        machine.on_grant(1, grant(5, 6, 7), 0.0)
    for op in Acts(machine).started:
        moved(machine, op)
    finish(machine)
    assert len(Acts(machine).tells(Seal)) == 1


def test_finish_with_too_few_pages_for_the_grant() -> None:
    machine = bound(2, ids=(5, 6, 7))
    with pytest.raises(ProtocolError, match=r"page 2 .* was not sent: 2 pages .* 3 pages"):
        finish(machine)
    verb(machine, 1, start=2)
    finish(machine)


def test_an_empty_chunk_changes_nothing() -> None:
    """A chunk of no pages at page 9 must not count pages 0 to 8 as sent."""
    machine = bound(2)
    verb(machine, 0, start=9, work="nothing")
    for op in Acts(machine).started:
        moved(machine, op)
    finish(machine)
    assert Acts(machine).tells(Seal) == [(1, Seal(1, 2, b""))]


def test_verbs_after_finish_raise() -> None:
    machine = bound()
    finish(machine)
    for again in (lambda: verb(machine, 1), lambda: finish(machine)):
        with pytest.raises(ProtocolError, match="finished already"):
            again()


def test_page_sizes_may_differ() -> None:
    view = pair(0, writer=gqa(page_size=2), reader=gqa(page_size=4))
    machine = sender(view)
    machine.on_grant(1, grant(5, 6), 0.0)
    op = verb(machine, 3)  # 6 of 8 tokens: within one page of the larger size
    finish(machine)
    moved(machine, op)
    assert Acts(machine).tells(Seal) == [(1, Seal(1, 3, b""))]
    machine = sender(view)
    machine.on_grant(1, grant(5, 6), 0.0)
    verb(machine, 2)
    with pytest.raises(ProtocolError, match="not sent"):
        finish(machine)


# -- pages and prefixes -----------------------------------------------------------------------------------------------


def test_a_whole_page_outside_the_grant_raises_and_starts_nothing() -> None:
    machine = bound()
    Acts(machine)
    with pytest.raises(PageOutOfRange, match=r"page 2 .*outside the grant of 2 pages"):
        verb(machine, 2, start=1)
    assert Acts(machine).all == []


def test_a_page_outside_a_later_grant_fails_the_work_and_the_request() -> None:
    machine = sender()
    verb(machine, 3)
    machine.on_grant(1, grant(5, 6), 0.0)
    acts = Acts(machine)
    assert isinstance(acts.error("send"), PageOutOfRange)
    assert acts.started == []
    assert [message.kind for _, message in acts.tells(Abort)] == ["PageOutOfRange"]
    with pytest.raises(PageOutOfRange):
        verb(machine, 1)


def test_one_verb_needs_equal_prefixes() -> None:
    machine = sender(group_map(0, ("p", gqa()), ("d", gqa()), ("e", gqa())))
    machine.on_grant(1, grant(5, prefix=4), 0.0)
    machine.on_grant(2, grant(5, prefix=8), 0.0)
    with pytest.raises(ProtocolError, match="unequal prefixes"):
        machine.check_prefixes("r", (1, 2))
    machine.check_prefixes("r", (1,))
    machine.check_prefixes("other", (1, 2))


def test_unequal_prefixes_seen_only_with_the_grants_fail_the_later_one() -> None:
    machine = sender(group_map(0, ("p", gqa()), ("d", gqa()), ("e", gqa())))
    prefixes: dict[int, int] = {}
    for dst in (1, 2):
        verb(machine, 1, dst=dst, prefixes=prefixes, work=f"to {dst}")
    machine.on_grant(1, grant(5, prefix=4), 0.0)
    assert len(Acts(machine).started) == 1
    machine.on_grant(2, grant(5, prefix=8), 0.0)
    acts = Acts(machine)
    assert "unequal prefixes" in str(acts.error("to 2"))
    assert acts.started == []


# -- cancel and tombstones --------------------------------------------------------------------------------------------


def test_cancel_drains_first() -> None:
    machine = bound()
    (op,) = Acts(machine).started
    assert machine.cancel("r", "cancel", 0.0) == ["cancel"]
    acts = Acts(machine)
    assert acts.halted == [op]
    assert [message.kind for _, message in acts.tells(Abort)] == ["TransferCancelled"]
    assert "cancel" not in acts.settled
    error = machine.requests.by_key["r", 1].error
    assert error is not None
    assert not error.pages_safe
    machine.op_finished(op, None, flushed=True, now=0.0)
    acts = Acts(machine)
    assert isinstance(acts.error("send"), TransferCancelled)
    assert acts.settled["cancel"] is None
    assert error.pages_safe
    assert machine.requests.by_key == {}


def test_cancel_of_nothing_is_nothing() -> None:
    machine = sender()
    assert machine.cancel("r", "cancel", 0.0) == []
    assert Acts(machine).all == []
    machine = sealed()
    machine.on_verdict(1, Verdict(1))
    Acts(machine)
    assert machine.cancel("r", "cancel", 0.0) == []
    assert Acts(machine).all == []


def test_a_tombstone_answers_until_the_caller_cancels() -> None:
    machine = bound()
    (op,) = Acts(machine).started
    machine.on_revoke(1, Revoke(1, "TransferCancelled", "the receiver gave up"), 1.0)
    machine.op_finished(op, None, flushed=True, now=0.0)
    Acts(machine)
    for again in (lambda: verb(machine, 1), lambda: finish(machine), lambda: machine.prefix_tokens("r", 1)):
        with pytest.raises(TransferCancelled, match="gave up"):
            again()
    machine.on_grant(1, grant(7, 8, generation=2), 0.0)
    assert Acts(machine).all == [], "nothing of the old life may use it"
    with pytest.raises(TransferCancelled, match="gave up"):
        verb(machine, 1)
    assert machine.cancel("r", "cancel", 0.0) == ["cancel"]
    assert Acts(machine).settled == {"cancel": None}
    new = verb(machine, 2)
    acts = Acts(machine)
    assert acts.started == [new]
    assert machine.requests.by_key["r", 1].grant is not None
    assert machine.requests.by_key["r", 1].grant.generation == 2


def test_a_cancel_before_the_grant_refuses_exactly_that_grant() -> None:
    machine = sender()
    verb(machine, 2)
    machine.cancel("r", "cancel", 0.0)
    acts = Acts(machine)
    assert isinstance(acts.error("send"), TransferCancelled)
    assert acts.settled["cancel"] is None
    machine.on_grant(1, grant(5, 6), 1.0)
    assert [(rank, message.generation) for rank, message in Acts(machine).tells(Abort)] == [(1, 1)]
    machine.on_grant(1, grant(5, 6, generation=2), 2.0)
    assert Acts(machine).all == []
    assert machine.prefix_tokens("r", 1) == 0


def test_the_refused_grant_fails_the_request_that_waits_for_it() -> None:
    """Else a caller who tries again on both sides fails every time: each cancel would refuse one more grant."""
    machine = sender()
    for attempt in range(1, 4):
        verb(machine, 2, work=f"send{attempt}")
        machine.cancel("r", f"cancel{attempt}", 0.0)
        Acts(machine)
        verb(machine, 2, work="new")
        machine.on_grant(1, grant(5, 6, generation=2 * attempt), 1.0)
        acts = Acts(machine)
        assert [message.generation for _, message in acts.tells(Abort)] == [2 * attempt]
        assert acts.started == []
        assert isinstance(acts.error("new"), TransferCancelled)
        with pytest.raises(TransferCancelled, match="before it was granted"):
            verb(machine, 2)
        assert machine.cancel("r", "cancel", 2.0) == ["cancel"]
        again = verb(machine, 2, work="again")
        machine.on_grant(1, grant(5, 6, generation=2 * attempt + 1), 3.0)
        assert Acts(machine).started == [again]
        machine.cancel("r", "cancel", 3.0)
        machine.op_finished(again, None, flushed=True, now=3.0)
        Acts(machine)


def test_each_request_cancelled_before_its_grant_refuses_one() -> None:
    machine = sender()
    for life in range(2):
        verb(machine, 2, work=f"send{life}")
        machine.cancel("r", f"cancel{life}", 0.0)
    verb(machine, 2, work="new")
    Acts(machine)
    for generation in (1, 2):
        machine.on_grant(1, grant(5, 6, generation=generation), 1.0)
        acts = Acts(machine)
        assert [message.generation for _, message in acts.tells(Abort)] == [generation]
        assert acts.started == []
    machine.cancel("r", "cancel", 1.0)
    again = verb(machine, 2, work="again")
    machine.on_grant(1, grant(5, 6, generation=3), 2.0)
    assert Acts(machine).started == [again]


def test_a_refusal_is_forgotten_after_the_grant_timeout() -> None:
    machine = sender()
    verb(machine, 2)
    machine.cancel("r", "cancel", 0.0)
    Acts(machine)
    machine.tick(GRANT_TIMEOUT + 1)
    machine.on_grant(1, grant(5, 6), GRANT_TIMEOUT + 2)
    assert Acts(machine).all == []


def revoked_unused() -> Sender:
    """A sender that holds no request, and whose grant was revoked before the first verb."""
    machine = sender()
    machine.on_grant(1, grant(5, 6), 0.0)
    machine.on_revoke(1, Revoke(1, "TransferCancelled", "the receiver gave up"), 1.0)
    assert [message.generation for _, message in Acts(machine).tells(Quiesced)] == [1]
    return machine


def raises_revoked(machine: Sender, text: str = "the receiver gave up") -> None:
    with pytest.raises(TransferCancelled, match=text) as raised:
        verb(machine, 2)
    assert raised.value.pages_safe


def test_a_verb_after_the_revocation_of_its_grant_raises_its_error() -> None:
    machine = revoked_unused()
    raises_revoked(machine)
    calls = {
        "admit": lambda: machine.admit("r", 1, 0, 1),
        "finish": lambda: machine.check_finish("r", 1),
        "prefix": lambda: machine.prefix_tokens("r", 1),
    }
    for again in calls.values():
        with pytest.raises(TransferCancelled, match="the receiver gave up"):
            again()
    assert Acts(machine).all == []


@pytest.mark.parametrize("first", ["verb", "finish", "prefix_tokens"])
def test_any_first_call_meets_the_revocation(first: str) -> None:
    machine = revoked_unused()
    calls: dict[str, Callable[[], object]] = {
        "verb": lambda: verb(machine, 2),
        "finish": lambda: machine.check_finish("r", 1),
        "prefix_tokens": lambda: machine.begin("r", 1, 2.0),
    }
    with pytest.raises(TransferCancelled, match="the receiver gave up"):
        calls[first]()
    assert machine.cancel("r", "cancel", 3.0) == ["cancel"]
    op = verb(machine, 2)
    machine.on_grant(1, grant(5, 6, generation=2), 4.0)
    assert Acts(machine).started == [op]


def test_the_grant_after_a_revoked_one_is_for_the_next_request() -> None:
    machine = revoked_unused()
    raises_revoked(machine)
    machine.on_grant(1, grant(5, 6, generation=2), 3.0)
    assert Acts(machine).all == []
    assert machine.cancel("r", "cancel", 4.0) == ["cancel"]
    new = verb(machine, 2, work="new")
    assert Acts(machine).started == [new]


def test_a_cancel_after_the_revocation_refuses_no_later_grant() -> None:
    machine = revoked_unused()
    raises_revoked(machine)
    machine.cancel("r", "cancel", 2.0)
    Acts(machine)
    machine.on_grant(1, grant(5, 6, generation=2), 3.0)
    assert Acts(machine).all == []
    op = verb(machine, 2, work="new")
    assert Acts(machine).started == [op]


@pytest.mark.parametrize("operation", ["a new grant", "a cancel", "time"])
def test_a_revocation_that_met_no_verb_is_forgotten_after(operation: str) -> None:
    machine = revoked_unused()
    if operation == "a new grant":
        machine.on_grant(1, grant(5, 6, generation=2), 2.0)
    elif operation == "a cancel":
        assert machine.cancel("r", "cancel", 2.0) == []
    else:
        machine.tick(1.0 + GRANT_TIMEOUT)
    op = verb(machine, 2)
    assert Acts(machine).started == ([op] if operation == "a new grant" else [])
    assert machine.requests.by_key["r", 1].error is None


def test_a_cancel_of_a_tombstone_keeps_the_revocation_that_the_next_request_must_meet() -> None:
    """The receiver posted and failed generation 2 while the tombstone stood, so that is for the next request."""
    machine = bound()
    (op,) = Acts(machine).started
    machine.on_revoke(1, Revoke(1, "TransferCancelled", "gave up once"), 1.0)
    machine.op_finished(op, None, flushed=True, now=1.0)
    machine.on_grant(1, grant(7, 8, generation=2), 2.0)
    machine.on_revoke(1, Revoke(2, "TransferCancelled", "gave up twice"), 3.0)
    assert machine.cancel("r", "cancel", 4.0) == ["cancel"]
    raises_revoked(machine, "gave up twice")  # not: recv_pages was never posted
    machine.cancel("r", "cancel", 6.0 + TIMEOUT)
    Acts(machine)
    machine.on_grant(1, grant(7, 8, generation=3), 7.0 + TIMEOUT)
    assert Acts(machine).all == [], "generation 2 was the second request's: generation 3 must not be refused"
    third = verb(machine, 2, work="third", now=8.0 + TIMEOUT)
    assert Acts(machine).started == [third]


def test_revocations_that_meet_no_verb_do_not_pile_up() -> None:
    machine = sender()
    for i in range(unmet.MAX_REMEMBERED + 1):
        machine.on_grant(1, grant(5, 6, request=f"r{i}", generation=i + 1), 0.0)
        machine.on_revoke(1, Revoke(i + 1, "TransferCancelled", "gone"), 0.0)
    assert len(machine.grants.unmet._revocations) == unmet.MAX_REMEMBERED
    assert ("r0", 1) not in machine.grants.unmet._revocations


def test_cancel_refuses_a_grant_that_no_verb_has_used() -> None:
    machine = sender()
    machine.on_grant(1, grant(5, 6), 0.0)
    assert machine.cancel("r", "cancel", 0.0) == []
    assert [message.kind for _, message in Acts(machine).tells(Abort)] == ["TransferCancelled"]
    assert machine.prefix_tokens("r", 1) is None


def test_a_request_that_timed_out_waiting_answers_the_late_grant() -> None:
    machine = sender()
    verb(machine, 2)
    machine.tick(GRANT_TIMEOUT - 0.1)
    assert Acts(machine).all == []
    machine.tick(GRANT_TIMEOUT)
    assert isinstance(Acts(machine).error("send"), TransferTimeout)
    machine.on_grant(1, grant(5, 6), GRANT_TIMEOUT + 1)
    assert [message.kind for _, message in Acts(machine).tells(Abort)] == ["TransferTimeout"]
    machine.on_grant(1, grant(5, 6, generation=2), GRANT_TIMEOUT + 2)
    assert Acts(machine).all == [], "only one grant was meant for the failed request"
    machine.cancel("r", "cancel", GRANT_TIMEOUT + 3)
    Acts(machine)
    new = verb(machine, 2, now=GRANT_TIMEOUT + 3)
    assert Acts(machine).started == [new]


# -- revocation -------------------------------------------------------------------------------------------------------


def test_quiesced_is_said_after_the_drain_and_once() -> None:
    machine = bound()
    (op,) = Acts(machine).started
    machine.on_revoke(1, Revoke(1, "TransferTimeout", "late"), 1.0)
    acts = Acts(machine)
    assert acts.halted == [op]
    assert acts.told == [], "the receiver knows already, and nothing is drained yet"
    machine.op_finished(op, None, flushed=True, now=0.0)
    acts = Acts(machine)
    assert acts.told == [(1, Quiesced(1))]
    assert isinstance(acts.error("send"), TransferTimeout)


def test_quiesced_for_what_never_began_or_is_over() -> None:
    machine = sender()
    machine.on_grant(1, grant(5), 0.0)
    machine.on_revoke(1, Revoke(1, "TransferCancelled", "x"), 1.0)
    assert Acts(machine).told == [(1, Quiesced(1))]
    machine.on_revoke(1, Revoke(77, "TransferCancelled", "x"), 1.0)
    assert Acts(machine).told == [(1, Quiesced(77))]


def test_a_broken_channel_is_never_called_quiescent() -> None:
    machine = bound()
    (op,) = Acts(machine).started
    machine.op_finished(op, PeerLost("the channel broke"), flushed=False, now=0.0)
    machine.on_revoke(1, Revoke(1, "PeerLost", "x"), 1.0)
    assert Acts(machine).tells(Quiesced) == []
    machine.cancel("r", "cancel", 0.0)
    assert Acts(machine).settled["cancel"] is None
    machine.on_revoke(1, Revoke(1, "PeerLost", "x"), 1.0)
    assert Acts(machine).tells(Quiesced) == [], "not even after the life has ended"


def test_revocation_after_the_seal_fails_finish() -> None:
    machine = sealed()
    Acts(machine)
    machine.on_revoke(1, Revoke(1, "ProtocolError", "another rank failed"), 1.0)
    acts = Acts(machine)
    assert isinstance(acts.error("finish"), ProtocolError)
    assert acts.told == [(1, Quiesced(1))]


def test_a_failed_transfer_fails_the_request() -> None:
    machine = bound(1)
    other = verb(machine, 1, start=1, work="other")
    op, _ = Acts(machine).started
    machine.op_finished(op, PeerLost("gone"), flushed=True, now=0.0)
    acts = Acts(machine)
    assert isinstance(acts.error("send"), PeerLost)
    assert acts.halted == [other]
    assert not machine.wants(other)
    assert [message.kind for _, message in acts.tells(Abort)] == ["PeerLost"]


# -- clocks, liveness and bounds --------------------------------------------------------------------------------------


def test_a_sealed_request_waits_as_long_as_the_receiver_shows_progress() -> None:
    machine = sealed()
    Acts(machine)
    machine.tick(TIMEOUT - 0.1)
    machine.on_alive(1, Alive(1, True), TIMEOUT - 0.1)
    machine.tick(TIMEOUT + 1)
    assert Acts(machine).all == []
    machine.tick(2 * TIMEOUT)
    assert isinstance(Acts(machine).error("finish"), TransferTimeout)


def test_progress_is_reported_while_bytes_move() -> None:
    machine = bound()
    (op,) = Acts(machine).started
    machine.tick(0.1)
    assert Acts(machine).all == []
    op.moved = True
    machine.tick(0.2)
    assert Acts(machine).told == [(1, Alive(1, False))]
    machine.tick(0.3)
    assert Acts(machine).all == []


def test_a_lost_peer_fails_its_requests_and_no_others() -> None:
    machine = sender(group_map(0, ("p", gqa()), ("d", gqa()), ("e", gqa())))
    verb(machine, 1, dst=1, work="to 1")
    verb(machine, 1, dst=2, work="to 2")
    machine.peer_lost(1, "rank 1 is silent")
    acts = Acts(machine)
    assert isinstance(acts.error("to 1"), PeerLost)
    assert "to 2" not in acts.settled


def test_queues_are_bounded_and_say_so_retryably(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_sends, "MAX_QUEUED_OPS", 3)
    machine = sender()
    for i in range(3):
        verb(machine, 1, start=i)
    with pytest.raises(ProtocolError, match="3 transfers wait") as caught:
        verb(machine, 1)
    assert caught.value.retryable
    machine.on_grant(1, grant(5, 6, 7), 0.0)
    verb(machine, 1)


def test_queued_pages_are_bounded_over_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_sends, "MAX_QUEUED_PAGES", 10)
    machine = sender()
    verb(machine, 6)
    with pytest.raises(ProtocolError, match="6 pages wait") as caught:
        verb(machine, 5, request="other")
    assert caught.value.retryable
    machine.cancel("r", "cancel", 0.0)
    verb(machine, 5, request="other")


def test_requests_to_one_receiver_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hangs must neither fill this rank's memory nor keep it from sending to others."""
    monkeypatch.setattr(open_sends, "MAX_REQUESTS", 3)
    machine = sender(group_map(0, ("p", gqa()), ("d", gqa()), ("e", gqa())))
    for name in ("a", "b", "c"):
        verb(machine, 1, request=name)
    with pytest.raises(ProtocolError, match="rank 1: 3 requests to it have not ended") as caught:
        verb(machine, 1, request="d")
    assert caught.value.retryable
    with pytest.raises(ProtocolError, match="limit"):
        machine.check_finish("d", 1, state_slot=None)
    verb(machine, 1, request="a", start=1)
    verb(machine, 1, request="d", dst=2)
    machine.cancel("b", "cancel", 0.0)
    verb(machine, 1, request="d")
    with pytest.raises(ProtocolError, match="limit"):
        verb(machine, 1, request="e")


@pytest.mark.parametrize(
    "message",
    [
        grant(5, writers=(2,)),
        grant(5, writers=(0, 0)),
        grant(5, writers=(7, 0)),
        grant(5, writers=(0, 999)),
        grant(99),
    ],
)
def test_malformed_grants_are_refused(message: object) -> None:
    machine = sender()
    with pytest.raises(ProtocolError):
        machine.on_grant(1, message, 0.0)
    assert Acts(machine).all == []
    assert machine.prefix_tokens("r", 1) is None


def test_fail_all_ends_everything_now() -> None:
    machine = bound()
    verb(machine, 1, request="waiting", work="waiting")
    finish(machine)
    machine.cancel("waiting", "cancel", 0.0)
    gone = TransferCancelled("the group was destroyed")
    machine.fail_all(gone)
    acts = Acts(machine)
    assert acts.settled.keys() == {"waiting", "finish", "cancel"}
    assert len(acts.halted) == 1
    machine.end_all(gone)  # it did not drain in time: its work is completed, but Quiesced is not sent
    acts = Acts(machine)
    assert acts.settled.keys() == {"send"}
    assert acts.tells(Quiesced) == []


def test_a_drained_rank_that_leaves_says_that_it_is_quiescent() -> None:
    machine = bound()
    gone = TransferCancelled("the group was destroyed")
    (op,) = machine.requests.by_key["r", 1].running
    machine.fail_all(gone)
    machine.op_finished(op, gone, flushed=True, now=0.0)
    machine.end_all(gone)
    assert [rank for rank, _ in Acts(machine).tells(Quiesced)] == [1]


def test_a_rank_that_leaves_answers_grants_that_no_verb_took() -> None:
    machine = sender()
    machine.on_grant(1, grant(5), 0.0)
    gone = TransferCancelled("the group was destroyed")
    machine.fail_all(gone)
    machine.end_all(gone)
    (abort, quiesced) = (message for rank, message in Acts(machine).told if rank == 1)
    assert isinstance(abort, Abort)
    assert "'r': the group was destroyed on rank 0" in abort.text
    assert quiesced == Quiesced(1)
    assert machine.grants.unmet._grants == machine.grants.unmet._names == {}


def test_a_receiver_that_has_ended_still_counts_for_equal_prefixes() -> None:
    """One verb to two receivers; the first of them grants, receives everything and ends before the second grants."""
    machine = sender(group_map(0, ("p", gqa()), ("d", gqa()), ("e", gqa())))
    prefixes: dict[int, int] = {}
    first = verb(machine, 1, dst=1, prefixes=prefixes, work="to 1")
    verb(machine, 1, dst=2, prefixes=prefixes, work="to 2")
    machine.on_grant(1, grant(5), 0.0)
    machine.op_finished(first, None, flushed=True, now=0.0)
    finish(machine, dst=1)
    machine.on_verdict(1, Verdict(1))
    Acts(machine)
    machine.on_grant(2, grant(6, prefix=16), 0.0)
    assert "unequal prefixes" in str(Acts(machine).error("to 2"))


def test_asking_for_the_prefix_begins_a_request() -> None:
    machine = sender()
    machine.on_grant(1, grant(5, prefix=16), 0.0)
    machine.begin("r", 1, 0.0)
    assert machine.prefix_tokens("r", 1) == 16
    machine.on_revoke(1, Revoke(1, "TransferCancelled", "was cancelled"), 1.0)
    machine.on_grant(1, grant(5, generation=2), 0.0)  # another prefix: not for what was computed behind 16 tokens
    with pytest.raises(TransferCancelled):
        machine.admit("r", 1, start=0, num_pages=1)


def test_finish_names_the_first_layer_and_page_that_is_missing() -> None:
    machine = sender()
    verb(machine, 1, layers=(1,))
    machine.on_grant(1, grant(5, 6, 7), 0.0)
    with pytest.raises(ProtocolError, match="layer 0 page 0 "):
        machine.check_finish("r", 1)


class NoScan(dict):  # type: ignore[type-arg]
    """A table that is looked up, and never gone through: with ten thousand requests that takes too long."""

    def __iter__(self) -> Any:
        raise AssertionError("went through all requests")

    values = items = keys = __iter__


def test_cancels_and_revocations_look_up_what_they_need() -> None:
    machine = bound()
    verb(machine, 2, request="waits")
    machine.on_grant(1, grant(5, 6, request="granted", generation=7), 0.0)
    machine.requests.by_key, machine.grants.unmet._grants = (
        NoScan(machine.requests.by_key),
        NoScan(machine.grants.unmet._grants),
    )
    machine.grants.unmet._revocations = NoScan()
    machine.on_revoke(1, Revoke(7, "TransferCancelled", "gone"), 0.0)
    for name in ("r", "waits", "granted", "unknown"):
        machine.cancel(name, f"cancel {name}", 0.0)
    assert len(machine.requests.by_key) == 1  # what was bound ends when its op has


class Lookups(dict):  # type: ignore[type-arg]
    """The members of a group, which counts how often one of them is looked at."""

    seen = 0

    def __iter__(self) -> Any:
        for key in super().__iter__():
            self.seen += 1
            yield key

    def __getitem__(self, key: int) -> Any:
        self.seen += 1
        return super().__getitem__(key)

    def values(self) -> Any:
        return (self[key] for key in self)

    def items(self) -> Any:
        return ((key, self[key]) for key in self)


def members_seen(peers: int) -> int:
    """How many members are looked at by a request with all that may happen to it, in a group of so many peers."""
    view = group_map(0, ("p", gqa()), *((f"d{rank}", gqa()) for rank in range(1, peers)))
    members = Lookups(view.info)
    view.info = members
    machine = sender(view)
    machine.handover.flows = cast(Any, OnTheLoop())
    for name in ("r", "withdrawn", "cancelled"):
        verb(machine, 2, request=name)
    machine.on_grant(1, grant(5, 6, prefix=8), 0.0)  # behind a prefix: all requests of this name must hold the same
    machine.withdraw("withdrawn", "work")
    assert machine.cancel("cancelled", "work", 0.0)
    machine.grants.decline("declined", 0.0)
    assert machine.requests.by_key["r", 1].drained or machine.cancel("r", "work", 0.0)
    machine.submit(SendOp("anyone", ANYBODY, {}, (0, 1), 0, 2, "work"), 0.0)
    machine.on_grant(1, grant(7, 8, request="anyone", generation=2), 0.0)
    assert machine.receivers("anyone", 0.0) == (1,)
    return members.seen


def test_a_request_looks_at_no_more_members_in_a_larger_group() -> None:
    assert 0 < members_seen(100) == members_seen(2)


class OnTheLoop:
    """A resident loop that takes every request, and copies at once. opened: requests that it was given."""

    def __init__(self, *, serves: bool = True) -> None:
        self.opened: list[SenderRequest] = []
        self._serves = serves

    def heed_grants(self, heeds: bool) -> None:
        pass

    def serves(self, op: SendOp) -> bool:
        return self._serves

    def open_send(self, req: SenderRequest) -> None:
        self.opened.append(req)
        req.flow = 0

    await_grant = settle = lambda self, *args: None

    def start(self, req: SenderRequest, op: SendOp) -> bool:
        return True

    def finish(self, req: SenderRequest) -> bool:
        return True

    def moved(self, req: SenderRequest) -> int:
        return 0

    def gated(self, req: SenderRequest) -> int:
        return 0

    def take_back_send(self, req: SenderRequest) -> bool | None:
        req.flow = None
        return req.finish is not None and not req.running


@pytest.mark.parametrize("finished_first", [True, False])
def test_a_request_on_the_loop_waits_for_its_verdict_no_longer_than_any_other(finished_first: bool) -> None:
    machine = sender()
    machine.handover.flows = loop = OnTheLoop()  # the half that senders ask
    machine.on_grant(1, grant(5, 6), 0.0)
    verb(machine, 2)
    (req,) = loop.opened
    (op,) = req.running
    if finished_first:
        finish(machine)
    machine.copied(req, [op], [8], "direct", 0.0)
    if not finished_first:
        finish(machine)
    assert machine.tick(TIMEOUT - 0.1) is False
    assert machine.tick(TIMEOUT + 0.1) is True
    assert "has not reported its verdict" in str(Acts(machine).error("finish"))


@pytest.mark.parametrize("granted_first", [True, False])
def test_a_request_of_ops_that_the_loop_cannot_do_is_never_handed_over(granted_first: bool) -> None:
    """To take it back, the loop would have to stand still, which a verb would wait for."""
    machine = sender()
    machine.handover.flows = loop = OnTheLoop(serves=False)
    if granted_first:
        machine.on_grant(1, grant(5, 6), 0.0)
    verb(machine, 2)
    if not granted_first:
        machine.on_grant(1, grant(5, 6), 0.0)
    assert loop.opened == []
    assert len(Acts(machine).started) == 1


def test_a_request_to_anybody_waits_until_the_earlier_one_of_its_name_has_drained() -> None:
    machine = bound()
    (op,) = Acts(machine).started
    machine.cancel("r", "cancel", 1.0)
    machine.on_grant(1, grant(7, 8, generation=2), 1.0)
    assert machine.receivers("r", 1.0) == (ANYBODY,)
    machine.submit(SendOp("r", ANYBODY, {}, (0, 1), 0, 2, "late"), 1.0)
    machine.tick(1.1)
    assert Acts(machine).started == []
    machine.op_finished(op, None, flushed=True, now=1.2)
    machine.tick(1.3)
    (late,) = Acts(machine).started
    assert (late.dst, late.num_pages, late.work) == (1, 2, "late")
    assert machine.receivers("r", 1.3) == (1,)


@pytest.mark.parametrize(("limit", "value"), [("MAX_GRANTS", 3), ("MAX_GRANTED_PAGES", 6)])
def test_what_one_receiver_makes_a_sender_remember_is_bounded(
    limit: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grants of two pages that nobody waits for. What is over the limit fails at once; room is made by verbs."""
    monkeypatch.setattr(unmet, limit, value)
    machine = sender()
    for number in range(5):
        machine.on_grant(1, grant(5, 6, generation=number + 1, request=f"r{number}"), 0.0)
    assert [(rank, abort.generation) for rank, abort in Acts(machine).tells(Abort)] == [(1, 4), (1, 5)]
    assert len(machine.grants.unmet.grants()) == 3
    verb(machine, 1, request="r0")  # it meets its grant, which waits no more
    machine.on_grant(1, grant(5, 6, generation=6, request="r5"), 0.0)
    assert Acts(machine).tells(Abort) == []
    machine.grants.unmet.forget(1)
    assert machine.grants.unmet._waiting == {}


def test_a_request_to_anybody_binds_no_grant_of_a_rank_that_is_lost() -> None:
    """The resident loop may tell of a grant when its rank is lost already: nobody would fail the request then."""
    machine = sender()
    machine.grants.lost = {1: "rank 1 is silent"}
    machine.submit(SendOp("r", ANYBODY, {}, (0, 1), 0, 2, "op"), 0.0)
    machine.on_grant(1, grant(5, 6), 1.0)
    acts = Acts(machine)
    assert acts.started == []
    assert [rank for rank, _ in acts.tells(Abort)] == [1], "its receiver may go on waiting"
    assert isinstance(acts.settled["op"], PeerLost)
