"""Which verbs the copy engines copy, and that they copy the right bytes: real plans and addresses, in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

from tests.helpers.fakes.gpu import CLAIM, Event, FakeDriver, Gpu
from torchkv import KVCache, KVLayout
from torchkv.cuda import copy_engine
from torchkv.cuda.page_ids import DevicePages
from torchkv.errors import TransportUnavailable
from torchkv.layout.pair_plan import compile_plan
from torchkv.protocol.actions import BoundGrant, SendOp
from torchkv.transfer import path_cost
from torchkv.transfer.base import TransferContext
from torchkv.transfer.copy_tables import BaseAddressTable
from torchkv.transfer.cuda_copy import CudaCopyTransfer
from torchkv.transfer.offsets import PairOffsets
from torchkv.transfer.peer_connection import LocalPages, PeerConnection
from torchkv.transport import RemoteView

HOST = torch.device("cpu")
LAYERS = 3
PAGES = 70  # of 64 KiB each: 32 are the shortest span that pays
GUARD = 4096

LONG = np.arange(5, 69)
SHUFFLED = np.random.default_rng().permutation(PAGES)[:64]


def layout(**changes: Any) -> KVLayout:
    fields = {"num_layers": LAYERS, "num_kv_heads": 8, "head_dim": 128, "page_size": 32, "dtype": torch.bfloat16}
    return KVLayout.gqa(**{**fields, **changes})


class Pool:
    """A cache over random bytes with guards between its tensors, and a copy of its initial bytes."""

    def __init__(self, shape: KVLayout, *, gap: int = 0) -> None:
        """gap: bytes behind each page."""
        nbytes = shape.page_nbytes("k")
        num_pages = PAGES * 64 * 1024 // nbytes
        step = num_pages * (nbytes + gap) + GUARD
        random = np.random.default_rng().bytes(2 * LAYERS * step + GUARD)
        self.memory = torch.frombuffer(bytearray(random), dtype=torch.uint8)
        self.before = self.memory.clone()
        self.num_pages = num_pages
        self.tensors: dict[tuple[str, int], torch.Tensor] = {}
        for number in range(2 * LAYERS):
            whole = self.memory[GUARD + number * step :][: num_pages * (nbytes + gap)]
            self.tensors["kv"[number % 2], number // 2] = whole.view(num_pages, nbytes + gap)[:, :nbytes]
        adopted = {
            name: [
                self.tensors[name, layer].view(shape.component(name).dtype).unflatten(1, shape.page_shape(name))
                for layer in range(LAYERS)
            ]
            for name in "kv"
        }
        self.cache = KVCache(shape, adopted)

    def position(self, key: tuple[str, int], page: int) -> int:
        """The offset of a page's first byte in ``memory``."""
        return self.tensors[key][page].data_ptr() - self.memory.data_ptr()

    @property
    def local(self) -> LocalPages:
        return LocalPages(
            layout=self.cache.layout,
            device=HOST,
            num_pages=self.num_pages,
            placements=self.cache.placements,
            storage_ptrs=[storage.data_ptr() for storage in self.cache.storages],
            regions=list(range(len(self.cache.storages))),
        )

    def connection(self, channel: Any) -> PeerConnection:
        views = [RemoteView(storage.data_ptr(), storage.nbytes, HOST) for storage in self.cache.storages]
        return PeerConnection(
            rank=1,
            layout=self.cache.layout,
            placements=self.cache.placements,
            channel=channel,
            views=views,
        )


