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
from torchkv.cuda.page_ids import DevicePages
from torchkv.errors import ChecksumMismatch, KVError, PageOutOfRange, ProtocolError, RingExhausted, TransportUnavailable
from torchkv.layout.pieces import Piece, piece_layout
from torchkv.layout.stage_format import SLOTS, ChunkFifo, signal_offset
from torchkv.protocol.actions import Scatter
from torchkv.protocol.messages import StageAsk, Staged
from torchkv.protocol.receiving.stage_allocator import Stage
from torchkv.staging import transfer as staged_transfer
from torchkv.staging.host_packer import HostPacker
from torchkv.staging.memory import StageMemory
from torchkv.staging.transfer import FIFOS_IN_FLIGHT
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


# ---------------------------------------------------------------------- FIFOs


def with_fifos(monkeypatch: pytest.MonkeyPatch, **settings: object) -> tuple[Mapped, SlowPacker]:
    """Of one layer a piece, as both sides have two channels."""
    monkeypatch.setattr(SlowPacker, "fifo_channels", 2)
    for name, value in (("LEAST_FIFO_VERB", LAYER), ("LARGEST_FIFO_PIECE", LAYER), ("CHUNK_UNIT", 16)):
        monkeypatch.setattr(staged_transfer, name, value)
    case = Mapped(packer=SlowPacker, fifo_channels=3, **settings)
    assert isinstance(case.packer, SlowPacker)
    return case, case.packer


def test_a_large_verb_asks_for_a_small_stage_and_passes_through_it_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_transfer, "LARGEST_CHUNK", 32)
    case, packer = with_fifos(monkeypatch)
    case.step()
    asks = case.take_messages()
    assert [ask.nbytes for ask in asks] == [2 * SLOTS * 32] * FIFOS_IN_FLIGHT
    assert LAYER > 2 * SLOTS * 32
    for ask, at in zip(asks, (0, 4096), strict=True):
        case.give(ask, at, ask.serial, 42 + ask.serial)
    case.step()
    staged = case.take_messages()
    assert [gather.job.fifo_stage.fifo for gather in packer.gathers] == [ChunkFifo(32, 2)] * 2
    assert [(message.chunk, message.channels) for message in staged] == [(32, 2)] * 2
    assert pages_sent([(message, 0) for message in staged]) == [(layer, page) for layer in (0, 1) for page in range(4)]
    for gather in packer.gathers:
        gather.over = True
    assert not case.transfer.finished


