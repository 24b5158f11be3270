"""KVProcessGroup: a c10d process group with KV verbs. Importing torchkv registers it as backend ``"torchkv"``."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, _DistributedBackendOptions

from torchkv.cache import KVCache, allocate
from torchkv.card import MAX_CARD, Card
from torchkv.control import ZmqControl
from torchkv.endpoint import KVEndpoint
from torchkv.engine import Engine
from torchkv.env import Options, warn_about_unknown_variables
from torchkv.errors import ProtocolError
from torchkv.explain import Explanation, explain
from torchkv.probe import PROBE_BYTES
from torchkv.processes import this_process
from torchkv.progress import ProgressThread
from torchkv.registration import (
    Registration,
    choose_transport,
    failure_card,
    new_incarnation,
    new_secret,
)
from torchkv.transport import Transport

__all__ = ["KVProcessGroup", "register_backend"]

log = logging.getLogger(__name__)

BACKEND = "torchkv"

T = TypeVar("T")

# Every c10d operation, under its old and new names: each is forwarded in Python to an inner, plain ProcessGroup.
# Inheriting them instead deadlocks: the C++ trampoline keeps the GIL while gloo's thread waits for it.
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


class KVProcessGroup(KVEndpoint, dist.ProcessGroup):
    """A process group whose members exchange KV cache pages; all of c10d's collectives work on it too.

    Made by ``dist.init_process_group("torchkv")`` or ``dist.new_group(backend="torchkv", pg_options=Options(...))``.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, options: Options) -> None:
        dist.ProcessGroup.__init__(self, rank, size)  # type: ignore[call-arg]  # the stubs know only (store, ...)
        self._store = store
        self._options = options
        self._forced = options.forced_path
        self._thread: ProgressThread | None = None
        self._engine = None
        self._cache = None
        self._waker = None
        self._notes: list[str] = []  # for explain
        self._registering = threading.Lock()
        self._inner = dist.ProcessGroup(store, rank, size)
        cpu = torch.device("cpu")
        gloo_type = dist.ProcessGroup.BackendType.GLOO
        gloo = dist.ProcessGroupGloo(PrefixStore("gloo/", store), rank, size, timeout)
        gloo._set_sequence_number_for_group()
        # On this object too: c10d keeps the group's name, devices and shutdown in its backends.
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

        cache: this rank's pages, or None to join without any. instance: the serving instance this rank belongs to;
        None makes it one of its own, ``rank<r>``. Ranks of one instance succeed or fail together.

        Lowers ``sys.setswitchinterval`` to 0.5 ms, so that transfers begin while their caller goes on in Python, and
        collects garbage once a process, so that Python does not do it amid the first requests.

        Raises on *all* ranks: ``LayoutMismatch`` naming both ranks, the field and both values,
        ``TransportUnavailable``, ``ProtocolError``.
        """
        with self._registering:
            if self._engine is not None:
                raise ProtocolError("register: this group has a cache already; one cache per rank and group")
            name = f"rank{self.rank()}" if instance is None else instance
            incarnation = new_incarnation()
            transport = self._telling(incarnation, lambda: self._checked_transport(cache, name))
            if transport.capabilities.collective_memory:
                # Joining waits for everybody, so nobody does before all have come this far.
                self._exchange_all(Card(rank=self.rank(), incarnation=incarnation, instance="", process=this_process()))
            thread = self._telling(incarnation, lambda: self._start(transport, cache))
            try:
                registration = self._registration_of(cache, name, incarnation, thread)
                card = self._telling(incarnation, lambda: thread.call(registration.card))
                cards = self._exchange_all(card)
                engine = self._engine_of(thread, registration, cards, incarnation)
            except BaseException:
                thread.stop()
                raise
            self._thread, self._waker, self._cache = thread, thread.waker, cache
            self._registration = registration
            self._engine = engine

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
        )

    def _engine_of(
        self, thread: ProgressThread, registration: Registration, cards: list[Card], incarnation: int
    ) -> Engine:
        """This rank's engine, once every rank has one. Raises if any rank fails to make its own."""

        def make() -> Engine:
            engine = registration.engine(cards)
            thread.engine = engine
            registration.warm(engine)
            return engine

        mine = cards[self.rank()]
        engine = self._telling(incarnation, lambda: thread.call(make))
        # Nobody puts anything before everybody has connected: over TCP, UCX (1.21 and 1.22) crashes if it connects to a
        # peer whose put it has read in part; uct_tcp_ep_replace_ep takes over that there is one, and loses its header.
        self._exchange_all(mine)
        self._telling(incarnation, lambda: registration.measure_routes(thread, engine))
        self._exchange_all(mine)
        return engine

    def _telling(self, incarnation: int, step: Callable[[], T]) -> T:
        """One step of registration. If it fails, whatever it was, the others are told: they wait for this rank."""
        try:
            return step()
        except Exception as error:
            self._exchange(failure_card(self.rank(), incarnation, error))
            raise

    def _exchange_all(self, card: Card) -> list[Card]:
        """Every rank's card. Collective. Raises what any of them reports."""
        cards = self._exchange(card)
        for other in cards:
            other.raise_error()
        return cards

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

        def make() -> tuple[Transport, ZmqControl]:
            made = transport()
            try:
                return made, ZmqControl(heartbeat=self._options.heartbeat)
            except BaseException:
                made.close()
                raise

        return ProgressThread(f"{self.rank()}", make)

    def _join(self, transport: type[Transport], device: torch.device) -> None:
        reserve = self._options.staging_send + self._options.staging_recv + PROBE_BYTES[device.type]
        transport.join(rank=self.rank(), size=self.size(), store=self._store, device=device, reserve=reserve)

    def _exchange(self, card: Card) -> list[Card]:
        """Every rank's card, in rank order. Collective, over tensors: nothing received is unpickled."""
        data = card.encode()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size())]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self)
        width = max(int(size) for size in sizes)
        if min(int(size) for size in sizes) < 0 or width > MAX_CARD:
            raise ProtocolError(f"register: a rank announced a card of {width} bytes, the limit is {MAX_CARD}")
        mine = torch.zeros(width, dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        everyone = [torch.empty(width, dtype=torch.uint8) for _ in range(self.size())]
        dist.all_gather(everyone, mine, group=self)
        return [Card.decode(row[: int(size)].numpy().tobytes()) for row, size in zip(everyone, sizes, strict=True)]

    # ------------------------------------------------------------------ memory

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Memory that this group's transport likes best: uint8, at least ``nbytes``. See ``KVCache.empty(group=)``.

        Collective where the transport has a heap of its own; there every rank gets the most that any asks for.
        Raises ``TransportUnavailable``.
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
        """How this rank reaches ``peer``: path, link, why not a better one, measured limit, counters per lane."""
        engine = self._joined("explain")
        self._check_open(engine, "explain")
        assert self._thread is not None
        ranks = engine.roster.resolve(peer, "explain", "peer")
        if len(ranks) != 1:
            raise ProtocolError(f"explain: peer={peer!r} names ranks {list(ranks)}; name one")
        return explain(self._thread, engine, self._registration, ranks[0], notes=self._notes)

    # ------------------------------------------------------------------ c10d

    def shutdown(self) -> None:
        """Ends everything this group started; called by ``dist.destroy_process_group``. Pending requests fail."""
        self._stop()
        self._inner.shutdown()

    def abort(self) -> None:
        """The same at once, without waiting for collectives under way."""
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
        """Not supported: in some torch releases it crashes on a group made in Python."""
        raise ProtocolError("split_group is not supported by torchkv groups; use dist.new_group(ranks)")


def name_of_other_rank(instance: str, rank: int) -> bool:
    """Whether ``instance`` is what another rank is called that names none: the two would become one instance."""
    number = instance.removeprefix("rank")
    return instance != number and number.isdecimal() and number != str(rank)


def _forward(name: str) -> Callable[..., Any]:
    def method(self: KVProcessGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._inner, name)(*args, **kwargs)

    method.__name__ = name
    method.__doc__ = f"c10d's ``{name}``, done by gloo on host tensors and NCCL on CUDA tensors."
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
    """``group``, or the default group. Raises ``ProtocolError`` if it is no torchkv group."""
    if group is None:
        if not dist.is_initialized():
            raise ProtocolError('no process group: call dist.init_process_group("torchkv") first, or pass group=')
        group = dist.group.WORLD
    if not isinstance(group, KVProcessGroup):
        raise ProtocolError(f'{group!r} is no torchkv group; make it with dist.new_group(backend="torchkv")')
    return group
