"""Layers with a sliding window between real ranks; `lanes_table.py` has more layouts of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.helpers.harness import Ranks, kv_group
from tests.helpers.ranks.lane_transfer import random_fill, views
from tests.helpers.ranks.small_cache import NUM_PAGES, meet, page_bytes, random_cache
from torchkv import KVProcessGroup, LayoutMismatch, ProtocolError

WINDOWS = {0: 40, 1: 40}  # every layer of the small layout
COUNT = 10  # pages of 16 tokens: 145 tokens at least, so that the window begins in page 6
FIRST = 6


def meet_and_compare(kv: KVProcessGroup, request: str, pages: list[int]) -> None:
    """Rank 1 receives ``pages``; those before the window, and all others, keep what they held."""
    cache = kv._verbs.cache
    assert cache is not None
    random_fill(cache, np.random.default_rng())
    kept = [page for page in range(NUM_PAGES) if page not in pages[FIRST:]]
    before, poison = page_bytes(cache, kept), page_bytes(cache, pages[FIRST:])
    rx = kv.recv_pages(request, pages, 0)
    rx.wait(30)
    expected = torch.empty_like(poison)
    dist.recv(expected, 0, group=kv)
    assert not torch.equal(poison, expected)  # negative control
    assert torch.equal(page_bytes(cache, pages[FIRST:]), expected)
    assert torch.equal(page_bytes(cache, kept), before)
    assert rx.bytes == expected.numel() == (COUNT - FIRST) * sum(array[0].size for array in views(cache).values())


def window_pages(path: str | None) -> None:
    with kv_group(path=path) as kv:
        rank = kv.rank()
        cache = random_cache(windows=WINDOWS)
        kv.register(cache)
        pages = [int(page) for page in np.random.default_rng().permutation(NUM_PAGES)[:COUNT]]
        for request in ("all", "window", "late"):
            if rank == 1:
                meet_and_compare(kv, request, pages)
            elif rank == 0:
                works = []
                if request == "all":
                    early = kv.send_pages(request, pages[:FIRST], 1)
                    assert early.wait(30)
                    assert early.bytes == 0
                if request == "late":  # finish says what is missing, and the request stays open
                    kv.prefix_tokens(request, 1)
                    works.append(kv.send_pages(request, pages[FIRST + 1 :], 1, start=FIRST + 1))
                    with pytest.raises(ProtocolError, match=f"layer 0 page {FIRST} .* was not sent"):
                        kv.finish(request, 1)
                    works.append(kv.send_pages(request, pages[FIRST : FIRST + 1], 1, start=FIRST))
                else:
                    works.append(kv.send_pages(request, pages[FIRST:], 1, start=FIRST))
                kv.finish(request, 1).wait(30)
                sent = page_bytes(cache, pages[FIRST:])
                assert sum(work.bytes for work in works) == sent.numel()
                dist.send(sent, 1, group=kv)
        meet(kv)


@pytest.mark.parametrize("path", [None, "slices", "staged"])
def test_only_the_windows_pages_move_and_only_they_must_be_sent(path: str | None, four: Ranks) -> None:
    four.run(window_pages, path)


def unlike_windows() -> None:
    with kv_group() as kv:
        given: dict[int, dict[str, Any]] = {0: {"windows": {1: 40}}, 1: {"windows": {1: 48}}}
        cache = random_cache(**given.get(kv.rank(), {"layers": [0]}))
        with pytest.raises(LayoutMismatch, match=r"window of layer 1 is 4[08] on rank [01] and 4[08] on rank [01]"):
            kv.register(cache)
        meet(kv)


def test_unlike_windows_are_refused_on_all_ranks(four: Ranks) -> None:
    four.run(unlike_windows)
