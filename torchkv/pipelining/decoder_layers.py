"""Finds the decoder layers of a model, and refuses models in which hooks on them would not be called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from torchkv.errors import ProtocolError
from torchkv.layout.layout import KVLayout

__all__ = ["decoder_layers"]

GivenLayers = Mapping[nn.Module, int] | Sequence[nn.Module] | None


def decoder_layers(model: nn.Module, layout: KVLayout, layers: GivenLayers, operation: str) -> dict[nn.Module, int]:
    """Module -> global layer id of this rank's layers, in the order in which they are expected to run.

    layers: what the caller gave: such a mapping, or the modules of this rank's layers in ascending order. None: search
    the model. Raises ``ProtocolError`` if the layers cannot be identified, or if hooks on them would not be called.
    """
    if layers is None:
        modules, ids = _found(model, layout, operation)
    elif isinstance(layers, Mapping):
        modules, ids = list(layers), list(layers.values())
    else:
        modules, ids = list(layers), _target_layers(layout)
        if len(modules) != len(ids):
            raise ProtocolError(
                f"{operation}: layers has {len(modules)} modules, this rank holds {len(ids)} layers; "
                "give one module for each, or a mapping of modules to global layer ids"
            )
    if layers is not None:
        _check_given(modules, ids, layout, operation)
    unique = set(modules)
    if len(unique) < len(modules) or len(set(ids)) < len(ids):
        raise ProtocolError(
            f"{operation}: one module serves several layers, or one layer has several modules, so a hook could not "
            "tell which layer has run; name the others with layers={module: layer id}, the rest is sent at the end"
        )
    _refuse_compiled(model, unique, operation)
    return dict(zip(modules, ids, strict=True))


def _check_given(modules: Sequence[nn.Module], ids: Sequence[int], layout: KVLayout, operation: str) -> None:
    for module, layer in zip(modules, ids, strict=True):
        if not isinstance(module, nn.Module):
            raise ProtocolError(f"{operation}: layers names a {type(module).__name__}; give torch.nn.Module objects")
        if layer not in layout.layers:
            raise ProtocolError(f"{operation}: layers names layer {layer!r}, which this rank does not hold")


def _target_layers(layout: KVLayout) -> list[int]:
    """The held layers of the target model, without draft layers."""
    return [layer for layer in layout.layers if layer < layout.num_layers]


def _found(model: nn.Module, layout: KVLayout, operation: str) -> tuple[list[nn.Module], list[int]]:
    """The one outermost list of modules as long as this rank's layers, or as all layers of the model."""
    held = _target_layers(layout)
    if not held:
        return [], []
    candidates = dict(_lists(model, "", {len(held), layout.num_layers}))
    if len(candidates) != 1:
        wanted = f"{len(held)} (held here) or {layout.num_layers} (of the model) modules"
        seen = f"several: {', '.join(candidates)}" if candidates else "none"
        raise ProtocolError(
            f"{operation}: the decoder layers should be the one nn.ModuleList of {wanted}, but {type(model).__name__} "
            f"has {seen}; name them with layers="
        )
    (modules,) = candidates.values()
    if len(modules) == len(held):
        return list(modules), held
    return [modules[layer] for layer in held], held


def _lists(module: nn.Module, path: str, lengths: set[int]) -> Iterator[tuple[str, nn.ModuleList]]:
    """(path, list) of the outermost lists of these lengths. Lists inside of them, such as experts, do not count."""
    for name, child in module.named_children():
        below = f"{path}.{name}" if path else name
        if isinstance(child, nn.ModuleList) and len(child) in lengths:
            yield below, child
        else:
            yield from _lists(child, below, lengths)


def _refuse_compiled(model: nn.Module, layers: set[nn.Module], operation: str) -> None:
    """Raises ``ProtocolError`` if a module around ``layers`` is compiled.

    Compiled code calls only the hooks that existed when it was compiled. Hooks on a compiled layer itself are called.
    """
    pending = [(model, "the model")]
    seen = set(layers)
    while pending:
        module, path = pending.pop()
        if module in seen or getattr(module, "_orig_mod", None) in layers:
            continue
        seen.add(module)
        if _is_compiled(module) and not layers.isdisjoint(module.modules()):
            raise ProtocolError(
                f"{operation}: {path} is compiled as a whole, so hooks on its layers would not be called. Compile the "
                "layers one by one (layer.compile()), or send once with send_pages behind the forward"
            )
        # This runs before every forward pass, so the layers, which have nearly all of the modules, are left out.
        pending += [(child, f"{path}.{name}") for name, child in module.named_children() if child not in seen]


def _is_compiled(module: nn.Module) -> bool:
    # A wrapper made by torch.compile(module), module.compile(), or torch.compile of its forward.
    forward = getattr(module, "forward", None)
    return module._compiled_call_impl is not None or hasattr(forward, "_torchdynamo_orig_callable")
