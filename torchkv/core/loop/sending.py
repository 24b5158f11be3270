"""The sending half of the loop: ops are copied, announced, and at the end sealed. Compiled.

The processor copies a slice of an op at a time. `launching` has kernels copy it where pages lie on a GPU; `network`
puts it where the receiver is on another host, and `staging` packs it before that where its runs are short.
"""

from __future__ import annotations

from torchkv.core.journal import end, now, took
from torchkv.core.loop.codes import (
    AUX,
    OP_DONE,
    OPEN,
    PROMISE,
    SEAL,
    SEALED,
    SEND_PHASE,
    SENT,
    SUCCEEDED,
    VERDICT_PHASE,
    WRITTEN,
)
from torchkv.core.loop.copying import convert_pairs, copy_pairs, copy_spans
from torchkv.core.loop.events import emit, event_room
from torchkv.core.loop.launching import is_open, landed, report_broken
from torchkv.core.loop.limits import AUX_PART, MAX_FLOWS, SCRATCH, SEGMENT_FIELDS
from torchkv.core.loop.mailbox import count_seals, ring, room, seal_if_done, tell, tell_brief
from torchkv.core.loop.network import NO_ROOM, put_pairs, put_room
from torchkv.core.loop.staging import OP, POSTED, pack, piece_at, put_pieces, write_piece
from torchkv.core.loop.state.peers import Peer, Record
from torchkv.core.loop.state.requests import Op, Send
from torchkv.core.loop.state.world import AUX_AT, World
from torchkv.core.loop.stripes import converts, granted_to, owed_pairs, place_pairs, segments
from torchkv.host.atomics import load
from torchkv.host.copy_loops import SHORT_RUN, copy_bytes
from torchkv.host.jit import compiled

__all__ = [
    "BLOCKED",
    "ENDED",
    "advance",
    "hint_seal",
    "on_verdict",
    "pay_seal",
    "tell_pieces",
    "withdraw_hint",
]

BLOCKED = -1  # no room in the receiver's mailbox, a shut gate, or kernels or puts that are under way
ENDED = -2

GROUP = 16 << 20  # bytes after which layers are announced, although their op goes on


@compiled
def _announce(world: World, send: Send, op: Op) -> bool:
    """Tells the receiver of the layers that are there; False where its mailbox is full."""
    peer = world["peers"][send["peer"]]
    _, _, src_page, _ = granted_to(send, op)
    sent = False
    while op["told"] < op["arrived"]:
        if room(world, peer) < 1:
            if sent:
                ring(world, peer["bell"])
            return False
        first = load(op["positions"] + 8 * op["told"])
        last = first + 1
        op["told"] += 1
        while op["told"] < op["arrived"] and load(op["positions"] + 8 * op["told"]) == last:
            last += 1
            op["told"] += 1
        record: Record = world["record"]
        record["head"], record["flows"] = WRITTEN | first << 8 | last << 32, send["peer_flow"]
        record["generation"], record["spare"] = send["generation"], 0
        record["lo"], record["hi"] = op["start"] * src_page, (op["start"] + op["count"]) * src_page
        record["nbytes"] = op["group"]
        op["group"] = 0
        tell(world, peer)
        sent = True
    if sent:
        ring(world, peer["bell"])
    return True


@compiled
def _has_group(op: Op) -> bool:
    """Whether there are whole layers to announce, and enough bytes since the last time."""
    return bool(op["group"] >= GROUP and op["told"] < op["at"])


