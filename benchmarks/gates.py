"""What passes with and without pipelining took, and whether that is good enough. Arithmetic only."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Gate", "PipelineResult", "Way", "median_error"]

LONG = 1024  # tokens from which on pipelining has to hide the transfer on GPUs
SHORT = 256  # tokens at which it must not be slower than sending once
CPU_TOKENS = 2048  # at which half of the transfer must be saved on a CPU


def median_error(values: Sequence[float]) -> float:
    """The standard error of the median of ``values``, whatever their distribution.

    Half the distance between those that stand sqrt(n) / 2 ranks below and above it: how many of n fall below the true
    median has that deviation.
    """
    reach = 0.5 / math.sqrt(len(values))
    low, high = np.quantile(values, (0.5 - reach, 0.5 + reach))
    return float(high - low) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Seconds of each pass, all in one order.

    prefill: until the first token is known. exposed: from then until the receiver has everything in its pages. ttft:
    from the start of the prefill until the receiver has decoded the next token. waited: during the prefill, for the
    core, while others had it. That is none of our doing where nothing else of ours may run there.
    """

    prefill: tuple[float, ...]
    exposed: tuple[float, ...]
    ttft: tuple[float, ...]
    waited: tuple[float, ...]

    def median(self, name: str) -> float:
        """name: of one of the fields."""
        values: tuple[float, ...] = getattr(self, name)
        return statistics.median(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """``value`` must be at most, or at least, ``limit``. error: the value's standard error, if it is known."""

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
    """Prompts of one length. Times in seconds.

    path: the one that was chosen; several, joined by "/", if it was not always the same. lane: what carried the most.
    tp: ranks that prefill, and ranks that decode, as "2:1". group_sizes: layers a group, of each pipelined pass, on the
    first rank that prefills. unlike_groups: passes in which the other had groups of another size. transfer: of all
    layers in one verb, group_transfer: of the group that goes last, both with nothing else to do.
    round_trip: of control messages.
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
        """TTFT, pipelined to sent once: median of the pairs of passes that stood beside each other."""
        return statistics.median(self._ratios)

    @property
    def _ratios(self) -> list[float]:
        return [one / other for one, other in zip(self.pipelined.ttft, self.once.ttft, strict=True)]

    @property
    def saved(self) -> float:
        """Seconds of TTFT, in the same way."""
        return statistics.median(self._saved)

    @property
    def saved_part(self) -> float:
        """The same, to what sending once exposes."""
        return self.saved / self.once.median("exposed")

    @property
    def saved_undisturbed(self) -> float:
        """The same of TTFT less what the prefill waited for its core."""
        once, pipelined = (
            [t - w for t, w in zip(way.ttft, way.waited, strict=True)] for way in (self.once, self.pipelined)
        )
        saved = [one - other for one, other in zip(once, pipelined, strict=True)]
        return statistics.median(saved) / self.once.median("exposed")

    @property
    def disturbed(self) -> float:
        """The part of its time that the prefill waited for its core, on average."""
        waited = self.once.waited + self.pipelined.waited
        prefill = self.once.prefill + self.pipelined.prefill
        return sum(waited) / sum(prefill)

    @property
    def noise(self) -> float:
        """Seconds between the quartiles of what was saved."""
        if len(self._saved) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self._saved, n=4, method="inclusive")
        return high - low

    @property
    def _saved(self) -> list[float]:
        return [once - pipelined for once, pipelined in zip(self.once.ttft, self.pipelined.ttft, strict=True)]

    @property
    def exposed_limit(self) -> float:
        """The last group's transfer and a fifth, and two control round trips."""
        return 1.2 * self.group_transfer + 2 * self.round_trip

    @property
    def hidden(self) -> float:
        """The part of ``transfer`` that is over when the prefill is; what control messages take is no transfer."""
        exposed = max(0.0, self.pipelined.median("exposed") - 2 * self.round_trip)
        return max(0.0, 1.0 - exposed / self.transfer)

    @property
    def has_core(self) -> bool:
        """Whether the prefill has a core for itself. If not, times on a CPU say nothing of pipelining."""
        return self.device == "cpu" and self.tp == "1:1"

    @property
    def gates(self) -> tuple[Gate, ...]:
        """Those that apply to this device and this length."""
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
