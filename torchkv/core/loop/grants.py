"""Grants: how a receiver's page ids reach its writers, and the send that waits for them there. Compiled.

The receiver writes a grant's body into the slot of its flow in its own segment, and a GRANT record into the mailbox of
each writer:

    `torchkv.core.loop.state.peers.Grant` | name in UTF-8: MAX_NAME bytes | page ids, then a state slot: int64

The slot stays as it is until the request has ended, so until every writer has seen the record or is gone.

A writer of another host does not map the slot. The receiver's loop sends it what lies in it, in parts behind GRANT
records, one after another; the writer's loop puts them together in a slot of its own, of which it has as many for each
peer as that has flows. From there on it makes no difference.

*Once.* Such a grant and a control message have no order. So Python, when it takes a receive back, tells the grant again
in a message to writers that have not shown that they know it, before it tells whatever else. A writer takes each grant
once: for each flow of a peer it notes the latest generation that has come in either way, and drops what is not later.
A flow is used again only after all its writers have known of the end of its last request, or have ended themselves.

*Greetings.* A rank makes its lane to a peer when it first needs it, and hears no record of that peer before. So each
end sends HELLO when it has made its lane, and answers that of the other: who has an answer knows that it is heard. Only
then grants go through the network, before in control messages. HELLOs are as long as messages get: an answer also says
that the transport has carried one in one piece, as `network.receive` wants them. If one is missed later,
because it has come in pieces after all, its sender is told by a short HELLO: it sends grants in messages from then on,
and Python tells those again that are under way.

A writer's loop looks for the send that waits for this receiver under this name, and binds it if Python would bind it
too. Everything else it leaves to Python: a grant that nobody waits for yet, one of other writers than expected, one
that does not hold the pages that were sent, and one behind a prefix. For all receivers of one verb must hold the same
prefix, and a loop sees one of them: so what it binds is behind none. A verb that begins its request, or asks for its
prefix, looks first whether the loop has left the grant to Python, and Python has not taken it in yet: then the verb
binds it in the same way, also behind a prefix if its pages count from there, since it has no other receiver. So Python
takes grants in only if a request waits for one, or has failed and refuses it, or somebody asks: else it puts them
aside, among what is *unclaimed*.

Names are compared by their BLAKE2b hashes of 128 bits. Two names of one hash are not known, nor how to find them.
"""

from __future__ import annotations

from torchkv.core.journal import begin, now, took
from torchkv.core.loop.codes import (
    BOUND,
    CUT,
    FREE,
    GRANT,
    GRANT_PHASE,
    GRANTED,
    HELLO,
    NEWS,
    OPEN,
    POSTED,
    RECEIVING,
    SUCCEEDED,
)
from torchkv.core.loop.copying import queue_op
from torchkv.core.loop.events import emit, tell_driver
from torchkv.core.loop.limits import (
    BUCKETS,
    GRANTED_IDS,
    MAX_FLOWS,
    MAX_GRANTED,
    MAX_NAME,
    MAX_PREFIX,
    MAX_UNCLAIMED,
    RECORD_NBYTES,
)
from torchkv.core.loop.mailbox import GRANT_SLOT, GRANTS_AT, owe, seal_if_done, tell_brief
from torchkv.core.loop.network import received, record_room, send
from torchkv.core.loop.state.peers import Peer, Record
from torchkv.core.loop.state.requests import Receive, Send
from torchkv.core.loop.state.world import GRANT_NBYTES, Event, World, grant_word_at, word_at
from torchkv.host.atomics import load, store
from torchkv.host.copy_loops import copy_bytes
from torchkv.host.jit import compiled

__all__ = [
    "ARRIVALS_NBYTES",
    "FROM_NETWORK",
    "IDS_AT",
    "NAME_AT",
    "SLOTS_AT",
    "forget",
    "greet",
    "meet",
    "on_grant",
    "on_hello",
    "on_missed",
    "on_part",
    "owe_grants",
    "park",
    "pay_grant",
    "pay_hello",
    "wait_for_grant",
    "whose",
]

NAME_AT = GRANT_NBYTES  # offsets of the name and of the page ids in a slot
IDS_AT = NAME_AT + MAX_NAME

