"""The receiving half of the loop: what has arrived, and whether it is all. Compiled."""

from __future__ import annotations

from torchkv.core.journal import end, now, took
from torchkv.core.loop.codes import (
    ALL_HERE,
    ALONE,
    AUX,
    DONE,
    LEAVING,
    NEWS,
    NOBODY,
    OPEN,
    PROMISE,
    RECEIVE_PHASE,
    RECEIVED,
    SEAL,
    SUCCEEDED,
    VERDICT,
    VOTED,
    WRITTEN,
)
from torchkv.core.loop.events import emit
from torchkv.core.loop.limits import AUX_PART, MAX_AUX, MAX_FLOWS, MAX_INTERVALS
from torchkv.core.loop.mailbox import owe, tell_brief
from torchkv.core.loop.state.peers import Record
from torchkv.core.loop.state.requests import Receive
from torchkv.core.loop.state.world import AUX_AT, World, word_at
from torchkv.host.atomics import load, store
from torchkv.host.copy_loops import copy_bytes
from torchkv.host.jit import compiled

__all__ = ["cover", "on_record", "pay_verdict", "succeed", "unheard", "writer_of"]

_EAGER = word_at("eager")
_LAYER = 8 * (1 + 2 * MAX_INTERVALS)  # bytes of one position's intervals


@compiled
def cover(at: int, lo: int, hi: int) -> bool:
    """Adds [lo, hi) to the disjoint intervals at address ``at``; False, and nothing changed, if they would be too many.

    At ``at`` lie their count and then the intervals, in no order. No two of them touch, so what [lo, hi) merges with is
    known after one look at each.
    """
    count = load(at)
    kept = 0
    low, high = lo, hi
    # Not of ``count`` turns: in an environment of vLLM (numba 0.65.0, llvmlite 0.47.0) such a loop was unrolled without
    # asking whether there are two turns left, and ran on behind the intervals. `make test-vllm` runs its tests there.
    for i in range(MAX_INTERVALS):
        a, b = load(at + 8 + 16 * i), load(at + 16 + 16 * i)
        if i < count and a <= high and low <= b:
            low, high = min(a, low), max(b, high)
        elif i < count:
            kept += 1
    if kept == MAX_INTERVALS:
        return False
    kept = 0
    for i in range(MAX_INTERVALS):
        a, b = load(at + 8 + 16 * i), load(at + 16 + 16 * i)
        if i < count and (a > high or low > b):
            store(at + 8 + 16 * kept, a)
            store(at + 16 + 16 * kept, b)
            kept += 1
    store(at + 8 + 16 * kept, low)
    store(at + 16 + 16 * kept, high)
    store(at, kept + 1)
    return True


@compiled
def writer_of(receive: Receive, source: int) -> int:
    """The number of a receive's writer, or -1."""
    for number in range(receive["num_writers"]):
        if receive["writers"][number]["rank"] == source:
            return number
    return -1


@compiled
def on_record(world: World, source: int) -> bool:
    """Takes in ``world["record"]`` of rank ``source``; False if it is Python's to judge."""
    record: Record = world["record"]
    flow = record["flows"] & 0xFFFFFFFF
    if flow >= MAX_FLOWS:
        return False
    receive = world["receives"][flow]
    if receive["state"] != OPEN or receive["generation"] != record["generation"]:
        return False
    number = writer_of(receive, source)
    if number < 0:
        return False
    kind = record["head"] & 0xFF
    done = False
    if kind == WRITTEN:
        done = _on_written(world, receive, number)
    elif kind == AUX:
        done = _on_aux(world, receive, number)
    elif kind == SEAL:
        done = _on_seal(world, receive, number, flow)
    elif kind == PROMISE:
        receive["writers"][number]["ring_only"] = 1
        done = True
    if not done:
        receive["state"] = LEAVING
    return done


@compiled
def _on_written(world: World, receive: Receive, number: int) -> bool:
    record, writer = world["record"], receive["writers"][number]
    first, last = record["head"] >> 8 & 0xFFFFFF, record["head"] >> 32
    lo = record["lo"]
    if last > writer["layers"] + writer["states"] or lo < 0 or record["nbytes"] < 0 or writer["sealed"] >= 0:
        return False
    table = receive["cover"] + number * receive["positions"] * _LAYER
    for position in range(first, last):
        hi = min(record["hi"], receive["num_tokens"] if position < writer["layers"] else 1)
        if lo < hi and not cover(table + position * _LAYER, lo, hi):
            return False
    receive["nbytes"] += record["nbytes"]
    if load(world["address"] + _EAGER) != 0:
        emit(world, NEWS, 0, 0)
    return True


