"""What says that a layer's pages may leave: an event of the caller's stream, or, with CUDA graphs, a count.

An event in a captured graph is no gate. It tells of the newest replay that was launched, whichever that is: asked
before the launch, it says "done" of the replay before, whose bytes are then sent; asked after the launch of the next,
it waits for that one, which overwrites the pages. `GraphGate` counts instead.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import torch

from torchkv.cudadriver import context, device_index
from torchkv.errors import ProtocolError
from torchkv.events import RecordedEvent, event_pool, is_capturing

__all__ = ["Expectation", "GateEvent", "GraphGate", "record_gate", "refuse_capture"]

Int64Array = npt.NDArray[np.int64]


def current_device() -> int:
    """The calling thread's current GPU; without the checks of PyTorch's own function."""
    return int(torch._C._cuda_getDevice())


def refuse_capture(what: str, index: int) -> None:
    """Raises ``ProtocolError`` while the calling thread's current stream, or that of ``cuda:index``, is captured."""
    # Both: a call that runs once, beside a capture on another GPU, is not what whoever captures there expects.
    # They are one where that GPU is current, which is nearly always, and each question costs a caller's microsecond.
    if torch.cuda.is_current_stream_capturing() or (current_device() != index and is_capturing(index)):
        raise ProtocolError(
            f"{what}: this stream is being captured into a CUDA graph, and a transfer cannot be part of one: replays "
            "would skip its checks. Capture torchkv.GraphGate.mark(layer), and call this with an event of "
            "GraphGate.arm() before each replay"
        )


def record_gate(index: int, *, keep_gil: bool = True) -> RecordedEvent:
    """An event behind everything enqueued on the current stream of ``cuda:index``, whichever GPU is current.

    A microsecond, on the caller's thread. `refuse_capture` first. keep_gil: see `EventPool.record`.
    """
    return event_pool(index).record(keep_gil=keep_gil)


class Expectation:
    """Which count of each layer the next arm waits for. Knows no device; callers hold the lock.

    Every count grows by one with each mark that the device executes. The n-th arm waits for the n-th step's mark, so
    an arm's count is one above that of the arm before, except where steps went by without one: it is then also one
    above what has been counted, and above the marks that the host has enqueued itself.
    """

    def __init__(self, counts: Int64Array) -> None:
        """``counts``: int64 ``[num_layers]``, written by the device."""
        self._counts = counts
        self._armed: Int64Array = np.zeros_like(counts)
        self._enqueued: Int64Array = np.zeros_like(counts)

    def marked(self, layer: int) -> None:
        """The host has enqueued a mark itself, outside any graph."""
        self._enqueued[layer] += 1

    def arm(self) -> list[int]:
        """The next count of each layer."""
        self._armed = np.maximum(np.maximum(self._armed, self._enqueued), self._counts) + 1
        counts: list[int] = self._armed.tolist()
        return counts


class GateEvent:
    """Ready once a layer has been marked by the step that it was armed for: an object for ``event=``."""

    __slots__ = ("_count", "_counts", "_layer")

    def __init__(self, counts: Int64Array, layer: int, count: int) -> None:
        self._counts = counts
        self._layer = layer
        self._count = count

    def query(self) -> bool:
        """Whether the step has passed the mark. One read of host memory; never a driver call."""
        return bool(self._counts[self._layer] >= self._count)

    def __repr__(self) -> str:
        return f"GateEvent(layer={self._layer}, {self._counts[self._layer]} of {self._count})"


# Graphs write to a gate's counts at every replay, and may outlive the gate: what was captured stays. Some hundred
# bytes a gate.
_captured: dict[int, GraphGate] = {}


class GraphGate:
    """Tells transfers when a step that runs as a CUDA graph has finished a layer.

    ``mark(layer)`` behind the layer, inside the capture (or eagerly); before each replay ``arm()``, whose list holds
    for every layer the event for ``event=`` of the verbs::

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
    nothing (drop its events). Replays that were not armed, such as warm-ups, do no harm once they have *finished*:
    ``arm()`` begins at the count it finds. One that is still running at ``arm()`` would be taken for the armed one:
    synchronise first. An arm whose replay never came makes all later events late, never early.

    Layers are numbered 0 .. num_layers - 1, in whatever order the caller marks them, each once a step. Raises
    ``ProtocolError`` for ``num_layers`` < 1 or during a capture, ``TransportUnavailable`` without a GPU. Thread-safe.
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
        """Enqueues, on the current stream of the device, that everything before it is done for ``layer``.

        A kernel that adds one and a copy of 8 bytes to pinned memory, both captured where the stream is. Raises
        ``ProtocolError`` for a layer outside 0 .. num_layers - 1.
        """
        if not 0 <= layer < self.num_layers:
            raise ProtocolError(f"GraphGate.mark: layer {layer} is outside [0, {self.num_layers})")
        count, seen = self._pairs[layer]
        if torch.cuda.is_current_stream_capturing():
            _captured[id(self)] = self
        else:
            # Before it is enqueued: an arm in between must not take it for its own step's.
            with self._lock:
                self._expectation.marked(layer)
        count.add_(1)
        seen.copy_(count, non_blocking=True)

    def arm(self) -> list[GateEvent]:
        """Events for the next step, by layer. Call it before the replay, once for each."""
        with self._lock:
            counts = self._expectation.arm()
        return [GateEvent(self._counts, layer, count) for layer, count in enumerate(counts)]


def _counters(num_layers: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros int64 ``[num_layers]`` on the device, which every mark adds to, and in pinned memory, which it updates."""
    # Else tensors of a model's inference mode could not be written to outside of it.
    with torch.inference_mode(False):
        on_device = torch.zeros(num_layers, dtype=torch.int64, device=device)
        pinned = torch.zeros(num_layers, dtype=torch.int64, pin_memory=True)
    # Marks may come on any stream, also one that does not wait for the current one's zeros.
    torch.cuda.current_stream(device).synchronize()
    return on_device, pinned
