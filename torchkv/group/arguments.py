"""Checks of the verbs' arguments: each function returns the value in its plain form, or raises what is wrong with it.

operation: the verb and request as error messages name them, such as ``send_pages('r')``.
"""

from __future__ import annotations

from array import array as array_of
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from torchkv.arrays import Int64Array
from torchkv.cuda.page_ids import DevicePages
from torchkv.errors import KVError, PageOutOfRange, ProtocolError
from torchkv.host.page_id_check import copy_ids
from torchkv.layout.layout import KVLayout
from torchkv.protocol.messages import MAX_AUX, MAX_PAGES, MAX_REQUEST_BYTES

if TYPE_CHECKING:
    from torchkv.engine.source_pages import Event
    from torchkv.kernels.gpu_context import GpuContext

__all__ = [
    "HeldLayers",
    "Layers",
    "Origin",
    "PageIds",
    "Pages",
    "Peers",
    "StateSlot",
    "as_aux",
    "as_count",
    "as_event",
    "as_int64",
    "as_layers",
    "as_origin",
    "as_pages",
    "as_request",
    "as_send_pages",
    "check_one_layer",
    "copyable_pages",
    "plain_pages",
]

PageIds = Sequence[int] | npt.NDArray[np.integer] | torch.Tensor  # [n]
Pages = PageIds | Mapping[str, PageIds]  # by layer group, if the layout has any
StateSlot = int | Mapping[str, int] | None  # by layer group, if several have state
Layers = int | Sequence[int] | None  # global layer ids; None: all of this rank
Peers = int | str | Sequence[int]  # a group rank, an instance name, or group ranks
Origin = Literal["prefix", "prompt"]  # where a sender's pages are counted from


class HeldLayers(tuple[int, ...]):
    """Layers that this rank holds, each once, ascending. Whoever makes one sees to that, so that verbs need not."""

    __slots__ = ()


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_INT64 = np.dtype(np.int64)
_INT64_MAX = (1 << 63) - 1


def as_request(request: str) -> str:
    """A request name: 1 to 1,024 bytes in UTF-8. Raises ``ProtocolError``."""
    try:
        size = len(request.encode())
    except (AttributeError, UnicodeEncodeError) as error:
        raise ProtocolError(f"request {request!r} is no valid name: {error}; name requests with a str") from error
    if not 1 <= size <= MAX_REQUEST_BYTES:
        raise ProtocolError(f"request name of {size} bytes in UTF-8; it must have 1 to {MAX_REQUEST_BYTES}")
    return request


def as_pages(pages: Pages, *, num_pages: int, operation: str) -> Int64Array:
    """Page ids as a new int64 array [n], each in [0, num_pages). A copy: the caller may change its own.

    Raises ``ProtocolError`` for a wrong type, dtype, shape or length, ``PageOutOfRange`` for a wrong id.
    """
    plain = plain_pages(pages)
    array = as_int64(pages, operation) if plain is None else plain
    if len(array) > MAX_PAGES:
        raise ProtocolError(f"{operation}: {len(array)} pages in one call, the limit is {MAX_PAGES}; send in chunks")
    ids: Int64Array = np.empty(len(array), dtype=_INT64) if plain is not None else array  # which is checked in place
    if not copy_ids(array, ids, num_pages):
        bad = ids[(ids < 0) | (ids >= num_pages)]
        hint = "" if num_pages else "; its layers have no pages: give their number with KVCache(num_pages=)"
        raise PageOutOfRange(f"{operation}: page {bad[0]} is outside this cache's [0, {num_pages}){hint}")
    return ids


def plain_pages(pages: Pages) -> Int64Array | None:
    """Page ids that lie in host memory as `as_pages` needs them: the same memory as an array. None for all others."""
    if type(pages) is torch.Tensor and pages.dtype is torch.int64 and pages.is_cpu and pages.layout is torch.strided:
        pages = pages.numpy()
    if type(pages) is not np.ndarray or pages.dtype is not _INT64 or pages.ndim != 1 or len(pages) > MAX_PAGES:
        return None
    return pages if pages.flags.carray else None  # type: ignore[return-value]  # just checked


