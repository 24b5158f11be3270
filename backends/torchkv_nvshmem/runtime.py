"""This process's membership in NVSHMEM: once, for life, with the PEs that were there at the start.

Joining and allocating are collective. NVSHMEM waits for missing PEs without end and ends the process, or wrecks its
heap, where something fails, so ranks first tell each other over the group's own channel whether they can take part:
a call either goes ahead on all ranks or raises on all ranks. Nothing is ever undone: leaving would be collective
too, and hang if a peer has died. A process keeps its symmetric memory to its end, and uses it again.
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
from torchkv.hostmem import host_identity
from torchkv_nvshmem import environment, wire
from torchkv_nvshmem.exchange import Exchange
from torchkv_nvshmem.gpu import Device, Gpu
from torchkv_nvshmem.heap import Heap, Place
from torchkv_nvshmem.library import UID_NBYTES, LibNVSHMEM, Library, why_not
from torchkv_nvshmem.wire import MAX_NBYTES, AllocateCard, JoinCard, StartCard

__all__ = ["MAILBOXES_NBYTES", "PROCESS", "Membership", "Party", "Runtime"]

MAILBOXES_NBYTES = 1 << 20  # of the first block: signal words of the transports of this process
_PAGE = 2 << 20
_GRANULE = 512 << 20  # in which NVSHMEM's heap grows
_MAX_TEXT = 900  # characters of a reason that travels
_JOINING = "NVSHMEM cannot serve this group"
_ALLOCATING = "symmetric memory cannot be allocated"

_Card = TypeVar("_Card", JoinCard, StartCard, AllocateCard)


class _Owner:
    """Lives as long as the tensors over one place of the heap."""


@dataclass(frozen=True, slots=True)
class Party:
    """The group that does something together."""

    rank: int
    size: int
    exchange: Exchange

    def ask(self, card: _Card, what: str) -> list[_Card]:
        """Every rank's card. Raises ``TransportUnavailable``, on all ranks, if one has a reason why not."""
        answers = self.exchange(wire.pack(card))
        if len(answers) != self.size:
            raise ProtocolError(f"{what}: {len(answers)} answers from a group of {self.size} ranks")
        cards = [wire.unpack(bytes(answer), type(card)) for answer in answers]
        reasons = [f"rank {rank}: {card.reason}" for rank, card in enumerate(cards) if card.reason]
        if reasons:
            raise TransportUnavailable(f"{what}: {'; '.join(reasons[:4])}")
        return cards


