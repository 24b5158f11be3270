"""Peers of other hosts: the loop puts pages, and sends records, through the functions of the transport. Compiled.

Puts to a peer are numbered. Their requests end in any order, and say only that the source may be reused. What has
*arrived* a flush tells: all that was put before it is in the peer's memory. One flush to a peer is under way at a time,
and the next one stands for all that was put meanwhile. Then a record tells the receiver, as a mailbox does on one host.

Records are messages of 64 bytes with a tag that names the two ranks: both know it, and nobody outside the group can
guess it. Grants and greetings are longer (see `grants`), and none is longer than `MESSAGE_NBYTES`. Their memory is the
peer's own ring of `RECORDS` messages, until the transport has read it. Messages arrive once and in order as long as the
endpoint lives; when it fails, all that was on its way there is lost, and Python takes every request with the peer back.
What comes from there meanwhile is heard as before: the peer's endpoint may not have failed.

Transports carry messages of this length in one piece by default, so nothing is kept for pieces that are still to come:
such a message is missed, and its sender told. Nobody receives others into that memory before the last piece has come.

What this lane proves: who sends a record knows the tag. Somebody who reads the network can forge records, as he can
forge the bytes of the pages themselves: UCX protects neither. So the receiver checks every field, as of a mailbox.

What is posted cannot be called back. An op that is taken from the loop has *landed* once a flush says so, and not when
its endpoint has failed.
"""

from __future__ import annotations

from torchkv.core.loop.codes import CHECK, FLUSH, FREE_REQUEST, PROBE, PROGRESS, PUT, RECEIVE_MESSAGE, SEND_MESSAGE
from torchkv.core.loop.limits import MESSAGE_NBYTES, RECORD_NBYTES
from torchkv.core.loop.state.peers import Peer
from torchkv.core.loop.state.world import World, word_at
from torchkv.host.atomics import load, store
from torchkv.host.copy_loops import copy_bytes
from torchkv.host.jit import c_function, compiled

__all__ = [
    "DROPPED",
    "MISSED",
    "NETWORK_NBYTES",
    "NONE",
    "NO_ROOM",
    "cut",
    "drive",
    "put",
    "put_pairs",
    "put_room",
    "receive",
    "received",
    "record_room",
    "send",
]

PUTS = 8192  # requests of puts to one peer: over TCP each ends only when the peer has answered
PUT_NBYTES = 16 << 20  # bytes of them: nothing of it can be called back
MAX_PUT = 4 << 20  # bytes of one put
RECORDS = 64  # messages on their way to one peer
_ROUNDS = 8  # of the transport's progress in one step

# Instead of the peer that a message came from. MISSED - peer: one of it has not come in one piece.
NONE, DROPPED, MISSED = -1, -2, -3
NO_ROOM = -1  # instead of bytes: puts have to end first

# A peer's memory: its messages, the request of each, and the ring of puts: request and bytes.
_REQUESTS_AT = RECORDS * MESSAGE_NBYTES
_PUTS_AT = _REQUESTS_AT + 8 * RECORDS
NETWORK_NBYTES = _PUTS_AT + 16 * PUTS

_IN_PROGRESS, _LAST_ERROR = 1, -100  # a result in (_LAST_ERROR, 0) is a status, and no request
_RECORD, _PUT_PARAMS, _PARAMS = word_at("record"), word_at("put_params"), word_at("params")
_MESSAGE, _INBOX, _LONG_INBOX = word_at("message"), word_at("inbox"), word_at("long_inbox")

call_put = c_function(6, 64)
call_flush = c_function(2, 64)
call_check = c_function(1, 8)
call_free = c_function(1, 0)
call_progress = c_function(1, 32, signed=False)
call_five = c_function(5, 64)  # SEND_MESSAGE, PROBE, RECEIVE_MESSAGE


@compiled
def _native(peer: Peer, function: int) -> int:
    """The address of a function of the peer's endpoint."""
    address: int = load(peer["functions"] + 8 * function)
    return address


# ---------------------------------------------------------------- puts


