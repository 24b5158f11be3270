"""The tensors that a KV cache is made of: `Component` (per token) and `State` (per request), and their limits."""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torchkv.errors import LayoutMismatch

__all__ = [
    "CONVERSIONS",
    "DTYPES",
    "DTYPE_NAMES",
    "FP8",
    "Component",
    "Conversion",
    "State",
    "check_nbytes",
    "conversions_text",
    "integer",
    "layer_ids",
]

MAX_LAYERS = 4096  # layers of one rank; bounds the memory that a malicious peer's layout can make this rank allocate
MAX_LAYER_ID = (1 << 20) - 1
MAX_EXTENT = 1 << 20  # heads, dim, tp_size
MAX_STATE_DIMS = 8
MAX_BYTES = 1 << 40  # bytes of one page or one state slot; keeps all byte offsets far below the limit of int64

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]{0,63}")

# All dtypes that a peer may name. Each has a fixed number of bytes per element.
_DTYPE_LIST = (
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
    torch.complex32,
    torch.complex64,
    torch.complex128,
)
DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in _DTYPE_LIST}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

FP8 = torch.float8_e4m3fn
_HALVES = (torch.bfloat16, torch.float16)

# (dtype of the sender, dtype of the receiver): all conversions that there are.
CONVERSIONS = frozenset(
    {
        *((half, FP8) for half in _HALVES),
        *((FP8, half) for half in _HALVES),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float16),
    }
)


