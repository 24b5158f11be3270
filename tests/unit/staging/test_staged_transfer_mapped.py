"""A `StagedTransfer` into a ring that is mapped here: pieces are gathered straight into their stages, nothing is put.

When the request fails, the receiver quarantines the stage: what is written later must still land inside it.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.helpers.fakes.staged_peer import (
    DST,
    LAYER,
    LEAST,
    RING,
    SRC,
    Case,
    SlowPacker,
    offsets,
    pages_sent,
    run_to_end,
)
from tests.helpers.packing import Pages
from tests.helpers.references.page_transfer import Pool, differences, gqa, reference
from torchkv.errors import ChecksumMismatch, KVError, PageOutOfRange, ProtocolError, RingExhausted, TransportUnavailable
from torchkv.layout.pieces import Piece, piece_layout
from torchkv.protocol.actions import Scatter
from torchkv.protocol.messages import Staged
from torchkv.protocol.receiving.stage_allocator import Stage
from torchkv.staging.host_packer import HostPacker
from torchkv.staging.memory import StageMemory
from torchkv.transfer.peer_connection import Counter


class Mapped(Case):
    """A transfer into a mapped ring. own: bytes of the send ring, which it should not need."""

    def __init__(self, *, own: int = 0, **settings: object) -> None:
        super().__init__(own=own, mapped=True, **settings)

    def check_untouched(self) -> None:
        """Checks that nothing was put and the send ring was not allocated."""
        assert (self.wire.puts, self.wire.flushes) == ([], [])
        assert self.taken == []
        assert self.stages.taken == 0
        assert self.stages.ring.in_use == 0


def slow(**settings: object) -> tuple[Mapped, SlowPacker]:
    case = Mapped(packer=SlowPacker, **settings)
    assert isinstance(case.packer, SlowPacker)
    return case, case.packer


# ---------------------------------------------------------------------- in order


def test_a_verb_from_ask_to_staged() -> None:
    case = Mapped()
    case.step()
    (ask,) = case.take_messages()
    assert ask.ring_only
    assert np.array_equal(case.wire.ring, case.before), "nothing is written before the grant"
    case.give(ask, 4096)
    case.step()
    (staged,) = case.take_messages()
    assert (tuple(staged.layers), staged.start, staged.num_pages, staged.checked) == ((0, 1), 0, 4, False)
    want = case.expected([(staged, 4096)])
    assert np.array_equal(case.wire.ring, want)
    assert not np.array_equal(case.before, want)
    assert case.transfer.finished
    assert case.transfer.error is None
    assert case.transfer.flushed
    assert case.reported == 2 * LAYER
    assert case.source.released == 1
    assert case.connection.counters == {"view": Counter(transfers=1, spans=1, nbytes=2 * LAYER)}
    case.check_untouched()


@pytest.mark.parametrize("ring", [RING, LEAST, 300, 1536])
@pytest.mark.parametrize("own", [0, LEAST, RING])
def test_only_the_receivers_ring_limits_the_pieces(own: int, ring: int) -> None:
    case = Mapped(own=own, ring=ring)
    staged = run_to_end(case)
    assert case.transfer.error is None
    assert pages_sent(staged) == [(layer, page) for layer in (0, 1) for page in range(4)]
    assert len(staged) == {RING: 1, 1536: 2}.get(ring, 8)
    assert np.array_equal(case.wire.ring, case.expected(staged)), "the pieces, and no byte beside them"
    assert case.reported == 2 * LAYER
    assert case.source.released == 1
    case.check_untouched()


def test_a_full_send_ring_is_not_waited_for() -> None:
    case = Mapped(own=512)
    assert case.stages.ring.allocate(512, "another verb") is not None
    staged = run_to_end(case)
    assert case.transfer.error is None
    assert np.array_equal(case.wire.ring, case.expected(staged))
    assert case.taken == []


def test_a_stage_larger_than_what_is_left_keeps_its_other_bytes() -> None:
    """A stage that nothing is left for is given back unused."""
    case = Mapped(ring=1536)
    case.step()
    asks = case.take_messages()
    extra = case.requester.ask(1, case.grant.generation, nbytes=512, least=LEAST)
    case.transfer._pieces.append(case.transfer._send_piece(extra, 512))
    asks += case.take_messages()
    for ask, at in zip(asks, offsets(), strict=False):
        case.give(ask, at)
    case.step()
    said = {message.serial: message for message in case.take_messages()}
    assert said[extra].num_pages == 0
    staged = [(said[ask.serial], at) for ask, at in zip(asks, offsets(), strict=False) if ask.serial != extra]
    assert np.array_equal(case.wire.ring, case.expected(staged))
    assert case.transfer.finished
    assert case.transfer.error is None


@pytest.mark.parametrize("state", [False, True])
def test_the_receiver_is_told_when_the_stage_is_written(state: bool) -> None:
    case, packer = slow(state=state)
    case.step()
    (ask,) = case.take_messages()
    case.give(ask, 4096)
    case.step()
    assert case.take_messages() == []
    packer.gathers[0].end()
    case.step()
    (staged,) = case.take_messages()
    assert staged.state is state
    assert case.packed(staged, 4096)


def test_the_source_is_released_when_the_last_gather_is_over() -> None:
    case, packer = slow(ring=1536)
    case.step()
    for ask, at in zip(case.take_messages(), offsets(), strict=False):
        case.give(ask, at)
    case.step()
    first, second = packer.gathers
    second.end()
    case.step()
    assert case.source.released == 0, "the first piece is still being read"
    first.end()
    case.step()
    assert case.source.released == 1
    assert case.transfer.finished


# ---------------------------------------------------------------------- what the rings must hold


@pytest.mark.parametrize("own", [0, 255])
def test_only_a_page_that_is_too_large_for_the_receivers_ring_is_refused(own: int) -> None:
    case = Mapped(own=own, ring=LEAST - 1)
    case.step()
    assert case.transfer.finished
    error = case.transfer.error
    assert isinstance(error, RingExhausted)
    assert not error.retryable
    assert "TORCHKV_STAGING_RECV" in str(error)
    assert "STAGING_SEND" not in str(error)
    assert str(LEAST) in str(error)
    assert case.take_messages() == []
    run_to_end(fits := Mapped(own=own, ring=LEAST))
    assert fits.transfer.error is None


def test_a_denial_fails_the_verb_after_what_is_being_gathered() -> None:
    case, packer = slow(ring=1024)
    case.step()
    first, *others = case.take_messages()
    assert others
    case.give(first, 0)
    case.step()
    for ask in others:
        case.deny(ask)
    case.step()
    assert not case.transfer.finished, "something still writes to the ring"
    packer.gathers[0].end()
    case.step()
    assert case.transfer.finished
    assert isinstance(case.transfer.error, RingExhausted)
    assert case.transfer.flushed
    assert not any(isinstance(message, Staged) for message in case.take_messages())


# ---------------------------------------------------------------------- failures


def test_a_stage_that_kernels_cannot_address_is_refused_before_anything_is_written() -> None:
    case = Mapped()
    case.step()
    (ask,) = case.take_messages()
    case.give(ask, 4096 + 8)
    case.step()
    assert isinstance(case.transfer.error, ProtocolError)
    assert "4104" in str(case.transfer.error)
    assert np.array_equal(case.wire.ring, case.before)
    assert case.transfer.flushed


@pytest.mark.parametrize("seen", [False, True])
def test_a_halt_between_grant_and_gather_writes_nothing(seen: bool) -> None:
    case = Mapped()
    case.step()
    (ask,) = case.take_messages()
    case.give(ask, 0)
    if seen:
        assert case.transfer.advance() == 1
    case.transfer.halt()
    case.step()
    assert case.transfer.finished
    assert case.transfer.flushed
    assert case.take_messages() == []
    assert np.array_equal(case.wire.ring, case.before)


def test_a_halt_waits_for_the_gather_which_still_writes_to_its_stage() -> None:
    case, packer = slow()
    case.step()
    (ask,) = case.take_messages()
    case.give(ask, 8192)
    case.step()
    assert not packer.gathers[0].job.stopped
    case.transfer.halt()
    assert packer.gathers[0].job.stopped
    case.step()
    assert not case.transfer.finished, "it may still land"
    assert np.array_equal(case.wire.ring, case.before)
    packer.gathers[0].end()
    case.step()
    assert case.transfer.finished
    assert case.transfer.flushed
    assert case.take_messages() == [], "the receiver is not told of it"
    changed = np.flatnonzero(case.wire.ring != case.before)
    assert len(changed), "nothing landed late: this test has shown nothing"
    assert 8192 <= changed.min() <= changed.max() < 8192 + ask.nbytes
    assert case.reported == 0
    case.check_untouched()


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize(
    ("error", "lands"), [(PageOutOfRange("page 99"), False), (TransportUnavailable("the GPU failed"), True)]
)
def test_an_error_in_the_middle_of_a_gather(error: KVError, lands: bool, mapped: bool) -> None:
    """If the GPU fails, it is unknown what it still writes to the peer's memory, if that is mapped."""
    case = Case(ring=1536, mapped=mapped, packer=SlowPacker)
    assert isinstance(case.packer, SlowPacker)
    case.step()
    asks = case.take_messages()
    for ask, at in zip(asks, offsets(), strict=False):
        case.give(ask, at)
    case.step()
    first, second = case.packer.gathers
    first.end(error)
    case.step()
    assert not case.transfer.finished, "the other piece is still being gathered"
    second.end()
    case.step()
    assert case.transfer.finished
    assert isinstance(case.transfer.error, type(error))
    assert all(words in str(case.transfer.error) for words in ("'r'", "rank 1", "layers 0, 1", str(error)))
    assert case.transfer.flushed is not (lands and mapped)
    assert case.take_messages() == []
    assert case.reported == 0
    assert case.source.released == 0
    assert case.stages.ring.in_use == 0
    for ask, at in zip(asks, offsets(), strict=False):
        case.before[at : at + ask.nbytes] = case.wire.ring[at : at + ask.nbytes]
    assert np.array_equal(case.wire.ring, case.before), "bytes beside the stages"


