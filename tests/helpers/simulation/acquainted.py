"""Small clusters whose writers know where they can send: a request has been served before. No loop has a thread."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.helpers.layer_groups import GROUPS, hybrid
from tests.helpers.simulation.cluster import Cluster, Place
from torchkv.engine.work import KVWork
from torchkv.layout.layout import KVLayout

__all__ = [
    "GROUPED_PAGES",
    "PAGES",
    "PAGE_SIZE",
    "READERS",
    "of_layer_groups",
    "pair",
    "run_to_success",
    "some_lists",
    "two_readers",
]

PAGES, PAGE_SIZE = 16, 2  # of `pair` and `two_readers`
READERS = 2  # of the latter
GROUPED_PAGES = 32  # of `of_layer_groups`


def pair() -> Cluster:
    """A writer and a reader."""
    layout = KVLayout.gqa(num_layers=3, num_kv_heads=1, head_dim=2, page_size=PAGE_SIZE, dtype=torch.int16)
    made = Cluster([Place("p", layout, PAGES), Place("d", layout, PAGES)], views=True)
    received = made[1].recv_pages("before", [0], 0)
    sent = made[0].send_layer("before", 0, [0], 1)
    works = [received, sent, *(made[0].send_layer("before", layer, [0], 1) for layer in (1, 2))]
    return _served(made, [*works, made[0].finish("before", 1)])


def two_readers() -> Cluster:
    """A writer, and the two ranks of an instance, each of half the heads."""

    def layout(tp_rank: int = 0, tp_size: int = 1) -> KVLayout:
        shape = {"num_layers": 4, "num_kv_heads": 2, "head_dim": 2, "page_size": PAGE_SIZE, "dtype": torch.int16}
        return KVLayout.gqa(**shape, tp_rank=tp_rank, tp_size=tp_size)

    places = [Place("p", layout(), PAGES), *(Place("d", layout(rank, READERS), PAGES) for rank in range(READERS))]
    made = Cluster(places, views=True)
    works = [rank.recv_pages("before", [0], "p") for rank in made.ranks[1:]]
    works += [made[0].send_pages("before", [0], "d"), made[0].finish("before", "d")]
    return _served(made, works)


def of_layer_groups() -> Cluster:
    """A writer and a reader, of instances of one rank, whose layers are in groups."""
    made = Cluster([Place("p", hybrid(), GROUPED_PAGES), Place("d", hybrid(), GROUPED_PAGES)], views=True)
    for storage in made[1].cache.storages:
        storage.fill_(0x5A)
    lists = {group: [0] for group in GROUPS}
    works = [made[1].recv_pages("before", lists, "p"), made[0].send_pages("before", lists, "d")]
    return _served(made, [*works, made[0].finish("before", "d")])


def some_lists(seed: int, absent: int, count: int) -> dict[str, Any]:
    """``count`` pages of each layer group. absent: pages before the windows of the group that has the shorter ones."""
    ids = np.random.default_rng(seed).permutation(np.arange(1, GROUPED_PAGES))[: 3 * count].reshape(3, count)
    lists = dict(zip(GROUPS, ids, strict=True))
    lists["near"][:absent] = -1
    return lists


def run_to_success(cluster: Cluster, works: list[KVWork]) -> None:
    assert cluster.run(lambda: all(work.is_completed() for work in works), limit=5)
    assert [work.exception() for work in works] == [None] * len(works)


def _served(made: Cluster, works: list[KVWork]) -> Cluster:
    run_to_success(made, works)
    for storage in made[0].cache.storages:
        storage.random_(0, 255)
    return made
