"""Layer pipelining: sends a model's layers in groups, each as soon as its last layer has run.

Hooks count the layers; what they do beyond that is one verb a group, which records an event and queues. Nothing here
reads a page, waits, or starts a thread.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.autograd import profiler
from torch.utils.hooks import RemovableHandle

from torchkv import arguments, gate
from torchkv.arguments import Pages, Peers
from torchkv.decoderlayers import GivenLayers, decoder_layers
from torchkv.engine import Engine
from torchkv.errors import KVError, ProtocolError
from torchkv.groupsize import Adaptive, Policy
from torchkv.layerevents import Events, all_of, layer_events
from torchkv.layout import KVLayout
from torchkv.passclock import PassClock
from torchkv.process_group import KVProcessGroup
from torchkv.work import KVWork

__all__ = ["Pipeline", "pipeline"]

log = logging.getLogger(__name__)

Group = tuple[int, ...]  # global layer ids
_Verb = tuple[str, Callable[[Group, Any], KVWork], Callable[[Group], int]]

# What has been learned of the way to some ranks. Policies are shared by threads, and know no lock.
_learned: WeakKeyDictionary[KVProcessGroup, dict[tuple[int, ...], Adaptive]] = WeakKeyDictionary()
_policy_lock = threading.Lock()


def pipeline(
    model: nn.Module | None,
    kv: KVProcessGroup,
    request: str,
    pages: Pages,
    dst: Peers,
    *,
    layers: GivenLayers = None,
    start: int = 0,
    state_slot: int | None = None,
    group_size: int | None = None,
    policy: Policy | None = None,
    tokens: int | None = None,
    events: Events | None = None,
) -> Pipeline:
    """A context for one forward pass that sends the layers of ``pages`` while later ones are computed::

        with torchkv.pipeline(model, kv, request, pages, "decode"):
            logits = model(input_ids).logits
        kv.finish(request, "decode", aux=...).wait()

    model: any module; its decoder layers are the one ``nn.ModuleList`` that is as long as this rank's layers. layers:
    names them instead: modules in ascending order of layer, or {module: global layer id}. request, pages, dst, start:
    as for ``send_pages``; each chunk of a prompt has a context of its own, with its ``start``. state_slot: sends each
    layer's state too, from this slot; for the last chunk, which makes it final, or else leave it to ``finish``.
    group_size: layers to send at a time, by default what ``policy`` says, by default `groupsize.Adaptive`; all of them
    are sent when the body has ended. tokens: of the whole forward, for the policy, where that is more than the pages
    hold. events: for layers in a CUDA graph, instead of hooks, the list of ``GraphGate.arm()`` or {global layer id:
    event}; the context is then entered before the replay.

    What no hook has sent when the body ends is sent then. If the body raises, the request is cancelled, as by
    ``kv.cancel``. If a send fails, the pass goes on without sending more; ``wait()`` and ``kv.finish`` raise the error.
    For several requests in one forward, and for destinations that shall not share one fate, nest contexts.

    Raises, before anything is sent, ``ProtocolError`` (layers that are not found without doubt, a model compiled as a
    whole, a stream that is being captured), and what ``send_pages`` would raise.
    """
    engine, layout = kv._registered("pipeline")
    sending = _checked(kv, engine, layout, request, pages, dst, start, state_slot)
    what = sending.what
    modules: dict[nn.Module, int] = {}
    gates: dict[int, Any] = {}
    if events is not None:
        gates = layer_events(layout, events, what)
    elif isinstance(model, nn.Module):
        modules = decoder_layers(model, layout, layers, what)
    else:
        raise ProtocolError(f"{what}: model is a {type(model).__name__}; give a torch.nn.Module, or events=")
    order = list(gates or modules.values())
    held = len(pages) * layout.page_size
    count = held if tokens is None else arguments.as_count(tokens, what=what, name="tokens")
    layer_nbytes = sending.nbytes(order) // max(1, len(order))
    size, clock = len(order), None
    if group_size is not None:
        size = _checked_size(group_size, sending)
    elif order and sending.targets and layer_nbytes:
        size, clock = _asked(policy, sending, count, len(order), layer_nbytes, measures=bool(modules))
    groups = [tuple(order[i : i + size]) for i in range(0, len(order), max(size, 1))]
    if modules and len(groups) == 1:
        # They go when the body has ended: no hook on each layer, which is what a short prefill would notice.
        groups, ends = [], list(modules.items())
        modules = {} if clock is None else dict([ends[0], ends[-1]])
    return Pipeline(sending, layout.layers, modules, gates, groups, clock)


@dataclass(frozen=True, slots=True)
class _Sending:
    """One verb's arguments, but for the layers. targets: the ranks of ``dst`` that are owed something."""

    kv: KVProcessGroup
    engine: Engine
    request: str
    pages: Pages
    dst: Peers
    start: int
    state_slot: int | None
    targets: tuple[int, ...]
    layout: KVLayout

    @property
    def what(self) -> str:
        return f"pipeline({self.request!r})"

    def send_pages(self, group: Group, event: Any) -> KVWork:
        return self.kv.send_pages(self.request, self.pages, self.dst, layers=group, start=self.start, event=event)

    def send_state(self, group: Group, event: Any) -> KVWork:
        assert self.state_slot is not None
        return self.kv._send_state(self.request, group, self.state_slot, self.dst, event)

    def verbs(self, group: Group) -> list[_Verb]:
        """What sends ``group``: a name for traces, the call, and what tells its bytes."""
        found: list[_Verb] = [("send_layer", self.send_pages, self._page_nbytes)]
        if self.state_slot is not None and self._state_nbytes(group):
            found.append(("send_state", self.send_state, self._state_nbytes))
        return found

    def nbytes(self, group: Sequence[int]) -> int:
        """Bytes of ``group`` that this rank holds and sends."""
        return self._page_nbytes(group) + (0 if self.state_slot is None else self._state_nbytes(group))

    def _page_nbytes(self, group: Sequence[int]) -> int:
        layout, wanted = self.layout, set(group)
        total = sum(
            layout.page_nbytes(c.name) * len(wanted & set(layout.component_layers(c.name))) for c in layout.components
        )
        return total * len(self.pages)

    def _state_nbytes(self, group: Sequence[int]) -> int:
        layout, wanted = self.layout, set(group)
        return sum(layout.state_nbytes(s.name) * len(wanted & set(layout.state_layers(s.name))) for s in layout.states)


