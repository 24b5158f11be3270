"""The fault lab's command line: see `torchkv.faultlab`, which runs it."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from tests.helpers.simulation.campaigns import CAMPAIGNS, Tally, run

__all__ = ["main"]

BATCH = 50  # schedules that a process runs in one go


def main(arguments: Sequence[str] | None = None) -> int:
    """arguments: of the command line; default ``sys.argv``."""
    args = _parse(arguments)
    began = time.monotonic()
    names = args.case or list(CAMPAIGNS)
    tallies = {name: Tally() for name in names}
    batches = list(_batches(names, args.seed, args.schedules))
    for (name, _), tally in zip(batches, _run(batches, args.workers), strict=True):
        tallies[name].add(tally)
    violations = [(name, *found) for name, tally in tallies.items() for found in sorted(tally.violations)]
    _print(tallies, time.monotonic() - began)
    for name, seed, text in violations:
        print(f"\n{name}, seed {seed}: {text}")
        print(f"    python -m torchkv.faultlab --case {name} --seed {seed} --schedules 1")
    return 1 if violations else 0


def _run(batches: Sequence[tuple[str, range]], workers: int) -> Iterator[Tally]:
    """One worker is this process, in which a debugger works."""
    if workers == 1:
        yield from (run(name, seeds) for name, seeds in batches)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        yield from pool.map(run, *zip(*batches, strict=True))


def _batches(names: Sequence[str], first: int, schedules: int | None) -> Iterator[tuple[str, range]]:
    """Every campaign gets its share of ``schedules``, at least one; all of its own if that is None."""
    total = sum(CAMPAIGNS[name].schedules for name in names)
    for name in names:
        usual = CAMPAIGNS[name].schedules
        count = usual if schedules is None else max(1, round(schedules * usual / total))
        for at in range(first, first + count, BATCH):
            yield name, range(at, min(at + BATCH, first + count))


def _print(tallies: dict[str, Tally], seconds: float) -> None:
    everything = Tally()
    for tally in tallies.values():
        everything.add(tally)
    kinds = [kind for kind, _ in everything.injected.most_common()]
    header = ["campaign", "schedules", "with faults", *kinds, "receives", "succeeded", "violations"]
    rows = [header]
    for name, tally in [*tallies.items(), ("all", everything)]:
        injected = [tally.injected[kind] for kind in kinds]
        counts = [tally.schedules, tally.faulty, *injected, tally.receives, tally.succeeded, len(tally.violations)]
        rows.append([name, *map(str, counts)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join([row[0].ljust(widths[0]), *cells[1:]]))
    print(f"{seconds:.0f} s")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    about = "\n".join(f"  {name:<10}{each.about} ({each.schedules} schedules)" for name, each in CAMPAIGNS.items())
    parser = argparse.ArgumentParser(
        prog="python -m torchkv.faultlab",
        description="Seeded runs of torchkv's own functions in a simulated world that loses, doubles, reorders, "
        "delays, cuts, pauses, kills and restarts. Every byte of every page is checked.",
        epilog=f"campaigns:\n{about}\n\nExit code 0: no violation. 1: there were some. 2: bad arguments.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule of each campaign (default 0)")
    parser.add_argument(
        "--schedules", type=int, help="of all campaigns together (default: as many as every change runs)"
    )
    parser.add_argument(
        "--case", action="append", choices=list(CAMPAIGNS), help="run this campaign only; may be repeated"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (default: one for each core)")
    args = parser.parse_args(arguments)
    if args.seed < 0 or args.workers < 1 or (args.schedules is not None and args.schedules < 1):
        parser.error("--seed must be at least 0, --schedules and --workers at least 1")
    return args


if __name__ == "__main__":
    sys.exit(main())
