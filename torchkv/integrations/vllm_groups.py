"""Models whose layers have block lists of their own: which blocks of a request are sent, and where. Needs no vLLM.

vLLM keeps such a list for each group of layers: full attention, a sliding window, or a state (Mamba, gated delta nets).
The engine that prefills such a model leaves the last token of a prompt to the one that decodes: a state cannot be taken
back by one token, and a window that ends one token later may no longer hold what that token attends to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from torchkv.errors import LayoutMismatch

if TYPE_CHECKING:
    import torch

__all__ = ["BlockLists", "Group", "Groups", "groups_of"]

BlockLists: TypeAlias = Sequence[Sequence[int]]  # of a request, as vLLM has them: one of each group
NULL = 0  # vLLM's block in place of one that a request does not hold
ABSENT = -1

FULL = ("FullAttentionSpec", "MLAAttentionSpec")
KINDS = (*FULL, "SlidingWindowSpec", "MambaSpec")


@dataclass(frozen=True, slots=True)
class Group:
    """One of vLLM's groups of layers. window: tokens; None: all. states: shape and dtype of each, in a block."""

    name: str
    layers: tuple[int, ...]
    window: int | None = None
    states: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()


@dataclass(frozen=True, slots=True)
class Groups:
    """All groups of a model. page_size: tokens in a block of those with attention."""

    all: tuple[Group, ...]
    page_size: int

    def pages(self, lists: BlockLists, *, prefix: int, tokens: int) -> dict[str, list[int]]:
        """The blocks of attention layers that hold the tokens from ``prefix`` on, -1 for those before every window."""
        found = {}
        for group, blocks in zip(self.all, lists, strict=True):
            if group.states:
                continue
            ids = list(blocks[: -(-tokens // self.page_size)])
            if group.window is not None:
                # The next token attends to the ``window - 1`` before it.
                absent = max(tokens - (group.window - 1), 0) // self.page_size
                ids[:absent] = [ABSENT] * len(ids[:absent])
            found[group.name] = ids[prefix // self.page_size :]
        assert not any(NULL in ids for ids in found.values())
        return found

    def slots(self, lists: BlockLists) -> dict[str, int]:
        """The blocks that hold the states after the last computed token: the last ones of their lists."""
        return {group.name: blocks[-1] for group, blocks in zip(self.all, lists, strict=True) if group.states}


def groups_of(kv_cache_groups: Sequence[Any], layer_of: Callable[[str], int]) -> Groups | None:
    """What vLLM says of a model's groups of layers; None if one list of blocks a request serves all of them.

    layer_of: a layer's id, by its name. Raises ``LayoutMismatch`` for what torchkv does not know.
    """
    specs = [group.kv_cache_spec for group in kv_cache_groups]
    kinds = [type(spec).__name__ for spec in specs]
    if len(kinds) == 1 and kinds[0] in FULL:
        return None
    sizes = {spec.block_size for spec, kind in zip(specs, kinds, strict=True) if kind != "MambaSpec"}
    if set(kinds) - set(KINDS) or len(sizes) != 1:
        raise LayoutMismatch(
            f"this model's layers keep {', '.join(kinds) or 'nothing'}, those of attention in blocks of "
            f"{sorted(sizes)} tokens; torchkv's vLLM connector supports groups of {', '.join(KINDS)}, at least one of "
            "them with attention, all with blocks of one size"
        )
    if any(getattr(spec, "num_speculative_blocks", 0) for spec in specs):
        raise LayoutMismatch("torchkv's vLLM connector does not support speculative decoding of models with states yet")
    found = []
    for i, (group, spec, kind) in enumerate(zip(kv_cache_groups, specs, kinds, strict=True)):
        states = tuple(zip(spec.shapes, spec.dtypes, strict=True)) if kind == "MambaSpec" else ()
        window = spec.sliding_window if kind == "SlidingWindowSpec" else None
        layers = tuple(sorted(layer_of(name) for name in group.layer_names))
        found.append(Group(f"g{i}", layers, window, states))
    return Groups(tuple(found), sizes.pop())
