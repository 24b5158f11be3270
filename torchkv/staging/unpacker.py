"""The staged path on the receiver: scatters the stages that writers have filled into this rank's pages."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator

from torchkv.errors import KVError
from torchkv.host.copy_loops import STEP_BYTES
from torchkv.protocol.actions import Scatter
from torchkv.protocol.receiving.stages import Stages
from torchkv.staging.packer import Packer

__all__ = ["StageUnpacker"]

# Scatters under way at once, on a GPU enqueued one behind the other: of one writer, and of all.
MAX_OF_ONE_WRITER, MAX_ACTIVE = 4, 16


class StageUnpacker:
    """Runs the `Scatter` jobs of one rank. Used by the progress thread only; ``lock`` guards ``stages``.

    packer: None on a rank without staging, which gets no jobs. send_stage_messages: sends the messages about stages
    that ``stages`` has queued.
    """

    def __init__(
        self,
        *,
        stages: Stages,
        lock: threading.Lock,
        packer: Packer | None,
        send_stage_messages: Callable[[], None],
    ) -> None:
        self._stages = stages
        self._lock = lock
        self._packer = packer
        self._send_stage_messages = send_stage_messages
        self._queue: deque[Scatter] = deque()
        self._active: deque[tuple[Scatter, Iterator[int]]] = deque()

    @property
    def busy(self) -> bool:
        return bool(self._queue or self._active)

    def start(self, job: Scatter) -> None:
        self._queue.append(job)

    def advance(self, now: float) -> bool:
        """Does one bounded step. Returns whether anything moved."""
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
                # A host copy continues until it ends, so that its stage is free soon. GPU jobs wait side by side.
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
            if job.stopped:  # stages of a failed request are never unpacked
                self._end(job, None, now)
            elif len(self._active) < MAX_ACTIVE and of_each[job.src] < MAX_OF_ONE_WRITER:
                assert self._packer is not None
                of_each[job.src] += 1
                self._active.append((job, self._packer.scatter(job)))
            else:
                self._queue.append(job)
        return len(self._queue) < len(queue)

    def _end(self, job: Scatter, error: KVError | None, now: float) -> None:
        with self._lock:
            self._stages.scattered(job, error, now)
        if self._packer is not None and self._packer.asynchronous:
            self._send_stage_messages()
