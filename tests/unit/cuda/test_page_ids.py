"""Buffers for page ids: ids that kernels still read are never overwritten, and buffers without a reader are reused."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.examples import examples
from torchkv.cuda import page_ids
from torchkv.cuda.page_ids import PageIdUpload, PageIdUploads

BUFFERS, BUFFER_IDS = 4, 8
STREAM: Any = SimpleNamespace(cuda_stream=1)
OTHER: Any = SimpleNamespace(cuda_stream=2)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes, in ids, of all memory allocated after the pool was made. Host memory stands for both kinds."""
    sizes: list[int] = []

    def empty(shape: Any, *, dtype: torch.dtype, pin_memory: bool = False, device: Any = None) -> torch.Tensor:
        assert pin_memory == (device is None)
        if isinstance(shape, int):
            sizes.append(shape)
        return torch.full(shape if isinstance(shape, tuple) else (shape,), -1, dtype=dtype)

    fake = SimpleNamespace(
        empty=empty, int64=torch.int64, cuda=SimpleNamespace(stream=lambda stream: contextlib.nullcontext())
    )
    monkeypatch.setattr(page_ids, "torch", fake)
    monkeypatch.setattr(page_ids, "BUFFERS", BUFFERS)
    monkeypatch.setattr(page_ids, "BUFFER_IDS", BUFFER_IDS)
    return sizes


def new() -> PageIdUploads:
    return PageIdUploads(torch.device("cuda", 0))


def ids(*values: int) -> Any:
    return np.array(values, dtype=np.int64)


def key(generation: int, whose: str = "src") -> tuple[str, int, int]:
    return (whose, 0, generation)


def buffer(upload: PageIdUpload) -> int:
    return upload.memory.data_ptr()


def test_ids_arrive_and_a_later_layer_of_the_request_uses_them_again(made: list[int]) -> None:
    pool = new()
    first = pool.acquire(ids(3, 1, 2), STREAM, key(1))
    assert first.ids.tolist() == [3, 1, 2]
    assert pool.acquire(ids(3, 1, 2), STREAM, key(1)) is first
    assert first.users == 2
    pool.release(first)
    pool.release(first)
    assert pool.acquire(ids(3, 1, 2), STREAM, key(1)) is first
    assert made == []


def test_another_stream_side_or_generation_has_an_upload_of_its_own(made: list[int]) -> None:
    pool = new()
    found = [
        pool.acquire(ids(3, 1, 2), STREAM, key(1)),
        pool.acquire(ids(3, 1, 2), OTHER, key(1)),
        pool.acquire(ids(3, 1, 2), STREAM, key(1, "dst")),
        pool.acquire(ids(3, 1, 2), STREAM, key(2)),
    ]
    assert len({buffer(upload) for upload in found}) == 4


def test_new_ids_under_a_key_leave_the_old_ones_to_kernels_that_still_read_them(made: list[int]) -> None:
    pool = new()
    old = pool.acquire(ids(1, 2), STREAM, key(1))
    fresh = pool.acquire(ids(1, 3), STREAM, key(1))
    assert (old.ids.tolist(), fresh.ids.tolist()) == ([1, 2], [1, 3])
    for generation in range(2, 2 + BUFFERS - 2):  # takes all other buffers
        pool.acquire(ids(generation), STREAM, key(generation))
    beyond = pool.acquire(ids(7), STREAM, key(99))
    assert made == [1, 1], "no buffer was free, so it has memory of its own"
    assert old.ids.tolist() == [1, 2]
    pool.release(beyond)
    pool.release(old)
    assert buffer(pool.acquire(ids(8), STREAM, key(100))) == buffer(old), "now its buffer is free"


def test_kept_ids_give_their_buffer_to_newer_ones_the_oldest_first(made: list[int]) -> None:
    pool = new()
    kept = [pool.acquire(ids(generation), STREAM, key(generation)) for generation in range(BUFFERS)]
    pool.release(kept[2])
    pool.release(kept[1])
    assert buffer(pool.acquire(ids(50), STREAM, key(50))) == buffer(kept[1]), (
        "the least recently used one that no kernel reads"
    )
    assert buffer(pool.acquire(ids(51), STREAM, key(51))) == buffer(kept[2])
    assert [kept[0].ids.tolist(), kept[3].ids.tolist()] == [[0], [3]]
    assert made == []


def test_lists_longer_than_a_buffer_have_memory_of_their_own(made: list[int]) -> None:
    pool = new()
    exact = pool.acquire(ids(*range(BUFFER_IDS)), STREAM, key(1))
    assert made == []
    long = pool.acquire(ids(*range(BUFFER_IDS + 1)), STREAM, key(2))
    assert made == [BUFFER_IDS + 1] * 2
    assert exact.ids.tolist() == list(range(BUFFER_IDS))
    assert long.ids.tolist() == list(range(BUFFER_IDS + 1))
    pool.release(long)
    pool.acquire(ids(1), STREAM, key(2))  # replaces it
    assert all(len(pinned) == BUFFER_IDS for pinned, _ in pool._free), "it never becomes a buffer"


def test_no_ids_are_uploaded_too(made: list[int]) -> None:
    assert new().acquire(ids(), STREAM, key(1)).ids.numel() == 0


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), steps=st.lists(st.integers(0, 9), max_size=60))
def test_what_is_in_use_keeps_its_ids_and_its_memory(data: st.DataObject, steps: list[int], made: list[int]) -> None:
    pool = new()
    held: list[tuple[PageIdUpload, list[int]]] = []
    for step in steps:
        if step < 6:
            values = data.draw(st.lists(st.integers(0, 3), max_size=BUFFER_IDS + 2))
            upload = pool.acquire(ids(*values), STREAM, key(data.draw(st.integers(0, 5))))
            held.append((upload, values))
        elif held:
            pool.release(held.pop(data.draw(st.integers(0, len(held) - 1)))[0])
        for upload, values in held:
            assert upload.ids.tolist() == values
        in_use = {id(upload): buffer(upload) for upload, _ in held if upload.memory.numel()}
        assert len(set(in_use.values())) == len(in_use), "two uploads in one buffer"
        free = [memory.data_ptr() for _, memory in pool._free]
        assert len(set(free)) == len(free)
        assert not set(free) & set(in_use.values())
    for upload, _ in held:
        pool.release(upload)
    assert not pool._replaced
