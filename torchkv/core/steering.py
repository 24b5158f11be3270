"""What Python does to the resident loop as a whole: holds it still, wakes it, waits for its news. Compiled.

address: of the loop's `World`.
"""

from __future__ import annotations

import numpy as np

from torchkv.core.loop import copying
from torchkv.core.loop.codes import CLOCK, SYSCALL, YIELD
from torchkv.core.loop.events import tell_driver, tell_waiters
from torchkv.core.loop.limits import FLIGHT
from torchkv.core.loop.mailbox import ring
from torchkv.core.loop.state.addresses import world_at
from torchkv.core.loop.state.world import word_at
from torchkv.host.atomics import add, exchange, load, look_at, store
from torchkv.host.futex import call_yield, futex_wait
from torchkv.host.jit import compiled, compiled_with_gil, monotonic_ns

__all__ = [
    "hold",
    "let_go",
    "rouse",
    "spin_for_news",
    "stop",
    "try_hold",
    "wait_left",
    "wait_news",
    "wake_copiers",
    "wake_driver",
    "wake_loop",
    "wake_waiters",
]

_LOCK, _WANTED, _NEWS, _STOP = (word_at(name) for name in ("lock", "wanted", "news", "stop"))
_FLYING, _SEALS, _ROUSED = word_at("flying"), word_at("seals"), word_at("roused")
_SLEEPERS, _ATTENDING = word_at("sleepers"), word_at("attending")


@compiled
def hold(address: int, held: int) -> None:
    """Makes the loop stand still, at the end of its step. Until `let_go`, the caller may change everything.

    held: address of a word of the caller, which is 1 afterwards. Python's handler of a signal that has come meanwhile
    may raise an exception in the moment in which this returns.
    """
    world = world_at(address)
    store(address + _WANTED, 1)
    while exchange(address + _LOCK, 1) != 0:
        call_yield(world["functions"][YIELD], 0)
    store(held, 1)


@compiled
def try_hold(address: int, held: int, nanoseconds: int) -> bool:
    """As `hold`, but False, and the loop goes on, if its step does not end within so long: it hangs."""
    world = world_at(address)
    scratch = np.zeros(2, dtype=np.int64)
    clock = world["functions"][CLOCK]
    until = monotonic_ns(clock, scratch) + nanoseconds
    store(address + _WANTED, 1)
    while exchange(address + _LOCK, 1) != 0:
        if monotonic_ns(clock, scratch) > until:
            store(address + _WANTED, 0)
            return False
        call_yield(world["functions"][YIELD], 0)
    store(held, 1)
    return True


@compiled_with_gil
def let_go(address: int, held: int) -> None:
    """Lets the loop go on after `hold`. held: the same word, which is 0 afterwards."""
    store(held, 0)
    store(address + _LOCK, 0)
    store(address + _WANTED, 0)


@compiled_with_gil
def stop(address: int) -> None:
    """Ends `run`."""
    world = world_at(address)
    store(address + _STOP, 1)
    ring(world, world["bell"])


@compiled_with_gil
def wake_copiers(address: int) -> None:
    """Has the copiers see that they are to stop. Once the loop has ended."""
    copying.wake_copiers(world_at(address))


@compiled_with_gil
def wake_loop(address: int) -> None:
    """Has the loop look for work."""
    world = world_at(address)
    ring(world, world["bell"])


@compiled_with_gil
def rouse(address: int) -> None:
    """Something comes for the loop soon: if it ever spins, it is woken, or kept from falling asleep, to spin for it."""
    world = world_at(address)
    if world["spin"] > 0:
        store(address + _ROUSED, 1)
        ring(world, world["bell"])


@compiled_with_gil
def wake_driver(address: int) -> None:
    """Wakes Python's own thread."""
    tell_driver(world_at(address))


@compiled_with_gil
def wake_waiters(address: int) -> None:
    """Wakes callers that wait for news: Python has completed something."""
    world = world_at(address)
    tell_waiters(world)


@compiled
def wait_left(address: int) -> None:
    """Waits until no caller runs the loop any more, which was told to stop."""
    world = world_at(address)
    while load(address + _ATTENDING) != 0:
        call_yield(world["functions"][YIELD], 0)


@compiled
def spin_for_news(address: int, seen: int, nanoseconds: int) -> bool:
    """Whether ``news`` stops being ``seen`` while the loop would spin, too, or for so long: a sleep takes longer."""
    world = world_at(address)
    scratch = np.zeros(2, dtype=np.int64)
    clock, news, spin = world["functions"][CLOCK], address + _NEWS, world["spin"]
    began = since = monotonic_ns(clock, scratch)
    limit = min(FLIGHT, nanoseconds)
    while load(news) == seen:
        now = monotonic_ns(clock, scratch)
        if load(address + _FLYING) > 0 or load(address + _SEALS) > 0:
            since = now
        if now - since >= spin or now - began >= limit:
            break
        call_yield(world["functions"][YIELD], 0)
        look_at(news, seen)
    return bool(load(news) != seen)


@compiled
def wait_news(address: int, seen: int, nanoseconds: int) -> None:
    """Sleeps until ``news`` is no longer ``seen``, for so long at most."""
    world = world_at(address)
    scratch = np.zeros(2, dtype=np.int64)
    add(address + _SLEEPERS, 1)
    if load(address + _NEWS) == seen:
        futex_wait(world["functions"][SYSCALL], world["futex"], address + _NEWS, seen, nanoseconds, scratch)
    add(address + _SLEEPERS, -1)
