"""Layer pipelining: sends a model's layers in groups, each group as soon as its last layer has run.

Forward hooks count the layers; the hook of a group's last layer calls one verb, which records an event and queues.
Nothing here reads a page, waits, or starts a thread.
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
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.autograd import profiler
from torch.utils.hooks import RemovableHandle

from torchkv.cuda import graph_gate
from torchkv.engine.work import KVWork
from torchkv.errors import KVError, ProtocolError, fresh
from torchkv.group import arguments
from torchkv.group.arguments import HeldLayers, Origin, Pages, Peers, StateSlot
from torchkv.group.layer_groups import GroupedVerbs
from torchkv.layout.layout import KVLayout
from torchkv.pipelining.decoder_layers import GivenLayers, decoder_layers
from torchkv.pipelining.group_size import HANDED_OVER, Adaptive, Estimator, Policy
from torchkv.pipelining.layer_events import Events, all_of, layer_events
from torchkv.pipelining.pass_timer import PassTimer
from torchkv.protocol.actions import ANYBODY

if TYPE_CHECKING:
    from torchkv.group.kv_verbs import KVVerbs
    from torchkv.group.verbs import Verbs

__all__ = ["Pipeline", "pipeline"]

log = logging.getLogger(__name__)

Group = HeldLayers  # global layer ids
_Verb = tuple[str, Callable[[Group, Any], KVWork], Callable[[Group], int]]  # name in traces, the verb, its bytes

# Default policies: group -> destination ranks -> policy. Threads share them, and policies are not thread-safe.
_learned: WeakKeyDictionary[KVVerbs, dict[tuple[int, ...], Adaptive]] = WeakKeyDictionary()
_policy_lock = threading.Lock()


def pipeline(
    model: nn.Module | None,
    kv: KVVerbs,
    request: str,
    pages: Pages,
    dst: Peers | None,
    *,
    layers: GivenLayers = None,
    start: int = 0,
    origin: Origin = "prefix",
    state_slot: StateSlot = None,
    group_size: int | None = None,
    policy: Policy | None = None,
    tokens: int | None = None,
    events: Events | None = None,
) -> Pipeline:
    """A context for one forward pass that sends the layers of ``pages`` while later layers are computed::

        with torchkv.pipeline(model, kv, request, pages, "decode"):
            logits = model(input_ids).logits
        kv.finish(request, "decode", aux=...).wait()

    model: any module. Its decoder layers are the one ``nn.ModuleList`` that is as long as this rank's layers, or as all
    layers of the model. None if ``events`` is given.
    request, pages, dst, start, origin: as for ``send_pages``. Each chunk of a prompt has a context of its own, with its
    start.
    layers: names the decoder layers instead: modules in ascending order of layer, or {module: global layer id}.
    state_slot: sends each layer's state too, from this slot; for the last chunk, which makes it final, or else leave it
    to ``finish``.
    group_size: layers to send at a time. By default ``policy`` decides, by default `group_size.Adaptive`.
    tokens: length of the forward pass for the policy, if that is more than the pages hold.
    events: for layers in a CUDA graph, instead of hooks: the list of ``GraphGate.arm()``, or {global layer id: event}.
    Enter the context before the replay.

    When the body ends, all layers that no hook has sent are sent. If the body raises, the request is cancelled as by
    ``kv.cancel``. If a send fails, the forward pass continues and nothing more is sent; ``wait()`` and ``kv.finish``
    raise the error. For several requests in one forward pass, and for destinations that should fail independently, nest
    contexts.

    Raises, before anything is sent, ``ProtocolError`` (the decoder layers cannot be identified, the model is compiled
    as a whole, the current stream is being captured), and what ``send_pages`` would raise.
    """
    verbs = kv._verbs or kv._unregistered("pipeline")
    layout = verbs.layout("pipeline")
    sending = _checked(kv, verbs, layout, request, pages, dst, start, origin, state_slot)
    operation = sending.operation
    modules: dict[nn.Module, int] = {}
    gates: dict[int, Any] = {}
    if events is not None:
        gates = layer_events(layout, events, operation)
    elif isinstance(model, nn.Module):
        modules = decoder_layers(model, layout, layers, operation)
    else:
        raise ProtocolError(f"{operation}: model is a {type(model).__name__}; give a torch.nn.Module, or events=")
    order = list(gates or modules.values())
    size, timer = _group_size(sending, order, tokens, group_size, policy, measures=bool(modules))
    cuts = [tuple(order[i : i + size]) for i in range(0, len(order), max(size, 1))]
    groups = [HeldLayers(arguments.as_layers(cut, layout, operation=operation)) for cut in cuts]
    if modules and len(groups) == 1:
        # Sent when the body has ended. Without hooks on each layer, whose cost a short prefill would notice.
        groups, ends = [], list(modules.items())
        modules = {} if timer is None else dict([ends[0], ends[-1]])
    return Pipeline(sending, layout.layers, modules, gates, groups, timer)


@dataclass(frozen=True, slots=True)
class _Sending:
    """The arguments of all verbs, except the layers. targets: those ranks of ``dst`` that this rank owes bytes, or
    `ANYBODY`.
    """

    kv: KVVerbs
    verbs: Verbs
    request: str
    pages: Pages
    dst: Peers | None
    start: int
    origin: Origin
    state_slot: StateSlot
    targets: tuple[int, ...]
    layout: KVLayout

    @property
    def operation(self) -> str:
        return f"pipeline({self.request!r})"

    def send_pages(self, group: Group, event: Any) -> KVWork:
        return self.kv.send_pages(
            self.request, self.pages, self.dst, layers=group, start=self.start, event=event, origin=self.origin
        )

    def send_state(self, group: Group, event: Any) -> KVWork:
        assert self.state_slot is not None
        return self.verbs.send_states(self.request, group, self.state_slot, self.dst, event)

    def calls(self, group: Group) -> list[_Verb]:
        """The verbs that send ``group``."""
        found: list[_Verb] = [("send_layer", self.send_pages, self._page_nbytes)]
        if self.state_slot is not None and self._state_nbytes(group):
            found.append(("send_state", self.send_state, self._state_nbytes))
        return found

    def nbytes(self, group: Sequence[int]) -> int:
        """Bytes of these layers that this rank sends."""
        return self._page_nbytes(group) + (0 if self.state_slot is None else self._state_nbytes(group))

    def _page_nbytes(self, group: Sequence[int]) -> int:
        layout, wanted = self.layout, set(group)
        total = sum(
            layout.page_nbytes(c.name) * len(wanted & set(layout.component_layers(c.name))) for c in layout.components
        )
        return total * self.num_pages

    @property
    def num_pages(self) -> int:
        """Of one list, where each layer group has one: they are equally long."""
        lists = self.pages.values() if isinstance(self.pages, Mapping) else [self.pages]
        return max(map(len, lists), default=0)

    def _state_nbytes(self, group: Sequence[int]) -> int:
        layout, wanted = self.layout, set(group)
        return sum(layout.state_nbytes(s.name) * len(wanted & set(layout.state_layers(s.name))) for s in layout.states)


class Pipeline:
    """One forward pass of one request; made by `pipeline`, entered once, by the thread that runs the forward.

    works: one per group sent so far, in the order of sending, each followed by the work of its state, if any. groups:
    the groups sent so far, global layer ids. swept: the layers that were sent when the body had ended. cancelled: the
    work of ``kv.cancel`` if the body raised, else None.
    """

    def __init__(
        self,
        sending: _Sending,
        held: tuple[int, ...],
        modules: Mapping[nn.Module, int],
        gates: Mapping[int, Any],
        groups: Sequence[Group],
        timer: PassTimer | None,
    ) -> None:
        """held: all layers of this rank; every one is sent. groups: those that are sent as soon as they have run.

        modules: the modules that get hooks; of layers in no group, for ``timer`` only. gates: layer -> event.
        """
        self._kv, self._operation, self._request = sending.kv, sending.operation, sending.request
        self._sending: _Sending | None = sending
        self._modules, self._gates = modules, gates
        self._plan = groups
        self._timer = timer
        self._held = held
        self._group_of = {layer: group for group in groups for layer in group}
        self._missing = {group: len(group) for group in groups}  # layers that have not run
        self._waiting = set(modules.values())  # layers whose hook was not called
        self._unsent = dict.fromkeys(held)  # in order
        self._thread: int | None = None
        self._handles: list[RemovableHandle] = []
        self._error: KVError | None = None
        self.works: list[KVWork] = []
        self.groups: list[Group] = []
        self.swept: Group = HeldLayers()
        self.cancelled: KVWork | None = None

    # ------------------------------------------------------------------ the context

    def __enter__(self) -> Pipeline:
        if self._thread is not None:
            raise ProtocolError(f"{self._operation}: entered twice; make a new one for each forward pass")
        self._thread = threading.get_ident()
        try:
            hook = _untraced_hook() if "torch._dynamo" in sys.modules else _hook
            for module, layer in self._modules.items():
                self._handles.append(module.register_forward_hook(functools.partial(hook, self, layer)))
            if self._gates:
                for group in self._plan:
                    self._send(group, all_of([self._gates[layer] for layer in group]))
        except BaseException:
            self._cancel()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._cancel()
            return
        try:
            if self._modules and self._no_hook_ran():
                log.warning("%s: no layer was called through its module, so all are sent at the end", self._operation)
            rest = HeldLayers(self._unsent)
            if rest:
                self._send(rest, None)
                self.swept = rest if self._error is None else HeldLayers()
        finally:
            self._close()

    def wait(self, timeout: float = 0.0) -> bool:
        """Blocks until everything sent so far is visible to the receivers and the source pages may be overwritten.

        timeout: seconds; 0 means the operations' own deadlines. Raises the first error of a send, and
        ``TransferTimeout`` when ``timeout`` runs out.
        """
        until = time.monotonic() + timeout
        for work in self.works:
            work.wait(max(until - time.monotonic(), 1e-9) if timeout > 0 else 0.0)
        if self._error is not None:
            raise fresh(self._error)
        return True

    def exception(self) -> KVError | None:
        """The first error that any send is known to have failed with."""
        failed = (error for work in self.works if (error := work.exception()) is not None)
        return next(failed, self._error)

    # ------------------------------------------------------------------ inside

    def ran(self, layer: int) -> None:
        """``layer`` has run. Called by its hook."""
        # The model's hooks are called by every thread that runs it, also for other requests.
        if self._sending is None or self._error is not None or threading.get_ident() != self._thread:
            return
        group = self._group_of.get(layer)
        if layer not in self._waiting:
            if group is None:
                return
            raise ProtocolError(
                f"{self._operation}: layer {layer} has run twice in one context, and may have been sent after the "
                "first time; use one context for each forward pass, for each chunk with its start"
            )
        self._waiting.remove(layer)
        if self._timer is not None:
            self._timer.layer_ran(is_last=not self._waiting)
        if group is not None:
            self._missing[group] -= 1
            if not self._missing[group]:
                self._send(group, None)

    def _send(self, group: Group, event: Any) -> None:
        if self._error is not None:
            return
        assert self._sending is not None
        try:
            for name, verb, nbytes_of in self._sending.calls(group):
                began = time.perf_counter()
                if profiler._is_profiler_enabled:
                    with profiler.record_function(f"torchkv::{name}[{_span(group)}]"):
                        work = verb(group, event)
                else:
                    work = verb(group, event)
                self.works.append(work)
                if self._timer is not None:
                    self._timer.sent(work, began, nbytes_of(group))
        except KVError as error:
            if self._sending.verbs.engine.gpu is not None and torch.cuda.is_current_stream_capturing():
                raise  # an error of the program, not a failure of this request
            self._error = error
            log.warning("%s: layers %s were not sent: %s", self._operation, _span(group), error)
            return
        self.groups.append(group)
        for layer in group:
            del self._unsent[layer]

    def _no_hook_ran(self) -> bool:
        """Whether no hook was called, although there is something to send."""
        assert self._sending is not None
        return len(self._waiting) == len(self._modules) and bool(self._sending.nbytes(self._held))

    def _cancel(self) -> None:
        self._close()
        self.cancelled = self._kv.cancel(self._request)

    def _close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._modules, self._gates, self._sending, self._timer = {}, {}, None, None


def _hook(pipelined: Pipeline, layer: int, _module: nn.Module, _args: Any, _output: Any) -> None:
    pipelined.ran(layer)


@functools.cache
def _untraced_hook() -> Callable[..., None]:
    """`_hook` for models with compiled layers: otherwise Dynamo would try to compile the hook and all that it calls."""
    disabled: Callable[..., None] = torch.compiler.disable(_hook)  # type: ignore[no-untyped-call]  # torch's
    return disabled


def _checked(
    kv: KVVerbs,
    verbs: Verbs,
    layout: KVLayout,
    request: str,
    pages: Pages,
    dst: Peers | None,
    start: int,
    origin: Origin,
    state_slot: StateSlot,
) -> _Sending:
    """The arguments of all verbs. Raises whatever the first verb would raise now."""
    request = arguments.as_request(request)
    operation = f"pipeline({request!r})"
    engine = verbs.engine
    if engine.gpu is not None:
        graph_gate.refuse_capture(operation, engine.gpu.index)
    start = arguments.as_count(start, operation=operation, name="start")
    from_prompt = arguments.as_origin(origin, operation=operation)
    dst = tuple(dst) if isinstance(dst, list) else dst
    # A copy of the page ids: all groups of layers get the same, even if the caller changes its own.
    if isinstance(verbs, GroupedVerbs):
        kept, targets, slots = verbs.check_send(request, dst, pages, start, from_prompt=from_prompt, slot=state_slot)
        return _Sending(kv, verbs, request, kept, dst, start, origin, slots, targets, layout)
    if not (engine.gpu is not None and isinstance(pages, torch.Tensor) and pages.is_cuda):
        pages = arguments.as_pages(pages, num_pages=engine.group_map.me.num_pages, operation=operation)
    slot = None if state_slot is None else verbs.checked_slot(operation, state_slot, layout)
    targets = engine.group_map.targets(dst, operation)
    with engine.lock:
        verbs.check_open(operation)
        engine.catch_up()
        if dst is None:
            targets = engine.sender.receivers(request, verbs.clock())
        for rank in targets:
            engine.sender.admit(request, rank, start, len(pages), from_prompt=from_prompt)
            if slot is not None:
                engine.sender.admit(request, rank, 0, 1, state=True)
        verbs.check_alive(targets, operation)
    return _Sending(kv, verbs, request, pages, dst, start, origin, slot, targets, layout)


def _group_size(
    sending: _Sending,
    order: list[int],
    tokens: int | None,
    group_size: int | None,
    policy: Policy | None,
    *,
    measures: bool,
) -> tuple[int, PassTimer | None]:
    """Layers per group, and the timer for a policy that wants to learn from this pass.

    order: the layers in the order in which they run. measures: whether there are hooks that can call the timer.
    """
    if tokens is None:
        tokens = sending.num_pages * sending.layout.page_size
    tokens = arguments.as_count(tokens, operation=sending.operation, name="tokens")
    if group_size is not None:
        return _checked_size(group_size, sending), None
    layer_nbytes = sending.nbytes(order) // max(1, len(order))
    if not sending.targets or not layer_nbytes:
        return len(order), None
    timer = None
    with _policy_lock:
        if policy is None:
            known = _learned.setdefault(sending.kv, {})
            if (policy := known.get(sending.targets)) is None:
                handed_over = HANDED_OVER if sending.verbs.engine.flows is None else 0.0
                policy = known[sending.targets] = Adaptive(Estimator(handed_over=handed_over))
        size = policy.group_size(tokens=tokens, num_layers=len(order), layer_nbytes=layer_nbytes)
        if policy.learns and measures and ANYBODY not in sending.targets:
            timer = PassTimer(tokens, len(order), sending.kv, sending.verbs.engine, sending.request, sending.targets)
            policy.learn(timer.measured)
    return _checked_size(size, sending, policy), timer


def _checked_size(size: int, sending: _Sending, policy: Policy | None = None) -> int:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        whose = "group_size" if policy is None else f"{policy!r} says group size"
        raise ProtocolError(f"{sending.operation}: {whose} {size!r}; it must be an int of at least 1")
    return size


def _span(group: Sequence[int]) -> str:
    return f"{group[0]}" if len(group) == 1 else f"{group[0]}..{group[-1]}"