def copyable_pages(pages: Pages) -> tuple[Int64Array, Int64Array] | None:
    """Page ids of the common types, which nobody has checked, and memory to copy them to: for a list the same.

    None for all others, and if anything is wrong with their type: `as_pages` says what.
    """
    if (given := plain_pages(pages)) is not None:
        return given, np.empty(len(given), dtype=_INT64)
    if type(pages) is not list or len(pages) > MAX_PAGES:
        return None
    try:
        listed = as_int64(pages, "pages")
    except KVError:
        return None
    return listed, listed


def as_send_pages(pages: Pages, *, num_pages: int, gpu: GpuContext, operation: str) -> Int64Array | DevicePages:
    """`as_pages` for a cache on ``gpu``. Ids in a CUDA tensor stay on the GPU, where kernels check them.

    Also raises ``ProtocolError`` for ids on another GPU than the cache.
    """
    if type(pages) is not torch.Tensor or not pages.is_cuda:
        return as_pages(pages, num_pages=num_pages, operation=operation)
    if pages.device.index != gpu.index:
        raise ProtocolError(
            f"{operation}: pages is on {pages.device}, the cache on cuda:{gpu.index}; move the ids there"
        )
    if pages.dim() != 1 or pages.dtype not in _INTEGERS:
        raise ProtocolError(f"{operation}: pages is a tensor {tuple(pages.shape)} of {pages.dtype}; give int64 [n]")
    if len(pages) > MAX_PAGES:
        raise ProtocolError(f"{operation}: {len(pages)} pages in one call, the limit is {MAX_PAGES}; send in chunks")
    # Enqueues nothing for contiguous int64 ids. Otherwise the event is recorded behind the conversion.
    ids = pages.to(torch.int64).contiguous()
    return DevicePages(ids, gpu.record_gate())


