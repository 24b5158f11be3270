"""A plot of each result, published figures beside ours. Needs matplotlib: ``pip install 'torchkv[bench]'``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchkv.bench.plotting import pyplot
from torchkv.bench.published.findings import PUBLISHED_LENGTHS, RESULTS, Row

__all__ = ["draw"]


def draw(document: dict[str, Any], folder: Path) -> list[Path]:
    """Writes ``<key>.svg`` for each result of ``document`` into ``folder``, which is made; returns their paths.

    Raises ``TransportUnavailable`` without matplotlib.
    """
    plots = pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for key, result in document["results"].items():
        figure, axes = plots.subplots(1, PANELS[key], figsize=(4.7 * PANELS[key] + 1, 4.2), squeeze=False)
        PLOTS[key](axes[0], result["rows"])
        figure.suptitle(f"{RESULTS[key].title}\n{document['machine']}", fontsize=9)
        figure.tight_layout()
        path = folder / f"{key}.svg"
        figure.savefig(path, metadata={"Date": None})
        plots.close(figure)
        written.append(path)
    return written


def _bars(axes: Any, groups: Sequence[str], series: Mapping[str, Sequence[float | None]]) -> None:
    """Bars side by side in each group. None: no bar."""
    width = 0.8 / len(series)
    for number, (label, values) in enumerate(series.items()):
        shown = [(index, value) for index, value in enumerate(values) if value is not None]
        axes.bar([index + number * width for index, _ in shown], [value for _, value in shown], width, label=label)
    axes.set_xticks([index + 0.4 - width / 2 for index in range(len(groups))], groups)
    _legend(axes)


def _legend(axes: Any) -> None:
    """Below, where it hides nothing."""
    axes.legend(fontsize=6.5, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4, columnspacing=1, frameon=False)


def _planning(axes: Any, rows: Sequence[Row]) -> None:
    planning, first = axes
    planners, tokens = ("loops", "numpy", "torchkv"), list(dict.fromkeys(row["tokens"] for row in rows))
    at = {(row["tokens"], row["planner"]): row for row in rows}
    _bars(
        planning,
        [f"{count} tokens" for count in tokens],
        {name: [at[count, name]["plan_ms"] for count in tokens] for name in planners},
    )
    planning.set_yscale("log")
    planning.set_ylabel("planning of one request, ms")
    whole = [count for count in tokens if at[count, "loops"]["ttft_ms"] is not None]
    relative: dict[str, list[float | None]] = {"loops": [1.0], "numpy": [719 / 899], "torchkv": [None]}
    for name in planners:
        relative[name] += [at[count, name]["ttft_ms"] / at[count, "loops"]["ttft_ms"] for count in whole]
    _bars(first, ["published", *(f"ours, {count}" for count in whole)], relative)
    first.set_ylabel("first token's time, of that with loops")
    first.set_ylim(0.5, 1.05)


def _staging(axes: Any, rows: Sequence[Row]) -> None:
    seconds, writes = axes
    ways = ("equal", "staged", "checked", "slices")
    for style, name in zip(("-", "--", ":"), dict.fromkeys(row["link"] for row in rows), strict=False):
        for color, way in enumerate(ways):
            mine = [row for row in rows if row["link"] == name and row["way"] == way]
            x, y = ([row[field] for row in mine] for field in ("tokens", "ms"))
            seconds.plot(x, y, style, color=f"C{color}", marker="o", markersize=3, label=f"{way}, {name}")
    seconds.set_xscale("log", base=2)
    seconds.set_yscale("log")
    seconds.set_xticks(sorted({row["tokens"] for row in rows}), sorted({str(row["tokens"]) for row in rows}, key=int))
    seconds.set_ylabel("by tokens: ms until all bytes are there")
    _legend(seconds)
    tokens = list(dict.fromkeys(row["tokens"] for row in rows))
    first = rows[0]["link"]
    count = {(row["tokens"], row["way"]): row["writes"] for row in rows if row["link"] == first}
    shown: dict[str, list[float | None]] = {"equal": [None], "staged": [30], "slices": [30_000]}
    for way in shown:
        shown[way] += [count[of, way] for of in tokens]
    _bars(writes, ["published", *(f"ours, {of}" for of in tokens)], shown)
    writes.set_yscale("log")
    writes.set_ylabel("writes of a request")


def _lengths(axes: Any, rows: Sequence[Row]) -> None:
    (plot,) = axes
    tokens = [row["tokens"] for row in rows]
    plot.axhline(0, color="grey", linewidth=0.8)
    plot.plot(
        list(PUBLISHED_LENGTHS), [100 * change for change in PUBLISHED_LENGTHS.values()], "s--", label="published"
    )
    plot.errorbar(
        tokens,
        [100 * row["delta"] for row in rows],
        yerr=[50 * row["noise"] for row in rows],
        fmt="o-",
        capsize=3,
        label="ours (bars: between quartiles)",
    )
    plot.plot(tokens, [100 * (row["limit_ms"] / row["ttft_once_ms"] - 1) for row in rows], "k:", label="our limit")
    plot.set_xscale("log", base=2)
    plot.set_xticks(tokens, [str(count) for count in tokens])
    plot.set_ylabel("by tokens: change of the first token's time, %")
    _legend(plot)


def _layer_by_layer(axes: Any, rows: Sequence[Row]) -> None:
    (plot,) = axes
    _bars(
        plot,
        ["published, 3500", "16000", *(f"ours, {row['link']}" for row in rows)],
        {
            "at the end": [1.0] * (2 + len(rows)),
            "layer by layer": [316.69 / 370.74, 913.47 / 1074.93, *(1 + row["delta"] for row in rows)],
            "limit": [None, None, *(row["limit_ms"] / row["ttft_once_ms"] for row in rows)],
        },
    )
    plot.set_ylabel("first token's time, of that at the end")


def _prefixes(axes: Any, rows: Sequence[Row]) -> None:
    (plot,) = axes
    whole, ours = ({row["way"]: row for row in rows}[way] for way in ("whole", "incremental"))
    _bars(
        plot,
        ["published (19.8 s, 4.6 s)", f"ours ({whole['ttft_ms'] / 1e3:.2f} s, {ours['ttft_ms'] / 1e3:.2f} s)"],
        {
            "whole prompts": [1.0, 1.0],
            "incremental": [4.6 / 19.8, ours["ttft_ms"] / whole["ttft_ms"]],
            "limit": [None, ours["limit_ms"] / whole["ttft_ms"]],
        },
    )
    plot.set_ylabel("first token's mean time, of that with whole prompts")


PANELS = {"a": 2, "b": 2, "c": 1, "d": 1, "e": 1}
PLOTS: dict[str, Callable[[Any, Sequence[Row]], None]] = {
    "a": _planning,
    "b": _staging,
    "c": _lengths,
    "d": _layer_by_layer,
    "e": _prefixes,
}