@pytest.mark.parametrize("state", [False, True])
def test_through_a_fifo_the_receiver_is_told_as_soon_as_the_gather_is_enqueued(
    state: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, packer = with_fifos(monkeypatch, layers=(0,), state=state)
    case.step()
    (ask,) = case.take_messages()
    case.give(ask, 4096, 5, 42)
    case.step()
    (gather,) = packer.gathers
    words = case.wire.ring.ctypes.data + signal_offset(RING, 5)
    assert gather.job.fifo_stage == (words, 42, ChunkFifo(64, 2))
    (staged,) = case.take_messages()
    assert (staged.chunk, staged.channels, staged.state) == (64, 2, state)
    assert np.array_equal(case.wire.ring, case.before), "nothing of it has been written yet"
    assert case.source.released == 0
    assert not case.transfer.finished
    gather.end()
    case.step()
    assert case.take_messages() == [], "said once"
    assert case.transfer.finished
    assert case.reported == LAYER
    assert case.source.released == 1


@pytest.mark.parametrize(("unit", "fifo"), [(16, ChunkFifo(64, 2)), (48, ChunkFifo(48, 2))])
def test_chunks_are_as_large_as_the_stage_allows(unit: int, fifo: ChunkFifo, monkeypatch: pytest.MonkeyPatch) -> None:
    case, packer = with_fifos(monkeypatch)
    monkeypatch.setattr(staged_transfer, "CHUNK_UNIT", unit)
    case.step()
    ask, *_ = case.take_messages()
    case.give(ask, 0, 0, 42)
    case.step()
    assert packer.gathers[0].job.fifo_stage.fifo == fifo


SIGNAL = (0, 42)


@pytest.mark.parametrize(
    ("why", "signal"),
    [
        ("no signal is left", ()),
        ("no channels here", SIGNAL),
        ("no channels there", SIGNAL),
        ("checksums", SIGNAL),
        ("a short verb", SIGNAL),
        ("layers shorter than a chunk", SIGNAL),
        ("a stage of less than a chunk for each channel", SIGNAL),
        ("page ids on the GPU", SIGNAL),
        ("kernels that are not loaded", SIGNAL),
    ],
)
@pytest.mark.parametrize("state", [False, True])
def test_without_a_fifo_the_receiver_is_told_when_the_stage_is_written(
    why: str, signal: tuple[int, ...], state: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control is above: the same verb passes through a FIFO unless there is something against it."""
    with_fifos(monkeypatch)
    match why:
        case "no channels here":
            monkeypatch.setattr(SlowPacker, "fifo_channels", 0)
        case "a short verb":
            monkeypatch.setattr(staged_transfer, "LEAST_FIFO_VERB", 2 * LAYER + 1)
        case "layers shorter than a chunk":
            monkeypatch.setattr(staged_transfer, "CHUNK_UNIT", LAYER + 16)
        case "a stage of less than a chunk for each channel":
            monkeypatch.setattr(staged_transfer, "CHUNK_UNIT", 80)
        case "kernels that are not loaded":
            monkeypatch.setattr(SlowPacker, "ready", lambda self, plan: False)
    one = Mapped(
        packer=SlowPacker,
        fifo_channels=0 if why == "no channels there" else 3,
        checksum=why == "checksums",
        state=state,
    )
    assert isinstance(one.packer, SlowPacker)
    if why == "page ids on the GPU":
        ids = object.__new__(DevicePages)
        ids.ids = torch.tensor(SRC)
        one.transfer = one.make((0, 1), pages=ids)
    one.step()
    ask, *_ = one.take_messages()
    one.give(ask, 4096, *signal)
    one.step()
    (gather,) = one.packer.gathers
    assert gather.job.fifo_stage is None
    assert gather.job.layout.nbytes <= ask.nbytes, "the piece fits into its stage"
    assert one.take_messages() == []
    if why == "page ids on the GPU":
        return  # a host has no kernels to read them
    gather.end()
    one.step()
    (staged,) = [message for message in one.take_messages() if isinstance(message, Staged)]
    assert (staged.chunk, staged.channels, staged.state) == (0, 0, state)
    assert one.packed(staged, 4096)


def test_a_verb_without_a_fifo_goes_in_pieces_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asked for stages of a FIFO, but each is granted without a signal."""
    monkeypatch.setattr(staged_transfer, "LARGEST_CHUNK", 32)
    case, packer = with_fifos(monkeypatch)
    while not case.transfer.finished:
        case.step()
        for ask in case.take_messages():
            if isinstance(ask, StageAsk):
                case.give(ask, 1024 * (ask.serial % 8))
        for gather in packer.gathers:
            gather.end()
    assert case.transfer.error is None
    assert case.reported == 2 * LAYER
    assert all(gather.job.fifo_stage is None for gather in packer.gathers)
    assert len(packer.gathers) > 2


def test_a_fifo_of_a_failed_transfer_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    case, packer = with_fifos(monkeypatch)
    case.step()
    ask, *_ = case.take_messages()
    case.give(ask, 0, 0, 42)
    case.step()
    (gather,) = packer.gathers
    assert not gather.job.stopped
    assert not case.transfer.truncated
    case.transfer.halt()
    assert gather.job.stopped
    gather.end()
    case.step()
    assert case.transfer.truncated, "the receiver waits for the rest, and another path would not end that"


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
    case.transfer.halt()
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
