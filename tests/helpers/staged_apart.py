"""`Apart` where the reader holds one half of each token only, and has granted the writer a standing stage."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torchkv_loopback import Faults, World

from tests.helpers.apart import LAYERS, PAGES, TAGS, Apart
from tests.helpers.fakes.loop_gpu import TICKETS, LoopGpu, fake_kernels
from tests.helpers.fakes.native_network import NativeNetwork, NetworkTransport
from torchkv.bench.scale.loops import PAGE, TOKENS
from torchkv.core.core import Core
from torchkv.core.receives import Pieces
from torchkv.core.way import Way
from torchkv.layout.kernel_geometry import Geometry, PageAddressing
from torchkv.layout.plan_segment import StridedRuns, Stripe
from torchkv.staging.cuda_pack import AlikeJobs
from torchkv.staging.pack_table import PackTable
from torchkv.transfer.loop_geometry import COPIED

__all__ = ["CANARY", "HALF", "StagedApart"]

HALF = PAGE // TOKENS // 2  # bytes of one run
CANARY = 512  # bytes on both sides of the stage


class StagedApart(Apart):
    """nbytes: of the stage. Runs are short: `HALF` bytes. The stage lies between canaries in the reader's ring.

    gpu: whether kernels pack and unpack, on streams that run a few operations in each step, unless they are ``held``.
    """

    def __init__(self, seed: int = 0, *, nbytes: int = 1024, gpu: bool = False, **limits: int) -> None:
        self.dice = random.Random(seed)
        self.gpus = [LoopGpu(), LoopGpu()] if gpu else []
        self.held: set[LoopGpu] = set()
        self.world = World(seed, faults=Faults(min_delay=1e-4, max_delay=1e-3))
        self.network = NativeNetwork(self.world)
        devices = [each.device for each in self.gpus] or [None, None]
        self.writer, self.reader = (Core(rank, device=device, **limits) for rank, device in enumerate(devices))
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
            words += [1, 0, 0, TOKENS, token, HALF, HALF, TOKENS, 1, 1, 0, -1, 1, 0, 0, *COPIED]
        self.geometry = np.array(words, dtype=np.int64)
        self.tables = [self._table(sending) for sending in (True, False)] if gpu else []

    def _table(self, sending: bool) -> PackTable:
        """Its jobs are the layers; the writer's rows are the second halves of tokens."""
        nothing = PageAddressing(page_stride=0, base=0, token_stride=0, per_page=1, num_pages=0)
        token, pages = PAGE // TOKENS, self.src if sending else self.dst
        src, dst, rows = nothing, nothing, StridedRuns(1, 0, 0, 1, 0, 0, TOKENS * HALF)
        if sending:
            src = PageAddressing(page_stride=PAGE, base=HALF, token_stride=token, per_page=1, num_pages=PAGES)
            rows = StridedRuns(1, 0, 0, TOKENS, token, 0, HALF)
        else:
            dst = PageAddressing(page_stride=PAGE // 2, base=0, token_stride=HALF, per_page=1, num_pages=PAGES)
        shape = Geometry(stripe=Stripe(TOKENS, 1), rows=rows, src=src, dst=dst, alignment=16)
        table = torch.zeros((LAYERS, 2), dtype=torch.int64)
        for layer in range(LAYERS):
            table[layer, 0 if sending else 1] = pages[layer].data_ptr()
        layers = list(range(LAYERS))
        launcher: Any = SimpleNamespace(
            sending=sending, table=table, alike=lambda: [AlikeJobs(0, layers, shape, begins_group=True)]
        )
        plan: Any = SimpleNamespace(layers=layers)
        with fake_kernels():
            return PackTable(plan, launcher, device=torch.device("cpu"), errors=0, tickets=TICKETS, blocks=4)

    def step(self) -> None:
        super().step()
        for gpu in self.gpus:
            if gpu not in self.held:
                gpu.run(self.dice.choice([0, 1, 4]))
            assert gpu.bad_ids == []

    @property
    def pieces(self) -> Pieces:
        return Pieces(self.geometry, self.tables[1].words if self.tables else None)

    def way(self, *, max_page: int = PAGES, staged: bool = False) -> Way:
        sizes = {"src_page": TOKENS, "dst_page": TOKENS, "max_page": max_page}
        packs = self.tables[0].words if self.tables else None
        slot = self.writer.peers.slots[1]
        return Way(1, slot, geometry=self.geometry, packs=packs, **sizes, network=True, staged=staged)

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
