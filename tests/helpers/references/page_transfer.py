"""A slow, obviously right model of a transfer: real pools of bytes, nested Python loops, one element at a time.

`reference` shares no code with `torchkv.layout.pair_plan` and derives ownership from its own definition: when
tp_size <= heads, head h belongs to rank h // (heads // tp_size); else rank r holds head r // (tp_size // heads).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from torchkv.arrays import Int64Array
from torchkv.layout.conversion import convert
from torchkv.layout.descriptors import expand, page_pairs, pair_offsets
from torchkv.layout.layout import KVLayout
from torchkv.layout.pair_plan import PairPlan, compile_plan
from torchkv.layout.plan_segment import PlanSegment

Bytes = npt.NDArray[np.uint8]
PlanFor = Callable[[int, Mapping[int, KVLayout], KVLayout], PairPlan]

GAP = 3  # canary bytes behind every page: strides are odd on purpose


def held_heads(layout: KVLayout, name: str) -> list[int]:
    """Global heads of component ``name`` on this rank, straight from the definition."""
    component = layout.component(name)
    heads, size, rank = component.heads, layout.tp_size, layout.tp_rank
    if not component.sharded:
        return list(range(heads))
    if size <= heads:
        return [head for head in range(heads) if head // (heads // size) == rank]
    return [head for head in range(heads) if rank // (size // heads) == head]


def held_layers(layout: KVLayout, name: str) -> list[int]:
    layers = layout.component(name).layers
    return [layer for layer in layout.layers if layers is None or layer in list(layers)]


@dataclass
class Pool:
    """Random bytes for every (component, layer) of a layout: [num_pages, page bytes + GAP] each."""

    layout: KVLayout
    tensors: dict[tuple[str, int], Bytes]

    @classmethod
    def random(cls, layout: KVLayout, num_pages: int, rng: np.random.Generator) -> Pool:
        tensors = {}
        for component in layout.components:
            width = component.dim * component.dtype.itemsize
            page = layout.page_size * len(held_heads(layout, component.name)) * width
            for layer in held_layers(layout, component.name):
                tensors[component.name, layer] = rng.integers(0, 256, (num_pages, page + GAP), dtype=np.uint8)
        return cls(layout, tensors)

    def copy(self) -> Pool:
        return Pool(self.layout, {key: tensor.copy() for key, tensor in self.tensors.items()})

    def element(self, name: str, layer: int, page: int, token: int, head: int) -> Bytes:
        """A view of the bytes of one head of one token; ``head`` is global."""
        tensor = self.tensors[name, layer]
        heads = held_heads(self.layout, name)
        component = self.layout.component(name)
        width = component.dim * component.dtype.itemsize
        body = tensor[page, : tensor.shape[1] - GAP]
        if self.layout.order == "NHD":
            return body.reshape(self.layout.page_size, len(heads), width)[token, heads.index(head)]
        return body.reshape(len(heads), self.layout.page_size, width)[heads.index(head), token]


def holders_of(writers: Mapping[int, KVLayout], name: str, layer: int, head: int) -> list[int]:
    return [
        rank
        for rank in sorted(writers)
        if layer in held_layers(writers[rank], name) and head in held_heads(writers[rank], name)
    ]


def _shares_anything(writer: KVLayout, reader: KVLayout) -> bool:
    return any(
        layer in held_layers(writer, component.name) and head in held_heads(writer, component.name)
        for component in reader.components
        for layer in held_layers(reader, component.name)
        for head in held_heads(reader, component.name)
    )


def needed_from(window: int, src_page_size: int, dst_page_size: int, granted_tokens: int) -> int:
    """The first position that a window needs, for the shortest prompt whose pages fit the grant.

    The prompt's last token may be computed again, and need not count as one of its own window.
    """
    larger = max(src_page_size, dst_page_size)
    prompts = range(1, granted_tokens + larger)
    fitting = (n for n in prompts if abs(-(-n // src_page_size) * src_page_size - granted_tokens) < larger)
    return max(0, next(fitting, 1) - 1 - window)


def reference(
    sources: Mapping[int, Pool],
    src_pages: Mapping[int, Sequence[int]],
    target: Pool,
    dst_pages: Sequence[int],
    scales: Mapping[str, npt.NDArray[np.float32]] | None = None,
) -> Pool:
    """What ``target`` holds after all writers sent all their pages, from position 0 (the end of the prefix).

    scales: component -> [layers, heads] that ``target`` holds, for elements that are converted.
    """
    writers = {rank: pool.layout for rank, pool in sources.items()}
    reader = target.layout
    result = target.copy()
    unit = max([reader.page_size] + [w.page_size for w in writers.values() if _shares_anything(w, reader)])
    granted = len(dst_pages) * reader.page_size
    for component in reader.components:
        for layer in held_layers(reader, component.name):
            window = dict(reader.windows).get(layer)
            first = {  # of each writer, the first unit of which the window needs anything
                rank: 0 if window is None else needed_from(window, w.page_size, reader.page_size, granted) // unit
                for rank, w in writers.items()
            }
            for head in held_heads(reader, component.name):
                holders = holders_of(writers, component.name, layer, head)
                for token in range(granted):
                    if not holders:
                        continue
                    rank = holders[(token // unit) % len(holders)]
                    size = writers[rank].page_size
                    if token >= len(src_pages[rank]) * size or token // unit < first[rank]:
                        continue
                    src_page, dst_page = src_pages[rank][token // size], dst_pages[token // reader.page_size]
                    element = sources[rank].element(component.name, layer, src_page, token % size, head)
                    where = (component.name, layer, dst_page, token % reader.page_size, head)
                    dtype = writers[rank].component(component.name).dtype
                    if dtype is not component.dtype:
                        of_layer = held_layers(reader, component.name).index(layer)
                        of_head = held_heads(reader, component.name).index(head)
                        own = (scales or {}).get(component.name)
                        scale = 1.0 if own is None else float(own[of_layer, of_head])
                        given = torch.from_numpy(element.copy()).view(dtype)
                        element = convert(given, component.dtype, scale).view(torch.uint8).numpy()
                    result.element(*where)[:] = element
    return result


def planned(
    sources: Mapping[int, Pool],
    src_pages: Mapping[int, Sequence[int]],
    target: Pool,
    dst_pages: Sequence[int],
    *,
    plan_for: PlanFor = compile_plan,
    factored: bool = False,
    chunk: int | None = None,
) -> tuple[Pool, dict[tuple[str, int], Int64Array]]:
    """The same by way of `torchkv.layout.pair_plan`: the pool, and how often each byte of it was written.

    factored: copy row by row from the factors instead of from expanded descriptors. chunk: pages per call.
    """
    writers = {rank: pool.layout for rank, pool in sources.items()}
    result = target.copy()
    written = {key: np.zeros(tensor.size, dtype=np.int64) for key, tensor in result.tensors.items()}
    for rank in writers:
        plan = plan_for(rank, writers, target.layout)
        pages = np.asarray(src_pages[rank], dtype=np.int64)
        step = chunk or max(1, len(pages))
        for start in range(0, len(pages), step):
            part = pages[start : start + step]
            _send(plan, sources[rank], part, start, result, np.asarray(dst_pages, np.int64), written, factored)
    return result, written


def _send(
    plan: PairPlan,
    source: Pool,
    pages: Int64Array,
    start: int,
    target: Pool,
    dst_pages: Int64Array,
    written: dict[tuple[str, int], Int64Array],
    factored: bool,
) -> None:
    for segment in plan.segments:
        pairs = page_pairs(
            segment,
            num_src_pages=len(pages),
            start=start,
            limit_tokens=len(dst_pages) * plan.dst_page_size,
            src_page_size=plan.src_page_size,
            dst_page_size=plan.dst_page_size,
        )
        for layer in segment.layers:
            src, dst = source.tensors[segment.component, layer], target.tensors[segment.component, layer]
            offsets = pair_offsets(segment, pairs, pages, dst_pages, src.shape[1], dst.shape[1])
            if factored:
                n0, s0, d0, n1, s1, d1, run = segment.rows
                spans = [
                    (s + a * s0 + b * s1, d + a * d0 + b * d1, run)
                    for s, d in zip(*(array.tolist() for array in offsets), strict=True)
                    for a in range(n0)
                    for b in range(n1)
                ]
            else:
                spans = list(zip(*(array.tolist() for array in expand(segment, *offsets)), strict=True))
            count = written[segment.component, layer]
            from_bytes, to_bytes = src.reshape(-1), dst.reshape(-1)
            for s, d, length in spans:
                assert 0 <= s <= s + length <= src.size, f"reads [{s}, {s + length}) of {src.size} bytes"
                assert 0 <= d <= d + length <= dst.size, f"writes [{d}, {d + length}) of {dst.size} bytes"
                to_bytes[d : d + length] = from_bytes[s : s + length]
                count[d : d + length] += 1


def differences(a: Pool, b: Pool) -> int:
    """How many bytes differ."""
    assert a.tensors.keys() == b.tensors.keys()
    return sum(int((a.tensors[key] != b.tensors[key]).sum()) for key in a.tensors)


def compare(
    writers: Mapping[int, KVLayout],
    reader: KVLayout,
    *,
    rng: np.random.Generator,
    num_tokens: int,
    shuffled: bool = True,
    chunk: int | None = None,
    plan_for: PlanFor = compile_plan,
) -> tuple[int, int]:
    """Sends ``num_tokens`` (rounded up to pages) both ways; (wrong bytes, bytes written too often or too seldom).

    Each rank has fresh random bytes, so a byte from the wrong holder counts as wrong, and so does a touched canary.
    """

    def pick(layout: KVLayout) -> tuple[Pool, list[int]]:
        need = -(-num_tokens // layout.page_size)
        spare = need + 2
        first = int(rng.integers(0, 3))
        pages = rng.permutation(spare)[:need] if shuffled else np.arange(need) + first
        return Pool.random(layout, spare, rng), [int(page) for page in pages]

    chosen = {rank: pick(layout) for rank, layout in writers.items()}
    sources = {rank: pool for rank, (pool, _) in chosen.items()}
    src_pages = {rank: pages for rank, (_, pages) in chosen.items()}
    target, dst_pages = pick(reader)
    expected = reference(sources, src_pages, target, dst_pages)
    once = reference(_filled(sources, 1), src_pages, _filled({0: target}, 0)[0], dst_pages)
    wrong = miscounted = 0
    for factored in (False, True):
        got, written = planned(sources, src_pages, target, dst_pages, plan_for=plan_for, factored=factored, chunk=chunk)
        wrong += differences(got, expected)
        for key, count in written.items():
            miscounted += int((count != once.tensors[key].reshape(-1)).sum())
    return wrong, miscounted


def _filled(pools: Mapping[int, Pool], value: int) -> dict[int, Pool]:
    return {
        rank: Pool(pool.layout, {key: np.full_like(tensor, value) for key, tensor in pool.tensors.items()})
        for rank, pool in pools.items()
    }


def gqa(tp_rank: int = 0, tp_size: int = 1, **given: object) -> KVLayout:
    """A small grouped-query layout; ``given`` replaces any of its fields."""
    fields = {
        "num_layers": 2,
        "num_kv_heads": 4,
        "head_dim": 2,
        "page_size": 4,
        "dtype": torch.int16,
        "tp_rank": tp_rank,
        "tp_size": tp_size,
    }
    return KVLayout.gqa(**{**fields, **given})


def one_segment(writer: KVLayout, reader: KVLayout) -> PlanSegment:
    return compile_plan(0, {0: writer}, reader).segments[0]
