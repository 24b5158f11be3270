"""Functions of `torchkv.transport.NativeChannel` for a process of this host: puts by ``process_vm_writev``. Compiled.

An endpoint is the address of some words, see `_PID` and what follows it. Puts are gathered and written with one system
call for up to `VECTOR` of them, at the latest by a flush: so a put may be done in its caller's eyes before it is
written, and only what a flush says has arrived. What a system call has written is there, so nothing ever is under way,
and there is nothing to drive. Records between loops of one host go through mailboxes: there are no messages here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np

from torchkv.arrays import Int64Array
from torchkv.host.atomics import load, store
from torchkv.host.jit import at_register, c_function, compiled, libc_functions
from torchkv.transport import NativeChannel
from torchkv_ucx.pump import VECTOR, VECTOR_NBYTES

__all__ = ["native_channel"]

_PUT_SECONDS = 150e-9  # of one span among many; measured: 50 to 150 ns

_RESET = -25  # UCS_ERR_CONNECTION_RESET
_POLLIN = 1 << 32  # in a struct pollfd, behind the file descriptor
# Words of an endpoint: its process, how much waits, whether it has failed, libc's functions, a struct pollfd; then the
# spans that wait, here and there, as two arrays of struct iovec.
_PID, _COUNT, _NBYTES, _FAILED, _WRITEV, _POLL, _POLLFD, _HERE = (8 * word for word in range(8))
_THERE = _HERE + 16 * VECTOR
_STATE_WORDS = (_THERE + 16 * VECTOR) // 8

_call_writev = c_function(6, 64)
_call_poll = c_function(3, 32)


@compiled
def _write(endpoint: int) -> int:
    """Writes what waits. The status of all puts so far."""
    count, nbytes = load(endpoint + _COUNT), load(endpoint + _NBYTES)
    if count > 0 and load(endpoint + _FAILED) == 0:
        store(endpoint + _COUNT, 0)
        store(endpoint + _NBYTES, 0)
        # The pid of a process that has ended may be another one's by now.
        ended = _call_poll(load(endpoint + _POLL), endpoint + _POLLFD, 1, 0) != 0
        call, pid = load(endpoint + _WRITEV), load(endpoint + _PID)
        if ended or _call_writev(call, pid, endpoint + _HERE, count, endpoint + _THERE, count, 0) != nbytes:
            store(endpoint + _FAILED, _RESET)
    status: int = load(endpoint + _FAILED)
    return status


def _put(endpoint: int, here: int, nbytes: int, there: int, _key: int, _params: int) -> int:
    status: int = load(endpoint + _FAILED)
    if status != 0:
        return status
    count = load(endpoint + _COUNT)
    store(endpoint + _HERE + 16 * count, here)
    store(endpoint + _HERE + 16 * count + 8, nbytes)
    store(endpoint + _THERE + 16 * count, there)
    store(endpoint + _THERE + 16 * count + 8, nbytes)
    store(endpoint + _COUNT, count + 1)
    store(endpoint + _NBYTES, load(endpoint + _NBYTES) + nbytes)
    if count + 1 == VECTOR or load(endpoint + _NBYTES) >= VECTOR_NBYTES:
        return _write(endpoint)
    return 0


def _flush(endpoint: int, _params: int) -> int:
    return _write(endpoint)


def _nothing(_: int) -> int:
    """Of a request, or of a worker: there are none."""
    return 0


def _no_message(_endpoint: int, _at: int, _nbytes: int, _tag: int, _params: int) -> int:
    return 0


def _function(function: Callable[..., Any]) -> Any:
    words = ", ".join(["int64"] * function.__code__.co_argcount)
    return numba.cfunc(f"int64({words})", nopython=True, cache=True)(function)


@cache
def _functions() -> tuple[Int64Array, list[Any]]:
    """Their addresses in the order that `NativeChannel` wants, and what keeps them alive."""
    put, flush, nothing, none = (_function(each) for each in (_put, _flush, _nothing, _no_message))
    kept = [put, flush, nothing, nothing, nothing, none, none, none]
    return np.array([function.address for function in kept], dtype=np.int64), kept


@at_register
def _warm_up() -> None:
    if not numba.config.DISABLE_JIT:
        _functions()


def native_channel(
    pid: int, pidfd: int, *, local_keys: Int64Array, remote_keys: Int64Array, remote_at: Int64Array
) -> NativeChannel | None:
    """Puts to process ``pid`` as long as ``pidfd`` says that it runs. The keys: 0 for what cannot be put.

    None where nothing is compiled.
    """
    if numba.config.DISABLE_JIT:
        return None
    functions = _functions()[0]
    state = np.zeros(_STATE_WORDS + len(functions), dtype=np.int64)  # which lives as long as the functions' table in it
    state[_STATE_WORDS:] = functions
    state[_PID // 8], state[_POLLFD // 8] = pid, pidfd | _POLLIN
    state[[_WRITEV // 8, _POLL // 8]] = libc_functions("process_vm_writev", "poll")
    return NativeChannel(
        functions=state[_STATE_WORDS:],
        worker=0,
        endpoint=state.ctypes.data,
        put_params=np.zeros(1, dtype=np.int64),
        key_word=0,
        params=np.zeros(1, dtype=np.int64),
        local_keys=local_keys,
        remote_keys=remote_keys,
        remote_at=remote_at,
        put_seconds=_PUT_SECONDS,
    )
