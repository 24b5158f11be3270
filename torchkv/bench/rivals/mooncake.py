"""Mooncake's TransferEngine over TCP: one write for each page, or for each token of a slice.

The two processes meet by its "P2PHANDSHAKE", which needs no metadata server. Its TCP transport queues no more than
2,048 writes to a peer and refuses the rest, so a request goes in batches. Its wheels need a system with libibverbs1.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from torchkv.bench.rivals.cases import Case
from torchkv.bench.rivals.side import INSTALL, PagedSide, Rival, Spans, from_reader, load_error
from torchkv.errors import KVError

__all__ = ["MOONCAKE"]

HOST = "127.0.0.1"
BATCH = 1024  # writes; larger batches are no faster where a longer queue admits them


class _Side(PagedSide):
    def __init__(self, case: Case, nbytes: int, rank: int) -> None:
        super().__init__(case, nbytes, rank)
        self.counts = rank == 0
        self._spans = Spans(self)
        module: Any = importlib.import_module("mooncake.engine")
        self._engine = module.TransferEngine()
        _check("initialize", self._engine.initialize(HOST, "P2PHANDSHAKE", "tcp", ""))
        for storage in self.cache.storages:
            _check("register_memory", self._engine.register_memory(storage.data_ptr(), storage.nbytes))
        name = f"{HOST}:{self._engine.get_rpc_port()}".encode()
        peer, self._there = from_reader(name, self._spans.addresses)
        self._peer = peer.decode()

    def move(self) -> None:
        if self.rank:
            return  # its threads are at work
        ours = self._spans.addresses[self._spans.positions(self.source_ids)].tolist()
        theirs = self._there[self._spans.positions(self.target_ids)].tolist()
        lengths = [self._spans.nbytes] * BATCH
        for first in range(0, len(ours), BATCH):
            here, there = ours[first : first + BATCH], theirs[first : first + BATCH]
            status = self._engine.batch_transfer_sync_write(self._peer, here, there, lengths[: len(here)])
            _check("batch_transfer_sync_write", status)

    def way(self) -> str:
        return "TCP" if self.rank == 0 else ""


def _check(call: str, status: int) -> None:
    if status != 0:
        raise KVError(f"Mooncake's {call} failed with status {status}")


def _why_not(device: str) -> str | None:
    if device != "cpu":
        return "measured over TCP, from host memory only"
    return INSTALL if importlib.util.find_spec("mooncake") is None else load_error("mooncake.engine")


MOONCAKE = Rival(
    name="mooncake",
    why_not=_why_not,
    make=_Side,
    environment=lambda case: {"MC_LOG_LEVEL": "ERROR", "MC_TCP_BIND_ADDRESS": HOST},
)
