"""How many layers to send at a time: a policy that measures, and a published formula to compare it with.

Formulas and running averages only; `pipeline` brings the measurements.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from torchkv.errors import ProtocolError

__all__ = ["Adaptive", "Estimator", "Measured", "Policy", "Published", "Timing", "best_group_size", "total_seconds"]

# Below this part of the transfer time, a saving is not worth its risk: what was measured is never exact.
WORTHWHILE = 0.1
# So much slower than measured may the link turn out to be before a size is a bad choice: without this, one layer's
# computation would have to hide all the others' transfer to the last microsecond.
SLACK = 1.25
# Until there are measurements: the word to the progress thread, the copy's start, the flush and the attestation.
ASSUMED_OVERHEAD = 100e-6
ASSUMED_LAUNCH = 20e-6
# Of each verb, besides: so long the progress thread has the GIL for it (docs/measurements, 2026-11-22), which a thread
# that enqueues layers notices, and one that computes outside of Python does not.
HANDED_OVER = 0.7e-3
# A thread that enqueues layers so nearly as slowly as the GPU computes them is what holds up the GPU.
HOLDS_UP = 0.8
# The weight of what was known against one new measurement.
MEMORY = 0.8
# So many of the last passes are remembered, without verbs beside computation and with them. All of the latter must say
# that verbs are dear: some that something else made slow are no reason to send once.
REMEMBERED = 5
# By so much does each pass without verbs bring that down, so that what was once too dear is tried again one day.
LONG_MEMORY = 0.98
MAX_UNREAD = 16
LOOKS = 8  # one of so many passes is measured where sending once is clearly best


class Policy(Protocol):
    """What decides the size of the layer groups of one forward pass."""

    @property
    def learns(self) -> bool:
        """Whether `learn` wants to be called of the pass last asked about: measuring costs a little."""

    def group_size(self, *, tokens: int, num_layers: int, layer_nbytes: int) -> int:
        """Layers a group, at least 1; ``num_layers`` or more sends once, behind the last layer.

        tokens: of the forward pass. layer_nbytes: bytes that the request sends of each layer.
        """

    def learn(self, measure: Callable[[], Measured | None]) -> None:
        """``measure`` tells how a pass went; None while that is not known yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What one pass costs, in seconds.

    layer: to compute one layer. transfer: to move one layer's bytes. overhead: of each transfer, beside its bytes.
    launch: of each verb, which prolongs the computation. drag: by which moving one layer's bytes prolongs it, while it
    goes on beside that. slowdown: how many times as long the bytes of a transfer take beside computation. enqueue: one
    layer, of a thread that lets a GPU compute; 0 if it computes itself.
    """

    layer: float
    transfer: float
    overhead: float = ASSUMED_OVERHEAD
    launch: float = ASSUMED_LAUNCH
    drag: float = 0.0
    slowdown: float = 1.0
    enqueue: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """How one pass went. Zeros, and an empty list, stand for what could not be measured.

    layer: seconds to compute one layer at ``tokens`` tokens. enqueue: seconds a layer of the calling thread, if it lets
    a GPU compute. transfers: (number of transfers, bytes, seconds) of spans of time in which the link was busy. launch:
    seconds of one verb on the calling thread. verbs: how many were called before the last of these layers was computed.
    slowdown: of transfers beside computation, against ``transfers``.
    """

    tokens: int
    layer: float = 0.0
    enqueue: float = 0.0
    transfers: tuple[tuple[int, int, float], ...] = ()
    launch: float = 0.0
    verbs: int = 0
    slowdown: float = 1.0


def total_seconds(size: int, num_layers: int, timing: Timing) -> float:
    """From the start of the first layer until all bytes are visible, with groups of ``size`` layers.

    Groups are computed one after the other and transferred one after the other, each once it has been computed; the
    last one has what is left over.
    """
    groups = -(-num_layers // size)
    last = num_layers - (groups - 1) * size
    transfer = timing.overhead + size * timing.transfer * timing.slowdown
    over = 0.0
    # What computes, and the thread that lets it: a group goes when both have done with it.
    for layer, launch, drag in _sides(timing):
        first = size * layer + launch
        compute = first + size * drag  # of a later group, beside the transfer of the one before
        over = max(over, num_layers * layer + groups * launch + (groups - 1) * size * drag)
        if groups > 1:
            over = max(over, first + (groups - 2) * max(compute, transfer) + transfer)
    return over + timing.overhead + last * timing.transfer


def _sides(timing: Timing) -> list[tuple[float, float, float]]:
    """Seconds of a layer, a verb, and drag: of what computes, and of a thread that lets a GPU compute."""
    sides = [(timing.layer, timing.launch, timing.drag)]
    if timing.enqueue:
        sides.append((timing.enqueue, timing.launch + HANDED_OVER, 0.0))
    return sides


def best_group_size(num_layers: int, timing: Timing) -> int:
    """The size with the least `total_seconds`, or ``num_layers`` where that saves too little against sending once."""
    once = total_seconds(num_layers, num_layers, timing)
    exposed = timing.overhead + num_layers * timing.transfer
    enough = once - WORTHWHILE * exposed
    # What no size can beat. Short prompts get no further, and should: they would notice the time that it takes.
    least = max(num_layers * layer + 2 * launch for layer, launch, _ in _sides(timing))
    if least + timing.overhead >= enough:
        return num_layers
    late = replace(timing, transfer=SLACK * timing.transfer, overhead=SLACK * timing.overhead)
    # The largest of those that are equally good: it takes the fewest verbs.
    best = min(range(num_layers, 0, -1), key=lambda size: total_seconds(size, num_layers, late))
    return best if total_seconds(best, num_layers, timing) < enough else num_layers


class _Beside(NamedTuple):
    """A pass with verbs beside its layers. weight: falls as passes without verbs go by."""

    tokens: int
    layer: float
    weight: float = 1.0


class _Recent:
    """The last passes of about the same length. passes: (tokens, seconds a layer)."""

    def __init__(self) -> None:
        self.passes: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)

    @property
    def tokens(self) -> int:
        return self._middle()[0]

    def layer(self, tokens: int) -> float:
        """Seconds that a layer takes at ``tokens`` tokens, in proportion to the pass in the middle."""
        known, seconds = self._middle()
        return seconds * tokens / known

    def _middle(self) -> tuple[int, float]:
        inside = sorted(self.passes, key=lambda one: one[1] / one[0])
        return inside[(len(inside) - 1) // 2]


class Estimator:
    """Running averages of what passes have cost. Not thread-safe. observed: how many passes."""

    def __init__(self) -> None:
        self.observed = 0
        self._layers: dict[int, _Recent] = {}  # by bit length of tokens
        self._call = ASSUMED_LAUNCH  # of a verb, on the calling thread
        self._enqueued: deque[float] = deque(maxlen=REMEMBERED)  # a layer, whatever its tokens
        self._beside: deque[_Beside] = deque(maxlen=REMEMBERED)
        self._slowdown = 1.0
        self._counts = 0.0  # decayed sums over transfers, for the least squares of seconds = a * count + b * bytes
        self._counts_counts = self._counts_bytes = self._bytes_bytes = 0.0
        self._counts_seconds = self._bytes_seconds = 0.0

    def observe(self, measured: Measured) -> None:
        """Takes one pass into account."""
        self.observed += 1
        if measured.tokens > 0 and measured.layer > 0:
            self._observe_layers(measured)
        transfers = [one for one in measured.transfers if one[0] > 0 and one[1] > 0 and one[2] > 0]
        if transfers:
            self._forget()
            self._slowdown = measured.slowdown
        for count, nbytes, seconds in transfers:
            self._counts += 1
            self._counts_counts += count * count
            self._counts_bytes += count * nbytes
            self._bytes_bytes += nbytes * nbytes
            self._counts_seconds += count * seconds
            self._bytes_seconds += nbytes * seconds

    def _observe_layers(self, measured: Measured) -> None:
        """Layer time is that of passes without verbs, unless those with verbs are faster still."""
        if measured.launch:
            self._call = _blend(self._call, measured.launch)
        if measured.enqueue:
            self._enqueued.append(measured.enqueue)
        # What verbs cost where the calling thread holds up the GPU is reckoned otherwise; it is not for their bytes.
        held_up = self._enqueue() >= HOLDS_UP * measured.layer
        if measured.verbs and not held_up:
            self._beside.append(_Beside(measured.tokens, measured.layer))
        elif not measured.verbs:
            faded = [one._replace(weight=LONG_MEMORY * one.weight) for one in self._beside]
            self._beside = deque(faded, maxlen=REMEMBERED)
        recent = self._layers.setdefault(measured.tokens.bit_length(), _Recent())
        if not measured.verbs or not recent.passes or measured.layer < recent.layer(measured.tokens):
            recent.passes.append((measured.tokens, measured.layer))

    def _enqueue(self) -> float:
        """Seconds a layer of the thread that lets a GPU compute: the least, since a full queue makes it wait."""
        return min(self._enqueued, default=0.0)

    def _drag(self, tokens: int) -> float:
        """Seconds by which moving a layer's bytes prolongs the computation; in proportion to them, as measured.

        Against what layers take without verbs by now: where everything has become slower, verbs are not to blame.
        """
        extra = [0.0] * (REMEMBERED - len(self._beside))
        for one in self._beside:
            alone = self._layers[one.tokens.bit_length()].layer(one.tokens)
            extra.append(one.weight * (one.layer - alone) * tokens / one.tokens)
        return max(0.0, min(extra))

    def knows(self, tokens: int) -> bool:
        """Whether enough passes of about this length are remembered."""
        recent = self._layers.get(tokens.bit_length())
        return recent is not None and len(recent.passes) == REMEMBERED

    def timing(self, *, tokens: int, layer_nbytes: int) -> Timing | None:
        """What a pass of ``tokens`` tokens would cost; None as long as nothing is known of layers or of the link."""
        if not self._layers or not self._counts or tokens < 1:
            return None
        near = min(self._layers.values(), key=lambda known: max(known.tokens / tokens, tokens / known.tokens))
        overhead, byte = self._link()
        # Proportional to tokens: below what longer and shorter prompts really take, so hiding is not overestimated.
        return Timing(
            layer=near.layer(tokens),
            transfer=byte * layer_nbytes,
            overhead=overhead,
            launch=self._call,
            drag=self._drag(tokens),
            slowdown=self._slowdown,
            enqueue=self._enqueue(),
        )

    def _link(self) -> tuple[float, float]:
        """Seconds of each transfer, and of each byte."""
        determinant = self._counts_counts * self._bytes_bytes - self._counts_bytes**2
        if determinant > 1e-3 * self._counts_counts * self._bytes_bytes:
            overhead = self._counts_seconds * self._bytes_bytes - self._bytes_seconds * self._counts_bytes
            byte = self._bytes_seconds * self._counts_counts - self._counts_seconds * self._counts_bytes
            if overhead >= 0 and byte >= 0:
                return overhead / determinant, byte / determinant
        # All alike: which part is overhead does not show.
        seconds = self._bytes_seconds - ASSUMED_OVERHEAD * self._counts_bytes
        if seconds > 0:
            return ASSUMED_OVERHEAD, seconds / self._bytes_bytes
        return self._counts_seconds / self._counts_counts, 0.0

    def _forget(self) -> None:
        self._counts *= MEMORY
        self._counts_counts *= MEMORY
        self._counts_bytes *= MEMORY
        self._bytes_bytes *= MEMORY
        self._counts_seconds *= MEMORY
        self._bytes_seconds *= MEMORY


def _blend(known: float, new: float) -> float:
    return MEMORY * known + (1 - MEMORY) * new


class Adaptive:
    """Groups as the measured layer time and link rate suggest; the first pass is sent once, and measured.

    Never slower than sending once, as far as the measurements hold. Not thread-safe; `pipeline` serialises.
    """

    learns = True  # not of each pass that is sent once anyway: short prompts would notice that, too

    def __init__(self, estimator: Estimator | None = None) -> None:
        """estimator: what is known already."""
        self.estimator = Estimator() if estimator is None else estimator
        self._unread: deque[Callable[[], Measured | None]] = deque(maxlen=MAX_UNREAD)
        self._question: tuple[int, int, int, int] | None = None  # the last one, and what was known then
        self._answer = 0
        self._is_clear = False  # whether nothing but sending once was in question
        self._clear = 0  # passes in a row of which that was so

    def learn(self, measure: Callable[[], Measured | None]) -> None:
        self._unread.append(measure)

    def group_size(self, *, tokens: int, num_layers: int, layer_nbytes: int) -> int:
        self._read()
        question = (tokens, num_layers, layer_nbytes, self.estimator.observed)
        if question != self._question:
            self._question = question
            timing = self.estimator.timing(tokens=tokens, layer_nbytes=layer_nbytes)
            self._answer = num_layers if timing is None else best_group_size(num_layers, timing)
            known = timing is not None and not timing.drag and self.estimator.knows(tokens)
            self._is_clear = known and self._answer == num_layers
        self._clear = self._clear + 1 if self._is_clear else 0
        self.learns = self._clear % LOOKS == 0
        return self._answer

    def _read(self) -> None:
        """Takes what has been measured by now into account."""
        for _ in range(len(self._unread)):
            measure = self._unread.popleft()
            if (measured := measure()) is None:
                self._unread.append(measure)
            else:
                self.estimator.observe(measured)


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