def integer(field: str, value: Any, low: int, high: int) -> int:
    """``value`` as a Python int. field: its name in the error. Raises `LayoutMismatch` unless low <= value <= high."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or not low <= number <= high:
        raise LayoutMismatch(f"{field}={value!r:.80} is not allowed: give an int from {low} to {high}")
    return number


def _identifier(field: str, value: Any) -> None:
    if not isinstance(value, str) or _NAME.fullmatch(value) is None:
        raise LayoutMismatch(
            f"{field}={value!r:.80} is not allowed: give 1 to 64 ASCII letters, digits, '_', '-' or '.', "
            "not starting with a digit"
        )


def _known_dtype(field: str, value: Any) -> None:
    if not isinstance(value, torch.dtype) or value not in DTYPE_NAMES:
        raise LayoutMismatch(f"{field}={value!r:.80} is not allowed: give one of torch.{', torch.'.join(DTYPES)}")


def _accepted(where: str, accept: Any, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """``accept`` of a component of ``dtype``, without repetitions and ``dtype`` itself, in a fixed order."""
    if not isinstance(accept, Sequence) or isinstance(accept, str):
        raise LayoutMismatch(f"{where}accept={accept!r:.80} is not allowed: give a sequence of dtypes")
    for each in accept:
        if not isinstance(each, torch.dtype) or (each is not dtype and (each, dtype) not in CONVERSIONS):
            raise LayoutMismatch(
                f"{where}accept names {each!r:.80}, from which there is no conversion to {dtype}; {conversions_text()}"
            )
    return tuple(sorted({each for each in accept if each is not dtype}, key=str))


def check_group(where: str, group: Any) -> None:
    """Raises `LayoutMismatch` unless ``group`` is None or may name a layer group."""
    if group is not None:
        _identifier(where + "group", group)


def layer_ids(field: str, layers: Iterable[Any]) -> tuple[int, ...]:
    """``layers`` as ascending Python ints. field: its name in the error.

    Raises `LayoutMismatch` for ids that are out of range or repeated, and for none or more than `MAX_LAYERS`.
    """
    try:
        given = list(itertools.islice(layers, MAX_LAYERS + 1))
    except TypeError:
        raise LayoutMismatch(f"{field}={layers!r:.80} is not allowed: give a sequence of layer ids") from None
    if not 1 <= len(given) <= MAX_LAYERS:
        raise LayoutMismatch(f"{field} names no layer or more than {MAX_LAYERS}: give 1 to {MAX_LAYERS} layer ids")
    ids = sorted(integer(f"{field}[{i}]", layer, 0, MAX_LAYER_ID) for i, layer in enumerate(given))
    for before, after in itertools.pairwise(ids):
        if before == after:
            raise LayoutMismatch(f"{field} names layer {after} twice: give each layer id once")
    return tuple(ids)


def check_nbytes(field: str, nbytes: int) -> None:
    """Raises `LayoutMismatch` if ``nbytes`` exceeds `MAX_BYTES`."""
    if nbytes > MAX_BYTES:
        raise LayoutMismatch(f"{field} takes {nbytes} bytes: at most {MAX_BYTES} are allowed, make it smaller")


class Conversion(NamedTuple):
    """How the elements of a page pair are converted. One pair of dtypes of `CONVERSIONS`.

    src, dst: dtype of the sender's and of the receiver's pages. heads: of the segment. head_elements: elements that lie
    behind one another in the packed order of a pair and belong to one head. So packed element number e belongs to head
    ``e // head_elements % heads``, counted from the segment's first one.
    """

    src: torch.dtype
    dst: torch.dtype
    heads: int
    head_elements: int

    @property
    def wire(self) -> torch.dtype:
        """The dtype in a stage: the narrower one, so that the fewest bytes cross the link."""
        return self.dst if self.by_sender else self.src

    @property
    def by_sender(self) -> bool:
        """Whether the sender converts when it gathers into a stage; otherwise the receiver does when it scatters."""
        return self.dst.itemsize <= self.src.itemsize

    def by_side(self, *, sending: bool) -> bool:
        """Whether the sender, or else the receiver, of a staged transfer is the side that converts."""
        return self.by_sender is sending


def conversions_text() -> str:
    """The supported conversions, as a clause for errors."""
    pairs = sorted(f"{src} to {dst}".replace("torch.", "") for src, dst in CONVERSIONS)
    return f"supported are {', '.join(pairs)}"


@dataclass(frozen=True, slots=True)
class Component:
    """A tensor with one vector per token, kv head and layer: K, V, an MLA latent, indexer keys, scales.

    heads: *global* number of kv heads. dim: elements of one head of one token. sharded: whether the heads are split
    over the tensor-parallel ranks; otherwise every rank holds all of them. layers: global ids of the layers that have
    this component; None: all layers. group: the layer group whose page list names this component's pages, see
    `KVLayout`; layers of one kind in unlike groups are several components. accept: on a receiver, the dtypes of senders
    whose pages it takes besides those of its own dtype; they are converted on their way, see `torchkv.convert`. Raises
    `LayoutMismatch`, also for an ``accept`` from which there is no conversion.
    """

    name: str
    heads: int
    dim: int
    dtype: torch.dtype
    sharded: bool = True
    layers: Sequence[int] | None = None
    group: str | None = None
    accept: Sequence[torch.dtype] = ()

    def __post_init__(self) -> None:
        _identifier("Component.name", self.name)
        where = f"component {self.name!r}: "
        object.__setattr__(self, "heads", integer(where + "heads", self.heads, 1, MAX_EXTENT))
        object.__setattr__(self, "dim", integer(where + "dim", self.dim, 1, MAX_EXTENT))
        _known_dtype(where + "dtype", self.dtype)
        if not isinstance(self.sharded, bool):
            raise LayoutMismatch(f"{where}sharded={self.sharded!r} is not allowed: give True or False")
        if self.layers is not None:
            object.__setattr__(self, "layers", layer_ids(where + "layers", self.layers))
        check_group(where, self.group)
        object.__setattr__(self, "accept", _accepted(where, self.accept, self.dtype))

    @property
    def head_nbytes(self) -> int:
        """Bytes of one head of one token."""
        return self.dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class State:
    """A tensor of fixed size per request, one slot per request and layer: Mamba, GDN, KDA or convolution state.

    shape: *global* shape of one slot. shard_dim: the dimension that is split over the tensor-parallel ranks; None:
    every rank holds all of it. shard_groups: global sizes that sum to ``shape[shard_dim]``; each group is split
    separately, such as q, k and v of a fused convolution state. layers: as in `Component`. group: the layer group whose
    slot this is; each group of a request has a slot of its own. Raises `LayoutMismatch`.
    """

    name: str
    shape: Sequence[int]
    dtype: torch.dtype
    shard_dim: int | None = None
    shard_groups: Sequence[int] | None = None
    layers: Sequence[int] | None = None
    group: str | None = None

    def __post_init__(self) -> None:
        _identifier("State.name", self.name)
        where = f"state {self.name!r}: "
        _known_dtype(where + "dtype", self.dtype)
        object.__setattr__(self, "shape", _extents(where + "shape", self.shape))
        if not 1 <= len(self.shape) <= MAX_STATE_DIMS:
            raise LayoutMismatch(f"{where}shape={self.shape}: give 1 to {MAX_STATE_DIMS} dimensions")
        check_nbytes(where + "one slot", math.prod(self.shape) * self.dtype.itemsize)
        if self.shard_dim is not None:
            dim = integer(where + "shard_dim", self.shard_dim, 0, len(self.shape) - 1)
            object.__setattr__(self, "shard_dim", dim)
        if self.shard_groups is not None:
            self._check_groups(where)
        if self.layers is not None:
            object.__setattr__(self, "layers", layer_ids(where + "layers", self.layers))
        check_group(where, self.group)

    def _check_groups(self, where: str) -> None:
        groups = _extents(where + "shard_groups", self.shard_groups)
        object.__setattr__(self, "shard_groups", groups)
        total = None if self.shard_dim is None else self.shape[self.shard_dim]
        if sum(groups) != total:
            raise LayoutMismatch(
                f"{where}shard_groups={groups} sum to {sum(groups)}: they must sum to shape[shard_dim], {total}"
            )

    @property
    def groups(self) -> tuple[int, ...]:
        """Global sizes along ``shard_dim`` that are split separately; empty if the state is not sharded."""
        if self.shard_dim is None:
            return ()
        return (self.shape[self.shard_dim],) if self.shard_groups is None else tuple(self.shard_groups)


def _extents(field: str, values: Any) -> tuple[int, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise LayoutMismatch(f"{field}={values!r:.80} is not allowed: give a sequence of ints")
    return tuple(integer(f"{field}[{i}]", value, 1, MAX_BYTES) for i, value in enumerate(values))
