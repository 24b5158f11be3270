"""KVProcessGroup: a c10d process group with KV verbs. Importing torchkv registers it as backend ``"torchkv"``."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, _DistributedBackendOptions

from torchkv.cache import KVCache, allocate
from torchkv.control.channel import ZmqControlChannel
from torchkv.engine.engine import Engine
from torchkv.engine.peer_metadata import MAX_METADATA, PeerMetadata
from torchkv.engine.probe import PROBE_BYTES
from torchkv.engine.progress import ProgressThread
from torchkv.engine.registration import Registration, choose_transport, failure_metadata, new_incarnation, new_secret
from torchkv.engine.work import KVWork
from torchkv.errors import ProtocolError
from torchkv.group.arguments import Layers, Pages, Peers
from torchkv.group.explain import Explanation, explain
from torchkv.group.verbs import Verbs
from torchkv.host.processes import this_process
from torchkv.options import Options, warn_about_unknown_variables
from torchkv.transport.interface import Transport

__all__ = ["KVProcessGroup", "register_backend"]

log = logging.getLogger(__name__)

BACKEND = "torchkv"

T = TypeVar("T")

# All c10d operations, under their names of old and new torch releases. Each is forwarded in Python to an inner, plain
# ProcessGroup. Inheriting them instead deadlocks: the C++ trampoline keeps the GIL while gloo's thread waits for it.
_FORWARDED = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)


class KVProcessGroup(dist.ProcessGroup):
    """A process group whose ranks exchange KV cache pages. All collectives of c10d work on it too.

    Made by ``dist.init_process_group("torchkv")`` or ``dist.new_group(backend="torchkv", pg_options=Options(...))``.
    Call `register` on all ranks first. Then the receiver of a request calls `recv_pages`; each sender calls any of the
    ``send_*`` verbs and `staged_put`, any number of times, and `finish`. The verbs are thread-safe.

    The logger ``torchkv.request`` traces every request at level DEBUG. On a sender: verb queued, grant bound, transfer
    started (with its path), bytes attested, sealed, verdict. On a receiver: granted, covered, verdict.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, options: Options) -> None:
        dist.ProcessGroup.__init__(self, rank, size)  # type: ignore[call-arg]  # the stubs know only (store, ...)
        self._store = store
        self._options = options
        self._thread: ProgressThread | None = None
        self._verbs: Verbs | None = None  # from register on
        self._notes: list[str] = []  # for explain
        self._forked = False  # whether this process is a forked child of the one that made the group
        self._registering = threading.Lock()
        self._inner = dist.ProcessGroup(store, rank, size)
        cpu = torch.device("cpu")
        gloo_type = dist.ProcessGroup.BackendType.GLOO
        gloo = dist.ProcessGroupGloo(PrefixStore("gloo/", store), rank, size, timeout)
        gloo._set_sequence_number_for_group()
        _groups.add(self)
        # Registered on this group too, because c10d keeps a group's name, devices and shutdown in its backends.
        for group in (self._inner, self):
            group._register_backend(cpu, gloo_type, gloo)
            group._set_default_backend(gloo_type)
        if torch.cuda.is_available() and dist.is_nccl_available():
            nccl_type = dist.ProcessGroup.BackendType.NCCL
            nccl_options = dist.ProcessGroupNCCL.Options()
            nccl_options._timeout = timeout
            nccl = dist.ProcessGroupNCCL(PrefixStore("nccl/", store), rank, size, nccl_options)
            nccl._set_sequence_number_for_group()
            for group in (self._inner, self):
                group._register_backend(torch.device("cuda"), nccl_type, nccl)

    # ------------------------------------------------------------------ registration

    def register(self, cache: KVCache | None, instance: str | None = None) -> None:
        """Publishes this rank's cache to the group. Collective, once per group, before any verb.

        cache: this rank's pages; None joins the group without a cache.
        instance: name of the serving instance that this rank belongs to. Ranks of one instance succeed or fail together
        in each request. None stands for an instance of this rank alone, named ``rank<r>``.

        Runs one full garbage collection, so that Python does not start it amid the first requests. From the first
        request on that the resident loop cannot serve, until the group is destroyed, ``sys.setswitchinterval`` is
        lowered to 0.5 ms, so that the progress thread gets the GIL while callers run Python code.

        Raises on all ranks if any rank fails: ``LayoutMismatch`` (names both ranks, the field and both values),
        ``TransportUnavailable``, ``ProtocolError``.
        """
        if self._forked:
            self._unregistered("register")
        with self._registering:
            if self._verbs is not None:
                raise ProtocolError("register: this group has a cache already; one cache per rank and group")
            name = f"rank{self.rank()}" if instance is None else instance
            incarnation = new_incarnation()
            transport = self._or_report(incarnation, lambda: self._checked_transport(cache, name))
            if transport.capabilities.collective_memory:
                # `Transport.join` waits for all ranks, so first make sure that all of them will call it.
                self._exchange_all(
                    PeerMetadata(rank=self.rank(), incarnation=incarnation, instance="", process=this_process())
                )
            thread = self._or_report(incarnation, lambda: self._start(transport, cache))
            try:
                registration = self._registration_of(cache, name, incarnation, thread)
                metadata = self._or_report(incarnation, lambda: thread.call(registration.metadata))
                all_metadata = self._exchange_all(metadata)
                engine = self._engine_of(thread, registration, all_metadata, incarnation)
            except BaseException:
                thread.stop()
                raise
            self._thread, self._registration = thread, registration
            self._verbs = Verbs(engine, cache, wake=thread.waker.wake)
            engine.wake = thread.waker.wake
            engine.needs_gil = thread.short_turns.begin

    def _registration_of(
        self, cache: KVCache | None, instance: str, incarnation: int, thread: ProgressThread
    ) -> Registration:
        return Registration(
            rank=self.rank(),
            instance=instance,
            cache=cache,
            options=self._options,
            transport=thread.transport,
            control=thread.control,
            incarnation=incarnation,
            secret=new_secret(),
            group=self.group_name,
        )

    def _engine_of(
        self, thread: ProgressThread, registration: Registration, all_metadata: list[PeerMetadata], incarnation: int
    ) -> Engine:
        """This rank's engine, once all ranks have theirs. Raises the error of any rank that fails."""

        def make() -> Engine:
            engine = registration.engine(all_metadata)
            thread.engine = engine
            registration.warm(engine)
            return engine

        mine = all_metadata[self.rank()]
        engine = self._or_report(incarnation, lambda: thread.call(make))
        # No rank puts before all have connected: over TCP, UCX (1.21 and 1.22) crashes if it connects to a peer while
        # it has read a part of that peer's put. uct_tcp_ep_replace_ep moves the put to the new endpoint without its
        # header.
        self._exchange_all(mine)
        self._or_report(incarnation, lambda: registration.measure_connections(thread, engine))
        if engine.flows is not None:
            engine.flows.core.start(thread.waker.fd, thread.waker.word)
        self._exchange_all(mine)
        return engine

    def _or_report(self, incarnation: int, step: Callable[[], T]) -> T:
        """Runs one step of registration. If it fails, publishes the error: the other ranks wait for this one."""
        try:
            return step()
        except Exception as error:
            self._exchange(failure_metadata(self.rank(), incarnation, error))
            raise

    def _exchange_all(self, metadata: PeerMetadata) -> list[PeerMetadata]:
        """The metadata of all ranks. Collective. Raises the error that any of them reports."""
        all_metadata = self._exchange(metadata)
        for received in all_metadata:
            received.raise_error()
        return all_metadata

    def _check_register(self, cache: KVCache | None, instance: str) -> None:
        if cache is not None and not isinstance(cache, KVCache):
            raise ProtocolError(f"register: cache is a {type(cache).__name__}; give a KVCache or None")
        try:
            size = len(instance.encode()) if isinstance(instance, str) else 0
        except UnicodeEncodeError:
            size = 0
        if not 1 <= size <= 128:
            raise ProtocolError(f"register: instance={instance!r:.80} must be a str of 1 to 128 bytes in UTF-8")
        if name_of_other_rank(instance, self.rank()):
            raise ProtocolError(
                f"register: instance={instance!r} is the name that rank gets by default; choose another"
            )

    def _checked_transport(self, cache: KVCache | None, instance: str) -> type[Transport]:
        self._check_register(cache, instance)
        return choose_transport(self._options.transport)

    def _start(self, transport: type[Transport], cache: KVCache | None) -> ProgressThread:
        if transport.capabilities.collective_memory:
            device = torch.device("cuda", torch.cuda.current_device()) if cache is None else cache.device
            self._join(transport, device)

        def make() -> tuple[Transport, ZmqControlChannel]:
            made = transport()
            try:
                return made, ZmqControlChannel(heartbeat=self._options.heartbeat)
            except BaseException:
                made.close()
                raise

        return ProgressThread(f"{self.rank()}", make)

    def _join(self, transport: type[Transport], device: torch.device) -> None:
        reserve = self._options.staging_send + self._options.staging_recv + PROBE_BYTES[device.type]
        transport.join(rank=self.rank(), size=self.size(), store=self._store, device=device, reserve=reserve)

    def _exchange(self, metadata: PeerMetadata) -> list[PeerMetadata]:
        """The metadata of all ranks, in rank order. Collective, over tensors: no byte of a peer is unpickled."""
        data = metadata.encode()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size())]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self)
        width = max(int(size) for size in sizes)
        if min(int(size) for size in sizes) < 0 or width > MAX_METADATA:
            raise ProtocolError(f"register: a rank announced metadata of {width} bytes, the limit is {MAX_METADATA}")
        mine = torch.zeros(width, dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        received = [torch.empty(width, dtype=torch.uint8) for _ in range(self.size())]
        dist.all_gather(received, mine, group=self)
        return [
            PeerMetadata.decode(row[: int(size)].numpy().tobytes()) for row, size in zip(received, sizes, strict=True)
        ]

    # ------------------------------------------------------------------ verbs of a receiver

    def recv_pages(
        self,
        request: str,
        pages: Pages,
        src: Peers,
        *,
        prefix_tokens: int = 0,
        state_slot: int | None = None,
        timeout: float | timedelta | None = None,
    ) -> KVWork:
        """Grants ``pages`` to a request. The work completes when all bytes, state and aux of the request have arrived.

        request: the request's name, a str of 1 to 128 bytes in UTF-8.
        pages: page ids of this rank's cache, int [n], in order of position; the first one follows the prefix.
        src: the writers: a group rank, a list of ranks, or an instance name.
        prefix_tokens: tokens of the prompt that this rank already holds, a multiple of every writer's page size.
        state_slot: slot of this rank's cache that receives the request's state; required if the layout has state.
        timeout: one deadline in seconds for the whole request, instead of ``Options.grant_timeout`` and
        ``Options.timeout``.

        Raises ``PageOutOfRange`` (an id repeated, out of range, leased or quarantined), ``LayoutMismatch`` (the ranks
        of ``src`` together do not hold every byte of this rank), ``ProtocolError`` (the request is being received
        already, or an argument is wrong), ``PeerLost``.
        """
        verbs = self._verbs or self._unregistered("recv_pages")
        return verbs.recv_pages(
            request, pages, src, prefix_tokens=prefix_tokens, state_slot=state_slot, timeout=timeout
        )

    # ------------------------------------------------------------------ verbs of a sender

    def send_pages(
        self, request: str, pages: Pages, dst: Peers, *, layers: Layers = None, start: int = 0, event: Any = None
    ) -> KVWork:
        """Sends pages on the path that costs least, whatever the layouts of the two sides. Never blocks.

        request: as in the receiver's `recv_pages`.
        pages: page ids of this rank's cache, int [n], in order of position. Ids on the host are copied in the call. Ids
        in a CUDA tensor are read in the order of the current stream; leave them unchanged until the work completes.
        dst: a group rank, a list of ranks, or an instance name.
        layers: a global layer id, several, or None for all layers of this rank.
        start: the position of ``pages[0]``, in pages of this rank, counted from the end of the receiver's prefix.
        event: says when the pages may be read: a recorded ``torch.cuda.Event``, or an object with ``query() -> bool``.
        None stands for the current CUDA stream as of this call, and for "now" if the cache lies in host memory.

        The work completes when the bytes are visible in the receiver's pages and the source pages may be overwritten.
        Raises ``PageOutOfRange``, ``ProtocolError``, ``PeerLost``, and the error with which this request failed before.
        """
        verbs = self._verbs or self._unregistered("send_pages")
        return verbs.send_pages(request, pages, dst, layers=layers, start=start, event=event)

    def send_layer(
        self, request: str, layer: int, pages: Pages, dst: Peers, *, start: int = 0, event: Any = None
    ) -> KVWork:
        """Sends one layer between two layouts that match page for page. Otherwise as `send_pages`.

        layer: a global layer id. Raises ``LayoutMismatch`` if heads, page size or order of the two layouts differ.
        """
        verbs = self._verbs or self._unregistered("send_layer")
        return verbs.send_layer(request, layer, pages, dst, start=start, event=event)

    def send_slice(
        self, request: str, layers: Layers, pages: Pages, dst: Peers, *, start: int = 0, event: Any = None
    ) -> KVWork:
        """Sends the bytes that both sides hold, for any two layouts. Otherwise as `send_pages`."""
        verbs = self._verbs or self._unregistered("send_slice")
        return verbs.send_slice(request, layers, pages, dst, start=start, event=event)

    def staged_put(
        self, request: str, layers: Layers, pages: Pages, dst: Peers, *, start: int = 0, event: Any = None
    ) -> KVWork:
        """Sends through staging memory: gather here, one bulk put into the receiver's staging ring, scatter there.

        This rank then never writes to the receiver's pages: if the request fails, the receiver can reuse them without
        waiting for this rank. The work completes when the bytes are visible in the receiver's ring;
        ``work.wait_source()`` returns as soon as they have been gathered. Fails with ``RingExhausted`` if the ring
        stays full for ``Options.timeout``. If this rank is its own destination, the bytes are copied directly.
        Otherwise as `send_pages`.
        """
        verbs = self._verbs or self._unregistered("staged_put")
        return verbs.staged_put(request, layers, pages, dst, start=start, event=event)

    def send_state(self, request: str, layer: int, state_slot: int, dst: Peers, *, event: Any = None) -> KVWork:
        """Sends all states of one layer, as soon as they are final. A layer without state moves no bytes.

        layer: a global layer id. state_slot: the slot of this rank's cache to read. Otherwise as `send_pages`.
        `finish` sends the states that were not sent like this, if it is given the slot.
        """
        verbs = self._verbs or self._unregistered("send_state")
        return verbs.send_state(request, layer, state_slot, dst, event=event)

    def finish(self, request: str, dst: Peers, *, aux: bytes = b"", state_slot: int | None = None) -> KVWork:
        """Seals the request: this rank sends nothing more. The work succeeds when every receiver has succeeded.

        aux: at most 64 KiB for the receiver's ``work.aux``. state_slot: the slot whose states are sent now, of all
        layers that `send_state` has not sent; it is read behind the current CUDA stream.

        Raises ``ProtocolError``, naming the first layer and page, or state, that was not sent although the receiver
        awaits it; the request then stays open.
        """
        verbs = self._verbs or self._unregistered("finish")
        return verbs.finish(request, dst, aux=aux, state_slot=state_slot)

    def prefix_tokens(self, request: str, dst: Peers) -> int:
        """The number of tokens that the receiver already holds. Blocks until the receiver has granted the request.

        Raises ``TransferTimeout`` after ``Options.grant_timeout``, ``ProtocolError`` if the prefixes of several
        receivers differ, ``LayoutMismatch`` if this rank holds nothing that ``dst`` holds, ``PeerLost``, and the error
        with which the request failed.
        """
        verbs = self._verbs or self._unregistered("prefix_tokens")
        return verbs.prefix_tokens(request, dst)

    # ------------------------------------------------------------------ verbs of either side

    def cancel(self, request: str) -> KVWork:
        """Fails the request here and at its peers. Idempotent; does nothing for an unknown or ended request.

        The work completes when none of the request's writes can land any more: on a receiver once every writer has
        drained, on a sender once its own writes have. A writer that hangs never drains: ``wait()`` then raises
        ``TransferTimeout`` after ``Options.timeout``, and the pages stay in quarantine.
        """
        verbs = self._verbs or self._unregistered("cancel")
        return verbs.cancel(request)

    def quarantined(self, *, slots: bool = False) -> dict[int, tuple[int, ...]]:
        """Pages of failed requests (or state ``slots``) -> the group ranks whose writes may still land on them."""
        verbs = self._verbs or self._unregistered("quarantined")
        return verbs.quarantined(slots=slots)

    def _unregistered(self, verb: str) -> NoReturn:
        if self._forked:
            raise ProtocolError(
                f"{verb}: this process was forked from rank {self.rank()}, and only rank {self.rank()} itself can use "
                "its group; start processes with the method 'spawn', or make a group of their own in them"
            )
        raise ProtocolError(f"{verb}: no cache is registered; call register(cache) on every rank of the group first")

    # ------------------------------------------------------------------ memory

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Memory of the kind that this group's transport prefers: uint8, 1-D, at least ``nbytes``.

        For ``KVCache.empty(group=)``. Collective if the transport allocates from a symmetric heap: every rank then gets
        the largest ``nbytes`` of all ranks. Raises ``TransportUnavailable``.
        """
        transport = choose_transport(self._options.transport)
        if not transport.capabilities.collective_memory or device.type != "cuda":
            return allocate(nbytes, device)
        self._join(transport, device)
        asked = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size())]
        dist.all_gather(asked, torch.tensor([nbytes]), group=self)
        most = max(int(each) for each in asked)
        note = f"this cache needs {nbytes} B of the symmetric heap and takes {most} B, as the largest rank does"
        log.info("rank %d: %s", self.rank(), note)
        self._notes.append(note)
        return transport.allocate_shared(most, device)

    # ------------------------------------------------------------------ reports

    def explain(self, peer: int) -> Explanation:
        """How this rank reaches ``peer``: path and link, why no better one, measured rate, bytes carried by each lane.

        peer: a group rank, or the name of an instance of one rank. Raises ``ProtocolError``, and ``TransferTimeout`` or
        ``PeerLost`` if the rate cannot be measured.
        """
        verbs = self._verbs or self._unregistered("explain")
        verbs.check_open("explain")
        assert self._thread is not None
        engine = verbs.engine
        ranks = engine.group_map.resolve(peer, "explain", "peer")
        if len(ranks) != 1:
            raise ProtocolError(f"explain: peer={peer!r} names ranks {list(ranks)}; name one")
        return explain(self._thread, engine, self._registration, ranks[0], notes=self._notes)

    # ------------------------------------------------------------------ c10d

    def shutdown(self) -> None:
        """Stops the group's thread and fails pending requests. Called by ``dist.destroy_process_group``."""
        self._stop()
        self._inner.shutdown()

    def abort(self) -> None:
        """As `shutdown`, without waiting for collectives under way."""
        self._stop()
        self._inner.abort()

    def _stop(self) -> None:
        if self._thread is not None:
            self._thread.stop()
            self._thread = None
            self._registration.release()

    def get_group_store(self) -> Store:
        return self._store

    def getBackendName(self) -> str:
        return BACKEND

    def split_group(self, *_args: Any, **_kwargs: Any) -> None:
        """Not supported, because in some torch releases it crashes on a group made in Python."""
        raise ProtocolError("split_group is not supported by torchkv groups; use dist.new_group(ranks)")


_groups: weakref.WeakSet[KVProcessGroup] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """Takes the groups from a forked child: it has no progress thread, and peers would take it for its parent."""
    for group in _groups:
        group._forked = True
        group._verbs = group._thread = None


os.register_at_fork(after_in_child=_after_fork_in_child)


def name_of_other_rank(instance: str, rank: int) -> bool:
    """Whether ``instance`` is the default name of another rank. The two ranks would become one instance."""
    number = instance.removeprefix("rank")
    return instance != number and number.isdecimal() and number != str(rank)


def _forward(name: str) -> Callable[..., Any]:
    def method(self: KVProcessGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._inner, name)(*args, **kwargs)

    method.__name__ = name
    method.__doc__ = f"c10d's ``{name}``: by gloo for host tensors, by NCCL for CUDA tensors."
    return method


for _name in _FORWARDED:
    if hasattr(dist.ProcessGroup, _name):
        setattr(KVProcessGroup, _name, _forward(_name))


def _create(backend_options: _DistributedBackendOptions, options: object) -> KVProcessGroup:
    if options is None:
        options = Options()
    if not isinstance(options, Options):
        raise ProtocolError(f"pg_options is a {type(options).__name__}; give a torchkv.Options")
    warn_about_unknown_variables()
    timeout = backend_options.timeout
    if timeout <= timedelta(0):
        timeout = dist.constants.default_pg_timeout
    return KVProcessGroup(
        backend_options.store, backend_options.group_rank, backend_options.group_size, timeout, options
    )


def register_backend() -> None:
    """Registers the c10d backend ``"torchkv"``. Idempotent."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])


def current_group(group: dist.ProcessGroup | None) -> KVProcessGroup:
    """``group``, or the default group if that is None. Raises ``ProtocolError`` for a group of another backend."""
    if group is None:
        if not dist.is_initialized():
            raise ProtocolError('no process group: call dist.init_process_group("torchkv") first, or pass group=')
        group = dist.group.WORLD
    if not isinstance(group, KVProcessGroup):
        raise ProtocolError(f'{group!r} is no torchkv group; make it with dist.new_group(backend="torchkv")')
    return group
