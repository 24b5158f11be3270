"""Checks of what callers pass: each returns the value in its plain form or says what is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from torchkv.errors import PageOutOfRange, ProtocolError, TransportUnavailable
from torchkv.layout import KVLayout
from torchkv.transport import Int64Array
from torchkv.wire import MAX_AUX, MAX_PAGES, MAX_REQUEST_BYTES

if TYPE_CHECKING:
    from torchkv.engine import Event

__all__ = ["Layers", "Pages", "as_aux", "as_count", "as_event", "as_layers", "as_pages", "as_request"]

Pages = Sequence[int] | npt.NDArray[np.integer] | torch.Tensor
Layers = int | Sequence[int] | None


def as_request(request: str) -> str:
    if not isinstance(request, str):
        raise ProtocolError(f"request is a {type(request).__name__}; name requests with a str")
    size = len(request.encode("utf-8", errors="surrogatepass"))
    if not 1 <= size <= MAX_REQUEST_BYTES:
        raise ProtocolError(f"request name of {size} bytes in UTF-8; it must have 1 to {MAX_REQUEST_BYTES}")
    if not request.isprintable() and not _encodable(request):
        raise ProtocolError(f"request name {request!r} is not valid Unicode text")
    return request


def as_pages(pages: Pages, *, num_pages: int, what: str) -> Int64Array:
    """Page ids as a fresh int64 array [n], each in [0, num_pages). Copied, so the caller may reuse its own.

    Raises ``ProtocolError`` for a wrong type, dtype or shape, ``PageOutOfRange`` for a wrong id.
    """
    if isinstance(pages, torch.Tensor):
        if pages.device.type != "cpu":
            raise TransportUnavailable(f"{what}: page ids on {pages.device}; this version takes them on the host")
        array: npt.NDArray[np.generic] = pages.detach().numpy()
    elif isinstance(pages, np.ndarray):
        array = pages
    elif isinstance(pages, str | bytes) or not isinstance(pages, Sequence):
        raise ProtocolError(
            f"{what}: pages is a {type(pages).__name__}; give a sequence, numpy array or tensor of ints"
        )
    else:
        try:
            array = np.asarray(pages)
        except (TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(f"{what}: pages cannot be read as integers: {error}") from error
        if not len(pages):
            array = np.zeros(0, dtype=np.int64)
    if array.ndim != 1:
        raise ProtocolError(f"{what}: pages has shape {array.shape}; give one dimension")
    if array.dtype.kind not in "iu":
        raise ProtocolError(f"{what}: pages has dtype {array.dtype}; give integers")
    if len(array) > MAX_PAGES:
        raise ProtocolError(f"{what}: {len(array)} pages in one call, the limit is {MAX_PAGES}; send in chunks")
    ids = array.astype(np.int64)
    # Unsigned 64-bit ids beyond int64 come out negative, so this sees them too.
    if len(ids) and (ids.min() < 0 or ids.max() >= num_pages):
        bad = array[(ids < 0) | (ids >= num_pages)][0]
        raise PageOutOfRange(f"{what}: page {bad} is outside this cache's [0, {num_pages})")
    return ids


def as_layers(layers: Layers, layout: KVLayout, *, what: str) -> tuple[int, ...]:
    """Global layer ids held here, ascending. Raises ``ProtocolError`` for one that this rank does not hold."""
    if layers is None:
        return layout.layers
    given = (layers,) if isinstance(layers, int | np.integer) else tuple(layers)
    # A set pays off for many layers only; one layer is the common call, on the caller's critical path.
    held = set(layout.layers) if len(given) > 4 else layout.layers
    for layer in given:
        if isinstance(layer, bool) or not isinstance(layer, int | np.integer) or layer not in held:
            raise ProtocolError(f"{what}: layer {layer!r} is not held by this rank, which holds {_span(layout.layers)}")
    return tuple(sorted({int(layer) for layer in given}))


def as_count(value: int, *, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < 1 << 40:
        raise ProtocolError(f"{what}={value!r} must be an integer of at least 0")
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


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _span(layers: tuple[int, ...]) -> str:
    if len(layers) > 1 and layers == tuple(range(layers[0], layers[-1] + 1)):
        return f"layers {layers[0]} to {layers[-1]}"
    return f"layers {list(layers)}"
