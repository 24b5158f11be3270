"""Grants: how a receiver's page ids reach its writers, and the send that waits for them there. Compiled.

The receiver writes a grant's body into the slot of its flow in its own segment, and a GRANT record into the mailbox of
each writer:

    `torchkv.core.loop.records.Grant` | page ids: int64 [MAX_GRANTED] | name in UTF-8: MAX_NAME bytes

The slot stays as it is until the request has ended, so until every writer has seen the record or is gone.

A writer's loop looks for the send that waits for this receiver under this name, and binds it if Python would bind it
too. Everything else it leaves to Python: a grant that nobody waits for yet, one of other writers than expected, one
that does not hold the pages that were sent, and one behind a prefix. For all receivers of one verb must hold the same
prefix, and a loop sees one of them: so what it binds is behind none.

Names are compared by their BLAKE2b hashes of 128 bits. Two names of one hash are not known, nor how to find them.
"""

from __future__ import annotations

from torchkv.core.loop.codes import BOUND, FREE, GRANT, GRANTED, OPEN, POSTED
from torchkv.core.loop.events import emit, tell_driver
from torchkv.core.loop.limits import BUCKETS, MAX_FLOWS, MAX_GRANTED
from torchkv.core.loop.mailbox import GRANT_SLOT, owe, ring, room, tell
from torchkv.core.loop.records import GRANT_NBYTES, Record, Send, World, grant_word_at, word_at
from torchkv.core.loop.sending import queue_op, seal_if_done
from torchkv.host.atomics import copy_bytes, load
from torchkv.host.jit import compiled

__all__ = ["NAME_AT", "forget", "on_grant", "owe_grants", "park", "pay_grant", "wait_for_grant"]

NAME_AT = GRANT_NBYTES + 8 * MAX_GRANTED  # offset of the name in a slot

_GENERATION, _WRITERS = grant_word_at("generation"), grant_word_at("writers")
_HASH0, _HASH1 = grant_word_at("hash0"), grant_word_at("hash1")
_PREFIX, _NUM_PAGES = grant_word_at("prefix"), grant_word_at("num_pages")
_HEED, _HEAD = word_at("heed"), word_at("event_head")

# ---------------------------------------------------------------- the receiver


@compiled
def owe_grants(world: World, flow: int) -> None:
    """The grant of a receive is due to each of its writers, and what was posted to the leader of the instance."""
    receive = world["receives"][flow]
    for number in range(receive["num_writers"]):
        owe(world, GRANT, receive["writers"][number]["rank"], flow, receive["generation"])
    if receive["leader"] >= 0 and receive["leader"] != world["rank"]:
        owe(world, POSTED, receive["leader"], flow, receive["generation"])


@compiled
def pay_grant(world: World, rank: int, flow: int, generation: int) -> bool:
    """Tells a writer of a grant; False where its mailbox is full."""
    receive = world["receives"][flow]
    if receive["state"] == FREE or receive["generation"] != generation:
        return True  # Python has taken the flow back, and tells this writer itself
    peer = world["peers"][rank]
    if room(world, peer) < 1:
        return False
    record: Record = world["record"]
    record["head"], record["flows"], record["generation"] = GRANT, flow, generation
    record["lo"] = record["hi"] = record["nbytes"] = record["spare"] = 0
    tell(world, peer)
    ring(world, peer["bell"])
    return True


# ---------------------------------------------------------------- the writer


@compiled
def wait_for_grant(world: World, flow: int) -> None:
    """From now on a grant may bind this send. One that came before lies with Python, which is woken for it."""
    send = world["sends"][flow]
    bucket = send["hash0"] & (BUCKETS - 1)
    send["next"] = world["buckets"][bucket]
    world["buckets"][bucket] = flow + 1
    if load(world["address"] + _HEAD) < world["granted"]:
        tell_driver(world)


