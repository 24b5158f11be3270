"""The contract of transports: what a backend has to implement, and how torchkv finds it.

A transport moves bytes one-sidedly between registered memory of two processes. It knows nothing of pages, layouts or
requests. The tests of `torchkv.testing` hold this contract: a transport is done when they pass. ``docs/transports.md``
is the way to write one, ``examples/template_backend`` the one to start from.

Objects. A group has one `Transport` in each process. `Transport.register` makes a `Region` of a tensor's storage. The
transport's address and the descriptors of its regions are opaque bytes; torchkv brings them to the other processes,
where `Transport.connect` makes a `Channel` of them. `Channel.put` writes into the peer's regions, `Channel.flush` tells
when the bytes are there; each returns a `Completion`.

Lifecycle::

    available() -> join() -> Transport() -> allocate(), register() -> address(), Region.descriptor()
        -> connect() -> put(), flush(), view(), progress(), arm() -> Channel.close() -> deregister() -> close()

A channel knows the regions whose descriptors `connect` was given; peers do not see what is registered later. `close` of
a transport closes whatever is still open. Both closes may be called again, and wait for no peer: it may be dead or
stopped.

Threads. One thread owns a transport with its regions, channels and completions. It constructs the transport, makes
every call and closes it, so nothing needs a lock. Only the class's own ``available``, ``join`` and ``allocate_shared``,
and the functions of a `NativeChannel`, are called from other threads.

Progress. Operations advance inside `Transport.progress`, which the owner calls as long as the transport is open; a put
may need the progress of the peer, too. Completions change inside calls of this interface only. Nothing blocks but
``join``, ``allocate_shared`` and the two closes. `put` and a round of `progress` return within about a millisecond: a
large batch is posted in parts, in later rounds, and without a Python loop over its spans if it is to be fast. Between
rounds the owner may sleep on the file descriptor that `Transport.arm` returns.

Completion. A *put* is done when its source may be overwritten; its bytes may still be on their way. A *flush* is done
when the bytes of all puts that were posted on its channel before it are visible to loads of the peer's CPU, or of its
GPU where they lie in device memory.

Visibility. The writer tells the receiver of bytes by a message of another kind, a socket for instance, that it sends
once the flush is done. The receiver looks at its memory only then. Spans and puts have no order among each other: only
what is posted after a flush is done certainly lands after what was posted before that flush.

Cancellation. ``Completion.cancel`` stops a put: nothing more of it is posted, and what has been posted runs to its end.
A put that was stopped ends with ``TransferCancelled``, and is done only when none of its bytes can land any more; one
of which all had been posted ends as usual. The channel goes on. A flush cannot be cancelled.

Errors. A failure is a ``KVError``, raised by the call or stored in ``Completion.error``; any other exception is a bug
of the backend and ends the group. A call that raises has done nothing, and the channel is as it was before.

* ``ProtocolError``: what the caller or the peer did is wrong: a span outside its region, bytes that do not decode,
  use after close.
* ``TransportUnavailable``: the transport cannot do it here; the message says why, and what would help.
* ``PeerLost``: the peer's process has ended, the connection to it is down, or the channel was closed.
* ``TransferCancelled``: see above.

After an operation has failed otherwise than by ``cancel``, its source is not read any more, but what has arrived at the
peer is unknown. The channel may refuse everything from then on; it must not pretend that later puts arrived.

Death. When a peer's process ends, pending operations towards it end with ``PeerLost``, later ones are refused with it,
and other channels go on. `Channel.drained` turns true when nothing that the dead process has sent can land here any
more; torchkv gives out the pages that it might have written only then. This must be noticed on a channel that has been
idle, too. Where a transport cannot know, `drained` stays false.

Trust. A batch may be wrong: every span is checked against the local and the remote region before anything is posted,
because some networks write wherever they are told (`torchkv.transport.batch_check` does it). Addresses and descriptors
come from the network: they are checked against a digest, decoded as a closed type, every field is bounded, nothing is
unpickled (`torchkv.transport.framing`). A descriptor is the permission to write to the region: torchkv gives it to the
members of the group and to nobody else.

Memory. `allocate` gives the memory that the transport reaches best. `register` takes the whole storage of a tensor of
any origin, or refuses it with the reason; the region keeps the storage alive until `deregister` or `close`. Regions are
numbered from 0 as they are registered, and numbers are not used again. Before a region is deregistered its owner makes
sure that no peer puts into it any more; a transport cannot know. A *view* is a peer's region mapped into this process;
the code that loads and stores through it is responsible for their order and visibility.

Discovery. `load_transport` finds a class by its name in the entry-point group ``torchkv.backends``. The transports of
this repository (``ucx``, ``nvshmem``, ``loopback``) are found in the same way as yours.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Protocol

import numpy as np
import torch
from torch._C._distributed_c10d import Store

from torchkv.arrays import Int64Array
from torchkv.errors import KVError, TransportUnavailable

__all__ = [
    "Batch",
    "Capabilities",
    "Channel",
    "Completion",
    "NativeChannel",
    "Region",
    "RemoteView",
    "Transport",
    "installed_transports",
    "load_transport",
    "transport_names",
]

ENTRY_POINT_GROUP = "torchkv.backends"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a transport can do.

    devices: torch device types whose memory it can register: ``"cpu"``, ``"cuda"``.
    collective_memory: it has a heap that all members of a group allocate from together, see
        `Transport.allocate_shared`.
    """

    devices: frozenset[str]
    collective_memory: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """One-sided writes, as parallel arrays int64[n], n >= 0: span i is ``length[i]`` bytes.

    local_region: index of a region registered here. remote_region: position in the ``regions`` given to ``connect``.
    local_offset, remote_offset: bytes from the start of the region.
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
    """The state of a put or a flush."""

    @property
    def done(self) -> bool:
        """Whether it has ended, with success or not; see Completion and Cancellation in the module's text."""

    @property
    def error(self) -> KVError | None:
        """Why it failed, or None. Meaningful once ``done``."""

    def cancel(self) -> None:
        """Posts nothing more of a put; without effect once all is posted, and on a flush."""