class Runtime:
    """NVSHMEM, started. ``lock`` must be held around every call of ``library``: it takes one thread at a time."""

    def __init__(self, library: Library, gpu: Device, *, heap_id: bytes, pe: int, size: int) -> None:
        self.library = library
        self.gpu = gpu
        self.heap_id = heap_id
        self.pe = pe
        self.size = size
        self.heap = Heap()
        self.lock = threading.Lock()

    def check_device(self, device: torch.device) -> None:
        """Raises ``TransportUnavailable`` unless ``device`` is this runtime's (no index: any of its type)."""
        mine = self.gpu.device
        if device.type != mine.type or (device.index is not None and device.index != mine.index):
            raise TransportUnavailable(f"{device}: NVSHMEM is bound to {mine} in this process and serves nothing else")

    def take(self, nbytes: int) -> torch.Tensor | None:
        """A uint8 tensor ``[nbytes]`` in symmetric memory, from what this PE has left; None if that is too little."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self.gpu.device)
        place = self.heap.take(nbytes)
        if place is None:
            return None
        owner = _Owner()
        # Not at exit: tensors may live longer than the interpreter's exit hooks, and nobody asks any more.
        weakref.finalize(owner, self.heap.give, place).atexit = False
        # Kernels that used the place for an earlier tensor may still be running.
        self.gpu.settle()
        return self.gpu.wrap(self.heap.address(place, "an own tensor"), nbytes, owner)

    def find(self, tensor: torch.Tensor) -> Place | None:
        """Where the storage of ``tensor`` lies in symmetric memory, or None."""
        storage = tensor.untyped_storage()
        return self.heap.find(storage.data_ptr(), storage.nbytes())

    def grow(self, nbytes: int) -> str:
        """Adds a block. Collective, ``nbytes`` the same on all PEs. Why it failed, or an empty string."""
        with self.lock:
            self.gpu.enter()
            base = self.library.malloc(nbytes)
        if base:
            self.heap.add(base, nbytes)
            return ""
        return f"the symmetric heap has no room for {nbytes} bytes more; raise {environment.HEAP_VARIABLES}"


class Membership:
    """What `join` has made of this process. There is one, `PROCESS`; tests make more, with fakes."""

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
        """See ``NVSHMEMTransport.join``."""
        with self._lock:
            self._party = None
            cards = party.ask(self._join_card(device, reserve), _JOINING)
            heaps = {card.heap for card in cards}
            if heaps == {b""}:
                self._start(party, device, cards)
            elif b"" in heaps:
                strangers = [rank for rank, card in enumerate(cards) if not card.heap]
                raise TransportUnavailable(
                    f"NVSHMEM takes no new members after its start, and ranks {strangers} of this group were not "
                    "there: make the group of all ranks first, or use another transport"
                )
            else:
                _check_members(cards)
            self._party = party

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """See ``NVSHMEMTransport.allocate_shared``."""
        with self._lock:
            runtime, party = self.runtime, self._party
            if party is None:
                raise TransportUnavailable(f"{_ALLOCATING}: call NVSHMEMTransport.join on all ranks of the group first")
            cards = party.ask(self._allocate_card(runtime, nbytes, device), _ALLOCATING)
            _check_members(cards)
            if all(card.nbytes <= card.spare for card in cards):
                tensor = runtime.take(nbytes)
            else:
                self._check_room(cards, runtime)
                reason = runtime.grow(_rounded(max(card.nbytes for card in cards), _PAGE))
                party.ask(StartCard(reason), _ALLOCATING)
                tensor = runtime.take(nbytes)
            assert tensor is not None, "nothing else takes from the heap while a collective is under way"
            return tensor

    # ------------------------------------------------------------------ inside

    def _join_card(self, device: torch.device, reserve: int) -> JoinCard:
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
            return JoinCard(
                reason="",
                heap=b"" if runtime is None else runtime.heap_id,
                pe=0 if runtime is None else runtime.pe,
                nbytes=reserve,
                host=host_identity(),
                gpu=gpu.uuid(),
                gpu_nbytes=gpu.memory()[1],
            )
        except KVError as error:  # the others wait for this rank's card, whatever it says
            return JoinCard(reason=_text(error))

    def _start(self, party: Party, device: torch.device, cards: Sequence[JoinCard]) -> None:
        """Starts NVSHMEM on all ranks: load it everywhere, then enter it together."""
        first = _rounded(max(card.nbytes for card in cards) + MAILBOXES_NBYTES, _PAGE)
        gpu = self._open_gpu(device)
        reason, uid = "", b""
        library: Library | None = None
        try:
            _check_reach(gpu, cards, party.rank)
            environment.prepare(first, max(card.gpu_nbytes for card in cards))
            library = self._load()
            uid = library.unique_id() if party.rank == 0 else b""
        except KVError as error:
            reason = _text(error)
        uid = party.ask(StartCard(reason, uid), _JOINING)[0].uid
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
            party.ask(StartCard(reason), _JOINING)
        except KVError as error:
            # A process can start it once, and now it is half started somewhere.
            self._failure = f"NVSHMEM failed to start earlier in this process: {_text(error)}"
            raise
        self._runtime = runtime

    def _allocate_card(self, runtime: Runtime, nbytes: int, device: torch.device) -> AllocateCard:
        try:
            runtime.check_device(device)
            if not 0 <= nbytes <= MAX_NBYTES:
                raise ProtocolError(f"{nbytes} bytes asked for; must be 0 to {MAX_NBYTES}")
            return AllocateCard(
                reason="",
                heap=runtime.heap_id,
                pe=runtime.pe,
                nbytes=nbytes,
                spare=runtime.heap.largest_free,
                free=runtime.gpu.memory()[0],
            )
        except KVError as error:
            return AllocateCard(reason=_text(error))

    def _check_room(self, cards: Sequence[AllocateCard], runtime: Runtime) -> None:
        """Raises ``TransportUnavailable`` unless a new block fits on every rank. From equal facts on all ranks."""
        if len(cards) != runtime.size:
            raise TransportUnavailable(
                f"symmetric memory grows only with all {runtime.size} ranks that started NVSHMEM, and this group has "
                f"{len(cards)} of them: allocate in that group, or give its join a larger reserve"
            )
        nbytes = max(card.nbytes for card in cards)
        needed = _rounded(nbytes, _GRANULE)
        rank = min(range(len(cards)), key=lambda r: cards[r].free)
        if cards[rank].free < needed:
            raise TransportUnavailable(
                f"{nbytes} bytes of symmetric memory (every rank takes the largest request, in steps of {_GRANULE}) "
                f"do not fit on rank {rank}, whose GPU has {cards[rank].free} bytes free; use fewer pages"
            )
        limit = environment.heap_limit()
        if limit is not None and runtime.heap.nbytes + needed + environment.OWN_NEEDS > limit:
            raise TransportUnavailable(
                f"the symmetric heap of {runtime.heap.nbytes} bytes cannot grow by {needed}: raise "
                f"NVSHMEM_MAX_MEMORY_PER_GPU, which is {limit}, on all ranks"
            )


def _check_members(cards: Sequence[JoinCard] | Sequence[AllocateCard]) -> None:
    """Raises ``TransportUnavailable`` unless all are different PEs of one heap."""
    if len({card.heap for card in cards}) != 1:
        raise TransportUnavailable("the ranks of this group belong to different NVSHMEM jobs; use another transport")
    if len({card.pe for card in cards}) != len(cards):
        raise ProtocolError(f"two ranks of this group claim to be one PE: {[card.pe for card in cards]}")


def _check_reach(gpu: Device, cards: Sequence[JoinCard], rank: int) -> None:
    """Raises ``TransportUnavailable`` if NVSHMEM would find no way to a GPU of this host, where it ends or hangs."""
    if _rdma_devices():  # it may go over them
        return
    for other, card in enumerate(cards):
        if card.host == cards[rank].host and not gpu.reaches(card.gpu):
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
