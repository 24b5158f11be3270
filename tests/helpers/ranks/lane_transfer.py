"""One transfer over a chosen lane, and a slow reference that knows nothing of plans.

`transfer` is one real rank's part; what it is made of serves ranks in one process too. Caches may lie on a GPU: the
reference then works on copies of them on the host.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from tests.helpers.harness import kv_group
from torchkv import KVCache, KVLayout, KVProcessGroup, convert
from torchkv.engine.work import KVWork
from torchkv.layout.conversion import GivenScales
from torchkv.transfer.peer_connection import Counter

__all__ = [
    "AUX",
    "Bytes",
    "Case",
    "Pool",
    "Report",
    "adopted_cache",
    "check_reader",
    "check_reports",
    "host_copy",
    "own_device",
    "prepare",
    "random_fill",
    "submit",
    "tally",
    "transfer",
    "views",
    "without_nan",
]

Bytes = npt.NDArray[np.uint8]
Views = dict[tuple[str, int], Bytes]  # (component, layer) -> [pages, page_size, heads, head bytes], whatever the order

HOST = torch.device("cpu")
GUARD = 64  # elements around an adopted pool
GAP = 32  # elements between its pages
SPARE = 3  # pages of each pool that no transfer names
AUX = b"first token: 42"


@dataclass(frozen=True, kw_only=True)
class Case:
    """``tokens`` behind a prefix of ``prefix`` tokens, from ``writers`` to ``readers``; other ranks hold nothing.

    scales: reader -> component -> a number for each layer and head that it holds. link_share: bytes that go over a lane
    for each byte of a reader's pages.
    """

    name: str
    layouts: Mapping[int, KVLayout]
    writers: tuple[int, ...]
    readers: tuple[int, ...]
    tokens: int
    prefix: int = 0
    chunks: int = 1
    contiguous: bool = False
    verb: str = "send_pages"
    scales: Mapping[int, Mapping[str, list[list[float]]]] = field(default_factory=dict)
    link_share: float = 1.0

    @property
    def converts(self) -> bool:
        dtypes = {(c.name, c.dtype) for layout in self.layouts.values() for c in layout.components}
        return len(dtypes) > len({name for name, _ in dtypes})


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one rank saw."""

    lanes: Mapping[str, int]  # lane -> bytes written, over all readers
    spans: int
    sent: int  # bytes of its send works
    received: int  # bytes of its rx
    expected: int  # bytes that the reference wrote into its pages
    path: str


class Later:
    """An event that is not ready at first."""

    def __init__(self, polls: int) -> None:
        self._polls = polls

    def query(self) -> bool:
        self._polls -= 1
        return self._polls < 0


def own_device(kind: str) -> torch.device:
    """Where this rank keeps its cache. With "cuda" a GPU, which becomes the current one; ranks share if they must."""
    if kind == "cpu":
        return HOST
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def adopted_cache(
    layout: KVLayout, num_pages: int, device: torch.device = HOST, scales: GivenScales | None = None
) -> KVCache:
    """An engine's own private tensors: gaps between the pages, guards around them, one storage a component."""
    tensors: dict[str, list[torch.Tensor | None]] = {}
    for component in layout.components:
        shape = layout.page_shape(component.name)
        size = shape[0] * shape[1] * shape[2]
        layers = layout.component_layers(component.name)
        per_layer = GUARD + num_pages * (size + GAP) + GUARD
        pool = torch.empty(per_layer * len(layers), dtype=component.dtype, device=device)
        strides = (size + GAP, shape[1] * shape[2], shape[2], 1)
        held = {
            layer: pool.as_strided((num_pages, *shape), strides, number * per_layer + GUARD)
            for number, layer in enumerate(layers)
        }
        tensors[component.name] = [held.get(layer) for layer in layout.layers]
    return KVCache(layout, tensors, scales=scales)


def _storages(cache: KVCache) -> dict[int, torch.Tensor]:
    """By address, every distinct storage as a uint8 tensor, whole: pages, gaps and guards."""
    found: dict[int, torch.Tensor] = {}
    for component in cache.layout.components:
        for tensor in cache[component.name]:
            if tensor is not None:
                storage = tensor.untyped_storage()
                whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
                found[storage.data_ptr()] = whole.set_(storage, 0, (storage.nbytes(),), (1,))
    return found