class Pipeline:
    """One forward pass of one request; made by `pipeline`, entered once, by the thread that runs the forward.

    works: one for each group sent so far, in the order of sending, and one behind it for its state. groups: their
    global layer ids. swept: layers that were sent when the body had ended. cancelled: the work of ``kv.cancel`` if the
    body raised, else None.
    """

    def __init__(
        self,
        sending: _Sending,
        held: Group,
        modules: Mapping[nn.Module, int],
        gates: Mapping[int, Any],
        groups: Sequence[Group],
        clock: PassClock | None,
    ) -> None:
        """held: all layers of this rank, which are sent in any case. groups: of those that are sent as they have run.

        modules: what has hooks; those of layers in no group are watched for ``clock`` only.
        """
        self._kv, self._what, self._request = sending.kv, sending.what, sending.request
        self._sending: _Sending | None = sending
        self._modules, self._gates = modules, gates
        self._plan = groups
        self._clock = clock
        self._held = held
        self._group_of = {layer: group for group in groups for layer in group}
        self._missing = {group: len(group) for group in groups}
        self._waiting = set(modules.values())
        self._unsent = dict.fromkeys(held)  # in order
        self._thread: int | None = None
        self._handles: list[RemovableHandle] = []
        self._error: KVError | None = None
        self.works: list[KVWork] = []
        self.groups: list[Group] = []
        self.swept: Group = ()
        self.cancelled: KVWork | None = None

    # ------------------------------------------------------------------ the context

    def __enter__(self) -> Pipeline:
        if self._thread is not None:
            raise ProtocolError(f"{self._what}: entered twice; make a new one for each forward pass")
        self._thread = threading.get_ident()
        try:
            hook = _untraced_hook() if "torch._dynamo" in sys.modules else _hook
            for module, layer in self._modules.items():
                self._handles.append(module.register_forward_hook(functools.partial(hook, self, layer)))
            if self._gates:
                for group in self._plan:
                    self._send(group, all_of([self._gates[layer] for layer in group]))
        except BaseException:
            self._give_up()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._give_up()
            return
        try:
            if self._modules and self._unheard():
                log.warning("%s: no layer was called through its module, so all are sent at the end", self._what)
            rest = tuple(self._unsent)
            if rest:
                self._send(rest, None)
                self.swept = rest if self._error is None else ()
        finally:
            self._close()

    def wait(self, timeout: float = 0.0) -> bool:
        """Blocks until everything sent so far is visible to the receivers and the source may be overwritten.

        timeout: seconds; 0 means the operations' own deadlines. Raises the first error of a send, and
        ``TransferTimeout`` when ``timeout`` runs out.
        """
        until = time.monotonic() + timeout
        for work in self.works:
            work.wait(max(until - time.monotonic(), 1e-9) if timeout > 0 else 0.0)
        if self._error is not None:
            raise self._error.with_traceback(None)
        return True

    def exception(self) -> KVError | None:
        """The first error that any send is known to have failed with."""
        failed = (error for work in self.works if (error := work.exception()) is not None)
        return next(failed, self._error)

    # ------------------------------------------------------------------ inside

    def ran(self, layer: int) -> None:
        """``layer`` has run; its hook says so."""
        # Hooks hang on the model: another thread's forward, of another request, calls them too.
        if self._sending is None or self._error is not None or threading.get_ident() != self._thread:
            return
        group = self._group_of.get(layer)
        if layer not in self._waiting:
            if group is None:
                return
            raise ProtocolError(
                f"{self._what}: layer {layer} has run twice in one context, and may have been sent after the first "
                "time; use one context for each forward pass, for each chunk with its start"
            )
        self._waiting.remove(layer)
        if self._clock is not None:
            self._clock.layer_ran(is_last=not self._waiting)
        if group is not None:
            self._missing[group] -= 1
            if not self._missing[group]:
                self._send(group, None)

    def _send(self, group: Group, event: Any) -> None:
        if self._error is not None:
            return
        assert self._sending is not None
        try:
            for name, verb, nbytes_of in self._sending.verbs(group):
                began = time.perf_counter()
                if profiler._is_profiler_enabled:
                    with profiler.record_function(f"torchkv::{name}[{_span(group)}]"):
                        work = verb(group, event)
                else:
                    work = verb(group, event)
                self.works.append(work)
                if self._clock is not None:
                    self._clock.sent(work, began, nbytes_of(group))
        except KVError as error:
            if self._sending.engine.device is not None and torch.cuda.is_current_stream_capturing():
                raise  # a mistake of the program, not a failure of this request
            self._error = error
            log.warning("%s: layers %s were not sent: %s", self._what, _span(group), error)
            return
        self.groups.append(group)
        for layer in group:
            del self._unsent[layer]

    def _unheard(self) -> bool:
        """Whether no layer has run as far as hooks can tell, though there is something to send."""
        assert self._sending is not None
        return len(self._waiting) == len(self._modules) and bool(self._sending.nbytes(self._held))

    def _give_up(self) -> None:
        self._close()
        self.cancelled = self._kv.cancel(self._request)

    def _close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._modules, self._gates, self._sending, self._clock = {}, {}, None, None