class World:
    """One verb from ``source`` into ``target``: pages ``src`` of the one, granted pages ``dst`` of the other."""

    def __init__(
        self,
        gpu: Gpu,
        source: Pool,
        target: Pool,
        src: Any,
        dst: Any,
        *,
        layers: tuple[int, ...] = (0, 1, 2),
        start: int = 0,
        waits: Sequence[Any] = (),
        channel: Any = ...,
    ) -> None:
        plan = compile_plan(0, {0: source.cache.layout}, target.cache.layout)
        grant = BoundGrant(dst=1, generation=1, request="r", prefix_tokens=0, pages=np.asarray(dst), plan=plan)
        self.connection = target.connection(channel)
        self.transfer = CudaCopyTransfer(
            TransferContext(
                op=SendOp("r", 1, {}, layers, start, len(src), None),
                grant=grant,
                pages=src,
                local=source.local,
                connection=self.connection,
                report=lambda layers, nbytes, path: gpu.log.append(f"report {len(layers)} {nbytes} {path}"),
            ),
            waits=waits,
            claim=CLAIM if waits else None,
            table=BaseAddressTable(plan, source.local, self.connection),
            device=gpu,
            opened=lambda: gpu.log.append("opened"),
        )

    def run(self, gpu: Gpu) -> dict[str, int]:
        """Runs the transfer to its end. Returns lane -> bytes."""
        for _ in range(50):
            if self.transfer.finished:
                break
            self.transfer.advance()
            gpu.run()
        assert self.transfer.finished
        if self.transfer.error is not None:
            raise self.transfer.error
        assert all(counter.transfers == 1 for counter in self.connection.counters.values())
        return {lane: counter.nbytes for lane, counter in self.connection.counters.items()}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    made = FakeDriver("cuMemcpyBatchAsync_v2")
    # Whatever a batch costs in itself: it is spans of 2 MiB on average that decide here, in pools of a few MiB.
    monkeypatch.setattr(path_cost, "BATCH_SECONDS", 0.0)
    monkeypatch.setattr(path_cost, "LAUNCH_SECONDS", 0.0)
    monkeypatch.setattr(copy_engine, "_post", copy_engine._post.__wrapped__)  # without the memory of tests before
    monkeypatch.setattr(copy_engine, "_driver", lambda: made)
    return made


def expected(source: Pool, target: Pool, pairs: Sequence[tuple[int, int]], layers: Sequence[int]) -> torch.Tensor:
    """All of the target's memory after pages were copied one by one: (source page, target page), of equal sizes."""
    then = target.before.clone()
    for key, tensor in source.tensors.items():
        for src, dst in pairs if key[1] in layers else ():
            at = target.position(key, dst)
            then[at : at + tensor.shape[1]] = tensor[src]
    return then


@pytest.mark.parametrize(
    ("src", "dst", "layers", "copies"),
    [
        pytest.param(LONG, LONG - 3, (0, 1, 2), 6, id="one span a job"),
        pytest.param(LONG, np.r_[37:69, 3:35], (0, 1, 2), 12, id="two spans a job"),
        pytest.param(np.r_[37:69, 3:35], LONG, (0, 2), 8, id="not all layers"),
    ],
)
def test_long_spans_are_copied_by_the_copy_engines(
    src: Any, dst: Any, layers: tuple[int, ...], copies: int, gpu: Gpu, driver: FakeDriver
) -> None:
    source, target = Pool(layout()), Pool(layout())
    world = World(gpu, source, target, src, dst, layers=layers)
    total = len(layers) * 2 * 64 * 65536
    assert world.run(gpu) == {"copy-engine": total}
    assert world.connection.counters["copy-engine"].spans == copies == sum(count for _, count in driver.calls)
    assert gpu.log[-1] == f"report {len(layers)} {total} direct"
    assert "kernel" not in gpu.log
    want = expected(source, target, list(zip(src, dst, strict=True)), layers)
    assert not torch.equal(target.before, want)
    assert torch.equal(target.memory, want)
    assert torch.equal(source.memory, source.before)


def test_pages_of_different_sizes_and_a_later_chunk(gpu: Gpu, driver: FakeDriver) -> None:
    """The writer's pages are half as large; eight of them come before the chunk, scattered at the reader."""
    source, target = Pool(layout(page_size=16)), Pool(layout())
    src, granted = np.arange(10, 10 + 128), [4, 2, 0, 3, *LONG]
    world = World(gpu, source, target, src, granted, start=8)
    assert world.run(gpu) == {"copy-engine": 3 * 2 * 64 * 65536}
    assert sum(count for _, count in driver.calls) == 3 * 2
    want = target.before.clone()
    for key, tensor in source.tensors.items():
        for number, page in enumerate(src):
            whole, half = divmod(8 + number, 2)
            at = target.position(key, granted[whole]) + half * tensor.shape[1]
            want[at : at + tensor.shape[1]] = tensor[page]
    assert torch.equal(target.memory, want)


def test_layers_with_a_window_copy_only_the_window(gpu: Gpu, driver: FakeDriver) -> None:
    """Layers share their page pairs, but for what lies before a window: of 64 pages of 32 tokens the last 33 move."""
    shape = layout(windows={1: 1000})
    source, target = Pool(shape), Pool(shape)
    world = World(gpu, source, target, LONG, LONG - 3)
    assert world.run(gpu) == {"copy-engine": 2 * (64 + 33 + 64) * 65536}
    assert sum(count for _, count in driver.calls) == 6
    pairs = list(zip(LONG, LONG - 3, strict=True))
    want = expected(source, target, pairs, (0, 2))
    local = expected(source, target, pairs[31:], (1,))
    want[local != target.before] = local[local != target.before]
    assert torch.equal(target.memory, want)