@compiled
def put_room(peer: Peer, puts: int, nbytes: int) -> int:
    """How many pairs of so many puts and bytes each may be put now; at least one if nothing is under way."""
    if peer["requests"] == 0:
        return max(1, min(PUTS // puts, PUT_NBYTES // nbytes))
    return max(0, min((PUTS - peer["requests"]) // puts, (PUT_NBYTES - peer["pending"]) // nbytes))


@compiled
def put_pairs(world: World, peer: Peer, seg: int, count: int) -> int:
    """Puts ``count`` pairs of the segment at ``seg``, whose offsets are in ``src`` and ``dst``. How many puts.

    Runs that are adjacent on both sides are put as one.
    """
    n0, s0, d0 = load(seg + 64), load(seg + 72), load(seg + 80)
    n1, s1, d1, run = load(seg + 88), load(seg + 96), load(seg + 104), load(seg + 112)
    src, dst = world["src"], world["dst"]
    store(world["key_at"], load(seg + 168))
    remote_key = load(seg + 176)
    puts = here = there = length = 0
    for i in range(count):
        for outer in range(n0):
            for inner in range(n1):
                ours = load(seg) + src[i] + outer * s0 + inner * s1
                theirs = load(seg + 8) + dst[i] + outer * d0 + inner * d1
                if length > 0 and ours == here + length and theirs == there + length and length + run <= MAX_PUT:
                    length += run
                    continue
                if length > 0:
                    put(world, peer, here, there, length, remote_key)
                    puts += 1
                here, there, length = ours, theirs, run
    if length > 0:
        put(world, peer, here, there, length, remote_key)
        puts += 1
    return puts


@compiled
def put(world: World, peer: Peer, here: int, there: int, nbytes: int, remote_key: int) -> None:
    """Puts bytes of the memory whose key is at ``key_at``."""
    if peer["failed"] != 0:
        return
    params = world["address"] + _PUT_PARAMS
    result = call_put(_native(peer, PUT), peer["endpoint"], here, nbytes, there, remote_key, params)
    peer["puts"] += 1
    if result == 0:
        return
    if _LAST_ERROR <= result < 0:
        peer["failed"] = result
        return
    at = peer["memory"] + _PUTS_AT + 16 * ((peer["head"] + peer["requests"]) & (PUTS - 1))
    store(at, result)
    store(at + 8, nbytes)
    peer["requests"] += 1
    peer["pending"] += nbytes


@compiled
def _ended(peer: Peer, request: int) -> bool:
    """Whether a request has ended. Then it is freed, and a failure noted."""
    status = call_check(_native(peer, CHECK), request)
    if status == _IN_PROGRESS:
        return False
    call_free(_native(peer, FREE_REQUEST), request)
    if status != 0 and peer["failed"] == 0:
        peer["failed"] = status
    return True


@compiled
def _reap(peer: Peer) -> bool:
    """Frees the requests of puts that have ended, oldest first. Whether there were any."""
    before = peer["requests"]
    while peer["requests"] > 0:
        at = peer["memory"] + _PUTS_AT + 16 * (peer["head"] & (PUTS - 1))
        if not _ended(peer, load(at)):
            break
        peer["head"] += 1
        peer["requests"] -= 1
        peer["pending"] -= load(at + 8)
    return bool(peer["requests"] != before)


@compiled
def _flush(world: World, peer: Peer) -> bool:
    """Learns what a flush says, and begins the next one if somebody waits for that. Whether anything has changed."""
    changed = False
    if peer["flush"] != 0 and _ended(peer, peer["flush"]):
        peer["flush"] = 0
        _reap(peer)  # what was put before has ended, too; has all of it succeeded?
        changed = True
        if peer["failed"] == 0:
            peer["flushed"] = peer["flushing"]
    if peer["flush"] == 0 and peer["wanted"] > peer["flushed"] and peer["failed"] == 0:
        changed = True
        peer["flushing"] = peer["puts"]
        result = call_flush(_native(peer, FLUSH), peer["endpoint"], world["address"] + _PARAMS)
        if _LAST_ERROR <= result < 0:
            peer["failed"] = result
        elif result != 0:
            peer["flush"] = result
        else:
            _reap(peer)
            if peer["requests"] == 0 and peer["failed"] == 0:
                peer["flushed"] = peer["flushing"]
    return changed


@compiled
def drive(world: World) -> bool:
    """Advances the transport, and what is under way to each peer. Whether anything has changed."""
    changed = False
    for _ in range(_ROUNDS):
        if call_progress(world["native"][PROGRESS], world["worker"]) == 0:
            break
        changed = True
    under_way = 0
    for slot in range(world["num_peers"]):
        peer = world["peers"][slot]
        if peer["endpoint"] != 0:
            changed |= _reap(peer)
            changed |= _flush(world, peer)
            if peer["outbox"] == 0:
                record_room(world, peer)  # frees what has ended
            awaited = bool(peer["wanted"] > peer["flushed"] or peer["packed"] > peer["freed"])
            if peer["requests"] > 0 or peer["flush"] != 0 or (awaited and peer["failed"] == 0):
                under_way += 1
    world["under_way"] = under_way
    return changed


@compiled
def cut(world: World, peer: Peer) -> None:
    """Uses the endpoint no more. Frees its requests: they end by themselves. For a caller that holds the lock."""
    while peer["requests"] > 0:
        call_free(_native(peer, FREE_REQUEST), load(peer["memory"] + _PUTS_AT + 16 * (peer["head"] & (PUTS - 1))))
        peer["head"] += 1
        peer["requests"] -= 1
    if peer["flush"] != 0:
        call_free(_native(peer, FREE_REQUEST), peer["flush"])
        peer["flush"] = 0
    for place in range(RECORDS):
        at = peer["memory"] + _REQUESTS_AT + 8 * place
        if load(at) != 0:
            call_free(_native(peer, FREE_REQUEST), load(at))
            store(at, 0)
    peer["endpoint"] = 0
    if peer["there"] != 0:  # what was put may still land in the stage: see `staging`
        peer["stage"], peer["piece_head"], peer["piece_put"] = 0, peer["piece_tail"], peer["piece_tail"]


# ---------------------------------------------------------------- records


@compiled
def record_room(world: World, peer: Peer) -> int:
    """Messages that may be sent to the peer now. Frees the requests of those that have been sent."""
    if peer["endpoint"] == 0 or peer["failed"] != 0:
        return 0
    while peer["returned"] < peer["written"]:
        at = peer["memory"] + _REQUESTS_AT + 8 * (peer["returned"] & (RECORDS - 1))
        if load(at) != 0 and not _ended(peer, load(at)):
            break
        store(at, 0)
        peer["returned"] += 1
    room: int = RECORDS - (peer["written"] - peer["returned"])
    return room


@compiled
def send(world: World, peer: Peer, behind: int, nbytes: int) -> None:
    """Sends ``world["record"]``, and behind it so many bytes at the address ``behind``; 0: whatever they are.

    There must be room.
    """
    if peer["failed"] != 0:
        return
    place = peer["written"] & (RECORDS - 1)
    at = peer["memory"] + MESSAGE_NBYTES * place
    copy_bytes(at, world["address"] + _RECORD, RECORD_NBYTES)
    if behind != 0:
        copy_bytes(at + RECORD_NBYTES, behind, nbytes)
    params, function = world["address"] + _PARAMS, _native(peer, SEND_MESSAGE)
    result = call_five(function, peer["endpoint"], at, RECORD_NBYTES + nbytes, peer["tag_out"], params)
    peer["written"] += 1
    if _LAST_ERROR <= result < 0:
        peer["failed"] = result
    else:
        store(peer["memory"] + _REQUESTS_AT + 8 * place, result)


@compiled
def receive(world: World) -> int:
    """Takes the next message, and its record into ``world["record"]``; the bytes behind that are in ``long_inbox``.

    Returns the peer that it came from, `NONE`, `DROPPED`, or `MISSED` less a peer. `received` has its length.
    """
    found, inbox, room = world["address"] + _MESSAGE, world["address"] + _INBOX, RECORD_NBYTES
    message = call_five(world["native"][PROBE], world["worker"], 0, 0, 1, found)
    if message == 0:
        return NONE
    function, params = world["native"][RECEIVE_MESSAGE], world["address"] + _PARAMS
    long = load(found + 8) != RECORD_NBYTES
    if long:
        inbox, room = world["address"] + _LONG_INBOX, 0 if _is_late(world) else MESSAGE_NBYTES
    result = call_five(function, world["worker"], inbox, room, message, params)
    if result > 0 and long and room > 0:
        world["late"] = result
    elif result > 0:
        call_free(world["native"][FREE_REQUEST], result)
    if not RECORD_NBYTES <= load(found + 8) <= MESSAGE_NBYTES:
        return DROPPED
    tag = load(found)
    for slot in range(world["num_peers"] if tag != 0 else 0):
        if world["peers"][slot]["tag_in"] == tag:
            if result != 0:
                return MISSED - slot
            copy_bytes(world["address"] + _RECORD, inbox, RECORD_NBYTES)
            return slot
    return DROPPED


@compiled
def _is_late(world: World) -> bool:
    """Whether pieces of an earlier message may still come."""
    if world["late"] != 0 and call_check(world["native"][CHECK], world["late"]) != _IN_PROGRESS:
        call_free(world["native"][FREE_REQUEST], world["late"])
        world["late"] = 0
    return bool(world["late"] != 0)


@compiled
def received(world: World) -> int:
    """The length of the message that `receive` has taken."""
    nbytes: int = load(world["address"] + _MESSAGE + 8)
    return nbytes