def _hook(sending: Pipeline, layer: int, _module: nn.Module, _args: Any, _output: Any) -> None:
    sending.ran(layer)


@functools.cache
def _untraced_hook() -> Callable[..., None]:
    """The same, behind compiled layers: else Dynamo would try to compile the hook, and whatever it calls."""
    disabled: Callable[..., None] = torch.compiler.disable(_hook)  # type: ignore[no-untyped-call]  # torch's
    return disabled


def _checked(
    kv: KVProcessGroup,
    engine: Engine,
    layout: KVLayout,
    request: str,
    pages: Pages,
    dst: Peers,
    start: int,
    state_slot: int | None,
) -> _Sending:
    """What every group is sent with. Raises whatever the first verb would raise now."""
    request = arguments.as_request(request)
    what = f"pipeline({request!r})"
    if engine.device is not None:
        gate.refuse_capture(what, engine.device.index)
    if not (engine.device is not None and isinstance(pages, torch.Tensor) and pages.is_cuda):
        # A copy, so that all groups get the same ids whatever the caller does with its own.
        pages = arguments.as_pages(pages, num_pages=engine.roster.me.num_pages, what=what)
    start = arguments.as_count(start, what=what, name="start")
    slot = None if state_slot is None else kv._checked_slot(what, state_slot, layout)
    dst = tuple(dst) if isinstance(dst, list) else dst
    targets = engine.roster.targets(dst, what)
    with engine.lock:
        kv._check_open(engine, what)
        for rank in targets:
            engine.sender.admit(request, rank, start, len(pages))
            if slot is not None:
                engine.sender.admit(request, rank, 0, 1, state=True)
        kv._check_alive(engine, targets, what)
    return _Sending(kv, engine, request, pages, dst, start, slot, targets, layout)


def _asked(
    policy: Policy | None, sending: _Sending, tokens: int, num_layers: int, layer_nbytes: int, *, measures: bool
) -> tuple[int, PassClock | None]:
    """The group size that ``policy`` wants, and what measures the pass for it, if it can be measured."""
    clock = None
    with _policy_lock:
        if policy is None:
            known = _learned.setdefault(sending.kv, {})
            if (policy := known.get(sending.targets)) is None:
                policy = known[sending.targets] = Adaptive()
        size = policy.group_size(tokens=tokens, num_layers=num_layers, layer_nbytes=layer_nbytes)
        if policy.learns and measures:
            clock = PassClock(tokens, num_layers, sending.kv, sending.engine, sending.request, sending.targets)
            policy.learn(clock.measured)
    return _checked_size(size, sending, policy), clock


def _checked_size(size: int, sending: _Sending, policy: Policy | None = None) -> int:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        whose = "group_size" if policy is None else f"{policy!r} says group size"
        raise ProtocolError(f"{sending.what}: {whose} {size!r}; it must be an int of at least 1")
    return size


def _span(group: Sequence[int]) -> str:
    return f"{group[0]}" if len(group) == 1 else f"{group[0]}..{group[-1]}"
