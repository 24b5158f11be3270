"""What one rank holds of a KV cache: `KVLayout`, in global coordinates, so that layouts of two ranks can be compared.

Which bytes go from one rank to another follows from their two layouts alone (see `torchkv.layout.pair_plan`).
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch

from torchkv.errors import LayoutMismatch
from torchkv.layout.component import (
    CONVERSIONS,
    MAX_EXTENT,
    MAX_LAYERS,
    Component,
    State,
    check_nbytes,
    integer,
    layer_ids,
)

__all__ = [
    "Component",
    "KVLayout",
    "Order",
    "State",
    "check_compatible",
    "first_difference",
    "first_refusal",
    "shard_heads",
]

Order = Literal["NHD", "HND"]
_Named = TypeVar("_Named", Component, State)

MAX_COMPONENTS = 64
MAX_PAGE_SIZE = 65536  # tokens
MAX_WINDOW = (1 << 31) - 1  # tokens


def shard_heads(heads: int, *, tp_rank: int, tp_size: int) -> range:
    """The global heads that rank ``tp_rank`` of ``tp_size`` holds, of ``heads`` sharded heads.

    With more ranks than heads, neighbouring ranks hold the same head. Raises `LayoutMismatch` if neither number divides
    the other.
    """
    if max(heads, tp_size) % min(heads, tp_size):
        raise LayoutMismatch(
            f"tp_size={tp_size} cannot share heads={heads}: one must be a multiple of the other; "
            "change tp_size or declare the component with sharded=False"
        )
    # By division, not modulo: neighbouring ranks hold the replicas of one head.
    first = tp_rank * heads // tp_size
    return range(first, first + max(1, heads // tp_size))


@dataclass(frozen=True, init=False)
class KVLayout:
    """What one rank holds: which layers, heads and states, and the shape of its pages.

    components: the per-token tensors. num_layers: layers of the target model; layer ids from ``num_layers`` on are
    draft layers. page_size: tokens per page. order: pages are (page_size, heads, dim) for ``"NHD"`` and
    (heads, page_size, dim) for ``"HND"``. tp_rank, tp_size: decide which heads of sharded components this rank holds.
    layers: global ids of the layers held here (pipeline parallelism), default ``range(num_layers)``. states: tensors
    with one slot of fixed size per request. windows: global layer id -> tokens of the layer's sliding window; layers
    that are not named attend to all tokens. Kept as ascending (layer, tokens) pairs.

    Of a layer with a window only the last pages are transferred: all pages that the window can reach, provided that the
    last page sent holds at least one token. A receiver that passes ``prefix_tokens`` must hold the pages inside the
    window before the end of that prefix.

    Engines of hybrid models keep one page list for each *layer group*. Here each component and state of such a layout
    names its ``group``, or none does. Then verbs take ``pages`` as ``{group: page ids}``, with -1 for absent pages, and
    each group is granted, leased and sealed for itself (see docs/layer-groups.md). All groups have one page size.

    Hashable and comparable. Raises `LayoutMismatch` with the field and its limits.
    """

    components: tuple[Component, ...]
    num_layers: int
    page_size: int
    order: Order
    tp_rank: int
    tp_size: int
    layers: tuple[int, ...]
    states: tuple[State, ...]
    windows: tuple[tuple[int, int], ...]

    def __init__(
        self,
        components: Iterable[Component],
        *,
        num_layers: int,
        page_size: int,
        order: Order = "NHD",
        tp_rank: int = 0,
        tp_size: int = 1,
        layers: Iterable[int] | None = None,
        states: Iterable[State] = (),
        windows: Mapping[int, int] | None = None,
    ) -> None:
        count = integer("num_layers", num_layers, 1, MAX_LAYERS)
        size = integer("tp_size", tp_size, 1, MAX_EXTENT)
        values = {
            "components": _members("components", components, Component),
            "num_layers": count,
            "page_size": integer("page_size", page_size, 1, MAX_PAGE_SIZE),
            "order": order,
            "tp_rank": integer("tp_rank", tp_rank, 0, size - 1),
            "tp_size": size,
            "layers": tuple(range(count)) if layers is None else layer_ids("layers", layers),
            "states": _members("states", states, State),
            "windows": _windows({} if windows is None else windows),
        }
        for field, value in values.items():
            object.__setattr__(self, field, value)
        self._check()

    def _check(self) -> None:
        members: list[Component | State] = [*self.components, *self.states]
        if len({member.group is None for member in members}) > 1:
            first = next(member.name for member in members if member.group is None)
            raise LayoutMismatch(
                f"{first!r} names no layer group, others do: {', '.join(self.groups)}; give every component and state "
                "a group, or none"
            )
        if self.order not in ("NHD", "HND"):
            raise LayoutMismatch(f"order={self.order!r} is not allowed: give 'NHD' or 'HND'")
        if not self.components and not self.states:
            raise LayoutMismatch("components=() is not allowed: give at least one Component or State")
        for component in self.components:
            self.component_heads(component.name)
            check_nbytes(f"a page of component {component.name!r}", self.page_nbytes(component.name))
        for state in self.states:
            if any(component.name == state.name for component in self.components):
                raise LayoutMismatch(f"{state.name!r} names a component and a state: give each its own name")
            for group in state.groups:
                if group % self.tp_size:
                    raise LayoutMismatch(
                        f"state {state.name!r}: tp_size={self.tp_size} does not divide the sharded size "
                        f"{group}; change tp_size, shard_dim or shard_groups"
                    )

    @classmethod
    def gqa(
        cls,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        dtype: torch.dtype,
        v_head_dim: int | None = None,
        order: Order = "NHD",
        tp_rank: int = 0,
        tp_size: int = 1,
        layers: Iterable[int] | None = None,
        states: Iterable[State] = (),
        windows: Mapping[int, int] | None = None,
        groups: Mapping[str, Sequence[int]] | None = None,
        accept: Sequence[torch.dtype] = (),
    ) -> KVLayout:
        """Multi-head, grouped-query or multi-query attention: sharded components ``"k"`` and ``"v"``.

        num_kv_heads: global. v_head_dim: elements of a V head, default ``head_dim``. groups: layer group -> global ids
        of its layers; the components are then ``"k.<group>"`` and ``"v.<group>"``. accept: of both components, see
        `Component`. Other parameters: see `KVLayout`.
        """
        v_dim = head_dim if v_head_dim is None else v_head_dim
        components = (
            Component("k", num_kv_heads, head_dim, dtype, accept=accept),
            Component("v", num_kv_heads, v_dim, dtype, accept=accept),
        )
        return cls(
            components if groups is None else _by_group(components, groups),
            num_layers=num_layers,
            page_size=page_size,
            order=order,
            tp_rank=tp_rank,
            tp_size=tp_size,
            layers=layers,
            states=states,
            windows=windows,
        )

    @classmethod
    def mla(
        cls,
        *,
        num_layers: int,
        latent_dim: int,
        rope_dim: int,
        page_size: int,
        dtype: torch.dtype,
        order: Order = "NHD",
        tp_rank: int = 0,
        tp_size: int = 1,
        layers: Iterable[int] | None = None,
        states: Iterable[State] = (),
        windows: Mapping[int, int] | None = None,
        groups: Mapping[str, Sequence[int]] | None = None,
        accept: Sequence[torch.dtype] = (),
    ) -> KVLayout:
        """Multi-head latent attention: one component ``"latent"`` that every rank holds in full.

        It has one head of ``latent_dim + rope_dim`` elements. groups: layer group -> global ids of its layers; the
        components are then ``"latent.<group>"``. accept: see `Component`. Other parameters: see `KVLayout`.
        """
        latent = integer("latent_dim", latent_dim, 1, MAX_EXTENT)
        width = latent + integer("rope_dim", rope_dim, 0, MAX_EXTENT - latent)
        components = (Component("latent", 1, width, dtype, sharded=False, accept=accept),)
        return cls(
            components if groups is None else _by_group(components, groups),
            num_layers=num_layers,
            page_size=page_size,
            order=order,
            tp_rank=tp_rank,
            tp_size=tp_size,
            layers=layers,
            states=states,
            windows=windows,
        )

    def window(self, layer: int) -> int | None:
        """Tokens of the sliding window of ``layer`` (a global id); None if it attends to all tokens."""
        at = bisect_left(self.windows, (layer,))
        if at < len(self.windows) and self.windows[at][0] == layer:
            return self.windows[at][1]
        return None

    @property
    def groups(self) -> tuple[str, ...]:
        """The layer groups, in the order in which components and states name them; none if there is one page list."""
        members: list[Component | State] = [*self.components, *self.states]
        named = (member.group for member in members)
        return tuple(dict.fromkeys(group for group in named if group is not None))

    def of_group(self, group: str) -> KVLayout:
        """The part of this layout that is in ``group``, as a layout without groups."""
        return KVLayout(
            [replace(component, group=None) for component in self.components if component.group == group],
            num_layers=self.num_layers,
            page_size=self.page_size,
            order=self.order,
            tp_rank=self.tp_rank,
            tp_size=self.tp_size,
            layers=self.layers,
            states=[replace(state, group=None) for state in self.states if state.group == group],
            windows=dict(self.windows),
        )

    @property
    def heads(self) -> range:
        """Global kv heads on this rank: of the first sharded component, or else of the first component."""
        for component in self.components:
            if component.sharded:
                return self.component_heads(component.name)
        return self.component_heads(self.components[0].name) if self.components else range(0)

    def component(self, name: str) -> Component:
        """The component called ``name``. Raises `LayoutMismatch`."""
        return _find("component", name, self.components)

    def state(self, name: str) -> State:
        """The state called ``name``. Raises `LayoutMismatch`."""
        return _find("state", name, self.states)

    def component_heads(self, name: str) -> range:
        """Global heads of component ``name`` that this rank holds."""
        component = self.component(name)
        if not component.sharded:
            return range(component.heads)
        return shard_heads(component.heads, tp_rank=self.tp_rank, tp_size=self.tp_size)

    def component_layers(self, name: str) -> tuple[int, ...]:
        """Global ids of the held layers that have component ``name``, ascending."""
        return self._held(self.component(name).layers)

    def state_layers(self, name: str) -> tuple[int, ...]:
        """Global ids of the held layers that have state ``name``, ascending."""
        return self._held(self.state(name).layers)

    @cached_property
    def stateful_layers(self) -> frozenset[int]:
        """Global ids of the held layers that have any state."""
        return frozenset(layer for state in self.states for layer in self.state_layers(state.name))

    @property
    def stateful(self) -> bool:
        """Whether any layer held here has state, so that each request needs a state slot."""
        return bool(self.stateful_layers)

    def _held(self, layers: Sequence[int] | None) -> tuple[int, ...]:
        if layers is None:
            return self.layers
        having = frozenset(layers)
        return tuple(layer for layer in self.layers if layer in having)

    def page_shape(self, name: str) -> tuple[int, int, int]:
        """Shape of a page of one layer: (page_size, heads, dim) for NHD, (heads, page_size, dim) for HND."""
        heads, dim = len(self.component_heads(name)), self.component(name).dim
        return (self.page_size, heads, dim) if self.order == "NHD" else (heads, self.page_size, dim)

    def page_nbytes(self, name: str) -> int:
        """Bytes of one page of one layer of component ``name``."""
        return self.page_size * len(self.component_heads(name)) * self.component(name).head_nbytes

    def state_shape(self, name: str) -> tuple[int, ...]:
        """Shape of one slot of state ``name`` on this rank."""
        state = self.state(name)
        local = list(state.shape)
        if state.shard_dim is not None:
            local[state.shard_dim] //= self.tp_size
        return tuple(local)

    def state_nbytes(self, name: str) -> int:
        """Bytes of one slot of one layer of state ``name``."""
        return math.prod(self.state_shape(name)) * self.state(name).dtype.itemsize


def _by_group(components: Sequence[Component], groups: Mapping[str, Sequence[int]]) -> list[Component]:
    """One of ``components`` for the layers of each group."""
    if not isinstance(groups, Mapping) or not groups:
        raise LayoutMismatch(f"groups={groups!r:.80} is not allowed: give a mapping of layer groups to layer ids")
    named = [layer for group in groups for layer in layer_ids(f"groups[{group!r:.80}]", groups[group])]
    layer_ids("groups, all together,", named)
    return [
        replace(component, name=f"{component.name}.{group}", layers=layers, group=group)
        for group, layers in groups.items()
        for component in components
    ]


def _members(field: str, given: Iterable[_Named], kind: type[_Named]) -> tuple[_Named, ...]:
    if not isinstance(given, Iterable):
        raise LayoutMismatch(f"{field}={given!r} is not allowed: give a sequence of torchkv.{kind.__name__} objects")
    members = tuple(given)
    if len(members) > MAX_COMPONENTS:
        raise LayoutMismatch(f"{field} has {len(members)} entries: at most {MAX_COMPONENTS} are allowed")
    seen: set[str] = set()
    for member in members:
        if not isinstance(member, kind):
            raise LayoutMismatch(f"{field} holds {member!r}: give torchkv.{kind.__name__} objects")
        if member.name in seen:
            raise LayoutMismatch(f"{field} names {member.name!r} twice: give each its own name")
        seen.add(member.name)
    return members


def _windows(given: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    if not isinstance(given, Mapping):
        raise LayoutMismatch(f"windows={given!r:.80} is not allowed: give a mapping of layer ids to tokens")
    if given:
        layer_ids("windows, the layer ids", given)  # first of all: checks that they are few, in range and distinct
    pairs = (
        (operator.index(layer), integer(f"windows, layer {layer}: tokens", tokens, 1, MAX_WINDOW))
        for layer, tokens in given.items()
    )
    return tuple(sorted(pairs))


def _find(kind: str, name: str, members: tuple[_Named, ...]) -> _Named:
    for member in members:
        if member.name == name:
            return member
    known = ", ".join(member.name for member in members) or "none"
    raise LayoutMismatch(f"this layout has no {kind} {name!r} (it has: {known}); use one of those names")


def first_difference(a: KVLayout, b: KVLayout) -> tuple[str, Any, Any] | None:
    """The first field that makes two layouts incompatible, as (field, value in a, value in b), or None.

    Unlike dtypes of a component are no difference where either side accepts the other's.
    """
    if a.num_layers != b.num_layers:
        return "num_layers", a.num_layers, b.num_layers
    small, large = sorted((a.page_size, b.page_size))
    if large % small:
        return "page_size (one must divide the other)", a.page_size, b.page_size
    for kind, ours, theirs in (("component", a.components, b.components), ("state", a.states, b.states)):
        difference = _member_difference(kind, ours, theirs)
        if difference is not None:
            return difference
    return _window_difference(a, b) or _dtype_difference(a, b)


def first_refusal(writer: KVLayout, reader: KVLayout) -> tuple[str, torch.dtype, torch.dtype] | None:
    """The first component whose dtype in ``writer`` ``reader`` does not accept: (name, writer's dtype, reader's).

    None if pages of ``writer`` can go to ``reader``, as they are or converted.
    """
    for component in reader.components:
        for own in writer.components:
            if own.name == component.name and own.dtype not in (component.dtype, *component.accept):
                return component.name, own.dtype, component.dtype
    return None


def _dtype_difference(a: KVLayout, b: KVLayout) -> tuple[str, Any, Any] | None:
    """The dtype of the first component of which pages can go neither way, as in `first_difference`."""
    refused = first_refusal(a, b)
    if refused is None or first_refusal(b, a) is None:
        return None
    name, mine, other = refused
    return f"component {name!r}: dtype", mine, other


def _window_difference(a: KVLayout, b: KVLayout) -> tuple[str, Any, Any] | None:
    """The window of the first layer that both hold and in which it differs, as in `first_difference`."""
    if a.windows == b.windows:
        return None
    for layer in sorted(set(a.layers) & set(b.layers)):
        mine, other = a.window(layer), b.window(layer)
        if mine != other:
            return f"window of layer {layer}", mine, other
    return None


def _member_difference(
    kind: str, ours: Sequence[Component | State], theirs: Sequence[Component | State]
) -> tuple[str, Any, Any] | None:
    names_a, names_b = sorted(member.name for member in ours), sorted(member.name for member in theirs)
    if names_a != names_b:
        return f"{kind} names", names_a, names_b
    by_name = {member.name: member for member in theirs}
    # Dtypes of components: see `first_refusal`.
    own = ("heads", "dim", "sharded") if kind == "component" else ("shape", "dtype", "shard_dim", "groups")
    for member in ours:
        for field in (*own, "group"):
            mine, other = getattr(member, field), getattr(by_name[member.name], field)
            if mine != other:
                return f"{kind} {member.name!r}: {field}", mine, other
    return None


def check_compatible(a: KVLayout, b: KVLayout, *, rank_a: int, rank_b: int) -> None:
    """Raises `LayoutMismatch`, naming both ranks, the field and both values, if pages cannot move between the layouts.

    These must agree: names, global sizes, dtypes, sharding and layer groups of components and states, ``num_layers``,
    and the windows of layers that both hold. One page size must divide the other. ``tp_rank``, ``tp_size``, ``layers``
    and ``order`` may differ, and dtypes of components where at least one of the two sides accepts those of the other.
    """
    difference = first_difference(a, b)
    if difference is not None:
        field, value_a, value_b = difference
        advice = "register layouts of the same model, or put ranks that never talk to each other in separate groups"
        if field.startswith("component") and field.endswith("dtype"):
            advice = f"{_accept_advice(value_a, value_b, rank_a, rank_b)}; {advice}"
        raise LayoutMismatch(
            f"the layouts of rank {rank_a} and rank {rank_b} cannot be reconciled: {field} is {value_a!r} on "
            f"rank {rank_a} and {value_b!r} on rank {rank_b}; {advice}"
        )


def _accept_advice(ours: torch.dtype, theirs: torch.dtype, rank_a: int, rank_b: int) -> str:
    if (ours, theirs) not in CONVERSIONS:  # which has both directions
        return f"there is no conversion between {ours} and {theirs}"
    return (
        f"to have pages converted on their way, give the receiver's component accept=({ours},) if that is rank "
        f"{rank_b}, accept=({theirs},) if it is rank {rank_a}"
    )
