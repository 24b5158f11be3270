"""A GPU as the resident loop uses it: addresses, and functions of its driver."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from torchkv.arrays import Int64Array
from torchkv.core.loop.limits import IDS, MAX_GPU_SENDS, UNPACK_IDS
from torchkv.core.loop.state.world import World
from torchkv.cuda import driver
from torchkv.cuda.events import RecordedEvent

__all__ = ["NO_GATE", "NUM_IDS", "Gate", "LoopDevice", "gate_of", "loop_device"]


class Gate(NamedTuple):
    """The event before which an op's pages must not be read. event: a CUevent, 0 for none. stream, number: see `Op`."""

    event: int
    stream: int
    number: int


NO_GATE = Gate(0, -1, 0)
NUM_IDS = MAX_GPU_SENDS * IDS + UNPACK_IDS

_kept: list[Any] = []  # memory that kernels may still read, or write to, although its loop has ended


class LoopDevice:
    """What the loop of one rank needs of its GPU.

    functions: addresses of the driver's functions, see `torchkv.core.loop.codes.QUERY` and the next. stream: on which
    everything is enqueued. word: int64 ``[1]`` in pinned memory, zero. ids, ids_device: int64 ``[NUM_IDS]``, pinned and
    on the GPU: those of sends, ``[MAX_GPU_SENDS, IDS]``, then those of `unpacking`. errors: address of a word in
    pinned memory for the kernels' errors. activate: prepares the loop's thread. keep: what must stay alive. patience:
    seconds, see `close`.
    """

    def __init__(
        self,
        *,
        functions: Int64Array,
        stream: int,
        word: Int64Array,
        word_device: int,
        ids: Int64Array,
        ids_device: int,
        errors: int,
        activate: Callable[[], None],
        keep: Any = None,
        patience: float = 0.0,
    ) -> None:
        assert ids.shape == (NUM_IDS,)
        assert word.dtype == ids.dtype == np.int64
        self.stream = stream
        self.errors = errors
        self.activate = activate
        self._functions = functions
        self._word = word
        self._value = word.data  # the same memory: Python reads it faster
        self._word_device = word_device
        self._ids, self._ids_device = ids, ids_device
        self._keep = keep
        self._patience = patience
        self._retired: list[tuple[Any, int]] = []

    def describe(self, world: World) -> None:
        """Writes everything into the loop's state."""
        world["driver"][:] = self._functions
        world["stream"] = self.stream
        world["word"], world["word_device"] = self._word.ctypes.data, self._word_device
        world["ids"], world["ids_device"] = self._ids.ctypes.data, self._ids_device
        behind = 8 * MAX_GPU_SENDS * IDS
        world["unpack_ids"], world["unpack_ids_device"] = world["ids"] + behind, world["ids_device"] + behind

    def landed(self, posted: int) -> bool:
        """Whether the kernel with this number has ended, and so has what was enqueued before."""
        return bool(self._value[0] >= posted)

    def retire(self, thing: Any, posted: int) -> None:
        """Keeps what kernels may still read, which nobody else needs, until the kernel ``posted`` has ended."""
        self._retired.append((thing, posted))
        self._retired[:] = [(each, last) for each, last in self._retired if not self.landed(last)]

    def close(self, posted: int) -> None:
        """The loop enqueues nothing more. Memory that it has enqueued work on stays alive until that has ended.

        That of pages is the caller's, who may free it next: what unpacks into them is waited for, for ``patience``.
        """
        until = time.monotonic() + self._patience
        while not self.landed(posted) and time.monotonic() < until:
            time.sleep(1e-4)
        _kept.append((self, posted))
        _kept[:] = [(device, last) for device, last in _kept if not device.landed(last)]


_NAMES = ("cuEventQuery", "cuMemcpyHtoDAsync_v2", "cuLaunchKernel")


def loop_device(stream: torch.cuda.Stream, activate: Callable[[], None]) -> LoopDevice:
    """The loop's memory and functions for the GPU of ``stream``. activate: prepares the loop's thread.

    Raises ``TransportUnavailable`` if the driver lacks a function.
    """
    device = stream.device
    word = torch.zeros(1, dtype=torch.int64, pin_memory=True)
    ids = torch.zeros(NUM_IDS, dtype=torch.int64, pin_memory=True)
    errors = torch.zeros(1, dtype=torch.int64, pin_memory=True)
    there = torch.empty(NUM_IDS, dtype=torch.int64, device=device)
    functions = [driver.address(name) for name in _NAMES]
    return LoopDevice(
        functions=np.array(functions, dtype=np.int64),
        stream=stream.cuda_stream,
        word=_words(word),
        # The addresses of pinned memory are the same for the GPU: unified addressing.
        word_device=word.data_ptr(),
        ids=_words(ids),
        ids_device=there.data_ptr(),
        errors=errors.data_ptr(),
        activate=activate,
        keep=(word, ids, errors, there, stream),
        patience=1.0,
    )


def gate_of(event: object | None) -> Gate | None:
    """The gate of an op whose pages may be read after ``event``; None if only Python can query that."""
    if event is None:
        return NO_GATE
    if isinstance(event, RecordedEvent):
        return Gate(event.handle, event.stream, event.number)
    if isinstance(event, torch.cuda.Event):
        return Gate(int(event.cuda_event), -1, 0)
    return None


def _words(tensor: torch.Tensor) -> Int64Array:
    array: Int64Array = tensor.numpy()
    return array
