"""What a transport must do, and how transports are found.

A *transport* moves bytes one-sidedly between registered memory of two processes. It knows nothing of pages,
layouts or requests. torchkv finds transports through the entry-point group ``torchkv.backends``; the shipped
ones (``ucx``, ``loopback``) use the same door as a third party's. ``tests/contract`` is the executable form of
this contract: a new transport is done when that suite passes over it.

Ownership and threads. A transport object and all its channels, regions and completions belong to one thread,
which creates it, calls ``progress()`` until nothing is pending, and closes it. Only the static ``available()``
may be called from elsewhere. Nothing blocks except ``close()``.

Completion. ``put`` completes when its *source* may be overwritten. ``flush`` completes when every put posted on
that channel before it is *visible to loads of the peer's CPU (or GPU)*. A peer is told of bytes only after the
flush. ``Completion.cancel()`` stops what is not yet posted; ``done`` still turns true only when nothing that was
posted can touch memory any more.

Trust. Offsets are checked against both regions before anything is posted (``ProtocolError``), because some
transports write wherever they are told. ``address()`` and region descriptors are opaque bytes for the same
transport in a peer; decoding them must bound-check every field and must never unpickle.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch._C._distributed_c10d import Store

from torchkv.errors import KVError, ProtocolError, TransportUnavailable

__all__ = [
    "SIGNAL_SLOTS",
    "Batch",
    "Capabilities",
    "Channel",
    "Completion",
    "Int64Array",
    "Region",
    "RemoteView",
    "Revoke",
    "Transport",
    "check_signal",
    "installed_transports",
    "load_transport",
    "transport_names",
]

Int64Array = npt.NDArray[np.int64]

ENTRY_POINT_GROUP = "torchkv.backends"

SIGNAL_SLOTS = 64


class Revoke(enum.Enum):
    """Who can end a writer's ability to write, i.e. what proves that a page is quiescent."""

    RECEIVER = "receiver"  # the receiver can fence off the writer by itself
    WRITER_ACK = "writer's ack"  # only the writer's own word
    WRITER_DEATH = "writer's death"  # the end of the writer's process also proves it


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a transport can do.

    devices: torch device types whose memory it can register (``"cpu"``, ``"cuda"``).
    stream_ordered: channels have ``put_on_stream``.
    dynamic_members: peers may come and go during the transport's life.
    collective_memory: it has a heap that all members of a group allocate from together, see ``allocate_shared``.
    revoke: what proves quiescence, see `Revoke`.
    signals: streams and kernels of this rank's GPU may also write, and read, words in a peer's mapped memory.
    """

    devices: frozenset[str]
    stream_ordered: bool
    dynamic_members: bool
    revoke: frozenset[Revoke]
    collective_memory: bool = False
    signals: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """One-sided writes, as parallel int64 arrays of one length n (n may be 0).

    local_region[i], remote_region[i]: index into the regions registered here, and into the ``regions`` given to
    ``connect``. Offsets and lengths are in bytes from the start of the region.
    """

    local_region: Int64Array
    local_offset: Int64Array
    remote_region: Int64Array
    remote_offset: Int64Array
    length: Int64Array

    @classmethod
    def one(cls, *, local_region: int, local_offset: int, remote_region: int, remote_offset: int, length: int) -> Batch:
        """A batch of a single span."""
        values = np.array([local_region, local_offset, remote_region, remote_offset, length], dtype=np.int64)
        return cls(*values.reshape(5, 1))

    def __len__(self) -> int:
        return len(self.length)

    @property
    def nbytes(self) -> int:
        return int(self.length.sum())


class Completion(Protocol):
    """The state of a put or flush; advances only inside ``Transport.progress()``."""

    @property
    def done(self) -> bool:
        """True once nothing of this operation can touch memory any more, whether it succeeded or not."""

    @property
    def error(self) -> KVError | None:
        """Why it failed, or None. Meaningful once ``done``."""

    def cancel(self) -> None:
        """Stop posting. What was posted runs to its end; a stopped put ends with ``TransferCancelled``."""


@dataclass(frozen=True, slots=True)
class RemoteView:
    """A peer's region, mapped into this process: loads and stores at [ptr, ptr + nbytes) reach its memory."""

    ptr: int
    nbytes: int
    device: torch.device


class Region:
    """A registered span of local memory: the whole storage of a tensor, kept alive until ``Transport.deregister``.

    index: position in registration order; what ``Batch.local_region`` holds. descriptor: opaque bytes from which a
    peer's transport reaches this region, at most 4 KiB.
    """

    def __init__(self, index: int, tensor: torch.Tensor, descriptor: bytes) -> None:
        storage = tensor.untyped_storage()
        self.index = index
        self.ptr = storage.data_ptr()
        self.nbytes = storage.nbytes()
        self.device = tensor.device
        self._storage = storage
        self._descriptor = descriptor

    def descriptor(self) -> bytes:
        return self._descriptor