def device_pages(ids: Any) -> Any:
    pages = object.__new__(DevicePages)  # whose constructor wants a GPU
    pages.ids = torch.from_numpy(ids)
    return pages


@pytest.mark.parametrize(
    ("given", "lane"),
    [
        pytest.param({"src": SHUFFLED}, "view", id="scattered at the writer"),
        pytest.param({"dst": SHUFFLED}, "view", id="scattered at the reader"),
        pytest.param({"src": LONG[:30], "dst": LONG[:30]}, "view", id="short"),
        pytest.param({"src": LONG[::-1].copy()}, "view", id="backwards"),
        pytest.param({"gap": 64}, "view", id="gaps between pages"),
        pytest.param({"reader": {"tp_size": 2, "page_size": 64}}, "view", id="slices"),
        pytest.param({"src": device_pages(LONG)}, "view", id="ids on a GPU"),
        pytest.param({"channel": None}, "local", id="within one GPU"),
        pytest.param({"src": np.r_[37:69, 3:35], "dst": np.r_[3:51, 52:68]}, "view", id="breaks in unlike places"),
        pytest.param({}, "copy-engine", id="control"),
    ],
)
def test_everything_else_is_copied_by_the_kernel(
    given: dict[str, Any],
    lane: str,
    gpu: Gpu,
    driver: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    expanded: list[str] = []
    spans = PairOffsets.spans
    monkeypatch.setattr(PairOffsets, "spans", lambda *args: expanded.append("spans") or spans(*args))
    given = dict(given)
    source = Pool(layout(), gap=given.pop("gap", 0))
    target = Pool(layout(**given.pop("reader", {})))
    src, dst = given.pop("src", LONG), given.pop("dst", LONG)
    world = World(gpu, source, target, src, dst, **given)
    assert set(world.run(gpu)) == {lane}
    assert ("kernel" in gpu.log) is (lane != "copy-engine")
    assert bool(driver.calls) is (lane == "copy-engine")
    # Descriptors are not even made where page ids and strides tell already.
    assert bool(expanded) is (lane == "copy-engine" or "unlike places" in request.node.name)


@pytest.mark.parametrize(("layers", "lane"), [((0,), "copy-engine"), ((0, 1), "copy-engine"), ((0, 1, 2), "view")])
def test_few_copies_wait_behind_a_gate(layers: tuple[int, ...], lane: str, gpu: Gpu, driver: FakeDriver) -> None:
    """Each copy takes an entry of the stream's queue, and the progress thread must not wait for a free entry."""
    waits = [Event(gpu.log)]
    world = World(gpu, Pool(layout()), Pool(layout()), LONG, LONG, layers=layers, waits=waits)
    assert set(world.run(gpu)) == {lane}
    assert gpu.log[0] == "wait"


def test_with_a_driver_without_batches_the_kernel_copies(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_engine, "_post", copy_engine._post.__wrapped__)
    monkeypatch.setattr(copy_engine, "_driver", FakeDriver)
    assert set(World(gpu, Pool(layout()), Pool(layout()), LONG, LONG).run(gpu)) == {"view"}


def test_a_refused_batch_fails_the_transfer(gpu: Gpu, driver: FakeDriver) -> None:
    driver.result = 700
    world = World(gpu, Pool(layout()), Pool(layout()), LONG, LONG)
    with pytest.raises(TransportUnavailable, match=r"'r' to rank 1.*6 copies failed: CUDA error 700"):
        world.run(gpu)
    assert gpu.log[-1] == "signal", "what was enqueued before is waited for"
    assert world.transfer.flushed


def test_jobs_of_different_strides_have_their_own_offsets(gpu: Gpu, driver: FakeDriver) -> None:
    """One segment, but the pages of the values have gaps: the copy engines copy the keys only."""
    source, target = Pool(layout()), Pool(layout())
    loose = Pool(layout(), gap=64)
    cache = KVCache(source.cache.layout, {"k": source.cache.k, "v": loose.cache.v})
    source.cache = cache
    for layer in range(LAYERS):
        source.tensors["v", layer] = loose.tensors["v", layer]
    assert World(gpu, source, target, LONG, LONG).run(gpu) == {
        "copy-engine": 3 * 64 * 65536,
        "view": 3 * 64 * 65536,
    }
    for layer in range(LAYERS):
        assert torch.equal(target.tensors["k", layer][LONG], source.tensors["k", layer][LONG])
