"""Draws a `Study`: what was simulated as lines, what was measured on real processes as points."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torchkv.bench.plotting import pyplot
from torchkv.bench.scale.study import Study
from torchkv.bench.scale.workload import LONG, SHORT

__all__ = ["draw"]

Points = Iterable[tuple[float, float]]
RANKS = "ranks; TP 1 to 1 of 2, 2 to 1 of 4, else 4 to 2"


def draw(study: Study, path: Path, where: str) -> None:
    """Raises ``TransportUnavailable`` if there is no matplotlib."""
    plots = pyplot()
    figure: Any
    figure, axes = plots.subplots(2, 3, figsize=(15, 8))
    (served, messages, cpu), (known, memory, loads) = axes
    _served(study, served)
    _messages(study, messages)
    _cpu(study, cpu)
    _known(study, known)
    _memory(study, memory)
    _loads(study, loads)
    for each in axes.flat:
        each.legend(fontsize=7)
        each.grid(alpha=0.3)
    figure.suptitle(
        f"Lines: real state machines, simulated clock and network. Points: real processes.\n{where}", fontsize=10
    )
    figure.tight_layout()
    figure.savefig(path)
    plots.close(figure)


def _line(axes: Any, points: Points, label: str, style: str = "-") -> None:
    found = list(points)
    axes.plot([x for x, _ in found], [y for _, y in found], style, label=label, markersize=4)


def _axes(axes: Any, title: str, x: str, *, log: bool = True) -> None:
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(x, fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log" if log else "linear")
    if not log:
        axes.set_ylim(bottom=0)


def _served(study: Study, axes: Any) -> None:
    for workload in (LONG, SHORT):
        _line(axes, ((r.ranks, r.served) for r in study.cluster if r.workload == workload.name), workload.name)
    _line(axes, ((m.ranks, m.throughput) for m in study.measured if not m.apart), "short, real, resident loops", "o")
    _line(axes, ((m.ranks, m.throughput) for m in study.measured if m.apart), "short, real, messages", "s")
    _axes(axes, "requests a second: simulated as offered; real as fast as the cores of all can", RANKS)


def _messages(study: Study, axes: Any) -> None:
    runs = [r for r in study.cluster if r.workload == LONG.name]
    _line(axes, ((r.ranks, r.messages_per_request) for r in runs), "messages")
    _line(axes, ((r.ranks, r.frames_per_request) for r in runs), "frames, with acknowledgements", "--")
    _line(axes, ((m.ranks, m.messages_per_request) for m in study.measured if m.apart), "messages, real", "s")
    _axes(axes, "control messages of one request", RANKS, log=False)


def _cpu(study: Study, axes: Any) -> None:
    for workload in (LONG, SHORT):
        found = [r for r in study.cluster if r.workload == workload.name]
        _line(axes, ((r.ranks, 1e3 * r.cpu_per_request) for r in found), workload.name)
    apart = [m for m in study.measured if m.apart]
    _line(axes, ((m.ranks, 1e3 * m.protocol_per_request) for m in apart), "short, messages: the same functions", "s")
    _line(axes, ((m.ranks, 1e3 * m.cpu_per_request) for m in apart), "short, messages: whole processes", "x")
    loops = [m for m in study.measured if not m.apart]
    _line(axes, ((m.ranks, 1e3 * m.cpu_per_request) for m in loops), "short, resident loops: whole processes", "o")
    _axes(axes, "CPU of one request on all its ranks, ms (measured)", RANKS)


def _known(study: Study, axes: Any) -> None:
    _line(axes, ((k.peers, k.calls) for k in study.known), "calls of functions")
    _line(axes, ((k.peers, k.strangers) for k in study.known), "calls, all ranks used, first requests", "-.")
    _line(axes, ((k.peers, 1e6 * k.cpu) for k in study.known), "CPU, us", "--")
    _axes(axes, "one request among 8 ranks that know so many", "known ranks", log=False)


def _memory(study: Study, axes: Any) -> None:
    _line(axes, ((m.peers, m.peers * m.known / 1e6) for m in study.memory), "known")
    _line(axes, ((m.peers, m.peers * (m.known + m.served) / 1e6) for m in study.memory), "each has sent", "--")
    _axes(axes, "memory of one rank for its peers, MB (measured)", "peers")


def _loads(study: Study, axes: Any) -> None:
    for workload in (LONG, SHORT):
        found = [r for r in study.loads if r.workload == workload.name]
        _line(axes, ((r.offered, 1e3 * r.p50) for r in found), f"{workload.name}: p50", "o-")
        _line(axes, ((r.offered, 1e3 * r.p99) for r in found), f"{workload.name}: p99", "o--")
    ranks = study.loads[0].ranks if study.loads else 0
    _axes(axes, f"ms from the last verb to success, {ranks} ranks", "requests a second that are offered")
