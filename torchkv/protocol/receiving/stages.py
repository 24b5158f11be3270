"""Stages of the staging ring: writers ask for them and write them, and they are unpacked into a request's pages."""

from __future__ import annotations

import numpy as np

from torchkv.errors import KVError, ProtocolError
from torchkv.layout.group_map import GroupMap
from torchkv.layout.pieces import Piece, check_piece
from torchkv.protocol.actions import Account, Scatter
from torchkv.protocol.messages import StageAsk, Staged, Withdraw
from torchkv.protocol.receiving.endings import ReceiveEndings
from torchkv.protocol.receiving.open_receives import OpenReceives
from torchkv.protocol.receiving.staging_credits import StagingCredits

__all__ = ["Stages"]


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
        """A stage is written: asks for it to be unpacked, or takes it back if it is unused."""
        owner = src, message.generation, message.serial
        found = self._requests.writer(src, message.generation)
        if found is None or (stage := self._credits.mark_written(*owner)) is None:
            return
        req, writer = found
        req.progress_at = now
        if message.num_pages == 0:
            self._credits.release(*owner, now)
            return
        piece = Piece(tuple(message.layers), message.start, message.num_pages)
        plan, pages, num_tokens = writer.plan, req.pages, req.num_tokens
        if message.state:
            assert plan.state is not None
            plan, pages, num_tokens = plan.state, np.array([req.state_slot or 0], dtype=np.int64), 1
        try:
            layout = check_piece(plan, piece, limit_tokens=num_tokens, checksum=message.checked)
            if layout.nbytes > stage.nbytes:
                raise ProtocolError(f"a piece of {layout.nbytes} bytes into a stage of {stage.nbytes}")
        except ProtocolError as error:
            self._credits.release(*owner, now)
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
        )
        req.scattering.add(job)
        self._endings.actions.append(job)

    def scattered(self, job: Scatter, error: KVError | None, now: float) -> None:
        """``job`` has ended and writes no more: the bytes are in the pages, or it failed, or it was stopped."""
        req = self._requests.by_generation[job.generation]
        req.scattering.discard(job)
        self._credits.release(job.src, job.generation, job.serial, now)
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
