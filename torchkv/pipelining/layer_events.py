"""Events instead of hooks: what tells that a layer has run where it runs inside a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from torchkv import arguments
from torchkv.errors import ProtocolError
from torchkv.layout import KVLayout

__all__ = ["Events", "all_of", "layer_events"]

Events = Mapping[int, Any] | Sequence[Any]


def layer_events(layout: KVLayout, events: Events, what: str) -> dict[int, Any]:
    """Global layer id -> event, in the order given. ``events``: that, or one for each held layer of the target model.

    Raises ``ProtocolError`` for other layers, and for events that are ready before the step that they belong to.
    """
    if isinstance(events, Mapping):
        given = dict(events)
    else:
        held = [layer for layer in layout.layers if layer < layout.num_layers]
        if len(events) != len(held):
            raise ProtocolError(
                f"{what}: events has {len(events)} entries, this rank holds {len(held)} layers; give one for each"
            )
        given = dict(zip(held, events, strict=True))
    for layer, event in given.items():
        if layer not in layout.layers:
            raise ProtocolError(f"{what}: events names layer {layer!r}, which this rank does not hold")
        if event is None or isinstance(event, torch.cuda.Event):
            raise ProtocolError(
                f"{what}: the event of layer {layer} is a {type(event).__name__}, which is ready before the graph is "
                "replayed; give those of torchkv.GraphGate.arm()"
            )
        arguments.as_event(event, what=what)
    return given


def all_of(events: Sequence[Any]) -> Any:
    """One event that is ready when all of ``events`` are."""
    return events[0] if len(events) == 1 else _AllOf(events)


class _AllOf:
    def __init__(self, events: Iterable[Any]) -> None:
        self._events = list(events)

    def query(self) -> bool:
        # The last one first: it is likely to be the latest.
        while self._events and self._events[-1].query():
            self._events.pop()
        return not self._events
