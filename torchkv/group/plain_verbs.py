"""The verbs as nearly all calls are, each in one piece: the critical path of a caller.

A call is *plain* if its arguments have their plain types, and name one peer, and the resident loop serves the request,
behind no prefix and without state; a sender's also needs that its grant is there. Everything else, and whatever is
wrong, is left to `Verbs` before anything has changed: it says what is wrong, or does it the general way, with the same
outcome.

A call costs its caller by how much code and memory it touches, which most often is in no near cache, because callers
compute between two calls. So nothing is asked twice here, and a function is called only for what it does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from weakref import ref

from torchkv.arrays import Int64Array
from torchkv.cache import KVCache
from torchkv.engine.resident.plain_sends import Call
from torchkv.engine.scheduler import SourcePages
from torchkv.engine.work import KVWork, LoopProgress
from torchkv.errors import ProtocolError
from torchkv.group import arguments
from torchkv.group.arguments import Layers, Pages, Peers, StateSlot
from torchkv.group.recorded_verbs import RecordedVerbs
from torchkv.host.page_id_check import copy_ids
from torchkv.protocol.actions import SendOp

if TYPE_CHECKING:
    from torchkv.engine.engine import Engine
    from torchkv.engine.layer_wait import LayerWait
    from torchkv.protocol.receiving.request import ReceiverRequest

__all__ = ["PlainVerbs", "layer_wait"]

trace = logging.getLogger("torchkv.request")  # see `KVProcessGroup`


class PlainVerbs(RecordedVerbs):
    """See the module, and `Verbs`."""

    def __init__(
        self,
        engine: Engine,
        cache: KVCache | None,
        *,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(engine)
        self.cache = cache
        self.forced_path = engine.options.forced_path
        self._layout = None if cache is None else cache.layout
        layers = () if cache is None else cache.layout.layers
        self._plain_layers: dict[int | None, tuple[int, ...]] = {None: layers, **{layer: (layer,) for layer in layers}}
        self._wake = wake
        self._sync_words = None if engine.gpu is None else engine.gpu.sync_words
        self.clock = clock
        # For works that the resident loop completes.
        self._loop: ref[LoopProgress] | None = None if engine.flows is None else ref[LoopProgress](engine)

    def _work(self, operation: str, *, verdict: bool = False) -> KVWork:
        """verdict: whether the end of the request completes it."""
        work = KVWork(operation, sync_words=self._sync_words, loop=self._loop)
        work._verdict = verdict
        return work

    def _receives(self, work: KVWork, req: ReceiverRequest) -> None:
        """The work is that of this request."""
        work._pages_safe = lambda: req.ended
        work._layer = partial(layer_wait, ref(self.engine), req)

    def _recv_plain(self, request: str, pages: Pages, src: Peers, prefix_tokens: int) -> KVWork | None:
        engine, layout = self.engine, self._layout
        if type(request) is not str or type(src) is not int or type(prefix_tokens) is not int or prefix_tokens:
            return None
        if layout is None or layout.stateful or engine.flows is None or trace.isEnabledFor(logging.DEBUG):
            return None
        if (copyable := arguments.copyable_pages(pages)) is None:
            return None
        given, ids = copyable
        work = KVWork(f"recv_pages({request!r})", sync_words=self._sync_words, loop=self._loop, parts=1)
        work._verdict = True
        with engine.lock, engine.receiver.leases.guard:
            if engine.closed or engine.lost:
                return None
            engine.catch_up()
            req = engine.receiver.post_plain(request, given, ids, src, work, self.clock())
            wake = engine.has_actions
        if wake:
            self._wake()
        if req is None:
            return None
        self._receives(work, req)
        return work

    def _send_plain(
        self, verb: str, request: str, layers: Layers, pages: Pages, dst: Peers | None, start: int, event: Any
    ) -> KVWork | None:
        engine, flows = self.engine, self.engine.flows
        held = self._plain_layers.get(layers) if type(layers) is int or layers is None else None
        if type(request) is not str or type(dst) is not int or type(start) is not int or start < 0:
            return None
        if flows is None or held is None or trace.isEnabledFor(logging.DEBUG):
            return None
        if verb == "send_layer" and (dst,) not in engine.whole_pages:
            return None
        req = engine.sender.requests.by_key.get((request, dst))
        if req is None and flows.plain.has_served(dst):
            flows.core.rouse()  # to wake it takes as long as this verb
        if (copyable := arguments.copyable_pages(pages)) is None:
            return None
        given, ids = copyable
        if event is None and engine.gpu is not None and (event := engine.gpu.try_record_gate()) is None:
            return None
        call = verb, request, held, ids, dst, start, event
        if req is None:
            return self._begin(call, given)
        op = self._op(*call)
        with engine.lock:
            if req.grant is None:
                engine.catch_up()  # the loop may have bound it
            if not flows.plain.start_more(req, op, given):
                return None
            req.add_sent(op)
        return cast(KVWork, op.work)

    def _op(
        self, verb: str, request: str, layers: tuple[int, ...], ids: Int64Array, dst: int, start: int, event: Any
    ) -> SendOp:
        work = KVWork(f"{verb}({request!r})", sync_words=self._sync_words, loop=self._loop, parts=1)
        op = SendOp(request, dst, {}, layers, start, len(ids), work, SourcePages(ids, event, self.forced_path))
        op.verb = verb
        return op

    def _begin(self, call: Call, given: Int64Array) -> KVWork | None:
        """Begins a request whose grant has come with its first op. None, and nothing is done, if that is not plain.

        given: the op's page ids as the caller gave them, which are checked as they are copied.
        """
        _, request, _, _, dst, _, _ = call
        engine, flows = self.engine, self.engine.flows
        if flows is None or self.forced_path is not None:
            return None
        if not flows.plain.has_served(dst) and not engine.group_map.is_target(dst):
            return None
        grants, now, began = engine.sender.grants, self.clock(), time.perf_counter()
        with engine.lock:
            if engine.closed or engine.lost:
                return None
            if grants.awaits(request, dst) and (met := flows.plain.meet(call, given, now)) is not None:
                # From here on the loop is at work; all that follows is for Python's own records.
                grant, flow, index, route = met
                op = self._op(*call)
                op.work._began = began
                req = grants.begin(grant, now)
                flows.plain.met(req, op, flow, index, route)
                req.add_sent(op)
                return cast(KVWork, op.work)
            engine.catch_up()
            wake = engine.has_actions
            work = self._bind(call, given, now)
        if wake:
            self._wake()
        return work

    def _bind(self, call: Call, given: Int64Array, now: float) -> KVWork | None:
        """As `_begin`, of a grant that Python knows. Under the lock."""
        _, request, _, ids, dst, _, _ = call
        engine, flows = self.engine, self.engine.flows
        assert flows is not None
        grant = engine.sender.grants.waiting(request, dst)
        if grant is None or not copy_ids(given, ids, engine.group_map.me.num_pages):
            return None
        op = self._op(*call)
        if (way := flows.plain.way(grant, op)) is None:
            return None
        req = engine.sender.grants.begin(grant, now)
        flows.plain.begin(req, op, way)
        req.add_sent(op)
        return cast(KVWork, op.work)

    def _finish_plain(self, request: str, dst: Peers | None, aux: bytes, state_slot: StateSlot) -> KVWork | None:
        engine, flows = self.engine, self.engine.flows
        if type(request) is not str or type(dst) is not int or type(aux) is not bytes or state_slot is not None:
            return None
        req = engine.sender.requests.by_key.get((request, dst))
        if flows is None or req is None or engine.lost or trace.isEnabledFor(logging.DEBUG):
            return None
        work = KVWork(f"finish({request!r})", sync_words=self._sync_words, loop=self._loop, parts=1)
        work._verdict = True
        with engine.lock:
            if not engine.sender.finish_whole(req, aux, work, self.clock()):
                return None
        return work


def layer_wait(engine: ref[Engine], req: ReceiverRequest, layer: int) -> LayerWait:
    """A work keeps this function, and must not keep the group alive. Raises ``ProtocolError`` once it is destroyed."""
    alive = engine()
    if alive is None:
        raise ProtocolError(f"request {req.request!r}, layer {layer!r}: the group was destroyed")
    return alive.layer_wait(req, layer)
