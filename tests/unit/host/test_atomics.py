"""Atomic words, compiled and in plain Python, and that compiled ones hold between threads without the GIL."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchkv.arrays import Int64Array
from torchkv.host.atomics import exchange, exchange_if, fence, load, store
from torchkv.host.copy_loops import copy_bytes
from torchkv.host.jit import compiled

WORDS = st.integers(-(1 << 63), (1 << 63) - 1)


@compiled
def each_of_them(address: int, first: int, second: int, expected: int, third: int, result: Int64Array) -> None:
    """Leaves in ``result`` what each operation returns, and copies the word behind itself."""
    store(address, first)
    result[0] = load(address)
    result[1] = exchange(address, second)
    result[2] = exchange_if(address, expected, third)
    result[3] = load(address)
    fence()
    copy_bytes(address + 8, address, 8)


@settings(deadline=None)  # the first example compiles
@given(first=WORDS, second=WORDS, expected=WORDS, third=WORDS, same=st.booleans())
def test_what_they_do(first: int, second: int, expected: int, third: int, same: bool) -> None:
    expected = second if same else expected
    words, result = np.zeros(2, dtype=np.int64), np.zeros(4, dtype=np.int64)
    each_of_them(words.ctypes.data, first, second, expected, third, result)
    last = third if expected == second else second
    assert result.tolist() == [first, first, second, last]
    assert words.tolist() == [last, last]


def test_they_do_the_same_in_plain_python() -> None:
    """In a process of its own, because numba reads the variable when it is imported."""
    test = Path(__file__).name + "::test_what_they_do"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    env = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run(command, cwd=Path(__file__).parent, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@compiled
def take_turns(address: int, mine: int, other: int, turns: int, guarded: Int64Array) -> None:
    """Enters ``turns`` times when the word is ``mine``, writes plain memory inside, and leaves it to ``other``."""
    for _ in range(turns):
        while exchange_if(address, mine, -1) != mine:
            pass
        guarded[0] += 1
        guarded[1] = guarded[0] * 3
        store(address, other)


def test_threads_that_take_turns_see_each_others_writes() -> None:
    word, guarded, turns = np.ones(1, dtype=np.int64), np.zeros(2, dtype=np.int64), 20_000
    take_turns(word.ctypes.data, 1, 1, 1, guarded)  # compiled before the threads start
    threads = [
        threading.Thread(target=take_turns, args=(word.ctypes.data, mine, 3 - mine, turns, guarded)) for mine in (1, 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert guarded.tolist() == [2 * turns + 1, 6 * turns + 3]


@pytest.mark.parametrize("nbytes", [0, 1, 7, 64, 4097])
def test_copies(nbytes: int) -> None:
    src = np.random.default_rng().integers(0, 256, nbytes + 1, dtype=np.uint8)
    dst = np.zeros(nbytes + 2, dtype=np.uint8)

    @compiled
    def run(to: int, origin: int, count: int) -> None:
        copy_bytes(to, origin, count)

    run(dst.ctypes.data + 1, src.ctypes.data, nbytes)
    assert (dst[1:-1] == src[:nbytes]).all()
    assert dst[0] == dst[-1] == 0
