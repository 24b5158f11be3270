"""Conversion of pages between dtypes on their way: what it computes, `convert`, and with which `Scales`.

`convert` is the reference: host loops (`torchkv.host.convert_loops`) and GPU kernels compute the same, bit for bit.

Scales are static numbers that the receiver's engine knows, float32, one for each component, layer and local kv head;
they are never computed. On the wire each component has one number, one per layer, or one per layer and head: as few as
say it all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
import torch

from torchkv.arrays import Float32Array
from torchkv.errors import LayoutMismatch, ProtocolError
from torchkv.layout.component import CONVERSIONS, FP8, Component, conversions_text
from torchkv.layout.layout import KVLayout

__all__ = ["GivenScales", "ScaleMetadata", "Scales", "check_scales", "convert", "decode_scales"]

GivenScales: TypeAlias = Mapping[str, float | Sequence[float] | Sequence[Sequence[float]] | torch.Tensor]

FP8_MAX = 448.0  # the largest finite number of `FP8`
MAX_SCALES = 1 << 20  # numbers of one component: bounds what a peer can make this rank allocate


def convert(x: torch.Tensor, dtype: torch.dtype, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
    """What the receiver's pages hold for elements ``x`` of the sender's: a new tensor of ``dtype``, of the same shape.

    scale: of the receiver's cache, rounded to float32; a number, or a tensor that broadcasts against ``x``. With
    ``scale`` as float32 tensor on the device of ``x``, so that the division is a true one on GPUs as well:

    * to ``torch.float8_e4m3fn``: ``(x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)``
    * from ``torch.float8_e4m3fn``: ``(x.float() * scale).to(dtype)``
    * between ``torch.float16`` and ``torch.bfloat16``: ``x.float().to(dtype)``, without a scale

    NaN stays NaN; its sign and payload are not kept everywhere, by PyTorch neither. Raises ``LayoutMismatch`` for
    dtypes between which there is no conversion.
    """
    if (x.dtype, dtype) not in CONVERSIONS:
        raise LayoutMismatch(f"there is no conversion from {x.dtype} to {dtype}; {conversions_text()}")
    factor = torch.as_tensor(scale, dtype=torch.float32, device=x.device)
    if dtype is FP8:
        return (x.float() / factor).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    if x.dtype is FP8:
        return (x.float() * factor).to(dtype)
    return x.float().to(dtype)


class ScaleMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The scales of one component in a rank's registration: little-endian float32, 1, [layers] or [layers, heads]."""

    component: Annotated[str, msgspec.Meta(max_length=256)]
    values: Annotated[bytes, msgspec.Meta(max_length=4 * MAX_SCALES)]


class Scales:
    """The scales of one rank's pages; 1.0 where none were given. Immutable; compared by identity.

    values: component -> float32 ``[its held layers, local heads]``, which must not change.
    """

    def __init__(self, layout: KVLayout | None, values: Mapping[str, Float32Array]) -> None:
        self._layout = layout
        self._values = dict(values)
        self._rows = {
            (name, layer): row
            for name, rows in self._values.items()
            if layout is not None
            for layer, row in zip(layout.component_layers(name), rows, strict=True)
        }

    def of(self, component: str, layer: int, heads: range) -> Float32Array:
        """The scales of these heads (global ids) of a component in a layer: float32 ``[len(heads)]``, contiguous."""
        row = self._rows.get((component, layer))
        if row is None:
            return np.ones(len(heads), np.float32)
        assert self._layout is not None
        first = heads.start - self._layout.component_heads(component).start
        return np.ascontiguousarray(row[first : first + len(heads)])

    def metadata(self) -> list[ScaleMetadata]:
        """What a rank publishes of them."""
        return [ScaleMetadata(name, _fewest(rows).astype("<f4").tobytes()) for name, rows in self._values.items()]


NO_SCALES = Scales(None, {})


