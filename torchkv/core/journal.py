"""The journal: the last operations of the loop, each a call of a verb towards one peer, in a ring. Compiled.

The loop writes an operation when it takes the verb's command, and again when it ends. Callers pay nothing for it, and
whoever reads the ring (`read_operations`, any thread) needs neither the loop nor a lock: each field is written with a
release store, the operation's number first as 0 and last as itself, so a reader knows what it must not trust.
"""

from __future__ import annotations

from typing import TypedDict

from torchkv.arrays import Int64Array
from torchkv.core.loop.codes import CLOCK
from torchkv.core.loop.state.world import World, word_at
from torchkv.host.atomics import load, store
from torchkv.host.jit import compiled, compiled_with_gil, monotonic_ns
from torchkv.observe.histogram import BOUNDS

__all__ = ["OPERATION_WORDS", "Operation", "begin", "end", "hand_over", "now", "read_operations", "took"]


class Operation(TypedDict):
    """One entry of the ring, int64. number: grows from 1; 0 while it is written.

    verb: an index of `VERBS`. serial: of the request. first, last, layers: positions of the first and the last layer
    among the plan's, and how many there are. pages: how many. began, ended: in nanoseconds of the monotonic clock;
    ended is 0 while it goes on.
    """

    number: int
    verb: int
    serial: int
    first: int
    last: int
    layers: int
    pages: int
    began: int
    ended: int
    nbytes: int


OPERATION_WORDS = len(Operation.__annotations__)
_NBYTES = 8 * OPERATION_WORDS
_MOVED, _ENDED = (8 * list(Operation.__annotations__).index(name) for name in ("nbytes", "ended"))
_OPERATION, _CLOCK = word_at("operation"), word_at("clock")
_BUCKETS = tuple(round(bound * 1e9) for bound in BOUNDS)  # nanoseconds
_HANDED_OVER = -1  # in place of the time at which an operation ended


@compiled
def now(world: World) -> int:
    """Nanoseconds of the monotonic clock; 0 without a journal, for which alone the loop needs the time."""
    if world["recorded"] == 0:
        return 0
    return monotonic_ns(world["functions"][CLOCK], world["clock"])


@compiled
def begin(world: World, verb: int, serial: int, first: int, last: int, layers: int, pages: int) -> int:
    """An operation begins: see `Operation`. Its number; 0 if it is not recorded, because ``verb`` is 0, or all are."""
    size = world["recorded"]
    if size == 0 or verb == 0:
        return 0
    number: int = world["operation"] + 1
    at = world["operations"] + number % size * _NBYTES
    store(at, 0)
    words = (verb, serial, first, last, layers, pages, now(world), 0, 0)
    for i in range(len(words)):
        store(at + 8 * (i + 1), words[i])
    store(at, number)
    store(world["address"] + _OPERATION, number)
    return number


@compiled
def end(world: World, number: int, nbytes: int) -> None:
    """An operation has succeeded. number: 0 for one that is not recorded."""
    if number == 0:
        return
    at = world["operations"] + number % world["recorded"] * _NBYTES
    if load(at) == number:
        store(at + _MOVED, nbytes)
        store(at + _ENDED, now(world))


@compiled_with_gil
def hand_over(world: World, number: int) -> None:
    """Python records an operation from now on. For a caller that holds the lock."""
    if number == 0:
        return
    at = world["operations"] + number % world["recorded"] * _NBYTES
    if load(at) == number:
        store(at + _ENDED, _HANDED_OVER)


@compiled
def took(world: World, phase: int, nanoseconds: int) -> None:
    """Counts the duration of a phase of a request."""
    counts = world["phases"][phase]
    bucket = 0
    while bucket < len(_BUCKETS) and nanoseconds > _BUCKETS[bucket]:
        bucket += 1
    counts[bucket] += 1
    counts[len(_BUCKETS) + 1] += nanoseconds


@compiled_with_gil
def read_operations(operations: int, size: int, found: Int64Array) -> int:
    """Copies what the ring at ``operations`` has to ``found`` [size, OPERATION_WORDS], in no order. How many.

    Without those that are being written at this moment, and those that were handed over.
    """
    count = 0
    for i in range(size):
        at = operations + i * _NBYTES
        number = load(at)
        ended = load(at + _ENDED)  # before what was written earlier
        if number == 0 or ended == _HANDED_OVER:
            continue
        row = found[count]
        for word in range(OPERATION_WORDS):
            row[word] = load(at + 8 * word)
        row[_ENDED // 8] = ended
        if load(at) == number:
            count += 1
    return count
