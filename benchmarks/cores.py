"""Which cores the threads of a benchmark run on. Linux only."""

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
        raise KVError(f"this benchmark needs two cores, and may use {cores} only; allow it more, e.g. with taskset")
    return cores[0], cores[1]


@contextmanager
def two_cores(cores: tuple[int, int] | None) -> Iterator[None]:
    """Processes started meanwhile by this thread have these cores only; None: as many as there are."""
    before = os.sched_getaffinity(0)
    if cores is not None:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def pin(cores: tuple[int, int], *, is_computing: bool) -> None:
    """Puts this process's main thread on the first core if it computes, and every other thread on the second."""
    main = threading.main_thread().native_id
    for task in Path("/proc/self/task").iterdir():
        thread = int(task.name)
        core = cores[0] if is_computing and thread == main else cores[1]
        try:
            os.sched_setaffinity(thread, {core})
        except ProcessLookupError:
            continue  # it has ended meanwhile


def waited() -> float:
    """Seconds that the calling thread has been ready to run and had no core; 0 where the kernel does not say."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except FileNotFoundError:
        return 0.0
