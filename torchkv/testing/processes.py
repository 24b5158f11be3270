"""Processes for tests: forked from a server that has imported torch, each with a pipe to the test that started it.

A fresh interpreter takes seconds to import torch; a process forked from the server is up in a fraction of one. The
server has loaded no transport, so each process can have an environment of its own that a transport reads when it loads.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["PRELOADED", "SERVER", "Worker", "preload"]

# There is one server per pytest process; what it imports is fixed when the first process is started.
SERVER = multiprocessing.get_context("forkserver")
PRELOADED: list[str] = []

_STACKS_SECONDS = 3.0


def preload(*modules: str) -> None:
    """Adds modules to those that the server imports; no effect once the first process has been started."""
    PRELOADED.extend(name for name in modules if name not in PRELOADED)
    SERVER.set_forkserver_preload(PRELOADED)


preload("torchkv.testing.node")


class Worker:
    """A process that runs ``main(connection, *arguments)``, where ``connection`` is the other end of ``pipe``.

    main: a function that the process can import by name; the arguments are pickled.
    """

    def __init__(self, main: Callable[..., None], *arguments: Any, name: str | None = None) -> None:
        self.pipe, theirs = SERVER.Pipe()
        folder = tempfile.mkdtemp(prefix="torchkv-test-")
        # Not a TemporaryDirectory: of one that nobody closes, as when a test fails, it warns in the middle of another.
        self._remove_folder = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._stacks = Path(folder, "stacks")
        self._stacks.touch()
        self._process = SERVER.Process(
            target=_run, args=(theirs, self._stacks, main, arguments), name=name, daemon=True
        )
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def sentinel(self) -> int:
        """A handle for ``multiprocessing.connection.wait`` that is ready when the process has ended."""
        return self._process.sentinel

    @property
    def exitcode(self) -> int | None:
        """None while the process runs, ``-n`` if signal n ended it."""
        return self._process.exitcode

    def join(self, seconds: float) -> int | None:
        """Waits for the end of the process; `exitcode`."""
        self._process.join(max(0.0, seconds))
        return self._process.exitcode

    def signal(self, number: int) -> bool:
        """Sends a signal; False if the process has ended, of which `exitcode` may tell only a moment later."""
        if self.exitcode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)
                return True
        return False

    def kill(self) -> None:
        """SIGKILL, if it has not ended; returns when it has."""
        self._process.kill()
        self._process.join()

    def crash_report(self) -> str:
        """What the process has written of its end: the exception that ended ``main``, the stacks at a fatal signal."""
        return self._stacks.read_text(encoding="utf-8", errors="replace")

    def stacks(self) -> str:
        """The Python stacks of all threads now, and for each thread what it waits for in the kernel; "" if it ended."""
        before = seen = report = self.crash_report()
        if not self.signal(signal.SIGUSR1):
            return ""
        until = time.monotonic() + _STACKS_SECONDS
        # It is written line by line: it is whole when nothing has been added for a moment.
        while (report == before or report != seen) and time.monotonic() < until:
            self._process.join(0.05)
            seen, report = report, self.crash_report()
        return report[len(before) :] + _kernel_waits(self.pid)

    def close(self) -> None:
        """Kills the process if it has not ended, and frees everything."""
        self.pipe.close()
        self.kill()
        self._process.close()
        self._remove_folder()


def _kernel_waits(pid: int) -> str:
    """A line for each thread of a process, including those that run no Python."""
    text = ""
    try:
        tasks = sorted(Path(f"/proc/{pid}/task").iterdir())
    except FileNotFoundError:  # the process has ended meanwhile
        return text
    for task in tasks:
        with suppress(OSError):  # the thread has ended meanwhile, or the kernel does not tell
            name, wait = ((task / file).read_text(encoding="ascii").strip() for file in ("comm", "wchan"))
            text += f"thread {task.name} ({name}): {wait}\n"
    return text


def _run(connection: Any, stacks: Path, main: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    with stacks.open("a", encoding="utf-8") as file:
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        try:
            main(connection, *arguments)
        except Exception:
            traceback.print_exc(file=file)
            raise
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.disable()
