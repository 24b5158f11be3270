"""What one rank's transfers share on its GPU: side streams, completion flags and uploaded page ids."""

from __future__ import annotations

import itertools
import logging
import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress

import torch

from torchkv import cudadriver, devicemem, gate, kernels
from torchkv.errors import KVError, TransportUnavailable
from torchkv.events import RecordedEvent, StreamEvent, event_pool
from torchkv.flags import Flag, Flags, wait_flags
from torchkv.streams import Claim, SideStreams, may_wait
from torchkv.uploads import Uploads

__all__ = ["Device", "check_alive", "launching"]

log = logging.getLogger(__name__)

MAX_ACTIVE = 256

# Of all groups of this process, by GPU. Looked at and added to in `Flags.quiet` only, which is the GPU's.
_devices: dict[int, weakref.WeakSet[Device]] = {}


@contextmanager
def launching(stream: torch.cuda.Stream, what: str) -> Iterator[None]:
    """Enqueues on ``stream``. Raises ``TransportUnavailable`` for what CUDA or Triton refuse."""
    try:
        with torch.cuda.stream(stream):
            yield
    except KVError:
        raise
    except (RuntimeError, OSError) as error:  # the latter from where Triton keeps what it has compiled
        raise TransportUnavailable(f"the GPU refused to {what}: {error}") from error


def check_alive(stream: torch.cuda.Stream) -> None:
    """Raises ``TransportUnavailable`` if the GPU has failed: then no flag behind anything on ``stream`` rises."""
    try:
        stream.query()
    except RuntimeError as error:
        raise TransportUnavailable(f"the GPU failed: {error}") from error


