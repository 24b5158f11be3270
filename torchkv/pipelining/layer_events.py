"""Checks the events that replace hooks for layers inside a CUDA graph, where no hooks are called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from torchkv.errors import ProtocolError
from torchkv.group import arguments
from torchkv.layout.layout import KVLayout

__all__ = ["Events", "all_of", "layer_events"]

Events = Mapping[int, Any] | Sequence[Any]


def layer_events(layout: KVLayout, events: Events, operation: str) -> dict[int, Any]:
    """Global layer id -> event, in the order given.

    events: such a mapping, or a list with one event per layer of the target model (no draft layers) that this rank
    holds. Raises ``ProtocolError`` for other layers, and for events that would be ready before the graph is replayed.
    """
    if isinstance(events, Mapping):
        given = dict(events)
    else:
        held = [layer for layer in layout.layers if layer < layout.num_layers]
        if len(events) != len(held):
            raise ProtocolError(
                f"{operation}: events has {len(events)} entries, this rank holds {len(held)} layers; give one for each"
            )
        given = dict(zip(held, events, strict=True))
    for layer, event in given.items():
        if layer not in layout.layers:
            raise ProtocolError(f"{operation}: events names layer {layer!r}, which this rank does not hold")
        if event is None or isinstance(event, torch.cuda.Event):
            raise ProtocolError(
                f"{operation}: the event of layer {layer} is a {type(event).__name__}, which is ready before the graph "
                "is replayed; give those of torchkv.GraphGate.arm()"
            )
        arguments.as_event(event, operation=operation)
    return given


def all_of(events: Sequence[Any]) -> Any:
    """One event that is ready when all of ``events`` are."""
    return events[0] if len(events) == 1 else _AllOf(events)


class _AllOf:
    def __init__(self, events: Iterable[Any]) -> None:
        self._events = list(events)

    def query(self) -> bool:
        # The last one first: it probably becomes ready last.
        while self._events and self._events[-1].query():
            self._events.pop()
        return not self._events
