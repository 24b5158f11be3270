"""Times of prefills with and without pipelining, what follows from them, and the gates. Arithmetic only."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Gate", "PipelineResult", "Way", "median_error"]

LONG = 1024  # on GPUs, prompts of at least so many tokens must hide the transfer
SHORT = 256  # on GPUs, prompts of so many tokens must not become slower
CPU_TOKENS = 2048  # on a CPU, prompts of so many tokens must save half of the exposed transfer


def median_error(values: Sequence[float]) -> float:
    """The standard error of the median of n ``values``, without an assumption about their distribution.

    It is half the distance between the values that stand sqrt(n) / 2 ranks below and above the median, because
    sqrt(n) / 2 is the standard deviation of the number of values below the true median.
    """
    reach = 0.5 / math.sqrt(len(values))
    low, high = np.quantile(values, (0.5 - reach, 0.5 + reach))
    return float(high - low) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Seconds of each pass of one way of sending; all fields in the order of passes.

    prefill: from its start until the first token is known. exposed: from then until the receiver has everything in its
    pages. ttft: from the start of the prefill until the receiver has decoded the next token. waited: in the prefill,
    while another thread had its core; if the prefill's core is pinned, that thread belongs to another program.
    """

    prefill: tuple[float, ...]
    exposed: tuple[float, ...]
    ttft: tuple[float, ...]
    waited: tuple[float, ...]

    def median(self, name: str) -> float:
        """name: of a field."""
        values: tuple[float, ...] = getattr(self, name)
        return statistics.median(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """A requirement: ``value`` must be at most ``limit``, or with ``at_least`` at least that.

    error: the value's standard error, or None if it is unknown.
    """

    name: str
    value: float
    limit: float
    at_least: bool = False
    error: float | None = None

    @property
    def passed(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineResult:
    """Figures of prompts of one length. Times in seconds.

    tp: how many ranks prefill and how many decode, as "2:1". path: the paths that were chosen, joined by "/". lane: the
    lanes that carried most bytes, joined likewise. once, pipelined: passes that sent all layers at the end, and passes
    that sent groups of layers. group_sizes: layers of a group, for each pipelined pass, on the first prefilling rank.
    unlike_groups: passes in which the other prefilling rank had groups of another size. transfer, group_transfer: of
    all layers in one verb, and of the last group alone, with nothing else going on. round_trip: of control messages.
    wrong: bytes.
    """

    device: str
    tp: str
    tokens: int
    layers: int
    nbytes: int
    path: str
    lane: str
    once: Way
    pipelined: Way
    group_sizes: tuple[int, ...]
    unlike_groups: int
    transfer: float
    group_transfer: float
    round_trip: float
    wrong: int

    @property
    def group_size(self) -> int:
        return statistics.median_low(self.group_sizes)

    @property
    def ratio(self) -> float:
        """TTFT pipelined over TTFT sent once: the median over pairs of neighbouring passes."""
        return statistics.median(self._ratios)

    @property
    def _ratios(self) -> list[float]:
        return [one / other for one, other in zip(self.pipelined.ttft, self.once.ttft, strict=True)]

    @property
    def saved(self) -> float:
        """Seconds of TTFT that pipelining saves: the median over pairs of neighbouring passes."""
        return statistics.median(self._saved)

    @property
    def saved_part(self) -> float:
        """`saved`, over what sending once exposes."""
        return self.saved / self.once.median("exposed")

    @property
    def saved_undisturbed(self) -> float:
        """`saved_part`, with the time that the prefill waited for its core subtracted from each TTFT."""
        once, pipelined = (
            [t - w for t, w in zip(way.ttft, way.waited, strict=True)] for way in (self.once, self.pipelined)
        )
        saved = [one - other for one, other in zip(once, pipelined, strict=True)]
        return statistics.median(saved) / self.once.median("exposed")

    @property
    def disturbed(self) -> float:
        """The part of the prefill's time in which it waited for its core, on average."""
        waited = self.once.waited + self.pipelined.waited
        prefill = self.once.prefill + self.pipelined.prefill
        return sum(waited) / sum(prefill)

    @property
    def noise(self) -> float:
        """Seconds between the quartiles of the saved times; 0 with fewer than two pairs of passes."""
        if len(self._saved) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self._saved, n=4, method="inclusive")
        return high - low

    @property
    def _saved(self) -> list[float]:
        return [once - pipelined for once, pipelined in zip(self.once.ttft, self.pipelined.ttft, strict=True)]

    @property
    def exposed_limit(self) -> float:
        """How much may be exposed: 1.2 times the last group's transfer, and two control round trips."""
        return 1.2 * self.group_transfer + 2 * self.round_trip

    @property
    def hidden(self) -> float:
        """The part of ``transfer`` that is over when the prefill ends. Two control round trips count as no transfer."""
        exposed = max(0.0, self.pipelined.median("exposed") - 2 * self.round_trip)
        return max(0.0, 1.0 - exposed / self.transfer)

    @property
    def has_core(self) -> bool:
        """Whether the prefill has a core for itself. Without one, times on a CPU do not show what pipelining does."""
        return self.device == "cpu" and self.tp == "1:1"

    @property
    def gates(self) -> tuple[Gate, ...]:
        """The gates that apply to this device and this length of prompt."""
        if self.device == "cpu":
            if self.tokens != CPU_TOKENS or not self.has_core:
                return ()
            return (Gate(name="TTFT saved / exposed when sent once", value=self.saved_part, limit=0.5, at_least=True),)
        gates = []
        if self.tokens == SHORT:
            error = median_error(self._ratios)
            gates.append(Gate(name="TTFT pipelined / once", value=self.ratio, limit=1.02, error=error))
        if self.tokens >= LONG:
            exposed = self.pipelined.median("exposed")
            gates.append(
                Gate(name="exposed / (1.2 group + 2 round trips)", value=exposed / self.exposed_limit, limit=1)
            )
            if self.pipelined.median("prefill") >= self.transfer:
                gates.append(Gate(name="part of the transfer hidden", value=self.hidden, limit=0.95, at_least=True))
        return tuple(gates)

    @property
    def passed(self) -> bool:
        return self.wrong == 0 and all(gate.passed for gate in self.gates)
