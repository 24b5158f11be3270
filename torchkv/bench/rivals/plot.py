"""The table as a picture: each rival's rate in each case, with its interval."""

from __future__ import annotations

from pathlib import Path

from torchkv.bench.plotting import pyplot
from torchkv.bench.rivals.results import Run

__all__ = ["plot"]


def plot(run: Run, path: Path) -> None:
    """Draws bars in GB/s, on a logarithmic axis; rivals without a rate have none. Raises ``TransportUnavailable``."""
    draw = pyplot()
    names = list(dict.fromkeys(name for case in run.cases for name in case.rivals if case.measured(name)))
    figure, axes = draw.subplots(figsize=(2.0 + 1.6 * len(run.cases), 4.5))
    width = 0.8 / max(1, len(names))
    for number, name in enumerate(names):
        rates = {index: case.rate(name) for index, case in enumerate(run.cases) if case.measured(name)}
        medians = [rate.median for rate in rates.values()]
        ends = [
            [rate.median - rate.low for rate in rates.values()],
            [rate.high - rate.median for rate in rates.values()],
        ]
        places = [index + (number + 0.5) * width - 0.4 for index in rates]
        axes.bar(places, medians, width, yerr=ends, label=name, error_kw={"linewidth": 0.8})
    axes.set_xticks(range(len(run.cases)), [case.name for case in run.cases])
    axes.set_yscale("log")
    axes.set_ylabel("GB/s")
    axes.set_title(
        f"One request of shuffled pages, median of {run.repeats} and its interval\n{run.machine}", fontsize=10
    )
    axes.legend(ncols=len(names), fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    draw.close(figure)
