"""Copies in host memory: by the loop's thread and, where they are long, by its *copiers* with it. Compiled.

A page transfer waits for memory most of the time, and one thread waits for few lines at once: two cores copy twice as
fast as one. So a slice of an op that is long enough becomes a *job* of chunks. The loop and its copiers claim chunks
until none is left, and the loop goes on when all are copied. So between two steps there is no job, and nobody else need
know of copiers: a loop that stands still copies nothing. A copier that comes late finds nothing to claim, and costs
nothing but its core.

*Claims.* One word holds the number of the job and the next chunk, so a chunk is claimed by one compare and exchange,
which fails if the job is another one by now. While the loop writes what the job is, the word says that no chunk is
left. Who has claimed a chunk may read the rest: the job does not end before this chunk is copied.

*Sleep.* A copier spins for a moment after each chunk, and for longer while an op goes on, because a sleeping core may
take as long to wake as a slice to copy. Then it sleeps on the number of jobs. It says so, fences, and looks at that
number; the loop counts a job, fences, and looks who sleeps. So one of the two sees the other.
"""

from __future__ import annotations

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.core.loop.codes import CLOCK, SYSCALL, YIELD
from torchkv.core.loop.limits import MAX_OPS
from torchkv.core.loop.state.copying import Job
from torchkv.core.loop.state.world import COPIER_NBYTES, World, copier_word_at, job_word_at, word_at
from torchkv.core.loop.stripes import conversion, sizes
from torchkv.host.atomics import exchange_if, fence, load, look_at, store
from torchkv.host.convert_loops import convert_at
from torchkv.host.copy_loops import pairs_at, spans_at
from torchkv.host.futex import call_yield, futex_wait, futex_wake
from torchkv.host.jit import compiled, monotonic_ns

__all__ = [
    "begin_job",
    "claim_chunk",
    "convert_pairs",
    "convert_rows",
    "copy_pairs",
    "copy_spans",
    "end_job",
    "queue_op",
    "run_copier",
    "wake_copiers",
]

_SPIN = 30_000  # nanoseconds after a chunk
_ATTENTIVE = 1_000_000  # the same while an op goes on: the loop soon comes with its next slice
_SLEEP = 500_000_000  # nanoseconds
_NONE_LEFT = 0xFFFF  # in place of a chunk; a job has fewer

_CLAIM, _CHUNKS, _CALLED = job_word_at("claim"), job_word_at("chunks"), job_word_at("called")
_COPIED, _ASLEEP = copier_word_at("copied"), copier_word_at("asleep")
_STOP, _COPIERS = word_at("stop"), word_at("copier")
_HEAD, _TAIL = word_at("queue_head"), word_at("queue_tail")


@compiled
def copy_pairs(
    world: World, src: int, dst: int, count: int, n0: int, s0: int, d0: int, n1: int, s1: int, d1: int, run: int
) -> None:
    """Copies the first ``count`` pairs of the world's ``src`` and ``dst``, which are offsets from these addresses.

    The rest: see `torchkv.host.copy_loops.copy_pairs`.
    """
    nbytes = n0 * n1 * run
    if world["copiers"] == 0 or count * nbytes < 2 * world["chunk"]:
        pairs_at(src, dst, world["src"], world["dst"], 0, count, n0, s0, d0, n1, s1, d1, run)
        return
    begin_job(world, src, dst, count, nbytes, n0, s0, d0, n1, s1, d1, run, 0)
    end_job(world)


@compiled
def convert_pairs(
    world: World, seg: int, count: int, n0: int, s0: int, d0: int, n1: int, s1: int, d1: int, run: int
) -> None:
    """As `copy_pairs`, of a segment that converts; the offsets are from its two addresses."""
    nbytes = n0 * n1 * run
    src, dst = load(seg), load(seg + 8)
    if world["copiers"] == 0 or count * nbytes < 2 * world["chunk"]:
        convert_rows(seg, src, dst, world["src"], world["dst"], 0, count, n0, s0, d0, n1, s1, d1, run)
        return
    begin_job(world, src, dst, count, nbytes, n0, s0, d0, n1, s1, d1, run, seg)
    end_job(world)


@compiled
def convert_rows(
    seg: int,
    src_ptr: int,
    dst_ptr: int,
    src: Int64Array,
    dst: Int64Array,
    first: int,
    last: int,
    n0: int,
    s0: int,
    d0: int,
    n1: int,
    s1: int,
    d1: int,
    run: int,
) -> None:
    """Converts the pairs [first, last) of a segment: see `torchkv.host.convert_loops.convert_pairs`."""
    kind, each, scales, heads = conversion(seg)
    src_size, dst_size, _ = sizes(seg)
    rows = n0, s0, d0, n1, s1, d1, run
    convert_at(kind, src_size, dst_size, src_ptr, dst_ptr, src, dst, first, last, *rows, each, scales, heads)


