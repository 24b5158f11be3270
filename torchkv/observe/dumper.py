"""Writes dumps of a rank's flight recorder to a folder: on failures, on SIGUSR2, and when asked to."""

from __future__ import annotations

import itertools
import logging
import os
import re
import signal
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from types import FrameType

import msgspec

from torchkv.observe.dump_format import Dump

__all__ = ["Dumper", "write_dump"]

log = logging.getLogger(__name__)

GATHER = 0.2  # seconds between a failure and its dump: failures seldom come alone
INTERVAL = 5.0  # least seconds between two dumps because of failures
MAX_DUMPS = 16  # because of failures, of one rank: a disk must not fill
SIGNAL = signal.SIGUSR2

_numbers = itertools.count(1)  # of this process's files


class Dumper:
    """Dumps of one rank, written on a thread of its own, so that no caller waits for them.

    folder: made if it is not there. name: of the rank, in file names. take: makes a dump, for a reason; None once the
    rank is gone. Also writes one on SIGUSR2, unless the program handles that itself or this is not the main thread.
    """

    def __init__(self, folder: str, name: str, take: Callable[[str], Dump | None]) -> None:
        self._folder = Path(folder)
        self._name = name
        self._take = take
        self._reasons: SimpleQueue[tuple[str, bool] | None] = SimpleQueue()  # whose `put` a signal handler may call
        self._automatic = 0
        self._next = 0.0
        self._thread = threading.Thread(target=self._run, name="torchkv-dump", daemon=True)
        self._thread.start()
        _all.add(self)
        _heed_signal()

    def on_failure(self, reason: str) -> None:
        """Has a dump written before long, unless there were many. Any thread, under any lock; never blocks."""
        if self._automatic < MAX_DUMPS and (now := time.monotonic()) >= self._next:
            self._automatic += 1
            self._next = now + INTERVAL
            self._reasons.put((reason, True))

    def on_signal(self, reason: str) -> None:
        """Has a dump written now. Also in a signal handler."""
        self._reasons.put((reason, False))

    def close(self) -> None:
        """Writes what is due, and ends the thread. Idempotent. In a forked child there is none."""
        _all.discard(self)
        self._reasons.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while (wish := self._reasons.get()) is not None:
            reason, gather = wish
            if gather:
                time.sleep(GATHER)
            try:
                if (dump := self._take(reason)) is not None:
                    path = write_dump(self._folder, self._name, dump)
                    log.warning("%s: wrote the flight record %s: %s", self._name, path, reason)
            except OSError as error:
                log.warning("%s: the flight record could not be written to %s: %s", self._name, self._folder, error)


def write_dump(folder: Path, name: str, dump: Dump) -> Path:
    """Writes ``dump`` to a new file in ``folder``, which is made if need be. Raises ``OSError``."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:100]
    path = folder / f"{stem}-pid{os.getpid()}-{next(_numbers)}.json"
    part = path.with_suffix(".part")
    part.touch(mode=0o600)  # names of requests are nobody else's business
    part.write_bytes(msgspec.json.format(msgspec.json.encode(dump), indent=1))
    return part.replace(path)


_all: weakref.WeakSet[Dumper] = weakref.WeakSet()


def _heed_signal() -> None:
    if threading.current_thread() is not threading.main_thread():
        log.info("no flight record on %s: signal handlers can be set on the main thread only", SIGNAL.name)
    elif signal.getsignal(SIGNAL) is signal.SIG_DFL:
        signal.signal(SIGNAL, _on_signal)


def _on_signal(_number: int, _frame: FrameType | None) -> None:
    for dumper in list(_all):
        dumper.on_signal(f"signal {SIGNAL.name}")
