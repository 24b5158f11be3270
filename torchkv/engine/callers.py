"""The calls and threads of this rank's user: works that end, and waits for what changes."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from torchkv.core.news import News
from torchkv.engine.layer_wait import LayerStreamWaits
from torchkv.engine.work import KVWork, settle_copied
from torchkv.protocol.actions import Account, Action, Settle, SettleCopied, Split

if TYPE_CHECKING:
    from torchkv.protocol.receiving.receiver import Receiver
    from torchkv.protocol.sending.sender import Sender

__all__ = ["Callers"]


class Callers:
    """One engine's. lock: the engine's. news: of the resident loop, if this rank has one.

    changed: notified when a grant or a layer has arrived, or a call failed. has_news: whether threads that wait for it
    should look again.
    """

    def __init__(self, lock: threading.Lock, news: News | None) -> None:
        self.changed = threading.Condition(lock)
        self.layer_stream_waits = LayerStreamWaits()
        self.has_news = False
        self._lock = lock
        self._news = news
        self._settled: deque[Settle | SettleCopied] = deque()  # works to complete when peers have been told
        self._announced: deque[KVWork] = deque()  # completed; their futures are still to be
        self._waiting = 0  # threads in `wait_change`

    @property
    def pending(self) -> bool:
        """Whether `announce` has anything to tell of works that have completed."""
        return bool(self._announced)

    def settle(self, action: Settle | SettleCopied) -> None:
        """Has parts of works completed by the next `announce`. Under the lock."""
        self.has_news |= isinstance(action, Settle) and action.error is not None
        self._settled.append(action)

    def complete(self, sender: Sender, receiver: Receiver) -> None:
        """Completes the works that the state machines ask for, after the loop has ended them. Under the lock."""
        completed = self._take_settled()
        for machine in (sender, receiver):
            if machine.actions:
                completed += _completed(machine.actions)
        for work in completed:
            if work._future is not None:  # its callbacks may call verbs: the driver runs them, without the lock
                self._announced.append(work)
        self.layer_stream_waits.release()
        self.changed.notify_all()
        if completed or self._waiting:
            self.wake()  # others may have found nothing left to take in before this was done

    def announce(self) -> None:
        """Completes works and wakes threads and streams that wait. Without the lock: callbacks may call verbs."""
        if not (self._settled or self.has_news or self._announced):
            return
        if self._settled:
            with self._lock:  # callers complete works too: see `Engine.catch_up`
                if completed := self._take_settled():
                    self._announced.extend(completed)
                    self.wake()
        while self._announced:
            self._announced.popleft()._announce()
        if self.has_news:
            self.has_news = False
            with self._lock:
                self.layer_stream_waits.release()
                self.notify()

    def _take_settled(self) -> list[KVWork]:
        """Completes works as `settle` has asked for. Those that are complete now."""
        completed = [work for action in self._settled for work in _settle(action)]
        self._settled.clear()
        return completed

    def notify(self) -> None:
        """Wakes the threads that wait for a grant, a layer or a failure. Under the lock."""
        self.changed.notify_all()
        if self._waiting:  # else it would wake those that wait for the end of a work, for nothing
            self.wake()

    def wake(self) -> None:
        """Ends the sleep of all threads that wait for the resident loop. Any thread."""
        if self._news is not None:
            self._news.add()

    def wait_change(self, seen: int, seconds: float) -> bool:
        """Waits, without the lock, for what `notify` tells of, or the loop. False if there is no time left.

        To be called under the lock. It may end early. seen: `Engine.news` before the caller looked whether it has to
        wait.
        """
        if self._news is None:
            return self.changed.wait(seconds)
        if seconds <= 0:
            return False
        self._waiting += 1
        self._lock.release()
        try:
            self._news.wait(seen, seconds, listens=True)
        finally:
            self._lock.acquire()
            self._waiting -= 1
        return True


def _completed(actions: list[Action]) -> list[KVWork]:
    """Takes and carries out the actions that complete works or count their bytes. The works that are complete."""
    completed: list[KVWork] = []
    rest: list[Action] = []
    for action in actions:
        if isinstance(action, (Settle, SettleCopied)):  # most are
            completed += _settle(action)
        elif isinstance(action, Account):
            action.work._account(action.nbytes, action.path)
        elif isinstance(action, Split):
            action.work._split(action.more)
        else:
            rest.append(action)
    actions[:] = rest
    return completed


def _settle(action: Settle | SettleCopied) -> list[KVWork]:
    """Completes one part of a work, or of several. Those that are complete now."""
    if isinstance(action, SettleCopied):
        return settle_copied(action.works, action.nbytes, action.path)
    work: KVWork = action.work
    if action.nbytes:
        work._account(action.nbytes, action.path)
    if action.first is not None:
        work._first = action.first
    return [work] if work._settle(action.error, action.aux) else []