@compiled
def forget(world: World, flow: int) -> None:
    """Takes a waiting send out of the table."""
    send = world["sends"][flow]
    bucket = send["hash0"] & (BUCKETS - 1)
    at = world["buckets"][bucket] - 1
    if at == flow:
        world["buckets"][bucket] = send["next"]
        return
    while at >= 0:
        following = world["sends"][at]["next"] - 1
        if following == flow:
            world["sends"][at]["next"] = send["next"]
            return
        at = following


@compiled
def park(world: World, index: int) -> None:
    """An op of a send that waits for its grant waits with it."""
    op = world["ops"][index]
    send = world["sends"][op["flow"]]
    op["next"] = -1
    if send["last"] < 0:
        send["first"] = index
    else:
        world["ops"][send["last"]]["next"] = index
    send["last"] = index
    if op["count"] > 0:
        send["reach"] = max(send["reach"], op["start"] + op["count"] - 1)


@compiled
def on_grant(world: World, source: int) -> None:
    """Binds the send that waits for the grant that ``world["record"]`` tells of, or leaves the grant to Python."""
    flow = world["record"]["flows"] & 0xFFFFFFFF
    mine = -1
    if flow < MAX_FLOWS:
        body = world["peers"][source]["grants"] + flow * GRANT_SLOT
        mine = _waiting(world, source, load(body + _HASH0), load(body + _HASH1))
        if mine >= 0 and _fits(world, mine, body):
            _bind(world, mine, source)
            return
    emit(world, GRANTED, 0, source)
    world["granted"] = world["event_tail"]
    if mine >= 0 or load(world["address"] + _HEED) != 0:
        tell_driver(world)


@compiled
def _waiting(world: World, peer: int, hash0: int, hash1: int) -> int:
    """The flow of the send to ``peer`` that waits under this name, or -1."""
    at: int = world["buckets"][hash0 & (BUCKETS - 1)] - 1
    while at >= 0:
        send = world["sends"][at]
        if send["peer"] == peer and send["hash0"] == hash0 and send["hash1"] == hash1:
            return at
        at = send["next"] - 1
    return -1


@compiled
def _fits(world: World, flow: int, body: int) -> bool:
    """Whether Python would bind the send to this grant without a word. Copies the page ids, which the peer can change.

    What lies in the slot may be of a later grant, or be nonsense.
    """
    send, generation = world["sends"][flow], world["record"]["generation"]
    count = load(body + _NUM_PAGES)
    if load(body + _GENERATION) != generation or load(body + _WRITERS) != send["writers"]:
        return False
    if count < 1 or count > MAX_GRANTED or load(body + _PREFIX) != 0:
        return False
    src_page, dst_page = send["src_page"], send["dst_page"]
    tokens = count * dst_page
    if send["reach"] * src_page >= tokens:
        return False  # a page outside the grant
    if send["num_pages"] >= 0 and abs(send["num_pages"] * src_page - tokens) >= max(src_page, dst_page):
        return False
    ids = world["granted_ids"] + 8 * MAX_GRANTED * flow
    copy_bytes(ids, body + GRANT_NBYTES, 8 * count)
    for i in range(count):
        page = load(ids + 8 * i)
        if page < 0 or page >= send["max_page"]:
            return False
    if load(body + _GENERATION) != generation:
        return False
    send["ids"], send["granted"] = ids, tokens
    return True


@compiled
def _bind(world: World, flow: int, source: int) -> None:
    """The send goes on under its grant, with the ops that waited."""
    forget(world, flow)
    send: Send = world["sends"][flow]
    send["peer_flow"], send["generation"] = world["record"]["flows"] & 0xFFFFFFFF, world["record"]["generation"]
    send["state"] = OPEN
    emit(world, BOUND, flow, source)
    index = send["first"]
    while index >= 0:
        send["running"] += 1
        queue_op(world, index)
        index = world["ops"][index]["next"]
    if send["num_pages"] < 0:
        send["started"] = 1
        world["unfinished"] += 1
    seal_if_done(world, flow)