@compiled
def _on_aux(world: World, receive: Receive, number: int) -> bool:
    nbytes, writer = world["record"]["head"] >> 8 & 0xFF, receive["writers"][number]
    if nbytes > AUX_PART or writer["aux_nbytes"] + nbytes > MAX_AUX or writer["sealed"] >= 0:
        return False
    to = receive["aux"].ctypes.data + number * MAX_AUX + writer["aux_nbytes"]
    copy_bytes(to, world["address"] + AUX_AT, nbytes)
    writer["aux_nbytes"] += nbytes
    return True


@compiled
def _on_seal(world: World, receive: Receive, number: int, flow: int) -> bool:
    record, writer = world["record"], receive["writers"][number]
    pages, size = record["lo"], writer["page_size"]
    fits = pages > 0 if receive["num_tokens"] > 0 else pages == 0
    fits = fits and abs(pages * size - receive["num_tokens"]) < max(size, receive["page_size"])
    if not fits or writer["sealed"] >= 0 or record["hi"] != writer["aux_nbytes"]:
        return False
    writer["sealed"], writer["flow"] = pages, record["flows"] >> 32
    for other in range(receive["num_writers"]):
        if receive["writers"][other]["sealed"] < 0:
            return True
    if receive["leader"] == NOBODY or not _is_whole(receive) or not _one_aux(receive):
        receive["state"] = LEAVING
        emit(world, ALL_HERE, flow, 0)
    elif receive["leader"] == ALONE:
        succeed(world, flow)
    else:
        receive["state"] = VOTED
        owe(world, DONE, receive["leader"], flow, receive["generation"])
    return True


@compiled
def succeed(world: World, flow: int) -> None:
    """A receive has succeeded: its writers will be told, and it ends."""
    receive = world["receives"][flow]
    for number in range(receive["num_writers"]):
        writer = receive["writers"][number]
        owe(world, VERDICT, writer["rank"], writer["flow"], receive["generation"])
    if receive["operation"] != 0:
        end(world, receive["operation"], receive["nbytes"])
        took(world, RECEIVE_PHASE, now(world) - receive["begun"])
    receive["state"], receive["unpacks"] = SUCCEEDED, 0
    emit(world, RECEIVED, flow, 0)  # last: from here on the flow may be another receive's


@compiled
def _is_whole(receive: Receive) -> bool:
    """Whether every layer of every writer is there from the first token to the last, and every state.

    A writer may owe less, and be complete although this is not: Python knows what it owes.
    """
    for number in range(receive["num_writers"]):
        writer = receive["writers"][number]
        tokens = min(receive["num_tokens"], writer["sealed"] * writer["page_size"])
        table = receive["cover"] + number * receive["positions"] * _LAYER
        for position in range(writer["layers"] + writer["states"]):
            at, end = table + position * _LAYER, tokens if position < writer["layers"] else 1
            if end == 0:
                continue
            if load(at) != 1 or load(at + 8) > 0 or load(at + 16) < end:
                return False
    return True


@compiled
def _one_aux(receive: Receive) -> bool:
    """Whether at most one writer sent aux. If several did, Python compares them."""
    having = 0
    for number in range(receive["num_writers"]):
        if receive["writers"][number]["aux_nbytes"] > 0:
            having += 1
    return having < 2


@compiled
def pay_verdict(world: World, rank: int, flow: int, generation: int) -> bool:
    """Tells a writer that its request has succeeded; False where its mailbox is full. flow: its own."""
    return tell_brief(world, rank, VERDICT, flow, generation)


@compiled
def unheard(world: World, flow: int) -> int:
    """A bit for each writer that was told of its grant through the network, and of which nothing has come."""
    receive = world["receives"][flow]
    found = 0
    for number in range(receive["num_writers"]):
        writer = receive["writers"][number]
        silent = bool(writer["told"] != 0 and writer["sealed"] < 0 and writer["aux_nbytes"] == 0)
        for position in range(number * receive["positions"], (number + 1) * receive["positions"]):
            silent = silent and load(receive["cover"] + position * _LAYER) == 0
        if silent:
            found |= 1 << writer["rank"]
    return found
