"""Words in pinned host memory through which CUDA streams and the host tell each other that something is done.

They use CUDA's *stream memory operations*: a stream can write a word, or wait until a word has reached a value, in
order with its other operations and without a kernel.

* `SyncWords.signal` makes a stream write a word when it gets there. The host polls the word in memory, without a driver
  call, to see that everything before it on the stream is done.
* `SyncWords.hold` makes a stream wait until the host writes a word. The host may do so at any time from any thread,
  again without a driver call.

Words are reused. Each use of a word has values of its own, which continue those of the use before, and a word is reused
only after the device has written the last value of its last use. So no write of an earlier use can still be pending,
and none could be taken for one of a later use.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from torchkv.arrays import UInt32Array
from torchkv.cuda import driver
from torchkv.cuda.driver import check, check_code, context, device_index
from torchkv.errors import ProtocolError, TransportUnavailable

__all__ = ["StreamCompletion", "SyncWords", "HostReleasedWait", "SyncWordPool"]

_COUNT = 16384  # words, 64 KiB of pinned memory; each operation in progress takes one
_MASK = (1 << 32) - 1


class SyncWordPool:
    """Which words are free, and which values each is used with. Makes no CUDA calls; callers hold the lock."""

    def __init__(self, memory: UInt32Array) -> None:
        """memory: uint32 ``[n]``, written by the device and, in `open`, by the host."""
        self.memory = memory
        self._free = deque(range(len(memory)))  # the longest unused first
        self._last = memory.astype(np.int64).tolist()  # the value that ends a word's current or latest use
        self._waiting: dict[int, int] = {}  # word that a stream waits for -> the value that ends the wait
        self._dropped: deque[int] = deque()  # given back, but perhaps not yet at their last value
        self._busy: set[int] = set()  # words in use, or dropped

    def take(self, steps: int) -> tuple[int, int]:
        """Begins a use: a word, and the first of the ``steps`` consecutive values that will be written to it.

        Raises ``ProtocolError`` (retryable) if every word is in use.
        """
        self._recycle(len(self._dropped) if not self._free else 4)
        if not self._free:
            raise ProtocolError(
                f"{len(self.memory)} stream operations are in progress, which is the limit; wait for some to end",
                retryable=True,
            )
        word = self._free.popleft()
        first = (self._last[word] + 1) & _MASK
        self._last[word] = (self._last[word] + steps) & _MASK
        self._busy.add(word)
        return word, first

    def reached(self, word: int, value: int) -> bool:
        """Whether the word has reached ``value``: compared modulo 2**32, as the device compares."""
        return (int(self.memory[word]) - value) & _MASK < 1 << 31

    def give_back(self, word: int) -> None:
        """Ends the caller's use of the word. It is reused once its last value has been written."""
        self._dropped.append(word)
        self._recycle(1)

    def undo(self, word: int) -> None:
        """Reverses a `take` whose operation could not be enqueued."""
        self._waiting.pop(word, None)
        self.memory[word] = self._last[word]
        self.give_back(word)

    def hold(self, word: int, value: int) -> None:
        """Records that a stream waits until the word has reached ``value``."""
        self._waiting[word] = value

    @property
    def holding(self) -> bool:
        """Whether a stream waits for any word. May be read without the lock."""
        return bool(self._waiting)

    def open(self, word: int, value: int) -> None:
        """Stores ``value``, which ends the wait, unless that was done before: the word may be in another use by now."""
        if self._waiting.get(word) != value:
            return
        del self._waiting[word]
        # One aligned store, which is atomic. No fence is needed, not even on processors that reorder stores: the stream
        # goes on to read device memory only, and what it reads was written before this call, ordered by the driver or
        # the kernel (a message was read, an event was seen).
        self.memory[word] = value
        self._dropped.append(word)

    def open_all(self) -> None:
        """Ends all waits."""
        for word, value in list(self._waiting.items()):
            self.open(word, value)

    def settled(self) -> bool:
        """Whether the device is done with all words: it will neither write to one nor wait for one."""
        return all(int(self.memory[word]) == self._last[word] for word in self._busy)

    def _recycle(self, limit: int) -> None:
        for _ in range(min(limit, len(self._dropped))):
            word = self._dropped.popleft()
            if int(self.memory[word]) == self._last[word]:
                self._free.append(word)
                self._busy.discard(word)
            else:
                self._dropped.append(word)