# A peer's grants that come through the network: of each of its flows the latest generation, then the slots.
SLOTS_AT = 8 * MAX_FLOWS
ARRIVALS_NBYTES = SLOTS_AT + MAX_FLOWS * GRANT_SLOT
FROM_NETWORK = 1  # ``spare`` of the record of a GRANTED event, if the grant lies there

_GENERATION, _WRITERS = grant_word_at("generation"), grant_word_at("writers")
_HASH0, _HASH1 = grant_word_at("hash0"), grant_word_at("hash1")
_PREFIX, _NUM_PAGES, _NUM_SLOTS = (grant_word_at(name) for name in ("prefix", "num_pages", "num_slots"))
_HEED, _HEAD, _TAIL = word_at("heed"), word_at("event_head"), word_at("event_tail")
_BEHIND = word_at("long_inbox") + RECORD_NBYTES

# ---------------------------------------------------------------- the receiver


@compiled
def owe_grants(world: World, flow: int) -> None:
    """The grant of a receive is due to each of its writers, and what was posted to the leader of the instance."""
    receive = world["receives"][flow]
    if receive["serial"] != 0:
        pages = load(world["bell"] + GRANTS_AT + flow * GRANT_SLOT + _NUM_PAGES)
        receive["operation"] = begin(world, RECEIVING, receive["serial"], 0, 0, 0, pages)
        receive["begun"] = now(world)
    for number in range(receive["num_writers"]):
        owe(world, GRANT, receive["writers"][number]["rank"], flow, receive["generation"])
    if receive["leader"] >= 0 and receive["leader"] != world["rank"]:
        owe(world, POSTED, receive["leader"], flow, receive["generation"])


@compiled
def pay_grant(world: World, rank: int, flow: int, generation: int) -> bool:
    """Tells a writer of a grant; False where its mailbox is full."""
    receive = world["receives"][flow]
    if receive["state"] in (FREE, SUCCEEDED) or receive["generation"] != generation:
        return True  # it has ended, or Python has taken the flow back, and tells this writer itself
    peer = world["peers"][rank]
    if peer["outbox"] == 0:
        return _send_grant(world, receive, rank, flow)
    return tell_brief(world, rank, GRANT, flow, generation)


@compiled
def _send_grant(world: World, receive: Receive, rank: int, flow: int) -> bool:
    """Sends a grant to a writer of another host; False where there is no room for all of it."""
    peer = world["peers"][rank]
    body = world["bell"] + GRANTS_AT + flow * GRANT_SLOT
    nbytes, part = IDS_AT + 8 * (load(body + _NUM_PAGES) + load(body + _NUM_SLOTS)), world["part"]
    if record_room(world, peer) < (nbytes + part - 1) // part:
        return False
    for number in range(receive["num_writers"]):
        if receive["writers"][number]["rank"] == rank:
            receive["writers"][number]["told"] = 1
    record: Record = world["record"]
    record["head"], record["flows"], record["generation"] = GRANT, flow, receive["generation"]
    record["hi"], record["nbytes"], record["spare"] = nbytes, 0, 0
    for at in range(0, nbytes, part):
        record["lo"] = at
        send(world, peer, body + at, min(part, nbytes - at))
    return True


# ---------------------------------------------------------------- greetings


@compiled
def greet(world: World, peer: int) -> None:
    """A HELLO is due."""
    if world["peers"][peer]["greeting"] == 0:
        world["peers"][peer]["greeting"] = 1
        owe(world, HELLO, peer, 0, 0)


@compiled
def pay_hello(world: World, peer: Peer) -> bool:
    """Sends a HELLO; False where there is no room for it. Who has a mailbox gets none: all records go there."""
    if peer["endpoint"] != 0 and peer["failed"] == 0 and peer["outbox"] == 0:
        if record_room(world, peer) < 1:
            return False
        record: Record = world["record"]
        record["head"] = HELLO
        record["flows"] = record["generation"] = record["nbytes"] = record["spare"] = 0
        record["lo"], record["hi"] = (0 if peer["hears"] != 0 else 1), peer["heard"]
        if peer["missed"] != 0:
            record["lo"], record["hi"] = 0, -1
        send(world, peer, 0, 0 if peer["missed"] != 0 else world["part"])
    peer["greeting"] = peer["missed"] = 0
    return True


