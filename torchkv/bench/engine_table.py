"""``python -m torchkv.bench engine``: the table. What a request takes in the loop of a serving engine.

A row passes if its p50 is at most the copy of its bytes, plus the loop's own steps, plus 300 us, and no byte was wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torchkv.bench import engine_nixl
from torchkv.bench.engine import CASES, EngineResult, Setup, run_engine
from torchkv.bench.machine import machine
from torchkv.bench.plotting import pyplot
from torchkv.bench.rivals.nixl import nixl_package

__all__ = ["run"]

NAME = max(len(case.name) for case in CASES)  # columns
HEADER = (
    f"{'request':{NAME}} {'loop':7} {'flight':>6} {'beside':7} {'transport':9} {'p50_us':>9} {'p99_us':>9} "
    f"{'floor_us':>9} {'lost_us':>9} {'of copy':>8} {'of NIXL':>8} {'gate':>6} {'#wrong':>6}"
)


def run(argv: Sequence[str]) -> int:
    """Exit code: 1 if a byte was wrong, or a gate was missed and ``--report-only`` is not given."""
    args = _parse(argv)
    out = sys.stderr if args.json else sys.stdout
    nixl = nixl_package()

    def say(line: str) -> None:
        out.write(line + "\n")
        out.flush()

    say(f"# torchkv bench engine: {machine(args.device)}; 32 layers, steps of 200 us, every byte checked")
    say("# floor_us: the loop's own steps, as long as while both loops run and nothing is sent, or the copy")
    say("# lost_us: by which the steps of a request took longer")
    say("# of copy: the rate of all requests as a part of the copy's")
    say("# slices: two of eight kv heads; to fp8: from bf16; hybrid: with state in 24 layers")
    if args.apart:
        say("# both processes are of this host, but use TCP on loopback as if on two; the copy is memcpy all the same")
    if nixl is None:
        say("# NIXL is not installed, so it is not compared; pip install 'torchkv[bench]'")
    say(HEADER)
    results: list[EngineResult] = []
    for setup in _setups(args):
        if not setup.fits:
            say(f"{setup.case.name:{NAME}} flight {setup.flight}: left out, its pages take more than 2.5 GiB")
            continue
        compared = nixl is not None and not args.no_nixl and setup.case.is_plain
        rival = _run_nixl(setup) if compared else None
        result = run_engine(setup)
        for one in filter(None, (rival, result)):
            results.append(one)
            say(_line(one, None if one is rival else rival))
    if args.json:
        rows = [{**asdict(r), "floor": r.floor, "passed": r.passed} for r in results]
        json.dump([{"machine": machine(args.device)}, *rows], sys.stdout, indent=1)
        sys.stdout.write("\n")
    if args.plot is not None:
        plot(results, args.plot, machine(args.device))
    missed = any(not r.passed for r in results if not r.setup.nixl)
    return int(any(r.wrong for r in results) or (missed and not args.report_only))


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m torchkv.bench engine", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the pages lie (default cpu)")
    parser.add_argument("--flight", type=_counts, default=(1,), help="requests at once, e.g. 1,8,64 (default 1)")
    parser.add_argument("--busy", action="store_true", help="also with a second thread that computes in Python")
    parser.add_argument("--requests", type=int, default=40, help="requests of each row (default 40)")
    parser.add_argument("--only", default="", help="run only requests with this in their name")
    parser.add_argument("--apart", action="store_true", help="over TCP, and no memory mapped, as if on two hosts")
    parser.add_argument("--no-nixl", action="store_true", help="leave NIXL out though it is installed")
    parser.add_argument("--json", action="store_true", help="print results as JSON on stdout")
    parser.add_argument("--plot", type=Path, help="draw p50 of the rows with one request in flight (SVG or PNG)")
    parser.add_argument("--report-only", action="store_true", help="missed gates do not fail; wrong bytes still do")
    args = parser.parse_args(argv)
    if args.requests < 1:
        parser.error("--requests must be at least 1")
    return args


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(part) for part in text.split(","))
    if min(counts) < 1:
        raise ValueError(f"{text}: requests at once must be 1 or more")
    return counts


def _setups(args: argparse.Namespace) -> Iterator[Setup]:
    for busy in (False, True) if args.busy else (False,):
        for flight in args.flight:
            for polled in (False, True):
                for case in CASES:
                    if args.only in case.name:
                        yield Setup(
                            case=case,
                            device=args.device,
                            polled=polled,
                            flight=flight,
                            busy=busy,
                            requests=args.requests,
                            apart=args.apart,
                        )


def _run_nixl(setup: Setup) -> EngineResult:
    return run_engine(replace(setup, nixl=True), engine_nixl.write, engine_nixl.read)


def _line(r: EngineResult, rival: EngineResult | None) -> str:
    s = r.setup
    ratio = "" if rival is None else f"{r.p50 / rival.p50:.2f}"
    gate = "-" if s.nixl else "met" if r.passed else "missed"
    return (
        f"{s.case.name:{NAME}} {'polled' if s.polled else 'waited':7} {s.flight:6} {'busy' if s.busy else '-':7} "
        f"{'NIXL' if s.nixl else 'torchkv':9} {1e6 * r.p50:9.0f} {1e6 * r.p99:9.0f} {1e6 * r.floor:9.0f} "
        f"{1e6 * r.lost:9.0f} {r.share:8.2f} {ratio:>8} {gate:>6} {r.wrong:6}"
    )


def plot(results: list[EngineResult], path: Path, where: str) -> None:
    """Bars of p50 in ms, polled, one request in flight, beside the floor. Raises ``TransportUnavailable``."""
    draw = pyplot()
    shown = [r for r in results if r.setup.polled and r.setup.flight == 1 and not r.setup.busy]
    names = list(dict.fromkeys(r.setup.case.name for r in shown))
    series: dict[str, dict[str, float]] = {"floor": {r.setup.case.name: 1e3 * r.floor for r in shown}}
    for r in shown:
        series.setdefault("NIXL" if r.setup.nixl else "torchkv", {})[r.setup.case.name] = 1e3 * r.p50
    figure: Any
    figure, axes = draw.subplots(figsize=(9, 4.5))
    width = 0.8 / len(series)
    for number, (label, values) in enumerate(series.items()):
        places = [index + number * width for index in range(len(names))]
        axes.bar(places, [values.get(name, 0.0) for name in names], width, label=label)
    axes.set_xticks([index + 0.4 - width / 2 for index in range(len(names))], names, rotation=20, ha="right")
    axes.set_yscale("log")
    axes.set_ylabel("ms from first verb to verdict, p50")
    axes.set_title(f"In an engine's loop (polled every 200 us of Python)\n{where}", fontsize=10)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
