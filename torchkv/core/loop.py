"""The resident loop itself: `step` does what there is to do, `run` calls it until it is told to stop. Compiled."""

from __future__ import annotations

import numpy as np

from torchkv.core.events import emit, event_room
from torchkv.core.mailbox import ASLEEP, NAPPING, call_yield, futex_wait, owe, take, waiting
from torchkv.core.receiving import on_record, pay_verdict
from torchkv.core.records import (
    CLOCK,
    COMMANDS,
    DUE,
    MAX_OPS,
    SEAL,
    STRAY,
    VERDICT,
    YIELD,
    World,
    word_at,
)
from torchkv.core.sending import BLOCKED, ENDED, advance, on_verdict, pay_seal, seal_if_done
from torchkv.host.atomics import exchange, fence, load, store
from torchkv.host.jit import compiled, monotonic_ns

__all__ = ["FINISH", "START", "drop", "run", "settle", "step"]

START, FINISH = 1, 2  # commands: an op, or a flow, in the bits above
_HEARD = 64  # records of one mailbox in one step
_SLEEP = 500_000_000  # nanoseconds: the loop looks up now and then even if nobody wakes it
_NAP = 50_000  # nanoseconds, while it waits for room in a mailbox, or while callers send layer after layer
_ATTENTIVE = 100_000_000  # nanoseconds without work after which it sleeps even if a send is not finished
_TAIL, _HEAD, _LOCK = word_at("command_tail"), word_at("command_head"), word_at("lock")
_WANTED, _STOP = word_at("wanted"), word_at("stop")


@compiled
def _command(world: World) -> int:
    """Takes the next command. The op that it starts; -1 for any other command."""
    command = world["commands"][world["command_head"] & (COMMANDS - 1)]
    store(world["address"] + _HEAD, world["command_head"] + 1)
    index: int = command >> 8
    if command & 0xFF == START:
        send = world["sends"][world["ops"][index]["flow"]]
        send["running"] += 1
        if send["started"] == 0:
            send["started"] = 1
            world["unfinished"] += 1
        return index
    world["sends"][index]["num_pages"] = world["sends"][index]["finish"]
    world["unfinished"] -= world["sends"][index]["started"]
    seal_if_done(world, index)
    return -1


@compiled
def _queue(world: World, index: int) -> None:
    world["queue"][world["queue_tail"] & (MAX_OPS - 1)] = index
    world["queue_tail"] += 1


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
            _queue(world, index)
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
        while peer["read"] < before + _HEARD and event_room(world) and take(world, peer):
            record = world["record"]
            if record["head"] & 0xFF == VERDICT:
                known = on_verdict(world, source, record["flows"] & 0xFFFFFFFF, record["generation"])
            else:
                known = on_record(world, source)
            if not known:
                emit(world, STRAY, 0, source)
        if peer["read"] != before:
            store(peer["inbox_head"], peer["read"])
            heard = True
    return heard


@compiled
def _move(world: World) -> bool:
    """Copies for the op that waits longest. One whose receiver has no room goes to the end of the queue."""
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
            _queue(world, index)
            continue
        moved = True
        budget -= ENDED - copied if copied < 0 else copied
    return moved


@compiled
def _pay(world: World) -> bool:
    """Sends what is due, as far as there is room for it."""
    paid = False
    for _ in range(world["due_tail"] - world["due_head"]):
        due = world["due"][world["due_head"] & (DUE - 1)]
        kind, rank, flow, generation = due[0] & 0xFF, due[0] >> 8, due[1], due[2]
        world["due_head"] += 1
        done = pay_seal(world, flow, generation) if kind == SEAL else pay_verdict(world, rank, flow, generation)
        if done:
            paid = True
            continue
        owe(world, kind, rank, flow, generation)
    return paid


@compiled
def step(world: World) -> bool:
    """One turn: commands, messages, a slice of the copies, messages that are due. Whether there was anything to do.

    Blocks nowhere and reads no clock, so that a test can drive many loops in one thread.
    """
    busy = False
    if event_room(world):
        busy = _obey(world)
        busy |= _hear(world)
        busy |= _move(world)
    busy |= _pay(world)
    return busy


@compiled
def settle(world: World) -> None:
    """Takes all commands, without copying, and all messages. For a caller that holds the lock."""
    tail = load(world["address"] + _TAIL)
    while world["command_head"] != tail:
        index = _command(world)
        if index >= 0:
            _queue(world, index)
    while _hear(world):
        pass


@compiled
def drop(world: World, flow: int) -> None:
    """Forgets a send's ops that have not ended, and its seal.

    For a caller that holds the lock, and has settled: so no byte of them is on its way.
    """
    kept = world["queue_head"]
    for at in range(world["queue_head"], world["queue_tail"]):
        index = world["queue"][at & (MAX_OPS - 1)]
        if world["ops"][index]["flow"] != flow:
            world["queue"][kept & (MAX_OPS - 1)] = index
            kept += 1
    world["queue_tail"] = kept
    paid = world["due_head"]
    for at in range(world["due_head"], world["due_tail"]):
        due = world["due"][at & (DUE - 1)]
        if due[0] != SEAL or due[1] != flow:
            kept_due = world["due"][paid & (DUE - 1)]
            kept_due[0], kept_due[1], kept_due[2] = due[0], due[1], due[2]
            paid += 1
    world["due_tail"] = paid
    send = world["sends"][flow]
    send["running"] = 0
    if send["num_pages"] < 0:
        world["unfinished"] -= send["started"]


@compiled
def run(world: World) -> None:
    """Steps until ``stop`` is set. Spins a while when there is nothing to do, then sleeps until the bell is rung."""
    address, bell = world["address"], world["bell"]
    scratch = np.zeros(2, dtype=np.int64)
    idle_since = 0
    while load(address + _STOP) == 0:
        if load(address + _WANTED) != 0 or exchange(address + _LOCK, 1) != 0:
            call_yield(world["functions"][YIELD], 0)
            continue
        busy = step(world)
        store(address + _LOCK, 0)
        if busy:
            idle_since = 0
            continue
        # Nobody rings when a full mailbox has room again.
        blocked = world["queue_head"] != world["queue_tail"] or world["due_head"] != world["due_tail"]
        now = monotonic_ns(world["functions"][CLOCK], scratch)
        if idle_since == 0:
            idle_since = now
        if now - idle_since < world["spin"]:
            call_yield(world["functions"][YIELD], 0)
            continue
        nap = blocked or (world["unfinished"] > 0 and now - idle_since < _ATTENTIVE)
        state = NAPPING if nap else ASLEEP
        store(bell, state)
        fence()
        if not _has_work(world):
            futex_wait(world, bell, state, _NAP if nap else _SLEEP, scratch)
        store(bell, 0)


@compiled
def _has_work(world: World) -> bool:
    """Whether somebody has stored something for this loop before the bell said that it sleeps."""
    address = world["address"]
    if load(address + _TAIL) != world["command_head"] or load(address + _STOP) != 0:
        return True
    for source in range(world["num_peers"]):
        if world["peers"][source]["inbox"] != 0 and waiting(world["peers"][source]):
            return True
    return False
