"""Gates: the events that a transfer waits for before it reads a layer's pages, with and without CUDA graphs.

Without a graph the gate is an event recorded on the caller's stream (`record_gate`).

An event captured in a CUDA graph cannot be a gate, because it refers to whichever replay was launched last. Queried
before a replay is launched, it says "done" on behalf of the replay before, and the old bytes are sent. Queried after
the next replay is launched, it waits for that one, which overwrites the pages. `GraphGate` counts replays instead.
"""

from __future__ import annotations

import threading

import numpy as np
import torch

from torchkv.arrays import Int64Array
from torchkv.cuda.driver import context, device_index
from torchkv.cuda.events import RecordedEvent, event_pool, is_capturing
from torchkv.errors import ProtocolError

__all__ = ["Expectation", "GateEvent", "GraphGate", "current_device", "record_gate", "refuse_capture"]


def current_device() -> int:
    """Index of the calling thread's current GPU, without the checks of PyTorch's own function."""
    return int(torch._C._cuda_getDevice())


def refuse_capture(operation: str, index: int) -> None:
    """Raises ``ProtocolError`` while the thread's current stream is captured, on the current GPU or ``cuda:index``."""
    # Both GPUs: code that captures on the current one expects the call to be replayed, but it would run only once.
    # Nearly always it is ``cuda:index`` that is current; then one query is saved, a microsecond of the caller's.
    if torch.cuda.is_current_stream_capturing() or (current_device() != index and is_capturing(index)):
        raise ProtocolError(
            f"{operation}: this stream is being captured into a CUDA graph, and a transfer cannot be part of a graph: "
            "replays would skip its checks. Capture torchkv.GraphGate.mark(layer), and call this with an event of "
            "GraphGate.arm() before each replay"
        )


def record_gate(index: int, *, keep_gil: bool = True) -> RecordedEvent:
    """Records an event behind everything enqueued on the thread's current stream of ``cuda:index``, in a microsecond.

    Another GPU may be current. Call `refuse_capture` first. keep_gil: see `EventPool.record`.
    """
    return event_pool(index).record(keep_gil=keep_gil)


class Expectation:
    """Computes the count of each layer that the next ``arm()`` waits for. Makes no CUDA calls; callers hold the lock.

    A layer's count grows by one with each mark that the device executes. The n-th arm waits for the mark of the n-th
    step, so each arm waits for one more than the arm before. Steps that were not armed have grown the count further, or
    will: so an arm also waits for at least one more than has been counted, and than the host has enqueued eagerly.
    """

    def __init__(self, counts: Int64Array) -> None:
        """counts: int64 ``[num_layers]``, marks executed so far, written by the device."""
        self._counts = counts
        self._armed: Int64Array = np.zeros_like(counts)
        self._enqueued: Int64Array = np.zeros_like(counts)

    def marked(self, layer: int) -> None:
        """Counts a mark that the host enqueued eagerly, outside any graph."""
        self._enqueued[layer] += 1

    def arm(self) -> list[int]:
        """The count of each layer to wait for."""
        self._armed = np.maximum(np.maximum(self._armed, self._enqueued), self._counts) + 1
        counts: list[int] = self._armed.tolist()
        return counts


class GateEvent:
    """An ``event=`` for verbs: it has happened once the armed step has marked the layer."""

    __slots__ = ("_count", "_counts", "_layer")

    def __init__(self, counts: Int64Array, layer: int, count: int) -> None:
        self._counts = counts
        self._layer = layer
        self._count = count

    def query(self) -> bool:
        """Whether the step has executed the mark. One read of host memory; makes no driver call."""
        return bool(self._counts[self._layer] >= self._count)

    def __repr__(self) -> str:
        return f"GateEvent(layer={self._layer}, {self._counts[self._layer]} of {self._count})"


# Gates that were captured. A graph writes to its gate's counts at every replay and may outlive the gate, so they are
# kept for ever: some hundred bytes each.
_captured: dict[int, GraphGate] = {}


class GraphGate:
    """Tells transfers when a step that runs as a CUDA graph has finished a layer.

    Call ``mark(layer)`` after each layer, inside the capture (or eagerly). Call ``arm()`` before each replay: it
    returns the event of each layer, for ``event=`` of the verbs::

        gate = torchkv.GraphGate(num_layers)
        with torch.cuda.graph(graph):
            for i, block in enumerate(blocks):
                x = block(x)
                gate.mark(i)
        ...
        events = gate.arm()
        graph.replay()
        for i in range(num_layers):
            kv.send_layer(request, i, pages, dst, event=events[i])

    Arms and replays pair one to one, in order; several arms may be outstanding. Arm every replay, also one that sends
    nothing (drop its events). A replay that was not armed, such as a warm-up, is harmless if it has *finished* when
    ``arm()`` is called, which continues from the current count. A replay that still runs then would be taken for the
    armed one, so synchronise first. An arm without a replay makes all later events late, never early.

    Layers are numbered 0 .. num_layers - 1 and marked once per step, in any order. Raises ``ProtocolError`` for
    ``num_layers`` < 1 or during a capture, ``TransportUnavailable`` without a GPU. Thread-safe.
    """

    def __init__(self, num_layers: int, device: torch.device | str | None = None) -> None:
        """device: the CUDA device on which the layers run; default, the current one."""
        if not isinstance(num_layers, int) or isinstance(num_layers, bool) or num_layers < 1:
            raise ProtocolError(f"GraphGate: num_layers is {num_layers!r}; must be an int, 1 or more")
        self.num_layers = num_layers
        self.device = torch.device("cuda", device_index(torch.device("cuda" if device is None else device)))
        with context(self.device.index):
            refuse_capture("GraphGate()", self.device.index)
            self._device_counts, self._host_counts = _counters(num_layers, self.device)
        self._counts: Int64Array = self._host_counts.numpy()
        self._pairs = [(self._device_counts[i : i + 1], self._host_counts[i : i + 1]) for i in range(num_layers)]
        self._expectation = Expectation(self._counts)
        self._lock = threading.Lock()

    def mark(self, layer: int) -> None:
        """Enqueues on the device's current stream: adds one to the count of ``layer``.

        That is a kernel, and a copy of 8 bytes to pinned memory; both are captured if the stream is. Raises
        ``ProtocolError`` for a layer outside 0 .. num_layers - 1.
        """
        if not 0 <= layer < self.num_layers:
            raise ProtocolError(f"GraphGate.mark: layer {layer} is outside [0, {self.num_layers})")
        count, seen = self._pairs[layer]
        if torch.cuda.is_current_stream_capturing():
            _captured[id(self)] = self
        else:
            # Before it is enqueued: an arm in between must not take this mark for that of its own step.
            with self._lock:
                self._expectation.marked(layer)
        count.add_(1)
        seen.copy_(count, non_blocking=True)

    def arm(self) -> list[GateEvent]:
        """The events of the next step, one per layer. Call it once before each replay."""
        with self._lock:
            counts = self._expectation.arm()
        return [GateEvent(self._counts, layer, count) for layer, count in enumerate(counts)]


def _counters(num_layers: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts, int64 ``[num_layers]`` zeros: on the device, where marks add to them, and copies in pinned memory."""
    # Tensors made in inference mode could not be written to outside of it.
    with torch.inference_mode(False):
        on_device = torch.zeros(num_layers, dtype=torch.int64, device=device)
        pinned = torch.zeros(num_layers, dtype=torch.int64, pin_memory=True)
    # Marks may be enqueued on any stream, also one that is not ordered behind the zeros on the current stream.
    torch.cuda.current_stream(device).synchronize()
    return on_device, pinned
