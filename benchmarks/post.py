"""How long ``send_layer`` of a thousand pages takes to return to its caller, with a receiver in another process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.outcome import Outcome
from torchkv.bench.processes import run_two
from torchkv.cache import KVCache
from torchkv.group.arguments import Pages
from torchkv.group.process_group import KVProcessGroup, current_group
from torchkv.layout.layout import KVLayout

__all__ = ["PostResult", "post_cost", "run"]

PAGES = 1000
LAYERS = 32
ROUNDS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PostResult:
    """Microseconds from the call of ``send_layer`` to its return.

    array_us, array_p99_us: page ids in an int64 array. tensor_us: in a tensor. list_us: in a list.
    """

    pages: int
    array_us: float
    array_p99_us: float
    tensor_us: float
    list_us: float


def run() -> Iterator[Outcome]:
    post = post_cost()
    line = (
        f"post: send_layer of {post.pages} pages returns in p50 {post.array_us:.1f} us (int64 array, gate 20 us), "
        f"p99 {post.array_p99_us:.1f} us; as a tensor p50 {post.tensor_us:.1f} us, as a list "
        f"{post.list_us:.1f} us"
    )
    yield Outcome(line=line, row={"post": asdict(post)})


def post_cost() -> PostResult:
    measured, _ = run_two(_write, _read)
    return PostResult(pages=PAGES, **measured)


def _layout() -> KVLayout:
    return KVLayout.gqa(num_layers=LAYERS, num_kv_heads=2, head_dim=8, page_size=4, dtype=torch.bfloat16)


def _write() -> dict[str, float]:
    kv = current_group(None)
    kv.register(KVCache.empty(_layout(), PAGES, device="cpu"), instance="writer")
    array = np.random.default_rng().permutation(PAGES)
    as_array = _post(kv, "array", array)
    as_tensor = _post(kv, "tensor", torch.from_numpy(array))
    as_list = _post(kv, "list", array.tolist())
    return {
        "array_us": 1e6 * statistics.median(as_array),
        "array_p99_us": 1e6 * float(np.percentile(as_array, 99)),
        "tensor_us": 1e6 * statistics.median(as_tensor),
        "list_us": 1e6 * statistics.median(as_list),
    }


def _post(kv: KVProcessGroup, name: str, pages: Pages) -> list[float]:
    seconds: list[float] = []
    send: Callable[..., Any] = kv.send_layer
    for turn in range(ROUNDS):
        request = f"{name}{turn}"
        kv.prefix_tokens(request, 1)
        for layer in range(LAYERS):
            began = time.perf_counter()
            send(request, layer, pages, 1)
            seconds.append(time.perf_counter() - began)
        kv.finish(request, 1).wait()
    return seconds


def _read() -> None:
    kv = current_group(None)
    kv.register(KVCache.empty(_layout(), PAGES, device="cpu"), instance="reader")
    for name in ("array", "tensor", "list"):
        for turn in range(ROUNDS):
            kv.recv_pages(f"{name}{turn}", np.random.default_rng().permutation(PAGES), 0).wait()