class Device:
    """Made and used by the progress thread of one rank; ``flags``, ``index`` and `record_gate` are the callers' too.

    ``blocks`` bounds the thread blocks of each copy kernel (``Options.sm_budget``). signals: whether its streams may
    wait for those of peers.
    """

    def __init__(self, device: torch.device, *, blocks: int) -> None:
        self.device = device
        self.index = cudadriver.device_index(device)
        self.blocks = blocks
        self.activate()
        self._library = cudadriver.library()
        self._until_reached = wait_flags(self.index)
        event_pool(self.index)  # so that no caller has to fill it
        self.flags = Flags(device)
        self.in_flight: set[Flag] = set()  # what the progress thread has to look at
        self.soon: set[Flag] = set()  # those of them that wait for copies only: their end is worth a core
        self._streams = SideStreams(device)
        # For gathers and scatters of streamed pieces: two at once would share the link, and end at the same time, when
        # no third is there yet.
        self.outgoing, self.incoming = self._streams.outgoing, self._streams.incoming
        # One, so that two kernels that wait for nothing never take twice the budget; unless that is the whole GPU: the
        # next kernel may as well begin while the last blocks of the one before end.
        self._in_turn = 2 if blocks >= torch.cuda.get_device_properties(device).multi_processor_count else 1
        self._open = itertools.cycle([self.outgoing, self.incoming][: self._in_turn])
        self._awaited: dict[int, int] = {}  # words that streams wait for -> the value
        with self.flags.quiet():
            _devices.setdefault(self.index, weakref.WeakSet()).add(self)
        devicemem.free_later(self, self.index)
        self._pauses: list[float] = []  # when they end
        self.signals = may_wait()[0] > 0
        if not self.signals:
            log.warning(
                "CUDA_DEVICE_MAX_CONNECTIONS=%d makes streams of %s hold each other up: staged transfers are slower, "
                "and streams that wait for them (wait_stream) may keep them from ending; unset it, or set 32",
                cudadriver.num_queues(),
                device,
            )
        self.uploads = Uploads(device)
        self._errors = list(torch.zeros((MAX_ACTIVE, 2), dtype=torch.int64, pin_memory=True))

    def activate(self) -> None:
        """Makes the GPU current on the calling thread."""
        cudadriver.make_current(self.device)
        torch.cuda.set_device(self.device)
        cudadriver.ignore_captures()

    def record_gate(self) -> RecordedEvent:
        """An event behind everything that the calling thread's current stream of this GPU has been given."""
        # Recording into a full queue waits for the GPU, and the GPU may wait for a hold that only the progress thread
        # opens, for which it needs the GIL.
        return gate.record_gate(self.index, keep_gil=not self.flags.holding)

    @property
    def open_stream(self) -> torch.cuda.Stream:
        """For work that waits for nothing; perhaps another one each time."""
        return next(self._open)

    @contextmanager
    def waiting_stream(self, src: int, serial: int) -> Iterator[torch.cuda.Stream]:
        """For work that waits for a signal of rank ``src``, and for nothing here. Ranks share streams if they must.

        serial: of the piece; neighbours have two streams, if they may run at the same time.
        """
        tenant = src, serial % self._in_turn
        claim = self._streams.waiting.share(tenant)
        try:
            yield claim.stream
        finally:
            self._streams.waiting.release(claim)

    def raise_signal(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        """Enqueues the write of a signal word, of this rank or a peer, behind everything on ``stream``, and a fence."""
        code = self._library.cuStreamWriteValue64_v2(stream.cuda_stream, address, value, 0)
        cudadriver.check_code(code, "raising a signal")

    def await_signal(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        """Lets ``stream`` wait until the word of this rank at ``address`` has reached ``value``."""
        code = self._library.cuStreamWaitValue64_v2(stream.cuda_stream, address, value, self._until_reached)
        cudadriver.check_code(code, "waiting for a signal")
        self._awaited[address] = value

    def dismiss(self, stream: torch.cuda.Stream, address: int) -> None:
        """Lets go what waits for that word, if anything does, by a value at which it leaves the stage alone."""
        if (value := self._awaited.get(address)) is not None:
            self.raise_signal(stream, address, value + 1)

    def forget_signal(self, address: int) -> None:
        """No stream waits for it any more."""
        self._awaited.pop(address, None)

    @contextmanager
    def quiet(self) -> Iterator[bool]:
        """Yields whether no stream of this GPU waits for a rank of this process or, by torchkv, for a peer.

        None begins to wait for the former meanwhile. For what waits for all streams, such as loading kernels, freeing
        memory and unmapping that of others: had the progress thread to wait for one that it is to let go itself,
        neither would ever go on.
        """
        with self.flags.quiet() as quiet:
            yield quiet and not any(device._awaited for device in _devices[self.index])

    def free_left(self) -> None:
        """Frees and unmaps what finalizers have left. To be called when it is `quiet`."""
        devicemem.free_left(self.index)

    def beside_the_model(self, what: str) -> AbstractContextManager[None]:
        """As `launching`, for what waits for the current stream: the default one may be the model's, and wait for this.

        Copying from memory that is not pinned is such a thing.
        """
        return launching(self.open_stream, what)

    def pause(self, seconds: float, stopped: Callable[[], bool]) -> Iterator[int]:
        """Steps of a transfer that does nothing for so long, or until it is stopped."""
        until = time.monotonic() + seconds
        self._pauses.append(until)
        try:
            while time.monotonic() < until and not stopped():
                yield 0
        finally:
            self._pauses.remove(until)

    @property
    def pause_ends(self) -> float:
        """When the first pause ends, by ``time.monotonic``."""
        return min(self._pauses, default=math.inf)

    def claim(self, waits: Sequence[StreamEvent], request: str) -> Claim[torch.cuda.Stream] | None:
        """A stream that may wait for these events of a transfer of ``request``; None if all wait for others.

        What one stream of the model has been given comes in order, whichever request it is of: it takes one of these.
        """
        recorded = [event for event in waits if isinstance(event, RecordedEvent)]
        if len({event.stream for event in recorded}) == 1 and len(recorded) == len(waits):
            return self._streams.gated.claim(recorded[0].stream, max(event.number for event in recorded))
        return self._streams.gated.claim(request)

    def release(self, claim: Claim[torch.cuda.Stream]) -> None:
        """Gives back what `claim` gave."""
        self._streams.gated.release(claim)

    def signal(self, stream: torch.cuda.Stream, *, soon: bool = False) -> Flag:
        """A flag that rises when everything enqueued on ``stream`` so far is done and visible to the whole system.

        soon: if it is copies that can run now.
        """
        flag = self.flags.signal(stream)
        self.in_flight.add(flag)
        if soon:
            self.soon.add(flag)
        return flag

    def expect(self, flag: Flag) -> None:
        """What the flag waits for can run now."""
        self.soon.add(flag)

    def retire(self, flag: Flag) -> None:
        self.in_flight.discard(flag)
        self.soon.discard(flag)
        flag.release()

    def error_slot(self) -> torch.Tensor:
        """Where kernels of one transfer say which page id was bad: see `torchkv.kernels.error_slot`."""
        slot = self._errors.pop() if self._errors else kernels.error_slot()
        slot.zero_()
        return slot

    def retire_errors(self, slot: torch.Tensor) -> None:
        """Gives back what `error_slot` gave, when the kernels have ended."""
        self._errors.append(slot)

    def close(self) -> None:
        """Releases every stream that still waits for this rank, or for a peer. After the last transfer."""
        with suppress(TransportUnavailable, RuntimeError):  # of a GPU that has failed nobody waits for anything
            for address in self._awaited:  # of peers that hang
                self.dismiss(self.outgoing, address)
            if self._awaited:
                self.outgoing.synchronize()  # the memory may soon be another's
                self._awaited.clear()
        self.flags.close()
        devicemem.free_at_once(self, self.index)
