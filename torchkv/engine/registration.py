"""``register``: every rank publishes its card, checks everybody else's, and builds its engine. All or none."""

from __future__ import annotations

import functools
import gc
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import torch

from torchkv import arguments, checksum, descriptors, hostcopy, hostlane, idle, wire
from torchkv.cache import KVCache
from torchkv.card import Card, placement_cards, region_card
from torchkv.control import Control
from torchkv.cost import Choice
from torchkv.engine import Engine
from torchkv.env import Options
from torchkv.errors import LayoutMismatch, ProtocolError, TransportUnavailable, error_kind
from torchkv.layout import KVLayout
from torchkv.packer import HostPacker, Staging
from torchkv.probe import PROBE_BYTES, calibration, measure
from torchkv.processes import this_process
from torchkv.progress import ProgressThread
from torchkv.protocol import leases
from torchkv.roster import Roster
from torchkv.route import LocalPages, Route, StageTarget
from torchkv.stagememory import SendStages, StageMemory
from torchkv.staging import MAX_CHANNELS, SIGNALS, signal_offset
from torchkv.transport import Channel, Region, RemoteView, Transport, load_transport
from torchkv.weak import weakly

if TYPE_CHECKING:
    from torchkv.device import Device

__all__ = ["Exchange", "Registration", "choose_transport", "failure_card", "new_incarnation", "new_secret"]

# Gives every rank's bytes to every rank, in rank order. Collective.
Exchange = Callable[[bytes], Sequence[bytes]]

COMPILED = (hostcopy, descriptors, arguments, idle, checksum, leases, hostlane, wire)  # machine code for all ranks
AUTO = ("ucx",)


def choose_transport(name: str) -> type[Transport]:
    """The transport class for ``Options.transport``. Raises ``TransportUnavailable`` with every reason."""
    reasons: list[str] = []
    for candidate in AUTO if name == "auto" else (name,):
        cls = load_transport(candidate)
        reason = cls.available()
        if reason is None:
            return cls
        reasons.append(f"{candidate}: {reason}")
    raise TransportUnavailable(f"no transport works here: {'; '.join(reasons)}")


