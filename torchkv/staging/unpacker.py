"""The receiver's hands: unpacks the stages that writers have filled into this rank's pages."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator

from torchkv.errors import KVError
from torchkv.packer import Packer
from torchkv.protocol.actions import Scatter
from torchkv.protocol.receiver import Receiver
from torchkv.transfer import STEP_BYTES

__all__ = ["Unstager"]

# On a GPU so many are enqueued, one behind the other: of one writer, which may hang, and of all.
OF_ONE, OF_ALL = 4, 16


class Unstager:
    """Belongs to the driver's thread; ``lock`` guards ``receiver``, which callers share.

    speak: sends what there is to say about stages.
    """

    def __init__(
        self, *, receiver: Receiver, lock: threading.Lock, packer: Packer | None, speak: Callable[[], None]
    ) -> None:
        self._receiver = receiver
        self._lock = lock
        self._packer = packer
        self._speak = speak
        self._queue: deque[Scatter] = deque()
        self._active: deque[tuple[Scatter, Iterator[int]]] = deque()

    @property
    def busy(self) -> bool:
        return bool(self._queue or self._active)

    def start(self, job: Scatter) -> None:
        self._queue.append(job)

    def advance(self, now: float) -> bool:
        """A bounded step. True if anything moved."""
        moved = self._begin(now)
        budget = STEP_BYTES
        for _ in range(len(self._active)):
            if budget <= 0:
                break
            job, steps = self._active.popleft()
            error: KVError | None = None
            try:
                nbytes = next(steps)
            except StopIteration:
                pass
            except KVError as raised:
                error = raised
            else:
                # One after the other, so that the ring goes round; those that wait for the GPU wait side by side.
                (self._active.appendleft if nbytes else self._active.append)((job, steps))
                budget -= nbytes
                moved |= nbytes > 0
                continue
            moved = True
            self._end(job, error, now)
        return moved

    def _begin(self, now: float) -> bool:
        if not self._queue:
            return False
        of_each = Counter(job.src for job, _ in self._active)
        queue, self._queue = self._queue, deque()
        for job in queue:
            if job.stopped:  # what a failed request left in a stage is never unpacked
                self._end(job, None, now)
            elif len(self._active) < OF_ALL and of_each[job.src] < OF_ONE:
                assert self._packer is not None
                of_each[job.src] += 1
                self._active.append((job, self._packer.scatter(job)))
            else:
                self._queue.append(job)
        return len(self._queue) < len(queue)

    def _end(self, job: Scatter, error: KVError | None, now: float) -> None:
        with self._lock:
            self._receiver.scattered(job, error, now)
        if self._packer is not None and self._packer.elsewhere:
            self._speak()
