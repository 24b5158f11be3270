"""``python -m torchkv.trace DUMPS...``: merges the flight records of several ranks, and says who waits for whom.

DUMPS are files, or folders of them (``Options.dump_dir``). Exit code 0: nobody waits; 1: somebody does; 2: no dump
could be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from torchkv.errors import ProtocolError
from torchkv.observe.dump_format import Dump, Entry, read_dump
from torchkv.observe.waits import latest, rank_name, sentences, timeline

__all__ = ["main", "read"]


def read(paths: Sequence[Path]) -> list[Dump]:
    """The dumps in these files and folders. Raises ``ProtocolError`` for a file that is none, and ``OSError``."""
    files = [file for path in paths for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    return [read_dump(file.read_bytes(), str(file)) for file in files]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m torchkv.trace",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("dumps", nargs="+", type=Path, metavar="DUMPS", help="files, or folders of them")
    parser.add_argument("--request", help="only about this request")
    parser.add_argument("--timeline", action="store_true", help="also list the operations of all ranks, by time")
    parser.add_argument("--json", action="store_true", help="print as JSON")
    args = parser.parse_args(arguments)
    try:
        dumps = latest(read(args.dumps))
    except (OSError, ProtocolError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if not dumps:
        sys.stderr.write(f"no dumps in {', '.join(map(str, args.dumps))}\n")
        return 2
    waits = sentences(dumps, request=args.request)
    merged = [
        (at, rank, entry) for at, rank, entry in timeline(dumps) if args.request in (None, entry.request)
    ] * args.timeline
    if args.json:
        json.dump(_report(dumps, waits, merged), sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        for dump in dumps:
            why = f"{rank_name(dump.instance, dump.rank)} ({dump.host}, pid {dump.pid}), {_time(dump.time_ns)}"
            sys.stdout.write(f"{why}: {dump.reason}\n")
        sys.stdout.write("\n" * bool(merged))
        for at, rank, entry in merged:
            sys.stdout.write(f"{_time(at)} {rank:20} {_line(entry)}\n")
        sys.stdout.write("\n")
        for sentence in waits or ["no rank waits for a request"]:
            sys.stdout.write(f"{sentence}\n")
    return 1 if waits else 0


def _report(
    dumps: Sequence[Dump], waits: Sequence[str], merged: Sequence[tuple[int, str, Entry]]
) -> dict[str, list[object]]:
    return {
        "ranks": [
            {"rank": rank_name(dump.instance, dump.rank), "time_ns": dump.time_ns, "reason": dump.reason}
            for dump in dumps
        ],
        "waits": list(waits),
        "timeline": [
            {"time_ns": at, "rank": rank, "verb": entry.verb, "request": entry.request, "state": entry.state}
            for at, rank, entry in merged
        ],
    }


def _time(ns: int) -> str:
    return datetime.fromtimestamp(ns / 1e9, tz=UTC).strftime("%H:%M:%S.%f")


def _line(entry: Entry) -> str:
    layers = f" layers {entry.layers}" if entry.layers else ""
    pages = f" {entry.num_pages} pages" if entry.num_pages else ""
    took = "" if entry.duration_ms is None else f" in {entry.duration_ms:.3f} ms"
    moved = f" {entry.nbytes} B {entry.path}" if entry.nbytes else ""
    error = f" {entry.error}" if entry.error else ""
    peers = f" {entry.peers}" if entry.peers else ""
    return f"{entry.verb} {entry.request!r}{peers}{layers}{pages}: {entry.state}{took}{moved}{error}"


if __name__ == "__main__":
    sys.exit(main())
