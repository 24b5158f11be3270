"""Two resident loops in one process, without threads, that share nothing but a network: rank 0 writes to rank 1."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torchkv_loopback import Faults, World

from tests.helpers.fakes.loop_gpu import LoopGpu
from tests.helpers.fakes.native_network import NativeNetwork, NetworkTransport
from torchkv.arrays import Int64Array
from torchkv.bench.scale.loops import PAGE, TOKENS
from torchkv.core.core import Core
from torchkv.core.device import NO_GATE, Gate
from torchkv.core.events import Notice
from torchkv.core.loop.codes import ALONE
from torchkv.core.loop.state.peers import Record
from torchkv.core.peers import NetworkLane
from torchkv.core.receives import Pieces
from torchkv.core.way import Way
from torchkv.protocol.messages import name_hashes
from torchkv.transfer.loop_geometry import COPIED

__all__ = ["LAYERS", "PAGES", "TAGS", "Apart"]

TAGS = (71, 72)
LAYERS, PAGES = 3, 12


class Apart:
    """A writer, rank 0, and a reader, rank 1, that share nothing but a network; and pages on both sides.

    reads: whether the reader has made its lane, too; see `read`. gpu: that of the writer, whose events are asked.
    """

    def __init__(self, seed: int = 0, *, reads: bool = True, gpu: LoopGpu | None = None, **limits: int) -> None:
        self.world = World(seed, faults=Faults(min_delay=1e-4, max_delay=1e-3))
        self.network = NativeNetwork(self.world)
        self.writer = Core(0, device=None if gpu is None else gpu.device, **limits)
        self.reader = Core(1, **limits)
        generator = np.random.default_rng(seed)
        self.src = torch.from_numpy(generator.integers(0, 256, (LAYERS, PAGES, PAGE), dtype=np.uint8))
        self.dst = torch.full_like(self.src, 0xAB)
        transports = [NetworkTransport(self.world, self.network) for _ in range(2)]
        regions = [t.register(memory) for t, memory in zip(transports, (self.src, self.dst), strict=True)]
        self.channels = [
            transports[i].connect(transports[1 - i].address(), [regions[1 - i].descriptor()]) for i in (0, 1)
        ]
        lane = self.writer.peers.connect_network(1, self.channels[0], TAGS)
        assert lane is not None
        self.lane: NetworkLane = lane
        if reads:
            self.read()
        words = [LAYERS, *range(LAYERS + 1)]
        for layer in range(LAYERS):
            words += [self.src[layer].data_ptr(), self.dst[layer].data_ptr(), PAGE, PAGE, 0, 0, PAGE // TOKENS]
            words += [PAGE // TOKENS, 1, 0, 0, 1, 0, 0, PAGE, TOKENS, 1, 1, 0, -1, 1, 1, 1, *COPIED]
        self.geometry = np.array(words, dtype=np.int64)

    def read(self) -> None:
        """The reader makes its lane."""
        assert self.reader.peers.connect_network(0, self.channels[1], TAGS[::-1]) is not None

    def meet(self) -> None:
        """Steps until both know that they are heard."""
        while not (self.writer.peers.hears(1) and self.reader.peers.hears(0)):
            self.step()

    def receive(self, pages: int, generation: int = 1, ids: Int64Array | None = None) -> int:
        """ids: the pages, where they are staged."""
        flow = self.reader.receives.reserve()
        assert flow is not None
        self.reader.receives.open(
            flow,
            generation=generation,
            num_tokens=pages * TOKENS,
            page_size=TOKENS,
            leader=ALONE,
            writers=[(0, LAYERS, 0, TOKENS)],
            network=True,
            staged=None if ids is None else {0: self.pieces},
            pages=ids,
        )
        return flow

    @property
    def pieces(self) -> Pieces:
        """How the reader unpacks."""
        return Pieces(self.geometry)

    def way(self, *, max_page: int = PAGES, staged: bool = False) -> Way:
        return Way(
            1,
            self.writer.peers.slots[1],
            geometry=self.geometry,
            src_page=TOKENS,
            dst_page=TOKENS,
            max_page=max_page,
            network=True,
            staged=staged,
        )

    def send(self, peer_flow: int, pages: list[int], generation: int = 1, *, staged: bool = False) -> int:
        ids = np.array(pages, dtype=np.int64)
        way = self.way(staged=staged)
        flow = self.writer.sends.open(way, peer_flow=peer_flow, generation=generation, pages=ids)
        assert flow is not None
        return flow

    def wait(self, name: str = "name", *, max_page: int = PAGES) -> int:
        """A send that waits for its grant."""
        flow = self.writer.sends.wait_for_grant(self.way(max_page=max_page), hashes=name_hashes(name), writers=1)
        assert flow is not None
        return flow

    def grant(self, flow: int, pages: Sequence[int], name: str = "name", *, prefix_tokens: int = 0) -> None:
        ids = np.array(pages, dtype=np.int64)
        self.reader.receives.grant(flow, name.encode(), name_hashes(name), ids, prefix_tokens=prefix_tokens, writers=1)

    def start(
        self, flow: int, pages: list[int], *, start: int = 0, layers: range = range(LAYERS), gate: Gate = NO_GATE
    ) -> int:
        positions, ids = np.array(layers, dtype=np.int64), np.array(pages, dtype=np.int64)
        index = self.writer.sends.start_op(flow, positions, ids, start, gate)
        assert index is not None
        return index

    def begin(self) -> tuple[int, int, int]:
        """A send of two pages whose puts are under way: its flow, its op, and the number of the last put."""
        send = self.send(self.receive(2), [0, 1])
        op = self.start(send, [0, 1])
        self.writer.runner.step()
        with self.writer.runner.standing_still():
            posted = self.writer.sends.put(op)
        assert posted > 0
        return send, op, posted

    def step(self) -> None:
        self.writer.runner.step()
        self.reader.runner.step()
        self.world.advance(self.world.now + 1e-4)
        assert self.network.problems == []

    def run(self, steps: int = 400) -> tuple[list[Notice], list[Notice]]:
        for _ in range(steps):
            self.step()
        return self.writer.events.take(), self.reader.events.take()

    def message(self, data: bytes, tag: int = TAGS[1], *, to: int = 1) -> None:
        """A message arrives at the reader, or at the writer, whatever it says."""
        self.network.inboxes.setdefault(self.channels[to].node, deque()).append((tag, data))

    @staticmethod
    def record(**words: int) -> bytes:
        return np.array([words.get(name, 0) for name in Record.__annotations__], dtype=np.int64).tobytes()
