"""What one rank's transfers share on its GPU: side streams, completions, uploaded page ids and error words."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Literal

import torch

from torchkv.cuda import driver, graph_gate, ipc
from torchkv.cuda.events import RecordedEvent, StreamEvent, event_pool
from torchkv.cuda.page_ids import PageIdUploads
from torchkv.cuda.side_streams import SideStreams, StreamClaim, enough_queues
from torchkv.cuda.sync_words import StreamCompletion, SyncWords
from torchkv.errors import KVError, TransportUnavailable
from torchkv.kernels import copies
from torchkv.kernels.launch import tickets_of

__all__ = ["GpuContext", "check_alive", "launching"]

log = logging.getLogger(__name__)

PREALLOCATED_ERRORS = 256  # error words, allocated ahead of time; transfers beyond them allocate their own


@contextmanager
def launching(stream: torch.cuda.Stream, operation: str) -> Iterator[None]:
    """Makes ``stream`` current. Raises ``TransportUnavailable`` for errors of CUDA and Triton.

    operation: what the GPU is asked to do, in the error message: "the GPU refused to ...".
    """
    try:
        with torch.cuda.stream(stream):
            yield
    except KVError:
        raise
    except (RuntimeError, OSError) as error:  # OSError: Triton could not use its cache of compiled kernels
        raise TransportUnavailable(f"the GPU refused to {operation}: {error}") from error


def check_alive(stream: torch.cuda.Stream) -> None:
    """Raises ``TransportUnavailable`` if the GPU has failed: then no completion on ``stream`` will ever be done."""
    try:
        stream.query()
    except RuntimeError as error:
        raise TransportUnavailable(f"the GPU failed: {error}") from error


class GpuContext:
    """One rank's GPU, as its progress thread uses it. Other threads use only ``sync_words``, ``index``, `record_gate`.

    blocks: the largest number of thread blocks of a copy kernel (``Options.sm_budget``).
    outgoing, incoming: streams that are never blocked, see `SideStreams`.
    completions: those that the progress thread polls. copy_completions: those of them behind copies that can run now;
    for their sake the thread spins instead of sleeping.
    """

    def __init__(self, device: torch.device, *, blocks: int) -> None:
        self.device = device
        self.index = driver.device_index(device)
        self.blocks = blocks
        self.activate()
        self._events = event_pool(self.index)  # made here, so that no caller's thread has to
        self.sync_words = SyncWords(device)
        self.completions: set[StreamCompletion] = set()
        self.copy_completions: set[StreamCompletion] = set()
        self._streams = SideStreams(device)
        self.outgoing, self.incoming = self._streams.outgoing, self._streams.incoming
        for stream in self._streams.every:
            tickets_of(stream)  # made here, because that waits for the GPU
        # How many copy kernels may overlap. One, so that they never exceed the budget of blocks.
        # Two where the budget is the whole GPU: the next kernel may begin while the last blocks of the one before end.
        overlapping = 2 if blocks >= torch.cuda.get_device_properties(device).multi_processor_count else 1
        self._unblocked = itertools.cycle([self.outgoing, self.incoming][:overlapping])
        ipc.defer_frees(self, self.index)
        self._pauses: list[float] = []  # ends of all pauses, by ``time.monotonic``
        if not enough_queues():
            log.warning(
                "CUDA_DEVICE_MAX_CONNECTIONS=%d is too few hardware queues: streams of %s block each other, and "
                "one that waits for a transfer (wait_stream) may keep it from ending; unset the variable, or set it "
                "to 32",
                driver.num_queues(),
                device,
            )
        self.uploads = PageIdUploads(device)
        self._errors = list(torch.zeros((PREALLOCATED_ERRORS, 1), dtype=torch.int64, pin_memory=True))

    def check_alive(self) -> None:
        """Raises ``TransportUnavailable`` if the GPU has failed."""
        check_alive(self.incoming)

    def activate_thread(self) -> None:
        """As `activate`, for a thread that runs no kernels of PyTorch."""
        driver.make_current(self.device)
        driver.ignore_captures()

    def activate(self) -> None:
        """Makes the GPU current on the calling thread, and lets it work while other threads capture CUDA graphs."""
        self.activate_thread()
        torch.cuda.set_device(self.device)

    def record_gate(self) -> RecordedEvent:
        """Records an event behind everything enqueued on the calling thread's current stream of this GPU."""
        # With a full queue, recording waits for the GPU. If a stream waits for the host, the GPU may be waiting for the
        # progress thread, which needs the GIL. So it is kept only if no stream does.
        return graph_gate.record_gate(self.index, keep_gil=not self.sync_words.holding)

    def try_gate(self) -> RecordedEvent | Literal[False] | None:
        """`graph_gate.refuse_capture` and `record_gate` in one, for a verb's critical path: see `EventPool.try_gate`.

        False where they have to look closer.
        """
        if self.sync_words.holding or graph_gate.current_device() != self.index:
            return False
        return self._events.try_gate()

    @property
    def loop_stream(self) -> torch.cuda.Stream:
        """On which the resident loop copies.

        It is ``incoming``: a rank that sends seldom unpacks, and one more stream would take a hardware queue.
        """
        return self.incoming

    @property
    def loop_tickets(self) -> int:
        """The tickets of kernels on ``loop_stream``: see `tickets_of`."""
        return tickets_of(self.loop_stream)

    @property
    def unblocked_stream(self) -> torch.cuda.Stream:
        """A stream for work that waits for nothing; not always the same one."""
        return next(self._unblocked)

    def run_deferred_frees(self) -> None:
        """Frees and unmaps what finalizers have deferred. Call it only under `SyncWords.no_blocked_streams`."""
        ipc.run_deferred_frees(self.index)

    def on_side_stream(self, operation: str) -> AbstractContextManager[None]:
        """As `launching`, on a side stream: for operations during which the host waits for the current stream.

        A copy from memory that is not pinned is one. On the default stream, which may be the model's, it could be a
        deadlock: that stream may be blocked by a wait that only this thread can end.
        """
        return launching(self.unblocked_stream, operation)

    def pause(self, seconds: float, stopped: Callable[[], bool]) -> Iterator[int]:
        """Yields 0, the step of a transfer that moves nothing, for so many seconds or until ``stopped()``."""
        until = time.monotonic() + seconds
        self._pauses.append(until)
        try:
            while time.monotonic() < until and not stopped():
                yield 0
        finally:
            self._pauses.remove(until)

    @property
    def pause_ends(self) -> float:
        """When the next pause ends, by ``time.monotonic``; infinity without one."""
        return min(self._pauses, default=math.inf)

    def claim(self, waits: Sequence[StreamEvent], request: str) -> StreamClaim[torch.cuda.Stream] | None:
        """A side stream that may wait for these events of a transfer of ``request``; None if all wait for others.

        If all events were recorded on one stream, that stream is the owner: they happen in the order in which they were
        recorded, whichever requests they belong to, so their transfers can share a side stream. Otherwise the request
        is the owner.
        """
        recorded = [event for event in waits if isinstance(event, RecordedEvent)]
        if len({event.stream for event in recorded}) == 1 and len(recorded) == len(waits):
            return self._streams.gated.claim(recorded[0].stream, max(event.number for event in recorded))
        return self._streams.gated.claim(request)

    def release(self, claim: StreamClaim[torch.cuda.Stream]) -> None:
        """Ends a claim."""
        self._streams.gated.release(claim)

    def signal(self, stream: torch.cuda.Stream, *, copying: bool = False) -> StreamCompletion:
        """A completion that is done when everything enqueued on ``stream`` so far is done and visible to the system.

        copying: whether these are copies that can run now. Give it back with `release_completion`. Raises what
        `SyncWords.signal` raises.
        """
        completion = self.sync_words.signal(stream)
        self.completions.add(completion)
        if copying:
            self.copy_completions.add(completion)
        return completion

    def mark_copying(self, completion: StreamCompletion) -> None:
        """Records that the copies before ``completion`` can run now: what they waited for has happened."""
        self.copy_completions.add(completion)

    def release_completion(self, completion: StreamCompletion) -> None:
        """Gives back a completion of `signal`, done or not."""
        self.completions.discard(completion)
        self.copy_completions.discard(completion)
        completion.release()

    def take_error_words(self) -> torch.Tensor:
        """Zeroed error words for the kernels of one transfer: see `torchkv.kernels.copies.error_words`."""
        words = self._errors.pop() if self._errors else copies.error_words()
        words.zero_()
        return words

    def release_error_words(self, words: torch.Tensor) -> None:
        """Gives back error words, after the kernels that may write to them are done."""
        self._errors.append(words)

    def close(self) -> None:
        """Ends every wait of a stream for this rank. To be called after the last transfer."""
        self.sync_words.close()
        ipc.stop_deferring(self, self.index)
