"""A small layout, and requests between simulated ranks that have it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import numpy as np
import torch

from tests.helpers.references.memory import Shadow
from tests.helpers.simulation.cluster import Rank
from torchkv.engine.work import KVWork
from torchkv.layout.layout import KVLayout

__all__ = ["done", "layout", "seed", "seed_batches", "send", "shadow"]


def layout(tp_rank: int = 0, tp_size: int = 1) -> KVLayout:
    return KVLayout.gqa(
        num_layers=2, num_kv_heads=2, head_dim=4, page_size=4, dtype=torch.int16, tp_rank=tp_rank, tp_size=tp_size
    )


def seed() -> int:
    """A fresh seed; pytest prints it when the test fails."""
    value = random.SystemRandom().getrandbits(32)
    print(f"seed {value}")
    return value


def seed_batches(variable: str, default: str, size: int) -> list[range]:
    """The seeds that an environment variable names, as "17" or "0:2000", or ``default`` does; so many in each batch."""
    first, _, last = os.environ.get(variable, default).partition(":")
    seeds = range(int(first), int(last or int(first) + 1))
    return [seeds[i : i + size] for i in range(0, len(seeds), size)]


def shadow(rank: Rank) -> Shadow:
    return Shadow(rank, np.random.default_rng())


def done(*works: KVWork) -> Callable[[], bool]:
    return lambda: all(work.is_completed() for work in works)


def send(rank: Rank, pages: list[int], dst: int, name: str = "r", aux: bytes = b"") -> tuple[KVWork, KVWork]:
    return rank.send_pages(name, pages, dst), rank.finish(name, dst, aux=aux)
