"""What a run has measured, as a file, and what two runs say about each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from torchkv.bench.rivals.cases import GATES, Gate
from torchkv.bench.rivals.intervals import Interval, median_interval

__all__ = ["CaseResult", "Change", "Judged", "RivalResult", "Run", "changes", "judged", "load", "save"]

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RivalResult:
    """One rival in one case. seconds: of each counted round, in order. wrong: bytes, over all rounds.

    failed: why it has no seconds, or None.
    """

    seconds: list[float] = field(default_factory=list)
    wrong: int = 0
    way: str = ""
    failed: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """nbytes: of a request. others: how many cores were busy with something else meanwhile. rivals: by name."""

    name: str
    nbytes: int
    others: float
    rivals: dict[str, RivalResult]

    def rate(self, rival: str) -> Interval:
        """In 1e9 bytes/s."""
        return median_interval(self.rivals[rival].seconds).inverse(self.nbytes / 1e9)

    def ratio(self, rival: str, to: str) -> Interval:
        """The rival's rate as a multiple of that of ``to``: of the ratios within each round."""
        pairs = zip(self.rivals[to].seconds, self.rivals[rival].seconds, strict=True)
        return median_interval([base / own for base, own in pairs])

    def measured(self, rival: str) -> bool:
        return rival in self.rivals and self.rivals[rival].failed is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """versions: of packages that took part. load: the machine's load averages of a minute, before and after.

    skipped: why rivals were left out, by name.
    """

    format: int = FORMAT
    machine: str
    device: str
    versions: dict[str, str]
    load: tuple[float, float]
    repeats: int
    skipped: dict[str, str]
    cases: list[CaseResult]


def save(run: Run, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(run), indent=1) + b"\n")


def load(path: Path) -> Run:
    """Raises ``ValueError`` if the file is not one that `save` has written, ``OSError`` if it cannot be read."""
    try:
        run = msgspec.json.decode(path.read_bytes(), type=Run)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} is no result of this benchmark: {error}") from error
    if run.format != FORMAT:
        raise ValueError(f"{path} has format {run.format}; this version reads {FORMAT}")
    return run


@dataclass(frozen=True, slots=True)
class Judged:
    """A gate, and torchkv's rate as a multiple of the rival's."""

    gate: Gate
    times: Interval

    @property
    def met(self) -> bool:
        return self.times.median >= self.gate.factor


def judged(results: list[CaseResult]) -> Iterator[Judged]:
    """The gates of what was measured."""
    by_name = {case.name: case for case in results}
    for gate in GATES:
        case = by_name.get(gate.case)
        if case is not None and case.measured("torchkv") and case.measured(gate.rival):
            yield Judged(gate, case.ratio("torchkv", gate.rival))


@dataclass(frozen=True, slots=True)
class Change:
    """What has become of a rival in a case: of its rate as a multiple of the baseline's, or of its rate in GB/s."""

    case: str
    rival: str
    to: str | None
    before: Interval
    now: Interval

    @property
    def verdict(self) -> str:
        """ "faster" or "slower" if the intervals have no value in common, else "same"."""
        if not self.before.apart(self.now):
            return "same"
        return "faster" if self.now.median > self.before.median else "slower"


def changes(before: Run, now: Run, baseline: str) -> Iterator[Change]:
    """Of all rivals that both runs measured in a case with as many bytes.

    The baseline's own rate is compared as it is: it shows how the machine has changed.
    """
    old = {case.name: case for case in before.cases}
    for case in now.cases:
        earlier = old.get(case.name)
        if earlier is None or earlier.nbytes != case.nbytes:
            continue
        if not (earlier.measured(baseline) and case.measured(baseline)):
            continue
        for rival in case.rivals:
            if not (earlier.measured(rival) and case.measured(rival)):
                continue
            if rival == baseline:
                yield Change(case.name, rival, None, earlier.rate(rival), case.rate(rival))
            else:
                ratios = (run.ratio(rival, baseline) for run in (earlier, case))
                yield Change(case.name, rival, baseline, *ratios)
