"""The KV verbs of one registered rank, without c10d: argument checks, then one call into the protocol, under one lock.

`KVProcessGroup` delegates to a `Verbs` object and documents the public methods. Tests use `Verbs` without c10d.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.control.messenger import FramesByRank
from torchkv.cuda import graph_gate
from torchkv.cuda.page_ids import DevicePages
from torchkv.engine.process_leases import PROCESS
from torchkv.engine.source_pages import SourcePages
from torchkv.engine.work import KVWork
from torchkv.errors import KVError, LayoutMismatch, PageOutOfRange, PeerLost, ProtocolError
from torchkv.group import arguments, prefixes
from torchkv.group.arguments import Layers, Origin, Pages, Peers, StateSlot
from torchkv.group.plain.verbs import PlainVerbs
from torchkv.layout.layout import KVLayout
from torchkv.options import seconds
from torchkv.protocol.actions import ANYBODY, SendOp
from torchkv.protocol.receiving.request import ReceiverRequest

__all__ = ["Verbs"]

trace = logging.getLogger("torchkv.request")  # see `KVProcessGroup`
_QUEUED = "request %r to ranks %s: %s queued, layers %s, %d pages or slots"


class Verbs(PlainVerbs):
    """The verbs of one rank. All methods are thread-safe; the public ones are documented in `KVProcessGroup`.

    engine: the rank's engine, which a progress thread (or a test) drives. cache: None for a rank that registered
    without one. wake: tells the driver that there is something to do. clock: the time in seconds that the driver
    passes to ``engine.step``.
    """

    # ------------------------------------------------------------------ receiver

    def _recv_pages(
        self,
        request: str,
        pages: Pages,
        src: Peers,
        prefix_tokens: int,
        state_slot: StateSlot,
        timeout: float | timedelta | None,
    ) -> KVWork:
        layout = self._layout or self.layout("recv_pages")
        engine = self.engine
        request = arguments.as_request(request)
        operation = f"recv_pages({request!r})"
        work = self._work(operation, verdict=True)
        work._expect(1)
        try:
            array = arguments.as_pages(pages, num_pages=engine.group_map.me.num_pages, operation=operation)
            if type(prefix_tokens) is not int or prefix_tokens:
                prefix_tokens = arguments.as_count(prefix_tokens, operation=operation, name="prefix_tokens")
            total = None if timeout is None else seconds(timeout, f"{operation}: timeout")
            slot = self.checked_slot(operation, state_slot, layout)
            if not layout.stateful:
                slot = None
            elif slot is None:
                raise ProtocolError(f"{operation}: this layout has state; give state_slot, the slot that it goes to")
            ranks = self._checked_writers(src, operation)
            req, frames, wake = self._post(request, array, ranks, prefix_tokens, slot, total, work)
        except KVError as error:
            self._tell_refusal([request], error)
            raise
        if frames:
            engine.send_now(frames)
        self._receives(work, req)
        if wake:
            self._wake()
        return work

    def _tell_refusal(self, names: Iterable[str], error: KVError) -> None:
        """Tells the instance that ``recv_pages`` was refused on this rank, of these requests of the protocol."""
        with self.engine.lock:
            self.engine.catch_up()  # an earlier request of the name may have ended
            for name in names:
                self.engine.receiver.posts.refuse(name, error)
        self._wake()

    def _checked_writers(self, src: Peers, operation: str) -> tuple[int, ...]:
        """The ranks of ``src``. Raises ``LayoutMismatch`` if together they do not hold every byte of this rank."""
        group_map = self.engine.group_map
        ranks = group_map.resolve(src, operation, "src")
        if (gap := group_map.gap(ranks, group_map.rank)) is not None:
            raise LayoutMismatch(f"{operation}: {gap}; name every rank that holds a part in src")
        return ranks

    def _post(
        self,
        request: str,
        pages: Int64Array,
        ranks: tuple[int, ...],
        prefix_tokens: int,
        state_slot: int | None,
        total: float | None,
        work: KVWork,
    ) -> tuple[ReceiverRequest, FramesByRank, bool]:
        """Leases ``pages`` and grants them to ``ranks``. The frames are those for `Engine.send_now`.

        The third result says whether the driver must be woken.
        """
        engine, operation, now = self.engine, f"recv_pages({request!r})", self.clock()
        with engine.lock, engine.receiver.leases.guard:
            if engine.closed:
                self.check_open(operation)
            engine.catch_up()
            if engine.lost:
                self.check_alive(engine.group_map.contributing(ranks, engine.group_map.rank), operation)
            req = engine.receiver.posts.post(
                request,
                pages,
                ranks,
                prefix_tokens=prefix_tokens,
                state_slot=state_slot,
                total=total,
                work=work,
                now=now,
            )
            frames = engine.exchange.take_grants(now)
            return req, frames, req.flow is None or engine.exchange.has_actions

    # ------------------------------------------------------------------ sender

    def _send_any(
        self,
        verb: str,
        request: str,
        layers: Layers,
        pages: Pages,
        dst: Peers | None,
        start: int,
        event: Any,
        origin: Origin,
    ) -> KVWork:
        layout = self._layout or self.layout(verb)
        engine = self.engine
        request = arguments.as_request(request)
        operation = f"{verb}({request!r})"
        gpu = engine.gpu
        ids: Int64Array | DevicePages
        if gpu is None:
            ids = arguments.as_pages(pages, num_pages=engine.group_map.me.num_pages, operation=operation)
        else:
            graph_gate.refuse_capture(operation, gpu.index)
            ids = arguments.as_send_pages(pages, num_pages=engine.group_map.me.num_pages, gpu=gpu, operation=operation)
        held = arguments.as_layers(layers, layout, operation=operation)
        start = arguments.as_count(start, operation=operation, name="start")
        from_prompt = origin != "prefix" and arguments.as_origin(origin, operation=operation)
        ready = event if event is None else arguments.as_event(event, operation=operation)
        ranks = engine.group_map.targets(dst, operation)
        whole = verb == "send_layer"
        if whole and ranks not in engine.whole_pages:
            self._check_page_for_page(ranks, operation, "use send_slice or send_pages")
        forced = "staged" if verb == "staged_put" else self.forced_path
        if forced is not None:
            self._check_forced_path(ranks, operation, forced)
        # Page ids on the GPU come with an event of their own, recorded on the same stream.
        if gpu is not None and ready is None and not isinstance(ids, DevicePages):
            ready = gpu.record_gate()
        work = self._work(operation)
        op = SendOp(request, ANYBODY, {}, held, start, len(ids), work, SourcePages(ids, ready, forced))
        op.from_prompt, op.verb = from_prompt, verb
        self._queue(verb, op, ranks, whole=whole, anybody=dst is None)
        return work

    def _queue(self, verb: str, op: SendOp, ranks: tuple[int, ...], *, whole: bool, anybody: bool) -> None:
        """Begins ``op`` towards these ranks, or towards anybody. whole: the layouts must match page for page."""
        operation, request = f"{verb}({op.request!r})", op.request
        engine, sender, now = self.engine, self.engine.sender, self.clock()
        with engine.lock:
            if engine.closed:
                self.check_open(operation)
            if len(ranks) != 1 or not sender.is_on_loop(request, ranks[0]):
                engine.catch_up()
            if anybody:
                ranks = sender.receivers(request, now)
                if whole and ranks != (ANYBODY,):
                    self._check_page_for_page(ranks, operation, "use send_slice or send_pages")
            for rank in ranks:  # before everything else: a request that has failed raises its own error again
                sender.admit(request, rank, op.start, op.num_pages, from_prompt=op.from_prompt)
            if engine.lost:
                self.check_alive(ranks, operation)
            if len(ranks) > 1 and not op.from_prompt:
                sender.check_prefixes(request, ranks)
            op.work._expect(len(ranks))
            if trace.isEnabledFor(logging.DEBUG):
                trace.debug(_QUEUED, request, ranks, verb, op.layers, op.num_pages)
            for rank in ranks:
                # All parts share the source pages, which do not change, and the record of prefixes.
                part = op if len(ranks) == 1 else replace(op)
                part.dst, part.whole = rank, whole and rank == ANYBODY
                if op.from_prompt:  # receivers may hold unequal prefixes
                    part.prefixes = {}
                sender.submit(part, now)
            wake = engine.needs_driver
        if wake:
            self._wake()

    def _send_states(
        self, request: str, layers: Layers, state_slot: StateSlot, dst: Peers | None, event: Any
    ) -> KVWork:
        engine, operation = self.engine, f"send_state({request!r})"
        parts = self._states(request, layers, state_slot, operation)
        ranks = {name: engine.group_map.of(name).targets(dst, operation) for name in parts}
        sources = {name: self._slot_source(slot, ranks[name], event, operation) for name, (_, slot) in parts.items()}
        work = self._work(operation)
        with engine.lock:
            self.check_open(operation)
            engine.catch_up()
            for name in parts:
                if dst is None:
                    ranks[name] = engine.sender.receivers(name, self.clock())
                for rank in ranks[name]:
                    engine.sender.admit(name, rank, 0, 1, state=True)
                self.check_alive(ranks[name], operation)
            work._expect(sum(map(len, ranks.values())))
            for name, (held, _) in parts.items():
                trace.debug(_QUEUED, name, ranks[name], "send_state", held, 1)
                for rank in ranks[name]:
                    self._submit_state(name, rank, held, work, sources[name])
            wake = engine.needs_driver
        if wake:
            self._wake()
        return work

    def _states(
        self, request: str, layers: Layers, state_slot: StateSlot, operation: str
    ) -> dict[str, tuple[tuple[int, ...], int]]:
        """What `send_states` sends of each part of the request, by its name: layers, and the slot of their state."""
        layout = self._layout or self.layout("send_state")
        request = arguments.as_request(request)
        held = arguments.as_layers(layers, layout, operation=operation)
        slot = self.checked_slot(operation, state_slot, layout)
        if slot is None:
            raise ProtocolError(f"{operation}: state_slot=None; give the slot that holds the request's state")
        return {request: (held, slot)}

    def _finish(self, request: str, dst: Peers | None, aux: bytes, state_slot: StateSlot) -> KVWork:
        layout = self._layout or self.layout("finish")
        engine = self.engine
        request = arguments.as_request(request)
        operation = f"finish({request!r})"
        data = arguments.as_aux(aux, operation=operation)
        slot = self.checked_slot(operation, state_slot, layout)
        ranks = engine.group_map.targets(dst, operation)
        source_pages = None if slot is None else self._slot_source(slot, ranks, None, operation)
        work = self._work(operation, verdict=True)
        with engine.lock:
            if engine.closed:
                self.check_open(operation)
            # Of a request on the loop, what has ended can be looked at when the seal is under way.
            if len(ranks) != 1 or not engine.sender.is_on_loop(request, ranks[0]):
                engine.catch_up()
            if dst is None:
                ranks = engine.sender.receivers(request, self.clock(), last=True)
            for rank in ranks:
                engine.sender.check_finish(request, rank, state_slot=slot)
            if engine.lost:
                self.check_alive(ranks, operation)
            states: dict[int, tuple[int, ...]] = {}  # rank -> layers whose state is still to be sent
            if source_pages is not None:
                states = {rank: held for rank in ranks if (held := engine.sender.state_left(request, rank))}
            work._expect(len(ranks) + len(states))
            trace.debug("request %r to ranks %s: finish queued", request, ranks)
            for rank in ranks:
                if source_pages is not None and rank in states:
                    self._submit_state(request, rank, states[rank], work, source_pages)
                engine.sender.finish(request, rank, aux=data, work=work, now=self.clock())
            wake = engine.needs_driver
        if wake:
            self._wake()
        return work

    def granted(self, request: str, dst: Peers | None) -> int | None:
        return prefixes.granted(self, request, dst)

    def _prefix_tokens(self, request: str, dst: Peers | None) -> int:
        return prefixes.prefix_tokens(self, request, dst)

    def _withdraw(self, request: str) -> KVWork:
        engine = self.engine
        names = self.part_names(request)
        operation = f"withdraw({request!r})"
        self.layout(operation)
        work = self._work(operation)
        work._limit = engine.options.timeout
        with engine.lock:
            self.check_open(operation)
            engine.catch_up()
            work._expect(sum(len(engine.sender.withdraw(name, work)) for name in names))
        self._wake()
        return work

    # ------------------------------------------------------------------ either side

    def _refuse(self, request: str, src: Peers) -> None:
        self.layout("refuse")
        engine = self.engine
        names = self.part_names(request)
        operation = f"refuse({request!r})"
        group_map = engine.group_map
        ranks = group_map.resolve(src, operation, "src")
        with engine.lock:
            self.check_open(operation)
            engine.catch_up()
            self.check_alive(group_map.contributing(ranks, group_map.rank), operation)
            for name in names:
                engine.receiver.posts.decline(name, group_map.of(name).contributing(ranks, group_map.rank))
        self._wake()

    def _cancel(self, request: str, decline: bool) -> KVWork:
        engine = self.engine
        names = self.part_names(request)
        if decline:
            self.layout("cancel(decline=True)")
        work = self._work(f"cancel({request!r})")
        work._limit = engine.options.timeout
        with engine.callers.changed:
            if engine.closed:  # every request ended with the group
                work._expect(0)
                return work
            engine.catch_up()
            pending: list[KVWork] = []
            for name in names:
                if decline:
                    engine.sender.grants.decline(name, self.clock())
                pending += engine.sender.cancel(name, work, self.clock()) + engine.receiver.cancel(name, work)
            work._expect(len(pending))
            engine.callers.notify()
        self._wake()
        return work

    def quarantined(self, *, slots: bool = False, layer_group: str | None = None) -> dict[int, tuple[int, ...]]:
        engine = self.engine
        if layer_group is not None and layer_group not in engine.group_map.parts:
            known = ", ".join(engine.group_map.parts) or "none"
            raise ProtocolError(f"quarantined: {layer_group!r:.80} is no layer group of this layout, which has {known}")
        PROCESS.look()  # also for a group that was destroyed
        with engine.lock:
            engine.catch_up()
            leases = engine.receiver.leases
            return leases.quarantined(slots=slots, group=layer_group)

    # ------------------------------------------------------------------ checks

    def part_names(self, request: str) -> tuple[str, ...]:
        """The names under which the protocol knows a request: its own, or one for each layer group."""
        return (arguments.as_request(request),)

    def layout(self, verb: str) -> KVLayout:
        """This rank's layout. Raises ``ProtocolError`` if it registered no cache."""
        if self._layout is None:
            raise ProtocolError(f"{verb}: this rank registered no cache; pass one to register()")
        return self._layout

    def check_open(self, operation: str) -> None:
        """Raises ``ProtocolError`` if the group was destroyed. Under the engine's lock."""
        if self.engine.closed:
            raise ProtocolError(f"{operation}: {self.engine.closed}")

    def check_alive(self, ranks: Sequence[int], operation: str) -> None:
        """Raises ``PeerLost`` if one of ``ranks`` does not answer. Under the engine's lock."""
        lost = self.engine.lost
        for rank in ranks:
            if rank in lost:
                raise PeerLost(f"{operation}: {lost[rank]}; use another rank, or make a new group")

    def checked_slot(self, operation: str, state_slot: StateSlot, layout: KVLayout) -> int | None:
        """``state_slot`` as an int. Raises ``ProtocolError``, and ``PageOutOfRange`` if the cache has no such slot."""
        if state_slot is None:
            return None
        if not layout.states:
            raise ProtocolError(f"{operation}: state_slot={state_slot!r}, but this layout has no state; leave it out")
        assert self.cache is not None
        slot = arguments.as_count(state_slot, operation=operation, name="state_slot")
        # A pipeline stage without stateful layers has no slots; callers pass it the same state_slot as the others.
        if layout.stateful and slot >= self.cache.num_slots:
            raise PageOutOfRange(f"{operation}: state_slot={slot} is outside this cache's [0, {self.cache.num_slots})")
        return slot

    def _check_page_for_page(self, ranks: tuple[int, ...], operation: str, advice: str) -> None:
        """Raises ``LayoutMismatch`` unless pages match. Of a single rank that is remembered, for plain verbs."""
        group_map = self.engine.group_map
        for rank in ranks:
            if not group_map.page_for_page(rank):
                raise LayoutMismatch(
                    f"{operation}: {advice}: the pages of this rank and of {group_map.name(rank)} differ in heads, "
                    f"page size or order, so whole pages cannot be sent"
                )
        if len(ranks) == 1:
            self.engine.whole_pages.add(ranks)

    def _check_forced_path(self, ranks: tuple[int, ...], operation: str, forced: str, *, state: bool = False) -> None:
        if forced == "runs":
            self._check_page_for_page(ranks, operation, f"leave Options.path unset, it is {forced!r}")
        for rank in ranks:
            # Connections within an instance are made on first use; then the transfer itself fails.
            if (connection := self.engine.connections.get(rank)) is not None:
                converts = not state and self.engine.group_map.converts(rank)
                connection.path(forced=forced, page_for_page=True, converts=converts)

    # ------------------------------------------------------------------ state

    def _slot_source(self, slot: int, ranks: tuple[int, ...], event: Any, operation: str) -> SourcePages:
        """The source of a state transfer: the slot id takes the place of page ids."""
        gpu, forced = self.engine.gpu, self.forced_path
        ready = arguments.as_event(event, operation=operation)
        if forced not in (None, "runs"):  # state that is sharded differently goes as slices even if runs are forced
            self._check_forced_path(ranks, operation, forced, state=True)
        if gpu is not None:
            graph_gate.refuse_capture(operation, gpu.index)
            ready = gpu.record_gate() if ready is None else ready
        return SourcePages(np.array([slot], dtype=np.int64), ready, forced)

    def _submit_state(
        self, request: str, rank: int, layers: tuple[int, ...], work: KVWork, source_pages: SourcePages
    ) -> None:
        op = SendOp.of_states(request, rank, layers, work, source_pages)
        self.engine.sender.submit(op, self.clock())
