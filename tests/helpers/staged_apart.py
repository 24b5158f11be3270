"""`Apart` where the reader holds one half of each token only, and has granted the writer a standing stage."""

from __future__ import annotations

import numpy as np
import torch
from torchkv_loopback import Faults, World

from tests.helpers.apart import LAYERS, PAGES, TAGS, Apart
from tests.helpers.fakes.native_network import NativeNetwork, NetworkTransport
from torchkv.bench.scale.loops import PAGE, TOKENS
from torchkv.core.core import Core

__all__ = ["CANARY", "HALF", "StagedApart"]

HALF = PAGE // TOKENS // 2  # bytes of one run
CANARY = 512  # bytes on both sides of the stage


class StagedApart(Apart):
    """nbytes: of the stage. Runs are short: `HALF` bytes. The stage lies between canaries in the reader's ring."""

    def __init__(self, seed: int = 0, *, nbytes: int = 1024, **limits: int) -> None:
        self.world = World(seed, faults=Faults(min_delay=1e-4, max_delay=1e-3))
        self.network = NativeNetwork(self.world)
        self.writer, self.reader = (Core(rank, **limits) for rank in (0, 1))
        generator = np.random.default_rng(seed)
        self.src = torch.from_numpy(generator.integers(0, 256, (LAYERS, PAGES, PAGE), dtype=np.uint8))
        self.dst = torch.full((LAYERS, PAGES, PAGE // 2), 0xAB, dtype=torch.uint8)
        self.ring = torch.full((nbytes + 2 * CANARY,), 0xCD, dtype=torch.uint8)
        self.own = torch.full((nbytes,), 0xEF, dtype=torch.uint8)
        transports = [NetworkTransport(self.world, self.network) for _ in range(2)]
        local, remote = transports[0].register(self.own), transports[1].register(self.ring)
        back = transports[0].register(self.src)
        self.channels = [
            transports[0].connect(transports[1].address(), [remote.descriptor()]),
            transports[1].connect(transports[0].address(), [back.descriptor()]),
        ]
        lane = self.writer.peers.connect_network(1, self.channels[0], TAGS)
        assert lane is not None
        assert lane.native is not None
        self.lane = lane
        self.read()
        native = lane.native
        at = int(native.remote_at[0]) + CANARY
        self.reader.peers.let_stage(0, at, nbytes)
        own = self.own.data_ptr(), int(native.local_keys[local.index])
        self.writer.peers.use_stage(1, own, (at, int(native.remote_keys[0])), nbytes)
        words = [LAYERS, *range(LAYERS + 1)]
        token = PAGE // TOKENS
        for layer in range(LAYERS):
            words += [self.src[layer].data_ptr(), self.dst[layer].data_ptr(), PAGE, PAGE // 2, HALF, 0, token, HALF]
            words += [1, 0, 0, TOKENS, token, HALF, HALF, TOKENS, 1, 1, 0, -1, 1, 0, 0]
        self.geometry = np.array(words, dtype=np.int64)

    def accept(self, pages: list[int], generation: int = 1) -> int:
        """A receive into these pages."""
        return self.receive(len(pages), generation, ids=np.array(pages, dtype=np.int64))

    def stage(self, peer_flow: int, pages: list[int], generation: int = 1) -> int:
        """A send that is staged to these pages."""
        return self.send(peer_flow, pages, generation, staged=True)

    def expected(self, src: list[int]) -> torch.Tensor:
        """What the reader's pages hold of the writer's pages ``src``."""
        return self.src[:, src].view(LAYERS, len(src), TOKENS, 2, HALF)[:, :, :, 1].reshape(LAYERS, len(src), PAGE // 2)

    @property
    def canaries(self) -> bool:
        """Whether nothing was written beside the stage."""
        return bool((self.ring[:CANARY] == 0xCD).all() and (self.ring[-CANARY:] == 0xCD).all())
