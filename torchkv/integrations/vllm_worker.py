"""The worker's side of the vLLM connector: one rank's pages, sent and received over torchkv. Needs no vLLM.

Nothing here raises because of a peer: what goes wrong with a request ends that request, and is reported to vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torchkv
from torchkv.errors import KVError, LayoutMismatch, ProtocolError, TransferCancelled
from torchkv.integrations.vllm_messages import Pages, Receive, Remote, Send, Step

if TYPE_CHECKING:
    import torch.distributed as dist

    from torchkv.engine.work import KVWork
    from torchkv.group.join import KVMember
    from torchkv.layout.layout import KVLayout

__all__ = ["Results", "WorkerSide", "join"]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Results:
    """vLLM's names of requests whose blocks are free of torchkv now. failed: of those received; with their blocks."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: dict[str, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class _Sending:
    """A request that is being sent. pages: not sent yet, from position ``start`` on."""

    request: str
    name: str
    start: int = 0
    pages: Pages = field(default_factory=list)
    slots: dict[str, int] = field(default_factory=dict)  # of states, by layer group
    last: bool = False  # whether ``pages`` are the prompt's last ones
    begun: bool = False  # whether torchkv knows of it
    live: bool = False  # whether somebody has granted it
    failed: bool = False
    finish: KVWork | None = None
    cancel: KVWork | None = None
    done: bool = False  # whether its pages may be overwritten


@dataclass(slots=True)
class _Receiving:
    """A request that is being received: first its remote is connected to, then its pages are granted."""

    order: Receive
    connecting: Future[str] | None = None
    work: KVWork | None = None
    error: Exception | None = None  # before anything was granted


