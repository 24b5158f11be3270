"""What a demo does to received memory to show that a wrong bit there would be seen: one small error at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

import torchkv
from disagg.family_cache import CONVOLUTION


@dataclass(frozen=True)
class ControlChannel:
    """``target``: the view of received memory that is to be corrupted, and nothing else."""

    operation: str
    target: torch.Tensor


def tensors(kv_cache: torchkv.KVCache) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Every tensor of the cache: (component or state, layer, [num_pages or num_slots, ...])."""
    layout = kv_cache.layout
    rows = [(component.name, kv_cache[component.name]) for component in layout.components]
    rows += [(state.name, kv_cache.state(state.name)) for state in layout.states]
    for name, by_layer in rows:
        for layer, tensor in zip(layout.layers, by_layer, strict=True):
            if tensor is not None:
                yield name, layer, tensor


def poison(kv_cache: torchkv.KVCache) -> None:
    """What is used without having been computed or received spoils every logit."""
    for _, _, tensor in tensors(kv_cache):
        tensor.fill_(float("nan"))


class Snapshot:
    """The cache as it was, since decoding changes it: state is updated in place, tokens are added to pages."""

    def __init__(self, kv_cache: torchkv.KVCache) -> None:
        self._saved = [(tensor, tensor.clone()) for _, _, tensor in tensors(kv_cache)]

    def restore(self) -> None:
        for tensor, saved in self._saved:
            tensor.copy_(saved)


def controls(kv_cache: torchkv.KVCache, pages: torch.Tensor, slot: int) -> list[ControlChannel]:
    """One for each component, for its windowed layers and the others apart, and one for each state.

    ``pages``: of the prompt. A page in the middle, or of a window the last page that the prompt fills; a whole state,
    but of a convolution only the last column: older ones soon drop out, or are never read at all.
    """
    layout = kv_cache.layout
    found: list[ControlChannel] = []
    for component in layout.components:
        held = layout.component_layers(component.name)
        sliding = [layer for layer in held if layout.window(layer)]
        for layers, at, where in (
            ([layer for layer in held if layer not in sliding], len(pages) // 2, "page"),
            (sliding, len(pages) - 2, "page in the window"),
        ):
            if layers:
                layer = layers[len(layers) // 2]
                tensor = kv_cache[component.name][layout.layers.index(layer)]
                found.append(ControlChannel(f"{component.name} ({where}, layer {layer})", tensor[int(pages[at])]))
    for state in layout.states:
        held = layout.state_layers(state.name)
        layer = held[len(held) // 2]
        target = kv_cache.state(state.name)[layout.layers.index(layer)][slot]
        if state.name == CONVOLUTION:
            found.append(ControlChannel(f"{state.name} (last column, layer {layer})", target[..., -1]))
        else:
            found.append(ControlChannel(f"{state.name} (layer {layer})", target))
    return found


def strays(kv_cache: torchkv.KVCache, pages: torch.Tensor, slot: int, tokens: int) -> list[str]:
    """What was written although nothing of this request belongs there, or the other way round, in words.

    The cache must have been poisoned, and ``tokens`` tokens received in ``pages`` and ``slot``. Of layers with a
    window only the pages that it reaches may have come, and one more, as torchkv cannot know how full the last one is.
    """
    layout, wrong = kv_cache.layout, []
    states = {state.name for state in layout.states}
    for name, layer, tensor in tensors(kv_cache):
        written = ~tensor.isnan().flatten(1).all(dim=1)
        window = None if name in states else layout.window(layer)
        expected, allowed = torch.zeros_like(written), torch.zeros_like(written)
        if name in states:
            expected[slot] = allowed[slot] = True
        else:
            needed = 0 if window is None else max(0, tokens - window + 1)
            expected[pages[needed // layout.page_size :]] = True
            allowed[pages[max(0, needed // layout.page_size - (window is not None)) :]] = True
        if bool((expected & ~written).any() or (written & ~allowed).any()):
            wrong.append(f"{name} of layer {layer}")
    return wrong
