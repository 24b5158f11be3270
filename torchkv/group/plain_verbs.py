"""The verbs as nearly all calls are, each in one piece: the critical path of a caller.

A call is *plain* if its arguments have their plain types, and name one peer, and the resident loop serves the request;
a sender's also needs that its grant is there. A peer is named by its rank, by its instance if no other rank of it has
part in the request, or, at a sender, by the grant of a request to anybody. Where these stand for several receivers, a
verb is plain that begins none of their requests, and so is one that sends states. Everything else, and whatever is
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
from typing import TYPE_CHECKING, Any, TypeGuard, cast
from weakref import ref

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.cache import KVCache
from torchkv.engine.resident.plain_sends import Call, Met
from torchkv.engine.scheduler import SourcePages
from torchkv.engine.work import KVWork, LoopProgress
from torchkv.errors import ProtocolError
from torchkv.group import arguments
from torchkv.group.arguments import HeldLayers, Layers, Pages, Peers, StateSlot
from torchkv.group.recorded_verbs import RecordedVerbs
from torchkv.host.page_id_check import copy_ids
from torchkv.protocol.actions import ANYBODY, BoundGrant, SendOp
from torchkv.protocol.messages import MAX_COUNT
from torchkv.protocol.sending.grant_checks import behind

if TYPE_CHECKING:
    from torchkv.engine.engine import Engine
    from torchkv.engine.layer_wait import LayerWait
    from torchkv.protocol.receiving.request import ReceiverRequest
    from torchkv.protocol.sending.request import SenderRequest

__all__ = ["PlainVerbs", "layer_wait", "trace"]

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
        self._stateful = cache is not None and cache.layout.stateful
        self._num_slots = 0 if cache is None else cache.num_slots
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
        work = KVWork(f"recv_pages({request!r})", sync_words=self._sync_words, loop=self._loop, parts=1)
        work._verdict = True
        with engine.lock, engine.receiver.leases.guard:
            if engine.closed or engine.lost:
                return None
            engine.catch_up()
            now = self.clock()
            req = engine.receiver.posts.post_plain(request, given, ids, ranks, prefix_tokens, state_slot, work, now)
            frames = engine.exchange.take_grants(now)
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

    def _targets(self, request: str, dst: Peers | None) -> tuple[int, ...]:
        """The ranks that a request goes to: of the instance that is named, or who has granted it; () if not known."""
        if type(dst) is int:
            return (dst,)
        if dst is None:
            return self.engine.sender.requests.addressed.get(request, ())
        return self.engine.group_map.of(request).known_targets(dst) if isinstance(dst, str) else ()

    def _send_plain(
        self,
        verb: str,
        request: str,
        layers: Layers,
        pages: Pages,
        dst: Peers | None,
        start: int,
        event: Any,
        from_prompt: bool,
    ) -> KVWork | None:
        engine, flows = self.engine, self.engine.flows
        if type(layers) is int or layers is None:
            held = self._plain_layers.get(layers)
        else:
            held = layers if type(layers) is HeldLayers else None
        if type(request) is not str or type(start) is not int or start < 0:
            return None
        if flows is None or held is None or trace.isEnabledFor(logging.DEBUG):
            return None
        rank = dst if type(dst) is int else None
        if rank is None and (ranks := self._targets(request, dst)):
            if len(ranks) > 1:
                return self._send_several(verb, request, held, pages, ranks, start, event, from_prompt)
            rank = ranks[0]
        if rank is None and dst is not None:
            return None
        req = None if rank is None else engine.sender.requests.by_key.get((request, rank))
        if req is None and (rank is None or flows.plain.has_served(rank)):
            flows.core.rouse()  # to wake it takes as long as this verb
        if (copyable := arguments.copyable_pages(pages)) is None:
            return None
        given, ids = copyable
        if event is None and engine.gpu is not None and (event := engine.gpu.try_record_gate()) is None:
            return None
        if rank is None:
            if (rank := self._find(request, given, ids, event)) is None:
                return None
            req = engine.sender.requests.by_key.get((request, rank))
        if verb == "send_layer" and (rank,) not in engine.whole_pages:
            return None
        call = verb, request, held, ids, rank, start, event
        if req is None:
            return None if dst is None else self._begin(call, given, from_prompt)
        return self._continue(req, call, given, from_prompt)

    def _continue(self, req: SenderRequest, call: Call, given: Int64Array, from_prompt: bool) -> KVWork | None:
        """Sends to a receiver whose request has begun. given: the page ids as the caller gave them, not checked."""
        engine, flows = self.engine, self.engine.flows
        assert flows is not None
        with engine.lock:
            if req.grant is None:
                engine.catch_up()  # the loop may have bound it
            grant = req.grant
            if grant is not None and grant.prefix_tokens and (from_prompt or grant.absent_tokens):
                if (left := self._behind(grant, call, given, from_prompt)) is None:
                    return None
                call, given = left
            if req.fresh and grant is not None:
                return self._open(call, given, grant, req)
            op = self._op(*call)
            if not flows.plain.start_more(req, op, given):
                return None
            req.add_sent(op)
        return cast(KVWork, op.work)

    def _send_several(
        self,
        verb: str,
        request: str,
        layers: tuple[int, ...],
        pages: Pages,
        ranks: tuple[int, ...],
        start: int,
        event: Any,
        from_prompt: bool,
    ) -> KVWork | None:
        """As `_send_plain`, to several ranks: of a verb that begins none of their requests."""
        engine, flows, num_pages = self.engine, self.engine.flows, self.engine.group_map.me.num_pages
        if flows is None or (verb == "send_layer" and ranks not in engine.whole_pages):
            return None
        reqs = []
        for rank in ranks:
            if (req := engine.sender.requests.by_key.get((request, rank))) is None:
                return None
            reqs.append(req)
        if (copyable := arguments.copyable_pages(pages)) is None or not copy_ids(*copyable, num_pages):
            return None
        if event is None and engine.gpu is not None and (event := engine.gpu.try_record_gate()) is None:
            return None
        ids = copyable[1]
        with engine.lock:
            if (grant := reqs[0].grant) is None:
                return None
            for req in reqs:
                if req.grant is None or req.grant.prefix_tokens != grant.prefix_tokens:
                    return None
            if from_prompt and grant.prefix_tokens:
                start, _, held = behind(grant, start, len(ids), from_prompt=True)
                ids = ids[held:]
            work = KVWork(f"{verb}({request!r})", sync_words=self._sync_words, loop=self._loop, parts=len(ranks))
            source = SourcePages(ids, event, self.forced_path)
            ops = [SendOp(request, rank, {}, layers, start, len(ids), work, source) for rank in ranks]
            return work if self._start_all(reqs, ops) else None

    def _find(self, request: str, given: Int64Array, ids: Int64Array, event: Any) -> int | None:
        """The only rank that has granted a request to anybody, which begins now. None if that is not plain.

        Nothing begins with pages, or an event, that `Verbs` would refuse.
        """
        engine, flows = self.engine, self.engine.flows
        assert flows is not None
        if not copy_ids(given, ids, engine.group_map.me.num_pages) or flows.routes.gate(event) is None:
            return None
        with engine.lock:
            if engine.closed or engine.lost:
                return None
            engine.catch_up()
            ranks = engine.sender.receivers(request, self.clock())
            wake = engine.exchange.has_actions
        if wake:
            self._wake()
        return ranks[0] if len(ranks) == 1 and ranks[0] != ANYBODY else None

    def _op(
        self, verb: str, request: str, layers: tuple[int, ...], ids: Int64Array, dst: int, start: int, event: Any
    ) -> SendOp:
        work = KVWork(f"{verb}({request!r})", sync_words=self._sync_words, loop=self._loop, parts=1)
        op = SendOp(request, dst, {}, layers, start, len(ids), work, SourcePages(ids, event, self.forced_path))
        op.verb = verb
        return op

    def _begin(self, call: Call, given: Int64Array, from_prompt: bool) -> KVWork | None:
        """Begins a request whose grant has come with its first op. None, and nothing is done, if that is not plain.

        given: the op's page ids as the caller gave them, which are checked as they are copied. from_prompt: whether
        they count from the prompt, so that the loop must not bind them behind a prefix.
        """
        _, request, _, _, dst, _, _ = call
        engine, flows = self.engine, self.engine.flows
        if flows is None or self.forced_path is not None:
            return None
        if not flows.plain.has_served(dst) and engine.group_map.known_targets(dst) != (dst,):
            return None
        grants, now, began = engine.sender.grants, self.clock(), time.perf_counter()
        work: KVWork | None
        with engine.lock:
            if engine.closed or engine.lost:
                return None
            if grants.awaits(request, dst) and (met := flows.plain.meet(call, given, now, from_prompt)) is not None:
                work = self._met(met, call, None, now, began)
                wake = met[0].prefix_tokens > 0 and engine.exchange.has_actions
            else:
                engine.catch_up()
                work = self._bind(call, given, from_prompt)
                wake = engine.exchange.has_actions
        if wake:
            self._wake()
        return work

    def _bind(self, call: Call, given: Int64Array, from_prompt: bool) -> KVWork | None:
        """As `_begin`, of a grant that Python knows. Under the lock."""
        _, request, _, _, dst, _, _ = call
        grant = self.engine.sender.grants.waiting(request, dst)
        if grant is None:
            return None
        if from_prompt and grant.prefix_tokens:
            if (left := self._behind(grant, call, given, from_prompt)) is None:
                return None
            call, given = left
        return self._open(call, given, grant, None)

    def _behind(
        self, grant: BoundGrant, call: Call, given: Int64Array, from_prompt: bool
    ) -> tuple[Call, Int64Array] | None:
        """A call without the pages that the receiver holds, or needs not; None if one of these is no page."""
        verb, request, layers, ids, dst, start, event = call
        start, _, held = behind(grant, start, len(ids), from_prompt=from_prompt)
        if not copy_ids(given[:held], ids[:held], self.engine.group_map.me.num_pages):
            return None
        return (verb, request, layers, ids[held:], dst, start, event), given[held:]

    def _open(self, call: Call, given: Int64Array, grant: BoundGrant, req: SenderRequest | None) -> KVWork | None:
        """The first op of a request: of ``req``, which is bound to this grant, or of one that begins now."""
        engine, flows = self.engine, self.engine.flows
        assert flows is not None
        now, began = self.clock(), time.perf_counter()
        if req is not None and (req.error is not None or req.finish is not None or engine.closed or engine.lost):
            return None
        if self.forced_path is not None:
            return None
        met = flows.plain.begin(call, given, grant, now if req is None else req.begun_at)
        return None if met is None else self._met(met, call, req, now, began)

    def _met(self, met: Met, call: Call, req: SenderRequest | None, now: float, began: float) -> KVWork:
        """The loop is at work: what follows is for Python's own records. req: as of `_open`. began: when it was called.

        Nothing here may take in what the loop has done, before it is recorded what that is.
        """
        engine, grant = self.engine, met[0]
        assert engine.flows is not None
        op = self._op(*call)
        op.work._began = began
        begins = req is None
        if req is None:
            req = engine.sender.grants.begin(grant, now)
        req.fresh = False
        engine.flows.plain.met(req, op, met)
        req.add_sent(op)
        if begins:
            engine.sender.grants.leave_loop(req, grant, now)
        return cast(KVWork, op.work)

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
        work = KVWork(f"send_state({request!r})", sync_words=self._sync_words, loop=self._loop, parts=len(reqs))
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
        if event is None and gpu is not None and (event := gpu.try_record_gate()) is None:
            return None
        return SourcePages(np.array((slot,), dtype=np.int64), event, None)

    def _start_all(self, reqs: list[SenderRequest], ops: list[SendOp]) -> bool:
        """Starts an op of each request, or of none. Under the lock."""
        assert self.engine.flows is not None
        if not self.engine.flows.plain.start_several(reqs, ops):
            return False
        for req, op in zip(reqs, ops, strict=True):
            req.add_sent(op)
        return True

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
        work = KVWork(f"finish({request!r})", sync_words=self._sync_words, loop=self._loop, parts=len(reqs))
        work._verdict = True
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
