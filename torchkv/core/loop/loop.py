"""The resident loop itself: `step` does what there is to do. `thread` calls it until it is told to stop. Compiled."""

from __future__ import annotations

from collections.abc import Sequence

from torchkv.core.journal import begin, now
from torchkv.core.loop.codes import (
    AUX,
    CREDIT,
    CUT,
    DECIDED,
    DONE,
    FINISH,
    GRANT,
    HEARD,
    HELLO,
    OUTSIDE,
    POST,
    POSTED,
    PROMISE,
    SEAL,
    STAGED,
    START,
    STRAY,
    VERDICT,
    WAIT,
    WAITING,
    WRITTEN,
)
from torchkv.core.loop.copying import queue_op
from torchkv.core.loop.events import emit, event_room
from torchkv.core.loop.grants import (
    forget,
    on_grant,
    on_hello,
    on_missed,
    on_part,
    owe_grants,
    park,
    pay_grant,
    pay_hello,
    wait_for_grant,
)
from torchkv.core.loop.limits import COMMANDS, DUE, MAILBOX_RECORDS, MAX_OPS, RECORD_NBYTES
from torchkv.core.loop.mailbox import look, mark_heard, owe, seal_if_done, take, waiting
from torchkv.core.loop.network import MISSED, NONE, drive, receive, received
from torchkv.core.loop.receiving import pay_verdict
from torchkv.core.loop.rounds import begin_round, on_decided, on_done, pay_decided, pay_done, pay_posted
from torchkv.core.loop.sending import (
    BLOCKED,
    ENDED,
    advance,
    hint_seal,
    on_verdict,
    pay_seal,
    tell_pieces,
    withdraw_hint,
)
from torchkv.core.loop.staging import forget_pieces, on_credit
from torchkv.core.loop.state.world import World, word_at
from torchkv.core.loop.stripes import granted_to
from torchkv.core.loop.unpacking import follow, land, on_staged, pay_credit, unpack_room
from torchkv.host.atomics import load, store
from torchkv.host.jit import compiled

__all__ = [
    "drop",
    "drop_due",
    "drop_due_to",
    "settle",
    "step",
]

_HEARD = 64  # records of one mailbox in one step
_TAIL, _HEAD = word_at("command_tail"), word_at("command_head")


@compiled
def _command(world: World) -> int:
    """Takes the next command. The op that it starts; -1 for any other command, and for an op that waits."""
    command = world["commands"][world["command_head"] & (COMMANDS - 1)]
    store(world["address"] + _HEAD, world["command_head"] + 1)
    kind, index = command & 0xFF, command >> 8
    if kind == START:
        return _start(world, index)
    if kind == FINISH:
        _finish(world, index)
    elif kind == WAIT:
        wait_for_grant(world, index)
    elif kind == POST:
        owe_grants(world, index)
    else:
        begin_round(world, index)
    return -1


@compiled
def _finish(world: World, flow: int) -> None:
    send = world["sends"][flow]
    send["operation"] = begin(world, send["verb"], send["serial"], 0, 0, 0, 0)
    send["finished"] = now(world)
    send["num_pages"] = send["finish"]
    world["unfinished"] -= send["started"]
    hint_seal(world, send)
    seal_if_done(world, flow)


@compiled
def _start(world: World, index: int) -> int:
    op = world["ops"][index]
    send = world["sends"][op["flow"]]
    if op["verb"] != 0:
        count, first, last = op["num_positions"], 0, 0
        if count > 0:
            first, last = load(op["positions"]), load(op["positions"] + 8 * (count - 1))
        op["operation"] = begin(world, op["verb"], send["serial"], first, last, count, op["count"])
    if send["state"] == WAITING:
        park(world, index)
        return -1
    send["running"] += 1
    if send["started"] == 0:
        send["started"] = 1
        world["unfinished"] += 1
    granted = granted_to(send, op)
    if op["count"] > 0 and (op["start"] + op["count"] - 1) * granted[2] >= granted[1]:
        if send["due"] == 0:
            send["due"] = 1  # it will never be sealed
            emit(world, OUTSIDE, index, 0)
        return -1
    return index


@compiled
def _obey(world: World) -> bool:
    """Takes the callers' commands. An op begins at once, so that small ones overtake what is under way."""
    tail = load(world["address"] + _TAIL)
    if world["command_head"] == tail:
        return False
    budget = 2 * world["turn"]
    while world["command_head"] != tail and budget > 0:
        index = _command(world)
        if index < 0:
            continue
        copied = advance(world, index, world["turn"])
        if copied > ENDED:
            queue_op(world, index)
        budget -= ENDED - copied if copied <= ENDED else max(copied, 0)
    return True