class StreamCompletion:
    """Tells the host when a stream has reached a `SyncWords.signal`: ``SyncWords.words[index]`` then has ``value``."""

    __slots__ = ("_done", "_released", "_sync_words", "index", "value")

    def __init__(self, sync_words: SyncWords, index: int, value: int) -> None:
        self.index = index
        self.value = value
        self._sync_words = sync_words
        self._done = False
        self._released = False

    @property
    def done(self) -> bool:
        """Whether all work enqueued on the stream before the signal is done, and its writes are visible.

        One read of host memory.
        """
        if not (self._done or self._released):
            self._done = self._sync_words._pool.reached(self.index, self.value)
        return self._done

    def release(self) -> None:
        """Lets the word be reused once the stream has written it. ``done`` does not change any more. Idempotent."""
        self._sync_words._release(self)


class HostReleasedWait:
    """A `SyncWords.hold`: one wait of a stream, which the host ends."""

    __slots__ = ("_index", "_sync_words", "_value")

    def __init__(self, sync_words: SyncWords, index: int, value: int) -> None:
        self._sync_words = sync_words
        self._index = index
        self._value = value

    def open(self) -> None:
        """Ends the wait. From any thread; makes no driver call; idempotent."""
        self._sync_words._open(self._index, self._value)


# Words of closed or dropped `SyncWords` that a stream may still write to.
_kept: dict[int, SyncWordPool] = {}


def _retire(pool: SyncWordPool) -> None:
    """Ends all waits, and keeps the words alive until the device is done with them."""
    pool.open_all()
    _kept[id(pool)] = pool
    for key, kept in list(_kept.items()):
        if kept.settled():
            _kept.pop(key, None)


class _Gpu:
    """What all groups of this process share on one GPU.

    hold_lock: held while a wait begins, and by `SyncWords.no_blocked_streams`; guards ``pools``. It is taken before the
    lock of any `SyncWords`.
    """

    def __init__(self) -> None:
        self.hold_lock = threading.Lock()
        self.pools: weakref.WeakSet[SyncWordPool] = weakref.WeakSet()


_gpus: dict[int, _Gpu] = {}


