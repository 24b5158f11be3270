"""The plain verbs but those that send pages: see `torchkv.group.plain`."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard
from weakref import ref

import numpy as np

from torchkv.engine.source_pages import SourcePages
from torchkv.engine.work import KVWork
from torchkv.errors import ProtocolError
from torchkv.group import arguments
from torchkv.group.arguments import HeldLayers, Layers, Pages, Peers, StateSlot
from torchkv.group.plain.sending import PlainSending
from torchkv.group.plain.targets import trace
from torchkv.protocol.actions import SendOp
from torchkv.protocol.messages import MAX_COUNT

if TYPE_CHECKING:
    from torchkv.engine.engine import Engine
    from torchkv.engine.layer_wait import LayerWait
    from torchkv.protocol.receiving.request import ReceiverRequest
    from torchkv.protocol.sending.request import SenderRequest

__all__ = ["PlainVerbs", "layer_wait"]


class PlainVerbs(PlainSending):
    """See the module, and `Verbs`."""

    def _work(self, operation: str, *, verdict: bool = False) -> KVWork:
        """verdict: whether the end of the request completes it."""
        work = KVWork(operation, self._sync_words, self._loop)
        work._verdict = verdict
        return work

    def _receives(self, work: KVWork, req: ReceiverRequest) -> None:
        """The work is that of this request."""
        work._receives = (req,)
        work._pages_safe = lambda: req.ended
        work._layer = partial(layer_wait, ref(self.engine), req)

    def _recv_plain(
        self, request: str, pages: Pages, src: Peers, prefix_tokens: int, state_slot: StateSlot
    ) -> KVWork | None:
        engine = self.engine
        if type(request) is not str or type(prefix_tokens) is not int or not 0 <= prefix_tokens < MAX_COUNT:
            return None
        if type(src) is int:
            ranks: tuple[int, ...] = (src,)
        elif not (ranks := engine.group_map.instances.get(src, ()) if isinstance(src, str) else ()):
            return None
        if self._layout is None or engine.flows is None or trace.isEnabledFor(logging.DEBUG):
            return None
        if (state_slot is not None or self._stateful) and not self._is_slot(state_slot):
            return None
        engine.flows.core.rouse()  # to wake it takes as long as this verb
        if (copyable := arguments.copyable_pages(pages)) is None:
            return None
        given, ids = copyable
        work = KVWork(f"recv_pages({request!r})", self._sync_words, self._loop, 1)
        work._verdict = True
        with engine.lock, engine.receiver.leases.guard:
            if engine.closed or engine.lost:
                return None
            now = self.clock()
            post = partial(
                engine.receiver.posts.post_plain, request, given, ids, ranks, prefix_tokens, state_slot, work, now
            )
            # What the loop has ended is looked at once the grant is on its way, unless the pages are free only then.
            if (req := post()) is None and engine.flows.notices.has_news:
                engine.catch_up(leave_grants=True)
                req = post()
            frames = engine.exchange.take_grants(now)
            engine.catch_up(leave_grants=True)
            wake = engine.exchange.has_actions
        if frames:
            engine.send_now(frames)
        if wake:
            self._wake()
        if req is None:
            return None
        self._receives(work, req)
        return work

    def _is_slot(self, state_slot: StateSlot) -> TypeGuard[int]:
        """Whether that is a slot of this rank's states, in a layout without layer groups."""
        return self._stateful and type(state_slot) is int and 0 <= state_slot < self._num_slots

    def _send_states_plain(
        self, request: str, layers: Layers, state_slot: StateSlot, dst: Peers | None, event: Any
    ) -> KVWork | None:
        held = self._plain_layers.get(layers) if type(layers) is int else layers if type(layers) is HeldLayers else None
        if type(request) is not str or held is None or not self._is_slot(state_slot):
            return None
        keys = [(request, rank) for rank in self._targets(request, dst)]
        return self._send_states_to(request, keys, held, state_slot, event)

    def _send_states_to(
        self, request: str, keys: list[tuple[str, int]], layers: tuple[int, ...], slot: int, event: Any
    ) -> KVWork | None:
        """Sends states to these requests of the protocol, which are one ``request`` to its caller."""
        reqs = self._begun(keys)
        if reqs is None or (source := self._states_of(slot, event)) is None:
            return None
        work = KVWork(f"send_state({request!r})", self._sync_words, self._loop, len(reqs))
        ops = [SendOp.of_states(req.request, req.dst, layers, work, source) for req in reqs]
        with self.engine.lock:
            return work if self._start_all(reqs, ops) else None

    def _begun(self, keys: list[tuple[str, int]]) -> list[SenderRequest] | None:
        """The requests of these names and receivers; None if one has not begun, or nothing is plain."""
        engine = self.engine
        if engine.flows is None or not keys or engine.lost or trace.isEnabledFor(logging.DEBUG):
            return None
        reqs = []
        for key in keys:
            if (req := engine.sender.requests.by_key.get(key)) is None:
                return None
            reqs.append(req)
        return reqs

    def _states_of(self, slot: int, event: Any) -> SourcePages | None:
        """The slot as the source of its states; None if that is not plain."""
        gpu = self.engine.gpu
        if self.forced_path is not None:
            return None
        if event is None and gpu is not None and (event := gpu.try_gate()) is False:
            return None
        return SourcePages(np.array((slot,), dtype=np.int64), event, None)

    def _finish_plain(self, request: str, dst: Peers | None, aux: bytes, state_slot: StateSlot) -> KVWork | None:
        if type(request) is not str or not (state_slot is None or self._is_slot(state_slot)):
            return None
        keys = [(request, rank) for rank in self._targets(request, dst)]
        return self._finish_all(request, keys, aux, {} if state_slot is None else {request: state_slot})

    def _finish_all(
        self, request: str, keys: list[tuple[str, int]], aux: bytes, slots: dict[str, int]
    ) -> KVWork | None:
        """Finishes these requests of the protocol, which are one ``request`` to its caller.

        keys: their names and receivers. slots: by name, of those whose states are sent that have not been.
        """
        engine, sender = self.engine, self.engine.sender
        if type(aux) is not bytes or (reqs := self._begun(keys)) is None:
            return None
        sources: dict[str, SourcePages] = {}
        for name, slot in slots.items():
            if (source := self._states_of(slot, None)) is None:
                return None
            sources[name] = source
        work = KVWork(f"finish({request!r})", self._sync_words, self._loop, len(reqs))
        work._verdict, work._sends = True, reqs
        with engine.lock:
            owing, ops = [], []
            for req in reqs:
                left = sender.state_left(req.request, req.dst) if req.request in sources else ()
                if not sender.may_finish_whole(req, aux, left):
                    return None
                if left:
                    owing.append(req)
                    ops.append(SendOp.of_states(req.request, req.dst, left, work, sources[req.request]))
            if ops:
                work._expect(len(reqs) + len(ops))
                if not self._start_all(owing, ops):
                    return None
            now = self.clock()
            for req in reqs:
                sender.finish_whole(req, aux, work, now)
        return work


def layer_wait(engine: ref[Engine], req: ReceiverRequest, layer: int) -> LayerWait:
    """A work keeps this function, and must not keep the group alive. Raises ``ProtocolError`` once it is destroyed."""
    alive = engine()
    if alive is None:
        raise ProtocolError(f"request {req.request!r}, layer {layer!r}: the group was destroyed")
    return alive.layer_wait(req, layer)
