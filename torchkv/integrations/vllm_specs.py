"""What vLLM says of a model's layers and their states, as layer groups. Needs no vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeAlias

from torchkv.errors import LayoutMismatch
from torchkv.integrations.layer_groups import Group, Groups, PackedState

__all__ = ["Shapes", "groups_of"]

Shapes: TypeAlias = Sequence[Sequence[int]]  # of the states of a layer

FULL = ("FullAttentionSpec", "MLAAttentionSpec")
KINDS = (*FULL, "SlidingWindowSpec", "MambaSpec")


def groups_of(
    kv_cache_groups: Sequence[Any], layer_of: Callable[[str], int], *, tp_size: int, whole: Callable[[], Shapes]
) -> Groups:
    """vLLM's groups of layers. layer_of: a layer's id, by its name. whole: the shapes of a layer's states where one
    rank holds all of them. Raises ``LayoutMismatch`` for what torchkv does not know.
    """
    specs = [group.kv_cache_spec for group in kv_cache_groups]
    kinds = [type(spec).__name__ for spec in specs]
    sizes = {spec.block_size for spec, kind in zip(specs, kinds, strict=True) if kind != "MambaSpec"}
    if set(kinds) - set(KINDS) or len(sizes) != 1:
        raise LayoutMismatch(
            f"this model's layers keep {', '.join(kinds) or 'nothing'}, those of attention in blocks of "
            f"{sorted(sizes)} tokens; torchkv's vLLM connector supports groups of {', '.join(KINDS)}, at least one of "
            "them with attention, all with blocks of one size"
        )
    if any(getattr(spec, "num_speculative_blocks", 0) for spec in specs):
        raise LayoutMismatch("torchkv's vLLM connector does not support speculative decoding of models with states yet")
    plain = len(kinds) == 1 and kinds[0] in FULL
    found = []
    for i, (group, spec, kind) in enumerate(zip(kv_cache_groups, specs, kinds, strict=True)):
        found.append(
            Group(
                None if plain else f"g{i}",
                tuple(sorted(layer_of(name) for name in group.layer_names)),
                window=spec.sliding_window if kind == "SlidingWindowSpec" else None,
                latent=kind == "MLAAttentionSpec",
                states=_states(spec, tp_size, whole) if kind == "MambaSpec" else (),
            )
        )
    return Groups(tuple(found), sizes.pop())


def _states(spec: Any, tp_size: int, whole: Callable[[], Shapes]) -> tuple[PackedState, ...]:
    """Those of one of vLLM's ``MambaSpec``: of Mamba 2 and gated delta nets how ranks share them, too."""
    kind = getattr(spec.mamba_type, "name", str(spec.mamba_type)).lower()  # older vLLM has strings
    sharing: list[tuple[int | None, tuple[tuple[int, bool], ...]]]
    if len(spec.shapes) == 2 and kind.startswith(("mamba2", "gdn")):
        convolution, recurrent = spec.shapes
        dim = 0 if convolution[0] > convolution[1] else 1  # that of channels: it remembers few tokens
        inner = prod(recurrent[:2])
        rest = convolution[dim] - inner
        parts = [(rest // 2, True), (rest // 2, True), (inner, True)]  # q, k, v
        if kind == "mamba2":
            groups = _groups(whole() if tp_size > 1 else spec.shapes, dim)
            parts = [(inner, True), (rest, False)] if groups == 1 else parts[::-1]  # x, B, C
        sharing = [(dim, tuple(parts)), (0, ((recurrent[0], True),))]
    elif tp_size == 1 or getattr(spec, "tp_replicated", False):
        sharing = [(None, ())] * len(spec.shapes)
    else:
        raise LayoutMismatch(
            f"torchkv's vLLM connector does not know how ranks share states of the kind {kind!r}; use "
            f"tensor_parallel_size=1, not {tp_size}"
        )
    packed = zip(spec.shapes, spec.dtypes, sharing, strict=True)
    return tuple(PackedState(tuple(shape), dtype, dim, parts) for shape, dtype, (dim, parts) in packed)


def _groups(shapes: Shapes, dim: int) -> int:
    """In how many groups of heads Mamba 2 has B and C. Where there is one, every rank holds all of it."""
    convolution, recurrent = shapes
    return (convolution[dim] - prod(recurrent[:2])) // 2 // recurrent[2]
