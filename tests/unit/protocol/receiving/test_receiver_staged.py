"""Requests received through the staging ring: when pages are free, what is unpacked, which messages are believed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.protocol import RING, TIMEOUT, Acts, group_map, pages, post, receiver
from tests.helpers.references.page_transfer import gqa
from torchkv.errors import ChecksumMismatch, ProtocolError, RingExhausted, TransferCancelled, TransferTimeout
from torchkv.layout.layer_groups import PAGES
from torchkv.protocol.actions import Scatter
from torchkv.protocol.messages import (
    Abort,
    Quiesced,
    Revoke,
    Seal,
    StageAsk,
    Staged,
    StageDenied,
    StageGrant,
    Verdict,
    Withdraw,
    Withdrawn,
    pack_pages,
)
from torchkv.protocol.receiving.receiver import Receiver
from torchkv.protocol.receiving.request import ReceiverRequest
from torchkv.protocol.sending.staging_requester import Span

WRITER, OTHER, READER = range(3)
LAYERS = [0, 1]


def two_writers() -> Receiver:
    """Ranks 0 and 1 hold half of the heads each, rank 2 receives."""
    half = [gqa(tp_rank=rank, tp_size=2) for rank in (0, 1)]
    return receiver(group_map(READER, ("p", half[0]), ("p", half[1]), ("d", gqa())))


def ask(
    machine: Receiver,
    *,
    src: int = 0,
    generation: int = 1,
    serial: int = 0,
    ring_only: bool = True,
    now: float = 0.0,
    nbytes: int = 16384,
) -> Span | None:
    """Asks for a stage; the granted span, or None if it is not granted at once."""
    machine.stages.on_stage_ask(src, StageAsk(generation, serial, nbytes, nbytes, ring_only), now)
    grants = [m for to, m in take(machine) if isinstance(m, StageGrant) and (to, m.serial) == (src, serial)]
    return Span(grants[0].offset, grants[0].nbytes) if grants else None


def take(machine: Receiver) -> list[tuple[int, object]]:
    said, machine._credits.outbox = machine._credits.outbox, []
    return list(said)


def staged(
    machine: Receiver,
    *,
    src: int = 0,
    serial: int = 0,
    layers: list[int] = LAYERS,
    start: int = 0,
    num_pages: int = 2,
    now: float = 1.0,
) -> list[Scatter]:
    """Announces a stage; the unpacking jobs that follow."""
    machine.stages.on_staged(src, Staged(1, serial, layers, start, num_pages, False), now)
    jobs = [action for action in machine.actions if isinstance(action, Scatter)]
    machine.actions[:] = [action for action in machine.actions if not isinstance(action, Scatter)]
    return jobs


def in_use(machine: Receiver) -> tuple[int, int]:
    return machine._credits.ring.in_use, machine._credits.ring.quarantined


def is_free(machine: Receiver, req: ReceiverRequest) -> bool:
    assert req.ended == (not machine.leases.marks(PAGES)[req.pages].any())
    return req.ended


def fail(machine: Receiver, req: ReceiverRequest) -> None:
    machine.cancel(req.request, "cancel")
    assert isinstance(req.error, TransferCancelled)


# ---------------------------------------------------------------------- success


def test_success_waits_for_the_last_stage_to_be_unpacked() -> None:
    """The seal arrives before the unpacking has ended; a chunk that was sent twice is unpacked and waited for twice."""
    machine = receiver()
    req = post(machine, 4, 7)
    for serial in (0, 1):
        assert ask(machine, serial=serial) is not None
    (first,) = staged(machine, serial=0)
    (again,) = staged(machine, serial=1)
    machine.on_seal(0, Seal(1, 2, b""), 2.0)
    machine.stages.scattered(first, None, 3.0)
    assert not is_free(machine, req), "all bytes are here, but some of them are still being written"
    assert Acts(machine).settled == {}
    machine.stages.scattered(again, None, 4.0)
    assert is_free(machine, req)
    acts = Acts(machine)
    assert acts.settled == {"rx": None}
    assert acts.tells(Verdict)
    assert in_use(machine) == (0, 0)


def test_a_seal_alone_completes_nothing() -> None:
    machine = receiver()
    req = post(machine, 4, 7)
    ask(machine)
    (job,) = staged(machine, layers=[0])
    machine.stages.scattered(job, None, 1.0)
    machine.on_seal(0, Seal(1, 2, b""), 2.0)
    assert machine.layer_done(req, 0)
    assert not machine.layer_done(req, 1)
    assert not req.ended


def test_a_stage_said_twice_is_unpacked_once() -> None:
    machine = receiver()
    post(machine, 4, 7)
    ask(machine)
    assert len(staged(machine)) == 1
    assert staged(machine) == []


def test_a_stage_given_back_is_free_and_covers_nothing() -> None:
    machine = receiver()
    req = post(machine, 4, 7)
    ask(machine)
    assert in_use(machine)[0] > 0
    assert staged(machine, num_pages=0, layers=[]) == []
    assert in_use(machine) == (0, 0)
    assert not machine.layer_done(req, 0)


# ---------------------------------------------------------------------- failure


def test_pages_of_writers_that_promised_are_free_at_once_and_their_stages_are_not() -> None:
    machine = receiver()
    req = post(machine, 4, 7)
    ask(machine)
    fail(machine, req)
    assert is_free(machine, req)
    assert req.error.pages_safe
    assert machine.leases.quarantined() == {}
    assert Acts(machine).settled["cancel"] is None
    assert in_use(machine)[1] == 16384
    post(machine, 7, 4, request="next")  # the writer has not received the revocation yet
    machine.on_quiesced(0, Quiesced(1), 5.0)
    assert in_use(machine) == (0, 0)


def test_a_running_scatter_keeps_the_pages() -> None:
    machine = receiver()
    req = post(machine, 4, 7)
    ask(machine)
    (job,) = staged(machine)
    fail(machine, req)
    assert job.stopped
    assert not is_free(machine, req)
    assert not req.error.pages_safe
    assert Acts(machine).settled.keys() == {"rx"}
    machine.stages.scattered(job, ChecksumMismatch("too late to matter"), 2.0)
    assert is_free(machine, req)
    assert isinstance(req.error, TransferCancelled)
    assert in_use(machine) == (0, 0)


@pytest.mark.parametrize("how", ["never asked", "asked without promise", "withdrew"])
def test_pages_of_a_writer_without_promise_wait_for_its_word(how: str) -> None:
    machine = receiver()
    req = post(machine, 4, 7)
    if how != "never asked":
        ask(machine, ring_only=how == "withdrew")
    if how == "withdrew":
        machine.stages.on_withdraw(0, Withdraw(1))
        assert take(machine) == [(0, Withdrawn(1))]
    fail(machine, req)
    assert not is_free(machine, req)
    assert machine.leases.quarantined() == {4: (0,), 7: (0,)}
    machine.on_quiesced(0, Quiesced(1), 5.0)
    assert is_free(machine, req)
    assert in_use(machine) == (0, 0)


def test_one_writer_that_promised_does_not_vouch_for_the_other() -> None:
    machine = two_writers()
    req = post(machine, 4, 7, src=(0, 1))
    ask(machine, src=WRITER)
    ask(machine, src=OTHER, ring_only=False)
    fail(machine, req)
    assert machine.leases.quarantined() == {4: (OTHER,), 7: (OTHER,)}
    machine.on_quiesced(OTHER, Quiesced(1), 5.0)
    assert is_free(machine, req)
    assert in_use(machine) == (16384, 16384)
    machine.peer_dead(WRITER, 6.0)
    assert in_use(machine) == (0, 0)


def test_a_promise_is_kept_after_the_failure() -> None:
    """A late withdrawal is not confirmed, so the writer never writes to pages that another request may hold by then."""
    machine = receiver()
    req = post(machine, 4, 7)
    ask(machine)
    fail(machine, req)
    machine.stages.on_withdraw(0, Withdraw(1))
    assert take(machine) == []


@pytest.mark.parametrize("ended", [True, False])
def test_what_a_failed_request_left_in_a_stage_is_not_unpacked(ended: bool) -> None:
    machine = two_writers()
    req = post(machine, 4, 7, src=(0, 1))
    ask(machine, src=WRITER)
    if ended:
        ask(machine, src=OTHER)
    fail(machine, req)
    assert req.ended is ended
    assert staged(machine, src=WRITER) == []
    assert in_use(machine)[1] > 0, "the stage is announced as written, but its writer is not quiescent"
    assert ask(machine, src=WRITER, serial=1) is None, "and gets nothing more"


def test_a_failed_scatter_fails_the_request_everywhere() -> None:
    machine = two_writers()
    req = post(machine, 4, 7, src=(0, 1))
    ask(machine, src=WRITER)
    ask(machine, src=OTHER)
    (job,) = staged(machine, src=WRITER)
    error = ChecksumMismatch("layer 1")
    machine.stages.scattered(job, error, 2.0)
    acts = Acts(machine)
    assert acts.settled == {"rx": error}
    assert [rank for rank, _ in acts.tells(Revoke)] == [WRITER, OTHER]
    assert is_free(machine, req)


def test_a_dead_writers_scatter_is_still_waited_for() -> None:
    machine = receiver()
    req = post(machine, 4, 7)
    ask(machine)
    (job,) = staged(machine)
    machine.peer_lost(0, "rank 0 has ended")
    machine.peer_dead(0, 2.0)
    assert not is_free(machine, req)
    assert in_use(machine)[0] > 0, "it is being read"
    machine.stages.scattered(job, None, 3.0)
    assert is_free(machine, req)
    assert in_use(machine) == (0, 0)


# ---------------------------------------------------------------------- what no honest writer says


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"layers": [0, 7]}, "layer 7"),
        ({"layers": [1, 0]}, "ascend"),
        ({"layers": []}, "ascend"),
        ({"start": 1, "num_pages": 2}, "outside the grant"),
        ({"start": 1 << 40, "num_pages": 1}, "outside the grant"),
    ],
    ids=["layer", "order", "no layers", "pages", "far"],
)
def test_a_piece_outside_the_grant_fails_the_request_and_writes_nothing(wrong: dict[str, Any], words: str) -> None:
    machine = receiver()
    req = post(machine, 4, 7)
    ask(machine)
    assert staged(machine, **wrong) == []
    assert isinstance(req.error, ProtocolError)
    assert "'r'" in str(req.error)
    assert "rank 0" in str(req.error)
    assert words in str(req.error)
    assert is_free(machine, req)
    assert in_use(machine) == (0, 0)


def test_a_piece_larger_than_its_stage_is_refused() -> None:
    machine = receiver()
    req = post(machine, 4, 7)
    ask(machine, nbytes=256)
    assert staged(machine) == []
    assert isinstance(req.error, ProtocolError)
    assert "rank 0 wrote a piece of" in str(req.error)
    assert "bytes into a stage of 256" in str(req.error)


def test_a_stage_of_another_writer_cannot_be_named() -> None:
    machine = two_writers()
    post(machine, 4, 7, src=(0, 1))
    ask(machine, src=WRITER)
    assert staged(machine, src=OTHER) == []
    assert len(staged(machine, src=WRITER)) == 1


def test_a_sealed_writer_gets_no_stage() -> None:
    machine = two_writers()
    post(machine, 4, 7, src=(0, 1))
    ask(machine, src=WRITER)
    machine.on_seal(WRITER, Seal(1, 2, b""), 1.0)
    assert in_use(machine) == (0, 0), "what it was granted and did not use"
    assert ask(machine, src=WRITER, serial=1) is None
    assert staged(machine, src=WRITER) == []


# ---------------------------------------------------------------------- time


def fill_ring(machine: Receiver) -> None:
    """Another request takes the whole ring and keeps it; its deadline is far away."""
    post(machine, 20, request="hog", total=1000.0)
    assert ask(machine, nbytes=RING) is not None


def test_the_ring_keeps_the_time_of_those_who_wait_for_it() -> None:
    """A request that waits for a stage does not time out: the denial says more, and the writer's abort ends it."""
    machine = receiver()
    fill_ring(machine)
    req = post(machine, 4, 7)
    assert ask(machine, generation=2, now=0.0) is None
    now = 0.0
    while now < TIMEOUT * 1.5:
        now += 0.05
        machine.tick(now)
    assert req.error is None
    (denied,) = [message for _, message in take(machine) if isinstance(message, StageDenied)]
    assert (denied.generation, denied.serial) == (2, 0)
    machine.on_abort(0, Abort(2, "RingExhausted", denied.text))
    assert isinstance(req.error, RingExhausted)


