"""How many layers to send at a time: `Adaptive` predicts the best number, `Published` is a formula to compare with.

Arithmetic only: `pass_timer` measures the passes, `context` sends the groups.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from torchkv.errors import ProtocolError

__all__ = ["Adaptive", "Estimator", "Measured", "Policy", "Published", "Timing", "best_group_size", "total_seconds"]

# The least saving that is worth its risk, as a part of the transfer time: measurements are never exact.
WORTHWHILE = 0.1
# Sizes are compared for a link this much slower than measured: else the best one leaves no time to spare between the
# end of the last layer's computation and the end of the other layers' transfer.
SLACK = 1.25
# Seconds, until they are measured: of a transfer (wake the progress thread, start the copy, flush, attest); of a verb.
ASSUMED_OVERHEAD, ASSUMED_LAUNCH = 100e-6, 20e-6
# Seconds that the progress thread holds the GIL for each verb where it serves requests, not the resident loop
# (docs/measurements, 2026-11-22). They delay a thread that enqueues layers on a GPU; a thread that computes outside of
# Python does not notice.
HANDED_OVER = 0.7e-3
HOLDS_UP = 0.8  # a thread that needs this part of a layer's GPU time to enqueue the layer holds up the GPU
MEMORY = 0.8  # weight of what was known, against one new measurement
# Passes remembered, of those with verbs beside computation and of those without. Verbs count as costly only if all
# remembered passes with verbs were slower: a few that something else slowed down are no reason to send once.
REMEMBERED = 5
LONG_MEMORY = 0.98  # each pass without verbs lowers that cost by this factor, so that pipelining is tried again one day
MAX_UNREAD = 16
LOOKS = 8  # where sending once is clearly best, one of this many passes is measured


class Policy(Protocol):
    """Decides the size of the layer groups of one forward pass."""

    @property
    def learns(self) -> bool:
        """Whether the pass last asked about is to be measured for `learn`, which costs a little."""

    def group_size(self, *, tokens: int, num_layers: int, layer_nbytes: int) -> int:
        """Layers per group, at least 1. ``num_layers`` or more sends everything once, after the last layer.

        tokens: of the forward pass. layer_nbytes: bytes that the request sends per layer.
        """

    def learn(self, measure: Callable[[], Measured | None]) -> None:
        """Takes note of a pass. ``measure`` returns None until the pass and its transfers have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What one pass costs, in seconds.

    layer: to compute one layer. transfer: to move one layer's bytes. overhead: per transfer, besides its bytes.
    launch: per verb, added to the computation. drag: added to it for each layer whose bytes move meanwhile. slowdown:
    factor by which bytes take longer beside computation. enqueue: to enqueue one layer on a GPU; 0 without one.
    handed_over: for which each verb delays the thread that does that, besides ``launch``.
    """

    layer: float
    transfer: float
    overhead: float = ASSUMED_OVERHEAD
    launch: float = ASSUMED_LAUNCH
    drag: float = 0.0
    slowdown: float = 1.0
    enqueue: float = 0.0
    handed_over: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """How one pass went. Zeros, and an empty tuple, stand for what could not be measured.

    layer: seconds to compute one layer of ``tokens`` tokens. enqueue, launch, slowdown: see `Timing`. transfers:
    (number of transfers, bytes, seconds) of each span of time in which the link was busy. verbs: how many were called
    before the last layer had run.
    """

    tokens: int
    layer: float = 0.0
    enqueue: float = 0.0
    transfers: tuple[tuple[int, int, float], ...] = ()
    launch: float = 0.0
    verbs: int = 0
    slowdown: float = 1.0


def total_seconds(size: int, num_layers: int, timing: Timing) -> float:
    """Seconds from the start of the first layer until all bytes are visible, with groups of ``size`` layers.

    Groups are computed one after the other, and transferred one after the other once they are computed. The last group
    has the layers that are left over.
    """
    groups = -(-num_layers // size)
    last = num_layers - (groups - 1) * size
    transfer = timing.overhead + size * timing.transfer * timing.slowdown
    over = 0.0
    # A group can be transferred once both the GPU (or CPU) and the enqueuing thread are done with it.
    for layer, launch, drag in _workers(timing):
        first = size * layer + launch
        compute = first + size * drag  # of a later group, beside the transfer of the one before
        over = max(over, num_layers * layer + groups * launch + (groups - 1) * size * drag)
        if groups > 1:
            over = max(over, first + (groups - 2) * max(compute, transfer) + transfer)
    return over + timing.overhead + last * timing.transfer


def _workers(timing: Timing) -> list[tuple[float, float, float]]:
    """(seconds per layer, per verb, drag) of what computes the layers, and of a thread that enqueues them on a GPU."""
    workers = [(timing.layer, timing.launch, timing.drag)]
    if timing.enqueue:
        workers.append((timing.enqueue, timing.launch + timing.handed_over, 0.0))
    return workers


def best_group_size(num_layers: int, timing: Timing) -> int:
    """The size with the least `total_seconds`, or ``num_layers`` if that saves too little against sending once."""
    once = total_seconds(num_layers, num_layers, timing)
    enough = once - WORTHWHILE * (timing.overhead + num_layers * timing.transfer)
    # No size beats this bound. It spares short prompts the search, which would be noticeable there.
    bound = max(num_layers * layer + 2 * launch for layer, launch, _ in _workers(timing)) + timing.overhead
    if bound >= enough:
        return num_layers
    late = replace(timing, transfer=SLACK * timing.transfer, overhead=SLACK * timing.overhead)
    # Of equally good sizes the largest: it takes the fewest verbs.
    best = min(range(num_layers, 0, -1), key=lambda size: total_seconds(size, num_layers, late))
    return best if total_seconds(best, num_layers, timing) < enough else num_layers


_Passes = deque[tuple[int, float]]  # (tokens, seconds per layer) of passes of about the same length


def _median(passes: _Passes) -> tuple[int, float]:
    """The pass with the median time per token."""
    return sorted(passes, key=lambda one: one[1] / one[0])[(len(passes) - 1) // 2]


def _layer_seconds(passes: _Passes, tokens: int) -> float:
    """Seconds per layer of ``tokens`` tokens, in proportion to the median pass."""
    known, seconds = _median(passes)
    return seconds * tokens / known


class Estimator:
    """Running averages of what passes cost. Not thread-safe. observed: the number of passes.

    handed_over: see `Timing`.
    """

    def __init__(self, *, handed_over: float = 0.0) -> None:
        self.observed = 0
        self._handed_over = handed_over
        self._layers: dict[int, _Passes] = {}  # by bit length of tokens: passes without verbs, or faster than those
        self._alone = 0  # how many passes had no verbs
        self._beside: deque[tuple[int, float, int]] = deque(maxlen=REMEMBERED)  # others: as _Passes, and _alone then
        self._launch = ASSUMED_LAUNCH
        self._enqueued: deque[float] = deque(maxlen=REMEMBERED)  # seconds per layer, whatever the tokens
        self._slowdown = 1.0
        # Decayed sums over spans, for the least squares of seconds = overhead * transfers + byte * bytes; see `_link`.
        self._sums = [0.0] * 5

    def observe(self, measured: Measured) -> None:
        """Takes one pass into account."""
        self.observed += 1
        if measured.tokens > 0 and measured.layer > 0:
            self._observe_layers(measured)
        if transfers := [one for one in measured.transfers if min(one) > 0]:
            self._slowdown = measured.slowdown
            self._sums = [MEMORY * known for known in self._sums]
            for count, nbytes, seconds in transfers:
                products = count * count, count * nbytes, nbytes * nbytes, count * seconds, nbytes * seconds
                self._sums = [known + new for known, new in zip(self._sums, products, strict=True)]

    def _observe_layers(self, measured: Measured) -> None:
        tokens, layer = measured.tokens, measured.layer
        if measured.launch:
            self._launch = MEMORY * self._launch + (1 - MEMORY) * measured.launch
        if measured.enqueue:
            self._enqueued.append(measured.enqueue)
        if not measured.verbs:
            self._alone += 1
        elif self._enqueue() < HOLDS_UP * layer:  # else verbs delay the thread, which ``launch`` and the next cover
            self._beside.append((tokens, layer, self._alone))
        passes = self._layers.setdefault(tokens.bit_length(), deque(maxlen=REMEMBERED))
        if not measured.verbs or not passes or layer < _layer_seconds(passes, tokens):
            passes.append((tokens, layer))

    def _enqueue(self) -> float:
        """The least, because a full queue makes the thread wait for the GPU."""
        return min(self._enqueued, default=0.0)

    def _drag(self, tokens: int) -> float:
        """In proportion to the bytes, hence to tokens.

        Compared with what layers take without verbs by now: if everything has become slower, it is not due to verbs.
        """
        if len(self._beside) < REMEMBERED:
            return 0.0
        extra = []
        for known, layer, then in self._beside:
            alone = _layer_seconds(self._layers[known.bit_length()], known)
            extra.append(LONG_MEMORY ** (self._alone - then) * (layer - alone) * tokens / known)
        return max(0.0, min(extra))

    def knows(self, tokens: int) -> bool:
        """Whether enough passes of about this length are remembered."""
        return len(self._layers.get(tokens.bit_length(), ())) == REMEMBERED

    def timing(self, *, tokens: int, layer_nbytes: int) -> Timing | None:
        """What a pass of ``tokens`` tokens will cost; None while nothing is known of layers or of the link."""
        if not self._layers or not any(self._sums) or tokens < 1:
            return None
        near = min(
            self._layers.values(), key=lambda passes: max(_median(passes)[0] / tokens, tokens / _median(passes)[0])
        )
        overhead, byte = self._link()
        return Timing(
            layer=_layer_seconds(near, tokens),  # less than shorter and longer prompts really take: the safe side
            transfer=byte * layer_nbytes,
            overhead=overhead,
            launch=self._launch,
            drag=self._drag(tokens),
            slowdown=self._slowdown,
            enqueue=self._enqueue(),
            handed_over=self._handed_over,
        )

    def _link(self) -> tuple[float, float]:
        """Seconds per transfer, and per byte."""
        counts, both, nbytes, count_seconds, byte_seconds = self._sums
        determinant = counts * nbytes - both**2
        if determinant > 1e-3 * counts * nbytes:
            overhead = count_seconds * nbytes - byte_seconds * both
            byte = byte_seconds * counts - count_seconds * both
            if overhead >= 0 and byte >= 0:
                return overhead / determinant, byte / determinant
        # All transfers are alike, so the overhead cannot be told from the bytes.
        seconds = byte_seconds - ASSUMED_OVERHEAD * both
        return (ASSUMED_OVERHEAD, seconds / nbytes) if seconds > 0 else (count_seconds / counts, 0.0)


class Adaptive:
    """Chooses the best size for the measured layer time and link rate. The first pass is sent once, and measured.

    Never slower than sending once, as far as the measurements hold. Not thread-safe: `context` serialises the calls.
    """

    def __init__(self, estimator: Estimator | None = None) -> None:
        """estimator: what is known already."""
        self.learns = True
        self.estimator = Estimator() if estimator is None else estimator
        self._unread: deque[Callable[[], Measured | None]] = deque(maxlen=MAX_UNREAD)
        self._question = (0, 0, 0, -1)  # the last one, and how many passes were known then
        self._answer = (0, False)  # the size, and whether nothing but sending once was in question
        self._clear = 0  # passes in a row of which that was so

    def learn(self, measure: Callable[[], Measured | None]) -> None:
        self._unread.append(measure)

    def group_size(self, *, tokens: int, num_layers: int, layer_nbytes: int) -> int:
        for _ in range(len(self._unread)):
            measure = self._unread.popleft()
            if (measured := measure()) is None:
                self._unread.append(measure)
            else:
                self.estimator.observe(measured)
        question = (tokens, num_layers, layer_nbytes, self.estimator.observed)
        if question != self._question:
            self._question = question
            timing = self.estimator.timing(tokens=tokens, layer_nbytes=layer_nbytes)
            size = num_layers if timing is None else best_group_size(num_layers, timing)
            known = timing is not None and not timing.drag and self.estimator.knows(tokens)
            self._answer = size, known and size == num_layers
        size, is_clear = self._answer
        self._clear = self._clear + 1 if is_clear else 0
        self.learns = self._clear % LOOKS == 0  # short prompts would notice the cost of measuring every pass
        return size


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published formula (SGLang's layer-wise transfer): fewer, larger groups for longer prompts.

    Prompts below ``min_tokens``, and models of at most 4 layers, are sent once. From there to ``saturation`` times
    ``min_tokens`` the number of groups falls from ``max_iters`` to ``min_iters``. Raises ``ProtocolError``.
    """

    min_tokens: int = 3072
    max_iters: int = 10
    min_iters: int = 4
    saturation: float = 3.0

    learns = False

    def __post_init__(self) -> None:
        if self.min_tokens < 0 or not 1 <= self.min_iters <= self.max_iters:
            raise ProtocolError(f"{self}: needs min_tokens >= 0 and 1 <= min_iters <= max_iters")

    def learn(self, measure: Callable[[], Measured | None]) -> None:
        """Nothing to learn."""

    def group_size(self, *, tokens: int, num_layers: int, layer_nbytes: int) -> int:
        if num_layers <= 4 or tokens < max(1, self.min_tokens):
            return max(1, num_layers)
        span = self.min_tokens * (max(self.saturation, 1.01) - 1)
        done = min((tokens - self.min_tokens) / span, 1.0) if span else 1.0
        groups = round(self.max_iters - done * (self.max_iters - self.min_iters))
        return max(1, num_layers // groups)
