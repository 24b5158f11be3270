"""``python -m torchkv.bench --device cuda``: runs the GPU cases, prints one row for each, and judges their gates."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from torchkv.bench.gpu import CASES, HEAD_DIM, HEADS, LAYERS, TOKENS, GpuResult, run_gpu_case
from torchkv.bench.host_table import report
from torchkv.errors import TransportUnavailable
from torchkv.transport.interface import load_transport

__all__ = ["names", "run"]

HEADER = (
    f"{'case':22} {'transport':9} {'blocks':>6} {'path':7} {'lane':14} {'bytes':>11} {'GB/s':>7} {'copy':>7} "
    f"{'ratio':>6} {'gate':>5} {'p50_us':>8} {'p99_us':>8} {'post_us':>8} {'#wrong':>7}"
)


def names(only: str = "") -> list[str]:
    """Names of the cases that have ``only`` in their name."""
    return [case.name for case in CASES if only in case.name]


def run(*, only: str, repeats: int, report_only: bool, as_json: bool) -> int:
    """Exit code: 1 if a byte was wrong, or a gate was missed without ``report_only``.

    Cases whose transport does not work here are skipped, with the reason.
    """
    moved = f"{LAYERS} layers x {TOKENS} tokens x {HEADS} kv heads x {HEAD_DIM} bf16"
    head = [
        f"# torchkv bench on {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}",
        f"# {moved} in shuffled pages; every run byte-checked",
        HEADER,
    ]
    return report(head, _results(only, repeats), _line, [], report_only=report_only, as_json=as_json)


def _results(only: str, repeats: int) -> Iterator[GpuResult | str]:
    """Of each case, or why it is skipped."""
    for case in CASES:
        if only in case.name and (reason := _unavailable(case.transport)) is not None:
            yield f"{case.name:22} skipped: {reason}"
        elif only in case.name:
            yield from run_gpu_case(case, repeats=repeats)


def _unavailable(transport: str) -> str | None:
    try:
        return load_transport(transport).available()
    except TransportUnavailable as error:
        return str(error)


def _line(r: GpuResult) -> str:
    gate = r.case.gates[r.blocks]
    return (
        f"{r.case.name:22} {r.case.transport:9} {r.blocks:6} {r.path:7} {r.lane:14} {r.nbytes:11} {r.gbps:7.1f} "
        f"{r.limit_gbps:7.1f} {r.ratio:6.3f} {'-' if gate is None else f'{gate:g}':>5} {r.p50_us:8.0f} {r.p99_us:8.0f} "
        f"{r.post_us:8.1f} {r.wrong:7}"
    )
