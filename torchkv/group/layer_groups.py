"""The verbs of a rank whose layout has layer groups: one request is a request of the protocol for each group.

These *parts* have names of their own (`part_name`), and each has its plan, grant, leases, coverage and seal. What they
share is made here and in `Posts.post_parts`: one work, which completes when all parts have, and fails if one does;
checks of all parts before anything of any is sent; and the failure of one is the failure of all.

Absent pages. A receiver's list may begin with -1: pages before every window, which it does not hold. Its part then is
granted as if the prefix ended behind them (`Grant.absent_tokens`), so no absent page is ever leased, sent or planned. A
sender's absent pages are left out of what it sends; `finish` finds those that the receiver is owed nevertheless.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np
import torch

from torchkv.arrays import Int64Array
from torchkv.cuda import graph_gate
from torchkv.cuda.page_ids import DevicePages
from torchkv.engine.source_pages import SourcePages
from torchkv.engine.work import KVWork
from torchkv.errors import KVError, LayoutMismatch, PageOutOfRange, ProtocolError
from torchkv.group import arguments
from torchkv.group.arguments import HeldLayers, Layers, Origin, PageIds, Pages, Peers, StateSlot
from torchkv.group.group_arguments import ABSENT, GroupArguments, LayerGroup
from torchkv.group.plain.targets import trace
from torchkv.group.plain.verbs import layer_wait
from torchkv.group.verbs import Verbs
from torchkv.layout.group_map import GroupMap
from torchkv.layout.layer_groups import base_name, group_of, part_name
from torchkv.options import seconds
from torchkv.protocol.actions import ANYBODY, SendOp
from torchkv.protocol.receiving.leases import Wanted

if TYPE_CHECKING:
    from torchkv.cache import KVCache
    from torchkv.engine.engine import Engine

__all__ = ["GroupedVerbs"]

_NO_PAGES: Int64Array = np.zeros(0, dtype=np.int64)


@dataclass(slots=True)
class _Send:
    """One group's share of a verb: the part's name, where it goes, and which pages. start: that of the first one."""

    request: str
    plans: GroupMap
    ranks: tuple[int, ...]
    layers: tuple[int, ...]
    ids: Int64Array | DevicePages
    start: int


class GroupedVerbs(Verbs):
    """See `Verbs`, and the module."""

    def __init__(
        self,
        engine: Engine,
        cache: KVCache | None,
        *,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(engine, cache, wake=wake, clock=clock)
        self._arguments = GroupArguments(self.layout("register"), engine.group_map.me.num_pages)
        self._groups = self._arguments.groups
        # For plain verbs: of layers whose pages, or states, are all of one group, that group; and those that have
        # windows there.
        self._paged = frozenset(self._arguments.paged)
        paged = [(layer, group) for group in self._groups.values() for layer in group.paged]
        self._group_of = _in_one_group(paged)
        stateful = [(layer, group) for group in self._groups.values() for layer in group.stateful]
        self._state_group_of = _in_one_group(stateful)
        self._stateful_groups = {group.name for _, group in stateful}
        self._windowed = {layer for layer, group in paged if group.layout.window(layer) is not None}

    # ------------------------------------------------------------------ receiver

    def _recv_plain(
        self, request: str, pages: Pages, src: Peers, prefix_tokens: int, state_slot: StateSlot
    ) -> KVWork | None:
        return None

    def granted_plain(self, request: str, dst: Peers | None) -> int | None:
        return None

    def _recv_pages(
        self,
        request: str,
        pages: Pages,
        src: Peers,
        prefix_tokens: int,
        state_slot: StateSlot,
        timeout: float | timedelta | None,
    ) -> KVWork:
        engine = self.engine
        names = self._arguments.names(request)
        operation = f"recv_pages({request!r})"
        work = self._work(operation, verdict=True)
        work._expect(len(names))
        try:
            parts, absent_tokens = self._wanted(names, pages, state_slot, operation)
            prefix_tokens = arguments.as_count(prefix_tokens, operation=operation, name="prefix_tokens")
            total = None if timeout is None else seconds(timeout, f"{operation}: timeout")
            ranks = self._checked_writers(src, operation)
            now = self.clock()
            with engine.lock, engine.receiver.leases.guard:
                self.check_open(operation)
                engine.catch_up()
                self.check_alive(engine.group_map.contributing(ranks, engine.group_map.rank), operation)
                reqs = engine.receiver.posts.post_parts(
                    request,
                    parts,
                    ranks,
                    prefix_tokens=prefix_tokens,
                    absent_tokens=absent_tokens,
                    total=total,
                    work=work,
                    now=now,
                )
                frames = engine.exchange.take_grants(now)
                wake = any(req.flow is None for req in reqs) or engine.exchange.has_actions
        except KVError as error:
            self._tell_refusal(names.values(), error)
            raise
        engine.send_now(frames)
        work._receives = reqs
        work._pages_safe = lambda: all(req.ended for req in reqs)
        work._layer = partial(layer_wait, ref(engine), reqs[0])
        if wake:
            self._wake()
        return work

    def _wanted(
        self, names: Mapping[str, str], pages: Pages, state_slot: StateSlot, operation: str
    ) -> tuple[dict[str, Wanted], dict[str, int]]:
        """What each part leases, by its name, and the tokens of absent pages before, by layer group."""
        slots = self._slots(state_slot, operation, required=True)
        page_size = self.layout("recv_pages").page_size
        parts = {names[group]: Wanted(_NO_PAGES, slots.get(group), group) for group in self._groups}
        absent_tokens: dict[str, int] = {}
        for group, given in self._arguments.lists(pages, operation).items():
            ids, absent = self._arguments.host_list(given, operation)
            self._arguments.check_absent(group, len(ids) + absent, absent, operation)
            parts[names[group]] = Wanted(ids, slots.get(group), group)
            absent_tokens[group] = absent * page_size
        return parts, absent_tokens

    # ------------------------------------------------------------------ sender

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
        """Plain is a verb of layers whose pages are of one group, to one receiver, whose part has begun."""
        engine, flows = self.engine, self.engine.flows
        held = layers if type(layers) is HeldLayers else (layers,) if type(layers) is int else ()
        groups = {self._group_of.get(layer) for layer in held}
        if len(groups) != 1 or (group := groups.pop()) is None:
            return None
        if flows is None or type(request) is not str or type(start) is not int or start < 0:
            return None
        if type(pages) is dict:
            if group not in pages or not pages.keys() <= self._paged:
                return None
            pages = pages[group]
        name = part_name(request, group)
        ranks = self._targets(name, dst)
        if len(ranks) != 1 or (req := engine.sender.requests.by_key.get((name, ranks[0]))) is None:
            return None
        if verb == "send_layer" and (group, ranks[0]) not in engine.whole_pages:
            return None
        if trace.isEnabledFor(logging.DEBUG):
            return None
        if (
            req.latest is not None
            and (work := self._again(req, verb, held, pages, start, event, from_prompt)) is not None
        ):
            return work
        if (copyable := arguments.copyable_pages(pages)) is None:
            return None
        given, ids = copyable
        if len(given) and given[0] == ABSENT:
            absent = int((given != ABSENT).argmax())
            if not self._windowed.issuperset(held) or not absent:
                return None
            given, ids, start = given[absent:], ids[absent:], start + absent
        if event is None and engine.gpu is not None and (event := engine.gpu.try_gate()) is False:
            return None
        return self._continue(req, (verb, name, held, ids, ranks[0], start, event), given, from_prompt)

    def _op(
        self, verb: str, request: str, layers: tuple[int, ...], ids: Int64Array, dst: int, start: int, event: Any
    ) -> SendOp:
        """Errors name the request as its caller did. The loop, which knows the part's name alone, records nothing."""
        op = super()._op(verb, request, layers, ids, dst, start, event)
        op.work._operation, op.verb = f"{verb}({base_name(request)!r})", ""
        return op

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
        engine = self.engine
        names, operation = self._arguments.names(request), f"{verb}({request!r})"
        gpu = engine.gpu
        if gpu is not None:
            graph_gate.refuse_capture(operation, gpu.index)
        held = arguments.as_layers(layers, self.layout(verb), operation=operation)
        start = arguments.as_count(start, operation=operation, name="start")
        from_prompt = arguments.as_origin(origin, operation=operation)
        ready = arguments.as_event(event, operation=operation)
        sends = [
            self._part(names[group], ids, held, dst, start, operation)
            for group, ids in self._arguments.lists(pages, operation, layers=held).items()
        ]
        whole = verb == "send_layer"
        forced = "staged" if verb == "staged_put" else self.forced_path
        for send in sends:
            if whole:
                self._check_whole(send, operation)
            if forced is not None:
                self._check_forced_path(send.ranks, operation, forced)
        if gpu is not None and ready is None and not all(isinstance(send.ids, DevicePages) for send in sends):
            ready = gpu.record_gate()
        work, now = self._work(operation), self.clock()
        with engine.lock:
            self.check_open(operation)
            engine.catch_up()
            for send in sends:
                if dst is None:
                    send.ranks = engine.sender.receivers(send.request, now)
                    if whole and send.ranks != (ANYBODY,):
                        self._check_whole(send, operation)
                self._admit(send, operation, from_prompt=from_prompt)
            work._expect(sum(len(send.ranks) for send in sends))
            for send in sends:
                source, prefixes, count = SourcePages(send.ids, ready, forced), dict[int, int](), len(send.ids)
                for rank in send.ranks:
                    op = SendOp(send.request, rank, prefixes, send.layers, send.start, count, work, source)
                    if from_prompt:
                        op.from_prompt, op.prefixes = True, {}
                    op.whole = whole and rank == ANYBODY
                    engine.sender.submit(op, now)
            wake = engine.needs_driver
        if wake:
            self._wake()
        return work

    def _admit(self, send: _Send, operation: str, *, from_prompt: bool) -> None:
        """Raises unless all ops of ``send`` would be accepted now. Under the engine's lock."""
        sender = self.engine.sender
        for rank in send.ranks:
            sender.admit(send.request, rank, send.start, len(send.ids), from_prompt=from_prompt)
        self.check_alive(send.ranks, operation)
        if len(send.ranks) > 1 and not from_prompt:
            sender.check_prefixes(send.request, send.ranks)

    def _states(
        self, request: str, layers: Layers, state_slot: StateSlot, operation: str
    ) -> dict[str, tuple[tuple[int, ...], int]]:
        names = self._arguments.names(request)
        held = frozenset(arguments.as_layers(layers, self.layout("send_state"), operation=operation))
        own = {group: tuple(sorted(held & self._groups[group].stateful)) for group in self._arguments.with_state}
        slots = self._slots(state_slot, operation, required=False)
        groups = [group for group, stateful in own.items() if stateful]
        if missing := [group for group in groups if group not in slots]:
            raise ProtocolError(f"{operation}: no state_slot for layer group {missing[0]!r}; give {{group: slot}}")
        return {names[group]: (own[group], slots[group]) for group in groups}

    def _plain_slots(self, state_slot: StateSlot) -> Mapping[str, int] | None:
        """The slots of layer groups that hold state, as they nearly always are given; None if they are not."""
        with_state = self._arguments.with_state
        if type(state_slot) is int and len(with_state) == 1:
            state_slot = {with_state[0]: state_slot}
        if type(state_slot) is not dict or not state_slot.keys() <= self._stateful_groups:
            return None
        plain = all(type(slot) is int and 0 <= slot < self._num_slots for slot in state_slot.values())
        return state_slot if plain else None

    def _send_states_plain(
        self, request: str, layers: Layers, state_slot: StateSlot, dst: Peers | None, event: Any
    ) -> KVWork | None:
        """Plain are states of layers that have them in one group, as in `_send_plain`."""
        held = layers if type(layers) is HeldLayers else (layers,) if type(layers) is int else ()
        groups = {self._state_group_of.get(layer) for layer in held}
        if len(groups) != 1 or (group := groups.pop()) is None or type(request) is not str:
            return None
        if (slots := self._plain_slots(state_slot)) is None or group not in slots:
            return None
        name = part_name(request, group)
        keys = [(name, rank) for rank in self._targets(name, dst)]
        return self._send_states_to(request, keys, held, slots[group], event)

    def _finish_plain(self, request: str, dst: Peers | None, aux: bytes, state_slot: StateSlot) -> KVWork | None:
        slots = {} if state_slot is None else self._plain_slots(state_slot)
        if type(request) is not str or slots is None:
            return None
        names = {group: part_name(request, group) for group in self._groups}
        keys = []
        for name in names.values():
            if not (ranks := self._targets(name, dst)):
                return None
            keys += [(name, rank) for rank in ranks]
        return self._finish_all(request, keys, aux, {names[group]: slot for group, slot in slots.items()})

    def _finish(self, request: str, dst: Peers | None, aux: bytes, state_slot: StateSlot) -> KVWork:
        engine, sender = self.engine, self.engine.sender
        names, operation = self._arguments.names(request), f"finish({request!r})"
        data = arguments.as_aux(aux, operation=operation)
        slots = self._slots(state_slot, operation, required=False)
        ranks = {group: self._plans(name).targets(dst, operation) for group, name in names.items()}
        sources = {group: self._slot_source(slot, ranks[group], None, operation) for group, slot in slots.items()}
        work = self._work(operation, verdict=True)
        with engine.lock:
            self.check_open(operation)
            engine.catch_up()
            for group, name in names.items():
                if dst is None:
                    ranks[group] = sender.receivers(name, self.clock(), last=True)
                for rank in ranks[group]:
                    sender.check_finish(name, rank, state_slot=slots.get(group))
                self.check_alive(ranks[group], operation)
            states = {
                (group, rank): left
                for group in sources
                for rank in ranks[group]
                if (left := sender.state_left(names[group], rank))
            }
            work._expect(sum(map(len, ranks.values())) + len(states))
            for group, name in names.items():
                for rank in ranks[group]:
                    if (group, rank) in states:
                        self._submit_state(name, rank, states[group, rank], work, sources[group])
                    sender.finish(name, rank, aux=data, work=work, now=self.clock())
            wake = engine.needs_driver
        if wake:
            self._wake()
        return work

    def check_send(
        self, request: str, dst: Peers | None, pages: Pages, start: int, *, from_prompt: bool, slot: StateSlot
    ) -> tuple[Pages, tuple[int, ...], StateSlot]:
        """For `pipeline`: raises what a verb that sends ``pages`` and state would raise now. Sends nothing.

        Returns the page ids as they are now, the ranks that they go to, and the slots.
        """
        operation = f"pipeline({request!r})"
        names = self._arguments.names(request)
        lists = self._arguments.lists(pages, operation, layers=self.layout("pipeline").layers)
        slots = self._slots(slot, operation, required=False)
        sends = [
            self._part(names[group], ids, self.layout("").layers, dst, start, operation) for group, ids in lists.items()
        ]
        targets: dict[int, None] = {}
        with self.engine.lock:
            self.check_open(operation)
            self.engine.catch_up()
            for send in sends:
                if dst is None:
                    send.ranks = self.engine.sender.receivers(send.request, self.clock())
                self._admit(send, operation, from_prompt=from_prompt)
                targets.update(dict.fromkeys(send.ranks))
        kept = {group: _copied(ids) for group, ids in lists.items()}
        return kept, tuple(targets), slots or None

    # ------------------------------------------------------------------ inside

    def part_names(self, request: str) -> tuple[str, ...]:
        return tuple(self._arguments.names(request).values())

    def _plans(self, name: str) -> GroupMap:
        return self.engine.group_map.of(name)

    def _part(
        self, name: str, pages: PageIds, layers: Sequence[int], dst: Peers | None, start: int, operation: str
    ) -> _Send:
        """What a verb of these layers sends of one part. Raises ``PageOutOfRange``, ``ProtocolError``."""
        group = self._groups[group_of(name)]
        own = tuple(layer for layer in layers if layer in group.paged)
        plans, gpu = self._plans(name), self.engine.gpu
        ids: Int64Array | DevicePages
        absent = 0
        if gpu is not None and isinstance(pages, torch.Tensor) and pages.is_cuda:
            num_pages = self.engine.group_map.me.num_pages
            ids = arguments.as_send_pages(pages, num_pages=num_pages, gpu=gpu, operation=operation)
        else:
            ids, absent = self._arguments.host_list(pages, operation)
        if absent and (whole := next((layer for layer in own if group.layout.window(layer) is None), None)) is not None:
            raise PageOutOfRange(
                f"{operation}: page {start} of layer group {group.name!r} is absent (-1), but layer {whole} has no "
                "window and attends to all tokens; give its page id"
            )
        return _Send(name, plans, plans.targets(dst, operation), own, ids, start + absent)

    def _slots(self, state_slot: StateSlot, operation: str, *, required: bool) -> dict[str, int]:
        """Checked state slots by layer group. required: of every group that has state in layers of this rank."""
        given = self._arguments.slots(state_slot, operation)
        found: dict[str, int] = {}
        for group in self._arguments.with_state:
            slot = self.checked_slot(operation, given.get(group), self._groups[group].layout)
            if slot is not None and self._groups[group].stateful:
                found[group] = slot
            elif required and self._groups[group].stateful:
                raise ProtocolError(
                    f"{operation}: layer group {group!r} has state; give state_slot, the slot that it goes to"
                )
        return found

    def _check_whole(self, send: _Send, operation: str) -> None:
        for rank in send.ranks:
            if not send.plans.page_for_page(rank):
                raise LayoutMismatch(
                    f"{operation}: use send_slice or send_pages: the pages of this rank and of {send.plans.name(rank)} "
                    "differ in heads, page size or order, so whole pages cannot be sent"
                )
            self.engine.whole_pages.add((group_of(send.request), rank))


def _in_one_group(held: list[tuple[int, LayerGroup]]) -> dict[int, str]:
    """Of the layers of several groups: those that are in one of them, and in which."""
    times = Counter(layer for layer, _ in held)
    return {layer: group.name for layer, group in held if times[layer] == 1}


def _copied(pages: PageIds) -> PageIds:
    """Page ids that the caller may not change any more; those on a GPU must not change anyhow."""
    return pages if isinstance(pages, torch.Tensor) and pages.is_cuda else np.array(pages, dtype=np.int64)
