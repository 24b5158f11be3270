"""Benchmarks of the project itself, run from a checkout. Without names: those that need no GPU, except pipeline.

On the host: callers, request, instance, observed, prefix-lookup. On CUDA GPUs: callers-gpu, layer, matmul.
On either: pipeline, which comes alone and has options of its own: python -m benchmarks pipeline --help.

Exit code 0: every byte was right and every gate was met. 1: a byte was wrong or a gate was missed. 2: bad arguments.
What the package's users can measure too: the rates of all paths with python -m torchkv.bench; planning, staging and
shared prefixes with python -m torchkv.bench published.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks import callers, instance, observed, pipeline_table, prefix_lookup, request
from benchmarks.outcome import Outcome
from torchkv.bench.machine import machine, torchkv_version

__all__ = ["NAMES", "main"]

Benchmark = Callable[[], Iterator[Outcome]]

HOST: dict[str, Benchmark] = {
    "callers": partial(callers.run, "cpu"),
    "request": request.run,
    "instance": instance.run,
    "observed": observed.run,
    "prefix-lookup": prefix_lookup.run,
}
GPU = ("callers-gpu", "layer", "matmul")
NAMES = (*HOST, *GPU, "pipeline")


def main(arguments: Sequence[str] | None = None) -> int:
    """arguments: of the command line; default ``sys.argv``."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] == "pipeline":
        return pipeline_table.run(arguments[1:])
    args = _parse(arguments)
    out = sys.stderr if args.json else sys.stdout

    def say(line: str) -> None:
        out.write(line + "\n")
        out.flush()

    where = machine("cuda" if any(name in GPU for name in args.names) else "cpu")
    say(f"# torchkv {torchkv_version()} benchmarks: {where}; every run byte-checked, fresh random bytes")
    rows: list[dict[str, Any]] = [{"machine": where}]
    missed = wrong = False
    for name in args.names:
        for outcome in _benchmark(name)():
            say(outcome.line)
            rows.append(outcome.row)
            missed |= not outcome.passed
            wrong |= outcome.wrong > 0
    if args.json:
        json.dump(rows, sys.stdout, indent=1)
        sys.stdout.write("\n")
    return int(wrong or (missed and not args.report_only))


def _benchmark(name: str) -> Benchmark:
    if name in HOST:
        return HOST[name]
    if name == "callers-gpu":
        return partial(callers.run, "cuda")
    from benchmarks import layer, matmul  # only here, because they need Triton

    return {"layer": layer.run, "matmul": matmul.run}[name]


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="name", help="benchmarks to run (default: all of the host)")
    parser.add_argument("--json", action="store_true", help="print results as JSON on stdout")
    parser.add_argument("--report-only", action="store_true", help="missed gates do not fail; wrong bytes still do")
    args = parser.parse_args(arguments)
    args.names = args.names or list(HOST)
    if "pipeline" in args.names:
        parser.error("pipeline must be the first name, and comes alone: it has options of its own")
    if unknown := [name for name in args.names if name not in NAMES]:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(NAMES)}")
    if (on_gpus := [name for name in args.names if name in GPU]) and not torch.cuda.is_available():
        parser.error(f"{on_gpus[0]} needs at least one CUDA GPU, and PyTorch finds none")
    return args


if __name__ == "__main__":
    sys.exit(main())