@compiled
def advance(world: World, index: int, budget: int) -> int:
    """Copies about ``budget`` bytes of an op. Returns the bytes, `BLOCKED`, or `ENDED` less the bytes."""
    op = world["ops"][index]
    send = world["sends"][op["flow"]]
    left = budget
    if send["kernels"] != 0 and op["staged"] == 0:
        if not landed(world, send, op):
            hint_seal(world, send)
            report_broken(world)
            return BLOCKED
        op["arrived"] = op["at"]
    elif op["gate"] != 0 and (world["broken"] != 0 or not is_open(world, send, op)):
        report_broken(world)
        return BLOCKED
    elif op["staged"] != 0:
        left -= _stage(world, send, op, index, left)
        if op["at"] < op["num_positions"] or op["pieces"] > 0:
            report_broken(world)
            return BLOCKED if left == budget else budget - left
        op["arrived"] = op["told"] = op["at"]  # with the records of the pieces
    elif send["network"] != 0:
        left -= _put(world, send, op, left)
        if op["told"] == op["arrived"] and op["arrived"] < op["num_positions"]:
            return BLOCKED if left == budget else budget - left
    else:
        left = budget = budget * (1 + world["copiers"])  # which take no longer together
        while op["at"] < op["num_positions"] and left > 0 and not _has_group(op):
            left -= _copy_slice(world, send, op, left)
        if op["at"] < op["num_positions"] and not _has_group(op):
            return budget - left
        op["arrived"] = op["at"]
    if not _announce(world, send, op) or not event_room(world):
        return BLOCKED
    if op["arrived"] < op["num_positions"]:
        return max(1, budget - left)
    send["running"] -= 1
    end(world, op["operation"], op["nbytes"])
    seal_if_done(world, op["flow"])
    emit(world, OP_DONE, index, 0)  # last: from here on the index may be another op's
    return ENDED - (budget - left)


@compiled
def _stage(world: World, send: Send, op: Op, index: int, budget: int) -> int:
    """Packs and puts about ``budget`` bytes of an op. The bytes."""
    left = budget
    if send["promise"] == 1:
        if not tell_brief(world, send["peer"], PROMISE, send["peer_flow"], send["generation"]):
            return 0
        send["promise"] = 2
    while op["at"] < op["num_positions"] and left > 0:
        packed = pack(world, send, op, index)
        if packed == NO_ROOM:
            break
        left -= max(packed, 1)
    return budget - left


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
def _copy_slice(world: World, send: Send, op: Op, budget: int) -> int:
    """Copies, or puts, the next pairs of ``op``, of one segment, of about ``budget`` bytes, and moves on.

    Returns the bytes, or `NO_ROOM`.
    """
    first, end = segments(send["geometry"], load(op["positions"] + 8 * op["at"]))
    seg = first + 8 * SEGMENT_FIELDS * op["segment"]
    if seg >= end:
        op["at"] += 1
        op["segment"] = op["ordinal"] = 0
        return 0
    ids, granted, src_page, dst_page = granted_to(send, op)
    begin, stop = owed_pairs(granted, src_page, dst_page, op["start"], op["count"], seg + 120)
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
        place_pairs(world["src"], seg, 0, op["ids"], op["start"], src_page, begin + op["ordinal"], count)
        place_pairs(world["dst"], seg, 1, ids, 0, dst_page, begin + op["ordinal"], count)
        if send["network"] != 0:
            op["runs"] += put_pairs(world, peer, seg, count)
        elif converts(seg):
            convert_pairs(world, seg, count, n0, s0, d0, n1, s1, d1, run)
            op["runs"] += count * n0 * n1
        elif n0 * n1 == 1 and run < SHORT_RUN:
            spans = _merge(world, count, run)
            copy_spans(world, load(seg), load(seg + 8), spans, count * nbytes)
            op["runs"] += spans
        else:
            copy_pairs(world, load(seg), load(seg + 8), count, n0, s0, d0, n1, s1, d1, run)
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


