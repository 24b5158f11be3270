"""Stages of the staging ring: writers ask for them and write them, and they are unpacked into a request's pages."""

from __future__ import annotations

import numpy as np

from torchkv.errors import KVError, ProtocolError
from torchkv.layout.group_map import GroupMap
from torchkv.layout.pieces import Piece, PieceLayout, check_piece
from torchkv.layout.stage_format import CHUNK_UNIT, SIGNAL_STEP, ChunkFifo, Signal
from torchkv.protocol.actions import Account, Scatter
from torchkv.protocol.messages import StageAsk, Staged, Withdraw
from torchkv.protocol.receiving.endings import ReceiveEndings
from torchkv.protocol.receiving.open_receives import OpenReceives
from torchkv.protocol.receiving.stage_allocator import Stage
from torchkv.protocol.receiving.staging_credits import StagingCredits

__all__ = ["Stages"]

MAX_FIFO_BYTES = 1 << 30  # bytes of one layer in a piece, and of one chunk: kernels count both in 32 bits


class Stages:
    """credits: who may write where in the ring."""

    def __init__(
        self, group_map: GroupMap, requests: OpenReceives, endings: ReceiveEndings, credits: StagingCredits
    ) -> None:
        self._group_map = group_map
        self._requests = requests
        self._endings = endings
        self._credits = credits

    def on_stage_ask(self, src: int, message: StageAsk, now: float) -> None:
        """Raises ``ProtocolError`` for an ask that breaks the protocol."""
        found = self._requests.writer(src, message.generation)
        if found is not None and not found[1].quiescent:
            self._credits.ask(src, message, now)
            found[0].progress_at = now

    def on_withdraw(self, src: int, message: Withdraw) -> None:
        # Of a failed request the pages may be free already, because the writer promised to use the ring only. Then
        # the withdrawal is never confirmed, and the writer does not write to pages.
        if self._requests.writer(src, message.generation) is not None:
            self._credits.withdraw(src, message)

    def on_staged(self, src: int, message: Staged, now: float) -> None:
        """A stage is written, or a FIFO: asks for it to be unpacked, or takes it back if it is unused."""
        owner = src, message.generation, message.serial
        found = self._requests.writer(src, message.generation)
        if found is None or (taken := self._take(owner, fifo=message.chunk != 0)) is None:
            return
        (req, writer), (stage, signal) = found, taken
        req.progress_at = now
        if message.num_pages == 0:
            self._credits.release(*owner, now, written=signal is None)
            return
        piece = Piece(tuple(message.layers), message.start, message.num_pages)
        plan, pages, num_tokens = writer.plan, req.pages, req.num_tokens
        if message.state:
            assert plan.state is not None
            plan, pages, num_tokens = plan.state, np.array([req.state_slot or 0], dtype=np.int64), 1
        try:
            layout = check_piece(plan, piece, limit_tokens=num_tokens, checksum=message.checked)
            fifo = _fifo_of(message, stage, layout, most=self._group_map.me.channels)
        except ProtocolError as error:
            self._credits.release(*owner, now, written=signal is None)
            text = f"request {req.request!r}: {self._group_map.name(src)} wrote {error}"
            self._endings.fail(req, ProtocolError(text))
            return
        job = Scatter(
            request=req.request,
            src=src,
            generation=req.generation,
            serial=message.serial,
            stage=stage,
            piece=piece,
            layout=layout,
            plan=plan,
            pages=pages,
            num_tokens=num_tokens,
            checked=message.checked,
            state=message.state,
            signal=signal,
            fifo=fifo,
            written=signal is None,
        )
        req.scattering.add(job)
        self._endings.actions.append(job)

    def _take(self, owner: tuple[int, int, int], *, fifo: bool) -> tuple[Stage, Signal | None] | None:
        """The stage of (writer, generation, serial), and its signal if it is a FIFO; None if not granted as such."""
        if fifo:
            return self._credits.mark_fifo(*owner)
        stage = self._credits.mark_written(*owner)
        return None if stage is None else (stage, None)

    def scattered(self, job: Scatter, error: KVError | None, now: float) -> None:
        """``job`` has ended and writes no more: the bytes are in the pages, or it failed, or it was stopped."""
        req = self._requests.by_generation[job.generation]
        req.scattering.discard(job)
        self._credits.release(job.src, job.generation, job.serial, now, written=job.written)
        if req.error is not None:
            self._endings.end_if_quiescent(req)
            return
        if error is not None:
            self._endings.fail(req, error)
            return
        page_size = job.plan.src_page_size
        lo, hi = job.piece.start * page_size, (job.piece.start + job.piece.num_pages) * page_size
        req.writers[job.src].cover(job.piece.layers, lo, min(hi, req.num_tokens), state=job.state)
        self._endings.actions.append(Account(req.work, job.layout.payload, "staged"))
        self._endings.counts.moved(job.src, "staged", job.layout.payload)
        req.progress_at = now
        self._endings.complete_if_covered(req, now)


def _fifo_of(message: Staged, stage: Stage, layout: PieceLayout, *, most: int) -> ChunkFifo | None:
    """The FIFO that the piece passes through, or None if the stage holds it whole.

    most: FIFO channels that this rank serves, each by one block of a kernel. Raises ``ProtocolError`` for a piece that
    is larger than its stage, and for a FIFO that does not fit.
    """
    if not message.chunk:
        if layout.nbytes > stage.nbytes:
            raise ProtocolError(f"a piece of {layout.nbytes} bytes into a stage of {stage.nbytes}")
        return None
    fifo = ChunkFifo(message.chunk, message.channels)
    if message.checked:
        raise ProtocolError(f"{fifo} with checksums")
    if fifo.chunk % CHUNK_UNIT or not 1 <= fifo.channels <= most or fifo.nbytes > stage.nbytes:
        raise ProtocolError(f"{fifo} through a stage of {stage.nbytes} bytes, where at most {most} channels are served")
    if fifo.chunk > MAX_FIFO_BYTES or any(each.layer_nbytes > MAX_FIFO_BYTES for each in layout.sections):
        raise ProtocolError(f"{fifo} for layers of more than {MAX_FIFO_BYTES} bytes")
    if sum(len(each.layers) * fifo.chunks(each.layer_nbytes) for each in layout.sections) >= SIGNAL_STEP:
        raise ProtocolError(f"{fifo} for {layout.nbytes} bytes, more than a signal can count")
    return fifo
