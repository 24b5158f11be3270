"""Shares the GPUs of this machine among pytest processes: tests that compare free memory have them to themselves."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["FOLDER", "gpus"]

FOLDER = Path(tempfile.gettempdir())


@contextmanager
def gpus(*, alone: bool, folder: Path = FOLDER) -> Iterator[None]:
    """Holds the GPUs together with others, or ``alone``. Blocks until that is possible.

    Whoever waits keeps the door shut, so that a test that wants to be alone is not overtaken for ever.
    """
    with (folder / "torchkv-gpus.door").open("w") as door, (folder / "torchkv-gpus.room").open("w") as room:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield  # closing the files gives both back, also when the process is killed