def check_scales(layout: KVLayout, given: GivenScales | None) -> Scales:
    """The scales of a cache of ``layout``.

    given: component -> a number, one for each of its layers that ``layout`` holds, or one for each of these layers and
    of the local heads. Raises ``LayoutMismatch`` for other shapes, for numbers that are not finite and greater than 0
    as float32, and for components that no conversion scales.
    """
    if given is None:
        return NO_SCALES
    if not isinstance(given, Mapping):
        raise LayoutMismatch(f"scales={given!r:.80} is not allowed: give a mapping of component names to scales")
    values = {}
    for name, numbers in given.items():
        component = layout.component(name)
        if not any(FP8 in (src, component.dtype) for src in component.accept):
            raise LayoutMismatch(
                f"scales of {name!r} would never be used: the component is {component.dtype} and accepts "
                f"{_names(component)}; name the sender's dtype, as in Component(..., accept=(torch.bfloat16,)), or "
                "leave scales out"
            )
        shape = len(layout.component_layers(name)), len(layout.component_heads(name))
        values[name] = _checked(f"scales[{name!r}]", _array(name, numbers), shape)
    return Scales(layout, values)


def decode_scales(layout: KVLayout, published: Sequence[ScaleMetadata]) -> Scales:
    """The scales that a rank has published. Raises ``ProtocolError`` for what no correct rank publishes."""
    if not published:
        return NO_SCALES
    values = {}
    known = {component.name for component in layout.components}
    for each in published:
        if each.component not in known or each.component in values or len(each.values) % 4:
            raise ProtocolError(f"its published scales of {each.component[:64]!r} do not fit its layout")
        shape = len(layout.component_layers(each.component)), len(layout.component_heads(each.component))
        flat = np.frombuffer(each.values, dtype="<f4").astype(np.float32)
        given = flat[0] if len(flat) == 1 else flat.reshape(shape) if len(flat) == shape[0] * shape[1] else flat
        try:
            values[each.component] = _checked(f"scales of {each.component!r}", np.asarray(given), shape)
        except LayoutMismatch as error:
            raise ProtocolError(f"its published {error}") from None
    return Scales(layout, values)


def _names(component: Component) -> str:
    return ", ".join(map(str, component.accept)) or "no other dtype"


def _array(name: str, numbers: Any) -> Float32Array:
    try:
        given = numbers.detach().cpu().float().numpy() if isinstance(numbers, torch.Tensor) else numbers
        with np.errstate(over="ignore"):  # inf, which is refused
            return np.asarray(given, dtype=np.float64).astype(np.float32)
    except (TypeError, ValueError):
        raise LayoutMismatch(
            f"scales[{name!r}]={numbers!r:.80} is not allowed: give a number, or a list or tensor of numbers"
        ) from None


def _checked(field: str, numbers: Float32Array, shape: tuple[int, int]) -> Float32Array:
    """``numbers`` as float32 ``[layers, heads]``, read-only."""
    if numbers.shape not in ((), shape[:1], shape) or numbers.size > MAX_SCALES:
        raise LayoutMismatch(
            f"{field} has shape {numbers.shape}: give one number, one for each of the {shape[0]} layers, or "
            f"{shape[0]} x {shape[1]}, one for each layer and kv head of this rank"
        )
    bad = numbers[~(np.isfinite(numbers) & (numbers > 0))]
    if bad.size:
        raise LayoutMismatch(f"{field} has {bad.flat[0]}: scales must be finite and greater than 0, as float32")
    # Not copied: a peer's few bytes must not take gigabytes here.
    return np.broadcast_to(numbers[:, None] if numbers.ndim == 1 else numbers, shape)


def _fewest(rows: Float32Array) -> Float32Array:
    """``rows`` as one number, one for each layer, or all, whichever says the same."""
    if rows.size and (rows == rows.flat[0]).all():
        return rows.reshape(-1)[:1]
    return rows[:, 0] if (rows == rows[:, :1]).all() else rows
