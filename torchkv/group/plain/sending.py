"""The verbs that send pages, as nearly all calls are: see `torchkv.group.plain`."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.engine.resident.plain_sends import Call, LatestSend, Met
from torchkv.engine.source_pages import SourcePages
from torchkv.engine.work import KVWork
from torchkv.group import arguments
from torchkv.group.arguments import HeldLayers, Layers, Pages, Peers
from torchkv.group.plain.targets import PlainTargets, trace
from torchkv.host.page_id_check import copy_ids
from torchkv.protocol.actions import ANYBODY, BoundGrant, SendOp
from torchkv.protocol.sending.grant_checks import behind

if TYPE_CHECKING:
    from torchkv.protocol.sending.request import SenderRequest

__all__ = ["PlainSending"]


class PlainSending(PlainTargets):
    """See the module, and `Verbs`."""

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
        if req is not None and req.latest is not None:
            if (work := self._again(req, verb, held, pages, start, event, from_prompt)) is not None:
                return work
        elif req is None and (rank is None or flows.plain.has_served(rank)):
            flows.core.rouse()  # to wake it takes as long as this verb
        if (copyable := arguments.copyable_pages(pages)) is None:
            return None
        given, ids = copyable
        if event is None and engine.gpu is not None and (event := engine.gpu.try_gate()) is False:
            return None
        if rank is None:
            if (found := self._find(request, given, ids, event)) is None:
                return None
            if len(found) > 1:
                return self._send_several(verb, request, held, ids, found, start, event, from_prompt)
            rank = found[0]
            req = engine.sender.requests.by_key.get((request, rank))
        if verb == "send_layer" and (rank,) not in engine.whole_pages:
            return None
        call = verb, request, held, ids, rank, start, event
        if req is None:
            return None if dst is None else self._begin(call, given, from_prompt)
        return self._continue(req, call, given, from_prompt)

    def _again(
        self,
        req: SenderRequest,
        verb: str,
        layers: tuple[int, ...],
        pages: Pages,
        start: int,
        event: Any,
        from_prompt: bool,
    ) -> KVWork | None:
        """As `_continue`, in less time, of a verb that is as the latest one was, but for its layers and its event."""
        last: LatestSend = req.latest
        if last.verb != verb or last.start != start or last.from_prompt is not from_prompt:
            return None
        if (given := arguments.plain_pages(pages)) is None:
            return None
        engine, flows = self.engine, self.engine.flows
        assert flows is not None
        if event is None and engine.gpu is not None and (event := engine.gpu.try_gate()) is False:
            return None
        with engine.lock:
            return flows.plain.again(req, last, layers, given, event)

    def _continue(self, req: SenderRequest, call: Call, given: Int64Array, from_prompt: bool) -> KVWork | None:
        """Sends to a receiver whose request has begun. given: the page ids as the caller gave them, not checked."""
        engine, flows = self.engine, self.engine.flows
        assert flows is not None
        whole = call
        with engine.lock:
            if req.grant is None:
                engine.catch_up()  # the loop may have bound it
            grant = req.grant
            if grant is not None and grant.prefix_tokens and (from_prompt or grant.absent_tokens):
                if (left := self._behind(grant, call, given, from_prompt)) is None:
                    return None
                call, given = left
            if req.fresh and grant is not None:
                return self._open(call, given, grant, req, from_prompt if call is whole else None)
            op = self._op(*call)
            if (latest := flows.plain.start_more(req, op, given, whole, from_prompt)) is None:
                return None
            req.add_sent(op)
            req.latest = latest
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
        """As `_send_plain`, to several ranks: of a verb that begins all of their requests, or none."""
        engine, flows, num_pages = self.engine, self.engine.flows, self.engine.group_map.me.num_pages
        if flows is None or (verb == "send_layer" and ranks not in engine.whole_pages):
            return None
        reqs = []
        for rank in ranks:
            if (req := engine.sender.requests.by_key.get((request, rank))) is None:
                break
            reqs.append(req)
        begins = len(reqs) < len(ranks) or reqs[0].fresh
        if begins:
            flows.core.rouse()  # to wake it takes as long as this verb
        elif (work := self._again_all(reqs, verb, layers, pages, start, event, from_prompt)) is not None:
            return work
        if (copyable := arguments.copyable_pages(pages)) is None or not copy_ids(*copyable, num_pages):
            return None
        if event is None and engine.gpu is not None and (event := engine.gpu.try_gate()) is False:
            return None
        ids = copyable[1]
        with engine.lock:
            bound = self._bind_all(request, ranks) if begins and not reqs else []
            grants: list[BoundGrant | None] = [one[0] for one in bound]
            if not bound:
                grants = self._waiting(request, ranks, reqs) if begins else [req.grant for req in reqs]
            if (grant := _alike(grants)) is None:
                self._release(bound)
                return None
            first, sent = start, ids
            if from_prompt and grant.prefix_tokens:
                first, _, held = behind(grant, start, len(ids), from_prompt=True)
                sent = ids[held:]
            work = KVWork(f"{verb}({request!r})", self._sync_words, self._loop, len(ranks))
            source = SourcePages(sent, event, self.forced_path)
            ops = [SendOp(request, rank, {}, layers, first, len(sent), work, source) for rank in ranks]
            if begins:
                reqs = self._begin_all(cast(list[BoundGrant], grants), reqs, ops, [one[1] for one in bound])
                if not reqs:
                    self._release(bound)
            elif not self._start_all(reqs, ops):
                reqs = []
            if reqs:
                flows.plain.remember(reqs, ops, verb, start, ids, from_prompt)
            wake = begins and engine.exchange.has_actions
        if wake:
            self._wake()
        return work if reqs else None

    def _again_all(
        self,
        reqs: list[SenderRequest],
        verb: str,
        layers: tuple[int, ...],
        pages: Pages,
        start: int,
        event: Any,
        from_prompt: bool,
    ) -> KVWork | None:
        """As `_again`, to several receivers, all of whose latest verb was one and the same."""
        last: LatestSend | None = reqs[0].latest
        if last is None or last.verb != verb or last.start != start or last.from_prompt is not from_prompt:
            return None
        for req in reqs:
            if req.latest is None or req.latest.op.work is not last.op.work:
                return None
        if (given := arguments.plain_pages(pages)) is None:
            return None
        engine, flows = self.engine, self.engine.flows
        assert flows is not None
        if event is None and engine.gpu is not None and (event := engine.gpu.try_gate()) is False:
            return None
        with engine.lock:
            return flows.plain.again_all(reqs, layers, given, event)

    def _waiting(self, request: str, ranks: tuple[int, ...], reqs: list[SenderRequest]) -> list[BoundGrant | None]:
        """Of each rank the grant under which its request can begin on the loop now. Under the lock.

        reqs: those that Python has begun, all or none. Empty if there are others by now, or they have begun otherwise.
        """
        engine, sender = self.engine, self.engine.sender
        if engine.closed or engine.lost or self.forced_path is not None:
            return []
        engine.catch_up()
        if [req for rank in ranks if (req := sender.requests.by_key.get((request, rank))) is not None] != reqs:
            return []
        if not reqs:
            return [sender.grants.waiting(request, rank) for rank in ranks]
        fresh = [req.grant for req in reqs if req.fresh and req.error is None and req.finish is None]
        grants = [None if grant is None or grant.absent_tokens else grant for grant in fresh]
        return grants if len(grants) == len(ranks) else []

    def _begin_all(
        self, grants: list[BoundGrant], reqs: list[SenderRequest], ops: list[SendOp], bound: list[int]
    ) -> list[SenderRequest]:
        """Begins a request under each of these grants on the loop with its op, or none: these. Under the lock.

        reqs: the requests, if Python has begun them. The pages of the ops are checked. bound: the flows of the grants,
        if these are bound.
        """
        flows, sender_grants, now = self.engine.flows, self.engine.sender.grants, self.clock()
        assert flows is not None
        calls: list[Call] = []
        for op in ops:
            source: SourcePages = op.source_pages
            assert isinstance(source.pages, np.ndarray)
            calls.append(("", op.request, op.layers, source.pages, op.dst, op.start, source.event))
        ways = [flows.plain.way(call, grant) for call, grant in zip(calls, grants, strict=True)]
        has_room = flows.core.sends.has_ops if bound else flows.core.sends.has_room
        if None in ways or not has_room(len(ops)):
            return []
        met: list[Met | None] = []
        for number, (call, grant, way) in enumerate(zip(calls, grants, ways, strict=True)):
            assert way is not None
            if bound:
                met.append(flows.plain.begin_bound(call, grant, way, bound[number]))
            else:
                met.append(flows.plain.begin(call, call[3], grant, way, now))
        # All are recorded before the first call that may take in what the loop has done.
        known: list[SenderRequest | None] = [*reqs] or [None] * len(ops)
        begun = [self._note(one, op, req, now) for one, op, req in zip(met, ops, known, strict=True)]
        for req, grant in zip(begun, grants, strict=True):
            sender_grants.leave_loop(req, grant, now)
        return begun

    def _note(self, met: Met | None, op: SendOp, req: SenderRequest | None, now: float) -> SenderRequest:
        """Records what the loop has begun. req: None if the request begins with it.

        Nothing here takes in what the loop has done: it has to be known first what that is of.
        """
        assert met is not None
        assert self.engine.flows is not None
        if req is None:
            req = self.engine.sender.grants.begin(met[0], now)
        req.fresh = False
        self.engine.flows.plain.met(req, op, met)
        req.add_sent(op)
        return req

    def _find(self, request: str, given: Int64Array, ids: Int64Array, event: Any) -> tuple[int, ...] | None:
        """The ranks that have granted a request to anybody, which begins now. None if nobody has.

        Nothing begins with pages, or an event, that `Verbs` would refuse.
        """
        engine, flows = self.engine, self.engine.flows
        assert flows is not None
        if not copy_ids(given, ids, engine.group_map.me.num_pages) or flows.routes.gate(event) is None:
            return None
        with engine.lock:
            if engine.closed or engine.lost:
                return None
            ranks = self._address(request)
            if not ranks:
                engine.catch_up()
                ranks = engine.sender.receivers(request, self.clock())
            wake = engine.exchange.has_actions
        if wake:
            self._wake()
        return ranks if ranks and ranks != (ANYBODY,) else None

    def _op(
        self, verb: str, request: str, layers: tuple[int, ...], ids: Int64Array, dst: int, start: int, event: Any
    ) -> SendOp:
        work = KVWork(f"{verb}({request!r})", self._sync_words, self._loop, 1)
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
                work = self._met(met, call, None, now, began, from_prompt)
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
        if not (from_prompt and grant.prefix_tokens):
            return self._open(call, given, grant, None, from_prompt)
        left = self._behind(grant, call, given, from_prompt)
        return None if left is None else self._open(*left, grant, None, None)

    def _behind(
        self, grant: BoundGrant, call: Call, given: Int64Array, from_prompt: bool
    ) -> tuple[Call, Int64Array] | None:
        """A call without the pages that the receiver holds, or needs not; None if one of these is no page."""
        verb, request, layers, ids, dst, start, event = call
        start, _, held = behind(grant, start, len(ids), from_prompt=from_prompt)
        if not copy_ids(given[:held], ids[:held], self.engine.group_map.me.num_pages):
            return None
        return (verb, request, layers, ids[held:], dst, start, event), given[held:]

    def _open(
        self, call: Call, given: Int64Array, grant: BoundGrant, req: SenderRequest | None, from_prompt: bool | None
    ) -> KVWork | None:
        """The first op of a request: of ``req``, which is bound to this grant, or of one that begins now.

        from_prompt: how its pages count; None if some of them were left out.
        """
        engine, flows = self.engine, self.engine.flows
        assert flows is not None
        now, began = self.clock(), time.perf_counter()
        if req is not None and (req.error is not None or req.finish is not None or engine.closed or engine.lost):
            return None
        if self.forced_path is not None or (way := flows.plain.way(call, grant)) is None:
            return None
        met = flows.plain.begin(call, given, grant, way, now if req is None else req.begun_at)
        return None if met is None else self._met(met, call, req, now, began, from_prompt)

    def _met(
        self,
        met: Met,
        call: Call,
        req: SenderRequest | None,
        now: float,
        began: float,
        from_prompt: bool | None,
    ) -> KVWork:
        """The loop is at work: what follows is for Python's own records. began: when. The rest: see `_open`."""
        op = self._op(*call)
        op.work._began = began
        grant, flow, _, route = met
        req = self._note(met, op, req, now)
        if from_prompt is not None:
            verb, _, _, _, _, start, _ = call
            req.latest = LatestSend(verb, start, from_prompt, op, route, flow)
        self.engine.sender.grants.leave_loop(req, grant, now)
        return cast(KVWork, op.work)

    def _start_all(self, reqs: list[SenderRequest], ops: list[SendOp]) -> bool:
        """Starts an op of each request, or of none. Under the lock."""
        assert self.engine.flows is not None
        if not self.engine.flows.plain.start_several(reqs, ops):
            return False
        for req, op in zip(reqs, ops, strict=True):
            req.add_sent(op)
        return True


def _alike(grants: list[BoundGrant | None]) -> BoundGrant | None:
    """The first of these grants, if there is any, and all are there, behind the same prefix."""
    first = grants[0] if grants else None
    for grant in grants:
        if grant is None or first is None or grant.prefix_tokens != first.prefix_tokens:
            return None
    return first
