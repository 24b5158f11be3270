"""This process's membership in NVSHMEM, which it joins once and never leaves, with the PEs of the first group.

Joining and allocating are collective. NVSHMEM waits for missing PEs forever; when something fails it ends the process
or corrupts its heap. So the ranks first tell each other, through the group's store, whether they can take part: a call
goes ahead on all ranks or raises on all ranks. Nothing is undone: leaving would be collective, too, and hang if a peer
has died. A process keeps its symmetric memory until it ends, and uses it again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from torchkv.errors import KVError, ProtocolError, TransportUnavailable
from torchkv.host.shared_memory import host_identity
from torchkv_nvshmem import environment, wire
from torchkv_nvshmem.exchange import Exchange
from torchkv_nvshmem.gpu import Device, Gpu
from torchkv_nvshmem.heap import Heap, Place
from torchkv_nvshmem.library import UID_NBYTES, LibNVSHMEM, Library, why_not
from torchkv_nvshmem.wire import MAX_NBYTES, AllocateMetadata, JoinMetadata, StartMetadata

__all__ = ["PROCESS", "Membership", "Party", "Runtime"]

_PAGE = 2 << 20
_GRANULE = 512 << 20  # bytes in which NVSHMEM's heap grows
_MAX_TEXT = 900  # characters of a reason that is sent to the other ranks
_JOINING = "NVSHMEM cannot serve this group"
_ALLOCATING = "symmetric memory cannot be allocated"

RankMetadata = TypeVar("RankMetadata", JoinMetadata, StartMetadata, AllocateMetadata)


class _Owner:
    """An object that lives as long as the tensors over one place of the heap; its end frees the place."""


@dataclass(frozen=True, slots=True)
class Party:
    """The group that takes part in a collective call, and this process's rank in it."""

    rank: int
    size: int
    exchange: Exchange

    def ask(self, own: RankMetadata, operation: str) -> list[RankMetadata]:
        """Exchanges ``own``; every rank's metadata, in rank order.

        Raises ``TransportUnavailable``, on all ranks, if any rank gave a reason why it cannot take part.
        """
        answers = self.exchange(wire.pack(own))
        if len(answers) != self.size:
            raise ProtocolError(f"{operation}: {len(answers)} answers from a group of {self.size} ranks")
        members = [wire.unpack(bytes(answer), type(own)) for answer in answers]
        reasons = [f"rank {rank}: {member.reason}" for rank, member in enumerate(members) if member.reason]
        if reasons:
            raise TransportUnavailable(f"{operation}: {'; '.join(reasons[:4])}")
        return members


class Runtime:
    """NVSHMEM after its start. ``lock`` is held around every call of ``library``, which takes one thread at a time."""

    def __init__(self, library: Library, gpu: Device, *, heap_id: bytes, pe: int, size: int) -> None:
        self.library = library
        self.gpu = gpu
        self.heap_id = heap_id
        self.pe = pe
        self.size = size
        self.heap = Heap()
        self.lock = threading.Lock()

    def check_device(self, device: torch.device) -> None:
        """Raises ``TransportUnavailable`` unless ``device`` is this runtime's; without an index its type must be."""
        mine = self.gpu.device
        if device.type != mine.type or (device.index is not None and device.index != mine.index):
            raise TransportUnavailable(f"{device}: NVSHMEM is bound to {mine} in this process and serves nothing else")

    def take(self, nbytes: int) -> torch.Tensor | None:
        """A uint8 tensor [nbytes] from the symmetric memory that this PE has free; None if there is too little."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self.gpu.device)
        place = self.heap.take(nbytes)
        if place is None:
            return None
        owner = _Owner()
        # Not at exit: tensors may outlive the interpreter's exit hooks, and nothing is allocated after them.
        weakref.finalize(owner, self.heap.give, place).atexit = False
        # Kernels that use this place through an earlier tensor may still be running.
        self.gpu.settle()
        return self.gpu.wrap(self.heap.address(place, "an own tensor"), nbytes, owner)

    def find(self, tensor: torch.Tensor) -> Place | None:
        """The place of the tensor's storage in symmetric memory, or None."""
        storage = tensor.untyped_storage()
        return self.heap.find(storage.data_ptr(), storage.nbytes())

    def grow(self, nbytes: int) -> str:
        """Collective, with the same ``nbytes`` on all PEs: adds a block. Returns why it failed, or ""."""
        with self.lock:
            self.gpu.enter()
            base = self.library.malloc(nbytes)
        if base:
            self.heap.add(base, nbytes)
            return ""
        return f"the symmetric heap has no room for {nbytes} bytes more; raise {environment.HEAP_VARIABLES}"


