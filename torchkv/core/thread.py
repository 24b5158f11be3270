"""Who runs the resident loop: its thread, which steps, spins, naps and sleeps, or a caller that waits. Compiled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchkv.core.loop.codes import CLOCK, SYSCALL, YIELD
from torchkv.core.loop.limits import FLIGHT
from torchkv.core.loop.loop import step
from torchkv.core.loop.mailbox import ASLEEP, ATTENDED, NAPPING, SEALS_AT, may_run, ring, waiting
from torchkv.core.loop.state.addresses import world_at
from torchkv.core.loop.state.world import World, word_at
from torchkv.host.atomics import LOOKS, add, exchange, exchange_if, fence, load, pause, store
from torchkv.host.futex import call_yield, futex_wait
from torchkv.host.jit import compiled, compiled_with_gil, monotonic_ns

__all__ = ["attend", "end_turn", "run", "seals_expected", "take_turn"]

_SLEEP = 500_000_000  # nanoseconds: the loop looks up now and then even if nobody wakes it
_NAP = 50_000  # nanoseconds, while it waits for room in a mailbox, or while callers send layer after layer
_LONG_NAP = 2_000_000  # the longest between two looks at the network
_PATIENCE = 32  # and it naps for no more than this part of the time in which nothing has come
_GRACE = 200_000_000  # nanoseconds after the last flow through the network, in which Python's thread notices that
_ATTENTIVE = 2_000_000  # nanoseconds without work after which it sleeps even if a send is not finished
_PARKED = 20_000_000  # nanoseconds between two looks of the thread at whether a caller still runs the loop
_IDLE = 100_000  # nanoseconds without work after which a caller leaves the loop to its thread
_LITTLE = 1 << 16  # bytes that a caller copies at most in the loop's place before the call returns
_CROWDED = 20_000  # nanoseconds of a look at nothing after which another thread must have had its core
_TAIL, _LOCK, _WANTED, _STOP = (word_at(name) for name in ("command_tail", "lock", "wanted", "stop"))
_NETWORK, _ROUSED, _NEWS, _ATTENDING = (word_at(name) for name in ("network", "roused", "news", "attending"))


@compiled
def run(worlds: Sequence[World]) -> None:
    """The life of its thread: steps until ``stop`` is set. With nothing to do it spins a while, then sleeps.

    Until the bell is rung, or for as long as a caller runs the loop. worlds: see `step`.
    """
    world = worlds[0]
    address, bell = world["address"], world["bell"]
    scratch = np.zeros(2, dtype=np.int64)
    idle_since = since = 0
    while load(address + _STOP) == 0:
        if load(bell) == ATTENDED:
            futex_wait(world["functions"][SYSCALL], world["futex"], bell, ATTENDED, _PARKED, scratch)
            idle_since = 0
            continue
        if load(address + _WANTED) != 0 or exchange(address + _LOCK, 1) != 0:
            call_yield(world["functions"][YIELD], 0)
            continue
        busy = step(worlds)
        store(address + _LOCK, 0)
        if busy:
            idle_since = 0
            continue
        blocked, unpacking = _blocked(world), world["unpack_head"] != world["unpack_tail"]
        now = monotonic_ns(world["functions"][CLOCK], scratch)
        seals = seals_expected(world)
        if idle_since == 0 or seals > world["seals"] or load(address + _ROUSED) != 0:
            idle_since = now
            store(address + _ROUSED, 0)
        world["seals"] = seals
        since = _drives_since(world, now, since)
        expecting = world["flying"] > 0 or unpacking or (seals > 0 and world["spin"] > 0)
        if now - idle_since < (FLIGHT if expecting else world["spin"]):
            call_yield(world["functions"][YIELD], 0)
            _look_out(world)
            continue
        nap = _NAP if blocked or (world["unfinished"] > 0 and now - idle_since < _ATTENTIVE) else _SLEEP
        if world["driving"] != 0:
            nap = min(nap, _network_nap(now - idle_since))
        state, before = NAPPING if nap <= _NAP else ASLEEP, load(bell)
        if before == ATTENDED or exchange_if(bell, before, state) != before:
            continue
        fence()
        if not _has_work(world):
            futex_wait(world["functions"][SYSCALL], world["futex"], bell, state, nap, scratch)
            if load(bell) == 0:  # rung, by somebody who has work for it, or soon will
                idle_since = 0
        exchange_if(bell, state, 0)


@compiled
def _look_out(world: World) -> None:
    """As `look_at`, for whatever comes. What kernels or the network have done it does not see."""
    for _ in range(LOOKS):
        if _has_work(world):
            break
        pause()
        pause()


@compiled
def attend(worlds: Sequence[World], seen: int, nanoseconds: int) -> bool:
    """Runs the loop on a caller's thread until ``news`` stops being ``seen``, or for so long at most. Whether it stops.

    For a caller that waits, without the GIL, where callers may run the loop: then no thread has to be woken for what
    comes. Ends when nothing has come for a while, too, and when another thread has taken the core. That it is not
    offered: a thread of this process that computes in Python would take the GIL with it, for five milliseconds.
    Whoever has the loop stop waits until ``attending`` is 0 again. worlds: see `step`.
    """
    world = worlds[0]
    address, bell = world["address"], world["bell"]
    if not may_run(world):
        return False
    add(address + _ATTENDING, 1)
    before = load(bell)
    if load(address + _STOP) != 0 or before == ATTENDED or exchange_if(bell, before, ATTENDED) != before:
        add(address + _ATTENDING, -1)
        return False
    scratch = np.zeros(2, dtype=np.int64)
    began = idle_since = last = monotonic_ns(world["functions"][CLOCK], scratch)
    while load(address + _NEWS) == seen and load(bell) == ATTENDED and load(address + _STOP) == 0:
        busy = False
        if load(address + _WANTED) == 0 and exchange(address + _LOCK, 1) == 0:
            busy = step(worlds)
            store(address + _LOCK, 0)
        now = monotonic_ns(world["functions"][CLOCK], scratch)
        if busy:
            idle_since = now
        elif now - last > _CROWDED:
            break
        last = now
        if now - began >= nanoseconds or now - idle_since >= _IDLE:
            break
    exchange_if(bell, ATTENDED, ASLEEP)
    _leave(world)
    add(address + _ATTENDING, -1)
    return bool(load(address + _NEWS) != seen)


@compiled_with_gil
def take_turn(address: int, op: int) -> bool:
    """Whether a caller whose command nobody was woken for is to call `step` and `end_turn`, because the loop sleeps.

    To wake it would take longer. Of copies the caller does little: the rest is the thread's. Not where the loop drives
    a transport: that may call Python, and the caller has the GIL. op: 1 if the command starts an op, which does not end
    the loop's nap. address: of the `World`.
    """
    world = world_at(address)
    bell = world["bell"]
    state = load(bell)
    if not may_run(world) or state == 0 or state == ATTENDED or (op != 0 and state == NAPPING):
        return False
    if world["lanes"] == 0 and load(address + _WANTED) == 0 and exchange(address + _LOCK, 1) == 0:
        world["turn"] = min(world["turn"], _LITTLE)
        return True
    ring(world, bell)
    return False


@compiled_with_gil
def end_turn(address: int, turn: int) -> None:
    """Behind `take_turn` and `step`. turn: what it is for the thread."""
    world = world_at(address)
    world["turn"] = turn
    store(address + _LOCK, 0)
    _leave(world)


@compiled
def _leave(world: World) -> None:
    """Leaves the loop to its thread, which sleeps, and is woken if it has to do anything before the bell is rung."""
    fence()
    if _has_to_run(world):
        ring(world, world["bell"])


@compiled
def _has_to_run(world: World) -> bool:
    """Whether the loop may not sleep until the bell is rung."""
    polls = world["driving"] != 0 or world["unfinished"] > 0 or load(world["address"] + _NETWORK) > 0
    return bool(polls or _blocked(world) or _has_work(world))


@compiled
def _blocked(world: World) -> bool:
    """Whether it waits for what nobody rings for: that a full mailbox has room again, or kernels end."""
    queued = world["queue_head"] != world["queue_tail"] or world["due_head"] != world["due_tail"]
    return bool(queued or world["unpack_head"] != world["unpack_tail"] or world["untold"] > 0)


@compiled
def seals_expected(world: World) -> int:
    """Peers that soon send a seal."""
    peers = 0
    for slot in range(world["num_peers"]):
        head = world["peers"][slot]["inbox_head"]
        if head != 0 and load(head + SEALS_AT) > 0:
            peers += 1
    return peers


@compiled
def _drives_since(world: World, now: int, since: int) -> int:
    """Decides whether to go on driving the transport. The time of the last look at which there was a reason to."""
    if load(world["address"] + _NETWORK) > 0 or world["under_way"] > 0:
        since = now
        world["driving"] = 1
    elif now - since > _GRACE:
        world["driving"] = 0
    return since


@compiled
def _network_nap(idle: int) -> int:
    """Nanoseconds to sleep before the next look at the network, in which nothing has happened for so long.

    So waiting takes a few percent longer at most. Naps of one length would take the loop's core from an engine whose
    requests wait for whole forwards: at 50 us a tenth of it, and what its caches hold.
    """
    return max(_NAP, min(idle // _PATIENCE, _LONG_NAP))


@compiled
def _has_work(world: World) -> bool:
    """Whether somebody has stored something for this loop before the bell said that it sleeps."""
    address = world["address"]
    if load(address + _TAIL) != world["command_head"] or load(address + _STOP) != 0:
        return True
    if seals_expected(world) > world["seals"]:
        return True
    for source in range(world["num_peers"]):
        peer = world["peers"][source]
        if peer["inbox"] != 0 and waiting(peer, peer["read"]):
            return True
    return False
