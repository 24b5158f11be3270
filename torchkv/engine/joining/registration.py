"""The steps of ``register``: register memory, publish metadata, check that of all ranks, build and warm up the engine.

`torchkv.group.bring_up` calls them in order, and exchanges metadata between them.
"""

from __future__ import annotations

import functools
import gc
import hmac
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec
import torch

from torchkv.cache import KVCache
from torchkv.control.channel import ControlChannel
from torchkv.core.core import Core
from torchkv.core.device import loop_device
from torchkv.engine.engine import Engine
from torchkv.engine.joining.connector import Connector
from torchkv.engine.joining.peer_metadata import PeerMetadata, placement_metadata, region_metadata
from torchkv.engine.joining.preparing import prepare_to_receive, prepare_to_send
from torchkv.engine.joining.probe import PROBE_BYTES
from torchkv.engine.process_leases import GroupLeases
from torchkv.engine.scheduler import LocalMemory
from torchkv.engine.weak_callback import weakly
from torchkv.errors import (
    AuthError,
    KVError,
    LayoutMismatch,
    PeerLost,
    ProtocolError,
    TransportUnavailable,
)
from torchkv.host import jit
from torchkv.host.processes import ProcessId, is_ending, this_process
from torchkv.host.shared_memory import host_identity
from torchkv.layout import codec
from torchkv.layout.group_map import GroupMap
from torchkv.layout.pair_plan import PairPlan
from torchkv.options import Options
from torchkv.staging.host_packer import HostPacker
from torchkv.staging.memory import SendStages, StageMemory
from torchkv.staging.packer import Staging
from torchkv.transfer.path_cost import Choice, choose
from torchkv.transfer.peer_connection import LocalPages, PeerConnection
from torchkv.transport.interface import Region, Transport, load_transport

if TYPE_CHECKING:
    from torchkv.kernels.gpu_context import GpuContext

__all__ = ["Registration", "choose_transport"]

log = logging.getLogger(__name__)

AUTO = ("ucx",)  # the transports that Options(transport="auto") tries