@dataclass(frozen=True, slots=True)
class RemoteView:
    """A peer's region, mapped into this process: loads and stores at [ptr, ptr + nbytes) reach its memory.

    ptr: an address for the CPU, or for kernels on ``device``. Valid until the channel is closed.
    """

    ptr: int
    nbytes: int
    device: torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeChannel:
    """What compiled code needs to use a channel without Python, beside the owner's thread: see `Channel.native`.

    functions: addresses of eight C functions, with the signatures and results of UCX's ``ucp_put_nbx``,
    ``ucp_ep_flush_nbx``, ``ucp_request_check_status``, ``ucp_request_free``, ``ucp_worker_progress``,
    ``ucp_tag_send_nbx``, ``ucp_tag_probe_nb`` and ``ucp_tag_msg_recv_nbx``. Any thread may call them. A message of 64
    bytes is received at once; if one of 2 KiB is not, grants go through Python.
    worker, endpoint: what they take first; a worker of 0 says that nothing has to be driven: a flush ends at once, and
    that there are no messages: only loops that have mapped each other's mailboxes use the channel.
    put_params, params: memory of their last argument, for puts, with the local key in the word ``key_word``, and for
    all others. local_keys: by index of a region registered here; 0: it cannot be put from.
    remote_keys, remote_at: key and address of each region of the peer; a key of 0 says that it cannot be put into.
    put_seconds: about what a put costs beside its bytes, for those who have not measured it.
    """

    functions: Int64Array
    worker: int
    endpoint: int
    put_params: Int64Array
    key_word: int
    params: Int64Array
    local_keys: Int64Array
    remote_keys: Int64Array
    remote_at: Int64Array
    put_seconds: float


class Region:
    """Registered local memory: the whole storage of a tensor, kept alive until ``Transport.deregister`` or ``close``.

    index: position in the order of registration; what ``Batch.local_region`` holds. ptr, nbytes, device: where the
    storage lies. descriptor: what `descriptor` returns.
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
        """Opaque bytes from which a peer's transport reaches this region; at most 4 KiB."""
        return self._descriptor


