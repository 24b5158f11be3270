"""Events: what the loop tells Python. Compiled."""

from __future__ import annotations

from torchkv.core.loop.codes import ALL_HERE, QUIET, SYSCALL, WRITE
from torchkv.core.loop.limits import MAX_EVENTS, MAX_FLOWS
from torchkv.core.loop.state.peers import Record
from torchkv.core.loop.state.world import World, word_at
from torchkv.host.atomics import exchange_if, fence, load, store
from torchkv.host.futex import futex_wake
from torchkv.host.jit import c_function, compiled

__all__ = ["copy_record", "emit", "event_room", "tell_driver", "tell_waiters"]

# Events that turns may make after they have looked for room: OUTSIDE of each send, the end of each round and of each
# receive that one decides, and others.
_RESERVE = 3 * MAX_FLOWS + 64
_MANY = MAX_EVENTS // 4  # events that Python has not taken, after which none is quiet, lest the loop run out of room
_TAIL, _HEAD, _NEWS = word_at("event_tail"), word_at("event_head"), word_at("news")
_SLEEPERS, _LISTENERS = word_at("sleepers"), word_at("listeners")
_EAGER, _ONE = word_at("eager"), word_at("one")

call_write = c_function(3, 64)


@compiled
def event_room(world: World) -> bool:
    """Whether there is room for what one turn may tell. Python takes events several times a second at least."""
    return bool(world["event_tail"] - load(world["address"] + _HEAD) < MAX_EVENTS - _RESERVE)


@compiled
def tell_driver(world: World) -> None:
    """Wakes Python's own thread, which rests on a word or sleeps on a file descriptor."""
    if world["driver_fd"] >= 0:
        store(world["driver_word"], 1)
        call_write(world["functions"][WRITE], world["driver_fd"], world["address"] + _ONE, 8)


@compiled
def tell_waiters(world: World) -> None:
    """Something has changed that callers may wait for. Any thread."""
    news = world["address"] + _NEWS
    before = load(news)
    while exchange_if(news, before, before + 1) != before:
        before = load(news)
    if load(world["address"] + _SLEEPERS) != 0:
        futex_wake(world["functions"][SYSCALL], world["futex"], news)


@compiled
def _is_quiet(world: World) -> bool:
    """Whether nobody waits for quiet events. Who begins to wait counts itself, and then looks at ``event_tail``."""
    fence()
    backlog = world["event_tail"] - load(world["address"] + _HEAD)
    return bool(load(world["address"] + _LISTENERS) == 0 and backlog < _MANY)


@compiled
def copy_record(record: Record, present: Record) -> None:
    """All of it but ``seq``."""
    record["head"], record["flows"], record["generation"] = present["head"], present["flows"], present["generation"]
    record["lo"], record["hi"], record["nbytes"] = present["lo"], present["hi"], present["nbytes"]
    record["spare"] = present["spare"]


@compiled
def emit(world: World, kind: int, index: int, source: int) -> None:
    """Adds an event, with the present record, and wakes the callers that wait for such a one."""
    event = world["events"][world["event_tail"] & (MAX_EVENTS - 1)]
    event["kind"], event["index"], event["source"] = kind, index, source
    copy_record(event["record"], world["record"])
    store(world["address"] + _TAIL, world["event_tail"] + 1)
    if not (kind in QUIET and _is_quiet(world)):
        tell_waiters(world)
    if kind >= ALL_HERE or load(world["address"] + _EAGER) != 0:  # nobody may be looking for this one
        tell_driver(world)
