"""Staging memory: bounds of a `MemorySpan`, the send ring that is allocated on first use, turns of transfers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torchkv.errors import ProtocolError, TransportUnavailable
from torchkv.layout.stage_format import MemorySpan
from torchkv.protocol.receiving.stage_allocator import Stage
from torchkv.staging.memory import MAX_TURNS, SendStages, StageMemory


def test_a_room_is_where_the_tensor_is() -> None:
    tensor = torch.zeros(100, dtype=torch.uint8)
    assert MemorySpan.of(tensor) == (tensor.data_ptr(), 100)
    assert MemorySpan.of(tensor[30:]) == (tensor.data_ptr() + 30, 70)
    assert MemorySpan.of(tensor[:0]).nbytes == 0


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(8, dtype=torch.int8), r"torch.int8 \(8,\)"),
        (torch.zeros(8, dtype=torch.int64), r"torch.int64 \(8,\)"),
        (torch.zeros(8, dtype=torch.bool), "torch.bool"),
        (torch.zeros(8, dtype=torch.uint8)[::2], r"uint8 \(4,\)"),
        (torch.zeros(4, 6, dtype=torch.uint8).t(), r"uint8 \(6, 4\)"),
    ],
)
def test_only_contiguous_bytes_are_a_room(tensor: torch.Tensor, words: str) -> None:
    with pytest.raises(ProtocolError, match=f"contiguous uint8 tensor, not .*{words}"):
        MemorySpan.of(tensor)


def test_a_part_lies_where_it_says_and_parts_of_it_too() -> None:
    span = MemorySpan(1000, 64)
    assert span.part(0, 64) == span
    assert span.part(10, 20) == (1010, 20)
    assert span.part(10, 20).part(5, 15) == (1015, 15)
    assert span.part(64, 0) == (1064, 0)


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 65), (1, 64), (64, 1), (65, 0), (-1, 2), (10, -1)])
def test_a_part_never_reaches_beyond_its_room(offset: int, nbytes: int) -> None:
    with pytest.raises(AssertionError, match=r"of 64"):
        MemorySpan(1000, 64).part(offset, nbytes)


def test_the_room_of_a_stage_is_those_bytes_of_the_memory() -> None:
    memory = StageMemory(torch.from_numpy(np.random.default_rng().integers(0, 256, 1024, dtype=np.uint8)), 7)
    span = memory.span(Stage(256, 512, "r"))
    assert span == (memory.tensor.data_ptr() + 256, 512)
    with pytest.raises(AssertionError):
        memory.span(Stage(768, 512, "r"))


def make(nbytes: int) -> StageMemory:
    return StageMemory(torch.zeros(nbytes, dtype=torch.uint8), 3)


def test_memory_is_allocated_once_when_it_is_first_needed() -> None:
    stages = SendStages(1024, make)
    assert stages.taken == 0
    memory = stages.take()
    assert (stages.taken, memory.nbytes, memory.region) == (1024, 1024, 3)
    assert stages.take() is memory
    stages.release()
    assert stages.taken == 0


def test_without_a_send_ring_the_error_names_the_option() -> None:
    stages = SendStages(0, make)
    with pytest.raises(TransportUnavailable, match=r"Options\.staging_send is 0; raise it"):
        stages.take()
    assert stages.taken == 0
    stages.release()  # of nothing


def test_each_receiver_has_a_limited_number_of_turns() -> None:
    stages = SendStages(1024, make)
    assert [stages.acquire_turn(1) for _ in range(MAX_TURNS + 1)] == [True] * MAX_TURNS + [False]
    assert stages.acquire_turn(2), "another receiver"
    stages.release_turn(1)
    assert stages.acquire_turn(1)
    assert not stages.acquire_turn(1)
