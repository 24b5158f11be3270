"""The worker of an engine in a process of its own, without an engine: the tensors are as those of vLLM."""

from __future__ import annotations

from typing import Any

import torch

import torchkv
from tests.helpers.waiting import until
from torchkv.integrations.layer_groups import Group, cache_of
from torchkv.integrations.steps import Step
from torchkv.integrations.worker import WorkerSide

LAYERS, BLOCKS, HEADS, PAGE, WIDTH = 3, 16, 2, 4, 6
NAMES = [f"model.layers.{layer}.self_attn" for layer in range(LAYERS)]


class Rank:
    """What this process has joined with. sent, received, failed: names that were reported, in their order."""

    side: WorkerSide
    tensors: dict[int, torch.Tensor]
    reported: dict[str, list[str]]


def begin(instance: str, by_layer: bool, by_token: bool) -> str:
    """Joins; by_token: tokens lie outside heads. The address."""
    shape = (BLOCKS, PAGE, HEADS, WIDTH) if by_token else (BLOCKS, HEADS, PAGE, WIDTH)
    made = [torch.full(shape, -1, dtype=torch.int32) for _ in range(LAYERS)]
    Rank.tensors = {i: each.permute(0, 2, 1, 3) if by_token else each for i, each in enumerate(made)}
    groups = [Group(None, ())]
    cache = cache_of(Rank.tensors, groups, page_size=PAGE, num_layers=LAYERS, total_heads=HEADS, tp_rank=0, tp_size=1)
    options = torchkv.Options(timeout=5.0, grant_timeout=20.0, staging_recv=1 << 20, staging_send=1 << 20)
    kv = torchkv.join(cache, instance, options=options)
    layers = {name: layer for layer, name in enumerate(NAMES)}
    Rank.side = WorkerSide(kv, cache.layout, layers=layers, by_layer=by_layer)
    Rank.reported = {"sent": [], "received": [], "failed": []}
    return kv.address


def content(tag: int, layer: int, block: int) -> torch.Tensor:
    """What a block of a request holds: [heads, tokens, width]."""
    generator = torch.Generator().manual_seed(tag * 10_000 + layer * 100 + block)
    return torch.randint(0, 1 << 30, (HEADS, PAGE, WIDTH), dtype=torch.int32, generator=generator)


def step(made: Step, tag: int = 0, finished: set[str] = frozenset()) -> None:
    """One step of an engine. Each page that it sends is computed first, layer by layer, as request ``tag``'s."""
    side = Rank.side
    side.before_blocks_change(made)
    for layer, name in enumerate(NAMES):
        for send in made.sends:
            for i, page in enumerate(send.pages):
                Rank.tensors[layer][page] = content(tag, layer, send.start + i)
        side.save_layer(name)
    side.load(made)
    side.end_step()
    results(finished)


def results(finished: set[str] = frozenset()) -> dict[str, list[str]]:
    found = Rank.side.results(set(finished))
    Rank.reported["sent"] += sorted(found.sent)
    Rank.reported["received"] += sorted(found.received)
    Rank.reported["failed"] += sorted(found.failed)
    return Rank.reported


def await_report(kind: str, request: str, count: int = 1) -> dict[str, list[str]]:
    until(lambda: results()[kind].count(request) >= count, f"{count} x {request!r} {kind}")
    return Rank.reported


def await_grant(request: str) -> None:
    def is_granted() -> bool:
        results()
        return Rank.side._receiving[request][1].work is not None

    until(is_granted, f"{request!r} is granted")


def overwrite(pages: list[int]) -> None:
    for tensor in Rank.tensors.values():
        tensor[pages] = -2


def holds(tag: int, pages: list[int], start: int = 0) -> bool:
    """Whether ``pages`` hold what was computed for request ``tag``, and no other page holds anything."""
    equal = all(
        torch.equal(Rank.tensors[layer][page], content(tag, layer, start + i))
        for layer in range(LAYERS)
        for i, page in enumerate(pages)
    )
    others = [block for block in range(BLOCKS) if block not in pages]
    return equal and all(bool((Rank.tensors[layer][others] < 0).all()) for layer in range(LAYERS))


def tidy() -> Any:
    """What is left of all requests, which should be nothing."""
    overwrite(list(range(BLOCKS)))
    side = Rank.side
    Rank.reported = {"sent": [], "received": [], "failed": []}
    return side._sending, len(side._departures), side._receiving, side._ended, side.kv.quarantined()


def end() -> None:
    Rank.side.kv.close()
    assert isinstance(Rank.side.kv, torchkv.KVMember)
