"""Transfer rates of torchkv's paths between two processes of this host, byte-checked.

``python -m torchkv.bench engine`` measures what a request takes in the loop of a serving engine, ``rivals`` compares
with NIXL, Mooncake, gloo, NCCL and plain copies, ``published`` measures what others have published about moving KV
caches, and ``simulate`` what a request costs in clusters of up to thousands of ranks; see their --help.

Exit code 0: every byte was right and every gate was met. 1: a byte was wrong or a gate was missed. 2: bad arguments.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

__all__ = ["main"]

# Benchmarks of the project itself. This command ran them once; they are not installed with the package.
ELSEWHERE = (
    *("post", "request", "prefix-lookup"),
    *("pipeline", "layer", "matmul"),
)
RENAMED = {"one layer": "layer", "shared prefix": "shared-prefix", "prefix lookup": "prefix-lookup"}
PUBLISHED = {"plan": "a", "staged": "b", "shared-prefix": "e"}  # name -> its letter in the published results


def main(arguments: Sequence[str] | None = None) -> int:
    """arguments: of the command line; default ``sys.argv``."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] == "engine":
        from torchkv.bench import engine_table

        return engine_table.run(arguments[1:])
    if arguments and arguments[0] == "simulate":
        from torchkv.bench.scale import table as scale_table

        return scale_table.run(arguments[1:])
    if arguments and arguments[0] == "published":
        from torchkv.bench.published import command

        return command.run(arguments[1:])
    if arguments and arguments[0] == "rivals":
        from torchkv.bench.rivals import table as rivals_table

        return rivals_table.run(arguments[1:])
    if arguments and (moved := _elsewhere(arguments[0])) is not None:
        return _refuse(arguments[0], moved)
    args = _parse(arguments)
    from torchkv.bench import gpu_table, host_table  # here: the longest chain of imports ends at them

    table = gpu_table if args.device == "cuda" else host_table
    if args.only and not table.names(args.only):
        if (moved := _elsewhere(args.only)) is not None:
            return _refuse(args.only, moved)
        _tell(f"no case has {args.only!r} in its name; the cases on {args.device} are: {'; '.join(table.names())}")
        return 2
    if args.device == "cuda":
        if not torch.cuda.is_available():
            _tell("--device cuda needs at least one CUDA GPU, and PyTorch finds none")
            return 2
        return gpu_table.run(only=args.only, repeats=args.repeats, report_only=args.report_only, as_json=args.json)
    return host_table.run(
        only=args.only, mib=args.mib, repeats=args.repeats, report_only=args.report_only, as_json=args.json
    )


def _elsewhere(name: str) -> str | None:
    """The command that runs the benchmark ``name`` today, or None if there is none of this name."""
    name = RENAMED.get(name, name)
    if name in PUBLISHED:
        return f"`python -m torchkv.bench published --only {PUBLISHED[name]}`"
    return f"`python -m benchmarks {name}` in a checkout of torchkv" if name in ELSEWHERE else None


def _refuse(asked: str, command: str) -> int:
    _tell(f"{asked!r} is not part of this command; run {command}")
    return 2


def _tell(text: str) -> None:
    sys.stderr.write(f"python -m torchkv.bench: {text}\n")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m torchkv.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the pages lie (default cpu)")
    parser.add_argument("--mib", type=int, default=256, help="payload of each run in MiB, on cpu only (default 256)")
    parser.add_argument("--repeats", type=int, default=9, help="timed runs of each case (default 9)")
    parser.add_argument("--only", default="", help="run only the cases that have this text in their name")
    parser.add_argument("--json", action="store_true", help="print results as JSON on stdout")
    parser.add_argument("--report-only", action="store_true", help="missed gates do not fail; wrong bytes still do")
    args = parser.parse_args(arguments)
    if args.mib < 1 or args.repeats < 1:
        parser.error("--mib and --repeats must be at least 1")
    return args


if __name__ == "__main__":
    sys.exit(main())
