"""Checks of what callers pass: each returns the value in its plain form or says what is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from torchkv.compiled import compiled_with_gil
from torchkv.devicepages import DevicePages
from torchkv.errors import PageOutOfRange, ProtocolError
from torchkv.layout import KVLayout
from torchkv.transport import Int64Array
from torchkv.wire import MAX_AUX, MAX_PAGES, MAX_REQUEST_BYTES

if TYPE_CHECKING:
    from torchkv.device import Device
    from torchkv.mover import Event

__all__ = [
    "Layers",
    "Pages",
    "Peers",
    "as_aux",
    "as_count",
    "as_event",
    "as_layers",
    "as_pages",
    "as_request",
    "as_send_pages",
    "check_one_layer",
    "warm_up",
]

Pages = Sequence[int] | npt.NDArray[np.integer] | torch.Tensor
Layers = int | Sequence[int] | None

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_INT64 = np.dtype(np.int64)
_INT64_MAX = (1 << 63) - 1
Peers = int | str | Sequence[int]


def as_request(request: str) -> str:
    try:
        size = len(request.encode())
    except (AttributeError, UnicodeEncodeError) as error:
        raise ProtocolError(f"request {request!r} is no valid name: {error}; name requests with a str") from error
    if not 1 <= size <= MAX_REQUEST_BYTES:
        raise ProtocolError(f"request name of {size} bytes in UTF-8; it must have 1 to {MAX_REQUEST_BYTES}")
    return request


def as_pages(pages: Pages, *, num_pages: int, what: str) -> Int64Array:
    """Page ids as a fresh int64 array [n], each in [0, num_pages). Copied, so the caller may reuse its own.

    Raises ``ProtocolError`` for a wrong type, dtype or shape, ``PageOutOfRange`` for a wrong id.
    """
    # The common case first: this runs on the caller's critical path.
    if type(pages) is torch.Tensor and pages.dtype is torch.int64 and pages.is_cpu and pages.layout is torch.strided:
        pages = pages.numpy()
    plain = type(pages) is np.ndarray and pages.dtype is _INT64 and pages.ndim == 1 and pages.flags.carray
    array: Int64Array = pages if plain else _as_int64(pages, what)  # type: ignore[assignment]  # just checked
    if len(array) > MAX_PAGES:
        raise ProtocolError(f"{what}: {len(array)} pages in one call, the limit is {MAX_PAGES}; send in chunks")
    ids: Int64Array = np.empty(len(array), dtype=_INT64)
    if not copy_ids(array, ids, num_pages):
        bad = ids[(ids < 0) | (ids >= num_pages)]
        hint = "" if num_pages else "; its layers have no pages: say how many there are by KVCache(num_pages=)"
        raise PageOutOfRange(f"{what}: page {bad[0]} is outside this cache's [0, {num_pages}){hint}")
    return ids


def as_send_pages(pages: Pages, *, num_pages: int, device: Device, what: str) -> Int64Array | DevicePages:
    """The same; ids in a CUDA tensor stay there, where the cache does (``device``), and are checked when they are read.

    Raises ``ProtocolError`` also for ids on another GPU than the cache.
    """
    if type(pages) is not torch.Tensor or not pages.is_cuda:
        return as_pages(pages, num_pages=num_pages, what=what)
    if pages.device.index != device.index:
        raise ProtocolError(f"{what}: pages is on {pages.device}, the cache on cuda:{device.index}; move the ids there")
    if pages.dim() != 1 or pages.dtype not in _INTEGERS:
        raise ProtocolError(f"{what}: pages is a tensor {tuple(pages.shape)} of {pages.dtype}; give int64 [n]")
    if len(pages) > MAX_PAGES:
        raise ProtocolError(f"{what}: {len(pages)} pages in one call, the limit is {MAX_PAGES}; send in chunks")
    # Nothing is enqueued for what is int64 and contiguous already; else the event is recorded behind the conversion.
    ids = pages.to(torch.int64).contiguous()
    return DevicePages(ids, device.record_gate())


def _as_int64(pages: Pages, what: str) -> Int64Array:
    if isinstance(pages, torch.Tensor):
        if pages.device.type != "cpu":
            # Only receivers come here: what they grant must be known, and leased, in the call.
            pages = pages.cpu()
        if (pages.numel() and (pages.is_floating_point() or pages.is_complex())) or pages.layout is not torch.strided:
            raise ProtocolError(f"{what}: pages is a {pages.layout} tensor of {pages.dtype}; give integers")
        array: npt.NDArray[np.generic] = pages.numpy()
    elif isinstance(pages, np.ndarray):
        array = pages
    elif isinstance(pages, str | bytes) or not isinstance(pages, Sequence):
        raise ProtocolError(
            f"{what}: pages is a {type(pages).__name__}; give a sequence, numpy array or tensor of ints"
        )
    else:
        try:
            array = np.asarray(pages) if len(pages) else np.zeros(0, dtype=np.int64)
        except (TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(f"{what}: pages cannot be read as integers: {error}") from error
    if array.ndim != 1:
        raise ProtocolError(f"{what}: pages has shape {array.shape}; give one dimension")
    if not len(array):
        return np.zeros(0, dtype=np.int64)  # an empty array is of floats unless it is told otherwise
    if array.dtype.kind not in "iu":
        raise ProtocolError(f"{what}: pages has dtype {array.dtype}; give integers")
    if array.dtype.kind == "u" and len(array) and int(array.max()) > _INT64_MAX:
        raise PageOutOfRange(f"{what}: page {array.max()} is outside every cache; page ids are int64")
    return array.astype(np.int64)


@compiled_with_gil
def copy_ids(source: Int64Array, target: Int64Array, limit: int) -> bool:
    """Copies all ids; whether all lie in [0, limit).

    Compiled, because numpy lets go of the GIL for more than 500 elements: the progress thread takes it, and the
    caller waits to get it back. Without a branch in the loop, so that it becomes vector instructions.
    """
    outside = np.int64(0)  # its sign: that of any difference below zero
    for i in range(len(source)):
        page = source[i]
        target[i] = page
        outside |= page | (limit - 1 - page)
    return bool(outside >= 0)


def warm_up() -> None:
    """Compiles, or loads from disk, what the first verb would otherwise wait for."""
    as_pages(np.zeros(1, dtype=np.int64), num_pages=1, what="warm-up")


def as_layers(layers: Layers, layout: KVLayout, *, what: str) -> tuple[int, ...]:
    """Global layer ids held here, ascending. Raises ``ProtocolError`` for one that this rank does not hold."""
    if layers is None:
        return layout.layers
    if type(layers) is int and layers in layout.layers:
        return (layers,)
    if not isinstance(layers, int | np.integer | Sequence | np.ndarray):
        raise ProtocolError(f"{what}: layers={layers!r:.80} names no layer; this rank holds {_span(layout.layers)}")
    if isinstance(layers, int | np.integer):
        given: tuple[Any, ...] = (layers,)
    else:
        given = tuple(layers.ravel() if isinstance(layers, np.ndarray) else layers)
    held = set(layout.layers)
    for layer in given:
        if isinstance(layer, bool) or not isinstance(layer, int | np.integer) or layer not in held:
            raise ProtocolError(f"{what}: layer {layer!r} is not held by this rank, which holds {_span(layout.layers)}")
    return tuple(sorted({int(layer) for layer in given}))


def check_one_layer(verb: str, request: str, layer: object) -> None:
    """Raises ``ProtocolError`` unless ``layer`` is one number; `as_layers` says whether it is held."""
    if type(layer) is not int and (isinstance(layer, bool) or not hasattr(layer, "__index__")):
        raise ProtocolError(f"{verb}({request!r}): layer={layer!r} must be one global layer id")


def as_count(value: int, *, what: str, name: str) -> int:
    if type(value) is int and 0 <= value < 1 << 40:
        return value
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < 1 << 40:
        raise ProtocolError(f"{what}: {name}={value!r} must be an integer of at least 0")
    return int(value)


def as_event(event: object | None, *, what: str) -> Event | None:
    if event is not None and not callable(getattr(event, "query", None)):
        raise ProtocolError(f"{what}: event is a {type(event).__name__} without a query() method")
    return event  # type: ignore[return-value]  # just checked


def as_aux(aux: bytes, *, what: str) -> bytes:
    if not isinstance(aux, (bytes, bytearray, memoryview)):
        raise ProtocolError(f"{what}: aux is a {type(aux).__name__}; give bytes")
    data = bytes(aux)
    if len(data) > MAX_AUX:
        raise ProtocolError(f"{what}: aux of {len(data)} bytes, the limit is {MAX_AUX}; send the rest another way")
    return data


def _span(layers: tuple[int, ...]) -> str:
    if len(layers) > 1 and layers == tuple(range(layers[0], layers[-1] + 1)):
        return f"layers {layers[0]} to {layers[-1]}"
    return f"layers {list(layers)}"
