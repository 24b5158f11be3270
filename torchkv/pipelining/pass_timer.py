"""Measures one forward pass for a policy: seconds per layer and per verb, and how long the link was busy."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, ref

import torch

from torchkv.errors import KVError
from torchkv.pipelining.group_size import ASSUMED_OVERHEAD, Measured

if TYPE_CHECKING:
    from torchkv.engine.engine import Engine
    from torchkv.engine.work import KVWork
    from torchkv.group.kv_verbs import KVVerbs

__all__ = ["PassTimer", "busy_spans"]

log = logging.getLogger(__name__)

# On GPUs: group -> destination ranks -> seconds per byte.
_links: WeakKeyDictionary[KVVerbs, dict[tuple[int, ...], float]] = WeakKeyDictionary()
LINK_SAMPLE = 1 << 30  # bytes: so many that the overhead hardly counts
# On a GPU the link is measured with nothing else running. Beside a prefill, the blocks of a copy wait for those of
# kernels that run for milliseconds: transfers of long prompts took five times as long (docs/measurements), and a group
# that is still under way when the prefill ends costs more than another verb.
SLOWDOWN = 6.0


class PassTimer:
    """Notes times while the pass runs; `measured` evaluates them when everything has ended.

    On a host, a transfer is under way from its verb on. On a GPU the host runs ahead of the layers: two timing events
    enclose them, and ``kv.explain`` measures the link, once for each group and destination.
    """

    def __init__(
        self, tokens: int, num_layers: int, kv: KVVerbs, engine: Engine, request: str, targets: tuple[int, ...]
    ) -> None:
        """num_layers: how many layers run. `layer_ran` must be called at least for the first and for the last."""
        self._tokens = tokens
        self._num_layers = num_layers
        self._kv = ref(kv)  # a policy outlives passes, and must not keep the group alive
        self._engine = engine
        self._request = request
        self._targets = targets
        self._gpu = None if engine.gpu is None else engine.gpu.index
        self._ran: list[float] = []  # when the first and the last layer had run, or were enqueued on the GPU
        self._events: list[torch.cuda.Event] = []  # recorded at these moments, on a GPU
        self._sends: list[tuple[KVWork, float, int]] = []  # of each verb: its work, when it was called, bytes
        self._verbs = 0  # how many of these were called before the last layer had run
        self._waited = 0  # how many of these (the first ones) had no grant yet
        self._launch = 0.0  # seconds that they took on the calling thread

    def layer_ran(self, *, is_last: bool) -> None:
        """A layer has run. is_last: the last one of the pass."""
        if self._ran and not is_last:
            return
        self._ran.append(time.perf_counter())
        if self._gpu is not None:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._gpu))
            self._events.append(event)
        if is_last:
            self._verbs = len(self._sends)

    def sent(self, work: KVWork, began: float, nbytes: int) -> None:
        """A verb that sends ``nbytes`` bytes was called at ``began``, and has just returned."""
        self._launch += time.perf_counter() - began
        if self._waited == len(self._sends) and not self._granted():
            self._waited += 1
        self._sends.append((work, began, nbytes))

    def measured(self) -> Measured | None:
        """How the pass went; None until its last transfer has ended."""
        if not all(work.is_completed() for work, _, _ in self._sends) or not all(e.query() for e in self._events):
            return None
        layer, enqueue = self._layer_seconds()
        return Measured(
            tokens=self._tokens,
            layer=layer,
            enqueue=enqueue,
            verbs=self._verbs,
            launch=self._launch / max(1, len(self._sends)),
            transfers=self._transfers() if self._gpu is None else self._link(),
            slowdown=1.0 if self._gpu is None else SLOWDOWN,
        )

    def _layer_seconds(self) -> tuple[float, float]:
        """Seconds to compute a layer, and to enqueue it on a GPU; zeros if the pass did not reach its last layer."""
        if len(self._ran) < 2:
            return 0.0, 0.0
        intervals = self._num_layers - 1
        seconds = (self._ran[1] - self._ran[0]) / intervals
        if not self._events:
            return seconds, 0.0
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3 / intervals, seconds

    def _granted(self) -> bool:
        """Whether transfers start at once. Without a grant, the wait for the receiver would look like a slow link."""
        sender = self._engine.sender
        try:
            with self._engine.lock:
                self._engine.catch_up()
                return all(sender.prefix_tokens(self._request, rank) is not None for rank in self._targets)
        except KVError:  # the request has failed; its works report the error
            return False

    def _transfers(self) -> tuple[tuple[int, int, float], ...]:
        """`Measured.transfers` of a host; nothing if a transfer failed."""
        if any(work.exception() is not None for work, _, _ in self._sends):
            return ()
        spans = [(began, began + work.seconds, nbytes) for work, began, nbytes in self._sends]
        # Transfers that waited for the grant share the link with those that began before they had ended.
        clear = max((ended for _, ended, _ in spans[: self._waited]), default=0.0)
        return tuple(busy_spans(span for span in spans[self._waited :] if span[0] > clear))

    def _link(self) -> tuple[tuple[int, int, float], ...]:
        """`Measured.transfers` of a GPU: one large transfer at the measured rate of the link."""
        kv = self._kv()
        if kv is None:
            return ()
        known = _links.setdefault(kv, {})
        if self._targets not in known:
            try:
                rates = [kv.explain(rank).limit_gbps for rank in self._targets]
            except KVError as error:
                log.warning("pipeline: no link rate to ranks %s: %s", list(self._targets), error)
                return ()
            known[self._targets] = max((1e-9 / rate for rate in rates if rate), default=0.0)
        return ((1, LINK_SAMPLE, ASSUMED_OVERHEAD + LINK_SAMPLE * known[self._targets]),)


def busy_spans(transfers: Iterable[tuple[float, float, int]]) -> list[tuple[int, int, float]]:
    """(transfers, bytes, seconds) of each span of time in which transfers were under way without a pause.

    transfers: (began, ended, bytes), in the order in which they began.
    """
    spans: list[tuple[int, int, float, float]] = []
    for began, ended, size in transfers:
        count, nbytes, first, last = spans.pop() if spans and began <= spans[-1][3] else (0, 0, began, ended)
        spans.append((count + 1, nbytes + size, first, max(last, ended)))
    return [(count, nbytes, last - first) for count, nbytes, first, last in spans]
