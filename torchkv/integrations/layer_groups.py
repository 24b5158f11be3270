"""An engine's groups of layers as layer groups: its tensors as one cache, and what of a request is moved. Any engine's.

Engines keep a list of blocks for each group of a request's layers: full attention, a sliding window, or a state (Mamba,
gated delta nets). Groups take their blocks from one memory: `KVCache` finds that out from the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TypeAlias

import torch

import torchkv
from torchkv.errors import LayoutMismatch

__all__ = ["BlockLists", "Group", "Groups", "PackedState", "PageLists", "cache_of"]

BlockLists: TypeAlias = Sequence[Sequence[int]]  # of a request, as the engine has them: one of each group
PageLists: TypeAlias = list[int] | dict[str, list[int]]  # of a request, as torchkv takes them
NULL = 0  # the engine's block in place of one that a request does not hold
ABSENT = -1

Tensors: TypeAlias = Mapping[int, torch.Tensor]  # by global layer id


@dataclass(frozen=True, slots=True)
class PackedState:
    """One of the states in a block. shape: of this rank. dim: along which it consists of parts that lie one behind the
    other; None: every rank holds all of it. parts: elements of each here, and whether the ranks share it, each holding
    as many of it; or else each holds all of it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int | None = None
    parts: tuple[tuple[int, bool], ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """A group of layers. name: None if it is the only one. window: tokens; None: all. latent: every rank holds all
    heads, as with MLA. states: one behind the other in a block, instead of tokens.
    """

    name: str | None
    layers: tuple[int, ...]
    window: int | None = None
    latent: bool = False
    states: tuple[PackedState, ...] = ()


@dataclass(frozen=True, slots=True)
class Groups:
    """All groups of a model. page_size: tokens in a block of those with attention."""

    all: tuple[Group, ...]
    page_size: int

    @property
    def hybrid(self) -> bool:
        """Whether there are several block lists."""
        return self.all[0].name is not None

    def count(self, tokens: int) -> int:
        """How many pages hold ``tokens``."""
        return -(-tokens // self.page_size)

    def moved(self, tokens: int) -> int:
        """How many tokens of a prompt the engine that prefills it computes and sends.

        With several block lists all but the last one: a state cannot be taken back by one token, and a window that ends
        one token later may no longer hold what that token attends to. So the engine that decodes computes that one.
        """
        return tokens - 1 if self.hybrid else tokens

    def pages(self, lists: BlockLists, *, prefix: int, tokens: int) -> PageLists:
        """The blocks of attention layers that hold the tokens from ``prefix`` on, -1 for those before every window."""
        found: dict[str, list[int]] = {}
        for group, blocks in zip(self.all, lists, strict=True):
            if group.states:
                continue
            ids = list(blocks[: self.count(tokens)])
            if group.window is not None:
                # The next token attends to the ``window - 1`` before it.
                absent = max(tokens - (group.window - 1), 0) // self.page_size
                ids[:absent] = [ABSENT] * len(ids[:absent])
            ids = ids[prefix // self.page_size :]
            if group.name is None:
                return ids
            assert NULL not in ids
            found[group.name] = ids
        return found

    def slots(self, lists: BlockLists) -> dict[str, int]:
        """The blocks that hold the states after the last computed token: the last ones of their lists."""
        named = zip(self.all, lists, strict=True)
        return {group.name: blocks[-1] for group, blocks in named if group.states and group.name is not None}


def cache_of(
    tensors: Tensors,
    groups: Sequence[Group],
    *,
    page_size: int,
    num_layers: int,
    total_heads: int,
    tp_rank: int,
    tp_size: int,
) -> torchkv.KVCache:
    """An engine's own tensors as pages and slots, without copying them.

    tensors: ``[blocks, heads, tokens, K and V of one head]`` of this rank, with any strides that keep the bytes of a
    block together; of layers with state blocks of bytes. All of them belong to the group without a name, if there is
    one. total_heads: of all ranks. Raises ``LayoutMismatch``.
    """
    components: list[torchkv.Component] = []
    states: list[torchkv.State] = []
    adopted: dict[str, Tensors] = {}
    orders: set[str] = set()
    for group in groups:
        own = {layer: tensors[layer] for layer in (group.layers if group.name else sorted(tensors))}
        if group.states:
            for state, views in _states_of(own, group, tp_size):
                states.append(state)
                adopted[state.name] = views
            continue
        _check_pages(own, page_size)
        first = next(iter(own.values()))
        heads, by_token = int(first.shape[1]), first.stride(2) > first.stride(1) and first.shape[1] > 1
        component = torchkv.Component(
            _named("latent" if group.latent else "kv", group),
            heads=heads if tp_size == 1 or group.latent else total_heads,
            dim=int(first.shape[3]),
            dtype=first.dtype,
            sharded=not group.latent,
            layers=tuple(own),
            group=group.name,
        )
        components.append(component)
        orders.add("NHD" if by_token else "HND")
        adopted[component.name] = {i: each.permute(0, 2, 1, 3) if by_token else each for i, each in own.items()}
    if len(orders) != 1:
        raise LayoutMismatch(f"the attention layers of this model keep tokens and heads in several orders: {orders}")
    layout = torchkv.KVLayout(
        components,
        num_layers=num_layers,
        page_size=page_size,
        order="NHD" if orders == {"NHD"} else "HND",
        tp_rank=tp_rank,
        tp_size=tp_size,
        layers=sorted(tensors),
        states=states,
        windows={layer: group.window for group in groups if group.window is not None for layer in group.layers},
    )
    rows = {name: [views.get(layer) for layer in layout.layers] for name, views in adopted.items()}
    return torchkv.KVCache(
        layout,
        {component.name: rows[component.name] for component in components},
        states={state.name: rows[state.name] for state in states},
    )


def _named(name: str, group: Group) -> str:
    return name if group.name is None else f"{name}.{group.name}"


def _check_pages(tensors: Tensors, page_size: int) -> None:
    first = next(iter(tensors.values()))
    for layer, tensor in tensors.items():
        if tensor.dim() != 4 or tensor.shape != first.shape or tensor.stride() != first.stride():
            raise LayoutMismatch(
                f"layer {layer} has a KV cache of shape {tuple(tensor.shape)}, strides {tensor.stride()}, another one "
                f"{tuple(first.shape)}, {first.stride()}; torchkv needs [blocks, heads, tokens, dim], the same in all "
                "layers of a group"
            )
    if (tokens := first.shape[2]) != page_size:
        raise LayoutMismatch(
            f"the attention backend splits blocks of {page_size} tokens into pages of {tokens}; start the engine with "
            f"--block-size {tokens}"
        )


def _states_of(tensors: Tensors, group: Group, tp_size: int) -> Iterator[tuple[torchkv.State, Tensors]]:
    """The states of a group's layers, each with the views of it."""
    begin = 0
    blocks = {layer: tensor.view(torch.uint8).flatten(1) for layer, tensor in tensors.items()}
    end = sum(prod(state.shape) * state.dtype.itemsize for state in group.states)
    for layer, block in blocks.items():
        if block.shape[1] < end:
            raise LayoutMismatch(
                f"layer {layer} has {block.shape[1]} bytes of state in a block, but its states take {end} or more"
            )
    for i, packed in enumerate(group.states):
        for state in _parts(_named(f"state{i}", group), packed, group, tp_size):
            shape = list(state.shape)
            if state.shard_dim is not None:
                shape[state.shard_dim] //= tp_size
            size = prod(shape) * packed.dtype.itemsize
            views = {layer: block[:, begin : begin + size] for layer, block in blocks.items()}
            yield state, {layer: view.view(packed.dtype).view(-1, *shape) for layer, view in views.items()}
            begin += size


def _parts(name: str, packed: PackedState, group: Group, tp_size: int) -> Iterator[torchkv.State]:
    """A packed state as states of torchkv, in the order of their bytes: as one, if it is shared evenly or not at all;
    otherwise each part of each row for itself.
    """
    state = partial(torchkv.State, dtype=packed.dtype, layers=group.layers, group=group.name)
    dim, shape = packed.dim, list(packed.shape)
    if dim is None:
        yield state(name, shape)
    elif all(shared for _, shared in packed.parts):
        shape[dim] *= tp_size
        sizes = [size * tp_size for size, _ in packed.parts]
        yield state(name, shape, shard_dim=dim, shard_groups=sizes)
    else:
        for row in range(prod(shape[:dim])):
            for i, (size, shared) in enumerate(packed.parts):
                extent = size * tp_size if shared else size
                shard_dim = 0 if shared else None
                yield state(f"{name}.{row}.{i}", [extent, *shape[dim + 1 :]], shard_dim=shard_dim)