class WorkerSide:
    """One rank of the engine. All methods are called on the engine's own thread.

    kv: this rank, joined with the cache of ``layout``. by_layer: whether pages leave layer by layer, as they are
    computed. layers: the global layer id of each of vLLM's layer names.
    """

    def __init__(self, kv: KVMember, layout: KVLayout, *, layers: Mapping[str, int], by_layer: bool) -> None:
        self.kv = kv
        self._layout = layout
        self._layers = layers
        self._by_layer = by_layer
        self._sending: dict[str, _Sending] = {}
        self._named: dict[str, list[_Sending]] = {}  # by name of the transfer; the first one has it, others wait
        self._receiving: dict[str, _Receiving] = {}
        self._ended: set[str] = set()  # requests that vLLM has finished with, and whose pages torchkv still reads
        self._now: list[tuple[_Sending, Send]] = []  # what this step sends by layer
        self._sent_layers: set[int] = set()

    # ------------------------------------------------------------------ one step, in this order

    def before_blocks_change(self, step: Step) -> None:
        """Ends what the engine has ended. On return no page of a preempted request is read any more, or its transfer
        has failed, so that what is read does not matter.
        """
        for request in step.withdrawals:
            if (sending := self._sending.get(request)) is not None:
                self._withdraw(sending)
        for request in step.cancels:
            self._cancel(request)
        for name in step.declines:
            if name not in self._named:
                self.kv.cancel(name, decline=True)
        self._now, self._sent_layers = [], set()
        for send in step.sends:
            self._take(send)

    def save_layer(self, name: str) -> None:
        """A layer of this step's chunks has been enqueued on the current stream."""
        if not self._now:
            return
        layer = self._layers[name]
        for sending, send in self._now:
            self._send(sending, send.pages, send.start, layer)
        self._sent_layers.add(layer)

    def load(self, step: Step) -> None:
        """Begins to receive."""
        for order in step.receives:
            receiving = self._receiving[order.request] = _Receiving(order)
            if order.remote is None:
                receiving.error = ProtocolError(order.problem)
            else:
                self._connect(receiving, order.remote)
        for refusal in step.refusals:
            self._refuse(refusal.remote)

    def end_step(self) -> None:
        """All layers of this step have been enqueued: sends what has not been sent yet."""
        missing = [layer for layer in self._layout.layers if layer not in self._sent_layers]
        for sending, send in self._now:
            if missing:
                self._send(sending, send.pages, send.start, missing)
            sending.start, sending.pages = send.start + len(send.pages), []
        self._now = []
        self._advance_all()

    def results(self, finished: set[str]) -> Results:
        """What has ended since the last call. finished: requests that vLLM has finished with."""
        self._ended |= finished & self._sending.keys()
        found = Results()
        self._advance_all()
        for request in list(self._ended):
            if self._sending[request].done:
                self._ended.discard(request)
                del self._sending[request]
                found.sent.add(request)
        for request, receiving in list(self._receiving.items()):
            if self._advance_receiving(receiving):
                del self._receiving[request]
                found.received.add(request)
                if (error := _error(receiving)) is not None:
                    log.warning("request %s was not received: %s: %s", request, type(error).__name__, error)
                    found.failed[request] = receiving.order.blocks()
        return found

    def close(self) -> None:
        self.kv.close()

    # ------------------------------------------------------------------ sending

    def _take(self, send: Send) -> None:
        """Notes the pages of a chunk. They leave by layer if somebody has granted them, else together."""
        sending = self._sending.get(send.request)
        if sending is None:
            sending = self._sending[send.request] = _Sending(send.request, send.name)
            self._named.setdefault(send.name, []).append(sending)
        if sending.failed or sending.finish is not None:
            return
        sending.last = send.last
        if isinstance(send.pages, dict):  # of several layer groups: the whole prompt at once
            sending.start, sending.pages, sending.slots = send.start, send.pages, send.slots
            return
        if not sending.pages:
            sending.start = send.start
        assert isinstance(sending.pages, list)
        assert send.start == sending.start + len(sending.pages)
        if self._by_layer and self._is_live(sending) and not sending.pages:
            self._now.append((sending, send))
        sending.pages += send.pages

    def _is_live(self, sending: _Sending) -> bool:
        """Whether its receiver is known, which begins the transfer. Until then its pages are only noted: a verb for
        each layer of each chunk would wait in vain.
        """
        if sending.live or sending.failed or self._named[sending.name][0] is not sending:
            return sending.live
        sending.begun = True
        try:
            sending.live = self.kv.granted(sending.name, None) is not None
        except LayoutMismatch:
            sending.live = True  # this rank holds nothing for the receiver, and finishes with nothing
        except KVError as error:
            self._fail(sending, error)
        return sending.live

    def _send(self, sending: _Sending, pages: Pages, start: int, layers: int | list[int] | None) -> None:
        if sending.failed or not pages:
            return
        sending.begun = True
        try:
            self.kv.send_pages(sending.name, pages, None, layers=layers, start=start, origin="prompt")
        except KVError as error:
            self._fail(sending, error)

    def _advance_all(self) -> None:
        for waiting in list(self._named.values()):
            while waiting:  # the next one of a name begins as soon as the first has ended
                first = waiting[0]
                self._advance_sending(first)
                if not first.done:
                    break

    def _advance_sending(self, sending: _Sending) -> None:
        if not sending.failed and sending.finish is None and (sending.last or self._is_live(sending)):
            self._send(sending, sending.pages, sending.start, None)
            sending.start, sending.pages = sending.start + len(sending.pages), []
            if sending.last:
                self._finish(sending)
        finish = sending.finish
        if finish is not None and not sending.failed and finish.is_completed():
            if (error := finish.exception()) is not None:
                self._fail(sending, error)
            else:
                self._end(sending)
        if sending.cancel is not None and sending.cancel.is_completed():
            self._end(sending)

    def _finish(self, sending: _Sending) -> None:
        if sending.failed:
            return
        sending.begun = True
        try:
            sending.finish = self.kv.finish(sending.name, None, state_slot=sending.slots or None)
        except KVError as error:
            self._fail(sending, error)

    def _fail(self, sending: _Sending, error: KVError) -> None:
        level = logging.INFO if isinstance(error, TransferCancelled) else logging.WARNING
        log.log(level, "request %s was not sent: %s: %s", sending.request, type(error).__name__, error)
        self._stop(sending)

    def _stop(self, sending: _Sending) -> None:
        """Ends the transfer, which lasts until nothing reads the pages any more."""
        sending.failed, sending.pages = True, []
        if sending.done or sending.cancel is not None:
            return
        if self._named[sending.name][0] is sending:
            sending.cancel = self.kv.cancel(sending.name, decline=not sending.begun)
        else:  # another request has the name, so nothing of this one was sent
            self._end(sending)

    def _end(self, sending: _Sending) -> None:
        if sending.done:
            return
        sending.done = True
        waiting = self._named[sending.name]
        waiting.remove(sending)
        if not waiting:
            del self._named[sending.name]

    def _withdraw(self, sending: _Sending) -> None:
        if sending.finish is not None and not sending.done:
            # All of it was sent, and its receiver has not said that it is there.
            self._advance_sending(sending)
            if not sending.done:
                self._fail(sending, TransferCancelled("its blocks are taken away while they may still be read"))
            return
        if sending.failed or sending.done:
            return
        sending.pages, sending.start, sending.last = [], 0, False
        if self._named[sending.name][0] is not sending:
            return
        try:
            self.kv.withdraw(sending.name).wait()
        except KVError as error:
            self._fail(sending, error)

    def _cancel(self, request: str) -> None:
        if (sending := self._sending.get(request)) is not None:
            self._stop(sending)
        receiving = self._receiving.get(request)
        if receiving is None or receiving.error is not None:
            return
        remote = receiving.order.remote
        assert remote is not None
        if receiving.work is not None:
            self.kv.cancel(remote.name)
        else:
            receiving.error = TransferCancelled(f"request {request} was aborted before it was granted")
            self._refuse(remote)

    # ------------------------------------------------------------------ receiving

    def _meet(self, remote: Remote) -> Future[str]:
        for name, peer in self.kv.peers().items():
            if peer.here and peer.address == remote.address:
                known: Future[str] = Future()
                known.set_result(name)
                return known
        return self.kv.connect(remote.address)

    def _connect(self, receiving: _Receiving, remote: Remote) -> None:
        try:
            receiving.connecting = self._meet(remote)
        except KVError as error:
            receiving.error = error
            return
        self._grant(receiving)

    def _grant(self, receiving: _Receiving) -> None:
        """Grants the pages, once it is known who sends them."""
        connecting, order = receiving.connecting, receiving.order
        if receiving.error is not None or receiving.work is not None or connecting is None or not connecting.done():
            return
        assert order.remote is not None
        try:
            instance = _checked(connecting.result(), order.remote)
            receiving.work = self.kv.recv_pages(
                order.remote.name,
                order.pages,
                instance,
                prefix_tokens=order.prefix_tokens,
                state_slot=order.slots or None,
            )
        except KVError as error:
            receiving.error = error

    def _advance_receiving(self, receiving: _Receiving) -> bool:
        """Whether the receive has ended, and nothing can be written to its pages any more."""
        self._grant(receiving)
        if receiving.error is not None:
            return True
        if receiving.work is None or not receiving.work.is_completed():
            return False
        error = receiving.work.exception()
        return error is None or error.pages_safe

    def _refuse(self, remote: Remote) -> None:
        """Tells who prefills the request that nobody here wants it, as soon as that one is met."""

        def refuse(connecting: Future[str]) -> None:
            try:
                self.kv.refuse(remote.name, _checked(connecting.result(), remote))
            except KVError as error:
                log.warning("transfer %s was not refused: %s: %s", remote.name, type(error).__name__, error)

        try:
            self._meet(remote).add_done_callback(refuse)
        except KVError as error:
            log.warning("transfer %s was not refused: %s: %s", remote.name, type(error).__name__, error)


def _checked(instance: str, remote: Remote) -> str:
    if remote.instance is not None and instance != remote.instance:
        raise ProtocolError(
            f"at {remote.address}, where {remote.instance!r} should have prefilled {remote.name!r}, there is "
            f"{instance!r} now; send the request to prefill again"
        )
    return instance


def _error(receiving: _Receiving) -> Exception | None:
    if receiving.error is not None or receiving.work is None:
        return receiving.error
    return receiving.work.exception()


def join(
    cache: torchkv.KVCache, instance: str, group: dist.ProcessGroup | None, options: Mapping[str, Any]
) -> KVMember:
    """This rank as one of ``instance``. options: fields of `torchkv.Options`."""
    return torchkv.join(cache, instance, group=group, options=torchkv.Options(**options))
