"""Two resident loops in one process, without threads: rank 0 writes to rank 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.core.core import Core
from torchkv.core.events import Notice
from torchkv.core.loop.codes import ALONE
from torchkv.core.loop.limits import MAILBOX_RECORDS
from torchkv.core.runner import TURN
from torchkv.core.way import Way
from torchkv.protocol.messages import name_hashes
from torchkv.transfer.loop_geometry import COPIED

__all__ = ["PAGE", "TOKENS", "Pair", "flat_geometry"]

PAGE = 256  # bytes
TOKENS = 16  # of a page


def flat_geometry(src: np.ndarray[Any, Any], dst: np.ndarray[Any, Any]) -> Int64Array:
    """The geometry of whole pages between two arrays ``[layers, pages, PAGE]``."""
    words = [len(src), *range(len(src) + 1)]
    for ours, theirs in zip(src, dst, strict=True):
        words += [ours.ctypes.data, theirs.ctypes.data, PAGE, PAGE, 0, 0, PAGE // TOKENS, PAGE // TOKENS]
        words += [1, 0, 0, 1, 0, 0, PAGE, TOKENS, 1, 1, 0, -1, 1, 1, 1, *COPIED]
    return np.array(words, dtype=np.int64)


class Pair:
    """Loops of a writer and a reader, with random pages on one side and poisoned ones on the other.

    turn, window, recorded, copies: see `torchkv.core.runner.Runner`.
    """

    def __init__(
        self,
        *,
        layers: int = 3,
        pages: int = 8,
        turn: int = TURN,
        window: int = MAILBOX_RECORDS,
        recorded: int = 0,
        **copies: int,
    ) -> None:
        limits = {"turn": turn, "window": window, "recorded": recorded, **copies}
        self.writer, self.reader = (Core(rank, device=None, **limits) for rank in (0, 1))
        self.writer.peers.connect(1, self.reader.peers.descriptor())
        self.reader.peers.connect(0, self.writer.peers.descriptor())
        self.layers = layers
        self.src = np.random.default_rng().integers(0, 256, (layers, pages, PAGE), dtype=np.uint8)
        self.dst = np.full_like(self.src, 0xAB)
        self.geometry = flat_geometry(self.src, self.dst)
        self.kernels: Int64Array | None = None  # for pages that kernels copy

    def receive(self, pages: int, *, generation: int = 1, leader: int = ALONE, writers: Sequence[int] = (0,)) -> int:
        flow = self.reader.receives.reserve()
        assert flow is not None
        sides = [(rank, self.layers, 0, TOKENS) for rank in writers]
        tokens = pages * TOKENS
        self.reader.receives.open(
            flow, generation=generation, num_tokens=tokens, page_size=TOKENS, leader=leader, writers=sides
        )
        return flow

    def way(self, max_page: int | None = None, max_slot: int = 0) -> Way:
        return Way(
            1,
            self.writer.peers.slots[1],
            geometry=self.geometry,
            kernels=self.kernels,
            src_page=TOKENS,
            dst_page=TOKENS,
            max_page=self.dst.shape[1] if max_page is None else max_page,
            max_slot=max_slot,
        )

    def send(self, peer_flow: int, pages: Sequence[int], *, generation: int = 1, serial: int = 0) -> int:
        ids = np.array(pages, dtype=np.int64)
        flow = self.writer.sends.open(self.way(), peer_flow=peer_flow, generation=generation, pages=ids, serial=serial)
        assert flow is not None
        return flow

    def grant(
        self,
        flow: int,
        pages: Sequence[int],
        *,
        name: str = "name",
        writers: int = 1,
        prefix_tokens: int = 0,
        serial: int = 0,
    ) -> None:
        named, ids = (flow, name.encode(), name_hashes(name)), np.array(pages, dtype=np.int64)
        self.reader.receives.grant(*named, ids, prefix_tokens=prefix_tokens, writers=writers, serial=serial)

    def wait(self, *, name: str = "name", writers: int = 1, max_page: int | None = None) -> int:
        """A send that waits for its grant."""
        flow = self.writer.sends.wait_for_grant(self.way(max_page), hashes=name_hashes(name), writers=writers)
        assert flow is not None
        return flow

    def start(
        self, flow: int, pages: Sequence[int], *, start: int = 0, layers: Sequence[int] | None = None, verb: int = 0
    ) -> int:
        positions = np.array(range(self.layers) if layers is None else layers, dtype=np.int64)
        index = self.writer.sends.start_op(flow, positions, np.array(pages, dtype=np.int64), start, verb=verb)
        assert index is not None
        return index

    def run(self) -> tuple[list[Notice], list[Notice]]:
        """Steps until nothing is left to do. What the writer and the reader tell."""
        while self.writer.runner.step() | self.reader.runner.step():
            pass
        return self.writer.events.take(), self.reader.events.take()