def _copies(cache: KVCache) -> list[Bytes]:
    return [storage.to(HOST, copy=True).numpy() for storage in _storages(cache).values()]


def host_copy(cache: KVCache) -> KVCache:
    """The same pages over copies of their storages in host memory."""
    copies = {address: storage.to(HOST, copy=True) for address, storage in _storages(cache).items()}

    def copied(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        storage = copies[tensor.untyped_storage().data_ptr()].untyped_storage()
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    names = [component.name for component in cache.layout.components]
    return KVCache(cache.layout, {name: [copied(tensor) for tensor in cache[name]] for name in names})


def random_fill(cache: KVCache, rng: np.random.Generator) -> None:
    """Fresh random bytes everywhere: in pages, gaps and guards."""
    for storage in _storages(cache).values():
        storage.copy_(torch.from_numpy(rng.integers(0, 256, len(storage), dtype=np.uint8)))
    if cache.device.type == "cuda":
        torch.cuda.synchronize(cache.device)  # a peer's write waits for none of this rank's streams


def without_nan(cache: KVCache) -> None:
    """Replaces what is NaN, whose bits a conversion need not keep."""
    for component in cache.layout.components:
        for tensor in cache[component.name]:
            if tensor is not None and component.dtype.is_floating_point:
                tensor.copy_(tensor.float().nan_to_num(1.0, float("inf"), float("-inf")).to(component.dtype))
    if cache.device.type == "cuda":
        torch.cuda.synchronize(cache.device)


def views(cache: KVCache) -> Views:
    """Bytes [pages, page_size, heads, head bytes]: a host cache's own memory, or a copy of what a GPU holds."""
    cache = cache if cache.device.type == "cpu" else host_copy(cache)
    found: Views = {}
    for component in cache.layout.components:
        for layer, tensor in zip(cache.layout.layers, cache[component.name], strict=True):
            if tensor is not None:
                array: Bytes = tensor.view(torch.uint8).numpy()
                found[component.name, layer] = array if cache.layout.order == "NHD" else array.swapaxes(1, 2)
    return found


@dataclass(frozen=True)
class Source:
    """What a writer sent: its bytes, its pages, and which heads they are, by the definition of tensor parallelism."""

    pages: Sequence[int]
    page_size: int
    data: Views
    heads: Mapping[str, Sequence[int]]
    dtypes: Mapping[str, torch.dtype]


def _heads(layout: KVLayout, name: str) -> list[int]:
    component = layout.component(name)
    if not component.sharded:
        return list(range(component.heads))
    if layout.tp_size > component.heads:
        return [layout.tp_rank * component.heads // layout.tp_size]
    share = component.heads // layout.tp_size
    return list(range(layout.tp_rank * share, (layout.tp_rank + 1) * share))


@functools.cache
def _window_begin(layout: KVLayout, layer: int, src_page_size: int, granted: int, unit: int) -> int:
    """The unit that holds the first position needed after the shortest prompt whose pages fit the grant."""
    window = dict(layout.windows).get(layer)
    if window is None:
        return 0
    larger = max(src_page_size, layout.page_size)
    prompts = range(1, granted + larger)
    shortest = next(n for n in prompts if abs(-(-n // src_page_size) * src_page_size - granted) < larger)
    return max(0, (shortest - 1 - window) // unit)


def _converted(run: Bytes, src: torch.dtype, dst: torch.dtype, scale: float) -> Bytes:
    """The bytes of one head of one token, as the reader holds them."""
    if src is dst:
        return run
    converted: Bytes = convert(torch.from_numpy(run.copy()).view(src), dst, scale).view(torch.uint8).numpy()
    return converted


def gather(
    sources: Mapping[int, Source],
    layout: KVLayout,
    pages: Sequence[int],
    into: Views,
    scales: Mapping[str, list[list[float]]] | None = None,
) -> int:
    """Writes into ``into`` what the sources hold, head by head and token by token; returns the bytes written."""
    unit = max([layout.page_size, *(source.page_size for source in sources.values())])
    sent = min(len(source.pages) * source.page_size for source in sources.values())
    granted = len(pages) * layout.page_size
    written = 0
    for (name, layer), array in into.items():
        dtype, own = layout.component(name).dtype, (scales or {}).get(name)
        for position, head in enumerate(_heads(layout, name)):
            holders = [
                r for r in sorted(sources) if (name, layer) in sources[r].data and head in sources[r].heads[name]
            ]
            scale = 1.0 if own is None else own[layout.component_layers(name).index(layer)][position]
            for token in range(min(sent, granted)):
                source = sources[holders[token // unit % len(holders)]]
                if token // unit < _window_begin(layout, layer, source.page_size, granted, unit):
                    continue
                page, slot = source.pages[token // source.page_size], token % source.page_size
                run = source.data[name, layer][page, slot, source.heads[name].index(head)]
                run = _converted(run, source.dtypes[name], dtype, scale)
                array[pages[token // layout.page_size], token % layout.page_size, position] = run
                written += len(run)
    return written


@dataclass(frozen=True)
class Pool:
    """One rank's cache, the pages of it that take part in position order, and every byte from before the transfer."""

    cache: KVCache
    pages: list[int]
    before: list[Bytes]

    def source(self) -> Source:
        """What this rank sends, copied."""
        layout = self.cache.layout
        heads = {component.name: _heads(layout, component.name) for component in layout.components}
        data = views(host_copy(self.cache))
        dtypes = {component.name: component.dtype for component in layout.components}
        return Source(self.pages, layout.page_size, data, heads, dtypes)

    def now(self) -> list[Bytes]:
        """A copy of every byte, as ``before`` is."""
        return _copies(self.cache)

    def holds(self, state: Sequence[Bytes]) -> bool:
        """Whether every byte is as in ``state``."""
        return all(np.array_equal(a, b) for a, b in zip(self.now(), state, strict=True))


def prepare(
    case: Case,
    layout: KVLayout,
    rng: np.random.Generator,
    *,
    adopted: bool,
    device: torch.device = HOST,
    group: KVProcessGroup | None = None,
    scales: GivenScales | None = None,
) -> Pool:
    """A pool with pages to spare, random everywhere. ``group``: whose memory it is, unless it is adopted."""
    count = -(-case.tokens // layout.page_size)
    size = count + SPARE
    pages = [*range(1, count + 1)] if case.contiguous else [int(p) for p in rng.permutation(size)[:count]]
    if adopted:
        cache = adopted_cache(layout, size, device, scales)
    else:
        cache = KVCache.empty(layout, size, device=device, group=group, scales=scales)
    random_fill(cache, rng)
    if case.converts:
        without_nan(cache)
    return Pool(cache, pages, _copies(cache))


def submit(
    kv: KVProcessGroup,
    case: Case,
    layout: KVLayout,
    pages: list[int],
    rng: np.random.Generator,
    *,
    device: torch.device = HOST,
) -> tuple[list[KVWork], KVWork]:
    """Sends all of ``pages``, in chunks and layers in random order; the works of the sends, and that of the end.

    device: of the page ids where the verb takes a tensor.
    """
    edges = [round(i * len(pages) / case.chunks) for i in range(case.chunks + 1)]
    jobs = [(lo, hi, layer) for lo, hi in itertools.pairwise(edges) for layer in layout.layers]
    if case.verb == "send_pages":
        jobs = [(lo, hi, None) for lo, hi in itertools.pairwise(edges)]
    works = []
    for number, at in enumerate(rng.permutation(len(jobs))):
        lo, hi, layer = jobs[at]
        event = Later(3) if number == 0 else None
        if case.verb == "send_layer":
            work = kv.send_layer("r", layer, pages[lo:hi], "decode", start=lo, event=event)
        elif case.verb == "send_slice":
            work = kv.send_slice("r", [layer], np.array(pages[lo:hi]), "decode", start=lo, event=event)
        else:
            ids = torch.tensor(pages[lo:hi], device=device)
            work = kv.send_pages("r", ids, "decode", start=lo, event=event)
        works.append(work)
    return works, kv.finish("r", "decode", aux=AUX)


def check_reader(
    case: Case,
    pool: Pool,
    got: Sequence[Bytes],
    sources: Mapping[int, Source],
    scales: Mapping[str, list[list[float]]] | None = None,
) -> int:
    """Whether ``got`` is what the pool held before plus what the reference gathers; returns how many bytes those are.

    Spoils ``sources``, to see that the comparison notices.
    """
    cache, pages, before = host_copy(pool.cache), pool.pages, pool.before
    storages = [storage.numpy() for storage in _storages(cache).values()]

    def expectation() -> tuple[int, bool]:
        for storage, old in zip(storages, before, strict=True):
            storage[:] = old
        nbytes = gather(sources, cache.layout, pages, views(cache), scales)
        return nbytes, all(np.array_equal(a, b) for a, b in zip(got, storages, strict=True))

    nbytes, equal = expectation()
    assert equal, f"{case.name}: wrong bytes in the cache"
    assert not all(np.array_equal(a, b) for a, b in zip(before, got, strict=True)), "nothing has moved"
    # Negative control: one bit of runs that are owed whatever the windows are, and the comparison must notice: the
    # sign, as a conversion may lose others.
    for source in sources.values():
        for array in source.data.values():
            array[source.pages[-1], 0, :, -1] ^= 0x80
    assert not expectation()[1], "the comparison does not notice a flipped bit"
    return nbytes


def tally(connections: Iterable[Mapping[str, Counter]]) -> tuple[dict[str, int], int]:
    """From the counters of routes: bytes by lane, and spans over all lanes."""
    lanes: dict[str, int] = {}
    spans = 0
    for counters in connections:
        for lane, counter in counters.items():
            lanes[lane] = lanes.get(lane, 0) + counter.nbytes
            spans += counter.spans
    return lanes, spans


def check_reports(reports: Sequence[Report], case: Case, prefixes: tuple[str, ...]) -> None:
    """Whether all bytes that the reference wrote, and no others, went over lanes that begin with ``prefixes``."""
    total = sum(reports[reader].expected for reader in case.readers)
    assert total > 0, "the case moves nothing"
    lanes = {name for report in reports for name in report.lanes}
    assert lanes, "nobody wrote anything"
    assert all(name.startswith(prefixes) for name in lanes), f"{lanes}, expected {prefixes}"
    assert sum(sum(report.lanes.values()) for report in reports) == total * case.link_share
    assert sum(report.spans for report in reports) > 0
    for reader in case.readers:
        assert reports[reader].received == reports[reader].expected
    assert sum(report.sent for report in reports) == total


def transfer(case: Case, *, adopted: bool, seed: int, device: str = "cpu", **options: Any) -> Report:
    """One rank's part of ``case``, in a group with ``options``. Raises on any wrong byte."""
    rank = dist.get_rank()
    place = own_device(device)
    rng = np.random.default_rng([seed, rank])
    layout = case.layouts.get(rank)
    with kv_group(**options) as kv:
        sent, received, expected, path_taken = 0, 0, 0, ""
        pool, scales = None, case.scales.get(rank)
        if layout is not None:
            pool = prepare(case, layout, rng, adopted=adopted, device=place, group=kv, scales=scales)
        instance = "prefill" if rank in case.writers else "decode" if rank in case.readers else None
        kv.register(None if pool is None else pool.cache, instance=instance)
        mine: Any = None
        if rank in case.readers:
            rx = kv.recv_pages("r", pool.pages, "prefill", prefix_tokens=case.prefix)
            assert rx.wait(30)
            arrived = pool.now()
            assert rx.aux == AUX
            received, path_taken = rx.bytes, rx.path
        elif rank in case.writers:
            mine = pool.source()
            assert kv.prefix_tokens("r", "decode") == case.prefix
            works, done = submit(kv, case, layout, pool.pages, rng, device=place)
            for work in [*works, done]:
                assert work.wait(30)
            sent = sum(work.bytes for work in works)
            assert pool.holds(pool.before), "a transfer changed its source"
        everyone: list[Any] = [None] * kv.size()
        dist.all_gather_object(everyone, mine, group=kv)
        if rank in case.readers:
            sources = {r: source for r, source in enumerate(everyone) if source is not None}
            expected = check_reader(case, pool, arrived, sources, scales)
        peers = case.readers if rank in case.writers else ()
        lanes, spans = tally(kv.explain(reader).lanes for reader in peers)
    dist.barrier()  # a peer may still have this rank's pool mapped, which must outlive that
    return Report(lanes=lanes, spans=spans, sent=sent, received=received, expected=expected, path=path_taken)
