"""The compiled inner loop: posts puts, drives UCX, reaps finished requests; no Python per span, and without the GIL.

C functions are called through their addresses, which are passed as integers. So the machine code does not depend on
where libucp was loaded, and numba can cache it on disk between runs.
"""

from __future__ import annotations

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.host.jit import c_function, compiled, monotonic_ns
from torchkv_ucx.libucp import KEY_WORD

__all__ = [
    "COUNT",
    "CURSOR",
    "RING_COLUMNS",
    "STATE_WORDS",
    "STATUS",
    "STOPPED",
    "VECTOR",
    "VECTOR_NBYTES",
    "WINDOW",
    "advance",
    "post_flush",
    "pump",
    "reap",
    "write_vectors",
]

# Requests and bytes that one put may have outstanding. Over TCP a request ends only when the peer's progress has
# answered, so small puts need many; bytes are bounded because what is posted cannot be cancelled.
WINDOW = 8192
_WINDOW_NBYTES = 16 << 20

# Words of an operation's state: next span to post; place of the oldest request in the ring; requests outstanding; bytes
# outstanding; status of the first failure; 1 if nothing more is to be posted.
CURSOR, _HEAD, COUNT, _NBYTES, STATUS, STOPPED, STATE_WORDS = 0, 1, 2, 3, 4, 5, 6

# Columns of the ring of outstanding requests.
_REQUEST, _LENGTH, RING_COLUMNS = 0, 1, 2

# Indices into the table of function addresses; the order is libucp.FUNCTIONS.
_PUT, _FLUSH, _CHECK, _FREE, _PROGRESS, _CLOCK, _WRITEV = 0, 1, 2, 3, 4, 5, 6

_INPROGRESS = 1
_LAST_ERROR = -100  # a result in (_LAST_ERROR, 0) is a status, not a request
_BURST = 32  # spans posted between two reads of the clock
VECTOR = 256  # spans of one vectored write
VECTOR_NBYTES = 1 << 20  # from which on a vectored write takes no further span: a system call cannot be interrupted

_call_put = c_function(6, 64)
_call_flush = c_function(2, 64)
_call_check = c_function(1, 8)
_call_free = c_function(1, 0)
_call_progress = c_function(1, 32, signed=False)


@compiled
def reap(functions: Int64Array, ring: Int64Array, state: Int64Array) -> int:
    """Frees requests that have finished, oldest first; returns how many. The first failure is kept in the state."""
    reaped = 0
    while state[COUNT] > 0:
        head = state[_HEAD]
        status = _call_check(functions[_CHECK], ring[head, _REQUEST])
        if status == _INPROGRESS:
            break
        _call_free(functions[_FREE], ring[head, _REQUEST])
        if status != 0 and state[STATUS] == 0:
            state[STATUS] = status
        state[_HEAD] = (head + 1) % len(ring)
        state[COUNT] -= 1
        state[_NBYTES] -= ring[head, _LENGTH]
        reaped += 1
    return reaped


@compiled
def _note(result: int, nbytes: int, ring: Int64Array, state: Int64Array) -> None:
    """Records the result of a posting call: done at once, an error, or a request to wait for."""
    if result == 0:
        return
    if _LAST_ERROR <= result < 0:
        if state[STATUS] == 0:
            state[STATUS] = result
        return
    place = (state[_HEAD] + state[COUNT]) % len(ring)
    ring[place, _REQUEST] = result
    ring[place, _LENGTH] = nbytes
    state[COUNT] += 1
    state[_NBYTES] += nbytes


@compiled
def _post_burst(
    functions: Int64Array,
    endpoint: int,
    params: Int64Array,
    source: Int64Array,
    target: Int64Array,
    length: Int64Array,
    local_region: Int64Array,
    remote_region: Int64Array,
    memhs: Int64Array,
    rkeys: Int64Array,
    ring: Int64Array,
    state: Int64Array,
) -> int:
    """Posts up to `_BURST` spans from the cursor on, as far as the window allows; returns how many."""
    posted = 0
    while posted < _BURST and state[STATUS] == 0 and state[COUNT] < len(ring) and state[CURSOR] < len(length):
        i = state[CURSOR]
        if state[COUNT] > 0 and state[_NBYTES] + length[i] > _WINDOW_NBYTES:
            break
        state[CURSOR] = i + 1
        posted += 1
        if length[i] == 0:
            continue
        params[KEY_WORD] = memhs[local_region[i]]
        result = _call_put(
            functions[_PUT],
            endpoint,
            source[i],
            length[i],
            target[i],
            rkeys[remote_region[i]],
            params.ctypes.data,
        )
        _note(result, length[i], ring, state)
    return posted


