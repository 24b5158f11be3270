"""Staging at the writer: short runs are packed into pieces, which are put whole into the receiver's ring. Compiled.

A receiver grants a writer one *standing stage* of its staging ring, once and for all their requests. A writer of
another host keeps as many bytes of its own send ring beside it; one that has mapped the ring packs straight into the
stage, and puts nothing. Both count *positions* in them, which only grow; position p lies at byte p modulo their length,
and a piece never straddles the end.

    packed here --put, flushed--> STAGED told --unpacked there (see `unpacking`)--> CREDIT: positions are free again

The processor packs what lies in its memory. Kernels pack pages of a GPU, once the gate of their op is open (see
`launching`); such a piece is put when the completion word says that it is packed, in its turn.

Whose a position is: from its packing to its CREDIT it belongs to one piece. The record of a piece goes when all of it
has arrived, so records come in the order of positions, and a CREDIT says only how far its sender is. The record of a
piece whose request was taken back meanwhile says that it holds nothing: its put still lands, and so it, too, keeps its
positions until then. A stage ends with its lane: after a failure nobody knows what lands, and it is never used again.

A piece holds some whole layers of an op, or some pages of one layer; in host memory by segment and page pair, without
gaps. Its record names layers and tokens; the receiver computes the rest from the same plan.
"""

from __future__ import annotations

from torchkv.arrays import Int64Array
from torchkv.core.loop.codes import STAGED
from torchkv.core.loop.copying import convert_rows
from torchkv.core.loop.launching import launch_piece, place_ids
from torchkv.core.loop.limits import GRAIN, IDS, PIECES, SCRATCH, SEGMENT_FIELDS
from torchkv.core.loop.network import NO_ROOM, put, put_room
from torchkv.core.loop.state.peers import Peer, Record
from torchkv.core.loop.state.requests import Op, Send
from torchkv.core.loop.state.world import World
from torchkv.core.loop.stripes import converts, owed_pairs, place_pairs, segments, sizes
from torchkv.host.atomics import load, store
from torchkv.host.copy_loops import pairs_at
from torchkv.host.jit import compiled

__all__ = [
    "OP",
    "PIECES_NBYTES",
    "POSTED",
    "SHARE",
    "forget_pieces",
    "merged",
    "on_credit",
    "pack",
    "piece_at",
    "put_of",
    "put_pieces",
    "staged_nbytes",
    "write_piece",
]

SHARE = 4  # pieces that a stage holds at least: one is packed, one put, one unpacked, and one is spare
# Bytes of a piece that kernels pack, at least. A fast link is idle for some 10 us between two, so those of a long op
# are larger: a quarter of it, or a third of the stage, while one is packed and one is unpacked.
_LEAST = 8 << 20

# Offsets in a piece: the number of the put with which it has arrived, its op or -1, its record without ``seq``, and
# what the completion word will be once kernels have packed it.
POSTED, OP, _HEAD, _FLOWS, _GENERATION, _LO, _HI, _NBYTES, _AT, _LAUNCHED = (8 * i for i in range(10))
_PIECE = 8 * 10
PIECES_NBYTES = _PIECE * PIECES


