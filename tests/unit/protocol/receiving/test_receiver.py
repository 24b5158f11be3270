"""Leases, coverage and revocation on the receiving side, without an engine."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.protocol import GRANT_TIMEOUT, TIMEOUT, Acts, group_map, post, receiver
from tests.helpers.references.page_transfer import gqa
from torchkv.errors import PageOutOfRange, PeerLost, ProtocolError, TransferCancelled, TransferTimeout
from torchkv.layout.layer_groups import PAGES
from torchkv.layout.layout import KVLayout
from torchkv.protocol.actions import Account
from torchkv.protocol.messages import (
    Abort,
    Alive,
    Attest,
    Grant,
    InstanceVerdict,
    Outcome,
    Post,
    Quiesced,
    Revoke,
    Seal,
    Verdict,
)
from torchkv.protocol.receiving.receiver import Receiver

KINDS = st.sampled_from(["attest", "seal", "abort", "quiesced", "alive"])


def attest(lo: int, hi: int, *layers: int, generation: int = 1) -> Attest:
    return Attest(generation, list(layers or (0, 1)), lo, hi, 10, "runs")


def complete(machine: Receiver, *, generation: int = 1, tokens: int = 8, writer: int = 0, aux: bytes = b"") -> None:
    """One writer attests all tokens and seals them; its page size is 4."""
    machine.on_attest(writer, attest(0, tokens, generation=generation), 0.0)
    machine.on_seal(writer, Seal(generation, tokens // 4, aux), 0.0)


def halves() -> Receiver:
    """Ranks 0 and 1 hold half of the heads each, rank 2 receives."""
    return receiver(group_map(2, ("p", gqa(0, 2)), ("p", gqa(1, 2)), ("d", gqa())))


def leased(machine: Receiver) -> set[int]:
    return {page for page, generation in enumerate(machine.leases.marks(PAGES).tolist()) if generation}


# -- success ----------------------------------------------------------------------------------------------------------


def test_grant_coverage_seal_verdict() -> None:
    machine = receiver()
    req = post(machine, 5, 6, prefix=8)
    acts = Acts(machine)
    ((rank, message),) = acts.tells(Grant)
    assert (rank, message.request, message.generation, message.prefix_tokens, message.writers) == (0, "r", 1, 8, [0])
    assert leased(machine) == {5, 6}
    machine.on_attest(0, attest(0, 8), 0.0)
    assert Acts(machine).settled == {}, "not before the seal"
    machine.on_seal(0, Seal(1, 2, b"token"), 0.0)
    acts = Acts(machine)
    assert acts.settled == {"rx": None}
    assert acts.aux == {"rx": b"token"}
    assert acts.told == [(0, Verdict(1))]
    assert leased(machine) == set()
    assert req.ended


def test_the_seal_may_not_stand_in_for_bytes() -> None:
    machine = receiver()
    post(machine, 5, 6)
    machine.on_attest(0, attest(0, 8, 0), 0.0)
    machine.on_attest(0, attest(0, 4, 1), 0.0)
    machine.on_seal(0, Seal(1, 2, b""), 0.0)
    assert Acts(machine).settled == {}
    machine.on_attest(0, attest(4, 8, 1), 0.0)
    assert Acts(machine).settled == {"rx": None}


@given(st.integers(0, 1 << 32))
@settings(max_examples=60, deadline=None)
def test_chunks_in_any_order_overlapping_and_repeated(seed: int) -> None:
    """The request is complete exactly when the union of what was attested covers every layer."""
    dice = random.Random(seed)
    machine = receiver()
    post(machine, 5, 6, 7)
    machine.on_seal(0, Seal(1, 3, b""), 0.0)
    missing = {(layer, token) for layer in (0, 1) for token in range(12)}
    Acts(machine)
    while missing:
        layer, lo = dice.choice([0, 1]), dice.randrange(12)
        hi = dice.randint(lo, 12)
        machine.on_attest(0, attest(lo, hi, layer), 0.0)
        missing -= {(layer, token) for token in range(lo, hi)}
        assert ("rx" in Acts(machine).settled) == (not missing)


def test_two_writers_must_both_seal_and_cover() -> None:
    machine = halves()
    post(machine, 5, 6, src=(0, 1))
    assert [rank for rank, _ in Acts(machine).tells(Grant)] == [0, 1]
    complete(machine, writer=0)
    complete(machine, writer=0)
    assert Acts(machine).settled == {}
    complete(machine, writer=1)
    acts = Acts(machine)
    assert acts.settled == {"rx": None}
    assert [rank for rank, _ in acts.tells(Verdict)] == [0, 1]


def test_striped_writers_owe_their_stripe_only() -> None:
    """Two ranks hold the same latent, so each of them writes every other page."""
    mla = KVLayout.mla(num_layers=2, latent_dim=4, rope_dim=2, page_size=4, dtype=gqa().components[0].dtype)
    machine = receiver(group_map(2, ("p", mla), ("p", mla), ("d", mla)))
    post(machine, 5, 6, src=(0, 1))
    for writer, (lo, hi) in enumerate([(0, 4), (4, 8)]):
        machine.on_attest(writer, attest(lo, hi), 0.0)
        machine.on_seal(writer, Seal(1, 2, b""), 0.0)
    assert Acts(machine).settled == {"rx": None}
    post(machine, 5, 6, src=(0, 1))
    for writer in (0, 1):
        machine.on_attest(writer, attest(0, 4, generation=2), 0.0)
        machine.on_seal(writer, Seal(2, 2, b""), 0.0)
    assert "rx" not in Acts(machine).settled, "the second stripe is missing"


def test_a_rank_that_holds_nothing_for_us_is_not_awaited() -> None:
    machine = receiver(group_map(2, ("p", gqa()), ("p", gqa(layers=[9], num_layers=10)), ("d", gqa())))
    post(machine, 5, src=(0, 1))
    assert [rank for rank, _ in Acts(machine).tells(Grant)] == [0]
    complete(machine, tokens=4)
    assert Acts(machine).settled == {"rx": None}


def test_no_pages_need_a_seal_and_nothing_else() -> None:
    machine = receiver()
    post(machine)
    Acts(machine)
    machine.on_seal(0, Seal(1, 0, b"token"), 0.0)
    assert Acts(machine).aux == {"rx": b"token"}


def test_single_layers_are_done_early() -> None:
    machine = receiver()
    req = post(machine, 5, 6)
    machine.on_attest(0, attest(0, 8, 1), 0.0)
    assert machine.layer_done(req, 1)
    assert not machine.layer_done(req, 0)
    machine.on_abort(0, Abort(1, "PeerLost", "x"))
    with pytest.raises(PeerLost):
        machine.layer_done(req, 1)


# -- leases -----------------------------------------------------------------------------------------------------------


def test_repeated_and_foreign_pages_are_named() -> None:
    machine = receiver()
    with pytest.raises(PageOutOfRange, match="page 7 is named twice"):
        post(machine, 5, 7, 6, 7)
    with pytest.raises(PageOutOfRange, match=r"page 32 is outside this cache's \[0, 32\)"):
        post(machine, 5, 32)
    with pytest.raises(PageOutOfRange, match="page -1"):
        post(machine, -1)
    assert Acts(machine).all == []
    assert leased(machine) == set()


def test_leased_and_quarantined_pages_are_named_with_their_holder() -> None:
    machine = receiver()
    post(machine, 5, 6)
    with pytest.raises(PageOutOfRange, match=r"page 6 is leased to request 'r'; wait .* cancel\('r'\)"):
        post(machine, 9, 6, request="other")
    machine.cancel("r", "cancel")
    with pytest.raises(PageOutOfRange, match=r"page 5 is quarantined: ranks \[0\] may still write .* request 'r'"):
        post(machine, 5, request="other")
    assert machine.leases.quarantined() == {5: (0,), 6: (0,)}
    assert leased(machine) == {5, 6}
    machine.on_quiesced(0, Quiesced(1), 0.0)
    assert machine.leases.quarantined() == {}
    post(machine, 5, request="other")


def test_a_name_in_use_is_refused() -> None:
    machine = receiver()
    post(machine, 5)
    with pytest.raises(ProtocolError, match="being received already"):
        post(machine, 6)
    assert leased(machine) == {5}


def test_the_prefix_must_fit_the_writers_pages() -> None:
    machine = receiver(group_map(1, ("p", gqa(page_size=8)), ("d", gqa(page_size=4))))
    with pytest.raises(ProtocolError, match="prefix_tokens=4 is not a multiple of the page size 8 of writer rank 0"):
        post(machine, 5, prefix=4)
    assert leased(machine) == set()


# -- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sealed", [0, 1, 3])
def test_a_seal_that_does_not_match_the_grant_fails_closed(sealed: int) -> None:
    machine = receiver()
    post(machine, 5, 6)
    machine.on_attest(0, attest(0, 8), 0.0)
    machine.on_seal(0, Seal(1, sealed, b""), 0.0)
    acts = Acts(machine)
    assert f"sealed {sealed} pages" in str(acts.error("rx"))
    assert isinstance(acts.error("rx"), ProtocolError)


def test_unlike_aux_fails_and_equal_or_single_aux_does_not() -> None:
    for first, second, fine in ((b"a", b"b", False), (b"a", b"a", True), (b"a", b"", True), (b"", b"", True)):
        machine = halves()
        post(machine, 5, 6, src=(0, 1))
        complete(machine, writer=0, aux=first)
        complete(machine, writer=1, aux=second)
        acts = Acts(machine)
        if fine:
            assert acts.aux == {"rx": first}
        else:
            assert "unlike aux" in str(acts.error("rx"))


# -- failure and quiescence -------------------------------------------------------------------------------------------


def test_failure_revokes_at_every_writer_and_waits_for_every_one() -> None:
    machine = halves()
    req = post(machine, 5, 6, src=(0, 1))
    machine.cancel("r", "cancel")
    acts = Acts(machine)
    error = acts.error("rx")
    assert isinstance(error, TransferCancelled)
    assert [rank for rank, _ in acts.tells(Revoke)] == [0, 1]
    assert "cancel" not in acts.settled
    machine.on_quiesced(1, Quiesced(1), 0.0)
    machine.on_quiesced(1, Quiesced(1), 0.0)
    assert Acts(machine).settled == {}
    assert leased(machine) == {5, 6}
    assert not error.pages_safe
    assert req.pending_writers() == (0,)
    machine.on_quiesced(0, Quiesced(1), 0.0)
    assert Acts(machine).settled == {"cancel": None}
    assert leased(machine) == set()
    assert error.pages_safe


def test_one_writers_abort_revokes_at_the_others() -> None:
    machine = halves()
    post(machine, 5, src=(0, 1))
    Acts(machine)
    machine.on_abort(0, Abort(1, "TransferTimeout", "stuck"))
    acts = Acts(machine)
    assert isinstance(acts.error("rx"), TransferTimeout)
    assert [rank for rank, _ in acts.tells(Revoke)] == [0, 1]
    assert leased(machine) == {5}, "an abort is no quiescence"


def test_a_sealed_writer_is_quiescent() -> None:
    machine = halves()
    post(machine, 5, 6, src=(0, 1))
    complete(machine, writer=0)
    machine.cancel("r", "cancel")
    assert machine.leases.quarantined() == {5: (1,), 6: (1,)}
    machine.on_quiesced(1, Quiesced(1), 0.0)
    assert leased(machine) == set()


def test_cancel_is_idempotent() -> None:
    machine = receiver()
    post(machine, 5)
    assert machine.cancel("r", "one") == ["one"]
    assert machine.cancel("r", "two") == ["two"]
    machine.on_quiesced(0, Quiesced(1), 0.0)
    assert {"one", "two"} <= Acts(machine).settled.keys()
    assert machine.cancel("r", "three") == []
    assert machine.cancel("never heard of", "four") == []


def test_only_writers_of_the_grant_are_believed() -> None:
    machine = receiver(group_map(1, ("p", gqa()), ("d", gqa()), ("x", gqa())))
    post(machine, 5)
    machine.cancel("r", "cancel")
    machine.on_quiesced(2, Quiesced(1), 0.0)
    machine.on_quiesced(1, Quiesced(1), 0.0)
    assert leased(machine) == {5}
    post(machine, 6, request="s")
    Acts(machine)
    complete(machine, generation=2, tokens=4, writer=2)
    machine.on_abort(2, Abort(2, "PeerLost", "x"))
    assert Acts(machine).all == []


def test_quiesced_of_a_live_request_is_no_end() -> None:
    machine = receiver()
    req = post(machine, 5)
    machine.on_quiesced(0, Quiesced(1), 0.0)
    assert req.pending_writers() == (0,)
    assert leased(machine) == {5}


@pytest.mark.parametrize("earlier", ["succeeded", "was cancelled"])
def test_a_write_report_of_an_older_generation_covers_nothing(earlier: str) -> None:
    """A late attestation of an earlier generation says nothing about the bytes of the present one."""
    machine = receiver()
    first = post(machine, 5, 6)
    if earlier == "succeeded":
        complete(machine, generation=1)
    else:
        machine.cancel("r", "cancel")
    assert first.ended == (earlier == "succeeded")
    second = post(machine, 8, 9)
    machine.on_attest(0, attest(0, 4, generation=2), 0.0)
    machine.on_seal(0, Seal(2, 2, b""), 0.0)
    Acts(machine)

    machine.on_attest(0, attest(0, 8, generation=1), 0.0)  # tokens that are missing, but of the earlier generation
    acts = Acts(machine)
    assert "rx" not in acts.settled
    assert not any(isinstance(action, Account) for action in acts.all)
    assert not machine.layer_done(second, 0)
    assert {8, 9} <= leased(machine)

    machine.on_attest(0, attest(0, 8, generation=2), 0.0)  # the same message, of the present generation
    assert Acts(machine).settled["rx"] is None
    assert second.ended


@given(st.lists(st.tuples(KINDS, st.integers(0, 1)), max_size=12))
@settings(max_examples=100, deadline=None)
def test_messages_of_an_earlier_generation_change_nothing(late: list[tuple[str, int]]) -> None:
    """The name is used again while the first request of that name still waits for its writers."""
    machine = halves()
    post(machine, 5, 6, src=(0, 1))
    machine.cancel("r", "cancel")
    second = post(machine, 8, 9, src=(0, 1))
    Acts(machine)
    messages = {
        "attest": lambda w: machine.on_attest(w, attest(0, 8), 0.0),
        "seal": lambda w: machine.on_seal(w, Seal(1, 2, b"old"), 0.0),
        "abort": lambda w: machine.on_abort(w, Abort(1, "PeerLost", "old")),
        "quiesced": lambda w: machine.on_quiesced(w, Quiesced(1), 0.0),
        "alive": lambda w: machine.on_alive(w, Alive(1, False), 0.0),
    }
    for kind, writer in late:
        messages[kind](writer)
    assert "rx" not in Acts(machine).settled
    assert second.pending_writers() == (0, 1)
    assert second.progress_at is None
    assert {8, 9} <= leased(machine)
    complete(machine, generation=2, writer=0)
    complete(machine, generation=2, writer=1)
    acts = Acts(machine)
    assert acts.settled["rx"] is None
    assert acts.aux["rx"] == b""


# -- clocks and liveness ----------------------------------------------------------------------------------------------


def test_two_clocks() -> None:
    machine = receiver()
    post(machine, 5, 6, now=0.0)
    machine.tick(GRANT_TIMEOUT - 0.1)
    assert Acts(machine).settled == {}
    machine.on_attest(0, attest(0, 4), GRANT_TIMEOUT - 0.1)
    machine.tick(GRANT_TIMEOUT + TIMEOUT - 0.2)
    machine.on_alive(0, Alive(1, False), GRANT_TIMEOUT + TIMEOUT - 0.2)
    machine.tick(GRANT_TIMEOUT + TIMEOUT + 1)
    assert Acts(machine).settled == {}
    machine.tick(GRANT_TIMEOUT + 2 * TIMEOUT)
    error = Acts(machine).error("rx")
    assert isinstance(error, TransferTimeout)
    assert "no progress" in str(error)
    assert "[0]" in str(error)
    assert leased(machine) == {5, 6}, "a timeout frees no pages"
    assert not error.pages_safe


def test_no_first_byte() -> None:
    machine = receiver()
    post(machine, 5)
    machine.tick(GRANT_TIMEOUT)
    assert "no byte and no seal" in str(Acts(machine).error("rx"))


def test_a_total_replaces_both() -> None:
    machine = receiver()
    post(machine, 5, 6, total=3.0, now=1.0)
    machine.on_attest(0, attest(0, 4), 3.9)
    machine.tick(3.9)
    assert Acts(machine).settled == {}
    machine.tick(4.0)
    assert "timeout=3" in str(Acts(machine).error("rx"))


def test_sealed_writers_are_told_that_the_request_is_alive() -> None:
    machine = halves()
    post(machine, 5, 6, src=(0, 1))
    complete(machine, writer=0)
    Acts(machine)
    machine.tick(TIMEOUT / 2)
    assert Acts(machine).told == [(0, Alive(1, True))]


def test_a_lost_writer_fails_what_still_needs_it() -> None:
    machine = halves()
    post(machine, 5, 6, src=(0, 1))
    complete(machine, writer=0)
    Acts(machine)
    machine.peer_lost(0, "rank 0 is silent")
    assert Acts(machine).all == [], "it has sealed: nothing more is needed of it"
    machine.peer_lost(1, "rank 1 is silent")
    assert isinstance(Acts(machine).error("rx"), PeerLost)
    assert machine.leases.quarantined() == {5: (1,), 6: (1,)}
    machine.peer_dead(0, 0.0)
    assert leased(machine) == {5, 6}
    machine.peer_dead(1, 0.0)
    assert leased(machine) == set()


# -- instances --------------------------------------------------------------------------------------------------------


def half_of_an_instance() -> Receiver:
    """Rank 2 receives; its instance is ranks 1 and 2, and rank 1 is the leader."""
    return receiver(group_map(2, ("p", gqa()), ("d", gqa(0, 2)), ("d", gqa(1, 2))))


def test_success_waits_for_the_instance() -> None:
    machine = half_of_an_instance()
    post(machine, 5, 6, prefix=4)
    assert Acts(machine).tells(Post) == [(1, Post("r", 1, 4, 8, 4))]
    complete(machine)
    acts = Acts(machine)
    assert acts.settled == {}
    assert acts.told == [(1, Outcome("r", 1, "", ""))]
    machine.on_instance_verdict(0, InstanceVerdict(1, "", ""))
    machine.on_instance_verdict(1, InstanceVerdict(2, "", ""))
    assert Acts(machine).settled == {}
    machine.on_instance_verdict(1, InstanceVerdict(1, "", ""))
    acts = Acts(machine)
    assert acts.settled == {"rx": None}
    assert acts.told == [(0, Verdict(1))]


def test_a_success_that_comes_too_early_is_not_believed() -> None:
    machine = half_of_an_instance()
    post(machine, 5, 6)
    Acts(machine)
    machine.on_instance_verdict(1, InstanceVerdict(1, "", ""))
    assert Acts(machine).all == []


def test_failure_of_another_rank_fails_this_one() -> None:
    machine = half_of_an_instance()
    post(machine, 5, 6)
    Acts(machine)
    machine.on_instance_verdict(1, InstanceVerdict(1, "PeerLost", "rank 1 lost its writer"))
    acts = Acts(machine)
    assert isinstance(acts.error("rx"), PeerLost)
    assert [rank for rank, _ in acts.tells(Revoke)] == [0]
    assert acts.tells(Outcome) == [], "the leader knows"


def test_an_own_failure_is_told_to_the_leader() -> None:
    machine = half_of_an_instance()
    post(machine, 5, 6)
    Acts(machine)
    machine.on_abort(0, Abort(1, "PageOutOfRange", "x"))
    assert [(rank, outcome.kind) for rank, outcome in Acts(machine).tells(Outcome)] == [(1, "PageOutOfRange")]


def test_a_lost_leader_fails_open_receives() -> None:
    machine = half_of_an_instance()
    post(machine, 5, 6)
    complete(machine)
    machine.peer_lost(1, "rank 1 is silent")
    assert isinstance(Acts(machine).error("rx"), PeerLost)


def test_a_rank_that_is_done_leaves_the_time_to_its_leader() -> None:
    """If a complete rank timed out by itself, it could fail while the leader declares success."""
    machine = half_of_an_instance()
    post(machine, 5, 6)
    complete(machine)
    machine.tick(100 * GRANT_TIMEOUT)
    assert "rx" not in Acts(machine).settled


def test_fail_all_ends_everything_now() -> None:
    machine = receiver()
    post(machine, 5)
    post(machine, 6, request="s", work="rx2")
    machine.cancel("s", "cancel")
    machine.fail_all(TransferCancelled("the group was destroyed"))
    assert Acts(machine).settled.keys() == {"rx", "rx2", "cancel"}


def test_a_cancel_looks_up_what_it_needs() -> None:
    class NoScan(dict):  # type: ignore[type-arg]
        def values(self) -> Any:
            raise AssertionError("went through all requests")

    machine = receiver()
    for name, page in (("r", 1), ("other", 2)):
        machine.posts.post(name, np.array([page]), (0,), prefix_tokens=0, total=None, work=name, now=0.0)
    machine.requests.by_generation = NoScan(machine.requests.by_generation)
    assert machine.cancel("r", "cancel") == ["cancel"]
    assert machine.cancel("unknown", "cancel") == []
    machine.on_quiesced(0, Quiesced(1), 1.0)
    assert list(machine.requests._named) == ["other"]


def complete_member() -> Receiver:
    """`half_of_an_instance`, all of whose bytes have come."""
    machine = half_of_an_instance()
    post(machine, 5, 6)
    complete(machine)
    Acts(machine)
    return machine


@pytest.mark.parametrize("verdict", ["", "TransferCancelled"])
def test_a_rank_that_is_complete_only_asks(verdict: str) -> None:
    """Its leader may have declared success already. What the leader says is what happens."""
    machine = complete_member()
    assert machine.cancel("r", "cancel") == ["cancel"]
    acts = Acts(machine)
    assert [message.kind for _, message in acts.tells(Outcome)] == ["TransferCancelled"]
    assert (acts.settled, acts.tells(Revoke)) == ({}, [])
    assert machine.cancel("r", "again") == ["again"]
    machine.on_abort(0, Abort(1, "TransferCancelled", "the sender too"))
    assert Acts(machine).all == [], "it has asked"
    machine.on_instance_verdict(1, InstanceVerdict(1, verdict, "cancelled"))
    acts = Acts(machine)
    assert (acts.settled["rx"] is None) == (verdict == "")
    assert bool(acts.tells(Revoke)) == (verdict != "")
    assert acts.tells(Outcome) == []


def test_who_asks_and_then_loses_the_leader_fails() -> None:
    machine = complete_member()
    machine.cancel("r", "cancel")
    machine.peer_lost(1, "rank 1 is silent")
    assert isinstance(Acts(machine).error("rx"), PeerLost)


def test_who_completes_when_the_leader_is_lost_fails() -> None:
    """Nobody would ever decide."""
    machine = half_of_an_instance()
    machine.peer_lost(1, "rank 1 is silent")
    post(machine, 5, 6)
    complete(machine)
    assert isinstance(Acts(machine).error("rx"), PeerLost)
    machine.peer_found(1)
    post(machine, 7, 8, request="next", work="next")
    assert Acts(machine).tells(Post)
