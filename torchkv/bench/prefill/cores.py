"""Pins the threads of a benchmark to cores, and measures how long a thread waited for its core. Linux only."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchkv.errors import KVError

__all__ = ["first_two", "pin", "two_cores", "waited"]


def first_two() -> tuple[int, int]:
    """Two of the cores that this process may use. Raises ``KVError`` if it may use one only."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise KVError(
            f"this benchmark needs two cores, but this process may use {cores} only; allow two, e.g. with taskset"
        )
    return cores[0], cores[1]


@contextmanager
def two_cores(cores: tuple[int, int] | None) -> Iterator[None]:
    """Restricts processes that this thread starts inside the block to ``cores``. None: no restriction."""
    before = os.sched_getaffinity(0)
    if cores is not None:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def pin(cores: tuple[int, int], *, is_computing: bool) -> None:
    """Pins the main thread to the first core if it computes, and all other threads of this process to the second.

    is_computing: whether the main thread computes; if not, it goes to the second core too.
    """
    main = threading.main_thread().native_id
    for task in Path("/proc/self/task").iterdir():
        thread = int(task.name)
        core = cores[0] if is_computing and thread == main else cores[1]
        try:
            os.sched_setaffinity(thread, {core})
        except ProcessLookupError:
            continue  # the thread has ended since the folder was listed


def waited() -> float:
    """Seconds in which the calling thread was ready to run but had no core; 0 if the kernel does not count them."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except FileNotFoundError:
        return 0.0