@compiled
def on_hello(world: World, source: int) -> None:
    """The peer has its lane to this rank, and may have heard this rank's greeting."""
    record, peer = world["record"], world["peers"][source]
    if record["hi"] < 0:
        if peer["hears"] != 0:
            peer["hears"] = 2
            emit(world, CUT, 0, source)
        return
    if received(world) > RECORD_NBYTES:
        peer["heard"] = 1
    if record["hi"] != 0 and peer["hears"] == 0:
        peer["hears"] = 1
    if record["lo"] != 0:
        greet(world, source)


@compiled
def on_missed(world: World, source: int) -> None:
    """A long message of the peer has not come in one piece."""
    world["peers"][source]["missed"] = 1
    greet(world, source)


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
    if op["count"] > 0 and op["of_state"] == 0:
        send["reach"] = max(send["reach"], op["start"] + op["count"] - 1)


@compiled
def on_part(world: World, source: int) -> None:
    """Takes in a part of a grant that comes through the network. With the last one it is there: see `on_grant`."""
    record, peer, nbytes = world["record"], world["peers"][source], received(world) - RECORD_NBYTES
    flow, generation, at, end = record["flows"], record["generation"], record["lo"], record["hi"]
    if at == 0:
        peer["part_flow"], peer["part_generation"], peer["part_at"] = flow, generation, 0
    follows = flow == peer["part_flow"] and generation == peer["part_generation"] and at == peer["part_at"]
    known = 0 <= flow < MAX_FLOWS and peer["arrivals"] != 0
    if not follows or not known or not IDS_AT < end <= GRANT_SLOT or not 0 < nbytes <= end - at:
        peer["part_flow"] = -1
        return
    body = peer["arrivals"] + SLOTS_AT + flow * GRANT_SLOT
    copy_bytes(body + at, world["address"] + _BEHIND, nbytes)
    peer["part_at"] += nbytes
    if peer["part_at"] < end:
        return
    peer["part_flow"] = -1
    latest = peer["arrivals"] + 8 * flow
    if load(body + _NUM_PAGES) + load(body + _NUM_SLOTS) != (end - IDS_AT) // 8 or generation <= load(latest):
        return
    store(latest, generation)
    on_grant(world, source, FROM_NETWORK)


@compiled
def on_grant(world: World, source: int, where: int) -> None:
    """Binds the send that waits for the grant that ``world["record"]`` tells of, or leaves the grant to Python.

    where: in which memory the grant lies: `FROM_NETWORK`, or 0 for the memory that is mapped.
    """
    world["record"]["spare"] = where
    body, mine = _body(world["peers"][source], world["record"]), -1
    if body != 0:
        hash0, hash1 = load(body + _HASH0), load(body + _HASH1)
        mine = _waiting(world, source, hash0, hash1)
        if mine >= 0 and _fits(world, mine, body, world["record"]["generation"], 0):
            _bind(world, mine, source)
            return
        world["record"]["lo"], world["record"]["hi"] = hash0, hash1  # for `meet`
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
def meet(world: World, flow: int, prefixed: int) -> bool:
    """Binds a send that a verb is about to open to a grant that the loop has left to Python, and Python has not taken.

    prefixed: 1 if it may be behind a prefix. False, and nothing is done, unless there is just one, which fits. For a
    caller, who alone takes events meanwhile.
    """
    send, unclaimed = world["sends"][flow], world["unclaimed"]
    at = _search(world, send["peer"], send["hash0"], send["hash1"])
    if at < 0:
        return False
    event = _found(world, at)
    peer_flow, generation = event["record"]["flows"] & 0xFFFFFFFF, event["record"]["generation"]
    body = _body(world["peers"][send["peer"]], event["record"])
    if body == 0 or not _fits(world, flow, body, generation, prefixed):
        return False
    event["kind"] = NEWS  # no more
    while world["unclaimed_head"] < world["unclaimed_tail"]:
        if unclaimed[world["unclaimed_head"] & (MAX_UNCLAIMED - 1)]["kind"] != NEWS:
            break
        world["unclaimed_head"] += 1
    send["peer_flow"], send["generation"] = peer_flow, generation
    return True


@compiled
def whose(world: World, hash0: int, hash1: int) -> int:
    """The peer that has given the first grant under this name which Python has not taken in; -1 if there is none."""
    head, tail = load(world["address"] + _HEAD), load(world["address"] + _TAIL)
    at, _ = _search_in(world["unclaimed"], world["unclaimed_head"], world["unclaimed_tail"], -1, hash0, hash1)
    if at >= 0:
        return world["unclaimed"][at]["source"]
    at, _ = _search_in(world["events"], head, tail, -1, hash0, hash1)
    return world["events"][at]["source"] if at >= 0 else -1


