"""NIXL in the loop of `torchkv.bench.engine`, where it is installed: same pages, same steps, one descriptor a page.

A request's transfers carry its name as NIXL's notification; its last one ends it. Each process loads NIXL's own UCX.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from torchkv.bench.engine import LAYERS, PAGE_NBYTES, Pages, Setup, Written, copy_seconds, rounds, summary
from torchkv.bench.engine_loop import Loop, Pending, busy_thread
from torchkv.bench.rivals.nixl import new_agent, of_reader
from torchkv.bench.rivals.nixl import rows as nixl_rows
from torchkv.errors import KVError

__all__ = ["read", "write"]

_LOOK_EVERY = 50e-6  # seconds between two questions for notifications, whoever asks


class _Side:
    """One rank: its pages, registered, as rows of (address, length, device) by slot, layer, and K or V of each page."""

    def __init__(self, setup: Setup, rank: int) -> None:
        self.pages = Pages(setup, rank)
        cache = self.pages.cache
        device = cache.device.index or 0
        self.kind = "VRAM" if cache.device.type == "cuda" else "DRAM"
        self.agent = new_agent(rank, progress_thread=True)
        storages = [(s.data_ptr(), s.nbytes, device, "") for s in cache.storages]
        self.agent.register_memory(storages, mem_type=self.kind)
        bases = np.array([[t.data_ptr() for t in (cache.k[n], cache.v[n]) if t is not None] for n in range(LAYERS)])
        # [slot, layer, page, k or v]
        address = bases[None, :, None, :] + self.pages.ids[:, None, :, None] * PAGE_NBYTES
        self.rows = nixl_rows(address.reshape(-1), PAGE_NBYTES, device)
        self.per_layer = 2 * setup.case.pages

    def indices(self, slot: int, first: int, count: int) -> np.ndarray[Any, Any]:
        """Of the rows of ``count`` layers from ``first`` on."""
        begin = (slot * LAYERS + first) * self.per_layer
        return np.arange(begin, begin + count * self.per_layer, dtype=np.int32)


class _Write(Pending):
    def __init__(self, side: _Side, lists: tuple[Any, Any], name: str, slot: int, by_layer: bool) -> None:
        self._side, self._lists, self._name, self._slot = side, lists, name, slot
        self._size = 1 if by_layer else LAYERS  # layers a transfer
        self._next = 0
        self._handles: list[Any] = []
        self.advance()

    def advance(self) -> bool:
        if self._next < LAYERS:
            agent, (ours, theirs) = self._side.agent, self._lists
            rows = self._side.indices(self._slot, self._next, self._size)
            self._next += self._size
            name = self._name.encode() if self._next == LAYERS else b""
            handle = agent.make_prepped_xfer("WRITE", ours, rows, theirs, rows, name)
            self._handles.append(handle)
            if agent.transfer(handle) == "ERR":
                raise KVError(f"{self._name}: NIXL reports an error")
        return self._next < LAYERS

    def done(self) -> bool:
        while self._handles:
            state = self._side.agent.check_xfer_state(self._handles[0])
            if state == "ERR":
                raise KVError(f"{self._name}: NIXL reports an error")
            if state != "DONE":
                return False
            self._side.agent.release_xfer_handle(self._handles.pop(0))
        return True

    def wait(self) -> None:
        while not self.done():
            continue


class _Notifications:
    """Names of the requests that have arrived."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._names: set[str] = set()
        self._look_at = 0.0

    def take(self, name: str) -> bool:
        """Whether the request has arrived; true once."""
        now = time.perf_counter()
        if name not in self._names and now >= self._look_at:
            self._look_at = now + _LOOK_EVERY
            for messages in self._agent.get_new_notifs().values():
                self._names.update(message.decode() for message in messages)
        if name not in self._names:
            return False
        self._names.discard(name)
        return True


class _Read(Pending):
    def __init__(self, arrived: _Notifications, name: str) -> None:
        self._arrived, self._name = arrived, name

    def advance(self) -> bool:
        return False

    def done(self) -> bool:
        return self._arrived.take(self._name)

    def wait(self) -> None:
        while not self.done():
            continue


def write(setup: Setup, seed: int) -> Written:
    """Rank 0; see `torchkv.bench.engine`."""
    side = _Side(setup, 0)
    metadata, rows = of_reader(side.agent, side.rows)
    peer = side.agent.add_remote_agent(metadata)
    ours = side.agent.prep_xfer_dlist("NIXL_INIT_AGENT", side.rows, side.kind)
    theirs = side.agent.prep_xfer_dlist(peer, rows, side.kind)

    def begin(number: int) -> Pending:
        return _Write(side, (ours, theirs), f"request {number}", number % setup.slots, setup.case.by_layer)

    loop = Loop(begin, flight=setup.flight, polled=setup.polled)
    with busy_thread(on=setup.busy):
        rounds(setup, loop, lambda number: side.pages.fill(seed + number), lambda number: None)
    return summary(setup, loop, copy_seconds(setup))


def read(setup: Setup, seed: int) -> int:
    """Rank 1: bytes that were wrong."""
    side = _Side(setup, 1)
    of_reader(side.agent, side.rows)
    arrived = _Notifications(side.agent)
    wrong = 0

    def after(number: int) -> None:
        nonlocal wrong
        wrong += side.pages.wrong(seed + number)

    loop = Loop(lambda number: _Read(arrived, f"request {number}"), flight=setup.flight, polled=setup.polled)
    with busy_thread(on=setup.busy):
        rounds(setup, loop, lambda number: side.pages.poison(), after)
    return wrong