def as_int64(pages: Pages, operation: str) -> Int64Array:
    """Page ids of any accepted type as a new int64 array [n]."""
    if type(pages) is list and pages and type(pages[0]) is int:
        try:
            return np.frombuffer(array_of("q", pages), dtype=_INT64)  # in half of numpy's time
        except (TypeError, OverflowError):
            pass  # what is wrong with it, if it is, is said below
    if isinstance(pages, torch.Tensor):
        if pages.device.type not in ("cpu", "cuda"):
            raise ProtocolError(f"{operation}: pages is on {pages.device}; give host memory, or a CUDA tensor")
        if pages.device.type != "cpu":
            # Only recv_pages comes here: it leases the pages in the call, so it waits for the copy.
            pages = pages.cpu()
        if (pages.numel() and (pages.is_floating_point() or pages.is_complex())) or pages.layout is not torch.strided:
            raise ProtocolError(f"{operation}: pages is a {pages.layout} tensor of {pages.dtype}; give integers")
        # An empty tensor may have any type; numpy does not know all of them.
        array: npt.NDArray[np.generic] = (pages if pages.numel() else pages.to(torch.int64)).numpy()
    elif isinstance(pages, np.ndarray):
        array = pages
    elif isinstance(pages, Mapping):
        raise ProtocolError(
            f"{operation}: pages is a mapping, where one page list is meant: of a layout without layer groups, or of "
            "one of them; give a sequence, numpy array or tensor of ints"
        )
    elif isinstance(pages, str | bytes) or not isinstance(pages, Sequence):
        raise ProtocolError(
            f"{operation}: pages is a {type(pages).__name__}; give a sequence, numpy array or tensor of ints"
        )
    else:
        try:
            array = np.asarray(pages) if len(pages) else np.zeros(0, dtype=np.int64)
        except (TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(f"{operation}: pages cannot be read as integers: {error}") from error
    if array.ndim != 1:
        raise ProtocolError(f"{operation}: pages has shape {array.shape}; give one dimension")
    if not len(array):
        return np.zeros(0, dtype=np.int64)  # numpy makes an empty sequence an array of floats
    if array.dtype.kind not in "iu":
        raise ProtocolError(f"{operation}: pages has dtype {array.dtype}; give integers")
    if array.dtype.kind == "u" and len(array) and int(array.max()) > _INT64_MAX:
        raise PageOutOfRange(f"{operation}: page {array.max()} is outside every cache; page ids are int64")
    return array.astype(np.int64)


def as_layers(layers: Layers, layout: KVLayout, *, operation: str) -> tuple[int, ...]:
    """Global layer ids of this rank, ascending. Raises ``ProtocolError`` for a layer that the rank does not hold."""
    if layers is None:
        return layout.layers
    if type(layers) is HeldLayers:
        return layers
    if type(layers) is int and layers in layout.layers:
        return (layers,)
    if not isinstance(layers, int | np.integer | Sequence | np.ndarray):
        raise ProtocolError(
            f"{operation}: layers={layers!r:.80} names no layer; this rank holds {_span(layout.layers)}"
        )
    given: Iterable[Any]
    if isinstance(layers, int | np.integer):
        given = (layers,)
    else:
        given = layers.ravel() if isinstance(layers, np.ndarray) else layers
    held = set(layout.layers)
    found: set[int] = set()
    for layer in given:  # one by one: a range may be longer than any memory
        if isinstance(layer, bool) or not isinstance(layer, int | np.integer) or layer not in held:
            raise ProtocolError(
                f"{operation}: layer {layer!r} is not held by this rank, which holds {_span(layout.layers)}"
            )
        found.add(int(layer))
    return tuple(sorted(found))


def check_one_layer(verb: str, request: str, layer: object) -> None:
    """Raises ``ProtocolError`` unless ``layer`` is one integer. `as_layers` checks whether this rank holds it."""
    if type(layer) is not int and (isinstance(layer, bool) or not hasattr(layer, "__index__")):
        raise ProtocolError(f"{verb}({request!r}): layer={layer!r} must be one global layer id")


def as_count(value: object, *, operation: str, name: str) -> int:
    """An int in [0, 2**40). Raises ``ProtocolError`` with the argument's ``name``."""
    if type(value) is int and 0 <= value < 1 << 40:
        return value
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < 1 << 40:
        raise ProtocolError(f"{operation}: {name}={value!r} must be an integer of at least 0 and less than 2**40")
    return int(value)


def as_origin(origin: str, *, operation: str) -> bool:
    """Whether pages are counted from the beginning of the prompt. Raises ``ProtocolError``."""
    if origin not in ("prefix", "prompt"):
        raise ProtocolError(f"{operation}: origin={origin!r}; give 'prefix' or 'prompt'")
    return origin == "prompt"


def as_event(event: object | None, *, operation: str) -> Event | None:
    """An object with a ``query()`` method, or None. Raises ``ProtocolError``."""
    if event is not None and not callable(getattr(event, "query", None)):
        raise ProtocolError(f"{operation}: event is a {type(event).__name__} without a query() method")
    return event  # type: ignore[return-value]  # just checked


def as_aux(aux: bytes, *, operation: str) -> bytes:
    """At most 64 KiB of bytes. Raises ``ProtocolError``."""
    if not isinstance(aux, (bytes, bytearray, memoryview)):
        raise ProtocolError(f"{operation}: aux is a {type(aux).__name__}; give bytes")
    data = bytes(aux)
    if len(data) > MAX_AUX:
        raise ProtocolError(f"{operation}: aux of {len(data)} bytes, the limit is {MAX_AUX}; send the rest another way")
    return data


def _span(layers: tuple[int, ...]) -> str:
    if len(layers) > 1 and layers == tuple(range(layers[0], layers[-1] + 1)):
        return f"layers {layers[0]} to {layers[-1]}"
    return f"layers {list(layers)}"
