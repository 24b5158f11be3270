"""Copies by kernels: how the loop drives ops whose pages lie on a GPU. Compiled.

An op is launched once its gate is open: the event that says that its pages may be read. The loop asks the driver for
that, and no stream waits for an event; so what is launched depends on nothing but the kernels before it on the stream,
and a shut gate holds up nobody else. Each kernel has a number, which it stores at its end in the completion word in
pinned memory; the loop reads that without a driver call. Numbers grow, and one stream does everything in order: when
the word has reached a number, that kernel and all before it are done, and the whole system can see what they wrote.

What is enqueued cannot be called back. An op that is taken from the loop meanwhile has *landed* only when the word has
reached its number: before that its bytes may still arrive, and the page ids that its kernels read stay where they are.

Kernels also pack pieces into a stage, and unpack them from there (see `staging`). A *pack table* is a launch table of
one side of a plan: its jobs have this side's addresses only. Both sides order jobs alike, so a piece holds the same
bytes at the same places for both: job after job, of each the page pairs that its writer owes. The first job of each of
`PairPlan.groups` begins at a multiple of `GRAIN`, as do pieces. Which jobs a kernel does together is each side's own
matter.

Page ids lie in pinned memory and are uploaded on the same stream: the granted ones first, with the state slot, behind
them those of the ops, each list once while ops follow each other with equal ones.
"""

from __future__ import annotations

from torchkv.core.loop.codes import BROKEN, LAUNCH, QUERY, UPLOAD
from torchkv.core.loop.events import emit
from torchkv.core.loop.limits import GATES, GRAIN, IDS, LAUNCH_FIELDS, MAX_FLYING
from torchkv.core.loop.state.requests import Op, Send
from torchkv.core.loop.state.world import World
from torchkv.core.loop.stripes import granted_to, owed_pairs
from torchkv.host.atomics import load, store
from torchkv.host.copy_loops import copy_bytes
from torchkv.host.jit import c_function, compiled

__all__ = [
    "FIELDS",
    "Extent",
    "is_open",
    "landed",
    "launch_piece",
    "place_ids",
    "report_broken",
    "upload",
]

call_query = c_function(1, 32)
call_upload = c_function(4, 32)
call_launch = c_function(11, 32)

PART = 512 << 20  # bytes of an op that are launched and announced together
MAX_WORDS = (1 << 31) - 1 - (1 << 16)  # of one job in one launch: `torchkv.kernels.launch.MAX_WORDS`
_NOT_READY = 600  # cuEventQuery: the event has not happened

# A launch table: how many groups of layers, then of each group these words. rows: address of int64 ``[positions + 1]``,
# the first row of each position in the group's table of jobs. stripe: six words for `owed_pairs`. aligned: 1 if what
# the group packs begins at a multiple of `GRAIN` in a stage. scales: of a group that is converted, the address of one
# word a job, else 0.
FIELDS = (
    *("function", "threads", "shared", "params", "extra", "table", "rows"),
    *("tokens", "per_unit", "holders", "holder", "window", "window_unit"),
    *("pair_words", "tile_words", "blocks", "pair_nbytes", "pair_runs", "aligned", "scales"),
)
assert len(FIELDS) == LAUNCH_FIELDS
_FUNCTION, _THREADS, _SHARED, _PARAMS, _EXTRA, _TABLE, _ROWS, _STRIPE = (8 * i for i in range(8))
_PAIR_WORDS, _TILE_WORDS, _BLOCKS, _PAIR_NBYTES, _PAIR_RUNS, _ALIGNED, _SCALES = (8 * i for i in range(13, 20))
# Offsets in a kernel's parameters: see `torchkv.kernels.page_copy.copy`. Those of two 32-bit values are of the first.
# In those of `torchkv.kernels.page_convert.convert` the address of the scales comes before these.
_JOBS, _SRC_IDS, _DST_IDS, _STAGE, _STAGE_STRIDE, _COMPLETION, _NUM_JOBS_AND_RANK = 0, 8, 16, 24, 32, 56, 72


# What a piece holds: the layers at positions [first, last), of the writer's pages a first one and how many; then tokens
# of the grant, and the page sizes of writer and receiver.
Extent = tuple[int, int, int, int, int, int, int]


@compiled
def landed(world: World, send: Send, op: Op) -> bool:
    """Whether more layers of an op have arrived, and count from now on. If none are under way, launches the next ones.

    To be called until ``at`` is at the end.
    """
    if op["at"] == op["num_positions"]:
        return True
    if op["posted"] == 0:
        if world["broken"] != 0 or world["flying"] >= MAX_FLYING or not is_open(world, send, op):
            return False
        if not _launch(world, send, op):
            return False
    elif load(world["word"]) < op["posted"]:
        return False
    else:
        op["posted"] = 0
        send["flying"] -= 1
        world["flying"] -= 1
    if op["posted"] != 0:
        return False
    op["at"] = op["until"]
    return True


