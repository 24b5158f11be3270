"""Streams that wait for one layer of a receive, on host memory and, with streams played by events, as on a GPU."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from tests.helpers.harness import Ranks, kv_group
from tests.helpers.ranks.small_cache import Gate, meet, page_bytes, random_cache
from torchkv import KVWork, ProtocolError, TransferCancelled
from torchkv.cuda.sync_words import SyncWords

PATIENCE = 60.0
SOURCE, TARGET = [9, 2, 11, 4], [1, 14, 3, 8]


class _Hold:
    def __init__(self) -> None:
        self.passed = threading.Event()

    def open(self) -> None:
        self.passed.set()


class _Flags:
    """Makes a "stream" wait: a list, to which its holds are added."""

    def hold(self, stream: list[_Hold]) -> _Hold:
        stream.append(_Hold())
        return stream[-1]


def held(rx: KVWork, *layers: int) -> list[_Hold]:
    """A hold for each of ``layers``, as if the cache were on a GPU."""
    rx._sync_words = cast(SyncWords, _Flags())
    stream: list[_Hold] = []
    for layer in layers:
        rx.wait_stream(cast(Any, stream), layer=layer)
    return stream


def by_layer() -> None:
    with kv_group() as kv:
        cache = random_cache()
        kv.register(cache)
        if kv.rank() == 0:
            gate = Gate()
            last = kv.send_layer("r", 0, SOURCE, 1, event=gate)
            meet(kv)  # layer 1 is held there, and nothing of it was sent
            with pytest.raises(ProtocolError, match="only works of recv_pages have layers"):
                kv.send_layer("r", 1, SOURCE, 1).wait_stream(layer=1)
            meet(kv)  # it has come
            gate.open.set()
            last.wait(PATIENCE)
            kv.finish("r", 1).wait(PATIENCE)
            dist.send(page_bytes(cache, SOURCE), 1, group=kv)
        elif kv.rank() == 1:
            rx = kv.recv_pages("r", TARGET, 0)
            with pytest.raises(ProtocolError, match=r"'r'.*does not hold layer 7"):
                rx.wait_stream(layer=7)
            first, second = held(rx, 0, 1)
            assert not second.passed.is_set()
            meet(kv)
            assert second.passed.wait(PATIENCE)
            (at_once,) = held(rx, 1)
            assert at_once.passed.is_set()
            rx._sync_words = None  # on host memory
            rx.wait_stream(layer=1)
            assert not first.passed.is_set()
            assert not rx.is_completed()
            there = page_bytes(cache, TARGET)
            meet(kv)
            assert first.passed.wait(PATIENCE)
            rx.wait(PATIENCE)
            expected = torch.empty_like(there)
            dist.recv(expected, 0, group=kv)
            assert torch.equal(page_bytes(cache, TARGET), expected)
            assert not torch.equal(there, expected)  # layer 0 was still to come
            assert held(rx, 0) == []  # of a work that is over: no wait at all
        else:
            meet(kv)
            meet(kv)


def test_a_stream_goes_on_when_its_layer_is_here(four: Ranks) -> None:
    four.run(by_layer)


def failing() -> None:
    with kv_group() as kv:
        kv.register(random_cache())
        if kv.rank() == 0:
            kv.send_layer("r", 1, SOURCE, 1)
            meet(kv)
            kv.cancel("r").wait(PATIENCE)
        elif kv.rank() == 1:
            rx = kv.recv_pages("r", TARGET, 0)
            (hold,) = held(rx, 0)
            assert not hold.passed.is_set()
            meet(kv)
            assert hold.passed.wait(PATIENCE)
            assert isinstance(rx.exception(), TransferCancelled)
            rx._sync_words = None
            rx.wait_stream(layer=0)  # does not raise
            left = kv.recv_pages("never sent", [5], 0)
            (hold,) = held(left, 0)
        else:
            meet(kv)
    if kv.rank() == 1:
        assert hold.passed.wait(PATIENCE), "the group has ended, and its streams do not go on"


def test_a_stream_goes_on_when_its_request_fails_or_the_group_ends(four: Ranks) -> None:
    four.run(failing)
