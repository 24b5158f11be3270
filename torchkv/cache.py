"""`KVCache`: the tensors that hold one rank's pages and state slots, and where each of them lies."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from torchkv.cuda import ipc
from torchkv.errors import LayoutMismatch, TransportUnavailable
from torchkv.host import shared_memory
from torchkv.layout.component import integer
from torchkv.layout.conversion import GivenScales, check_scales
from torchkv.layout.layer_groups import Space
from torchkv.layout.layout import KVLayout
from torchkv.layout.page_ranges import PageRange, page_for_page, shared_pages

__all__ = ["KVCache", "Placement"]

PAGE_ALIGN = 4096
MOST = (1 << 31) - 1  # pages or slots
NOTHING = (
    "nothing to hold: no layer of this rank has a component, and there is no slot for state; give num_slots, or "
    "states=, or call register(None) on a rank whose layers have neither"
)

_T = TypeVar("_T")


class Allocator(Protocol):
    """What ``KVCache.empty(group=)`` needs of a group, such as a `KVProcessGroup`."""

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """A uint8 tensor ``[nbytes]`` in the memory that suits the group's transport best."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one component or state of one layer lies: page p begins at byte ``offset + p * page_stride`` of a storage.

    storage: position in `KVCache.storages`. The pages of a state are its slots. num_pages: number of pages or slots.
    """

    storage: int
    offset: int
    page_stride: int
    num_pages: int


class KVCache:
    """The paged KV memory of one rank.

    ``cache[name][i]`` is the tensor ``[num_pages, *layout.page_shape(name)]`` of component ``name`` in layer
    ``layout.layers[i]``, or None if that layer has no such component. ``cache.state(name)[i]`` is the tensor
    ``[num_slots, *layout.state_shape(name)]`` of a state, or None.

    storages: one uint8 tensor over each distinct storage. placements: (component or state, global layer id) ->
    `Placement`. pools: (layer group, or None; whether its state slots are meant) -> a number that is the same for those
    whose pages or slots of one id share bytes, see `torchkv.protocol.receiving.leases`. scales: see `KVCache.__init__`.
    """

    def __init__(
        self,
        layout: KVLayout,
        tensors: Mapping[str, Sequence[torch.Tensor | None]],
        *,
        states: Mapping[str, Sequence[torch.Tensor | None]] | None = None,
        num_pages: int | None = None,
        scales: GivenScales | None = None,
    ) -> None:
        """Adopts an engine's own tensors, without copying them.

        tensors, states: by name, one tensor for each of ``layout.layers``, or None. Each page must be contiguous; any
        stride between pages is allowed. num_pages: how many page ids the engine has; needed only where no layer of this
        rank has a component, so that no tensor shows the number.

        scales: of components that accept other dtypes (`Component`): name -> a number, one for each layer that this
        rank holds of the component, or one for each of these layers and kv heads of this rank, as nested lists or a
        tensor. Default 1.0. They are read once, and are what `torchkv.convert` divides by or multiplies with. Raises
        ``LayoutMismatch`` that names the component, the layer and what differs.
        """
        self.layout = layout
        self.scales = check_scales(layout, scales)
        self._tensors = _checked(
            layout, "component", tensors, {c.name: layout.page_shape(c.name) for c in layout.components}
        )
        self._states = _checked(
            layout, "state", states or {}, {s.name: layout.state_shape(s.name) for s in layout.states}
        )
        held = [t for rows in self._tensors.values() for t in rows if t is not None]
        slots = [t for rows in self._states.values() for t in rows if t is not None]
        if not held and not slots:
            raise LayoutMismatch(NOTHING)
        counts = {int(t.shape[0]) for t in held}
        if num_pages is not None:
            counts.add(integer("num_pages", num_pages, 1, MOST))
        self.num_pages: int = _agree("num_pages", counts or {0})
        self.num_slots: int = _agree("num_slots", {int(t.shape[0]) for t in slots} or {0})
        self.device = torch.device(_agree("device", {str(t.device) for t in held + slots}))
        self.storages: list[torch.Tensor] = []
        self.placements: dict[tuple[str, int], Placement] = {}
        self._place()
        self.pools: dict[Space, int] = self._pool()

    @classmethod
    def empty(
        cls,
        layout: KVLayout,
        num_pages: int,
        device: str | torch.device = "cuda",
        num_slots: int = 0,
        group: Allocator | None = None,
        *,
        scales: GivenScales | None = None,
    ) -> KVCache:
        """A new cache, uninitialised, in memory that peers on the same host can map, to load and store it directly.

        On the host this is one shared-memory segment; on a GPU one block of plain CUDA memory, even if PyTorch itself
        uses expandable segments. group: needed for transports with memory of their own, such as the symmetric heap of
        NVSHMEM; the call is then collective, and every rank allocates as much as the largest cache of any rank needs.
        scales: as of `KVCache`.
        Raises ``LayoutMismatch`` for sizes that are not allowed, ``TransportUnavailable`` if there is no such memory.
        """
        num_pages = integer("num_pages", num_pages, 1, MOST)
        num_slots = integer("num_slots", num_slots, 0, MOST)
        place = as_device(device)
        shapes: list[tuple[str, int, tuple[int, ...], torch.dtype]] = [
            (c.name, layer, (num_pages, *layout.page_shape(c.name)), c.dtype)
            for c in layout.components
            for layer in layout.component_layers(c.name)
        ]
        shapes += [
            (s.name, layer, (num_slots, *layout.state_shape(s.name)), s.dtype)
            for s in layout.states
            for layer in layout.state_layers(s.name)
            if num_slots
        ]
        if not shapes:
            raise LayoutMismatch(NOTHING)
        sizes = [-(-math.prod(shape) * dtype.itemsize // PAGE_ALIGN) * PAGE_ALIGN for *_, shape, dtype in shapes]
        pool = allocate(sum(sizes), place) if group is None else group.allocate(sum(sizes), place)
        found: dict[tuple[str, int], torch.Tensor] = {}
        start = 0
        for (name, layer, shape, dtype), size in zip(shapes, sizes, strict=True):
            nbytes = math.prod(shape) * dtype.itemsize
            found[name, layer] = pool[start : start + nbytes].view(dtype).view(shape)
            start += size
        tensors = {c.name: [found.get((c.name, layer)) for layer in layout.layers] for c in layout.components}
        states = {s.name: [found.get((s.name, layer)) for layer in layout.layers] for s in layout.states if num_slots}
        made = cls(layout, tensors, states=states, scales=scales)
        # Also if no layer of this rank has pages, or state: all pipeline stages are given the same page ids and slots.
        made.num_pages, made.num_slots = num_pages, num_slots
        return made

    @classmethod
    def from_pointers(
        cls,
        layout: KVLayout,
        pointers: Mapping[str, Sequence[int | None]],
        num_pages: int,
        device: str | torch.device = "cuda",
        *,
        num_slots: int = 0,
        strides: Mapping[str, int] | None = None,
        scales: GivenScales | None = None,
    ) -> KVCache:
        """Adopts memory of an engine that tells addresses, not tensors. It must stay allocated while the cache is used.

        pointers: by name of a component or state, the address of page or slot 0 in each of ``layout.layers``, or None.
        strides: bytes from one page, or slot, to the next, by name; by default they lie side by side. scales: as of
        `KVCache`. Raises ``LayoutMismatch`` for what contradicts the layout, ``TransportUnavailable`` for memory of
        another device.
        """
        counts = dict.fromkeys((c.name for c in layout.components), integer("num_pages", num_pages, 1, MOST))
        counts |= dict.fromkeys((s.name for s in layout.states), integer("num_slots", num_slots, 0, MOST))
        if unknown := sorted((pointers.keys() | (strides or {}).keys()) - counts.keys()):
            raise LayoutMismatch(f"the layout has {sorted(counts)}; unknown {unknown}")
        place = as_device(device)
        found: dict[str, list[torch.Tensor | None]] = {}
        for name, addresses in pointers.items():
            is_state = name in {state.name for state in layout.states}
            item = layout.state(name) if is_state else layout.component(name)
            shape = layout.state_shape(name) if is_state else layout.page_shape(name)
            nbytes = math.prod(shape) * item.dtype.itemsize
            stride = integer(f"strides[{name!r}]", (strides or {}).get(name, nbytes), nbytes, MOST)
            found[name] = [
                None if address is None else _adopt(name, address, (counts[name], *shape), item.dtype, stride, place)
                for address in addresses
            ]
        tensors = {c.name: found[c.name] for c in layout.components if c.name in found}
        states = {s.name: found[s.name] for s in layout.states if s.name in found}
        return cls(layout, tensors, states=states, num_pages=num_pages, scales=scales)

    def __getitem__(self, component: str) -> list[torch.Tensor | None]:
        """The tensors of one component. Raises ``LayoutMismatch``."""
        if component not in self._tensors:
            raise LayoutMismatch(f"this cache has no component {component!r}; it has {', '.join(self._tensors)}")
        return self._tensors[component]

    @property
    def k(self) -> list[torch.Tensor | None]:
        """The tensors of component ``"k"``."""
        return self["k"]

    @property
    def v(self) -> list[torch.Tensor | None]:
        """The tensors of component ``"v"``."""
        return self["v"]

    def state(self, name: str) -> list[torch.Tensor | None]:
        """The tensors of state ``name``. Raises ``LayoutMismatch``."""
        if name not in self._states:
            raise LayoutMismatch(f"this cache has no state {name!r}; it has {', '.join(self._states) or 'none'}")
        return self._states[name]

    @property
    def nbytes(self) -> int:
        """Bytes of all storages."""
        return sum(storage.nbytes for storage in self.storages)

    def _place(self) -> None:
        """Fills ``storages`` and ``placements``."""
        index: dict[int, int] = {}
        for name, tensors in (*self._tensors.items(), *self._states.items()):
            for layer, tensor in zip(self.layout.layers, tensors, strict=True):
                if tensor is None:
                    continue
                storage = tensor.untyped_storage()
                base = storage.data_ptr()
                position = index.setdefault(base, len(self.storages))
                if position == len(self.storages):
                    self.storages.append(_whole(storage))
                elif storage.nbytes() > self.storages[position].nbytes:
                    # Two storages may begin at the same address, as slices of a numpy array do. Keep the longer one.
                    self.storages[position] = _whole(storage)
                self.placements[name, layer] = Placement(
                    position,
                    tensor.data_ptr() - base,
                    tensor.stride(0) * tensor.element_size(),
                    num_pages=int(tensor.shape[0]),
                )

    def _ranges(self) -> list[tuple[PageRange, str, Space]]:
        """The pages, or slots, of each component or state and layer: where, what in words, and what numbers them."""
        layout = self.layout
        spaces: dict[str, Space] = {c.name: (c.group, False) for c in layout.components}
        spaces |= {s.name: (s.group, True) for s in layout.states}
        ranges: list[tuple[PageRange, str, Space]] = []
        for name, tensors in (*self._tensors.items(), *self._states.items()):
            for layer, tensor in zip(layout.layers, tensors, strict=True):
                if tensor is not None:
                    size = tensor.element_size()
                    shape = tensor.data_ptr(), tensor.stride(0) * size, tensor[0].numel() * size, len(tensor)
                    ranges.append((PageRange(*shape), f"{name!r} of layer {layer}", spaces[name]))
        return ranges

    def _pool(self) -> dict[Space, int]:
        """Which layer groups share their memory, page for page: those have one pool.

        Raises ``LayoutMismatch`` if pages of two layers share bytes otherwise: a page of one would overwrite that of
        another. Layers may share all pages, id by id, as those of models do that compute keys and values once for
        several; so may layer groups, as of engines that take the pages of all groups from one block of memory.
        """
        spaces: list[Space] = [(g, slots) for g in self.layout.groups or (None,) for slots in (False, True)]
        pools = {space: pool for pool, space in enumerate(spaces)}
        ranges = sorted(self._ranges(), key=lambda each: each[0])
        for i, (one, here, mine) in enumerate(ranges):
            for other, there, their in ranges[i + 1 :]:
                if other.start >= one.end:
                    break
                grouped = mine != their and mine[0] is not None
                if (other == one and not grouped) or (found := shared_pages(one, other)) is None:
                    continue
                if not grouped or not page_for_page(one, other):
                    raise LayoutMismatch(
                        f"page {found[0]} of {here} and page {found[1]} of {there} share bytes; give each layer memory "
                        "of its own, or layers that share their pages the same tensor"
                    )
                kept, gone = sorted((pools[mine], pools[their]))
                pools = {space: kept if pool == gone else pool for space, pool in pools.items()}
        numbers = {pool: number for number, pool in enumerate(sorted(set(pools.values())))}
        return {space: numbers[pool] for space, pool in pools.items()}

    def pool_ranges(self) -> dict[int, list[PageRange]]:
        """Where the pages and slots of each pool lie."""
        ranges: dict[int, list[PageRange]] = {pool: [] for pool in self.pools.values()}
        for where, _, space in self._ranges():
            ranges[self.pools[space]].append(where)
        return ranges


def as_device(device: str | torch.device) -> torch.device:
    """``device`` with its index. Raises ``TransportUnavailable`` if this machine has no such device."""
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise TransportUnavailable(f"device {device!r}: {error}") from error
    if place.type == "cpu":
        return torch.device("cpu")
    if place.type != "cuda" or not torch.cuda.is_available():
        raise TransportUnavailable(f"there is no device {str(device)!r} here; pass device='cpu', or run on a GPU")
    return torch.device("cuda", torch.cuda.current_device() if place.index is None else place.index)


def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory that peers on the same host can map: uint8 ``[nbytes]``. Raises ``TransportUnavailable``."""
    return shared_memory.allocate(nbytes) if device.type == "cpu" else ipc.allocate(nbytes, device)


