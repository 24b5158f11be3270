"""``python -m benchmarks pipeline``: what layer pipelining gains, by length of prompt.

TTFT: from the start of the prefill until the receiver has decoded the first token after it. Exposed: from the end of
the prefill until the receiver has all bytes in its pages. Figures are medians of passes of both ways in turns, in fresh
processes. Every pass has fresh tokens, and all bytes and logits are compared with those of a second computation. On a
CPU, bytes go over TCP on loopback. With --tp 1:1 the prefill has one core to itself, and everything else of both
processes another; with more ranks no thread has a core to itself, so no time is judged. With --crossed, ranks that
decode share the GPUs of the ranks that prefill, and take layers out of their pages only when the prefill has ended.
Exit code 1 if a byte was wrong or a gate was missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from torchkv.bench.machine import machine
from torchkv.bench.prefill.cores import first_two
from torchkv.bench.prefill.gates import Gate, PipelineResult
from torchkv.bench.prefill.pipelined import MODELS, Setup, pipelined_prefill
from torchkv.bench.published.findings import PUBLISHED_LENGTHS

__all__ = ["run"]

TOKENS = {"cpu": "256,1024,2048", "cuda": "256,1024,2048,4096,8192,16384"}
SIZES = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim")

NOTES = (
    "# published: changes of TTFT reported for SGLang's layer-wise transfer (pull request 23515; a 72B model, TP 4,",
    "# 16 H20 GPUs, 4 x 400 Gbit/s RDMA): another system, other machines, another load. All other figures are ours.",
    "# Times in ms, medians. group: layers a group of all layers. delta: of TTFT in %, +-: between its quartiles;",
    "# behind a gate's value, its standard error.",
)
HEADER = (
    f"{'':42} {'':8} {'exposed':>17} {'':7} {'TTFT':>17} {'':7} {'':5}\n"
    f"{'tokens':>6} {'tp':>3} {'MB':>7} {'path':>11} {'lane':>11} {'prefill':>8} {'once':>8} {'pipelined':>9} "
    f"{'group':>7} {'once':>8} {'pipelined':>9} {'delta_%':>7} {'+-':>5} {'published_%':>11} {'#wrong':>7}"
)


def run(arguments: Sequence[str]) -> int:
    """The command; returns its exit code. arguments: of the command line, after ``pipeline``."""
    args = _parse(arguments)
    out = sys.stderr if args.json else sys.stdout
    setup = Setup(
        device=args.device,
        model=args.model,
        repeats=args.repeats,
        tp=args.tp,
        crossed=args.crossed,
        cores=first_two() if args.device == "cpu" and args.tp == (1, 1) else None,
    )

    def say(line: str) -> None:
        out.write(line + "\n")
        out.flush()

    where = f"{args.device}, crossed" if args.crossed else args.device
    say(f"# torchkv bench pipeline, {where}: {machine(args.device)}; {setup.model}")
    for line in (*NOTES, HEADER):
        say(line)
    results = []
    # On GPUs, all lengths in the same processes, because starting them takes longer than measuring.
    for tokens in [args.tokens] if args.device == "cuda" else [[one] for one in args.tokens]:
        for result in pipelined_prefill(setup, tokens):
            for line in lines(result):
                say(line)
            results.append(result)
    if args.json:
        json.dump([_row(result) for result in results], sys.stdout, indent=1)
        sys.stdout.write("\n")
    missed = any(not gate.passed for result in results for gate in result.gates)
    return int(any(result.wrong for result in results) or (missed and not args.report_only))


def lines(r: PipelineResult) -> list[str]:
    """The row of the table, a line of further figures, and a line for each gate."""
    once, pipelined = ([1e3 * way.median(name) for name in ("exposed", "ttft")] for way in (r.once, r.pipelined))
    group = "once" if r.group_size >= r.layers else f"{r.group_size}/{r.layers}"
    published = f"{100 * PUBLISHED_LENGTHS[r.tokens]:+.0f}" if r.tokens in PUBLISHED_LENGTHS else "-"
    row = (
        f"{r.tokens:6} {r.tp:>3} {r.nbytes / 1e6:7.1f} {r.path:>11} {r.lane:>11} {1e3 * r.once.median('prefill'):8.2f} "
        f"{once[0]:8.2f} {pipelined[0]:9.2f} {group:>7} {once[1]:8.2f} {pipelined[1]:9.2f} {100 * (r.ratio - 1):+7.1f} "
        f"{1e5 * r.noise / once[1]:5.1f} {published:>11} {r.wrong:7}"
    )
    parts = (
        f"  prefill {1e3 * r.pipelined.median('prefill'):.2f} when pipelined; all layers in one verb "
        f"{1e3 * r.transfer:.2f}, the last group alone {1e3 * r.group_transfer:.2f}, a control round trip "
        f"{1e3 * r.round_trip:.2f}; TTFT saved {1e3 * r.saved:.2f}, {r.saved_part:.2f} of what sending once exposes; "
        f"{len(r.once.ttft)} passes of each way"
    )
    if r.unlike_groups:
        parts += f"; groups of another size on the other rank in {r.unlike_groups} of them"
    if r.has_core:
        parts += (
            f"; other programs had the prefill's core for {100 * r.disturbed:.0f}% of it, without that "
            f"{r.saved_undisturbed:.2f}"
        )
    return [row, parts, *(f"  {_verdict(gate)}" for gate in r.gates)]


def _verdict(gate: Gate) -> str:
    error = "" if gate.error is None else f" +- {gate.error:.3f}"
    limit = f"{'>=' if gate.at_least else '<='} {gate.limit:g}"
    return f"{gate.name}: {gate.value:.3f}{error} (gate {limit}) {'passed' if gate.passed else 'MISSED'}"


def _row(result: PipelineResult) -> dict[str, Any]:
    gates = [{**asdict(gate), "passed": gate.passed} for gate in result.gates]
    return {**asdict(result), "delta": result.ratio - 1, "gates": gates, "passed": result.passed}


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks pipeline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where the pages lie (default cpu); cuda: a GPU each")
    add(
        "--tp",
        type=_tp,
        default=(1, 1),
        metavar="PREFILL:DECODE",
        help="ranks that share the prefill, and ranks that share the decoding, 1 or 2 each (default 1:1); more than "
        "two would sum their results in varying order, so that bytes could not be compared",
    )
    add(
        "--crossed",
        action="store_true",
        help="on two GPUs: ranks that decode share the GPUs of those that prefill, each the other GPU than its heads",
    )
    add("--tokens", type=_counts, help=f"lengths of prompts (default {TOKENS['cpu']}; on cuda {TOKENS['cuda']})")
    add("--repeats", type=_count, default=7, help="measured passes of each way (default 7)")
    for name in SIZES:
        add(f"--{name.replace('_', '-')}", type=_count, help=f"of the model (default {_defaults(name)})")
    add("--json", action="store_true", help="print results as JSON on stdout")
    add("--report-only", action="store_true", help="missed gates do not fail; wrong bytes still do")
    args = parser.parse_args(arguments)
    if args.tokens is None:
        args.tokens = _counts(TOKENS[args.device])
    if args.device == "cuda":
        _check_gpus(parser, 2 if args.crossed else sum(args.tp), crossed=args.crossed)
    elif args.crossed:
        parser.error("--crossed needs --device cuda")
    usual = MODELS["cuda, tp 2" if args.device == "cuda" and max(args.tp) > 1 else args.device]
    args.model = replace(usual, **{name: value for name in SIZES if (value := getattr(args, name))})
    shards = max(args.tp)
    for name in ("kv_heads", "heads", "ffn"):
        if (value := getattr(args.model, name)) % shards:
            parser.error(f"--tp: {shards} ranks cannot share --{name.replace('_', '-')} {value}; it must be even")
    return args


def _check_gpus(parser: argparse.ArgumentParser, needed: int, *, crossed: bool) -> None:
    found = torch.cuda.device_count()
    if found < needed:
        whose = "--crossed: two GPUs are needed" if crossed else f"--device cuda: each of {needed} ranks needs a GPU"
        hint = "" if crossed else "; --crossed makes do with two"
        parser.error(f"{whose}, and PyTorch finds {found or 'none'}{hint}")


def _defaults(name: str) -> str:
    cpu, cuda, shared = (getattr(MODELS[device], name) for device in ("cpu", "cuda", "cuda, tp 2"))
    return f"{cpu}; on cuda {cuda}{'' if shared == cuda else f', {shared} with --tp 2'}"


def _tp(text: str) -> tuple[int, int]:
    parts = text.split(":")
    if len(parts) != 2 or any(part not in ("1", "2") for part in parts):
        raise argparse.ArgumentTypeError(f"must be PREFILL:DECODE, 1 or 2 each, such as 2:1, not {text!r}")
    return int(parts[0]), int(parts[1])


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]