def test_after_a_denial_a_silent_writer_is_given_up() -> None:
    machine = receiver()
    fill_ring(machine)
    req = post(machine, 4, 7)
    ask(machine, generation=2, now=0.0)
    machine.tick(TIMEOUT + 0.1)
    machine.tick(2 * TIMEOUT)
    assert req.error is None
    machine.tick(2 * TIMEOUT + 0.2)
    assert isinstance(req.error, TransferTimeout)


def test_a_stage_that_came_late_leaves_its_writer_the_full_time() -> None:
    machine = receiver()
    fill_ring(machine)
    req = post(machine, 4, 7)
    ask(machine, generation=2, now=0.0)
    machine.tick(TIMEOUT - 0.1)
    machine.stages.on_staged(0, Staged(1, 0, [], 0, 0, False), TIMEOUT - 0.1)  # the other request gives its stage back
    assert any(isinstance(message, StageGrant) for _, message in take(machine))
    machine.tick(TIMEOUT + 1)
    machine.tick(2 * TIMEOUT - 0.2)
    assert req.error is None
    machine.tick(2 * TIMEOUT)
    assert isinstance(req.error, TransferTimeout)


def test_a_total_deadline_is_not_extended_by_the_ring() -> None:
    machine = receiver()
    fill_ring(machine)
    req = post(machine, 4, 7, total=3.0)
    ask(machine, generation=2)
    machine.tick(3.0)
    assert isinstance(req.error, TransferTimeout)
    assert is_free(machine, req)


def test_a_grant_names_the_pages_it_was_posted_for() -> None:
    """A check of these helpers: jobs unpack into the pages that were posted, whatever the message says."""
    machine = receiver()
    req = post(machine, 4, 7)
    ask(machine)
    (job,) = staged(machine, start=1, num_pages=1)
    assert pack_pages(job.pages) == pack_pages(pages(4, 7)) == pack_pages(req.pages)
    assert (job.piece.start, job.piece.num_pages, job.layout.payload) == (1, 1, job.plan.nbytes(job.plan.src_page_size))