@dataclass(kw_only=True)
class Registration:
    """Local facts of one rank's registration, and the steps in which it becomes an engine.

    All methods run on the thread that owns transport and control.
    """

    rank: int
    instance: str
    cache: KVCache | None
    options: Options
    transport: Transport
    control: Control
    incarnation: int
    secret: bytes

    def __post_init__(self) -> None:
        self._regions: list[Region] = []  # as published: the cache's storages, the staging ring, memory for probes
        self._cards: dict[int, Card] = {}
        self.device: Device | None = None  # where the cache lies, if that is a GPU
        self._staging: Staging | None = None
        self._probe_memory: torch.Tensor | None = None
        self._calibrates = False  # routes made from now on are to be measured when they are first needed

    def card(self) -> Card:
        """Registers the cache's memory and describes this rank. Raises ``TransportUnavailable``."""
        card = Card(
            rank=self.rank,
            incarnation=self.incarnation,
            instance=self.instance,
            process=this_process(),
            endpoint=self.control.endpoint,
            transport=self.transport.name,
            secret=self.secret,
        )
        if self.cache is None:
            return card
        if self.cache.layout.stateful and not self.cache.num_slots:
            names = ", ".join(state.name for state in self.cache.layout.states)
            raise LayoutMismatch(
                f"the layout has state ({names}), the cache no slot for it: make it with KVCache.empty(num_slots=...), "
                f"or pass states= to KVCache"
            )
        device = self.cache.device
        if device.type not in self.transport.capabilities.devices:
            raise TransportUnavailable(
                f"a cache on {device}: transport {self.transport.name!r} moves memory of "
                f"{', '.join(sorted(self.transport.capabilities.devices))} here; see python -m torchkv.doctor"
            )
        if device.type == "cuda":
            # Here, because a host without GPUs need not have what it brings with it.
            from torchkv.device import Device

            self.device = Device(device, blocks=self.options.sm_budget)
        for storage in self.cache.storages:
            self._regions.append(self.transport.register(storage))
        ring: StageMemory | None = None
        if self.options.staging_recv:
            waits = self.device is None or self.device.signals
            signals = SIGNALS if self.transport.capabilities.signals and waits else 0
            ring, region = self._stage_memory(self.options.staging_recv, signals=signals)
            self._regions.append(region)
        self._probe_memory = self.transport.allocate(PROBE_BYTES[device.type], device)
        self._regions.append(self.transport.register(self._probe_memory))
        for module in COMPILED:
            module.warm_up()
        _collect_garbage()
        self._staging = self._make_staging(ring)
        return msgspec.structs.replace(
            card,
            address=self.transport.address(),
            layout=self.cache.layout.encode(),
            num_pages=self.cache.num_pages,
            num_slots=self.cache.num_slots,
            device=device.type,
            staging=0 if ring is None else ring.nbytes,
            signals=0 if ring is None else len(ring.signals),
            channels=self._staging.packer.channels if ring is not None and len(ring.signals) else 0,
            checksum=self.options.checksum,
            regions=[region_card(region) for region in self._regions],
            placements=placement_cards(self.cache),
        )

    def engine(self, cards: Sequence[Card]) -> Engine:
        """Checks all cards and connects the control channel. Raises ``LayoutMismatch``, ``ProtocolError``."""
        for card in cards:
            card.raise_error()
        self._check_cards(cards)
        self._cards = {card.rank: card for card in cards}
        roster = Roster(self.rank, [card.member() for card in cards])
        roster.check()
        for card in cards:
            if card.rank != self.rank:
                self.control.connect(card.rank, card.endpoint, card.process)
        return Engine(
            roster=roster,
            options=self.options,
            key=min(cards, key=lambda card: card.rank).secret,
            transport=self.transport,
            control=self.control,
            local=self._local_pages(),
            connect=self._connect,
            device=self.device,
            staging=self._staging,
        )

    def warm(self, engine: Engine) -> None:
        """Makes the routes that requests will need, and refuses what ``Options.require`` rules out."""
        if self.cache is None:
            return
        if self.device is not None:
            engine.prepare(self.rank)  # copies within this rank
        for rank, member in engine.roster.members.items():
            if rank == self.rank or member.layout is None or member.instance == self.instance:
                continue
            if engine.roster.owes(rank):
                route = engine.route(rank)
                route.path(forced=self.options.require, page_for_page=True)
                engine.prepare(rank)
            if engine.roster.contributing((rank,), self.rank):
                engine.route(rank)  # also with nothing to prepare: nobody should have to connect later
                engine.prepare_to_receive(rank)

    def measure(self, thread: ProgressThread, route: Route) -> float:
        """The rate to a peer's scratch memory in GB/s, as its pages are written. Not for the progress thread."""
        target = len(self._cards[route.rank].regions) - 1
        stores = route.channel is None or (route.direct and self.options.forced_path in (None, "direct"))
        return measure(thread, route, self._regions[-1], target, stores=stores, device=self.device)

    def calibrate(self, thread: ProgressThread, route: Route) -> None:
        """Measures what puts cost on ``route``, unless that is known. Not to be called on the progress thread."""
        if route.channel is None or route.costs is not None:
            return
        thread.call(lambda: self._plan_calibration(route))
        while not thread.call(route.calibrated):  # step by step, so that it serves requests in between
            continue

    def choose(self, engine: Engine, route: Route, tokens: int) -> Choice:
        """What would be chosen for all layers of ``tokens`` tokens in scattered pages, if nothing is forced."""
        plan = engine.roster.plan(self.rank, engine.roster.contributing(engine.roster.siblings, route.rank), route.rank)
        local = self._local_pages()
        assert local is not None
        size = max(plan.src_page_size, plan.dst_page_size)
        tokens = -(-tokens // size) * size
        return route.choose(
            plan,
            local,
            plan.layers,
            start=0,
            num_pages=tokens // plan.src_page_size,
            limit_tokens=tokens,
            runs=None,
            ring=0 if self._staging is None else route.ring(self._staging.sending.ring.capacity),
        )

    def measure_routes(self, thread: ProgressThread, engine: Engine) -> None:
        """Measures the routes there are: what puts cost, where paths are chosen by that, and rates if asked for.

        Those made later are measured when a transfer first needs it. Where no thread drives the engine, as on a virtual
        clock, nothing is measured and costs are assumed. Raises ``TransportUnavailable`` if a route is slower than
        ``Options.min_gbps``.
        """
        if self.cache is not None and self.options.forced_path is None:
            self._calibrates = True
            for rank, route in list(engine.routes.items()):
                if engine.roster.owes(rank) and not route.direct:
                    self.calibrate(thread, route)
        if self.options.min_gbps is None:
            return
        for rank, route in engine.routes.items():
            if route.channel is None:
                continue
            rate = self.measure(thread, route)
            if rate < self.options.min_gbps:
                lane = thread.call(lambda route=route: route.lane)  # type: ignore[misc]  # a default argument
                raise TransportUnavailable(
                    f"the link to rank {rank} ({lane}) carries {rate:.3g} GB/s, Options.min_gbps asks for "
                    f"{self.options.min_gbps:g}; see explain({rank}) for why it is no better, or lower the limit"
                )

    def release(self) -> None:
        """Lets go of the memory that was taken for this group, after its thread has ended."""
        if self._staging is not None:
            self._staging.release()
        self._probe_memory = None
        self._regions.clear()

    # ------------------------------------------------------------------ inside

    def _plan_calibration(self, route: Route) -> None:
        if route.calibration is None:
            target = len(self._cards[route.rank].regions) - 1
            route.calibration = calibration(route, self._regions[-1], target, self.transport.progress)

    def _check_cards(self, cards: Sequence[Card]) -> None:
        if [card.rank for card in cards] != list(range(len(cards))):
            raise ProtocolError(f"registration cards of ranks {[card.rank for card in cards]}, expected one per rank")
        names = {card.transport for card in cards}
        if len(names) != 1:
            raise TransportUnavailable(f"ranks chose different transports: {sorted(names)}; set Options.transport")
        devices = {card.device: card.rank for card in cards if card.device}
        if len(devices) > 1:
            where = ", ".join(f"{device} (rank {rank})" for device, rank in sorted(devices.items()))
            raise TransportUnavailable(f"the caches of one group lie in unlike memory: {where}; use one device type")
        if len(cards[0].secret) < 16:
            raise ProtocolError("rank 0 published no secret for the control channel")

    def _stage_memory(self, nbytes: int, *, signals: int = 0) -> tuple[StageMemory, Region]:
        assert self.cache is not None
        first, end = signal_offset(nbytes, 0), signal_offset(nbytes, signals)
        tensor = self.transport.allocate(end, self.cache.device)
        words = tensor[first:end].view(torch.int64).view(signals, 2 * MAX_CHANNELS).zero_()
        if words.is_cuda and signals:
            torch.cuda.synchronize(words.device)  # before any peer may raise one
        region = self.transport.register(tensor)
        return StageMemory(tensor[:nbytes], region.index, words), region

    def _send_memory(self, nbytes: int) -> StageMemory:
        return self._stage_memory(nbytes)[0]

    def _make_staging(self, ring: StageMemory | None) -> Staging:
        local = self._local_pages()
        assert local is not None
        sending = SendStages(self.options.staging_send, weakly(self._send_memory))
        if self.device is None:
            return Staging(HostPacker(local, ring), sending, ring)
        # Here, because it brings Triton with it, which a rank without a GPU need not have.
        from torchkv.devicepacker import DevicePacker

        return Staging(DevicePacker(local, ring, device=self.device), sending, ring)

    def _local_pages(self) -> LocalPages | None:
        if self.cache is None:
            return None
        return LocalPages(
            layout=self.cache.layout,
            device=self.cache.device,
            num_pages=self.cache.num_pages,
            placements=self.cache.placements,
            storage_ptrs=[storage.data_ptr() for storage in self.cache.storages],
            regions=[region.index for region in self._regions],
        )

    def _connect(self, rank: int) -> Route:
        """Made on first use, because most pairs of a large group never talk."""
        card = self._cards[rank]
        layout = card.member().layout
        if layout is None:
            raise LayoutMismatch(f"rank {rank} registered no cache")
        if rank == self.rank:
            views: list[RemoteView | None] = [RemoteView(r.ptr, r.nbytes, r.device) for r in self._regions]
            return self._route(card, layout, None, views)
        channel = self.transport.connect(card.address, [region.descriptor for region in card.regions])
        views = []
        why = ""
        for index, region in enumerate(card.regions):
            view = channel.view(index)
            if view is not None and view.nbytes < region.nbytes:
                channel.close()
                raise ProtocolError(
                    f"rank {rank}: region {index} of {region.nbytes} bytes is mapped with {view.nbytes}"
                )
            if view is None and not why:
                why = channel.why_no_view(index)
            views.append(view)
        route = self._route(card, layout, channel, views, why)
        if self._calibrates and not route.direct:
            self._plan_calibration(route)
        return route

    def _route(
        self, card: Card, layout: KVLayout, channel: Channel | None, views: list[RemoteView | None], no_view: str = ""
    ) -> Route:
        return Route(
            rank=card.rank,
            layout=layout,
            placements=card.placement_map(),
            channel=channel,
            views=views,
            staging=StageTarget(len(card.regions) - 2, card.staging, card.channels) if card.staging else None,
            no_view=no_view,
        )


def failure_card(rank: int, incarnation: int, error: Exception) -> Card:
    """What a rank publishes that cannot take part, so that no other rank waits for it."""
    return Card(
        rank=rank,
        incarnation=incarnation,
        instance="",
        process=this_process(),
        error_kind=error_kind(error),
        error_text=str(error).encode(errors="backslashreplace").decode()[:4096],
    )


@functools.cache
def _collect_garbage() -> None:
    """Once a process, and now: Python's first full collection takes some 0.2 s where torch is loaded, for all threads.

    It comes when as many objects again as a quarter of all have been made since the one before: if that was long ago,
    amid the first requests.
    """
    if gc.isenabled():
        gc.collect()


def new_secret() -> bytes:
    return secrets.token_bytes(32)


def new_incarnation() -> int:
    return secrets.randbits(62)
