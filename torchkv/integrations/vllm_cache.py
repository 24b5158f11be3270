"""vLLM's own tensors as a `KVCache`, without copying them. Needs no vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import torch

import torchkv
from torchkv.errors import LayoutMismatch
from torchkv.integrations.vllm_groups import Group

__all__ = ["cache_of", "hybrid_cache_of"]


def cache_of(
    tensors: Mapping[int, torch.Tensor],
    *,
    page_size: int,
    num_layers: int,
    total_heads: int | None,
    tp_rank: int,
    tp_size: int,
) -> torchkv.KVCache:
    """vLLM's own tensors as pages, without copying them.

    tensors: by global layer id, ``[blocks, heads, tokens, K and V of one head]`` of this rank, with any strides that
    keep the bytes of a block together. total_heads: of all ranks; None: every rank holds all of them, as with MLA.
    Raises ``LayoutMismatch``.
    """
    first = next(iter(tensors.values()))
    for layer, tensor in tensors.items():
        if tensor.dim() != 4 or tensor.shape != first.shape or tensor.stride() != first.stride():
            raise LayoutMismatch(
                f"layer {layer} has a KV cache of shape {tuple(tensor.shape)}, strides {tensor.stride()}, another one "
                f"{tuple(first.shape)}, {first.stride()}; torchkv needs [blocks, heads, tokens, dim], the same in all "
                "layers"
            )
    _, heads, tokens, dim = first.shape
    if tokens != page_size:
        raise LayoutMismatch(
            f"the attention backend splits blocks of {page_size} tokens into pages of {tokens}; start vLLM with "
            f"--block-size {tokens}"
        )
    by_token = first.stride(2) > first.stride(1) and heads > 1
    component = torchkv.Component(
        "kv" if total_heads is not None else "latent",
        heads=heads if total_heads is None else total_heads,
        dim=dim,
        dtype=first.dtype,
        sharded=total_heads is not None,
    )
    layout = torchkv.KVLayout(
        [component],
        num_layers=num_layers,
        page_size=page_size,
        order="NHD" if by_token else "HND",
        tp_rank=tp_rank,
        tp_size=tp_size,
        layers=sorted(tensors),
    )
    views = [tensors[layer].permute(0, 2, 1, 3) if by_token else tensors[layer] for layer in layout.layers]
    return torchkv.KVCache(layout, {component.name: views})


def hybrid_cache_of(
    tensors: Mapping[int, torch.Tensor],
    groups: Sequence[Group],
    *,
    page_size: int,
    num_layers: int,
    total_heads: int,
    tp_rank: int,
    tp_size: int,
) -> torchkv.KVCache:
    """The tensors of a model whose layers have block lists of their own, one component or several states a group.

    tensors: as in `cache_of`; those of layers with state are blocks of bytes, in which the states of a layer lie one
    behind the other. Groups of layers take their blocks from one memory: torchkv finds that out from the tensors.
    Raises ``LayoutMismatch``.
    """
    _check_states(groups, tp_size)
    components: list[torchkv.Component] = []
    states: list[torchkv.State] = []
    adopted: dict[str, dict[int, torch.Tensor]] = {}
    orders: set[str] = set()
    for group in groups:
        if group.states:
            made, views = _states_of(tensors, group)
            states += made
            adopted |= views
            continue
        own = {layer: tensors[layer] for layer in group.layers}
        part = cache_of(
            own,
            page_size=page_size,
            num_layers=num_layers,
            total_heads=total_heads if tp_size > 1 else int(own[group.layers[0]].shape[1]),
            tp_rank=tp_rank,
            tp_size=tp_size,
        )
        component, views = _component_of(part, group)
        components.append(component)
        adopted |= views
        orders.add(part.layout.order)
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
    rows = {name: [found.get(layer) for layer in layout.layers] for name, found in adopted.items()}
    return torchkv.KVCache(
        layout,
        {component.name: rows[component.name] for component in components},
        states={state.name: rows[state.name] for state in states},
    )


def _check_states(groups: Sequence[Group], tp_size: int) -> None:
    if tp_size > 1 and any(group.states for group in groups):
        raise LayoutMismatch(
            "torchkv's vLLM connector does not know how the ranks of this engine share the states of its layers; use "
            f"tensor_parallel_size=1, not {tp_size}"
        )


def _component_of(part: torchkv.KVCache, group: Group) -> tuple[torchkv.Component, dict[str, dict[int, torch.Tensor]]]:
    """The one component of ``part`` as that of a layer group, and by its name and layers the tensors of it."""
    (component,) = part.layout.components
    name = f"{component.name}.{group.name}"
    rows = zip(part.layout.layers, part[component.name], strict=True)
    views = {layer: tensor for layer, tensor in rows if tensor is not None}
    return replace(component, name=name, layers=group.layers, group=group.name), {name: views}


def _states_of(
    tensors: Mapping[int, torch.Tensor], group: Group
) -> tuple[list[torchkv.State], dict[str, dict[int, torch.Tensor]]]:
    """The states of a group's layers, and by their names and layers the views of them."""
    states, views, begin = [], dict[str, dict[int, torch.Tensor]](), 0
    for i, (shape, dtype) in enumerate(group.states):
        name, size = f"state{i}.{group.name}", prod(shape) * dtype.itemsize
        states.append(torchkv.State(name, shape, dtype, layers=group.layers, group=group.name))
        views[name] = {}
        for layer in group.layers:
            blocks = tensors[layer]
            blocks = blocks.view(torch.uint8).flatten(1)
            if blocks.shape[1] < begin + size:
                raise LayoutMismatch(
                    f"layer {layer} has {blocks.shape[1]} bytes of state in a block, but its states take "
                    f"{begin + size} or more"
                )
            views[name][layer] = blocks[:, begin : begin + size].view(dtype).view(-1, *shape)
        begin += size
    return states, views