@compiled
def is_open(world: World, send: Send, op: Op) -> bool:
    """Whether the pages of an op may be read. Of events of one stream, none happens before an earlier one."""
    if op["gate"] == 0:
        return True
    slot = (op["gate_stream"] >> 6) & (GATES - 1)
    ordered = op["gate_stream"] >= 0
    if (
        ordered
        and world["gate_steps"][slot] == world["steps"]
        and world["gate_streams"][slot] == op["gate_stream"]
        and world["gate_numbers"][slot] <= op["gate_number"]
    ):
        send["gated"] += 1
        return False
    code = call_query(world["driver"][QUERY], op["gate"])
    if code == 0:
        op["gate"] = 0
        return True
    if code != _NOT_READY:
        _fail(world, code)
        return False
    send["gated"] += 1
    if ordered:
        world["gate_steps"][slot], world["gate_streams"][slot] = world["steps"], op["gate_stream"]
        world["gate_numbers"][slot] = op["gate_number"]
    return False


@compiled
def _fail(world: World, code: int) -> None:
    """The driver has refused something: Python is to find out what the GPU can still do."""
    world["broken"] = -abs(code)


@compiled
def _launch(world: World, send: Send, op: Op) -> bool:
    """Enqueues the next layers; False if that has to wait. With nothing to copy, nothing is enqueued."""
    until, nbytes, runs = _extent(send, op)
    if nbytes > 0:
        if not place_ids(world, send, op):
            return False
        before, refused, kernels = world["posted"], False, _kernels(send, op)
        for number in range(load(kernels)):
            group = kernels + 8 + 8 * LAUNCH_FIELDS * number
            begin, stop = _owed(send, op, group)
            if begin < stop and not refused:
                refused = not _launch_group(world, send, op, group, until, begin, stop)
        if world["posted"] > before:  # also if a later one was refused: what is enqueued may still write
            send["ids_posted"] = op["posted"] = world["posted"]
            send["flying"] += 1
            world["flying"] += 1
        if refused:
            op["until"] = op["at"]
            return False
    op["until"] = until
    op["group"] += nbytes
    op["nbytes"] += nbytes
    op["runs"] += runs
    send["moved"] += nbytes
    return True


@compiled
def _kernels(send: Send, op: Op) -> int:
    """The address of an op's launch table."""
    return send["state_kernels"] if op["of_state"] != 0 else send["kernels"]


@compiled
def _owed(send: Send, op: Op, group: int) -> tuple[int, int]:
    """The page pairs of an op that are copied, by their ordinals."""
    _, granted, src_page, dst_page = granted_to(send, op)
    first, behind = owed_pairs(granted, src_page, dst_page, op["start"], op["count"], group + _STRIPE)
    return first, behind


@compiled
def _extent(send: Send, op: Op) -> tuple[int, int, int]:
    """What to launch next: the position behind it, its bytes, and its runs. At least one layer, else about `PART`."""
    kernels = _kernels(send, op)
    nbytes = runs = 0
    at: int = op["at"]
    while at < op["num_positions"] and nbytes < PART:
        position = load(op["positions"] + 8 * at)
        for number in range(load(kernels)):
            group = kernels + 8 + 8 * LAUNCH_FIELDS * number
            rows = load(group + _ROWS) + 8 * position
            jobs = load(rows + 8) - load(rows)
            if jobs > 0:
                begin, stop = _owed(send, op, group)
                nbytes += jobs * (stop - begin) * load(group + _PAIR_NBYTES)
                runs += jobs * (stop - begin) * load(group + _PAIR_RUNS)
        at += 1
    return at, nbytes, runs


@compiled
def _launch_group(world: World, send: Send, op: Op, group: int, until: int, begin: int, stop: int) -> bool:
    """Launches the jobs of a group, as few kernels as consecutive rows allow. Pairs [begin, stop) of each."""
    rows = load(group + _ROWS)
    first = end = -1
    for i in range(op["at"], until):
        position = load(op["positions"] + 8 * i)
        low, high = load(rows + 8 * position), load(rows + 8 * position + 8)
        if low == high:
            continue
        if low != end:
            if end > first and not _launch_rows(world, send, op, group, first, end, begin, stop):
                return False
            first = low
        end = high
    return end <= first or _launch_rows(world, send, op, group, first, end, begin, stop)


@compiled
def _launch_rows(world: World, send: Send, op: Op, group: int, first: int, end: int, begin: int, stop: int) -> bool:
    base = world["ids_device"] + 8 * IDS * op["flow"]
    src_ids = base + 8 * send["src_at"]
    granted, _, _, _ = granted_to(send, op)
    dst_ids = base + granted - send["ids"]  # as all granted ids lie there
    return bool(_enqueue_rows(world, group, (first, end), (begin, stop), op["start"], src_ids, dst_ids, 0) >= 0)


