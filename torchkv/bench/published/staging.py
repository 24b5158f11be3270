"""Result b: head slices staged, or put one by one, against ranks with equal heads. Every byte is checked.

A writer holds all kv heads and a reader one of them: unlike tensor-parallel sizes. The same bytes between ranks that
hold one head each are what staging is to come close to.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchkv.bench.check import count_wrong
from torchkv.bench.pair import fill
from torchkv.bench.processes import run_two
from torchkv.bench.published.link import link, link_name
from torchkv.cache import KVCache
from torchkv.errors import KVError
from torchkv.group.process_group import KVProcessGroup
from torchkv.layout.layout import KVLayout
from torchkv.options import Options

__all__ = ["Staging", "measure"]

PAGE_SIZE = 16
HEADS = 4  # kv heads of 128 elements of 2 bytes: slices of 256 B


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """What is measured. links: rates in 1e6 bytes/s, None for plain loopback. tokens: of each request."""

    layers: int = 15
    tokens: tuple[int, ...] = (256, 1024, 4096)
    links: tuple[float | None, ...] = (None, 200.0)
    repeats: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """options: of the group. writer_tp: 1 if the writer holds all heads, `HEADS` if it holds those of the reader."""

    options: dict[str, Any]
    writer_tp: int


WAYS = {
    "equal": _Way(options={"path": "runs"}, writer_tp=HEADS),
    "staged": _Way(options={"path": "staged"}, writer_tp=1),
    "checked": _Way(options={"checksum": True}, writer_tp=1),
    "slices": _Way(options={"path": "slices"}, writer_tp=1),
}


def measure(settings: Staging) -> list[dict[str, Any]]:
    """A row for each link, number of tokens and way. limit_ms: what the link's rate allows, None on plain loopback.

    In two fresh processes for each link, which map nothing of each other. Raises ``KVError`` if one fails, or if bytes
    went another way than TCP.
    """
    rows: list[dict[str, Any]] = []
    for rate in settings.links:
        with link(rate):
            written, wrong = run_two(_write, _read, settings, environment={"UCX_TLS": "tcp"}, apart=True)
        for row, bad in zip(written, wrong, strict=True):
            limit = None if rate is None else row["nbytes"] / rate / 1e3
            rows.append({"link": link_name(rate), **row, "limit_ms": limit, "wrong": bad})
    return rows


def _write(settings: Staging) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for tokens in settings.tokens:
        for name, way in WAYS.items():
            rows.append({"way": name, "tokens": tokens, "nbytes": _nbytes(settings, tokens)})
            rows[-1] |= _send(settings, name, way, tokens)
    return rows


def _nbytes(settings: Staging, tokens: int) -> int:
    """Of one head, keys and values of all layers."""
    return 2 * settings.layers * tokens * _layout(settings.layers, HEADS).page_nbytes("k") // PAGE_SIZE


def _send(settings: Staging, name: str, way: _Way, tokens: int) -> dict[str, Any]:
    pages = np.random.default_rng().permutation(tokens // PAGE_SIZE)
    with _group(way.options, _layout(settings.layers, way.writer_tp), len(pages)) as (kv, cache):
        seconds, writes, path = [], 0, ""
        for turn in range(settings.repeats + 1):
            fill(cache, seed=turn)
            dist.broadcast(torch.from_numpy(pages), 0)
            request = f"{name} {turn}"
            kv.prefix_tokens(request, 1)
            before = _writes(kv)
            began = time.perf_counter()
            work = kv.send_pages(request, pages, 1)
            kv.finish(request, 1).wait()  # done when the receiver has everything in its pages
            seconds.append(time.perf_counter() - began)
            writes, path = _writes(kv) - before, work.path
        if any(not lane.startswith("tcp") for lane in kv.explain(1).lanes):
            raise KVError(f"{name}: must be measured over TCP only, but went over {', '.join(kv.explain(1).lanes)}")
    return {"ms": 1e3 * statistics.median(seconds[1:]), "writes": writes, "path": path}


def _writes(kv: KVProcessGroup) -> int:
    """Writes to the peer that this rank has posted so far."""
    return sum(counter.spans for counter in kv.explain(1).lanes.values())


def _read(settings: Staging) -> list[int]:
    """Wrong bytes for each row of the writer."""
    return [_receive(settings, name, way, tokens) for tokens in settings.tokens for name, way in WAYS.items()]


def _receive(settings: Staging, name: str, way: _Way, tokens: int) -> int:
    pages = np.random.default_rng().permutation(tokens // PAGE_SIZE)
    sent = torch.zeros(len(pages), dtype=torch.int64)
    wrong = 0
    with _group(way.options, _layout(settings.layers, HEADS), len(pages)) as (kv, cache):
        source = KVCache.empty(_layout(settings.layers, way.writer_tp), len(pages), device="cpu")
        for turn in range(settings.repeats + 1):
            for storage in cache.storages:
                storage.fill_(0xDD)
            dist.broadcast(sent, 0)
            kv.recv_pages(f"{name} {turn}", pages, 0).wait()
            fill(source, seed=turn)
            wrong += count_wrong(source, cache, sent, torch.from_numpy(pages))
    return wrong


@contextmanager
def _group(options: dict[str, Any], layout: KVLayout, num_pages: int) -> Iterator[tuple[KVProcessGroup, KVCache]]:
    kv = dist.new_group(backend="torchkv", pg_options=Options(**options))
    assert isinstance(kv, KVProcessGroup)
    cache = KVCache.empty(layout, num_pages, device="cpu")
    kv.register(cache, instance=f"rank {kv.rank()}")
    yield kv, cache
    dist.barrier()
    dist.destroy_process_group(kv)


def _layout(layers: int, tp_size: int) -> KVLayout:
    return KVLayout.gqa(
        num_layers=layers,
        num_kv_heads=HEADS,
        head_dim=128,
        page_size=PAGE_SIZE,
        dtype=torch.bfloat16,
        tp_size=tp_size,
    )
