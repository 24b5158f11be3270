"""One rank of an engine whose scheduler tells it, step by step, what to send and to receive. Any engine's.

Nothing here raises because of a peer: what goes wrong with a request ends that request, and is reported.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.errors import ProtocolError, TransferCancelled
from torchkv.integrations.arrivals import Arrival
from torchkv.integrations.departures import Departure, Departures
from torchkv.integrations.layer_groups import PageLists
from torchkv.integrations.steps import Receive, Remote, Send, Step

if TYPE_CHECKING:
    from torchkv.group.join import KVMember
    from torchkv.layout.layout import KVLayout

__all__ = ["Results", "WorkerSide"]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Results:
    """Requests whose blocks torchkv does not touch any more. failed: of those received; with their blocks."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: dict[str, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class _Sending:
    """A request that is being sent. pages: computed and not sent yet, from position ``start`` on. slots: of states, by
    layer group. last: whether ``pages`` are the prompt's last ones.
    """

    departure: Departure
    start: int = 0
    pages: PageLists = field(default_factory=list)
    slots: dict[str, int] = field(default_factory=dict)
    last: bool = False


class WorkerSide:
    """One rank of the engine. All methods are called on the engine's own thread.

    kv: this rank, joined with the cache of ``layout``. by_layer: whether pages leave layer by layer, as they are
    computed. layers: the global layer id of each of the engine's layer names.
    """

    def __init__(self, kv: KVMember, layout: KVLayout, *, layers: Mapping[str, int], by_layer: bool) -> None:
        self.kv = kv
        self._layout = layout
        self._layers = layers
        self._by_layer = by_layer
        self._departures = Departures(kv)
        self._sending: dict[str, _Sending] = {}
        self._receiving: dict[str, tuple[Receive, Arrival]] = {}
        self._ended: set[str] = set()  # requests that the engine has finished with, and whose pages torchkv still reads
        # What this step sends by layer, and its page ids: as an array, which no layer's verb need make of a list again.
        self._now: list[tuple[_Sending, Send, Int64Array]] = []
        self._sent_layers: set[int] = set()

    # ------------------------------------------------------------------ one step, in this order

    def before_blocks_change(self, step: Step) -> None:
        """Ends what the engine has ended. On return no page of a preempted request is read any more, or its transfer
        has failed, so that what is read does not matter.
        """
        for request in step.withdrawals:
            if (sending := self._sending.get(request)) is not None:
                sending.departure.withdraw()
                sending.pages, sending.start, sending.last = [], 0, False
        for request in step.cancels:
            if (sending := self._sending.get(request)) is not None:
                sending.departure.fail(TransferCancelled("it was aborted where it is prefilled"))
            if request in self._receiving:
                self._receiving[request][1].cancel()
        for name in step.declines:
            self._departures.decline(name)
        self._now, self._sent_layers = [], set()
        for send in step.sends:
            self._take(send)

    def save_layer(self, name: str) -> None:
        """A layer of this step's chunks has been enqueued on the current stream."""
        if not self._now:
            return
        layer = self._layers[name]
        for sending, send, pages in self._now:
            sending.departure.send(pages, start=send.start, layers=layer, origin="prompt")
        self._sent_layers.add(layer)

    def load(self, step: Step) -> None:
        """Begins to receive."""
        for order in step.receives:
            if order.remote is None:
                arrival = Arrival.failed(self.kv, order.request, ProtocolError(order.problem))
            else:
                arrival = self._arrival(order.remote)
            self._receiving[order.request] = order, arrival
            self._grant(order, arrival)
        for remote in step.refusals:
            self._arrival(remote).cancel()

    def end_step(self) -> None:
        """All layers of this step have been enqueued: sends what has not been sent yet."""
        missing = [layer for layer in self._layout.layers if layer not in self._sent_layers]
        for sending, send, pages in self._now:
            if missing:
                sending.departure.send(pages, start=send.start, layers=missing, origin="prompt")
            sending.start, sending.pages = send.start + len(send.pages), []
        self._now = []
        self._advance()

    def results(self, finished: set[str]) -> Results:
        """What has ended since the last call. finished: requests that the engine has finished with."""
        self._ended |= finished & self._sending.keys()
        found = Results()
        self._advance()
        for request in list(self._ended):
            if self._sending[request].departure.is_over:
                self._ended.discard(request)
                del self._sending[request]
                found.sent.add(request)
        for request, (order, arrival) in list(self._receiving.items()):
            self._grant(order, arrival)
            if arrival.is_over:
                del self._receiving[request]
                found.received.add(request)
                if (error := arrival.error) is not None:
                    log.warning("request %s was not received: %s: %s", request, type(error).__name__, error)
                    found.failed[request] = order.blocks()
        return found

    # ------------------------------------------------------------------ inside

    def _take(self, send: Send) -> None:
        """Notes the pages of a chunk. They leave by layer if somebody has granted them, else together."""
        sending = self._sending.get(send.request)
        if sending is None:
            sending = self._sending[send.request] = _Sending(Departure(self._departures, send.name))
        departure = sending.departure
        departure.has_name()  # or it waits for the one of its name that came before
        if departure.error is not None or departure.sealed is not None:
            return
        sending.last = send.last
        if isinstance(send.pages, dict):  # of several layer groups: the whole prompt at once
            sending.start, sending.pages, sending.slots = send.start, send.pages, send.slots
            return
        if not sending.pages:
            sending.start = send.start
        assert isinstance(sending.pages, list)
        assert send.start == sending.start + len(sending.pages)
        if self._by_layer and not sending.pages and departure.granted() is not None:
            self._now.append((sending, send, np.array(send.pages, dtype=np.int64)))
        sending.pages += send.pages

    def _advance(self) -> None:
        """Sends what waits, and notes what has ended. Of one name the next one begins as soon as the first has ended.

        Pages that nobody has granted are only noted: a verb for each layer of each chunk would wait in vain.
        """
        for sending in self._sending.values():
            departure = sending.departure
            if departure.error is None and departure.sealed is None and departure.has_name():
                if sending.last or departure.granted() is not None:
                    departure.send(sending.pages, start=sending.start, origin="prompt")
                    sending.start, sending.pages = sending.start + len(sending.pages), []
                if sending.last:
                    departure.finish(state_slot=sending.slots or None)
            departure.advance()

    def _arrival(self, remote: Remote) -> Arrival:
        return Arrival.at(self.kv, remote.name, remote.address, instance=remote.instance)

    def _grant(self, order: Receive, arrival: Arrival) -> None:
        """Grants the pages, once it is known who sends them."""
        if arrival.is_connected():
            arrival.grant(order.pages, prefix_tokens=order.prefix_tokens, state_slot=order.slots or None)
