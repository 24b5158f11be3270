"""Results c and d: prefills whose layers are sent while later ones are computed, against sending all at the end.

c: over lengths of prompts, in groups of layers of the size that `torchkv.pipeline` finds best. d: layer by layer over
TCP, one request at a time. Real forwards of a small decoder, which another process checks byte by byte.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchkv.bench.prefill.cores import first_two
from torchkv.bench.prefill.decoder import ModelSize
from torchkv.bench.prefill.gates import PipelineResult, Way
from torchkv.bench.prefill.pipelined import Setup, pipelined_prefill
from torchkv.bench.published.link import link, link_name

__all__ = ["LAYER_BY_LAYER", "LENGTHS", "Pipelining", "least_exposed", "measure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipelining:
    """What is measured. links: rates in 1e6 bytes/s, None for plain loopback. group_size, repeats: see `Setup`."""

    model: ModelSize
    tokens: tuple[int, ...]
    links: tuple[float | None, ...]
    group_size: int | None = None
    repeats: int = 2
    warm_ups: int = 2


# Narrow, so that two cores can compute 16k tokens; the links make transfers as large a part of the prefill as they
# were where the results were published.
LENGTHS = Pipelining(
    model=ModelSize(layers=8, hidden=128, ffn=256, heads=1, kv_heads=1, head_dim=32, dtype=torch.float32),
    tokens=(64, 256, 1024, 4096, 8192, 16384),
    links=(50.0,),
    repeats=3,
)
LAYER_BY_LAYER = Pipelining(
    model=ModelSize(layers=8, hidden=256, ffn=512, heads=2, kv_heads=2, head_dim=64, dtype=torch.float32),
    tokens=(3500,),
    links=(200.0, None),
    group_size=1,
    repeats=6,
)


def measure(settings: Pipelining) -> list[dict[str, Any]]:
    """A row for each link and length, in fresh processes for each link. Raises ``KVError`` if a process fails."""
    rows = []
    for rate in settings.links:
        setup = Setup(
            device="cpu",
            model=settings.model,
            repeats=settings.repeats,
            cores=first_two(),
            group_size=settings.group_size,
            warm_ups=settings.warm_ups,
            alone=1,
        )
        with link(rate):
            rows += [_row(result, rate) for result in pipelined_prefill(setup, settings.tokens)]
    return rows


def _row(result: PipelineResult, rate: float | None) -> dict[str, Any]:
    once, pipelined = _undisturbed(result.once), _undisturbed(result.pipelined)
    prefill, exposed, ttft = (once.median(name) for name in ("prefill", "exposed", "ttft"))
    milliseconds = {
        "prefill": prefill,
        "prefill_pipelined": pipelined.median("prefill"),
        "exposed_once": exposed,
        "exposed_pipelined": pipelined.median("exposed"),
        "ttft_once": ttft,
        "ttft_pipelined": pipelined.median("ttft"),
        "transfer": result.transfer,
        "limit": ttft - exposed + least_exposed(prefill, result.transfer, result.layers),
    }
    return {
        "link": link_name(rate),
        "tokens": result.tokens,
        "layers": result.layers,
        "nbytes": result.nbytes,
        "lane": result.lane,
        "path": result.path,
        "group_size": result.group_size,
        "passes": len(once.ttft),
        **{f"{name}_ms": 1e3 * seconds for name, seconds in milliseconds.items()},
        # Of neighbouring passes, which a change of the machine's speed reaches alike.
        "delta": statistics.median(one / other for one, other in zip(pipelined.ttft, once.ttft, strict=True)) - 1,
        "delta_disturbed": result.ratio - 1,
        "noise": replace(result, once=once, pipelined=pipelined).noise / ttft,
        "disturbed": result.disturbed,
        "wrong": result.wrong,
    }


def _undisturbed(way: Way) -> Way:
    """Without the time in which another program had the core that the prefill is pinned to.

    A pipelined prefill would seem slower than it is: while its pages leave, the other core is busier, and the scheduler
    moves other programs to the prefill's.
    """
    net = {name: zip(getattr(way, name), way.waited, strict=True) for name in ("prefill", "ttft")}
    prefill, ttft = (tuple(time - waited for time, waited in pairs) for pairs in net.values())
    return replace(way, prefill=prefill, ttft=ttft)


def least_exposed(prefill: float, transfer: float, layers: int) -> float:
    """Seconds of a transfer that no pipelining by layers can hide behind the prefill.

    The last layer's bytes leave when it is computed; the first layer's when that is. Where the link is the slower one,
    all bytes have to pass it after the first layer.
    """
    return max(transfer / layers, prefill / layers + transfer - prefill)
