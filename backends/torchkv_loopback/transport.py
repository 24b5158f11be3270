"""`LoopbackTransport`: the transport contract inside one process, over a simulated world."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from torchkv.errors import ProtocolError, TransportUnavailable
from torchkv.host import shared_memory
from torchkv.transport import Capabilities, Region, Transport
from torchkv_loopback import wire
from torchkv_loopback.channel import LoopbackChannel
from torchkv_loopback.world import World

__all__ = ["Region", "LoopbackTransport"]

# A world is not thread-safe, so each thread has a default world of its own.
_default = threading.local()


class LoopbackTransport(Transport):
    """The `torchkv.transport.Transport` over a simulated network; it reaches transports of the same `World` only.

    world: by default one for each thread, whose clock ``progress()`` advances. node: this transport's number in the
    world, by default a new one. views: whether ``Channel.view`` maps the peer's memory.
    """

    name = "loopback"
    capabilities = Capabilities(devices=frozenset({"cpu"}))

    @staticmethod
    def available() -> str | None:
        return None

    def __init__(self, world: World | None = None, node: int | None = None, *, views: bool = False) -> None:
        self._world = _default_world() if world is None else world
        self.node = self._world.add_node() if node is None else node
        if not self._world.exists(self.node) or self.node in self._world.transports:
            raise ProtocolError(f"node {self.node} does not exist in this world, or has a transport already")
        self._views = views
        self._regions: dict[int, Region] = {}
        self._next_index = 0
        self._channels: list[LoopbackChannel] = []
        self._closed = False
        self._world.transports[self.node] = self

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        _require_host(device)
        return shared_memory.allocate(nbytes)

    def register(self, tensor: torch.Tensor) -> Region:
        self._require_open()
        _require_host(tensor.device)
        nbytes = tensor.untyped_storage().nbytes()
        record = wire.RegionRecord(self._world.identity, self.node, self._next_index, nbytes)
        region = Region(self._next_index, tensor, wire.pack_region(record))
        self._regions[region.index] = region
        self._next_index += 1
        return region

    def deregister(self, region: Region) -> None:
        self._require_open()
        if self._regions.get(region.index) is not region:
            raise ProtocolError(f"region {region.index} is not registered with this transport")
        if any(channel.uses_local(region.index) for channel in self._channels):
            raise ProtocolError(f"region {region.index} cannot be deregistered: a put of it is still pending")
        del self._regions[region.index]

    def address(self) -> bytes:
        self._require_open()
        return wire.pack_address(wire.Address(self._world.identity, self.node))

    def connect(self, address: bytes, regions: Sequence[bytes]) -> LoopbackChannel:
        self._require_open()
        where = wire.unpack_address(address)
        records = [wire.unpack_region(region) for region in regions]
        peer = self._world.transports.get(where.node) if where.world == self._world.identity else None
        if peer is None:
            raise TransportUnavailable(
                "loopback reaches only open transports of its own world, in this process; "
                "use transport 'ucx' between processes"
            )
        remote = [peer.region_of(record) for record in records]
        channel = LoopbackChannel(
            self._world, node=self.node, peer=peer, local=self._regions, remote=remote, views=self._views
        )
        self._channels.append(channel)
        return channel

    def region_of(self, record: wire.RegionRecord) -> Region:
        """The region that a descriptor of this transport describes. Raises ``ProtocolError``."""
        found = self._regions.get(record.index)
        mine = (self._world.identity, self.node)
        if found is None or (record.world, record.node) != mine or record.nbytes != found.nbytes:
            raise ProtocolError(f"region descriptor names region {record.index}, which node {self.node} does not have")
        return found

    def has(self, region: Region) -> bool:
        """Whether ``region`` is still registered here."""
        return not self._closed and self._regions.get(region.index) is region

    def progress(self) -> bool:
        self._require_open()
        moved = False
        for channel in self._channels:
            moved |= channel.progress()
        if self._world.self_driven:
            return self._world.advance() or moved
        return self._world.run_due() or moved

    def arm(self) -> int | None:
        self._require_open()
        return None

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for channel in self._channels:
            channel.close()
        self._channels.clear()
        self._regions.clear()
        self._world.remove(self.node, f"node {self.node} has closed its transport")
        del self._world.transports[self.node]

    def _require_open(self) -> None:
        if self._closed:
            raise ProtocolError("this loopback transport is closed")


def _default_world() -> World:
    if not hasattr(_default, "world"):
        _default.world = World(self_driven=True)
    world: World = _default.world
    return world


def _require_host(device: torch.device) -> None:
    if device.type != "cpu":
        raise TransportUnavailable(f"{device}: loopback moves host memory only; use tensors on the CPU")
