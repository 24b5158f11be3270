"""Encodes a `KVLayout` for the exchange in ``register`` and decodes a peer's: typed, versioned msgpack.

A peer is not trusted: lengths, counts and ids are checked before memory is allocated for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import torch

from torchkv.errors import LayoutMismatch, ProtocolError
from torchkv.layout.component import DTYPE_NAMES, DTYPES, MAX_LAYER_ID, MAX_LAYERS, Component, State
from torchkv.layout.layout import KVLayout

__all__ = ["MAX_ENCODED", "decode", "encode"]

MAX_ENCODED = 64 << 10  # bytes
_VERSION = 3


class _WireComponent(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    name: str
    heads: int
    dim: int
    dtype: str
    sharded: bool
    layers: list[tuple[int, int]] | None
    group: str | None
    accept: Annotated[list[str], msgspec.Meta(max_length=16)] = []


class _WireState(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    name: str
    shape: list[int]
    dtype: str
    shard_dim: int | None
    shard_groups: list[int] | None
    layers: list[tuple[int, int]] | None
    group: str | None


class _WireLayout(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    version: int
    components: list[_WireComponent]
    num_layers: int
    page_size: int
    order: Literal["NHD", "HND"]
    tp_rank: int
    tp_size: int
    layers: list[tuple[int, int]]
    states: list[_WireState]
    windows: list[tuple[int, int]]


_DECODER = msgspec.msgpack.Decoder(_WireLayout)


def _to_runs(layers: Sequence[int] | None) -> list[tuple[int, int]] | None:
    """Layer ids as runs [first, end): mostly a single one, however many layers there are."""
    if layers is None:
        return None
    runs: list[tuple[int, int]] = []
    for layer in layers:
        if runs and runs[-1][1] == layer:
            runs[-1] = (runs[-1][0], layer + 1)
        else:
            runs.append((layer, layer + 1))
    return runs


def _from_runs(runs: list[tuple[int, int]] | None) -> list[int] | None:
    if runs is None:
        return None
    layers: list[int] = []
    for first, end in runs:
        # Checked before the range is expanded: 20 bytes from a peer must not take gigabytes of memory here.
        if not 0 <= first < end <= MAX_LAYER_ID + 1 or len(layers) + end - first > MAX_LAYERS:
            raise ProtocolError(f"a peer's layout has layers [{first}, {end}): not at most {MAX_LAYERS} valid ids")
        layers.extend(range(first, end))
    return layers


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ProtocolError(f"a peer's layout names dtype {name[:64]!r}, which is none of {', '.join(DTYPES)}")
    return DTYPES[name]


def encode(layout: KVLayout) -> bytes:
    """``layout`` as bytes. Raises `LayoutMismatch` if they are more than `MAX_ENCODED`."""
    wire = _WireLayout(
        version=_VERSION,
        components=[
            _WireComponent(
                c.name,
                c.heads,
                c.dim,
                DTYPE_NAMES[c.dtype],
                c.sharded,
                _to_runs(c.layers),
                c.group,
                [DTYPE_NAMES[dtype] for dtype in c.accept],
            )
            for c in layout.components
        ],
        num_layers=layout.num_layers,
        page_size=layout.page_size,
        order=layout.order,
        tp_rank=layout.tp_rank,
        tp_size=layout.tp_size,
        layers=_to_runs(layout.layers) or [],
        states=[
            _WireState(
                s.name,
                list(s.shape),
                DTYPE_NAMES[s.dtype],
                s.shard_dim,
                None if s.shard_groups is None else list(s.shard_groups),
                _to_runs(s.layers),
                s.group,
            )
            for s in layout.states
        ],
        windows=list(layout.windows),
    )
    data = msgspec.msgpack.encode(wire)
    if len(data) > MAX_ENCODED:
        raise LayoutMismatch(
            f"this layout takes {len(data)} bytes on the wire, more than the {MAX_ENCODED} allowed: "
            "list fewer or contiguous layers"
        )
    return data


def decode(data: bytes) -> KVLayout:
    """The layout that a peer encoded. Raises `ProtocolError` for anything that is malformed or out of bounds."""
    if len(data) > MAX_ENCODED:
        raise ProtocolError(f"a peer's layout has {len(data)} bytes, more than the {MAX_ENCODED} allowed")
    try:
        fields = _fields(_DECODER.decode(data))
    except (msgspec.MsgspecError, UnicodeDecodeError, LayoutMismatch) as error:
        raise ProtocolError(f"a peer's layout cannot be decoded: {error}; is it a torchkv rank?") from error
    try:
        return KVLayout(**fields)
    except LayoutMismatch as error:
        raise ProtocolError(f"a peer's layout contradicts itself: {error}") from error


def _fields(wire: _WireLayout) -> dict[str, Any]:
    if wire.version != _VERSION:
        raise ProtocolError(
            f"a peer's layout has version {wire.version}, this rank reads version {_VERSION}: "
            "run the same torchkv on all ranks"
        )
    return {
        "components": [
            Component(
                c.name,
                c.heads,
                c.dim,
                _dtype(c.dtype),
                c.sharded,
                _from_runs(c.layers),
                c.group,
                [_dtype(name) for name in c.accept],
            )
            for c in wire.components
        ],
        "num_layers": wire.num_layers,
        "page_size": wire.page_size,
        "order": wire.order,
        "tp_rank": wire.tp_rank,
        "tp_size": wire.tp_size,
        "layers": _from_runs(wire.layers),
        "states": [
            State(s.name, s.shape, _dtype(s.dtype), s.shard_dim, s.shard_groups, _from_runs(s.layers), s.group)
            for s in wire.states
        ],
        "windows": _windows(wire.windows),
    }


def _windows(pairs: list[tuple[int, int]]) -> dict[int, int]:
    windows = dict(pairs)
    if len(windows) != len(pairs):
        raise ProtocolError("a peer's layout names the window of a layer twice")
    return windows