@compiled
def _hear(world: World) -> bool:
    """Takes in what peers have sent. Whether there was anything."""
    heard = False
    for source in range(world["num_peers"]):
        peer = world["peers"][source]
        if peer["inbox"] == 0:
            continue
        before = peer["read"]
        while peer["read"] < before + _HEARD and event_room(world) and unpack_room(world) and take(world, peer):
            if not _heed(world, source):
                emit(world, STRAY, 0, source)
        if peer["read"] != before:
            store(peer["inbox_head"], peer["read"])
            heard = True
    return heard


@compiled
def _heed(world: World, source: int) -> bool:
    """Acts upon ``world["record"]``; False if it is Python's to judge."""
    record = world["record"]
    kind, known = record["head"] & 0xFF, True
    if kind == GRANT:
        on_grant(world, source, 0)
    elif kind == VERDICT:
        known = on_verdict(world, source, record["flows"] & 0xFFFFFFFF, record["generation"])
    elif kind == DONE:
        known = on_done(world, source, record["flows"] & 0xFFFFFFFF, record["generation"])
    elif kind == DECIDED:
        known = on_decided(world, source, record["flows"] & 0xFFFFFFFF, record["generation"])
    elif kind == STAGED:
        known = on_staged(world, source)
    elif kind == CREDIT:
        on_credit(world, source)
    elif kind == POSTED:
        known = False
    elif kind != HEARD:
        known = follow(world, source)
    return known


@compiled
def _hear_ahead(world: World) -> bool:
    """Takes grants and posts from behind records that wait for kernels, and on none of which they depend.

    See `unpack_room`. False if it has stopped, because Python has to take events first.
    """
    for source in range(world["num_peers"]):
        peer = world["peers"][source]
        if peer["inbox"] == 0:
            continue
        number = peer["read"]
        while number < peer["read"] + MAILBOX_RECORDS and waiting(peer, number):
            if not event_room(world):
                return False
            kind = look(world, peer, number)
            if kind in (GRANT, POSTED):
                mark_heard(peer, number)
                if not _heed(world, source):
                    emit(world, STRAY, 0, source)
            number += 1
    return True


@compiled
def _hear_network(world: World) -> bool:
    """Takes in what peers have sent through the network. Whether there was anything."""
    heard = unpacked = 0
    while heard < _HEARD and unpacked < world["turn"] and event_room(world) and unpack_room(world):
        source = receive(world)
        if source == NONE:
            break
        heard += 1
        kind = -1 if source < 0 else world["record"]["head"] & 0xFF
        if source <= MISSED:
            on_missed(world, MISSED - source)
        elif kind == HELLO:
            on_hello(world, source)
        elif kind == GRANT:
            on_part(world, source)
        elif kind in (WRITTEN, AUX, SEAL, VERDICT, STAGED, CREDIT, PROMISE) and received(world) == RECORD_NBYTES:
            unpacked += world["record"]["nbytes"] if kind == STAGED else 0
            if not _heed(world, source):
                emit(world, STRAY, 0, source)
    return heard > 0


@compiled
def _tell_pieces(world: World) -> bool:
    """Puts pieces into standing stages, and tells receivers of them. Whether anything has changed."""
    told, untold = False, 0
    for slot in range(world["num_peers"]):
        peer = world["peers"][slot]
        if peer["piece_head"] < peer["piece_tail"]:
            told |= tell_pieces(world, peer)
            if peer["failed"] == 0 or peer["outbox"] != 0:  # else they are never told
                untold += peer["piece_tail"] - peer["piece_head"]
    world["untold"] = untold
    return told


@compiled
def _report_failures(world: World) -> None:
    """Tells Python of peers to which the network has failed."""
    for slot in range(world["num_peers"]):
        peer = world["peers"][slot]
        if peer["failed"] != 0 and peer["reported"] == 0 and event_room(world):
            peer["reported"] = 1
            emit(world, CUT, 0, slot)


@compiled
def _move(world: World) -> bool:
    """Copies for the op that waits longest. One that has to wait for something goes to the end of the queue."""
    moved = False
    budget = world["turn"]
    for _ in range(world["queue_tail"] - world["queue_head"]):
        if budget <= 0:
            break
        index = world["queue"][world["queue_head"] & (MAX_OPS - 1)]
        copied = advance(world, index, budget)
        if copied < 0:
            world["queue_head"] += 1
        if copied == BLOCKED:
            queue_op(world, index)
            continue
        moved = True
        budget -= ENDED - copied if copied < 0 else copied
    return moved


