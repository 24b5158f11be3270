"""A fake of NVSHMEM without GPUs: PEs live in one process, their heaps are host memory, streams run when told to.

The transport's own code runs unchanged, the compiled posting loop included; only the library and the device are fakes.
"""

from __future__ import annotations

import ctypes
import secrets
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torchkv_nvshmem import NVSHMEMTransport
from torchkv_nvshmem.exchange import through_store
from torchkv_nvshmem.library import UID_NBYTES
from torchkv_nvshmem.runtime import Membership, Party

from torchkv.errors import ProtocolError, TransportUnavailable
from torchkv.host import shared_memory

_T = TypeVar("_T")
CPU = torch.device("cpu")
CANARY = 0xC5

_PUT = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
)  # fmt: skip


class FakeStream:
    """A queue of functions that `run` calls. While ``world.running``, reading any mark first runs all streams."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.work: deque[Callable[[], Any]] = deque()
        self.closed = False
        world.streams.append(self)
        self.handle = len(world.streams)  # from 1, so that no stream is 0

    def add(self, work: Callable[[], Any]) -> None:
        assert not self.closed
        self.work.append(work)

    def run(self, count: int = 1 << 60) -> None:
        while self.work and count:
            self.work.popleft()()
            count -= 1

    def mark(self) -> FakeMark:
        if self._world.mark_errors:
            raise self._world.mark_errors.pop()
        mark = FakeMark(self._world)
        self.add(mark.reach)
        return mark

    def close(self) -> None:
        self.closed = True


class FakeMark:
    def __init__(self, world: World) -> None:
        self._world = world
        self.reached = False

    def reach(self) -> None:
        self.reached = True

    @property
    def done(self) -> bool:
        if self._world.running:
            for stream in self._world.streams:
                stream.run()
        return self.reached

    def release(self) -> None:
        assert self.reached


class FakeDevice:
    """A `torchkv_nvshmem.gpu.Device` over host memory."""

    def __init__(self, world: World, pe: int) -> None:
        self.device = CPU
        self._world = world
        self._pe = pe

    def enter(self) -> None:
        pass

    def settle(self) -> None:
        for stream in self._world.streams:
            stream.run()

    def memory(self) -> tuple[int, int]:
        return self._world.free[self._pe], 80 << 30

    def uuid(self) -> str:
        return f"gpu{self._pe}"

    def reaches(self, uuid: str) -> bool:
        return uuid not in self._world.unreachable

    def wrap(self, ptr: int, nbytes: int, owner: object) -> torch.Tensor:
        span = (ctypes.c_uint8 * nbytes).from_address(ptr)
        span.owner = owner  # type: ignore[attr-defined]
        return torch.frombuffer(span, dtype=torch.uint8)

    def stream(self) -> FakeStream:
        return FakeStream(self._world)

    def share(self, tensor: torch.Tensor) -> bytes:
        found = shared_memory.share(tensor)
        if found is None:
            raise TransportUnavailable("this memory cannot be shared")
        return found

    def open_share(self, share: bytes) -> Any:
        return shared_memory.open_segment(share)


class FakeLibrary:
    """One PE's `torchkv_nvshmem.library.Library`. Its put is a C function, called by the compiled posting loop."""

    def __init__(self, world: World, pe: int) -> None:
        self._world = world
        self._pe = pe
        self._put = _PUT(self._enqueue_put)
        clock = ctypes.cast(ctypes.CDLL(None).clock_gettime, ctypes.c_void_p).value
        self.functions = np.array([ctypes.cast(self._put, ctypes.c_void_p).value, clock], dtype=np.int64)

    def unique_id(self) -> bytes:
        return secrets.token_bytes(UID_NBYTES)

    def start(self, uid: bytes, *, rank: int, size: int, device: int) -> None:
        assert rank == self._pe
        self._world.started.append(uid)
        if self._world.start_fails:
            raise TransportUnavailable(f"the driver of PE {self._pe} is too old")
        self._size = size

    def malloc(self, nbytes: int) -> int:
        world = self._world
        if world.heap_full:
            return 0
        memory = np.full(nbytes + 8192, CANARY, dtype=np.uint8)
        base = -(-(memory.ctypes.data + 1) // 4096) * 4096
        memory[base - memory.ctypes.data :][:nbytes] = secrets.randbits(8)
        world.heaps[self._pe].append((base, memory, nbytes))
        world.meet(self._size)
        sizes = {heap[-1][2] for heap in world.heaps[: self._size]}
        assert len(sizes) == 1, f"unlike sizes in a collective allocation: {sizes}"
        world.meet(self._size)
        return base

    def _translate(self, address: int, pe: int) -> int:
        for index, (base, _, nbytes) in enumerate(self._world.heaps[self._pe]):
            if base <= address < base + nbytes:
                return self._world.heaps[pe][index][0] + address - base
        raise AssertionError(f"{address:#x} is no symmetric address of PE {self._pe}")

    def pointer(self, address: int, pe: int) -> int:
        return 0 if (self._pe, pe) in self._world.unmapped else self._translate(address, pe)

    def _enqueue_put(self, target: int, source: int, nbytes: int, pe: int, stream: int) -> None:
        there = self._translate(target, pe)
        self._world.streams[stream - 1].add(lambda: ctypes.memmove(there, source, nbytes))
        self._world.puts += 1

    def quiet(self, stream: int) -> None:
        self._world.quiets += 1


class World:
    """``size`` PEs, each with a `Membership` of its own."""

    def __init__(self, size: int) -> None:
        self.heaps: list[list[tuple[int, np.ndarray, int]]] = [[] for _ in range(size)]
        self.streams: list[FakeStream] = []
        self.free = [64 << 30] * size
        self.running = True
        self.unmapped: set[tuple[int, int]] = set()
        self.unreachable: set[str] = set()
        self.start_fails = False
        self.started: list[bytes] = []
        self.obstacles: dict[int, str] = {}
        self.mark_errors: list[ProtocolError | TransportUnavailable] = []
        self.heap_full = False
        self.puts = self.quiets = 0
        self.info = [
            Membership(
                lambda pe=pe: FakeLibrary(self, pe),
                lambda _, pe=pe: FakeDevice(self, pe),
                lambda pe=pe: self.obstacles.get(pe),
            )
            for pe in range(size)
        ]
        self._barriers: dict[int, threading.Barrier] = {}
        self._lock = threading.Lock()

    def meet(self, size: int) -> None:
        """A barrier of all PEs that were started together."""
        with self._lock:
            barrier = self._barriers.setdefault(size, threading.Barrier(size))
        barrier.wait(10)

    def together(self, call: Callable[[int, Party], _T], pes: list[int] | None = None) -> list[_T | Exception]:
        """Calls ``call(pe, party)`` for all ``pes`` at once, as ranks of one group; what each returned or raised."""
        chosen = list(range(len(self.info))) if pes is None else pes
        store = dist.HashStore()
        store.set_timeout(timedelta(seconds=5))

        def run(rank: int) -> _T | Exception:
            party = Party(rank, len(chosen), through_store(store, rank=rank, size=len(chosen)))
            try:
                return call(chosen[rank], party)
            except Exception as error:  # noqa: BLE001 - returned to the test
                return error

        with ThreadPoolExecutor(len(chosen)) as pool:
            return list(pool.map(run, range(len(chosen))))

    def join(self, pes: list[int] | None = None, reserve: int = 1 << 20) -> list[Any]:
        return self.together(lambda pe, party: self.info[pe].join(party, CPU, reserve), pes)

    def allocate(self, sizes: dict[int, int]) -> dict[int, Any]:
        """Joins as a group of these PEs, then allocates."""

        def call(pe: int, party: Party) -> torch.Tensor:
            self.info[pe].join(party, CPU, 0)
            return self.info[pe].allocate(sizes[pe], CPU)

        return dict(zip(sizes, self.together(call, list(sizes)), strict=True))

    def transport(self, pe: int) -> NVSHMEMTransport:
        return NVSHMEMTransport(self.info[pe])

    def margins_intact(self) -> bool:
        """Whether the canary bytes around all blocks are as they were."""
        for heap in self.heaps:
            for base, memory, nbytes in heap:
                start = base - memory.ctypes.data
                if not ((memory[:start] == CANARY).all() and (memory[start + nbytes :] == CANARY).all()):
                    return False
        return True
