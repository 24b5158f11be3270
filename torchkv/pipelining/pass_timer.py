"""Measures one forward pass, for policies that learn: layer time, verbs, and how long the link was busy."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

import torch

from torchkv.engine import Engine
from torchkv.errors import KVError
from torchkv.groupsize import ASSUMED_OVERHEAD, Measured
from torchkv.process_group import KVProcessGroup
from torchkv.work import KVWork

__all__ = ["PassClock", "busy_spans"]

log = logging.getLogger(__name__)

# GPUs: seconds a byte to some ranks.
_limits: WeakKeyDictionary[KVProcessGroup, dict[tuple[int, ...], float]] = WeakKeyDictionary()
LINK_SAMPLE = 1 << 30  # bytes; so many that the overhead hardly counts
# On a GPU the rate is measured with nothing else running. Beside a prefill the blocks of a copy wait for those of
# kernels that run for milliseconds: transfers of long prompts took five times as long (docs/measurements), and a group
# that is still under way when the prefill ends costs more than another verb.
SLOWDOWN = 6.0


@dataclass(frozen=True, slots=True)
class _Send:
    work: KVWork
    began: float
    returned: float
    nbytes: int
    is_granted: bool


class PassClock:
    """Takes times as the pass goes on; `measured` puts them together when all is over.

    On a host a transfer is under way from its verb on. On a GPU the host runs ahead of the layers: two timing events
    stand around them, and the link's rate is asked of ``kv.explain``, once for each group and destination.
    """

    def __init__(
        self,
        tokens: int,
        num_layers: int,
        kv: KVProcessGroup,
        engine: Engine,
        request: str,
        targets: tuple[int, ...],
    ) -> None:
        """num_layers: of which the first and the last at least are told of."""
        self._tokens = tokens
        self._num_layers = num_layers
        self._kv = ref(kv)  # what is learned of a group must not keep it alive
        self._engine = engine
        self._request = request
        self._targets = targets
        self._gpu = None if engine.device is None else engine.device.index
        self._verbs = 0  # called before the last layer had run
        self._ran: list[float] = []  # when the first layer and the last one had run, or were enqueued
        self._events: list[torch.cuda.Event] = []  # GPUs: the same there
        self._sends: list[_Send] = []

    def layer_ran(self, *, is_last: bool) -> None:
        """A layer has run. is_last: of those that will."""
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
        """A verb for ``nbytes`` bytes of this rank's layers was called at ``began``, and has just returned."""
        returned = time.perf_counter()
        known = bool(self._sends) and self._sends[-1].is_granted
        self._sends.append(_Send(work, began, returned, nbytes, known or self._granted()))

    def measured(self) -> Measured | None:
        """How the pass went; None until its last transfer is over. Failed ones count for nothing."""
        if not all(send.work.is_completed() for send in self._sends):
            return None
        if not all(event.query() for event in self._events):
            return None
        layer, enqueue = self._seconds()
        launches = [send.returned - send.began for send in self._sends]
        return Measured(
            tokens=self._tokens,
            layer=layer,
            enqueue=enqueue,
            verbs=self._verbs,
            launch=sum(launches) / len(launches) if launches else 0.0,
            transfers=self._transfers() if self._gpu is None else self._link(),
            slowdown=1.0 if self._gpu is None else SLOWDOWN,
        )

    def _seconds(self) -> tuple[float, float]:
        """A layer's: to compute it, and of the calling thread, if it lets a GPU do that. Zeros if it did not end."""
        if len(self._ran) < 2:
            return 0.0, 0.0
        first, last = self._ran
        seconds = (last - first) / (self._num_layers - 1)
        if self._gpu is None:
            return seconds, 0.0
        begun, ended = self._events
        return float(begun.elapsed_time(ended)) / 1e3 / (self._num_layers - 1), seconds

    def _granted(self) -> bool:
        """Whether transfers start at once: else the wait for the receiver would pass for a slow link."""
        sender = self._engine.sender
        try:
            with self._engine.lock:
                return all(sender.prefix_tokens(self._request, rank) is not None for rank in self._targets)
        except KVError:  # the request has failed already; its works tell
            return False

    def _transfers(self) -> tuple[tuple[int, int, float], ...]:
        if any(send.work.exception() is not None for send in self._sends):
            return ()
        granted = [send for send in self._sends if send.is_granted]
        # What waited for the grant shares the link with what came after it.
        waited = [send.began + send.work.seconds for send in self._sends if not send.is_granted]
        clear = max(waited, default=0.0)
        return tuple(
            busy_spans(
                (send.began, send.began + send.work.seconds, send.nbytes) for send in granted if send.began > clear
            )
        )

    def _link(self) -> tuple[tuple[int, int, float], ...]:
        kv = self._kv()
        if kv is None:
            return ()
        known = _limits.setdefault(kv, {})
        if self._targets not in known:
            try:
                rates = [kv.explain(rank).limit_gbps for rank in self._targets]
            except KVError as error:
                log.warning("pipeline: no link rate to ranks %s: %s", list(self._targets), error)
                return ()
            known[self._targets] = max((1e-9 / rate for rate in rates if rate), default=0.0)
        return ((1, LINK_SAMPLE, ASSUMED_OVERHEAD + LINK_SAMPLE * known[self._targets]),)


def busy_spans(transfers: Iterator[tuple[float, float, int]]) -> Iterator[tuple[int, int, float]]:
    """(transfers, bytes, seconds) of each span of time in which some of them were under way without a pause.

    transfers: (began, ended, bytes), in the order of their beginnings.
    """
    count, nbytes, first, last = 0, 0, 0.0, 0.0
    for began, ended, size in transfers:
        if count and began > last:
            yield count, nbytes, last - first
            count, nbytes = 0, 0
        if not count:
            first, last = began, ended
        count, nbytes, last = count + 1, nbytes + size, max(last, ended)
    if count:
        yield count, nbytes, last - first
