"""``python -m torchkv.bench``: runs the host cases, prints one row for each, and judges their gates."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from torchkv.bench.cases import CASES, Case
from torchkv.bench.machine import machine, torchkv_version
from torchkv.bench.pair import Result, run_case

__all__ = ["names", "report", "run"]

HEADER = (
    f"{'case':22} {'lane':14} {'path':7} {'bytes':>10} {'pages':>7} {'layers':>6} {'GB/s':>7} {'p50_us':>10} "
    f"{'p99_us':>10} {'post_us':>8} {'limit':>12} {'GB/s':>7} {'ratio':>6} {'gate':>5} {'#wrong':>7}"
)


def names(only: str = "") -> list[str]:
    """Names of the cases that have ``only`` in their name."""
    return [_name(case) for case in _selected(only)]


def run(*, only: str, mib: int, repeats: int, report_only: bool, as_json: bool) -> int:
    """Exit code: 1 if a byte was wrong, or a gate was missed without ``report_only``. mib: payload of a run in MiB."""
    version = torchkv_version()
    head = f"# torchkv {version} bench: {machine('cpu')}; every run byte-checked, fresh random bytes, shuffled pages"
    results = (run_case(case, nbytes=mib << 20, repeats=repeats) for case in _selected(only))
    rows: list[dict[str, Any]] = [{"machine": machine("cpu")}]
    return report([head, HEADER], results, _line, rows, report_only=report_only, as_json=as_json)


def report(
    head: Sequence[str],
    results: Iterable[Any],
    line: Callable[[Any], str],
    rows: list[dict[str, Any]],
    *,
    report_only: bool,
    as_json: bool,
) -> int:
    """Prints a table: ``head``, and a ``line`` of each result, or the text that stands in place of one. See `run`.

    rows: what JSON has before the results.
    """
    out = sys.stderr if as_json else sys.stdout
    failed = wrong = False
    for text in head:
        print(text, file=out, flush=True)
    for result in results:
        print(result if isinstance(result, str) else line(result), file=out, flush=True)
        if not isinstance(result, str):
            rows.append({**asdict(result), "ratio": result.ratio, "passed": result.passed})
            failed |= not result.passed
            wrong |= result.wrong > 0
    if as_json:
        json.dump(rows, sys.stdout, indent=1)
        sys.stdout.write("\n")
    return int(wrong or (failed and not report_only))


def _selected(only: str) -> list[Case]:
    return [case for case in CASES if only in f"{case.name} {case.tls or ''}"]


def _name(case: Case) -> str:
    return case.name + (f" [{case.tls}]" if case.tls else "")


def _line(r: Result) -> str:
    gate = "-" if r.case.gate is None else f"{r.case.gate:g}"
    return (
        f"{_name(r.case):22} {r.lane:14} {r.path:7} {r.nbytes:10} {r.pages:7} {r.layers:6} {r.gbps:7.2f} "
        f"{r.p50_us:10.0f} {r.p99_us:10.0f} {r.post_us:8.1f} {r.case.limit:>12} {r.limit_gbps:7.2f} {r.ratio:6.2f} "
        f"{gate:>5} {r.wrong:7}"
    )
