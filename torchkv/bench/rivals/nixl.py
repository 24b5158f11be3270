"""NIXL over its UCX backend: one descriptor for each page, or for each token of a slice.

All descriptors are prepared beforehand; a request picks its own by index, in its time. It ends when the writer sees it
done and the reader has its notification. Both ask all the time, without NIXL's progress threads: that was the faster
way on two cores, and those threads would poll also while other rivals are on turn.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from typing import Any

import numpy as np

from torchkv.bench.machine import one_link
from torchkv.bench.rivals.cases import Case
from torchkv.bench.rivals.side import INSTALL, PagedSide, Rival, Spans, from_reader, load_error
from torchkv.errors import KVError

__all__ = ["NIXL", "new_agent", "nixl_package", "of_reader", "rows"]

_PACKAGES = ("nixl_cu13", "nixl_cu12", "nixl")
DEADLINE = 120.0


def nixl_package() -> str | None:
    """The name of the installed NIXL package, or None."""
    return next((name for name in _PACKAGES if importlib.util.find_spec(name) is not None), None)


def new_agent(rank: int, *, progress_thread: bool) -> Any:
    """An agent with the UCX backend, which loads NIXL's own UCX."""
    api: Any = importlib.import_module(f"{nixl_package()}._api")
    config = api.nixl_agent_config(enable_prog_thread=progress_thread, backends=["UCX"])
    return api.nixl_agent(f"rank{rank}", config)


def rows(addresses: np.ndarray[Any, Any], nbytes: int, device: int) -> np.ndarray[Any, Any]:
    """NIXL's descriptors: uint64 [count, 3] of address, length and device."""
    count = len(addresses)
    return np.stack([addresses, np.full(count, nbytes), np.full(count, device)], axis=1).astype(np.uint64)


def of_reader(agent: Any, mine: np.ndarray[Any, Any]) -> tuple[bytes, np.ndarray[Any, Any]]:
    """The metadata and the rows of rank 1's agent, on both ranks. mine: this rank's `rows`."""
    metadata, numbers = from_reader(agent.get_agent_metadata(), mine.view(np.int64).ravel())
    return metadata, numbers.view(np.uint64).reshape(-1, 3)


class _Side(PagedSide):
    def __init__(self, case: Case, nbytes: int, rank: int) -> None:
        super().__init__(case, nbytes, rank)
        self._spans = Spans(self)
        self._handle: Any = None
        kind, device = ("VRAM", self.device.index) if case.device == "cuda" else ("DRAM", 0)
        self._agent = new_agent(rank, progress_thread=False)
        storages = [(s.data_ptr(), s.nbytes, device, "") for s in self.cache.storages]
        self._agent.register_memory(storages, mem_type=kind)
        here = rows(self._spans.addresses, self._spans.nbytes, device)
        metadata, there = of_reader(self._agent, here)
        if rank == 0:
            peer = self._agent.add_remote_agent(metadata)
            self._ours = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", here, kind)
            self._theirs = self._agent.prep_xfer_dlist(peer, there, kind)

    def move(self) -> None:
        until = time.monotonic() + DEADLINE
        if self.rank:
            while not self._agent.get_new_notifs():
                _check_time(until)
            return
        ours, theirs = (self._spans.positions(ids).astype(np.int32) for ids in (self.source_ids, self.target_ids))
        self._handle = self._agent.make_prepped_xfer("WRITE", self._ours, ours, self._theirs, theirs, b"done")
        state = self._agent.transfer(self._handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(self._handle)
            _check_time(until)
        if state != "DONE":
            raise KVError(f"NIXL's transfer failed: its state is {state}")

    def wrong(self) -> int:
        if self._handle is not None:
            self._agent.release_xfer_handle(self._handle)
            self._handle = None
        return super().wrong()

    def way(self) -> str:
        return "UCX WRITE" if self.rank == 0 else ""


def _check_time(until: float) -> None:
    if time.monotonic() > until:
        raise KVError(f"NIXL's transfer did not end within {DEADLINE:g} s")


def _why_not(device: str) -> str | None:
    package = nixl_package()
    return INSTALL if package is None else load_error(f"{package}._api")


def _environment(case: Case) -> dict[str, str]:
    # Where there is a GPU, NIXL refuses links that cannot copy its memory, also if it is to send host memory only.
    link = {**one_link(), "UCX_TLS": "tcp,cuda_copy"} if case.tcp else {}
    return {"NIXL_LOG_LEVEL": "ERROR", **link}


NIXL = Rival(name="nixl", why_not=_why_not, make=_Side, environment=_environment)