# ---------------------------------------------------------------------- checksums


def unpack(case: Case, staged: Staged, at: int) -> tuple[Pool, Pool]:
    """The receiver's pool after that stage is unpacked, and what it should be."""
    target = Pool.random(gqa(), 8, np.random.default_rng())
    want = reference({0: case.pool}, {0: SRC}, target, DST)
    assert differences(target, want) > 0
    plan, piece = case.grant.plan, Piece(tuple(staged.layers), staged.start, staged.num_pages)
    layout = piece_layout(plan, piece, limit_tokens=case.grant.num_tokens, checksum=True)
    job = Scatter(
        request="r",
        src=0,
        generation=case.grant.generation,
        serial=staged.serial,
        stage=Stage(at, -(-layout.nbytes // 256) * 256, "r"),
        piece=piece,
        layout=layout,
        plan=plan,
        pages=case.grant.pages,
        num_tokens=case.grant.num_tokens,
        checked=True,
        state=False,
    )
    pages = Pages(target, torch.device("cpu"))
    for _ in HostPacker(pages.local, StageMemory(torch.from_numpy(case.wire.ring), 0)).scatter(job):
        pass
    return pages.now(), want


def test_checksums_are_gathered_into_the_ring_too() -> None:
    case = Mapped(checksum=True)
    ((staged, at),) = run_to_end(case)
    assert staged.checked
    got, want = unpack(case, staged, at)
    assert differences(got, want) == 0


def test_a_byte_flipped_in_the_ring_is_found() -> None:
    case = Mapped(checksum=True)
    ((staged, at),) = run_to_end(case)
    for byte in np.random.default_rng().permutation(2 * LAYER)[:20]:
        case.wire.ring[at + byte] ^= 4
        with pytest.raises(ChecksumMismatch, match=rf"layer {byte // LAYER}, component .*, page "):
            unpack(case, staged, at)
        case.wire.ring[at + byte] ^= 4
    got, want = unpack(case, staged, at)
    assert differences(got, want) == 0


# ---------------------------------------------------------------------- patience


@pytest.mark.parametrize("mapped", [True, False])
def test_a_grant_is_progress_while_the_gather_is_slow(mapped: bool) -> None:
    case = Case(mapped=mapped, packer=SlowPacker)
    case.step()
    assert case.transfer.patience > 1
    case.give(case.take_messages()[0], 0)
    case.transfer.op.moved = False
    assert sum(case.transfer.advance() for _ in range(8)) > 0
    assert case.transfer.op.moved
    assert case.transfer.patience == 1
    assert sum(case.transfer.advance() for _ in range(8)) == 0, "waiting is no progress"
