"""Staging at the receiver: pieces in the standing stages of its writers are unpacked into pages. Compiled.

See `staging`. A record is the word of its writer and nobody else's, so all that it can do is name bytes of this
writer's own stage, and pages that this writer was granted. What does not fit is not unpacked; Python judges it.

A piece is unpacked in the same step in which its record is taken, so nothing of a request is unpacked while the loop
stands still. Whoever takes a request back and goes on with it lets its pieces be unpacked (``unpacks``), and is told of
them as of written pages; whoever fails it does not. In both cases the stage is given back.
"""

from __future__ import annotations

from torchkv.core.loop.codes import CREDIT, WRITTEN
from torchkv.core.loop.limits import MAX_FLOWS, SCRATCH, SEGMENT_FIELDS
from torchkv.core.loop.mailbox import owe, ring, room, tell, write_brief
from torchkv.core.loop.receiving import on_record, writer_of
from torchkv.core.loop.staging import merged, staged_nbytes
from torchkv.core.loop.state.requests import Receive, Writer
from torchkv.core.loop.state.world import World
from torchkv.core.loop.stripes import owed_pairs, place_pairs, segments
from torchkv.host.atomics import load
from torchkv.host.copy_loops import pairs_at
from torchkv.host.jit import compiled

__all__ = ["on_staged", "pay_credit"]


@compiled
def on_staged(world: World, source: int) -> bool:
    """Takes in the piece that ``world["record"]`` speaks of. False if the record is Python's to judge.

    Then it is a WRITTEN one if the piece was unpacked.
    """
    record, peer = world["record"], world["peers"][source]
    at, nbytes, size = record["spare"], record["nbytes"], peer["ring_nbytes"]
    if peer["ring"] == 0 or at < peer["taken"] or at - peer["taken"] > size or not 0 <= nbytes <= size:
        return True  # not of its stage: nothing that could be given back
    if at % size + nbytes > size or at - peer["taken"] + nbytes > size:
        return True
    known = True
    if record["generation"] != 0:
        known = _unpack(world, source, peer["ring"] + at % size)
    peer["taken"] = at + nbytes
    if peer["crediting"] == 0:
        peer["crediting"] = 1
        owe(world, CREDIT, source, 0, 0)
    return known


@compiled
def _unpack(world: World, source: int, at: int) -> bool:
    record = world["record"]
    flow = record["flows"] & 0xFFFFFFFF
    if flow >= MAX_FLOWS:
        return False
    receive = world["receives"][flow]
    number = writer_of(receive, source)
    if receive["unpacks"] == 0 or receive["generation"] != record["generation"] or number < 0:
        return False
    writer = receive["writers"][number]
    first, last = record["head"] >> 8 & 0xFFFFFF, record["head"] >> 32
    page, most = writer["page_size"], receive["num_tokens"] + max(writer["page_size"], receive["page_size"])
    if writer["geometry"] == 0 or writer["sealed"] >= 0 or not 0 <= first < last <= writer["layers"]:
        return False
    if not 0 <= record["lo"] <= record["hi"] <= most or record["lo"] % page != 0 or record["hi"] % page != 0:
        return False
    start, count = record["lo"] // page, (record["hi"] - record["lo"]) // page
    nbytes = 0
    for position in range(first, last):
        nbytes += staged_nbytes(
            writer["geometry"], position, receive["num_tokens"], page, receive["page_size"], start, count
        )
    if nbytes != record["nbytes"]:
        return False
    for position in range(first, last):
        at = _scatter(world, receive, writer, position, start, count, at)
    receive["pieces"] += 1
    record["head"] = WRITTEN | first << 8 | last << 32
    return on_record(world, source)


@compiled
def _scatter(world: World, receive: Receive, writer: Writer, position: int, start: int, count: int, at: int) -> int:
    """Unpacks the writer's pages [start, start + count) of one layer from the address ``at``. The address behind."""
    src, dst = world["src"], world["dst"]
    granted, src_page, dst_page = receive["num_tokens"], writer["page_size"], receive["page_size"]
    seg, end = segments(writer["geometry"], position)
    while seg < end:
        begin, stop = owed_pairs(granted, src_page, dst_page, start, count, seg + 120)
        n0, d0, n1, d1, run = merged(load(seg + 64), load(seg + 80), load(seg + 88), load(seg + 104), load(seg + 112))
        nbytes = n0 * n1 * run
        while begin < stop:
            pairs = min(SCRATCH, stop - begin)
            place_pairs(dst, seg, 1, receive["ids"], 0, dst_page, begin, pairs)
            for i in range(pairs):
                src[i] = i * nbytes
            pairs_at(at, load(seg + 8), src, dst, 0, pairs, n0, n1 * run, d0, n1, run, d1, run)
            begin += pairs
            at += pairs * nbytes
        seg += 8 * SEGMENT_FIELDS
    return at


@compiled
def pay_credit(world: World, rank: int) -> bool:
    """Tells a writer how far its pieces have been unpacked; False where there is no room."""
    peer = world["peers"][rank]
    if peer["endpoint"] != 0 or peer["outbox"] != 0:
        if room(world, peer) < 1:
            return False
        write_brief(world, CREDIT, 0, 0)
        world["record"]["lo"] = peer["taken"]
        tell(world, peer)
        ring(world, peer["bell"])
    peer["crediting"] = 0
    return True