class SyncWords:
    """The sync words of one group on one GPU. Thread-safe.

    Up to 16384 operations may be in progress. ``close()`` ends every wait; dropping the object does too. Raises
    ``TransportUnavailable`` where the device or its driver lacks stream memory operations.
    """

    def __init__(self, device: torch.device) -> None:
        self._index = device_index(device)
        with context(self._index) as cuda:
            self._flush = _wait_flags(self._index)
            memory = _pinned_words(self._index)
            address = check(cuda.cuMemHostGetDevicePointer(memory.ctypes.data, 0), "looking up pinned memory")
        self._library = driver.library()
        self._address = int(address)
        self._lock = threading.Lock()
        self._closed = False
        self.words = memory  # uint32 ``[n]``: where a progress loop looks up a `StreamCompletion` by its index
        self._pool = SyncWordPool(memory)
        self._gpu = _gpus.setdefault(self._index, _Gpu())
        with self._gpu.hold_lock:
            self._gpu.pools.add(self._pool)
        # Not at exit: no streams are left by then.
        self._retire = weakref.finalize(self, _retire, self._pool)
        self._retire.atexit = False

    def signal(self, stream: torch.cuda.Stream) -> StreamCompletion:
        """Enqueues the write of a word on ``stream``.

        It comes after everything enqueued so far is done and visible to the whole system. The device must be current on
        the calling thread (`torchkv.cuda.driver.make_current`). The caller gives the completion back with
        ``release()``. Raises ``ProtocolError`` while the stream is being captured, and a retryable one if too many
        operations are in progress.
        """
        handle = stream.cuda_stream
        self._refuse_capture(handle)
        word, value = self._take(steps=1, hold=False)
        try:
            # With default flags the driver puts a fence between earlier writes of the stream and this one.
            self._write(handle, word, value)
        except TransportUnavailable:
            self._undo(word)
            raise
        return StreamCompletion(self, word, value)

    def hold(self, stream: torch.cuda.Stream) -> HostReleasedWait:
        """Makes everything enqueued on ``stream`` from now on wait for ``HostReleasedWait.open()``.

        The stream is then blocked, and blocks more than itself: other streams may share its hardware queue, and driver
        calls that wait for the whole device (freeing memory, the first launch of a kernel) wait for it too. So nothing
        that must happen before ``open()`` may depend on such a stream or such a call; see `no_blocked_streams`. Raises
        what `signal` raises. Any thread may call this, with any device current.
        """
        handle = stream.cuda_stream
        with context(self._index):
            self._refuse_capture(handle)
            with self._gpu.hold_lock:
                word, value = self._take(steps=2, hold=True)
            try:
                self._wait(handle, word, value)
            except TransportUnavailable:
                self._undo(word)
                raise
            held = HostReleasedWait(self, word, value)
            try:
                # A second value in the same word, written when the stream has passed the wait: only then is it reused.
                self._write(handle, word, (value + 1) & _MASK)
            except TransportUnavailable:
                held.open()
                raise
        return held

    @property
    def holding(self) -> bool:
        """Whether any stream waits for a `HostReleasedWait` of this object."""
        return self._pool.holding

    @contextmanager
    def no_blocked_streams(self) -> Iterator[bool]:
        """Yields whether no stream of this GPU waits for the host, on behalf of any group of this process.

        No such wait begins inside the ``with``: `hold` blocks until it ends. If it yields False, come back later.

        Loading a kernel, freeing device memory and unmapping a peer's memory wait for all streams. If the progress
        thread made such a call while a stream waits for the host, the call would wait for the stream, and the stream
        for this thread, which ends its wait: a deadlock.
        """
        with self._gpu.hold_lock:
            yield not any(pool.holding for pool in self._gpu.pools)

    def _release(self, completion: StreamCompletion) -> None:
        with self._lock:
            if not completion._released:
                completion._released = True
                self._pool.give_back(completion.index)

    def _open(self, index: int, value: int) -> None:
        with self._lock:
            self._pool.open(index, value)

    def close(self) -> None:
        """Ends every wait and refuses new operations. Completions can still be read. Idempotent."""
        with self._lock:
            self._closed = True
            self._retire()

    def _take(self, *, steps: int, hold: bool) -> tuple[int, int]:
        with self._lock:
            if self._closed:
                raise ProtocolError("the sync words of this group are closed: the group was shut down")
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
        if driver.is_capturing(stream):
            raise ProtocolError(
                "this stream is being captured into a CUDA graph; transfers and waits are not captured, "
                "only torchkv.GraphGate.mark is"
            )


def _wait_flags(index: int) -> int:
    """Flags of ``cuStreamWaitValue``: wait until the word has reached the value, then flush remote writes if possible.

    Raises ``TransportUnavailable`` where ``cuda:index`` or its driver lacks stream memory operations.
    """
    cuda = driver.driver()
    kinds = cuda.CUdevice_attribute
    device = check(cuda.cuDeviceGet(index), f"looking for cuda:{index}")

    def can(kind: object) -> bool:
        return bool(check(cuda.cuDeviceGetAttribute(kind, device), f"asking what cuda:{index} can do"))

    if not can(kinds.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS):
        raise TransportUnavailable(
            f"cuda:{index} or its driver has no stream memory operations, by which streams and the host signal each "
            "other; GPUs of 2017 or later with driver 525 or later have them"
        )
    reached = int(cuda.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
    if can(kinds.CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES):
        # Without the flush, work behind the wait might not see RDMA writes that arrived before the word was written.
        return reached | int(cuda.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_FLUSH)
    return reached


def _pinned_words(index: int) -> UInt32Array:
    with torch.cuda.device(index), torch.inference_mode(False):
        words: UInt32Array = torch.zeros(_COUNT, dtype=torch.int32, pin_memory=True).numpy().view(np.uint32)
    return words
