"""The way from a cache to a running engine, which the ranks of a c10d group take together: `bring_up`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from torchkv.cache import KVCache
from torchkv.control.channel import ZmqControlChannel
from torchkv.engine.engine import Engine
from torchkv.engine.joining.peer_metadata import MAX_METADATA, PeerMetadata, failure_metadata, new_incarnation
from torchkv.engine.joining.registration import Registration, choose_transport
from torchkv.engine.progress import ProgressThread
from torchkv.errors import PeerLost, ProtocolError
from torchkv.group.reports.observation import check_observation
from torchkv.host.processes import this_process
from torchkv.options import Options
from torchkv.transport.interface import Transport

__all__ = ["Exchange", "Running", "bring_up", "check_instance"]

T = TypeVar("T")


class Exchange:
    """What ranks tell one another while they register. Collective; over tensors, so no byte of a peer is unpickled.

    group: of these ranks, for tensors on the host. None: this process is alone.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, rank: int, size: int) -> None:
        self.rank = rank
        self.incarnation = new_incarnation()
        self._group = group
        self._size = size

    def all(self, metadata: PeerMetadata) -> list[PeerMetadata]:
        """The metadata of all ranks, in rank order. Raises the error that any of them reports."""
        all_metadata = self._publish(metadata)
        for received in all_metadata:
            received.raise_error()
        return all_metadata

    def or_report(self, step: Callable[[], T]) -> T:
        """Runs one step. If it fails, publishes the error: the other ranks wait for this one."""
        try:
            return step()
        except Exception as error:
            self._publish(failure_metadata(self.rank, self.incarnation, error))
            raise

    def _publish(self, metadata: PeerMetadata) -> list[PeerMetadata]:
        if self._group is None:
            return [metadata]
        data = metadata.encode()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self._size)]
        self._gather(sizes, torch.tensor([len(data)]))
        width = max(int(size) for size in sizes)
        if min(int(size) for size in sizes) < 0 or width > MAX_METADATA:
            raise ProtocolError(f"register: a rank announced metadata of {width} bytes, the limit is {MAX_METADATA}")
        mine = torch.zeros(width, dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        received = [torch.empty(width, dtype=torch.uint8) for _ in range(self._size)]
        self._gather(received, mine)
        return [
            PeerMetadata.decode(row[: int(size)].numpy().tobytes()) for row, size in zip(received, sizes, strict=True)
        ]

    def _gather(self, received: list[torch.Tensor], mine: torch.Tensor) -> None:
        try:
            dist.all_gather(received, mine, group=self._group)
        except RuntimeError as error:  # gloo's, whose connection to a rank has broken, or whose deadline has passed
            raise PeerLost(
                f"register: a rank of this job has ended, or does not answer: {error}; start all its ranks again"
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A rank that has registered. cards: what each rank of its c10d group published, in rank order.

    secret: what they shared before; None if nothing.
    """

    thread: ProgressThread
    registration: Registration
    engine: Engine
    cards: list[PeerMetadata]
    secret: bytes | None


def bring_up(
    exchange: Exchange,
    cache: KVCache | None,
    *,
    instance: str,
    options: Options,
    secret: Callable[[], bytes | None],
    name: str,
    check: Callable[[type[Transport]], None],
    join_heap: Callable[[type[Transport]], None] | None,
) -> Running:
    """Registers ``cache``, and runs an engine that knows the ranks of ``exchange``. Collective.

    secret: reads that of `Registration`. name: of the c10d group, for messages.
    check: raises what speaks against the call, given the transport. join_heap: has the transport make the heap that all
    ranks share; called for a transport with `collective_memory` only.
    Raises on all ranks if any rank fails: ``LayoutMismatch``, ``TransportUnavailable``, ``ProtocolError``.
    """

    def choose() -> tuple[type[Transport], bytes | None]:
        transport = choose_transport(options.transport)
        check(transport)
        check_observation(options, exchange.rank)
        return transport, secret()

    def start() -> ProgressThread:
        if join_heap is not None and transport.capabilities.collective_memory:
            join_heap(transport)
        return ProgressThread(f"{exchange.rank}", lambda: _make(transport, options, key))

    transport, key = exchange.or_report(choose)
    if transport.capabilities.collective_memory:
        # Making the heap waits for all ranks, so first make sure that all of them will call it.
        exchange.all(
            PeerMetadata(rank=exchange.rank, incarnation=exchange.incarnation, instance="", process=this_process())
        )
    thread = exchange.or_report(start)
    try:
        registration = Registration(
            rank=exchange.rank,
            instance=instance,
            cache=cache,
            options=options,
            transport=thread.transport,
            control=thread.control,
            incarnation=exchange.incarnation,
            secret=key,
            group=name,
        )
        mine = exchange.or_report(lambda: thread.call(registration.metadata))
        cards = exchange.all(mine)
        engine = _engine(exchange, thread, registration, cards)
    except BaseException:
        thread.stop()
        raise
    engine.wake = thread.waker.wake
    engine.needs_gil, engine.exchange.serves = thread.short_turns.begin, thread.serve
    return Running(thread=thread, registration=registration, engine=engine, cards=cards, secret=key)


def _make(transport: type[Transport], options: Options, secret: bytes | None) -> tuple[Transport, ZmqControlChannel]:
    made = transport()
    try:
        return made, ZmqControlChannel(heartbeat=options.heartbeat, secret=secret)
    except BaseException:
        made.close()
        raise


def _engine(
    exchange: Exchange, thread: ProgressThread, registration: Registration, cards: list[PeerMetadata]
) -> Engine:
    """This rank's engine, once all ranks have theirs."""

    def make() -> Engine:
        engine = registration.engine(cards)
        thread.engine = engine
        registration.warm(engine)
        return engine

    mine = cards[exchange.rank]
    engine = exchange.or_report(lambda: thread.call(make))
    # No rank puts before all have connected: over TCP, UCX (1.21 and 1.22) crashes if it connects to a peer while
    # it has read a part of that peer's put. uct_tcp_ep_replace_ep moves the put to the new endpoint without its
    # header.
    exchange.all(mine)
    exchange.or_report(lambda: registration.connector.measure_all(thread, engine))
    if engine.flows is not None:
        engine.flows.core.runner.start(thread.waker.fd, thread.waker.word)
    exchange.all(mine)
    return engine


def check_instance(operation: str, cache: KVCache | None, instance: str) -> None:
    """Raises ``ProtocolError`` unless ``cache`` is one or None, and ``instance`` a name."""
    if cache is not None and not isinstance(cache, KVCache):
        raise ProtocolError(f"{operation}: cache is a {type(cache).__name__}; give a KVCache or None")
    try:
        size = len(instance.encode()) if isinstance(instance, str) else 0
    except UnicodeEncodeError:
        size = 0
    if not 1 <= size <= 128:
        raise ProtocolError(f"{operation}: instance={instance!r:.80} must be a str of 1 to 128 bytes in UTF-8")