def put_of(pieces: Int64Array, number: int) -> int:
    """The number of the put with which a piece has arrived, of the array of a peer's pieces. For Python."""
    return int(pieces[(_PIECE * (number & (PIECES - 1)) + POSTED) // 8])


@compiled
def piece_at(peer: Peer, number: int) -> int:
    """Address of a piece that is packed and not told."""
    at: int = peer["pieces"] + _PIECE * (number & (PIECES - 1))
    return at


@compiled
def staged_nbytes(
    geometry: int, position: int, granted: int, src_page: int, dst_page: int, start: int, n: int, grain: int
) -> tuple[int, int, int]:
    """Bytes that the sender's pages [start, start + n) of the layer at a position take in a piece, and at the receiver.

    Last, how many fewer the former are because they are narrower. grain: of which the bytes of each segment are a
    multiple in the piece.
    """
    staged = nbytes = spared = 0
    seg, end = segments(geometry, position)
    while seg < end:
        begin, stop = owed_pairs(granted, src_page, dst_page, start, n, seg + 120)
        _, there, in_stage = sizes(seg)
        of_segment = (stop - begin) * load(seg + 64) * load(seg + 88) * load(seg + 112)
        packed = of_segment // there * in_stage
        staged += (packed + grain - 1) // grain * grain
        nbytes += of_segment
        spared += of_segment - packed
        seg += 8 * SEGMENT_FIELDS
    return staged, nbytes, spared


@compiled
def _nbytes(send: Send, op: Op, at: int, start: int, count: int) -> tuple[int, int, int]:
    """`staged_nbytes` of the op's layer number ``at``."""
    position, grain = load(op["positions"] + 8 * at), GRAIN if send["packs"] != 0 else 1
    return staged_nbytes(
        send["geometry"], position, send["granted"], send["src_page"], send["dst_page"], start, count, grain
    )


@compiled
def _most(send: Send, op: Op, stage_nbytes: int) -> int:
    """Bytes of a piece of an op at most."""
    if send["packs"] == 0:
        return stage_nbytes // SHARE
    if op["piece"] == 0:
        layer = _nbytes(send, op, op["at"], op["start"], op["count"])[0]
        op["piece"] = max(_LEAST, layer * (op["num_positions"] - op["at"]) // SHARE)
    return min(op["piece"], stage_nbytes // 3)


@compiled
def _cut(send: Send, op: Op, most: int) -> tuple[int, int, int, tuple[int, int, int]]:
    """The op's next piece: its layers are those before number ``until``; its pages; and its `staged_nbytes`, of which
    the first number is at most ``most``.

    Whole layers that are consecutive in the plan, or else pages of the next one: at least one.
    """
    at, until, total = op["at"], op["at"], (0, 0, 0)
    if op["ordinal"] == 0:
        while until < op["num_positions"]:
            follows = until == at or load(op["positions"] + 8 * until) == load(op["positions"] + 8 * until - 8) + 1
            more = _nbytes(send, op, until, op["start"], op["count"])
            if not follows or total[0] + more[0] > most:
                break
            total = total[0] + more[0], total[1] + more[1], total[2] + more[2]
            until += 1
    if until > at:
        return until, op["start"], op["count"], total
    start, count = op["start"] + op["ordinal"], op["count"] - op["ordinal"]
    total = _nbytes(send, op, at, start, count)
    while total[0] > most and count > 1:
        count = max(1, min(count - 1, count * most // total[0]))
        total = _nbytes(send, op, at, start, count)
    return at + 1, start, count, total


@compiled
def _room(peer: Peer, nbytes: int) -> int:
    """The position at which a piece of so many bytes may lie, a multiple of `GRAIN`; -1 if there is none now."""
    if peer["piece_tail"] - peer["piece_head"] >= PIECES:
        return -1
    size, position = peer["stage_nbytes"], (peer["packed"] + GRAIN - 1) // GRAIN * GRAIN
    if position % size + nbytes > size:
        position += size - position % size
    return position if position + nbytes - peer["freed"] <= size else -1


@compiled
def merged(n0: int, s0: int, n1: int, s1: int, run: int) -> tuple[int, int, int, int, int]:
    """Runs of one page pair on one side, as few as they are there."""
    if n1 == 1 or s1 == run:
        n0, s0, n1, s1, run = 1, 0, n0, s0, run * n1
    if n1 == 1 or s1 == run:
        n0, s0, n1, s1, run = 1, 0, n0, s0, run * n1
    return n0, s0, n1, s1, run


@compiled
def _gather(world: World, send: Send, op: Op, position: int, start: int, count: int, to: int) -> int:
    """Packs pages of one layer to the address ``to``. The address behind them."""
    src, dst = world["src"], world["dst"]
    seg, end = segments(send["geometry"], position)
    while seg < end:
        begin, stop = owed_pairs(send["granted"], send["src_page"], send["dst_page"], start, count, seg + 120)
        here, there, in_stage = sizes(seg)
        run = load(seg + 112) // there * here
        n0, s0, n1, s1, run = merged(load(seg + 64), load(seg + 72), load(seg + 88), load(seg + 96), run)
        run = run // here * in_stage
        nbytes = n0 * n1 * run
        while begin < stop:
            pairs = min(SCRATCH, stop - begin)
            place_pairs(src, seg, 0, op["ids"], op["start"], send["src_page"], begin, pairs)
            for i in range(pairs):
                dst[i] = i * nbytes
            if converts(seg) and in_stage == there:
                convert_rows(seg, load(seg), to, src, dst, 0, pairs, n0, s0, n1 * run, n1, s1, run, run)
            else:
                pairs_at(load(seg), to, src, dst, 0, pairs, n0, s0, n1 * run, n1, s1, run, run)
            begin += pairs
            to += pairs * nbytes
        seg += 8 * SEGMENT_FIELDS
    return to


@compiled
def _gather_all(world: World, send: Send, op: Op, until: int, start: int, count: int, to: int) -> None:
    """Packs the op's layers before number ``until`` to the address ``to``: the processor copies."""
    for number in range(op["at"], until):
        to = _gather(world, send, op, load(op["positions"] + 8 * number), start, count, to)


@compiled
def _launch(world: World, send: Send, op: Op, layers: tuple[int, int], start: int, count: int, to: int) -> int:
    """As `_gather_all`, by kernels. What the completion word will be once it is packed; 0 if that has to wait."""
    if world["broken"] != 0 or not place_ids(world, send, op):
        return 0
    extent = layers[0], layers[1], start, count, send["granted"], send["src_page"], send["dst_page"]
    ids = world["ids_device"] + 8 * IDS * op["flow"] + 8 * send["src_at"]
    launched = launch_piece(world, send["packs"], extent, op["start"], ids, 0, to)
    posted: int = world["posted"]
    if launched != -1:  # also if a later one was refused: those before read the pages
        send["ids_posted"] = op["posted"] = posted
    return posted if launched >= 0 else 0


@compiled
def pack(world: World, send: Send, op: Op, index: int) -> int:
    """Packs the next piece of an op, whose index this is, and puts what is packed. Its bytes there, or `NO_ROOM`."""
    peer = world["peers"][send["peer"]]
    if peer["stage"] == 0 or peer["failed"] != 0:
        return NO_ROOM
    at = op["at"]
    until, start, count, (nbytes, payload, spared) = _cut(send, op, _most(send, op, peer["stage_nbytes"]))
    position = _room(peer, nbytes)
    if position < 0:
        return NO_ROOM
    first, last = load(op["positions"] + 8 * at), load(op["positions"] + 8 * until - 8) + 1
    to, launched = peer["stage"] + position % peer["stage_nbytes"], 0
    if send["packs"] == 0:
        _gather_all(world, send, op, until, start, count, to)
    elif nbytes > 0:
        launched = _launch(world, send, op, (first, last), start, count, to)
        if launched == 0:
            return NO_ROOM
    piece = piece_at(peer, peer["piece_tail"])
    page = send["src_page"]
    store(piece + OP, index)
    store(piece + _FLOWS, send["peer_flow"])
    store(piece + _GENERATION, send["generation"])
    store(piece + _HEAD, STAGED | first << 8 | last << 32)
    store(piece + _LO, start * page)
    store(piece + _HI, (start + count) * page)
    store(piece + _NBYTES, nbytes)
    store(piece + _AT, position)
    store(piece + _LAUNCHED, launched)
    peer["piece_tail"] += 1
    peer["packed"] = position + nbytes
    op["pieces"] += 1
    op["runs"] += 1
    op["nbytes"] += payload
    op["spared"] += spared
    send["moved"] += payload
    if start + count < op["start"] + op["count"]:
        op["ordinal"] += count
    else:
        op["at"], op["ordinal"] = until, 0
    put_pieces(world, peer)
    return payload


@compiled
def put_pieces(world: World, peer: Peer) -> bool:
    """Puts the pieces that are packed, in their order, as far as there is room. Whether any."""
    put_any = False
    while peer["piece_put"] < peer["piece_tail"]:
        piece = piece_at(peer, peer["piece_put"])
        launched, nbytes = load(piece + _LAUNCHED), load(piece + _NBYTES)
        if launched != 0 and load(world["word"]) < launched:
            break
        if load(piece + _GENERATION) != 0 and nbytes > 0 and peer["there"] != 0:  # else there is nothing to put
            if put_room(peer, 1, nbytes) == 0:
                break
            offset = load(piece + _AT) % peer["stage_nbytes"]
            store(world["key_at"], peer["stage_key"])
            put(world, peer, peer["stage"] + offset, peer["there"] + offset, nbytes, peer["there_key"])
            peer["wanted"] = max(peer["wanted"], peer["puts"])
        store(piece + POSTED, peer["puts"] if peer["there"] != 0 else 0)
        peer["piece_put"] += 1
        put_any = True
    return put_any


@compiled
def write_piece(world: World, piece: int) -> None:
    """Makes ``world["record"]`` that of a piece."""
    record: Record = world["record"]
    record["head"], record["flows"] = load(piece + _HEAD), load(piece + _FLOWS)
    record["generation"], record["nbytes"] = load(piece + _GENERATION), load(piece + _NBYTES)
    record["lo"], record["hi"], record["spare"] = load(piece + _LO), load(piece + _HI), load(piece + _AT)


@compiled
def _told(peer: Peer) -> int:
    """The position up to which the receiver was told of all pieces; all of these have arrived."""
    position: int = peer["packed"]
    if peer["piece_head"] < peer["piece_tail"]:
        position = load(piece_at(peer, peer["piece_head"]) + _AT)
    return position


@compiled
def forget_pieces(world: World, peer: Peer, flow: int) -> None:
    """The pieces of a send that is taken back, and not told yet, hold nothing for its receiver."""
    for number in range(peer["piece_head"], peer["piece_tail"]):
        piece = piece_at(peer, number)
        index = load(piece + OP)
        if index >= 0 and world["ops"][index]["flow"] == flow:
            store(piece + OP, -1)
            store(piece + _GENERATION, 0)


@compiled
def on_credit(world: World, source: int) -> None:
    """The receiver has unpacked pieces."""
    peer, until = world["peers"][source], world["record"]["lo"]
    if peer["freed"] < until <= _told(peer):  # what was not told cannot have been unpacked
        peer["freed"] = until