class Channel(ABC):
    """The way to one peer. There may be several channels to the same one."""

    @property
    @abstractmethod
    def link(self) -> str:
        """What carries puts, for people: ``"tcp/lo"``, ``"cma/memory"``. May be empty until a flush is done."""

    @abstractmethod
    def put(self, batch: Batch) -> Completion:
        """Writes each span to the peer. The batch's arrays may be changed once this has returned.

        Spans of one batch must not overlap at the destination; they land in no particular order. Raises
        ``ProtocolError`` that names the first span outside a region, ``TransportUnavailable`` for memory that puts do
        not reach, ``PeerLost``.
        """

    @abstractmethod
    def flush(self) -> Completion:
        """Is done when all earlier puts of this channel are visible at the peer. Raises ``PeerLost``."""

    @abstractmethod
    def view(self, region: int) -> RemoteView | None:
        """The peer's region mapped here, or None where loads and stores cannot reach it.

        Raises ``ProtocolError`` for a region that the peer has not published.
        """

    def why_no_view(self, region: int) -> str:
        """Why ``view(region)`` is None, in words."""
        return f"transport lane {self.link!r} maps no memory of the peer (region {region})"

    def native(self, closing: Callable[[], None]) -> NativeChannel | None:
        """For the resident loop, which then puts by itself; None where only Python can.

        closing: called before the endpoint ends, on the owner's thread. When it returns, nothing uses it any more. What
        was posted may be under way then, and its requests have been freed.
        """
        return None

    @property
    @abstractmethod
    def drained(self) -> bool:
        """Whether the peer's process has ended and nothing that it sent can land here any more."""

    @abstractmethod
    def close(self) -> None:
        """Ends the channel and unmaps its views. Pending operations are done on return, with an error. Idempotent."""


class Transport(ABC):
    """A way to move bytes between processes. Constructed, without arguments, by the thread that will own it.

    name: what ``Options.transport`` calls it, and its entry point.
    """

    name: str
    capabilities: Capabilities

    @staticmethod
    @abstractmethod
    def available() -> str | None:
        """None if this transport can work on this machine, else the reason and what would help. Loads nothing heavy."""

    @classmethod  # noqa: B027 - optional, so neither abstract nor an error
    def join(cls, *, rank: int, size: int, store: Store, device: torch.device, reserve: int) -> None:
        """Collective: called by every member of a group, before its memory is allocated and its transports are made.

        Only where ``capabilities.collective_memory``. May block until all members have called it, and may be called
        again by the same group. rank, size, store: the group's. device: where the memory lies. reserve: the most bytes
        that this rank will `allocate`. Raises ``TransportUnavailable``.
        """

    @classmethod
    def allocate_shared(cls, nbytes: int, device: torch.device) -> torch.Tensor:
        """Collective: a uint8 tensor [nbytes] in the transport's own heap. All members ask for the same size.

        Only where ``capabilities.collective_memory``. Raises ``TransportUnavailable`` if the heap is too small.
        """
        raise TransportUnavailable(f"transport {cls.name!r} has no heap of its own; allocate without group=")

    @abstractmethod
    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """A uint8 tensor [nbytes] in the memory that this transport reaches best. Raises ``TransportUnavailable``."""

    @abstractmethod
    def register(self, tensor: torch.Tensor) -> Region:
        """Registers the whole storage of ``tensor``. Raises ``TransportUnavailable`` for memory that it cannot move."""

    @abstractmethod
    def deregister(self, region: Region) -> None:
        """Undoes ``register``. Raises ``ProtocolError`` while a put from the region is pending, and the second time."""

    @abstractmethod
    def address(self) -> bytes:
        """Opaque bytes from which a peer connects; at most 16 KiB."""

    @abstractmethod
    def connect(self, address: bytes, regions: Sequence[bytes]) -> Channel:
        """A channel to the peer that published ``address`` and region descriptors ``regions``.

        Raises ``ProtocolError`` for bytes that are not what a peer has published, ``TransportUnavailable`` where
        nothing reaches it.
        """

    @abstractmethod
    def progress(self) -> bool:
        """Advances everything that is pending, for about a millisecond, without blocking. True if anything moved."""

    def look_after(self) -> bool:
        """As ``progress()``, called instead now and then while the resident loop drives this transport by itself.

        So it need not advance what the functions of `NativeChannel` advance: two threads that do would contend.
        """
        return self.progress()

    @abstractmethod
    def arm(self) -> int | None:
        """A file descriptor that turns readable when ``progress()`` has work. Called right before each sleep on it.

        None: there is work already, or the transport cannot sleep; call ``progress()`` instead.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes channels, regions and the transport itself; frees every file descriptor and thread. Idempotent."""


def transport_names() -> list[str]:
    """Names of all installed transports."""
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
