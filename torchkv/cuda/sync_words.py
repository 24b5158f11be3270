"""Words in pinned host memory through which CUDA streams and the host tell each other that something is done.

`Flags.signal` makes a stream write a word when it gets there; the host sees it by reading memory, with no driver call
in its polling loop. `Flags.hold` makes a stream wait until the host writes a word, at any time, from any thread.

Words are used again and again. Each use of a word has a value of its own, one above that of the use before, and a
word is used again only when the device has written the last value of its last use. So no write of an earlier use can
still be under way, and none could be taken for a later one.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from torchkv import cudadriver
from torchkv.cudadriver import check, check_code, context, device_index
from torchkv.errors import ProtocolError, TransportUnavailable

__all__ = ["Flag", "Flags", "Hold", "WordPool"]

UInt32Array = npt.NDArray[np.uint32]

_COUNT = 16384  # 64 KiB of pinned memory; each word is one operation under way
_MASK = (1 << 32) - 1


class WordPool:
    """Which words are free, and which value each stands at. Knows no device; callers hold the lock."""

    def __init__(self, memory: UInt32Array) -> None:
        """``memory``: uint32 ``[n]``, which the device writes to."""
        self.memory = memory
        self._free = deque(range(len(memory)))  # oldest first
        self._last = memory.astype(np.int64).tolist()  # the value that ends a word's present or latest use
        self._waiting: dict[int, int] = {}  # held words -> the value that opens them
        self._dropped: deque[int] = deque()  # given back before their last value was seen
        self._busy: set[int] = set()

    def take(self, steps: int) -> tuple[int, int]:
        """A word, and the first of the ``steps`` values that it will go through, one by one.

        Raises ``ProtocolError`` (retryable) if every word is in use.
        """
        self._recycle(len(self._dropped) if not self._free else 4)
        if not self._free:
            raise ProtocolError(
                f"{len(self.memory)} stream operations are under way already, the limit; wait for some to end",
                retryable=True,
            )
        word = self._free.popleft()
        first = (self._last[word] + 1) & _MASK
        self._last[word] = (self._last[word] + steps) & _MASK
        self._busy.add(word)
        return word, first

    def reached(self, word: int, value: int) -> bool:
        """Whether the word stands at ``value`` or after, in the cyclic sense in which the device compares too."""
        return (int(self.memory[word]) - value) & _MASK < 1 << 31

    def give_back(self, word: int) -> None:
        """The caller looks at the word no more. It is used again once its last value is there."""
        self._dropped.append(word)
        self._recycle(1)

    def undo(self, word: int) -> None:
        """Takes back a `take` of which nothing reached the device."""
        self._waiting.pop(word, None)
        self.memory[word] = self._last[word]
        self.give_back(word)

    def hold(self, word: int, value: int) -> None:
        """Notes that a stream waits for ``value`` in this word, so that `open_all` finds it."""
        self._waiting[word] = value

    @property
    def holding(self) -> bool:
        """Whether a stream waits for any word. Without the lock, too."""
        return bool(self._waiting)

    def open(self, word: int, value: int) -> None:
        """Stores ``value`` if a stream still waits for it. The host stores no second time: the word moves on."""
        if self._waiting.get(word) != value:
            return
        del self._waiting[word]
        # One aligned store, which is atomic. It carries no data: a stream let through here reads device memory, whose
        # writers were ordered before this call by the driver or the kernel (a message read, an event seen), so that
        # no fence is needed here on processors that reorder stores, either.
        self.memory[word] = value
        self._dropped.append(word)

    def open_all(self) -> None:
        for word, value in list(self._waiting.items()):
            self.open(word, value)

    def settled(self) -> bool:
        """Whether the device will write to no word any more, nor wait for one."""
        return all(int(self.memory[word]) == self._last[word] for word in self._busy)

    def _recycle(self, limit: int) -> None:
        for _ in range(min(limit, len(self._dropped))):
            word = self._dropped.popleft()
            if int(self.memory[word]) == self._last[word]:
                self._free.append(word)
                self._busy.discard(word)
            else:
                self._dropped.append(word)


class Flag:
    """One write of a stream, seen from the host: ``flags.words[index]`` will reach ``value``."""

    __slots__ = ("_done", "_flags", "_released", "index", "value")

    def __init__(self, flags: Flags, index: int, value: int) -> None:
        self.index = index
        self.value = value
        self._flags = flags
        self._done = False
        self._released = False

    @property
    def done(self) -> bool:
        """Whether all work that was enqueued on the stream before the signal has ended and is visible. One read."""
        if not (self._done or self._released):
            self._done = self._flags._pool.reached(self.index, self.value)
        return self._done

    def release(self) -> None:
        """Lets the word be used again once the write is there. ``done`` stays what it last was. Idempotent."""
        self._flags._release(self)


class Hold:
    """One wait of a stream, ended from the host."""

    __slots__ = ("_flags", "_index", "_passed", "_value")

    def __init__(self, flags: Flags, index: int, value: int) -> None:
        self._flags = flags
        self._index = index
        self._value = value
        self._passed = False

    def open(self) -> None:
        """Lets the stream go on. From any thread; no driver call; idempotent."""
        self._flags._open(self._index, self._value)

    @property
    def passed(self) -> bool:
        """Whether the stream has gone on."""
        if not self._passed:
            self._passed = self._flags._pool.reached(self._index, (self._value + 1) & _MASK)
        return self._passed


# Words that were closed or dropped while a stream had still to write to them.
_kept: dict[int, WordPool] = {}


def _retire(pool: WordPool) -> None:
    pool.open_all()
    _kept[id(pool)] = pool
    for key, kept in list(_kept.items()):
        if kept.settled():
            _kept.pop(key, None)


class _Gpu:
    """One that all groups of this process share. quiet: taken before the lock of any `Flags`, and for ``pools``."""

    def __init__(self) -> None:
        self.quiet = threading.Lock()
        self.pools: weakref.WeakSet[WordPool] = weakref.WeakSet()


_gpus: dict[int, _Gpu] = {}


class Flags:
    """The words of one device. Thread-safe.

    Raises ``TransportUnavailable`` where the device or its driver lacks stream memory operations. Up to 16384
    operations may be under way; ``close()`` ends every wait, and dropping the object does too.
    """

    def __init__(self, device: torch.device) -> None:
        self._index = device_index(device)
        with context(self._index) as cuda:
            self._flush = wait_flags(self._index)
            memory = _pinned_words(self._index)
            address = check(cuda.cuMemHostGetDevicePointer(memory.ctypes.data, 0), "looking up pinned memory")
        self._library = cudadriver.library()
        self._address = int(address)
        self._lock = threading.Lock()
        self._closed = False
        self.words = memory  # uint32: what `Flag.index` and ``Flag.value`` are about
        self._pool = WordPool(memory)
        self._gpu = _gpus.setdefault(self._index, _Gpu())
        with self._gpu.quiet:
            self._gpu.pools.add(self._pool)
        # Not at exit: by then no stream is left to be let go.
        self._retire = weakref.finalize(self, _retire, self._pool)
        self._retire.atexit = False

    def signal(self, stream: torch.cuda.Stream) -> Flag:
        """Enqueues a write after everything on ``stream``, made visible to the whole system before it.

        The device must be current on the calling thread (`make_current`). Give the flag back with
        ``release()``. Raises ``ProtocolError`` while the stream is being captured or when too many are under way.
        """
        handle = stream.cuda_stream
        self._refuse_capture(handle)
        word, value = self._take(steps=1, hold=False)
        try:
            # The default flags: the write comes behind a fence for all earlier writes of the stream.
            self._write(handle, word, value)
        except TransportUnavailable:
            self._undo(word)
            raise
        return Flag(self, word, value)

    def hold(self, stream: torch.cuda.Stream) -> Hold:
        """Makes what is enqueued on ``stream`` from now on wait for ``Hold.open()``.

        CUDA does not know what a hold waits for. Streams may share a hardware queue, and calls that wait for the
        whole device (freeing memory, the first launch of a kernel) wait for held streams too: nothing that must
        happen before the hold is opened may depend on either; see `quiet`. Raises what `signal` raises; works on any
        thread.
        """
        handle = stream.cuda_stream
        with context(self._index):
            self._refuse_capture(handle)
            with self._gpu.quiet:
                word, value = self._take(steps=2, hold=True)
            try:
                self._wait(handle, word, value)
            except TransportUnavailable:
                self._undo(word)
                raise
            held = Hold(self, word, value)
            try:
                # The same word tells when the stream has passed, so that only then it serves again.
                self._write(handle, word, (value + 1) & _MASK)
            except TransportUnavailable:
                held.open()
                raise
        return held

    @property
    def holding(self) -> bool:
        """Whether any stream waits for these flags' group."""
        return self._pool.holding

    @contextmanager
    def quiet(self) -> Iterator[bool]:
        """Yields whether no stream of this GPU waits for this process, whichever group, and lets none begin to.

        For calls that wait for all streams. `hold` waits for the end of this.
        """
        with self._gpu.quiet:
            yield not any(pool.holding for pool in self._gpu.pools)

    def _release(self, flag: Flag) -> None:
        with self._lock:
            if not flag._released:
                flag._released = True
                self._pool.give_back(flag.index)

    def _open(self, index: int, value: int) -> None:
        with self._lock:
            self._pool.open(index, value)

    def close(self) -> None:
        """Opens every hold and refuses new operations. Flags out can still be read. Idempotent."""
        with self._lock:
            self._closed = True
            self._retire()

    def _take(self, *, steps: int, hold: bool) -> tuple[int, int]:
        with self._lock:
            if self._closed:
                raise ProtocolError("these flags are closed; their group was shut down")
            word, value = self._pool.take(steps)
            if hold:
                self._pool.hold(word, value)
        return word, value

    def _undo(self, word: int) -> None:
        with self._lock:
            self._pool.undo(word)

    def _write(self, stream: int, word: int, value: int) -> None:
        code = self._library.cuStreamWriteValue32_v2(stream, self._address + 4 * word, value, 0)
        check_code(code, "signalling from a stream")

    def _wait(self, stream: int, word: int, value: int) -> None:
        code = self._library.cuStreamWaitValue32_v2(stream, self._address + 4 * word, value, self._flush)
        check_code(code, "holding a stream")

    def _refuse_capture(self, stream: int) -> None:
        if cudadriver.is_capturing(stream):
            raise ProtocolError(
                "this stream is being captured into a CUDA graph; transfers and waits are not captured, "
                "only torchkv.GraphGate.mark is"
            )


def wait_flags(index: int) -> int:
    """How a stream compares: whether the word has reached the value, and whether to flush what arrived from outside.

    Raises ``TransportUnavailable`` where ``cuda:index`` or its driver lacks stream memory operations.
    """
    cuda = cudadriver.driver()
    kinds = cuda.CUdevice_attribute
    device = check(cuda.cuDeviceGet(index), f"looking for cuda:{index}")

    def can(kind: object) -> bool:
        return bool(check(cuda.cuDeviceGetAttribute(kind, device), f"asking what cuda:{index} can do"))

    if not can(kinds.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS):
        raise TransportUnavailable(
            f"cuda:{index} or its driver has no stream memory operations, by which streams and the progress thread "
            "signal each other; a GPU of 2017 or later and driver 525 or later have them"
        )
    reached = int(cuda.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
    if can(kinds.CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES):
        # Else RDMA writes that arrived before the hold was opened might not be seen by what runs behind it.
        return reached | int(cuda.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_FLUSH)
    return reached


def _pinned_words(index: int) -> UInt32Array:
    with torch.cuda.device(index), torch.inference_mode(False):
        words: UInt32Array = torch.zeros(_COUNT, dtype=torch.int32, pin_memory=True).numpy().view(np.uint32)
    return words
