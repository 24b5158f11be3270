"""``python -m torchkv.bench published``: five published results about moving KV caches, measured on this machine.

a: planning head slices. b: staging them. c: pipelined prefill by length of prompt. d: layer by layer over TCP.
e: incremental transfer with shared prefixes. Machines differ, so what is compared is who wins and where, not by how
much. Every byte is checked. Each takes up to two minutes on two quiet cores. As root the rates of links are set
(docs/results.md). Exit code 1 if a byte was wrong; a published claim that does not hold here is marked NO.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchkv.bench.machine import machine, torchkv_version
from torchkv.bench.published import link, pipelining, planning, plots, prefixes, staging, tables
from torchkv.bench.published.findings import RESULTS, Row

__all__ = ["measure", "run"]


def run(argv: Sequence[str]) -> int:
    """The command; returns its exit code. argv: of the command line, after ``published``."""
    args = _parse(argv)
    out = sys.stderr if args.json else sys.stdout
    document = _read(args.read, args.only) if args.read else _empty()
    for line in tables.lines(document):
        out.write(line + "\n")
    if not args.read:
        for key, result in measure(args.only, slow_links=not document["no_links"]):
            document["results"][key] = result
            out.write("\n".join(["", *tables.result_lines(key, result)]) + "\n")
            out.flush()
    if args.json:
        json.dump(document, sys.stdout, indent=1)
        sys.stdout.write("\n")
    if args.plot is not None:
        for path in plots.draw(document, args.plot):
            out.write(f"plot: {path}\n")
    return int(any(row["wrong"] for result in document["results"].values() for row in result["rows"]))


def measure(keys: Sequence[str], *, slow_links: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each result as (key, {rows, seconds, load}), as soon as it is there. slow_links: whether rates can be set.

    Raises ``KVError`` if a process fails.
    """
    for key in keys:
        load, _, _ = os.getloadavg()
        began = time.monotonic()
        rows = MEASURE[key](slow_links)
        yield key, {"rows": rows, "seconds": time.monotonic() - began, "load": load}


def _lengths(slow_links: bool) -> list[Row]:
    settings = pipelining.LENGTHS
    return pipelining.measure(settings if slow_links else replace(settings, links=(None,)))


def _layer_by_layer(slow_links: bool) -> list[Row]:
    settings = pipelining.LAYER_BY_LAYER
    return pipelining.measure(settings if slow_links else replace(settings, links=(None,)))


MEASURE: dict[str, Callable[[bool], list[Row]]] = {
    "a": lambda slow_links: planning.measure(planning.Planning()),
    "b": lambda slow_links: staging.measure(staging.Staging() if slow_links else staging.Staging(links=(None,))),
    "c": _lengths,
    "d": _layer_by_layer,
    "e": lambda slow_links: prefixes.measure(prefixes.Prefixes() if slow_links else prefixes.Prefixes(link=None)),
}


def _empty() -> dict[str, Any]:
    return {"torchkv": torchkv_version(), "machine": machine("cpu"), "no_links": link.unavailable(), "results": {}}


def _read(path: Path, keys: Sequence[str]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    document["results"] = {key: result for key, result in document["results"].items() if key in keys}
    return document


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m torchkv.bench published",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", type=_keys, default=tuple(RESULTS), help="letters of results, such as c or a,e")
    parser.add_argument("--json", action="store_true", help="print results as JSON on stdout, tables on stderr")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw an SVG of each result into this folder")
    parser.add_argument("--read", type=Path, metavar="FILE", help="measure nothing; show what --json has printed")
    return parser.parse_args(argv)


def _keys(text: str) -> tuple[str, ...]:
    keys = tuple(text.split(","))
    if unknown := [key for key in keys if key not in RESULTS]:
        raise argparse.ArgumentTypeError(f"there is no result {unknown[0]!r}; there are {', '.join(RESULTS)}")
    return keys