@compiled
def _enqueue_rows(
    world: World,
    group: int,
    rows: tuple[int, int],
    pairs: tuple[int, int],
    start: int,
    src_ids: int,
    dst_ids: int,
    stage: int,
) -> int:
    """Launches one kernel for some rows of a group's jobs, or several where a job has more than `MAX_WORDS` words.

    pairs: of each job, the first and the one behind the last. start: the position of the first of ``src_ids``. stage:
    address of the packed bytes, or 0. How many launches were enqueued; less than 0 if the driver has refused one: -1
    less those before.
    """
    params, pair_words, tile = load(group + _PARAMS), load(group + _PAIR_WORDS), load(group + _TILE_WORDS)
    jobs, (begin, stop) = rows[1] - rows[0], pairs
    pair_nbytes = load(group + _PAIR_NBYTES)
    store(params + _JOBS, load(group + _TABLE) + 16 * rows[0])
    store(params + _SRC_IDS, src_ids)
    store(params + _DST_IDS, dst_ids)
    store(params + _STAGE_STRIDE, (stop - begin) * pair_nbytes if stage != 0 else 0)
    store(params + _COMPLETION, world["word_device"])
    pairs_at = params + _NUM_JOBS_AND_RANK
    if load(group + _SCALES) != 0:
        store(pairs_at, load(group + _SCALES) + 8 * rows[0])
        pairs_at += 8
    launched = 0
    while begin < stop:
        count = min(stop - begin, max(1, MAX_WORDS // pair_words))
        words = count * pair_words
        store(params + _STAGE, stage)
        store(params + _COMPLETION + 8, world["posted"] + 1)
        store(pairs_at, jobs | begin << 32)
        store(pairs_at + 8, start | words << 32)
        blocks = min(load(group + _BLOCKS), jobs * ((words + tile - 1) // tile))
        code = call_launch(
            world["driver"][LAUNCH],
            load(group + _FUNCTION),
            blocks,
            1,
            1,
            load(group + _THREADS),
            1,
            1,
            load(group + _SHARED),
            world["stream"],
            0,
            load(group + _EXTRA),
        )
        if code != 0:
            _fail(world, code)
            return -1 - launched
        world["posted"] += 1
        launched += 1
        begin += count
        if stage != 0:
            stage += count * pair_nbytes
    return launched


@compiled
def upload(world: World, there: int, here: int, nbytes: int) -> bool:
    """Enqueues a copy of pinned memory; False if the driver refuses that."""
    code = call_upload(world["driver"][UPLOAD], there, here, nbytes, world["stream"])
    if code != 0:
        _fail(world, code)
    return bool(code == 0)


@compiled
def report_broken(world: World) -> None:
    """Tells Python that the GPU's driver has refused something, if it just has."""
    if world["broken"] < 0:
        world["broken"] = -world["broken"]
        emit(world, BROKEN, 0, 0)


@compiled
def place_ids(world: World, send: Send, op: Op) -> bool:
    """Has the page ids that the kernels need uploaded; False while older kernels may still read what lies there."""
    granted, base = send["granted"] // send["dst_page"], world["ids"] + 8 * IDS * op["flow"]
    if send["max_slot"] > 0:
        granted += 1  # the slot behind them
    used = send["ids_used"]
    if used > 0 and op["count"] == send["src_count"] and _equal(base + 8 * send["src_at"], op["ids"], op["count"]):
        return True
    if used == 0 or used + op["count"] > IDS:
        if load(world["word"]) < send["ids_posted"]:
            return False
        if used == 0:
            copy_bytes(base, send["ids"], 8 * granted)
        else:
            used = granted
    fresh = used
    if used == 0:
        used = granted
    copy_bytes(base + 8 * used, op["ids"], 8 * op["count"])
    send["src_at"], send["src_count"], send["ids_used"] = used, op["count"], used + op["count"]
    there = world["ids_device"] + 8 * IDS * op["flow"] + 8 * fresh
    nbytes = 8 * (send["ids_used"] - fresh)
    return upload(world, there, base + 8 * fresh, nbytes)


@compiled
def _equal(one: int, other: int, count: int) -> bool:
    at = 0
    while at < count and load(one + 8 * at) == load(other + 8 * at):
        at += 1
    return at == count


# ---------------------------------------------------------------- pieces


@compiled
def launch_piece(world: World, table: int, extent: Extent, start: int, src_ids: int, dst_ids: int, stage: int) -> int:
    """Enqueues the kernels that pack a piece at the address ``stage``, or unpack it from there: as the table says.

    start: the position of the first of ``src_ids``. How many launches; less than 0 if the driver has refused one: -1
    less those before.
    """
    first, last, page, count, granted, src_page, dst_page = extent
    launched = 0
    at = stage
    for number in range(load(table)):
        group = table + 8 + 8 * LAUNCH_FIELDS * number
        pairs = owed_pairs(granted, src_page, dst_page, page, count, group + _STRIPE)
        rows = load(group + _ROWS)
        jobs = load(rows + 8 * first), load(rows + 8 * last)
        if load(group + _ALIGNED) != 0:
            at = (at + GRAIN - 1) // GRAIN * GRAIN
        if jobs[0] == jobs[1] or pairs[0] == pairs[1]:
            continue
        done = _enqueue_rows(world, group, jobs, pairs, start, src_ids, dst_ids, at)
        if done < 0:
            return done - launched
        launched += done
        at += (jobs[1] - jobs[0]) * (pairs[1] - pairs[0]) * load(group + _PAIR_NBYTES)
    return launched