@compiled
def copy_spans(world: World, src: int, dst: int, count: int, nbytes: int) -> None:
    """As `copy_pairs`, where each pair has a ``length`` of its own; ``nbytes`` in all."""
    if world["copiers"] == 0 or nbytes < 2 * world["chunk"]:
        spans_at(src, dst, world["src"], world["dst"], world["length"], 0, count)
        return
    begin_job(world, src, dst, count, max(1, nbytes // count), 0, 0, 0, 0, 0, 0, 0, 0)
    end_job(world)


@compiled
def begin_job(
    world: World,
    src: int,
    dst: int,
    count: int,
    nbytes: int,
    n0: int,
    s0: int,
    d0: int,
    n1: int,
    s1: int,
    d1: int,
    run: int,
    seg: int,
) -> None:
    """From now on chunks can be claimed. nbytes: of a pair. The rest: see `Job`."""
    job: Job = world["job"][0]
    address = world["address"]
    number = (load(address + _CLAIM) >> 16) + 1
    store(address + _CLAIM, number << 16 | _NONE_LEFT)
    fence()
    job["src"], job["dst"], job["seg"], job["count"] = src, dst, seg, count
    job["n0"], job["s0"], job["d0"] = n0, s0, d0
    job["n1"], job["s1"], job["d1"], job["run"] = n1, s1, d1, run
    job["pairs"] = max(1, world["chunk"] // nbytes)
    job["before"] = _copied(world)
    store(address + _CHUNKS, (count + job["pairs"] - 1) // job["pairs"])
    store(address + _CLAIM, number << 16)
    wake_copiers(world)


@compiled
def end_job(world: World) -> None:
    """Copies what nobody has claimed, and waits for the rest."""
    mine = 0
    while claim_chunk(world):
        mine += 1
    job, chunks = world["job"][0], load(world["address"] + _CHUNKS)
    while _copied(world) - job["before"] + mine < chunks:
        call_yield(world["functions"][YIELD], 0)


@compiled
def claim_chunk(world: World) -> bool:
    """Claims the next chunk and copies it; False if none is left. Any thread."""
    address = world["address"]
    claim = load(address + _CLAIM)
    while claim & _NONE_LEFT < load(address + _CHUNKS):
        found = exchange_if(address + _CLAIM, claim, claim + 1)
        if found == claim:
            _copy_chunk(world, claim & _NONE_LEFT)
            return True
        claim = found
    return False


@compiled
def _copy_chunk(world: World, chunk: int) -> None:
    job = world["job"][0]
    first = chunk * job["pairs"]
    last = min(first + job["pairs"], job["count"])
    n0, s0, d0, n1, s1, d1, run = job["n0"], job["s0"], job["d0"], job["n1"], job["s1"], job["d1"], job["run"]
    src, dst = job["src"], job["dst"]
    if job["seg"] != 0:
        convert_rows(job["seg"], src, dst, world["src"], world["dst"], first, last, n0, s0, d0, n1, s1, d1, run)
    elif n0 == 0:
        spans_at(src, dst, world["src"], world["dst"], world["length"], first, last)
    else:
        pairs_at(src, dst, world["src"], world["dst"], first, last, n0, s0, d0, n1, s1, d1, run)


@compiled
def _copied(world: World) -> int:
    """Chunks that copiers have copied so far, of all jobs."""
    copied = 0
    for number in range(world["copiers"]):
        copied += load(world["address"] + _COPIERS + number * COPIER_NBYTES + _COPIED)
    return copied


@compiled
def wake_copiers(world: World) -> None:
    """There is a job, or the loop has stopped."""
    address = world["address"]
    store(address + _CALLED, load(address + _CALLED) + 1)
    fence()
    for number in range(world["copiers"]):
        if load(address + _COPIERS + number * COPIER_NBYTES + _ASLEEP) != 0:
            futex_wake(world["functions"][SYSCALL], world["futex"], address + _CALLED)
            return


@compiled
def run_copier(world: World, number: int) -> None:
    """Copies chunks until the loop is told to stop."""
    address = world["address"]
    line = address + _COPIERS + number * COPIER_NBYTES
    scratch = np.zeros(2, dtype=np.int64)
    idle_since = 0
    while load(address + _STOP) == 0:
        called = load(address + _CALLED)
        if claim_chunk(world):
            store(line + _COPIED, load(line + _COPIED) + 1)
            idle_since = 0
            continue
        now = monotonic_ns(world["functions"][CLOCK], scratch)
        if idle_since == 0:
            idle_since = now
        busy = load(address + _HEAD) != load(address + _TAIL)
        if now - idle_since < (_ATTENTIVE if busy else _SPIN):
            call_yield(world["functions"][YIELD], 0)
            look_at(address + _CALLED, called)
            continue
        store(line + _ASLEEP, 1)
        fence()
        if load(address + _CALLED) == called and load(address + _STOP) == 0:
            futex_wait(world["functions"][SYSCALL], world["futex"], address + _CALLED, called, _SLEEP, scratch)
        store(line + _ASLEEP, 0)
        idle_since = 0


@compiled
def queue_op(world: World, index: int) -> None:
    """Has an op copied in its turn. There is always room."""
    world["queue"][world["queue_tail"] & (MAX_OPS - 1)] = index
    world["queue_tail"] += 1