@compiled
def _pay_one(world: World, kind: int, rank: int, flow: int, generation: int) -> bool:
    """Sends a message that is due; False if there is no room for it. flow: of this rank, or a round, or of a writer."""
    if kind == SEAL:
        return pay_seal(world, flow, generation)
    if kind == GRANT:
        return pay_grant(world, rank, flow, generation)
    if kind == HELLO:
        return pay_hello(world, world["peers"][rank])
    if kind == POSTED:
        return pay_posted(world, rank, flow, generation)
    if kind == DONE:
        return pay_done(world, rank, flow, generation)
    if kind == DECIDED:
        return pay_decided(world, flow)
    if kind == CREDIT:
        return pay_credit(world, rank)
    return pay_verdict(world, rank, flow, generation)


@compiled
def _pay(world: World) -> bool:
    """Sends what is due, as far as there is room for it."""
    paid = False
    for _ in range(world["due_tail"] - world["due_head"]):
        due = world["due"][world["due_head"] & (DUE - 1)]
        kind, rank, flow, generation = due[0] & 0xFF, due[0] >> 8, due[1], due[2]
        world["due_head"] += 1
        if _pay_one(world, kind, rank, flow, generation):
            paid = True
            continue
        owe(world, kind, rank, flow, generation)
    return paid


@compiled
def step(worlds: Sequence[World]) -> bool:
    """One turn: commands, messages, a slice of the copies, messages that are due. Whether there was anything to do.

    Blocks nowhere and reads no clock, so that a test can drive many loops in one thread. worlds: an array of one world,
    which callers in Python pass in a twentieth of the time. Each compiled function that calls this one takes two
    seconds more to compile.
    """
    world = worlds[0]
    busy = False
    world["steps"] += 1
    if event_room(world):
        busy = _obey(world)
        busy |= land(world)
        busy |= _hear(world)
        if world["lanes"] > 0:
            busy |= drive(world)
            busy |= _hear_network(world)
        if world["stages"] > 0:
            busy |= _tell_pieces(world)
        busy |= _move(world)
    busy |= _pay(world)
    if world["lanes"] > 0:
        _report_failures(world)
    return busy


@compiled
def settle(world: World) -> bool:
    """Takes all commands, without copying, and all messages. For a caller that holds the lock.

    False if mailboxes have more, for which Python has to take events first. Of what kernels have to make room for, only
    grants and posts are taken: messages that have come by another way may depend on these.
    """
    tail = load(world["address"] + _TAIL)
    while world["command_head"] != tail:
        index = _command(world)
        if index >= 0:
            queue_op(world, index)
    while _hear(world):
        pass
    if world["lanes"] > 0:
        while _hear_network(world):
            pass
    return _hear_ahead(world)


@compiled
def drop(world: World, flow: int) -> None:
    """Forgets a send: its ops that have not ended, its seal, its wait for a grant.

    For a caller that holds the lock, and has settled. So no byte of them is on its way, unless kernels are enqueued.
    """
    send = world["sends"][flow]
    kept = world["queue_head"]
    for at in range(world["queue_head"], world["queue_tail"]):
        index = world["queue"][at & (MAX_OPS - 1)]
        op = world["ops"][index]
        if op["flow"] != flow:
            world["queue"][kept & (MAX_OPS - 1)] = index
            kept += 1
        elif op["posted"] != 0 and op["staged"] == 0 and send["network"] == 0:
            world["flying"] -= 1
    world["queue_tail"] = kept
    drop_due(world, SEAL, flow)
    forget_pieces(world, world["peers"][send["peer"]], flow)
    if send["state"] == WAITING:
        forget(world, flow)
    send["running"] = send["flying"] = 0
    withdraw_hint(world, send)
    if send["num_pages"] < 0:
        world["unfinished"] -= send["started"]


@compiled
def drop_due(world: World, kind: int, flow: int) -> int:
    """Forgets the messages of this kind that are due for a flow. A bit for each peer that they were for."""
    dropped = 0
    kept = world["due_head"]
    for at in range(world["due_head"], world["due_tail"]):
        due = world["due"][at & (DUE - 1)]
        if due[0] & 0xFF == kind and due[1] == flow:
            dropped |= 1 << (due[0] >> 8)
        else:
            to = world["due"][kept & (DUE - 1)]
            to[0], to[1], to[2] = due[0], due[1], due[2]
            kept += 1
    world["due_tail"] = kept
    return dropped


@compiled
def drop_due_to(world: World, peer: int) -> None:
    """Forgets the messages that are due to a peer, which has ended."""
    kept = world["due_head"]
    for at in range(world["due_head"], world["due_tail"]):
        due = world["due"][at & (DUE - 1)]
        kind = due[0] & 0xFF
        if kind in (SEAL, DECIDED) or due[0] >> 8 != peer:  # these two name none
            to = world["due"][kept & (DUE - 1)]
            to[0], to[1], to[2] = due[0], due[1], due[2]
            kept += 1
    world["due_tail"] = kept