class Channel(ABC):
    """The way to one peer."""

    @property
    @abstractmethod
    def link(self) -> str:
        """What carries puts, for people: e.g. ``"tcp/lo"``, ``"cma/memory"``. May be empty before the first flush."""

    @abstractmethod
    def put(self, batch: Batch) -> Completion:
        """Write each span to the peer. Raises ``ProtocolError`` (offset outside a region), ``PeerLost``.

        Spans of one batch must not overlap at the destination; their order is unspecified.
        """

    @abstractmethod
    def flush(self) -> Completion:
        """Completes when all earlier puts of this channel are visible at the peer."""

    @abstractmethod
    def signal(self, slot: int, value: int) -> Completion:
        """Store ``value`` (int64) in the peer's signal ``slot`` (`SIGNAL_SLOTS`), ordered after all earlier puts."""

    @abstractmethod
    def view(self, region: int) -> RemoteView | None:
        """The peer's region mapped here, or None where loads and stores cannot reach it."""

    def why_no_view(self, region: int) -> str:
        """Why ``view(region)`` is None, in words."""
        return f"transport lane {self.link!r} maps no memory of the peer (region {region})"

    @property
    @abstractmethod
    def drained(self) -> bool:
        """After the peer's *process has ended*: true once nothing that it wrote can land here any more."""

    @abstractmethod
    def close(self) -> None:
        """Ends the channel and unmaps its views. Pending puts end with an error."""


class Transport(ABC):
    """A way to move bytes between processes. Constructed by the thread that will own it."""

    name: str
    capabilities: Capabilities

    @staticmethod
    @abstractmethod
    def available() -> str | None:
        """None if this transport can work here, else the reason and the command that mends it."""

    @classmethod  # noqa: B027 - optional, so neither abstract nor an error
    def join(cls, *, rank: int, size: int, store: Store, device: torch.device, reserve: int) -> None:
        """Called on every member of a group, on any thread, before memory is allocated for it or a transport is made.

        For transports whose members must meet first; may block until all have come. rank, size, store: the group's.
        reserve: bytes that this rank will `allocate`, at most. May be called again. Raises ``TransportUnavailable``.
        """

    @classmethod
    def allocate_shared(cls, nbytes: int, device: torch.device) -> torch.Tensor:
        """A uint8 tensor in the transport's own heap. Called by all members of a group with one ``nbytes``.

        Only where ``capabilities.collective_memory``. Raises ``TransportUnavailable`` if the heap is too small.
        """
        raise TransportUnavailable(f"transport {cls.name!r} has no heap of its own; allocate without group=")

    @abstractmethod
    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """A uint8 tensor in the kind of memory this transport likes best. Raises ``TransportUnavailable``."""

    @abstractmethod
    def register(self, tensor: torch.Tensor) -> Region:
        """Registers the whole storage of ``tensor``. Raises ``TransportUnavailable`` with the reason."""

    @abstractmethod
    def deregister(self, region: Region) -> None:
        """Undoes ``register``. No put of the region may be pending."""

    @abstractmethod
    def address(self) -> bytes:
        """Opaque bytes from which a peer connects. At most 16 KiB."""

    @abstractmethod
    def connect(self, address: bytes, regions: Sequence[bytes]) -> Channel:
        """A channel to the peer that published ``address`` and region descriptors ``regions``.

        Raises ``ProtocolError`` for bytes that do not decode, ``TransportUnavailable`` where no lane reaches it.
        """

    @abstractmethod
    def read_signal(self, slot: int) -> int:
        """The value last stored by a peer's ``Channel.signal`` in this transport's ``slot``; 0 at first."""

    @abstractmethod
    def progress(self) -> bool:
        """Advances everything pending without blocking. True if anything moved."""

    @abstractmethod
    def arm(self) -> int | None:
        """A file descriptor that turns readable when ``progress()`` has work; call right before sleeping on it.

        As long as it does not turn readable, and this does not return None when called again, there is none.
        None: there is work already (or the transport cannot sleep): call ``progress()`` instead.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes channels, regions and the transport itself. Idempotent."""


def check_signal(slot: int, value: int = 0, *, where: str = "") -> None:
    """Raises ``ProtocolError`` for a signal slot that does not exist, or a value that does not fit int64."""
    if not 0 <= slot < SIGNAL_SLOTS:
        raise ProtocolError(f"signal slot {slot}{where}: allowed are 0..{SIGNAL_SLOTS - 1}")
    if not -(1 << 63) <= value < 1 << 63:
        raise ProtocolError(f"signal value {value}{where} does not fit int64")


def transport_names() -> list[str]:
    """Names of all installed transports, ours and others'."""
    return sorted({entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)})


def installed_transports() -> dict[str, type[Transport]]:
    """Name -> class of every installed transport. Raises ``TransportUnavailable`` for one that does not load."""
    return {name: load_transport(name) for name in transport_names()}


def load_transport(name: str) -> type[Transport]:
    """The transport class registered under ``name``. Raises ``TransportUnavailable`` naming what is installed."""
    entries = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in entries:
        raise TransportUnavailable(
            f"no transport named {name!r} is installed (found: {', '.join(sorted(entries)) or 'none'}); "
            f"install the package that provides it under the entry-point group {ENTRY_POINT_GROUP!r}"
        )
    try:
        cls = entries[name].load()
    except ImportError as error:
        raise TransportUnavailable(f"transport {name!r} cannot be imported: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, Transport)):
        raise TransportUnavailable(f"entry point {name!r} is not a torchkv Transport: {cls!r}")
    return cls