def choose_transport(name: str) -> type[Transport]:
    """The transport class for ``Options.transport``. Raises ``TransportUnavailable`` with the reasons."""
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
    """One rank's registration: the steps from a cache to an engine.

    Methods run on the thread that owns ``transport`` and ``control``. instance: name of the serving instance. secret:
    the key of control messages, if all ranks have it already; it is not published then. None: the lowest rank makes
    one. group: its name, for messages. connector: makes the engine's connections.
    """

    rank: int
    instance: str
    cache: KVCache | None
    options: Options
    transport: Transport
    control: ControlChannel
    incarnation: int
    secret: bytes | None = None
    group: str = ""

    def __post_init__(self) -> None:
        self._regions: list[Region] = []  # in the published order: the cache's storages, staging ring, scratch memory
        self._metadata_of: dict[int, PeerMetadata] = {}
        self.gpu: GpuContext | None = None  # None if the cache lies in host memory
        self._staging: Staging | None = None
        self._processes: dict[int, ProcessId] = {}  # of the ranks
        self._probe_memory: torch.Tensor | None = None  # the scratch memory
        self._core: Core | None = None  # the resident loop, if it can work here
        self.connector: Connector  # from `engine` on

    def metadata(self) -> PeerMetadata:
        """Registers this rank's memory, and returns what the rank publishes.

        Raises ``TransportUnavailable``, and ``LayoutMismatch`` for a layout with state and a cache without slots.
        """
        metadata = PeerMetadata(
            rank=self.rank,
            incarnation=self.incarnation,
            instance=self.instance,
            process=this_process(),
            endpoint=self.control.endpoint,
            transport=self.transport.name,
            secret=secrets.token_bytes(32) if self.secret is None else _fingerprint(self.secret),
        )
        if self.cache is None:
            return metadata
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
            # Imported here because it imports Triton, which a rank without a GPU need not have.
            from torchkv.kernels.gpu_context import GpuContext

            self.gpu = GpuContext(device, blocks=self.options.sm_budget)
        for storage in self.cache.storages:
            self._regions.append(self.transport.register(storage))
        ring: StageMemory | None = None
        if self.options.staging_recv:
            ring, region = self._stage_memory(self.options.staging_recv)
            self._regions.append(region)
        self._probe_memory = self.transport.allocate(PROBE_BYTES[device.type], device)
        self._regions.append(self.transport.register(self._probe_memory))
        jit.warm_up()
        self._core = self._make_core()
        _collect_garbage()
        self._staging = self._make_staging(ring)
        return msgspec.structs.replace(
            metadata,
            address=self.transport.address(),
            layout=codec.encode(self.cache.layout),
            num_pages=self.cache.num_pages,
            num_slots=self.cache.num_slots,
            device=device.type,
            staging=0 if ring is None else ring.nbytes,
            checksum=self.options.checksum,
            regions=[region_metadata(region) for region in self._regions],
            placements=placement_metadata(self.cache),
            scales=self.cache.scales.metadata(),
            mailboxes=b"" if self._core is None else self._core.peers.descriptor(),
        )

    def engine(self, all_metadata: Sequence[PeerMetadata]) -> Engine:
        """Checks the metadata of all ranks, connects the control channel to them, and builds the engine.

        Raises the error that a rank reported, ``LayoutMismatch``, ``TransportUnavailable``, ``ProtocolError``.
        """
        for metadata in all_metadata:
            metadata.raise_error()
        self._check_metadata(all_metadata)
        self._metadata_of = {metadata.rank: metadata for metadata in all_metadata}
        group_map = GroupMap(self.rank, [metadata.info() for metadata in all_metadata])
        group_map.check()
        for metadata in all_metadata:
            if metadata.rank != self.rank:
                self.control.connect(metadata.rank, metadata.endpoint, metadata.process)
                self._connect_loop(metadata)
        self._processes = {metadata.rank: metadata.process for metadata in all_metadata}
        key = all_metadata[0].secret if self.secret is None else self.secret
        self.connector = Connector(
            self.rank,
            options=self.options,
            transport=self.transport,
            metadata=self._metadata_of,
            regions=self._regions,
            key=key,
            records=self._core is not None,
            gpu=self.gpu,
        )
        engine = Engine(
            group_map=group_map,
            options=self.options,
            key=key,
            transport=self.transport,
            control=self.control,
            memory=self._memory(),
            core=self._core,
            connect=self.connector.connect,
        )
        if self.cache is not None:
            engine.group_leases = self._join(engine, self.cache)
        return engine

    def admit(self, engine: Engine, members: Mapping[int, PeerMetadata], *, life: int) -> None:
        """Takes the ranks of an instance in, of which all or none come. members: what each published, by its number.

        Raises ``LayoutMismatch``, ``TransportUnavailable``, ``ProtocolError``, and ``PeerLost`` if one has ended.
        """
        for metadata in members.values():
            metadata.raise_error()
        _check_alike([*self._metadata_of.values(), *members.values()])
        newcomers = []
        for number, metadata in members.items():
            info = replace(metadata.info(), rank=number, number=metadata.rank, life=life)
            newcomers.append((info, metadata.mailboxes if metadata.process.host == host_identity().hex() else b""))
        engine.meet(newcomers)
        for number, metadata in members.items():
            self._metadata_of[number] = msgspec.structs.replace(metadata, rank=number)
            self._processes[number] = metadata.process
            self.control.connect(number, metadata.endpoint, metadata.process, idle=True)
        try:
            self.warm(engine, tuple(members))
        except KVError as error:
            for number in members:
                engine.peers.forget(number)
                self.forget(number)
            ended = [str(each.process.pid) for each in members.values() if is_ending(each.process)]
            if ended:  # its memory went with it, so the error would be about that
                raise PeerLost(
                    f"processes {', '.join(ended)} of instance {members[min(members)].instance!r} ended as it was met"
                ) from error
            raise

    def forget(self, rank: int) -> None:
        """A rank has gone of which nothing is left."""
        del self._metadata_of[rank], self._processes[rank]

    def warm(self, engine: Engine, ranks: Sequence[int] | None = None) -> None:
        """Makes the connections that requests to and from ``ranks`` will need, and loads kernels and memory for them.

        ranks: None stands for all.

        Raises ``TransportUnavailable`` if a connection cannot be made, or cannot take the path ``Options.require``.
        """
        if self.cache is None:
            return
        if self.gpu is not None and ranks is None:
            prepare_to_send(engine, self.rank)  # copies within this rank
        for rank, info in engine.group_map.info.items():
            if rank == self.rank or info.layout is None or info.instance == self.instance:
                continue
            if ranks is not None and rank not in ranks:
                continue
            if engine.group_map.owes(rank):
                connection = engine.connection(rank)
                if self.options.require is not None:
                    converts = engine.group_map.converts(rank)
                    connection.path(forced=self.options.require, page_for_page=True, converts=converts)
                prepare_to_send(engine, rank)
            if engine.group_map.contributing((rank,), self.rank):
                engine.connection(rank)  # even if there is nothing to load: connecting later would delay a request
                prepare_to_receive(engine, rank)

    def plan(self, engine: Engine, rank: int) -> PairPlan:
        """What this rank and its siblings owe a rank."""
        return engine.group_map.plan(self.rank, engine.group_map.contributing(engine.group_map.siblings, rank), rank)

    def choose(self, engine: Engine, connection: PeerConnection, tokens: int) -> Choice:
        """The path that a transfer of all layers of ``tokens`` tokens in scattered pages would take, with its costs."""
        plan = self.plan(engine, connection.rank)
        local = self._local_pages()
        assert local is not None
        size = max(plan.src_page_size, plan.dst_page_size)
        tokens = -(-tokens // size) * size
        return choose(
            plan,
            plan.layers,
            local=local,
            connection=connection,
            start=0,
            num_pages=tokens // plan.src_page_size,
            limit_tokens=tokens,
            runs=None,
            ring=0 if self._staging is None else connection.ring(self._staging.sending.ring.capacity),
        )

    def release(self) -> None:
        """Releases the memory that was allocated for this group. To be called after its thread has ended."""
        if self._staging is not None:
            self._staging.release()
        self._probe_memory = None
        self._regions.clear()

    # ------------------------------------------------------------------ inside

    def _join(self, engine: Engine, cache: KVCache) -> GroupLeases:
        return GroupLeases(
            name=self.group,
            rank=self.rank,
            cache=cache,
            receiver=engine.receiver,
            credits=engine.credits,
            lock=engine.lock,
            processes=self._processes,
            ring=None if self._staging is None else self._staging.receiving,
        )

    def _make_core(self) -> Core | None:
        """The resident loop; None where it cannot work: then Python does everything."""
        try:
            device = None if self.gpu is None else loop_device(self.gpu.loop_stream, self.gpu.activate_thread)
            copiers = 0 if self.gpu is not None else self.options.copiers  # kernels copy what lies on a GPU
            return Core(self.rank, device=device, copiers=copiers, recorded=self.options.recorded)
        except TransportUnavailable as error:
            log.info("rank %d: no resident loop: %s", self.rank, error)
            return None

    def _memory(self) -> LocalMemory:
        return LocalMemory(pages=self._local_pages(), gpu=self.gpu, staging=self._staging)

    def _connect_loop(self, metadata: PeerMetadata) -> None:
        """Lets the resident loops of both ranks exchange records, if both are on this host."""
        if self._core is None or not metadata.mailboxes:
            return
        try:
            self._core.peers.connect(metadata.rank, metadata.mailboxes)
        except TransportUnavailable as error:
            log.info("rank %d: requests of rank %d go through Python: %s", self.rank, metadata.rank, error)

    def _check_metadata(self, all_metadata: Sequence[PeerMetadata]) -> None:
        if [metadata.rank for metadata in all_metadata] != list(range(len(all_metadata))):
            raise ProtocolError(
                f"registration metadata of ranks {[metadata.rank for metadata in all_metadata]}, expected one per rank"
            )
        _check_alike(all_metadata)
        if len(all_metadata[0].secret) < 16:
            raise ProtocolError("rank 0 published no secret for the control channel")
        if self.secret is not None:
            others = [m.rank for m in all_metadata if not hmac.compare_digest(m.secret, _fingerprint(self.secret))]
            if others:
                raise AuthError(f"ranks {others} have another secret than rank {self.rank}; see TORCHKV_SECRET_FILE")

    def _stage_memory(self, nbytes: int) -> tuple[StageMemory, Region]:
        assert self.cache is not None
        tensor = self.transport.allocate(nbytes, self.cache.device)
        region = self.transport.register(tensor)
        return StageMemory(tensor, region.index), region

    def _send_memory(self, nbytes: int) -> StageMemory:
        return self._stage_memory(nbytes)[0]

    def _make_staging(self, ring: StageMemory | None) -> Staging:
        local = self._local_pages()
        assert local is not None
        sending = SendStages(self.options.staging_send, weakly(self._send_memory))
        if self.gpu is None:
            return Staging(HostPacker(local, ring), sending, ring)
        # Imported here for the same reason as `GpuContext`.
        from torchkv.staging.cuda_packer import CudaPacker

        return Staging(CudaPacker(local, ring, device=self.gpu), sending, ring)

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
            pools=self.cache.pools,
            scales=self.cache.scales,
        )


def _check_alike(all_metadata: Sequence[PeerMetadata]) -> None:
    """Raises ``TransportUnavailable`` unless ranks have one transport, and their caches one device type."""
    names = {metadata.transport for metadata in all_metadata}
    if len(names) != 1:
        raise TransportUnavailable(f"ranks chose different transports: {sorted(names)}; set Options.transport")
    devices = {metadata.device: metadata.rank for metadata in all_metadata if metadata.device}
    if len(devices) > 1:
        where = ", ".join(f"{device} (rank {rank})" for device, rank in sorted(devices.items()))
        raise TransportUnavailable(f"the caches of one group lie in unlike memory: {where}; use one device type")


@functools.cache
def _collect_garbage() -> None:
    """Runs Python's full garbage collection now, once a process, so that it does not run amid the first requests.

    With torch loaded it takes about 0.2 s, in which all threads stand still. Python starts one when as many objects as
    a quarter of all have been made since the last one.
    """
    if gc.isenabled():
        gc.collect()


def _fingerprint(secret: bytes) -> bytes:
    """Tells whether two ranks have the same secret, and nothing else about it."""
    return blake2b(key=secret, digest_size=32, person=b"torchkv-same").digest()