def _adopt(
    name: str, address: int, shape: tuple[int, ...], dtype: torch.dtype, stride: int, device: torch.device
) -> torch.Tensor:
    """Pages of this shape, [number of pages, *page], from ``address`` on, ``stride`` bytes apart."""
    integer(f"pointers[{name!r}]", address, 1, (1 << 63) - 1)
    if address % dtype.itemsize or stride % dtype.itemsize:
        raise LayoutMismatch(
            f"{name!r}: address {address:#x} and stride {stride} must be multiples of {dtype.itemsize}, of {dtype}"
        )
    page = math.prod(shape[1:])
    nbytes = (shape[0] - 1) * stride + page * dtype.itemsize if shape[0] else 0
    if nbytes == 0:
        raise LayoutMismatch(f"{name!r}: there is nothing at address {address:#x}; give num_slots")
    if device.type == "cpu":
        memory = torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)
    else:
        memory = ipc.adopt(address, nbytes, device)
    inner = torch.empty(shape[1:], device="meta").stride()
    return memory.view(dtype).as_strided(shape, (stride // dtype.itemsize, *inner))


def _whole(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage as one uint8 tensor."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))


def _agree(field: str, values: set[_T]) -> _T:
    if len(values) != 1:
        raise LayoutMismatch(f"the tensors of one cache must agree on {field}, found {sorted(map(str, values))}")
    return next(iter(values))


def _checked(
    layout: KVLayout,
    kind: str,
    given: Mapping[str, Sequence[torch.Tensor | None]],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, list[torch.Tensor | None]]:
    """A copy of ``given``, the tensors of all components or states, checked against the layout.

    kind: ``component`` or ``state``. shapes: of a page or slot, by name. Raises ``LayoutMismatch``.
    """
    if not isinstance(given, Mapping):
        raise LayoutMismatch(f"the {kind}s are a {type(given).__name__}; give a mapping from names to lists of tensors")
    missing, unknown = sorted(shapes.keys() - given.keys()), sorted(given.keys() - shapes.keys())
    if unknown or (missing and not (kind == "state" and not given)):
        raise LayoutMismatch(f"the layout has {kind}s {sorted(shapes)}; missing {missing}, unknown {unknown}")
    checked: dict[str, list[torch.Tensor | None]] = {}
    for name, rows in given.items():
        if len(rows) != len(layout.layers):
            raise LayoutMismatch(
                f"{kind} {name!r}: {len(rows)} tensors for {len(layout.layers)} layers; "
                f"give None where a layer has none"
            )
        item = layout.component(name) if kind == "component" else layout.state(name)
        for layer, tensor in zip(layout.layers, rows, strict=True):
            has = item.layers is None or layer in item.layers
            where = f"{kind} {name!r} of layer {layer}"
            if (tensor is not None) != has:
                raise LayoutMismatch(
                    f"{where}: the layout says it {'exists' if has else 'does not exist'}, the tensors disagree"
                )
            if tensor is not None:
                _check_tensor(where, tensor, shapes[name], item.dtype)
        checked[name] = list(rows)
    return checked


def _check_tensor(where: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise LayoutMismatch(f"{where}: this is a {type(tensor).__name__}; give a torch.Tensor, or None")
    if tensor.dtype != dtype:
        raise LayoutMismatch(f"{where}: dtype {tensor.dtype}, the layout says {dtype}")
    if tensor.dim() != len(shape) + 1 or tuple(tensor.shape[1:]) != shape or tensor.shape[0] == 0:
        raise LayoutMismatch(
            f"{where}: shape {tuple(tensor.shape)}, expected (number of pages, {', '.join(map(str, shape))})"
        )
    if not tensor[0].is_contiguous():
        raise LayoutMismatch(f"{where}: a page has strides {tensor.stride()[1:]}; each page must be contiguous")
    if tensor.shape[0] > 1 and tensor.stride(0) < math.prod(shape):
        raise LayoutMismatch(
            f"{where}: page stride {tensor.stride(0)} is less than a page of {math.prod(shape)} elements"
        )
