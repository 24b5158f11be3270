"""The staged path over TCP: its rate, compared with one descriptor for each token and with one contiguous put."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.outcome import Outcome
from torchkv.bench.check import count_wrong
from torchkv.bench.limits import serve_python_puts, time_python_puts
from torchkv.bench.pair import fill
from torchkv.bench.processes import run_two
from torchkv.cache import KVCache
from torchkv.errors import KVError
from torchkv.group.process_group import KVProcessGroup
from torchkv.layout.layout import KVLayout
from torchkv.options import Options

__all__ = ["StagedResult", "run", "staged_rates"]

PAGES = 256  # of 16 tokens x 8 kv heads x 128 bf16, of which the reader holds 2: slices of 512 B

# Name of the way -> options of the group, and how many layers move: fewer with descriptors, which are slow.
WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "staged": ({"path": "staged"}, 16),
    "checked": ({"checksum": True}, 16),
    "slices": ({"path": "slices"}, 2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedResult:
    """Rates in 1e9 bytes/s, from the call until the receiver has all bytes in its pages: medians of the repeats.

    nbytes: of one staged run. staged, checked: the staged path without and with checksums. slices: one descriptor for
    each token. put: one contiguous UCX put of ``nbytes``, flushed. wrong: bytes, over all runs.
    """

    nbytes: int
    staged: float
    checked: float
    slices: float
    put: float
    wrong: int

    @property
    def times(self) -> float:
        """How many times faster staging is than descriptors."""
        return self.staged / self.slices

    @property
    def ratio(self) -> float:
        """The staged rate as a part of one contiguous put's."""
        return self.staged / self.put

    @property
    def passed(self) -> bool:
        return self.wrong == 0 and self.times >= 10.0 and self.ratio >= 0.6


def run(repeats: int) -> Iterator[Outcome]:
    """repeats: timed runs of each way."""
    staged = staged_rates(repeats=repeats)
    line = (
        f"staged over TCP: {staged.nbytes} bytes in slices of 512 B at {staged.staged:.2f} GB/s, with checksums "
        f"{staged.checked:.2f}; {staged.times:.0f}x of descriptors ({staged.slices:.3f} GB/s; gate 10x), "
        f"{staged.ratio:.2f} of one contiguous put ({staged.put:.2f} GB/s; gate 0.6); #wrong {staged.wrong}"
    )
    verdict = {"wrong": staged.wrong, "passed": staged.passed}
    row = {"staged": asdict(staged), "ratio": staged.ratio, "times": staged.times, **verdict}
    yield Outcome(line=line, row=row, passed=staged.passed, wrong=staged.wrong)


def staged_rates(*, repeats: int) -> StagedResult:
    """Measures in two fresh processes that map nothing of each other, so that UCX's TCP carries everything.

    Raises ``KVError`` if a process fails or bytes went another way than TCP.
    """
    measured, wrong = run_two(_write, _read, repeats, environment={"UCX_TLS": "tcp"}, apart=True)
    return StagedResult(wrong=wrong, nbytes=_nbytes(WAYS["staged"][1]), **measured)


def _write(repeats: int) -> dict[str, Any]:
    rates = {"put": time_python_puts(_nbytes(WAYS["staged"][1]), 1)}
    pages = np.random.default_rng().permutation(PAGES)
    for way, (options, layers) in WAYS.items():
        kv, cache = _group(options, _layout(layers, 1))
        seconds = []
        for turn in range(repeats + 1):
            fill(cache, seed=turn)
            dist.broadcast(torch.from_numpy(pages), 0)
            request = f"{way}{turn}"
            kv.prefix_tokens(request, 1)
            began = time.perf_counter()
            kv.send_pages(request, pages, 1)
            kv.finish(request, 1).wait()  # done when the receiver has everything in its pages
            seconds.append(time.perf_counter() - began)
        if any(not lane.startswith("tcp") for lane in kv.explain(1).lanes):
            raise KVError(f"{way}: must be measured over TCP only, but went over {', '.join(kv.explain(1).lanes)}")
        rates[way] = _nbytes(layers) / statistics.median(seconds[1:]) / 1e9
        dist.barrier()
        dist.destroy_process_group(kv)
    return rates


def _read(repeats: int) -> int:
    serve_python_puts(_nbytes(WAYS["staged"][1]), 1)
    pages = np.random.default_rng().permutation(PAGES)
    sent = torch.zeros(PAGES, dtype=torch.int64)
    wrong = 0
    for way, (options, layers) in WAYS.items():
        kv, cache = _group(options, _layout(layers, 4))
        source = KVCache.empty(_layout(layers, 1), PAGES, device="cpu")
        for turn in range(repeats + 1):
            for storage in cache.storages:
                storage.fill_(0xDD)
            dist.broadcast(sent, 0)
            kv.recv_pages(f"{way}{turn}", pages, 0).wait()
            fill(source, seed=turn)
            wrong += count_wrong(source, cache, sent, torch.from_numpy(pages))
        dist.barrier()
        dist.destroy_process_group(kv)
    return wrong


def _group(options: dict[str, Any], layout: KVLayout) -> tuple[KVProcessGroup, KVCache]:
    kv = dist.new_group(backend="torchkv", pg_options=Options(**options))
    assert isinstance(kv, KVProcessGroup)
    cache = KVCache.empty(layout, PAGES, device="cpu")
    kv.register(cache, instance=f"rank {kv.rank()}")
    return kv, cache


def _layout(layers: int, tp_size: int) -> KVLayout:
    return KVLayout.gqa(
        num_layers=layers, num_kv_heads=8, head_dim=128, page_size=16, dtype=torch.bfloat16, tp_size=tp_size
    )


def _nbytes(layers: int) -> int:
    return 2 * layers * PAGES * _layout(layers, 4).page_nbytes("k")