@compiled
def _search(world: World, peer: int, hash0: int, hash1: int) -> int:
    """The only grant of ``peer`` under this name, for `_found`; -1 if there is none, or several."""
    head, tail = load(world["address"] + _HEAD), load(world["address"] + _TAIL)
    old, count = _search_in(world["unclaimed"], world["unclaimed_head"], world["unclaimed_tail"], peer, hash0, hash1)
    new, more = _search_in(world["events"], head, tail, peer, hash0, hash1)
    if count + more != 1:
        return -1
    return old if count > 0 else MAX_UNCLAIMED + new


@compiled
def _search_in(events: list[Event], head: int, tail: int, peer: int, hash0: int, hash1: int) -> tuple[int, int]:
    """The index of the first one, and how many there are. peer: -1 for any."""
    found, count = -1, 0
    for number in range(head, tail):
        event = events[number & (len(events) - 1)]
        if event["kind"] != GRANTED or (peer >= 0 and event["source"] != peer):
            continue
        if event["record"]["lo"] == hash0 and event["record"]["hi"] == hash1:
            if count == 0:
                found = number & (len(events) - 1)
            count += 1
    return found, count


@compiled
def _found(world: World, at: int) -> Event:
    """The event of a grant that Python has not taken in: see `_search`."""
    return world["unclaimed"][at] if at < MAX_UNCLAIMED else world["events"][at - MAX_UNCLAIMED]


@compiled
def _body(peer: Peer, record: Record) -> int:
    """The address of the grant that a GRANT record tells of, whose ``spare`` says where it lies; 0 if nothing does."""
    flow, slots = record["flows"] & 0xFFFFFFFF, peer["grants"]
    if record["spare"] == FROM_NETWORK:
        slots = peer["arrivals"] + SLOTS_AT if peer["arrivals"] != 0 else 0
    if slots == 0 or flow >= MAX_FLOWS:
        return 0
    body: int = slots + flow * GRANT_SLOT
    return body


@compiled
def _fits(world: World, flow: int, body: int, generation: int, prefixed: int) -> bool:
    """Whether Python would bind the send to this grant without a word. Copies the ids, which the peer can change.

    prefixed: 1 if it may be behind a prefix. What lies in the slot may be of a later grant, or be nonsense.
    """
    send = world["sends"][flow]
    count, slots, prefix = load(body + _NUM_PAGES), load(body + _NUM_SLOTS), load(body + _PREFIX)
    if load(body + _GENERATION) != generation or load(body + _WRITERS) != send["writers"]:
        return False
    if not 0 <= count <= MAX_GRANTED or not 0 <= prefix <= prefixed * MAX_PREFIX:
        return False
    stateful = send["max_slot"] > 0
    if slots != 1 if stateful else count == 0 or not 0 <= slots <= 1:
        return False
    src_page, dst_page = send["src_page"], send["dst_page"]
    tokens = count * dst_page
    if send["reach"] * src_page >= tokens:
        return False  # a page outside the grant
    if send["num_pages"] >= 0 and abs(send["num_pages"] * src_page - tokens) >= max(src_page, dst_page):
        return False
    ids = world["granted_ids"] + 8 * GRANTED_IDS * flow
    copy_bytes(ids, body + IDS_AT, 8 * (count + slots))
    for i in range(count):
        page = load(ids + 8 * i)
        if page < 0 or page >= send["max_page"]:
            return False
    if stateful and not 0 <= load(ids + 8 * count) < send["max_slot"]:
        return False
    if load(body + _GENERATION) != generation:
        return False
    send["ids"], send["granted"], send["prefix"] = ids, tokens, prefix
    return True


@compiled
def _bind(world: World, flow: int, source: int) -> None:
    """The send goes on under its grant, with the ops that waited."""
    forget(world, flow)
    send: Send = world["sends"][flow]
    send["peer_flow"], send["generation"] = world["record"]["flows"] & 0xFFFFFFFF, world["record"]["generation"]
    send["state"] = OPEN
    if send["serial"] != 0:
        took(world, GRANT_PHASE, now(world) - send["begun"])
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
