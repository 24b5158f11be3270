"""Verbs that the flight recorder sees, and that are ranges for profilers. `make_verbs` makes those of a rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from torchkv.engine.work import KVWork
from torchkv.errors import KVError
from torchkv.group.arguments import Layers, Origin, Pages, Peers, StateSlot
from torchkv.group.layer_groups import GroupedVerbs
from torchkv.group.verbs import Verbs
from torchkv.observe.ranges import Range, profiled
from torchkv.observe.recorder import FlightRecorder, size_of

if TYPE_CHECKING:
    from torchkv.cache import KVCache
    from torchkv.engine.engine import Engine

__all__ = ["RecordedVerbs", "make_verbs"]

T = TypeVar("T")


def make_verbs(
    engine: Engine,
    cache: KVCache | None,
    *,
    wake: Callable[[], None],
    clock: Callable[[], float] = time.monotonic,
) -> Verbs:
    """The verbs of a rank, for its layout."""
    grouped, recorder = cache is not None and cache.layout.groups, engine.recorder
    if recorder is None:
        return (GroupedVerbs if grouped else Verbs)(engine, cache, wake=wake, clock=clock)
    made = _RecordedGroupedVerbs if grouped else RecordedVerbs
    return made(engine, cache, wake=wake, clock=clock, recorder=recorder)


class RecordedVerbs(Verbs):
    """See `Verbs`, and the module."""

    def __init__(
        self,
        engine: Engine,
        cache: KVCache | None,
        *,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        recorder: FlightRecorder,
    ) -> None:
        super().__init__(engine, cache, wake=wake, clock=clock)
        self._recorder = recorder
        self._nvtx = engine.options.nvtx and torch.cuda.is_available()

    # The three verbs that requests need are spelled out, as `_seen` is: what it takes to call that is a microsecond.

    def recv_pages(
        self,
        request: str,
        pages: Pages,
        src: Peers,
        *,
        prefix_tokens: int = 0,
        state_slot: StateSlot = None,
        timeout: float | timedelta | None = None,
    ) -> KVWork:
        span = Range("recv_pages", request, nvtx=self._nvtx) if self._nvtx or profiled() else None
        try:
            work = super().recv_pages(
                request, pages, src, prefix_tokens=prefix_tokens, state_slot=state_slot, timeout=timeout
            )
        except KVError as error:
            self._recorder.refused("recv_pages", request, src, None, size_of(pages), error)
            raise
        finally:
            if span is not None:
                span.end()
        if not work._in_journal:
            self._record(work, "recv_pages", request, src, None, size_of(pages))
        return work

    def _send(
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
        span = Range(verb, request, nvtx=self._nvtx) if self._nvtx or profiled() else None
        try:
            work = super()._send(verb, request, layers, pages, dst, start, event, origin)
        except KVError as error:
            self._recorder.refused(verb, request, dst, layers, size_of(pages), error)
            raise
        finally:
            if span is not None:
                span.end()
        if not work._in_journal:
            self._record(work, verb, request, dst, layers, size_of(pages))
        return work

    def finish(self, request: str, dst: Peers | None, *, aux: bytes = b"", state_slot: StateSlot = None) -> KVWork:
        span = Range("finish", request, nvtx=self._nvtx) if self._nvtx or profiled() else None
        try:
            work = super().finish(request, dst, aux=aux, state_slot=state_slot)
        except KVError as error:
            self._recorder.refused("finish", request, dst, None, 0, error)
            raise
        finally:
            if span is not None:
                span.end()
        if not work._in_journal:
            self._record(work, "finish", request, dst, None, 0)
        return work

    def send_states(self, request: str, layers: Layers, state_slot: StateSlot, dst: Peers | None, event: Any) -> KVWork:
        verb = partial(super().send_states, request, layers, state_slot, dst, event)
        return self._seen("send_state", request, dst, layers, 1, verb)

    def withdraw(self, request: str) -> KVWork:
        return self._seen("withdraw", request, None, None, 0, partial(super().withdraw, request))

    def cancel(self, request: str, *, decline: bool = False) -> KVWork:
        return self._seen("cancel", request, None, None, 0, partial(super().cancel, request, decline=decline))

    def refuse(self, request: str, src: Peers) -> None:
        self._returning("refuse", request, src, partial(super().refuse, request, src))

    def prefix_tokens(self, request: str, dst: Peers | None) -> int:
        return self._returning("prefix_tokens", request, dst, partial(super().prefix_tokens, request, dst))

    def _returning(self, verb: str, request: str, peers: Peers | None, call: Callable[[], T]) -> T:
        """Calls a verb that has no work: its return is its end."""
        number = self._recorder.begin(verb, request, peers, None, 0, time.perf_counter())
        try:
            value = call()
        except KVError as error:
            self._recorder.failed(number, f"{verb}({request!r})", error)
            raise
        self._recorder.returned(number)
        return value

    def _seen(
        self, verb: str, request: str, peers: Peers | None, layers: Layers, count: int, call: Callable[[], KVWork]
    ) -> KVWork:
        """Calls a verb. count: of pages."""
        span = Range(verb, request, nvtx=self._nvtx) if self._nvtx or profiled() else None
        try:
            work = call()
        except KVError as error:
            self._recorder.refused(verb, request, peers, layers, count, error)
            raise
        finally:
            if span is not None:
                span.end()
        self._record(work, verb, request, peers, layers, count)
        return work

    def _record(self, work: KVWork, verb: str, request: str, peers: Peers | None, layers: Layers, count: int) -> None:
        """Records the operation of ``work``, unless the loop does, or has handed it over."""
        with self.engine.lock:
            if not work._in_journal and work._number < 0:
                work._record_with(self._recorder, verb, request, peers, layers, count)


class _RecordedGroupedVerbs(RecordedVerbs, GroupedVerbs):
    """The same, where the layout has layer groups."""
