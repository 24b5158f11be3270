"""State in the state machines of both sides: never missing, never written to another request's slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.protocol import (
    GRANT_TIMEOUT,
    TIMEOUT,
    Acts,
    finish,
    grant,
    group_map,
    moved,
    pair,
    post,
    receiver,
    send_state,
    sender,
    verb,
)
from tests.helpers.references.page_transfer import gqa
from torchkv.errors import PageOutOfRange, PeerLost, ProtocolError, TransferCancelled, TransferTimeout
from torchkv.layout.component import Component, State
from torchkv.layout.layer_groups import SLOTS as SLOT_POOL
from torchkv.layout.layout import KVLayout
from torchkv.protocol.actions import Account, Scatter, Start
from torchkv.protocol.messages import (
    Abort,
    Attest,
    Grant,
    Quiesced,
    Revoke,
    Seal,
    StageAsk,
    Staged,
    StageGrant,
    Verdict,
    Withdraw,
)
from torchkv.protocol.receiving.receiver import Receiver
from torchkv.protocol.sending import open_sends
from torchkv.protocol.sending.sender import Sender

SLOTS = 4
# `gqa` has two layers; the second of them has both states.
STATES = (
    State("ssm", (4, 3), torch.float32, shard_dim=0),
    State("conv", (2, 8), torch.int16, shard_dim=1, layers=(1,)),
)


def hybrid(tp_rank: int = 0, tp_size: int = 1, **given: object) -> KVLayout:
    return gqa(tp_rank, tp_size, **{"states": STATES, **given})


def attest(layer: int, *, state: bool, generation: int = 1) -> Attest:
    """An attestation of all tokens of a layer (two pages of 4), or of its state."""
    return Attest(generation, [layer], 0, 1 if state else 8, 10, "runs", state)


def writing() -> Sender:
    view = group_map(0, ("p", hybrid()), ("d", hybrid()), num_slots=SLOTS)
    return sender(view)


def started(machine: Sender) -> list[Start]:
    taken = machine.actions[:]
    machine.actions.clear()
    return [action for action in taken if isinstance(action, Start)]


# -- the sender: what finish asks for ---------------------------------------------------------------------------------


@pytest.mark.parametrize("granted", [True, False], ids=["granted", "before the grant"])
@pytest.mark.parametrize(("sent", "missing"), [((), 0), ((0,), 1), ((1,), 0)])
def test_finish_without_a_slot_names_the_first_layer_whose_state_was_not_sent(
    sent: tuple[int, ...], missing: int, granted: bool
) -> None:
    machine = writing()
    if granted:
        machine.on_grant(1, grant(5, 6, slot=2), 0.0)
    verb(machine, 2)
    for layer in sent:
        send_state(machine, layer)
    with pytest.raises(ProtocolError, match=rf"'r'.*rank 1.*layer {missing}'s state was not sent; give state_slot"):
        finish(machine)
    for layer in {0, 1} - set(sent):
        send_state(machine, layer)
    finish(machine)  # the request stayed open
    if not granted:
        machine.on_grant(1, grant(5, 6, slot=2), 0.0)
    for op in Acts(machine).started:
        moved(machine, op)
    assert Acts(machine).tells(Seal) == [(1, Seal(1, 2, b""))]


@pytest.mark.parametrize(("sent", "left"), [((), (0, 1)), ((0,), (1,)), ((1,), (0,)), ((1, 0), ()), ((0, 0), (1,))])
def test_finish_sends_what_was_not_sent_and_nothing_else(sent: tuple[int, ...], left: tuple[int, ...]) -> None:
    machine = writing()
    machine.on_grant(1, grant(5, 6, slot=2), 0.0)
    verb(machine, 2)
    for layer in sent:
        send_state(machine, layer)
    before = Acts(machine).started
    assert [op.layers for op in before if op.state] == [(layer,) for layer in sent]
    finish(machine, slot=3)
    after = Acts(machine).started
    assert [op.layers for op in after] == ([left] if left else [])
    for op in [*after, *before]:
        assert Acts(machine).tells(Seal) == [], "the seal waits for all state"
        moved(machine, op)
    acts = Acts(machine)
    assert acts.tells(Seal) == [(1, Seal(1, 2, b""))]
    machine.on_verdict(1, Verdict(1))
    assert Acts(machine).settled["finish"] is None


def test_state_given_before_the_grant_waits_and_then_goes_to_the_granted_slot() -> None:
    machine = writing()
    signalled = send_state(machine, 1)
    assert started(machine) == []
    machine.on_grant(1, grant(5, 6, prefix=16, slot=2), 0.0)
    late = send_state(machine, 0)
    starts = started(machine)
    assert [start.op for start in starts] == [signalled, late]
    for start in starts:
        assert start.grant.pages.tolist() == [2]
        assert start.grant.num_tokens == 1
        assert start.grant.prefix_tokens == 0
        assert {segment.component for segment in start.grant.plan.segments} == {"ssm", "conv"}
    op = verb(machine, 2)
    (page_start,) = started(machine)
    assert page_start.op is op
    assert page_start.grant.pages.tolist() == [5, 6]


def test_a_layer_may_be_sent_twice() -> None:
    machine = writing()
    machine.on_grant(1, grant(slot=0), 0.0)
    ops = [send_state(machine, layer, work=f"{i}") for i, layer in enumerate((0, 1, 0))]
    finish(machine)
    Acts(machine)
    for op in ops:
        moved(machine, op)
    acts = Acts(machine)
    assert [message.layers for _, message in acts.tells(Attest)] == [[0], [1], [0]]
    assert all(message.state for _, message in acts.tells(Attest))
    assert acts.tells(Seal) == [(1, Seal(1, 0, b""))]


def test_a_full_hit_still_carries_state_and_aux() -> None:
    """No page is granted, so none is owed. State is, and the seal of 0 pages comes after it."""
    machine = writing()
    machine.on_grant(1, grant(prefix=32, slot=1), 0.0)
    with pytest.raises(ProtocolError, match="layer 0's state"):
        finish(machine, aux=b"token")
    finish(machine, aux=b"token", slot=3)
    (op,) = Acts(machine).started
    assert (op.state, op.layers) == (True, (0, 1))
    assert Acts(machine).all == []
    moved(machine, op)
    acts = Acts(machine)
    assert [(message.layers, message.state) for _, message in acts.tells(Attest)] == [([0, 1], True)]
    assert acts.tells(Seal) == [(1, Seal(1, 0, b"token"))]


def test_trap_a_full_hit_of_layers_without_state_expects_none() -> None:
    """The layout has states, but not in the layers that the receiver holds: neither side waits for any."""
    conv = STATES[1:]  # in layer 1 only
    places = ("p", hybrid(states=conv)), ("d", hybrid(states=conv, layers=[0]))
    reading = receiver(group_map(1, *places, num_slots=SLOTS))
    req = post(reading, prefix=32)
    ((_, message),) = Acts(reading).tells(Grant)
    assert message.state_slot is None
    writing = sender(group_map(0, *places, num_slots=SLOTS))
    writing.on_grant(1, message, 0.0)
    finish(writing, aux=b"token")
    ((_, seal),) = Acts(writing).tells(Seal)
    reading.on_seal(0, seal, 0.0)
    assert Acts(reading).aux == {"rx": b"token"}
    assert req.ended


def test_a_full_hit_known_only_later_still_needs_its_state() -> None:
    machine = writing()
    finish(machine, slot=3)  # no page was sent, which is legal if the grant has none
    machine.on_grant(1, grant(slot=1), 0.0)
    (op,) = Acts(machine).started
    assert op.layers == (0, 1)


def test_pages_do_not_stand_in_for_state_nor_state_for_pages() -> None:
    machine = writing()
    machine.on_grant(1, grant(5, 6, slot=2), 0.0)
    for layer in (0, 1):
        send_state(machine, layer)
    with pytest.raises(ProtocolError, match="nothing was sent, but layer 0 page 0 is owed"):
        finish(machine)
    verb(machine, 2)
    finish(machine)


def test_what_a_wider_set_of_writers_was_thought_to_write_is_asked_for_once_the_grant_is_there() -> None:
    """Ranks 0 and 1 hold the same and share the layers. This grant names rank 0 alone, so that owes all of them."""
    flat = (State("flat", (5,), torch.uint8),)
    view = group_map(
        0, ("p", hybrid(states=flat)), ("p", hybrid(states=flat)), ("d", hybrid(states=flat)), num_slots=SLOTS
    )
    machine = sender(view)
    verb(machine, 2, dst=2)
    send_state(machine, 0, dst=2)
    finish(machine, dst=2)  # as long as both are thought to write, layer 1 is rank 1's
    machine.on_grant(2, grant(5, 6, slot=0), 0.0)
    acts = Acts(machine)
    assert "layer 1's state was not sent" in str(acts.error("finish"))
    assert acts.started == []
    assert [message.kind for _, message in acts.tells(Abort)] == ["ProtocolError"]
    both = sender(view)
    verb(both, 2, dst=2)
    send_state(both, 0, dst=2)
    finish(both, dst=2)
    both.on_grant(2, grant(5, 6, writers=(0, 1), slot=0), 0.0)
    assert len(Acts(both).started) == 2


def test_state_has_no_position_so_prefixes_and_page_counts_do_not_matter() -> None:
    view = group_map(0, ("p", hybrid()), ("d", hybrid()), ("e", hybrid()), num_slots=SLOTS)
    machine = sender(view)
    for dst in (1, 2):
        send_state(machine, 0, dst=dst, work=f"to {dst}")
    machine.on_grant(1, grant(prefix=4, slot=0), 0.0)
    machine.on_grant(2, grant(5, 6, prefix=8, slot=3), 0.0)
    assert [start.grant.pages.tolist() for start in started(machine)] == [[0], [3]]


def test_a_receiver_without_the_layers_state_gets_an_op_that_owes_nothing() -> None:
    """The receiver holds layer 0; the only state is in layer 1, which another pipeline stage receives."""
    conv = STATES[1:]
    view = group_map(0, ("p", hybrid(states=conv)), ("d", hybrid(states=conv, layers=[0])), num_slots=0)
    machine = sender(view)
    machine.on_grant(1, grant(5, 6), 0.0)
    verb(machine, 2, layers=(0,))
    Acts(machine)
    finish(machine, slot=1)
    ((op, bound),) = [(start.op, start.grant) for start in started(machine)]
    assert op.layers == (1,)
    assert bound.plan.parts == ()
    assert bound.pages.tolist() == []
    machine.attest(op, (), nbytes=0, path="none")
    assert Acts(machine).tells(Attest) == []


# -- the sender: bounds, order and failure ----------------------------------------------------------------------------


def test_verbs_of_state_after_finish_raise() -> None:
    machine = writing()
    machine.on_grant(1, grant(slot=1), 0.0)
    finish(machine, slot=0)
    with pytest.raises(ProtocolError, match="finished already"):
        send_state(machine, 0)


def test_state_counts_in_the_queue_before_the_grant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_sends, "MAX_QUEUED_OPS", 3)
    machine = writing()
    for _ in range(3):
        send_state(machine, 0)
    with pytest.raises(ProtocolError, match="3 transfers wait") as caught:
        send_state(machine, 1)
    assert caught.value.retryable
    machine.on_grant(1, grant(slot=1), 0.0)
    assert machine.requests.queued_pages == 0
    send_state(machine, 1)


def test_a_revoked_sender_is_quiescent_only_when_its_state_has_drained() -> None:
    machine = writing()
    machine.on_grant(1, grant(slot=1), 0.0)
    op = send_state(machine, 0)
    Acts(machine)
    machine.on_revoke(1, Revoke(1, "TransferCancelled", "the receiver gave up"), 1.0)
    acts = Acts(machine)
    assert acts.halted == [op]
    assert acts.tells(Quiesced) == []
    with pytest.raises(TransferCancelled, match="gave up"):
        send_state(machine, 1)
    machine.op_finished(op, TransferCancelled("stopped"), flushed=True, now=0.0)
    assert Acts(machine).tells(Quiesced) == [(1, Quiesced(1))]


def test_state_that_fails_fails_the_request() -> None:
    machine = writing()
    machine.on_grant(1, grant(slot=1), 0.0)
    op = send_state(machine, 0)
    finish(machine, slot=0)
    Acts(machine)
    machine.op_finished(op, PeerLost("gone"), flushed=True, now=0.0)
    acts = Acts(machine)
    assert isinstance(acts.error("state"), PeerLost)
    assert isinstance(acts.error("finish"), PeerLost)
    assert [message.kind for _, message in acts.tells(Abort)] == ["PeerLost"]


@pytest.mark.parametrize("slot", [None, SLOTS, 1 << 61])
def test_a_grant_without_a_usable_slot_is_refused(slot: int | None) -> None:
    machine = writing()
    send_state(machine, 0)
    with pytest.raises(ProtocolError, match=f"grant of rank 1 names state slot {slot}, it has {SLOTS} slots"):
        machine.on_grant(1, grant(5, 6, slot=slot), 0.0)
    assert Acts(machine).all == []
    assert machine.prefix_tokens("r", 1) is None


def test_a_grant_of_a_rank_without_slots_names_none() -> None:
    machine = sender(pair(0))
    with pytest.raises(ProtocolError, match="names state slot 0, it has 0 slots"):
        machine.on_grant(1, grant(5, slot=0), 0.0)
    machine.on_grant(1, grant(5), 0.0)
    assert machine.prefix_tokens("r", 1) == 0


# -- the receiver: completion -----------------------------------------------------------------------------------------


def reading(**changes: object) -> Receiver:
    return receiver(group_map(1, ("p", hybrid(**changes)), ("d", hybrid()), num_slots=SLOTS))


def halves() -> Receiver:
    """Ranks 0 and 1 hold half of the heads and of the state each, rank 2 receives."""
    return receiver(group_map(2, ("p", hybrid(0, 2)), ("p", hybrid(1, 2)), ("d", hybrid()), num_slots=SLOTS))


def complete(machine: Receiver, *, writer: int = 0, generation: int = 1) -> None:
    """One writer sends everything, and seals two pages."""
    for layer in (0, 1):
        for state in (False, True):
            machine.on_attest(writer, attest(layer, state=state, generation=generation), 0.0)
    machine.on_seal(writer, Seal(generation, 2, b""), 0.0)


def test_the_grant_names_the_slot() -> None:
    machine = reading()
    req = post(machine, 5, 6, slot=3)
    ((_, message),) = Acts(machine).tells(Grant)
    assert message.state_slot == 3
    complete(machine)
    assert Acts(machine).settled == {"rx": None}
    assert req.ended


@given(order=st.permutations([(0, False), (1, False), (0, True), (1, True), None]), twice=st.integers(0, 3))
@settings(deadline=None)
def test_done_exactly_when_all_pages_and_all_state_are_here(order: list[tuple[int, bool] | None], twice: int) -> None:
    """In any order, including the seal (None), and with one message sent twice."""
    machine = reading()
    req = post(machine, 5, 6, slot=3)
    Acts(machine)
    for at, word in enumerate([*order[: twice + 1], *order[twice:]]):
        if word is None:
            machine.on_seal(0, Seal(1, 2, b""), 0.0)
        else:
            machine.on_attest(0, attest(word[0], state=word[1]), 0.0)
        assert ("rx" in Acts(machine).settled) == (at == len(order))
    assert req.ended


@pytest.mark.parametrize("missing", [0, 1])
def test_state_that_does_not_arrive_fails_the_receive_by_its_layer(missing: int) -> None:
    machine = reading()
    req = post(machine, 5, 6, slot=3)
    for layer in (0, 1):
        machine.on_attest(0, attest(layer, state=False), 0.0)
    machine.on_attest(0, attest(1 - missing, state=True), 0.0)
    machine.on_seal(0, Seal(1, 2, b""), 0.0)
    assert "rx" not in Acts(machine).settled, "sealed, all pages here, and not complete"
    machine.tick(TIMEOUT - 0.1)
    assert "rx" not in Acts(machine).settled
    machine.tick(TIMEOUT)
    error = Acts(machine).error("rx")
    assert isinstance(error, TransferTimeout)
    assert f"'r': no progress for {TIMEOUT:g} s" in str(error)
    assert f"waiting for layer {missing}'s state from rank 0" in str(error)
    assert req.ended, "its only writer had sealed, so nothing can land any more"


def test_an_unsealed_writer_is_named_before_any_state() -> None:
    machine = reading()
    post(machine, 5, 6, slot=3)
    machine.tick(GRANT_TIMEOUT)
    assert "waiting for writer ranks [0]" in str(Acts(machine).error("rx"))


def test_every_writer_must_bring_its_own_part_of_the_state() -> None:
    machine = halves()
    post(machine, 5, 6, src=(0, 1), slot=0)
    complete(machine, writer=0)
    for layer in (0, 1):
        machine.on_attest(1, attest(layer, state=False), 0.0)
    machine.on_seal(1, Seal(1, 2, b""), 0.0)
    for _ in range(2):  # attestations of rank 0 cover rank 0's part only
        machine.on_attest(0, attest(1, state=True), 0.0)
    assert "rx" not in Acts(machine).settled
    machine.tick(TIMEOUT)
    assert "layer 0's state from rank 1" in str(Acts(machine).error("rx"))


def test_a_full_hit_waits_for_its_state() -> None:
    machine = reading()
    req = post(machine, prefix=32, slot=1)
    ((_, message),) = Acts(machine).tells(Grant)
    assert (message.pages, message.state_slot) == (b"", 1)
    machine.on_seal(0, Seal(1, 0, b"token"), 0.0)
    machine.on_attest(0, attest(0, state=True), 0.0)
    assert "rx" not in Acts(machine).settled
    assert not req.ended
    machine.on_attest(0, attest(1, state=True), 0.0)
    assert Acts(machine).aux == {"rx": b"token"}


def test_a_layer_is_done_with_its_state() -> None:
    machine = reading()
    req = post(machine, 5, 6, slot=1)
    machine.on_attest(0, attest(0, state=False), 0.0)
    machine.on_attest(0, attest(1, state=True), 0.0)
    assert not machine.layer_done(req, 0)
    assert not machine.layer_done(req, 1)
    machine.on_attest(0, attest(0, state=True), 0.0)
    assert machine.layer_done(req, 0)
    assert not machine.layer_done(req, 1)
    machine.on_attest(0, attest(1, state=False), 0.0)
    assert machine.layer_done(req, 1)


def test_a_stage_of_state_only_seals_no_pages() -> None:
    """The second pipeline stage has a layer with state and without keys."""
    layouts = {
        "first": {"layers": [0], "states": [STATES[1]]},
        "second": {"layers": [1], "states": [STATES[1]]},
        "all": {"states": [STATES[1]]},
    }

    def layout(name: str) -> KVLayout:
        keys = Component("k", 2, 2, torch.int16, layers=(0,))
        return KVLayout([keys], num_layers=2, page_size=4, **layouts[name])

    machine = receiver(
        group_map(2, ("p", layout("first")), ("p", layout("second")), ("d", layout("all")), num_slots=SLOTS)
    )
    post(machine, 5, 6, src=(0, 1), slot=2)
    machine.on_attest(0, attest(0, state=False), 0.0)
    machine.on_seal(0, Seal(1, 2, b""), 0.0)
    machine.on_seal(1, Seal(1, 0, b""), 0.0)
    assert "rx" not in Acts(machine).settled
    machine.on_attest(1, attest(1, state=True), 0.0)
    assert Acts(machine).settled == {"rx": None}


def test_what_is_said_of_layers_that_are_not_owed_changes_nothing() -> None:
    machine = reading()
    post(machine, 5, 6, slot=1)
    for layer in (7, 1 << 19):
        machine.on_attest(0, attest(layer, state=True), 0.0)
    for layer in (0, 1):
        machine.on_attest(0, attest(layer, state=False), 0.0)
    machine.on_seal(0, Seal(1, 2, b""), 0.0)
    assert "rx" not in Acts(machine).settled
    assert machine.requests.live["r"].writers[0].states == set(), "and takes no room"


def test_attestations_of_an_earlier_generation_say_nothing_of_this_ones_state() -> None:
    machine = reading()
    post(machine, 5, 6, slot=1)
    machine.cancel("r", "cancel")
    second = post(machine, 8, 9, slot=2)
    for layer in (0, 1):
        machine.on_attest(0, attest(layer, state=False, generation=2), 0.0)
    machine.on_seal(0, Seal(2, 2, b""), 0.0)
    Acts(machine)
    for layer in (0, 1):
        machine.on_attest(0, attest(layer, state=True, generation=1), 0.0)
    assert Acts(machine).all == []
    for layer in (0, 1):
        machine.on_attest(0, attest(layer, state=True, generation=2), 0.0)
    assert second.ended


# -- the receiver: leases ---------------------------------------------------------------------------------------------


def test_a_slot_outside_the_cache_is_refused_with_nothing_leased() -> None:
    machine = reading()
    with pytest.raises(PageOutOfRange, match=rf"'r'.*state_slot={SLOTS} is outside this cache's \[0, {SLOTS}\)"):
        post(machine, 5, 6, slot=SLOTS)
    assert Acts(machine).all == []
    post(machine, 5, 6, slot=SLOTS - 1)


def test_leased_and_quarantined_slots_are_named_with_their_holder() -> None:
    machine = reading()
    post(machine, 5, 6, slot=1)
    with pytest.raises(PageOutOfRange, match=r"state slot 1 is leased to request 'r'; wait .* cancel\('r'\)"):
        post(machine, 8, slot=1, request="other")
    machine.cancel("r", "cancel")
    with pytest.raises(PageOutOfRange, match=r"slot 1 is quarantined: ranks \[0\] .* request 'r'; use other slots"):
        post(machine, 8, slot=1, request="other")
    post(machine, 8, slot=2, request="other", work="other")  # page 8 was not leased by the call that was refused
    assert machine.leases.quarantined(slots=True) == {1: (0,)}
    assert machine.leases.quarantined() == {5: (0,), 6: (0,)}
    machine.on_quiesced(0, Quiesced(1), 0.0)
    assert machine.leases.quarantined(slots=True) == {}
    post(machine, 5, slot=1)


def test_a_slot_is_free_after_success() -> None:
    machine = reading()
    for generation in (1, 2):
        post(machine, 5, 6, slot=1)
        complete(machine, generation=generation)
        assert not machine.leases.marks(SLOT_POOL).any()


def test_cancel_keeps_the_slot_of_a_full_hit_until_every_writer_is_quiescent() -> None:
    """A full hit leases no page, so only the slot can keep the request from ending."""
    machine = halves()
    req = post(machine, src=(0, 1), slot=3)
    machine.cancel("r", "cancel")
    assert isinstance(req.error, TransferCancelled)
    assert not req.error.pages_safe
    machine.on_quiesced(1, Quiesced(1), 0.0)
    assert machine.leases.quarantined(slots=True) == {3: (0,)}
    assert "cancel" not in Acts(machine).settled
    machine.on_quiesced(0, Quiesced(1), 0.0)
    assert Acts(machine).settled["cancel"] is None
    assert req.error.pages_safe
    assert machine.leases.quarantined(slots=True) == {}


def test_a_timeout_frees_no_slot() -> None:
    machine = reading()
    post(machine, slot=3)
    machine.tick(GRANT_TIMEOUT)
    assert isinstance(Acts(machine).error("rx"), TransferTimeout)
    assert machine.leases.quarantined(slots=True) == {3: (0,)}


# -- the receiver: staged ---------------------------------------------------------------------------------------------


@dataclass
class Ring:
    """A receiver, and its writer, which promises to write to the staging ring only unless told otherwise."""

    machine: Receiver
    serial: int = 0

    def stage(self, *layers: int, ring_only: bool = True, num_pages: int = 1, start: int = 0) -> list[Scatter]:
        """Asks for a stage and announces it as holding the state of ``layers``; the unpacking jobs that follow."""
        machine, serial = self.machine, self.serial
        self.serial += 1
        machine.stages.on_stage_ask(0, StageAsk(1, serial, 4096, 4096, ring_only), 0.0)
        said, machine._credits.outbox = machine._credits.outbox, []
        assert [type(message) for _, message in said] == [StageGrant]
        machine.stages.on_staged(0, Staged(1, serial, list(layers), start, num_pages, False, True), 0.0)
        jobs = [action for action in machine.actions if isinstance(action, Scatter)]
        machine.actions[:] = [action for action in machine.actions if not isinstance(action, Scatter)]
        return jobs


def test_a_stage_of_state_is_unpacked_into_the_slot_and_counts_as_state_only() -> None:
    machine = reading()
    req = post(machine, 5, 6, slot=3)
    (job,) = Ring(machine).stage(0, 1)
    assert job.state
    assert job.pages.tolist() == [3]
    assert job.num_tokens == 1
    assert {section.segment.component for section in job.layout.sections} == {"ssm", "conv"}
    assert job.layout.payload == 2 * 48 + 32
    machine.stages.scattered(job, None, 1.0)
    assert req.writers[0].states == {0, 1}
    plan = req.writers[0].plan
    assert req.writers[0].attested.first_gap(plan.owed(req.num_tokens)) == (0, 0), "state is not tokens"
    (account,) = [action for action in Acts(machine).all if isinstance(action, Account)]
    assert account.nbytes == 128
    for layer in (0, 1):
        machine.on_attest(0, attest(layer, state=False), 2.0)
    machine.on_seal(0, Seal(1, 2, b""), 2.0)
    assert req.ended


def test_success_waits_for_state_that_is_still_being_unpacked() -> None:
    machine = reading()
    req = post(machine, slot=3)
    ring = Ring(machine)
    (first,) = ring.stage(0, 1)
    (again,) = ring.stage(0)
    machine.on_seal(0, Seal(1, 0, b""), 1.0)
    machine.stages.scattered(first, None, 1.0)
    assert not req.ended, "the second copy of layer 0 may still be on its way into the slot"
    machine.stages.scattered(again, None, 1.0)
    assert req.ended


def test_a_failed_receive_keeps_its_slot_while_state_is_being_unpacked() -> None:
    machine = reading()
    req = post(machine, slot=3)
    (job,) = Ring(machine).stage(0)
    machine.cancel("r", "cancel")
    assert machine.leases.quarantined(slots=True) == {3: ()}, "by no rank, but by this one itself"
    machine.stages.scattered(job, None, 1.0)
    assert req.ended
    post(machine, slot=3)


def test_a_slot_of_a_writer_that_promised_is_free_at_once_and_of_one_that_withdrew_it_is_not() -> None:
    for withdrawn in (False, True):
        machine = reading()
        req = post(machine, slot=3)
        (job,) = Ring(machine).stage(0)
        machine.stages.scattered(job, None, 1.0)
        if withdrawn:
            machine.stages.on_withdraw(0, Withdraw(1))
        machine.cancel("r", "cancel")
        assert req.ended == (not withdrawn)
        assert machine.leases.quarantined(slots=True) == ({3: (0,)} if withdrawn else {})


@pytest.mark.parametrize(
    ("layers", "num_pages", "start"),
    [([2], 1, 0), ([0, 7], 1, 0), ([], 1, 0), ([1, 0], 1, 0), ([0, 0], 1, 0), ([0], 2, 0), ([0], 1, 1)],
)
def test_a_stage_that_no_honest_writer_fills_fails_the_receive(layers: list[int], num_pages: int, start: int) -> None:
    machine = reading()
    post(machine, 5, 6, slot=3)
    assert Ring(machine).stage(*layers, num_pages=num_pages, start=start) == []
    error = Acts(machine).error("rx")
    assert isinstance(error, ProtocolError)
    assert "'r': rank 0 wrote a stage" in str(error)
    assert machine._credits.ring.in_use == 0


@pytest.mark.parametrize("states", [(), STATES[1:]], ids=["stateless", "none in its layers"])
def test_a_stage_of_state_for_a_receiver_without_a_slot_fails_the_receive(states: tuple[State, ...]) -> None:
    """The receiver has no slot, so nothing may be written to slot 0 instead."""
    for layer in (0, 1):
        machine = receiver(group_map(1, ("p", hybrid(states=states)), ("d", hybrid(states=states, layers=[0]))))
        post(machine, 5, 6)
        assert Ring(machine).stage(layer) == []
        assert isinstance(Acts(machine).error("rx"), ProtocolError)


def test_pages_of_a_state_stage_are_not_taken_for_pages_of_the_cache() -> None:
    """Only the message's flag says that a stage holds state: without it, layers 0 and 1 are keys and values."""
    machine = reading()
    req = post(machine, 5, 6, slot=3)
    machine.stages.on_stage_ask(0, StageAsk(1, 0, 4096, 4096, True), 0.0)
    machine.stages.on_staged(0, Staged(1, 0, [0, 1], 0, 2, False, False), 0.0)
    (job,) = [action for action in machine.actions if isinstance(action, Scatter)]
    assert np.array_equal(job.pages, req.pages)
    machine.stages.scattered(job, None, 1.0)
    assert req.writers[0].states == set()