class Membership:
    """Whether and as which PE this process is a member. There is one, `PROCESS`; tests make others with fakes.

    load, open_gpu: make the library and the device. obstacle: why NVSHMEM cannot work here, or None.
    """

    def __init__(
        self,
        load: Callable[[], Library] = LibNVSHMEM,
        open_gpu: Callable[[torch.device], Device] = Gpu,
        obstacle: Callable[[], str | None] = why_not,
    ) -> None:
        self._load = load
        self._open_gpu = open_gpu
        self._obstacle = obstacle
        self._runtime: Runtime | None = None
        self._party: Party | None = None
        self._failure = ""
        self._lock = threading.Lock()  # one collective at a time

    @property
    def runtime(self) -> Runtime:
        """Raises ``TransportUnavailable`` before a successful `join`."""
        if self._runtime is None:
            raise TransportUnavailable(
                self._failure
                or "NVSHMEM has not been started: its members are fixed at the start, so all ranks of the group must "
                "first call NVSHMEMTransport.join together"
            )
        return self._runtime

    def join(self, party: Party, device: torch.device, reserve: int) -> None:
        """Does what ``NVSHMEMTransport.join`` says."""
        with self._lock:
            self._party = None
            members = party.ask(self._join_metadata(device, reserve), _JOINING)
            heaps = {member.heap for member in members}
            if heaps == {b""}:
                self._start(party, device, members)
            elif b"" in heaps:
                strangers = [rank for rank, member in enumerate(members) if not member.heap]
                raise TransportUnavailable(
                    f"NVSHMEM takes no new members after its start, and ranks {strangers} of this group were not "
                    "there: make the group of all ranks first, or use another transport"
                )
            else:
                _check_members(members)
            self._party = party

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Does what ``NVSHMEMTransport.allocate_shared`` says."""
        with self._lock:
            runtime, party = self.runtime, self._party
            if party is None:
                raise TransportUnavailable(f"{_ALLOCATING}: call NVSHMEMTransport.join on all ranks of the group first")
            members = party.ask(self._allocate_metadata(runtime, nbytes, device), _ALLOCATING)
            _check_members(members)
            if all(member.nbytes <= member.spare for member in members):
                tensor = runtime.take(nbytes)
            else:
                self._check_room(members, runtime)
                reason = runtime.grow(_rounded(max(member.nbytes for member in members), _PAGE))
                party.ask(StartMetadata(reason), _ALLOCATING)
                tensor = runtime.take(nbytes)
            assert tensor is not None, "nothing else allocates from the heap during a collective call"
            return tensor

    # ------------------------------------------------------------------ inside

    def _join_metadata(self, device: torch.device, reserve: int) -> JoinMetadata:
        runtime = self._runtime
        try:
            reason = self._failure or self._obstacle()
            if reason:
                raise TransportUnavailable(reason)
            if not 0 <= reserve <= MAX_NBYTES:
                raise ProtocolError(f"reserve={reserve} bytes; must be 0 to {MAX_NBYTES}")
            gpu = self._open_gpu(device)
            if runtime is not None:
                runtime.check_device(gpu.device)
            return JoinMetadata(
                reason="",
                heap=b"" if runtime is None else runtime.heap_id,
                pe=0 if runtime is None else runtime.pe,
                nbytes=reserve,
                host=host_identity(),
                gpu=gpu.uuid(),
                gpu_nbytes=gpu.memory()[1],
            )
        except KVError as error:  # the others wait for this rank's metadata, an error included
            return JoinMetadata(reason=_text(error))

    def _start(self, party: Party, device: torch.device, members: Sequence[JoinMetadata]) -> None:
        """Starts NVSHMEM on all ranks: first all load it, then all start it together."""
        first = max(_PAGE, _rounded(max(member.nbytes for member in members), _PAGE))
        gpu = self._open_gpu(device)
        reason, uid = "", b""
        library: Library | None = None
        try:
            _check_reach(gpu, members, party.rank)
            environment.prepare(first, max(member.gpu_nbytes for member in members))
            library = self._load()
            uid = library.unique_id() if party.rank == 0 else b""
        except KVError as error:
            reason = _text(error)
        uid = party.ask(StartMetadata(reason, uid), _JOINING)[0].uid
        assert library is not None
        if len(uid) != UID_NBYTES:
            raise ProtocolError(f"{_JOINING}: rank 0 sent a unique id of {len(uid)} bytes, not {UID_NBYTES}")
        runtime = Runtime(library, gpu, heap_id=wire.heap_id(uid), pe=party.rank, size=party.size)
        try:
            with runtime.lock:
                library.start(uid, rank=party.rank, size=party.size, device=gpu.device.index or 0)
            reason = runtime.grow(first)
        except KVError as error:
            reason = _text(error)
        try:
            party.ask(StartMetadata(reason), _JOINING)
        except KVError as error:
            # A process can start NVSHMEM once only, and on some rank it may have been started.
            self._failure = f"NVSHMEM failed to start earlier in this process: {_text(error)}"
            raise
        self._runtime = runtime

    def _allocate_metadata(self, runtime: Runtime, nbytes: int, device: torch.device) -> AllocateMetadata:
        try:
            runtime.check_device(device)
            if not 0 <= nbytes <= MAX_NBYTES:
                raise ProtocolError(f"{nbytes} bytes asked for; must be 0 to {MAX_NBYTES}")
            return AllocateMetadata(
                reason="",
                heap=runtime.heap_id,
                pe=runtime.pe,
                nbytes=nbytes,
                spare=runtime.heap.largest_free,
                free=runtime.gpu.memory()[0],
            )
        except KVError as error:
            return AllocateMetadata(reason=_text(error))

    def _check_room(self, members: Sequence[AllocateMetadata], runtime: Runtime) -> None:
        """Raises ``TransportUnavailable`` unless a new block fits on every rank; all ranks come to the same result."""
        if len(members) != runtime.size:
            raise TransportUnavailable(
                f"symmetric memory grows only with all {runtime.size} ranks that started NVSHMEM, and this group has "
                f"{len(members)} of them: allocate in that group, or give its join a larger reserve"
            )
        nbytes = max(member.nbytes for member in members)
        needed = _rounded(nbytes, _GRANULE)
        rank = min(range(len(members)), key=lambda r: members[r].free)
        if members[rank].free < needed:
            raise TransportUnavailable(
                f"{nbytes} bytes of symmetric memory (every rank takes the largest request, in steps of {_GRANULE}) "
                f"do not fit on rank {rank}, whose GPU has {members[rank].free} bytes free; use fewer pages"
            )
        limit = environment.heap_limit()
        if limit is not None and runtime.heap.nbytes + needed + environment.OWN_NEEDS > limit:
            raise TransportUnavailable(
                f"the symmetric heap of {runtime.heap.nbytes} bytes cannot grow by {needed}: raise "
                f"NVSHMEM_MAX_MEMORY_PER_GPU, which is {limit}, on all ranks"
            )


def _check_members(members: Sequence[JoinMetadata] | Sequence[AllocateMetadata]) -> None:
    """Raises ``TransportUnavailable`` or ``ProtocolError`` unless all ranks are different PEs of one job."""
    if len({member.heap for member in members}) != 1:
        raise TransportUnavailable("the ranks of this group belong to different NVSHMEM jobs; use another transport")
    if len({member.pe for member in members}) != len(members):
        raise ProtocolError(f"two ranks of this group claim to be one PE: {[member.pe for member in members]}")


def _check_reach(gpu: Device, members: Sequence[JoinMetadata], rank: int) -> None:
    """Raises ``TransportUnavailable`` if NVSHMEM cannot reach a GPU of this host; it would end the process or hang."""
    if _rdma_devices():  # NVSHMEM may use them
        return
    for other, member in enumerate(members):
        if member.host == members[rank].host and not gpu.reaches(member.gpu):
            raise TransportUnavailable(
                f"{gpu.device} has no peer access to the GPU of rank {other} on the same host, and there is no "
                "InfiniBand; `nvidia-smi topo -p2p w` shows which pairs of GPUs have it; use transport 'ucx'"
            )


def _rdma_devices() -> list[str]:
    return [path.name for path in Path("/sys/class/infiniband").glob("*")]


def _text(error: KVError) -> str:
    return str(error)[:_MAX_TEXT]


def _rounded(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


PROCESS = Membership()
