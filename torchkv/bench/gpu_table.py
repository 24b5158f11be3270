"""``python -m torchkv.bench --device cuda``: the table."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import torch

from torchkv.bench.beside import BY_BYTES, Slowdown
from torchkv.bench.gpu import CASES, GpuCase, GpuResult, run_gpu_case
from torchkv.bench.layer import LayerResult, layer_cost
from torchkv.bench.nixl import NixlResult, nixl_available, nixl_rate
from torchkv.errors import TransportUnavailable
from torchkv.transport import load_transport

__all__ = ["run"]

HEADER = (
    f"{'case':22} {'transport':9} {'blocks':>6} {'path':7} {'lane':14} {'bytes':>11} {'GB/s':>7} {'copy':>7} "
    f"{'ratio':>6} {'gate':>5} {'p50_us':>8} {'p99_us':>8} {'post_us':>8} {'matmul':>7} {'#wrong':>7}"
)

# (span, stride, descriptors, least factor by which torchkv's direct path must be faster, torchkv's case)
RIVALS = (
    (128 << 10, 128 << 10, 4096, 5.0, "pages of 64"),
    (512, 2048, 32768, 500.0, "slices of 512 B"),
)


def run(*, only: str, repeats: int, report_only: bool, as_json: bool) -> int:
    """Exit code 1 if a byte was wrong or a gate was missed."""
    out = sys.stderr if as_json else sys.stdout
    rows: list[dict[str, Any]] = []
    fastest: dict[str, float] = {}
    failed = wrong = False

    def say(line: str) -> None:
        out.write(line + "\n")
        out.flush()

    say(f"# torchkv bench on {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}")
    say(f"# {GpuCase.__doc__ or ''}".split("\n\n", maxsplit=1)[0])
    say(HEADER)
    for case in CASES:
        if only and only not in case.name:
            continue
        reason = _unavailable(case.transport)
        if reason is not None:
            say(f"{case.name:22} skipped: {reason}")
            continue
        for result in run_gpu_case(case, repeats=repeats):
            say(_line(result))
            if result.slowdown is not None and result.slowdown.by_bytes is not None:
                say(_beside_line(result.slowdown))
            rows.append({**asdict(result), "ratio": result.ratio, "passed": result.passed})
            fastest[case.name] = max(fastest.get(case.name, 0.0), result.gbps)
            failed |= not result.passed
            wrong |= result.wrong > 0
    if not only or only in "one layer":
        layer = layer_cost()
        say(_layer_line(layer))
        rows.append({"layer": asdict(layer), "ratio": layer.ratio, "passed": layer.passed})
        failed |= not layer.passed
        wrong |= layer.wrong > 0
    if nixl_available() is None:
        say("NIXL: not installed, nothing compared")
    else:
        for span, stride, count, factor, name in RIVALS:
            if name not in fastest:
                continue
            rival = nixl_rate(span=span, stride=stride, descriptors=count)
            times = fastest[name] / rival.gbps
            say(_rival_line(rival, name, fastest[name], times, factor))
            rows.append({"rival": "nixl", **asdict(rival), "times": times, "passed": times >= factor})
            failed |= times < factor
    if as_json:
        json.dump(rows, sys.stdout, indent=1)
        sys.stdout.write("\n")
    return int(wrong or (failed and not report_only))


def _unavailable(transport: str) -> str | None:
    try:
        return load_transport(transport).available()
    except TransportUnavailable as error:
        return str(error)


def _line(r: GpuResult) -> str:
    gate = r.case.gates[r.blocks]
    beside = "-" if r.slowdown is None else f"{r.slowdown.sends:.3f}x"
    return (
        f"{r.case.name:22} {r.case.transport:9} {r.blocks:6} {r.path:7} {r.lane:14} {r.nbytes:11} {r.gbps:7.1f} "
        f"{r.limit_gbps:7.1f} {r.ratio:6.3f} {'-' if gate is None else f'{gate:g}':>5} {r.p50_us:8.0f} {r.p99_us:8.0f} "
        f"{r.post_us:8.1f} {beside:>7} {r.wrong:7}"
    )


def _beside_line(slow: Slowdown) -> str:
    return (
        f"  a matmul takes {slow.sends:.3f}x beside these sends, {slow.idle_blocks:.3f}x beside as many idle blocks: "
        f"the bytes cost {slow.by_bytes:.3f}x (gate {BY_BYTES:g}x with the default blocks); beside plain copies at the "
        f"link's rate {slow.copies:.3f}x"
    )


def _layer_line(layer: LayerResult) -> str:
    return (
        f"one layer of {layer.nbytes} B, K and V in shuffled pages: {layer.kernel_us:.1f} us of device time, the copy "
        f"{layer.copy_us:.1f} us: {layer.ratio:.2f}x (gate 2x); send_layer returns in p50 {layer.post_us:.1f} us "
        f"(gate 15 us), p99 {layer.post_p99_us:.1f} us, or p50 {layer.paced_us:.1f} us when a layer comes every "
        f"millisecond; done p50 {layer.done_us:.0f} us after the call; #wrong {layer.wrong}"
    )


def _rival_line(rival: NixlResult, name: str, ours: float, times: float, factor: float) -> str:
    return (
        f"NIXL: {rival.descriptors} descriptors of {rival.span} B: {rival.gbps:.3f} GB/s, #wrong {rival.wrong}; "
        f"torchkv, {name}: {ours:.1f} GB/s, {times:.0f}x (gate {factor:g}x)"
    )
