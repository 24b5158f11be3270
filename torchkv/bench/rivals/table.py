"""``python -m torchkv.bench rivals``: torchkv beside other ways to move the same pages, in one run, every byte checked.

Rivals take turns in each round. GB/s is a request's bytes by its median time, from its page lists until all bytes are
in place; x is the median of the rates' ratios within rounds. Brackets hold the interval between two order statistics
that encloses the true median (that of the sign test).

Exit code 0: every byte was right and every gate was met. 1: a byte was wrong or a gate was missed. 2: bad arguments.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch

from torchkv.bench.machine import machine, torchkv_version
from torchkv.bench.plotting import pyplot
from torchkv.bench.rivals import results
from torchkv.bench.rivals.cases import Case, cases
from torchkv.bench.rivals.catalogue import RIVALS
from torchkv.bench.rivals.intervals import Interval, confidence
from torchkv.bench.rivals.plot import plot
from torchkv.bench.rivals.results import CaseResult, Run
from torchkv.bench.rivals.round_robin import run_case
from torchkv.errors import TransportUnavailable

__all__ = ["run"]

BASELINES = {"cpu": "memcpy", "cuda": "peer-copy"}
MIB = {"cpu": 64, "cuda": 1024}
# Whose versions a result keeps.
PACKAGES = ("torch", "nixl-cu13", "nixl-cu12", "mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda")


def run(argv: Sequence[str]) -> int:
    """Exit code: see above. Wrong bytes count also with ``--report-only``."""
    args = _parse(argv)
    reasons = {name: RIVALS[name].why_not(args.device) for name in args.rivals}
    skipped = {name: reason for name, reason in reasons.items() if reason is not None}
    names = [name for name in args.rivals if name not in skipped]
    if args.baseline not in names:
        _tell(f"--baseline {args.baseline}: {skipped.get(args.baseline, 'it is not among --rivals')}")
        return 2
    before = os.getloadavg()[0]
    _say(f"# torchkv {torchkv_version()} bench rivals: {machine(args.device)}, load {before:.1f}")
    _say(
        f"# {args.repeats} rounds, intervals of {100 * confidence(args.repeats):.1f}%; x: of {args.baseline}'s rate; "
        "every byte checked, fresh random bytes, shuffled pages"
    )
    _say(f"{'case':20} {'bytes':>10} {'rival':10} {'GB/s':>8} {'':18} {'x':>8} {'':18} {'#wrong':>7} how")
    found = []
    for case in args.cases:
        found.append(run_case(case, names, nbytes=args.mib << 20, repeats=args.repeats))
        _rows(found[-1], args.baseline)
    for name, reason in skipped.items():
        _say(f"{'all':20} {'':10} {name:10} skipped: {reason}")
    load = (before, os.getloadavg()[0])
    whole = Run(
        machine=machine(args.device),
        device=args.device,
        versions=_versions(),
        load=load,
        repeats=args.repeats,
        skipped=skipped,
        cases=found,
    )
    return _finish(args, whole)


def _finish(args: argparse.Namespace, whole: Run) -> int:
    """Judges, compares, writes what was asked for."""
    missed = False
    for one in results.judged(whole.cases):
        missed |= not one.met
        verdict = "met" if one.met else "missed"
        if one.times.low < one.gate.factor < one.times.high:
            verdict += ", within the interval"
        _say(f"gate: {one.gate.case}: at least {one.gate.factor:g} x {one.gate.rival}: {_text(one.times)}: {verdict}")
    if args.before is not None:
        _compare(args.before, whole, args.baseline)
    if args.json is not None:
        results.save(whole, args.json)
    if args.plot is not None:
        plot(whole, args.plot)
    wrong = any(rival.wrong for case in whole.cases for rival in case.rivals.values())
    return int(wrong or (missed and not args.report_only))


def _rows(case: CaseResult, baseline: str) -> None:
    for name, rival in case.rivals.items():
        row = f"{case.name:20} {case.nbytes:10} {name:10} "
        if rival.failed is not None:
            _say(f"{row}failed: {rival.failed}")
            continue
        ratio = _column(case.ratio(name, baseline)) if case.measured(baseline) else f"{'-':27}"
        _say(f"{row}{_column(case.rate(name))} {ratio} {rival.wrong:7} {rival.way}")
    _say(f"{case.name:20} {'':10} # beside something else, which kept {case.others:.2f} cores busy")


def _compare(before: Run, now: Run, baseline: str) -> None:
    if before.machine != now.machine:
        _say(f"compared with another machine: {before.machine}")
    for change in results.changes(before, now, baseline):
        unit = f"x {change.to}" if change.to is not None else "GB/s"
        _say(
            f"compared: {change.case:20} {change.rival:10} {change.verdict:6} {_text(change.now)} {unit}, "
            f"was {_text(change.before)}"
        )


def _column(value: Interval) -> str:
    return f"{value.median:8.3g} {_ends(value):18}"


def _text(value: Interval) -> str:
    return f"{value.median:.3g} {_ends(value)}"


def _ends(value: Interval) -> str:
    return f"[{value.low:.3g}, {value.high:.3g}]"


def _versions() -> dict[str, str]:
    found = {"torchkv": torchkv_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m torchkv.bench rivals",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    every = ",".join(RIVALS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the pages lie (default cpu)")
    parser.add_argument("--mib", type=int, help="payload of a request in MiB (default 64 on cpu, 1024 on cuda)")
    parser.add_argument("--repeats", type=int, default=12, help="rounds of each case that count (default 12)")
    parser.add_argument("--only", default="", help="run only the cases that have this text in their name")
    parser.add_argument("--rivals", default=every, help=f"who takes part beside torchkv (default {every})")
    parser.add_argument("--baseline", choices=RIVALS, help="whose rate is 1 (default memcpy on cpu, peer-copy on cuda)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times to this file")
    parser.add_argument("--compare", type=Path, metavar="OLD", help="say what has changed since this file of --json")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the rates (SVG or PNG)")
    parser.add_argument("--report-only", action="store_true", help="missed gates do not fail; wrong bytes still do")
    args = parser.parse_args(argv)
    args.mib = MIB[args.device] if args.mib is None else args.mib
    args.baseline = args.baseline or BASELINES[args.device]
    if args.mib < 1 or args.repeats < 1:
        parser.error("--mib and --repeats must be at least 1")
    args.rivals = list(dict.fromkeys(["torchkv", *args.rivals.split(",")]))
    if unknown := [name for name in args.rivals if name not in RIVALS]:
        parser.error(f"there is no rival {unknown[0]!r}; there are {every}")
    args.cases = cases(args.device, args.only)
    if not args.cases:
        parser.error(
            f"no case has {args.only!r} in its name; there are: {'; '.join(c.name for c in cases(args.device))}"
        )
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs at least one CUDA GPU, and PyTorch finds none")
    try:
        args.before = None if args.compare is None else _read(args.compare, args.cases, args.mib << 20)
        if args.plot is not None:
            pyplot()
    except (OSError, ValueError, TransportUnavailable) as error:
        parser.error(str(error))
    return args


def _read(path: Path, wanted: Sequence[Case], nbytes: int) -> Run:
    """The run to compare with. Raises ``ValueError`` if it has moved other sizes."""
    before = results.load(path)
    sizes = {case.name: case.nbytes for case in before.cases}
    for case in wanted:
        size = case.payload(nbytes)
        if (moved := sizes.get(case.name, size)) != size:
            raise ValueError(f"{path}: requests of {case.name!r} have {moved} bytes there, {size} here; see --mib")
    return before


def _say(line: str) -> None:
    sys.stdout.write(line.rstrip() + "\n")
    sys.stdout.flush()


def _tell(text: str) -> None:
    sys.stderr.write(f"python -m torchkv.bench rivals: {text}\n")