@compiled
def _put(world: World, send: Send, op: Op, budget: int) -> int:
    """Puts about ``budget`` bytes of an op, and notes which of its layers have arrived. The bytes put now."""
    peer = world["peers"][send["peer"]]
    left = budget
    while op["at"] < op["num_positions"] and left > 0 and peer["endpoint"] != 0 and peer["failed"] == 0:
        put = _copy_slice(world, send, op, left)
        if put == NO_ROOM:
            break
        left -= put
        op["posted"] = peer["puts"]
    if op["mark"] != 0 and peer["flushed"] >= op["mark"]:
        op["arrived"], op["mark"] = op["until"], 0
    if op["mark"] == 0 and op["at"] > op["arrived"]:
        if peer["flushed"] >= op["posted"]:
            op["arrived"] = op["at"]
        else:
            op["until"], op["mark"] = op["at"], op["posted"]
            peer["wanted"] = max(peer["wanted"], op["mark"])
    return budget - left


@compiled
def hint_seal(world: World, send: Send) -> None:
    """Tells the receiver that the seal comes soon, if nothing is left of a finished send but kernels under way."""
    if send["hinted"] == 0 and send["num_pages"] >= 0 and 0 < send["running"] == send["flying"]:
        send["hinted"] = 1
        count_seals(world, world["peers"][send["peer"]], 1)


@compiled
def withdraw_hint(world: World, send: Send) -> None:
    """The seal has been sent, or is Python's now."""
    if send["hinted"] != 0:
        send["hinted"] = 0
        count_seals(world, world["peers"][send["peer"]], -1)


@compiled
def pay_seal(world: World, flow: int, generation: int) -> bool:
    """Sends the seal, with the bytes of aux before it; False where the mailbox has no room for all of it."""
    send = world["sends"][flow]
    if send["state"] != OPEN or send["generation"] != generation:
        return True  # Python has taken the flow back
    peer = world["peers"][send["peer"]]
    parts = (send["aux_nbytes"] + AUX_PART - 1) // AUX_PART
    if room(world, peer) < parts + 1:
        return False
    record: Record = world["record"]
    for part in range(parts):
        nbytes = min(AUX_PART, send["aux_nbytes"] - part * AUX_PART)
        copy_bytes(world["address"] + AUX_AT, send["aux"] + part * AUX_PART, nbytes)
        record["head"], record["flows"], record["generation"] = AUX | nbytes << 8, send["peer_flow"], send["generation"]
        tell(world, peer)
    record["head"], record["flows"], record["generation"] = SEAL, send["peer_flow"] | flow << 32, send["generation"]
    record["lo"], record["hi"], record["nbytes"], record["spare"] = send["num_pages"], send["aux_nbytes"], 0, 0
    tell(world, peer)
    ring(world, peer["bell"])
    withdraw_hint(world, send)
    send["state"] = SEALED
    return True


@compiled
def on_verdict(world: World, source: int, flow: int, generation: int) -> bool:
    """The receiver has everything. False if this is for no flow here."""
    if flow < 0 or flow >= MAX_FLOWS:
        return False
    send = world["sends"][flow]
    if send["state"] != SEALED or send["peer"] != source or send["generation"] != generation:
        return False
    if send["operation"] != 0:
        end(world, send["operation"], 0)
        took(world, VERDICT_PHASE, now(world) - send["finished"])
        took(world, SEND_PHASE, now(world) - send["begun"])
    send["state"] = SUCCEEDED
    emit(world, SENT, flow, source)
    return True


@compiled
def tell_pieces(world: World, peer: Peer) -> bool:
    """Puts the pieces that are packed, and tells the receiver of those that have arrived. Whether any."""
    told = put_pieces(world, peer)
    while peer["piece_head"] < peer["piece_put"]:
        piece = piece_at(peer, peer["piece_head"])
        if load(piece + POSTED) > peer["flushed"] or room(world, peer) < 1:
            break
        write_piece(world, piece)
        tell(world, peer)
        if load(piece + OP) >= 0:
            world["ops"][load(piece + OP)]["pieces"] -= 1
        peer["piece_head"] += 1
        told = True
    if told:
        ring(world, peer["bell"])
    return told