@compiled
def pump(
    functions: Int64Array,
    worker: int,
    endpoint: int,
    params: Int64Array,
    source: Int64Array,
    target: Int64Array,
    length: Int64Array,
    local_region: Int64Array,
    remote_region: Int64Array,
    memhs: Int64Array,
    rkeys: Int64Array,
    ring: Int64Array,
    state: Int64Array,
    budget_ns: int,
) -> bool:
    """Posts and reaps until all is posted, nothing moves, or the budget is spent. True if anything moved.

    source, target, length: int64[n], absolute addresses here and at the peer, and bytes.
    memhs, rkeys: handles by region index. ring, state: see the constants above.
    """
    clock = np.empty(2, dtype=np.int64)
    deadline = monotonic_ns(functions[_CLOCK], clock) + budget_ns
    moved = False
    while True:
        step = reap(functions, ring, state)
        if state[STOPPED] == 0:
            step += _post_burst(
                functions, endpoint, params, source, target, length, local_region, remote_region, memhs, rkeys,
                ring, state,
            )  # fmt: skip
        moved = moved or step > 0
        posted_all = state[CURSOR] == len(length) or state[STOPPED] != 0 or state[STATUS] != 0
        if posted_all and state[COUNT] == 0:
            return moved
        if step < _BURST:
            worked = _call_progress(functions[_PROGRESS], worker)
            moved = moved or worked > 0
            if worked == 0 and step == 0:
                return moved
        if monotonic_ns(functions[_CLOCK], clock) > deadline:
            return moved


@compiled
def post_flush(functions: Int64Array, endpoint: int, params: Int64Array, ring: Int64Array, state: Int64Array) -> None:
    """Posts an endpoint flush; unless it is done at once, its request goes into the ring."""
    _note(_call_flush(functions[_FLUSH], endpoint, params.ctypes.data), 0, ring, state)


@compiled
def advance(functions: Int64Array, worker: int, budget_ns: int) -> bool:
    """Drives UCX until it has nothing to do or the budget is spent. True if anything moved."""
    clock = np.empty(2, dtype=np.int64)
    deadline = monotonic_ns(functions[_CLOCK], clock) + budget_ns
    moved = False
    while _call_progress(functions[_PROGRESS], worker) > 0:
        moved = True
        if monotonic_ns(functions[_CLOCK], clock) > deadline:
            break
    return moved


@compiled
def write_vectors(
    functions: Int64Array,
    pid: int,
    source: Int64Array,
    target: Int64Array,
    length: Int64Array,
    vectors: Int64Array,
    state: Int64Array,
    budget_ns: int,
) -> bool:
    """Writes spans from the cursor on into process ``pid``, `VECTOR` in each system call, until the budget is spent.

    source, target, length: as for `pump`; each span is short, as a call cannot be interrupted.
    vectors: int64[2, VECTOR, 2], scratch for two arrays of struct iovec.
    False if the kernel refused; the cursor then stands at the first span of the call that failed.
    """
    clock = np.empty(2, dtype=np.int64)
    deadline = monotonic_ns(functions[_CLOCK], clock) + budget_ns
    while state[CURSOR] < len(length) and state[STOPPED] == 0:
        first = state[CURSOR]
        count = total = 0
        while count < min(VECTOR, len(length) - first) and total < VECTOR_NBYTES:
            vectors[0, count, 0] = source[first + count]
            vectors[1, count, 0] = target[first + count]
            vectors[0, count, 1] = vectors[1, count, 1] = length[first + count]
            total += length[first + count]
            count += 1
        local, remote = vectors.ctypes.data, vectors.ctypes.data + VECTOR * 16
        # process_vm_writev takes as many arguments as ucp_put_nbx, all of them in 64-bit registers, too.
        if total and _call_put(functions[_WRITEV], pid, local, count, remote, count, 0) != total:
            return False
        state[CURSOR] = first + count
        if monotonic_ns(functions[_CLOCK], clock) > deadline:
            break
    return True
