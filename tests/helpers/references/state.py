"""States as tensor parallelism cuts them, with numpy alone: global arrays, split and concatenated. Knows no plans.

Every rank's slot is made from one global array a state and layer, so replicas are equal, whoever of them writes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from tests.helpers.references import page_transfer
from tests.helpers.references.page_transfer import Bytes, PlanFor, Pool, differences, planned
from torchkv.arrays import Int64Array
from torchkv.layout.component import State
from torchkv.layout.layout import KVLayout
from torchkv.layout.pair_plan import PairPlan, compile_plan

__all__ = ["SLOTS", "compare", "cut", "held_layers", "keys", "local", "read_bytes", "state_plan", "wholes"]

SLOTS = 4
Wholes = Mapping[tuple[str, int], Bytes]  # (state, layer) -> [*shape, bytes of an element]


def cut(state: State, whole: npt.NDArray[np.generic], rank: int, size: int) -> npt.NDArray[np.generic]:
    """Rank ``rank`` of ``size``'s part of ``whole`` [*shape, ...]: each shard group cut by itself, then one behind the
    other."""
    dim = state.shard_dim
    if dim is None:
        return whole
    sizes = [whole.shape[dim]] if state.shard_groups is None else list(state.shard_groups)
    groups = np.split(whole, np.cumsum(sizes)[:-1], axis=dim)
    return np.concatenate([np.split(group, size, axis=dim)[rank] for group in groups], axis=dim)


def held_layers(layout: KVLayout, state: State) -> list[int]:
    return [layer for layer in layout.layers if state.layers is None or layer in list(state.layers)]


def keys(layout: KVLayout) -> Iterator[tuple[State, int]]:
    """Every state and layer that this rank holds."""
    for state in layout.states:
        for layer in held_layers(layout, state):
            yield state, layer


def wholes(layout: KVLayout, num_layers: int, rng: np.random.Generator) -> dict[tuple[str, int], Bytes]:
    """Fresh global bytes for each state of ``layout`` in each layer."""
    return {
        (state.name, layer): rng.integers(0, 256, (*state.shape, state.dtype.itemsize), dtype=np.uint8)
        for state in layout.states
        for layer in range(num_layers)
    }


def local(layout: KVLayout, state: State, whole: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """The bytes of this rank's slot, in order; ``whole`` [*shape, bytes of an element], or anything of that shape."""
    return cut(state, whole, layout.tp_rank, layout.tp_size).ravel()


def read_bytes(layout: KVLayout, state: State) -> Int64Array:
    """Which byte of the global array each byte of this rank's slot is."""
    count = math.prod(state.shape) * state.dtype.itemsize
    numbers = np.arange(count).reshape(*state.shape, state.dtype.itemsize)
    return local(layout, state, numbers).astype(np.int64)


def covered(writers: Mapping[int, KVLayout], reader: KVLayout, state: State, layer: int) -> npt.NDArray[np.bool_]:
    """Of each byte of the reader's slot, whether a writer holds it."""
    held = [read_bytes(w, w.state(state.name)) for w in writers.values() if layer in held_layers(w, state)]
    return np.isin(read_bytes(reader, state), np.concatenate(held)) if held else np.zeros(0, dtype=bool)


def state_plan(rank: int, writers: Mapping[int, KVLayout], reader: KVLayout) -> PairPlan:
    plan = compile_plan(rank, writers, reader).state
    assert plan is not None
    return plan


def _pool(layout: KVLayout, whole: Wholes, slot: int, rng: np.random.Generator) -> Pool:
    """Slots of random bytes, odd canaries behind each; in ``slot`` what the rank holds of ``whole``."""
    tensors = {}
    for state, layer in keys(layout):
        mine = local(layout, state, whole[state.name, layer])
        array = rng.integers(0, 256, (SLOTS, len(mine) + page_transfer.GAP), dtype=np.uint8)
        array[slot, : len(mine)] = mine
        tensors[state.name, layer] = array
    return Pool(layout, tensors)


def compare(
    writers: Mapping[int, KVLayout], reader: KVLayout, *, rng: np.random.Generator, plan_for: PlanFor = state_plan
) -> tuple[int, int]:
    """Sends one slot of every writer; (wrong bytes, bytes written too often or too seldom).

    Other slots, canaries and what no writer holds must stay as they were.
    """
    num_layers = 1 + max(layer for layout in (reader, *writers.values()) for layer in layout.layers)
    whole = wholes(reader, num_layers, rng)
    slots = {rank: int(rng.integers(SLOTS)) for rank in writers}
    sources = {rank: _pool(layout, whole, slots[rank], rng) for rank, layout in writers.items()}
    slot = int(rng.integers(SLOTS))
    target = _pool(reader, wholes(reader, num_layers, rng), slot, rng)
    expected, once = target.copy(), {key: np.zeros_like(array) for key, array in target.tensors.items()}
    for state, layer in keys(reader):
        key = state.name, layer
        known = np.flatnonzero(covered(writers, reader, state, layer))
        expected.tensors[key][slot, known] = local(reader, state, whole[key])[known]
        once[key][slot, known] = 1
    wrong = miscounted = 0
    for factored in (False, True):
        pages = {rank: [at] for rank, at in slots.items()}
        got, written = planned(sources, pages, target, [slot], plan_for=plan_for, factored=factored)
        wrong += differences(got, expected)
        miscounted += sum(int((written[key] != once[key].ravel()).sum()) for key in once)
    return wrong, miscounted
