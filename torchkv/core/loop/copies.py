"""Copies of an op's page pairs into the receiver's mapped pages, a slice at a time. Compiled."""

from __future__ import annotations

from torchkv.core.loop.limits import SCRATCH, SEGMENT_FIELDS
from torchkv.core.loop.network import NO_ROOM, put_pairs, put_room
from torchkv.core.loop.records import Op, Send, World
from torchkv.core.loop.stripes import owed_pairs
from torchkv.host.atomics import load
from torchkv.host.copy_loops import SHORT_RUN, pairs_at, spans_at
from torchkv.host.jit import compiled

__all__ = ["copy_slice"]


@compiled
def _place(world: World, send: Send, op: Op, seg: int, ordinal: int, count: int) -> None:
    """Offsets of ``count`` pairs of the segment at ``seg`` from ``ordinal`` on, into ``src`` and ``dst``."""
    src_page, dst_page = send["src_page"], send["dst_page"]
    src_stride, dst_stride, src_base, dst_base = load(seg + 16), load(seg + 24), load(seg + 32), load(seg + 40)
    src_token, dst_token = load(seg + 48), load(seg + 56)
    tokens, per_unit, holders, holder = load(seg + 120), load(seg + 128), load(seg + 136), load(seg + 144)
    src, dst = world["src"], world["dst"]
    for i in range(count):
        pair = ordinal + i
        if holders > 1:
            pair = pair // per_unit * per_unit * holders + holder * per_unit + pair % per_unit
        token = pair * tokens
        ours = load(op["ids"] + 8 * (token // src_page - op["start"]))
        theirs = load(send["ids"] + 8 * (token // dst_page))
        src[i] = ours * src_stride + src_base + token % src_page * src_token
        dst[i] = theirs * dst_stride + dst_base + token % dst_page * dst_token


@compiled
def _merge(world: World, count: int, run: int) -> int:
    """Makes spans of ``count`` pairs of one run each: neighbours that are adjacent on both sides become one."""
    src, dst, length = world["src"], world["dst"], world["length"]
    spans = 0
    for i in range(count):
        last = spans - 1
        if spans > 0 and src[i] == src[last] + length[last] and dst[i] == dst[last] + length[last]:
            length[last] += run
        else:
            src[spans], dst[spans], length[spans] = src[i], dst[i], run
            spans += 1
    return spans


@compiled
def copy_slice(world: World, send: Send, op: Op, budget: int) -> int:
    """Copies, or puts, the next pairs of ``op``, of one segment, of about ``budget`` bytes, and moves on.

    Returns the bytes, or `NO_ROOM`.
    """
    geometry = send["geometry"]
    positions = load(geometry)
    position = load(op["positions"] + 8 * op["at"])
    first, end = load(geometry + 8 * (1 + position)), load(geometry + 8 * (2 + position))
    if first + op["segment"] >= end:
        op["at"] += 1
        op["segment"] = op["ordinal"] = 0
        return 0
    seg = geometry + 8 * (2 + positions + (first + op["segment"]) * SEGMENT_FIELDS)
    begin, stop = owed_pairs(send, op, seg + 120)
    n0, s0, d0 = load(seg + 64), load(seg + 72), load(seg + 80)
    n1, s1, d1, run = load(seg + 88), load(seg + 96), load(seg + 104), load(seg + 112)
    nbytes = n0 * n1 * run
    count = min(stop - begin - op["ordinal"], min(SCRATCH, max(1, budget // nbytes)))
    peer = world["peers"][send["peer"]]
    if send["network"] != 0 and count > 0:
        count = min(count, put_room(peer, n0 * n1, nbytes))
        if count == 0:
            return NO_ROOM
    if count > 0:
        _place(world, send, op, seg, begin + op["ordinal"], count)
        if send["network"] != 0:
            op["runs"] += put_pairs(world, peer, seg, count)
        elif n0 * n1 == 1 and run < SHORT_RUN:
            spans = _merge(world, count, run)
            spans_at(load(seg), load(seg + 8), world["src"], world["dst"], world["length"], 0, spans)
            op["runs"] += spans
        else:
            pairs_at(load(seg), load(seg + 8), world["src"], world["dst"], 0, count, n0, s0, d0, n1, s1, d1, run)
            op["runs"] += count * n0 * n1
        op["ordinal"] += count
    if op["ordinal"] >= stop - begin:
        op["segment"] += 1
        op["ordinal"] = 0
    copied: int = max(count, 0) * nbytes
    op["group"] += copied
    op["nbytes"] += copied
    send["moved"] += copied
    return copied
