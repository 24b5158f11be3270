"""The verbs as they are called: what the flight recorder keeps of them, ranges for profilers. The rest is `Verbs`."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch.autograd import profiler

from torchkv.engine.work import KVWork
from torchkv.errors import KVError
from torchkv.group import arguments
from torchkv.group.arguments import Layers, Origin, Pages, Peers, StateSlot
from torchkv.observe.ranges import Range
from torchkv.observe.recorder import size_of

if TYPE_CHECKING:
    from torchkv.engine.engine import Engine

__all__ = ["RecordedVerbs"]

T = TypeVar("T")
P = ParamSpec("P")


class RecordedVerbs(ABC):
    """The public verbs, which `KVProcessGroup` documents.

    Of what the resident loop serves, it records the operations itself: here are all others, those that raise, and
    ranges. All of one rank's verbs are of one class, whether they are recorded or not, because CPython is fast for the
    class that it meets most.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._recorder = engine.recorder
        self._nvtx = engine.options.nvtx and torch.cuda.is_available()

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
        if timeout is None and not (profiler._is_profiler_enabled or self._nvtx):
            work = self._recv_plain(request, pages, src, prefix_tokens, state_slot)
            if work is not None:
                return work  # which the loop records
        call = self._recv_pages
        return self._seen(
            "recv_pages", request, src, None, pages, call, request, pages, src, prefix_tokens, state_slot, timeout
        )

    def send(
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
        """`send_pages`, `send_layer`, `send_slice` and `staged_put`, which differ in what they check."""
        if verb == "send_layer" and type(layers) is not int:
            arguments.check_one_layer(verb, request, layers)
        from_prompt = origin == "prompt"
        plain = (from_prompt or origin == "prefix") and verb != "staged_put"
        if plain and not (profiler._is_profiler_enabled or self._nvtx):
            work = self._send_plain(verb, request, layers, pages, dst, start, event, from_prompt)
            if work is not None:
                if not work._in_journal:
                    self._record(work, verb, request, dst, layers, pages)
                return work
        call = self._send_any
        return self._seen(
            verb, request, dst, layers, pages, call, verb, request, layers, pages, dst, start, event, origin
        )

    def send_state(
        self, request: str, layer: int, state_slot: StateSlot, dst: Peers | None, *, event: Any = None
    ) -> KVWork:
        arguments.check_one_layer("send_state", request, layer)
        return self.send_states(request, layer, state_slot, dst, event)

    def send_states(self, request: str, layers: Layers, state_slot: StateSlot, dst: Peers | None, event: Any) -> KVWork:
        """As `send_state`, for any number of layers: `pipeline` sends a group's states with one verb."""
        if not (profiler._is_profiler_enabled or self._nvtx):
            work = self._send_states_plain(request, layers, state_slot, dst, event)
            if work is not None:
                self._record(work, "send_state", request, dst, layers, (state_slot,))
                return work
        call = self._send_states
        return self._seen(
            "send_state", request, dst, layers, (state_slot,), call, request, layers, state_slot, dst, event
        )

    def finish(self, request: str, dst: Peers | None, *, aux: bytes = b"", state_slot: StateSlot = None) -> KVWork:
        if not (profiler._is_profiler_enabled or self._nvtx):
            work = self._finish_plain(request, dst, aux, state_slot)
            if work is not None:
                if not work._in_journal:
                    self._record(work, "finish", request, dst, None, ())
                return work
        return self._seen("finish", request, dst, None, (), self._finish, request, dst, aux, state_slot)

    def withdraw(self, request: str) -> KVWork:
        return self._seen("withdraw", request, None, None, (), self._withdraw, request)

    def cancel(self, request: str, *, decline: bool = False) -> KVWork:
        return self._seen("cancel", request, None, None, (), self._cancel, request, decline)

    def refuse(self, request: str, src: Peers) -> None:
        self._returning("refuse", request, src, self._refuse, request, src)

    def prefix_tokens(self, request: str, dst: Peers | None) -> int:
        return self._returning("prefix_tokens", request, dst, self._prefix_tokens, request, dst)

    # ------------------------------------------------------------------ what they do

    @abstractmethod
    def _recv_pages(
        self,
        request: str,
        pages: Pages,
        src: Peers,
        prefix_tokens: int,
        state_slot: StateSlot,
        timeout: float | timedelta | None,
    ) -> KVWork: ...

    @abstractmethod
    def _recv_plain(
        self, request: str, pages: Pages, src: Peers, prefix_tokens: int, state_slot: StateSlot
    ) -> KVWork | None:
        """As `_send_plain`: receives, or returns None."""

    @abstractmethod
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
        """Sends if the call is plain, see `torchkv.group.plain`; else None, and nothing is done."""

    @abstractmethod
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
    ) -> KVWork: ...

    @abstractmethod
    def _send_states_plain(
        self, request: str, layers: Layers, state_slot: StateSlot, dst: Peers | None, event: Any
    ) -> KVWork | None:
        """As `_send_plain`: sends states, or returns None."""

    @abstractmethod
    def _send_states(
        self, request: str, layers: Layers, state_slot: StateSlot, dst: Peers | None, event: Any
    ) -> KVWork: ...

    @abstractmethod
    def _finish_plain(self, request: str, dst: Peers | None, aux: bytes, state_slot: StateSlot) -> KVWork | None:
        """As `_send_plain`: finishes the request, or returns None."""

    @abstractmethod
    def _finish(self, request: str, dst: Peers | None, aux: bytes, state_slot: StateSlot) -> KVWork: ...

    @abstractmethod
    def _withdraw(self, request: str) -> KVWork: ...

    @abstractmethod
    def _cancel(self, request: str, decline: bool) -> KVWork: ...

    @abstractmethod
    def _refuse(self, request: str, src: Peers) -> None: ...

    @abstractmethod
    def _prefix_tokens(self, request: str, dst: Peers | None) -> int: ...

    # ------------------------------------------------------------------ what is seen of them

    def _seen(
        self,
        verb: str,
        request: str,
        peers: Peers | None,
        layers: Layers,
        pages: Any,
        call: Callable[P, KVWork],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> KVWork:
        """Calls a verb. request, peers, layers, pages: as the caller gave them."""
        ranged = self._nvtx or profiler._is_profiler_enabled
        span = Range(verb, request, nvtx=self._nvtx) if ranged else None
        try:
            work = call(*args, **kwargs)
        except KVError as error:
            if self._recorder is not None:
                self._recorder.refused(verb, request, peers, layers, size_of(pages), error)
            raise
        finally:
            if span is not None:
                span.end()
        self._record(work, verb, request, peers, layers, pages)
        return work

    def _record(self, work: KVWork, verb: str, request: str, peers: Peers | None, layers: Layers, pages: Any) -> None:
        """Has the recorder keep a work of which the loop's journal has nothing."""
        if not work._in_journal and self._recorder is not None:
            with self.engine.lock:  # the loop may be about to take it, or has handed it over already
                if not work._in_journal and work._number < 0:
                    work._record_with(self._recorder, verb, request, peers, layers, size_of(pages))

    def _returning(
        self, verb: str, request: str, peers: Peers | None, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Calls a verb that has no work: its return is its end."""
        recorder = self._recorder
        if recorder is None:
            return call(*args, **kwargs)
        number = recorder.begin(verb, request, peers, None, 0, time.perf_counter())
        try:
            value = call(*args, **kwargs)
        except KVError as error:
            recorder.failed(number, f"{verb}({request!r})", error)
            raise
        recorder.returned(number)
        return value
