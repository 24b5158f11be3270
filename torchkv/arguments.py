"""Checks of what callers pass: each returns the value in its plain form or says what is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from torchkv.compiled import compiled_with_gil
from torchkv.errors import PageOutOfRange, ProtocolError, TransportUnavailable
from torchkv.layout import KVLayout
from torchkv.transport import Int64Array
from torchkv.wire import MAX_AUX, MAX_PAGES, MAX_REQUEST_BYTES

if TYPE_CHECKING:
    from torchkv.engine import Event

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
    "warm_up",
]

Pages = Sequence[int] | npt.NDArray[np.integer] | torch.Tensor
Layers = int | Sequence[int] | None

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
    plain = type(pages) is np.ndarray and pages.dtype == np.int64 and pages.ndim == 1
    array: Int64Array = pages if plain else _as_int64(pages, what)  # type: ignore[assignment]  # just checked
    if len(array) > MAX_PAGES:
        raise ProtocolError(f"{what}: {len(array)} pages in one call, the limit is {MAX_PAGES}; send in chunks")
    # Not astype or copy: for more than 500 elements numpy lets go of the GIL, the progress thread takes it, and the
    # caller waits to get it back.
    ids: Int64Array = np.frombuffer(array.tobytes(), dtype=np.int64)
    bad = first_outside(ids, num_pages)
    if bad >= 0:
        raise PageOutOfRange(f"{what}: page {ids[bad]} is outside this cache's [0, {num_pages})")
    return ids


def _as_int64(pages: Pages, what: str) -> Int64Array:
    if isinstance(pages, torch.Tensor):
        if pages.device.type != "cpu":
            raise TransportUnavailable(f"{what}: page ids on {pages.device}; this version takes them on the host")
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
def first_outside(ids: Int64Array, limit: int) -> int:
    """The position of the first id outside [0, limit), or -1. Compiled for the same reason."""
    for i in range(len(ids)):
        if ids[i] < 0 or ids[i] >= limit:
            return i
    return -1


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
    if not isinstance(aux, bytes | bytearray | memoryview):
        raise ProtocolError(f"{what}: aux is a {type(aux).__name__}; give bytes")
    if len(bytes(aux)) > MAX_AUX:
        raise ProtocolError(
            f"{what}: aux of {len(bytes(aux))} bytes, the limit is {MAX_AUX}; send the rest another way"
        )
    return bytes(aux)


def _span(layers: tuple[int, ...]) -> str:
    if len(layers) > 1 and layers == tuple(range(layers[0], layers[-1] + 1)):
        return f"layers {layers[0]} to {layers[-1]}"
    return f"layers {list(layers)}"
