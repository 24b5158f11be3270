"""Staging memory: what a `Room` is and is not, and memory to send from that is taken only when it is needed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torchkv.errors import ProtocolError, TransportUnavailable
from torchkv.stagememory import MAX_BOARDED, Room, SendStages, StageMemory
from torchkv.staging import Stage


def test_a_room_is_where_the_tensor_is() -> None:
    tensor = torch.zeros(100, dtype=torch.uint8)
    assert Room.of(tensor) == (tensor.data_ptr(), 100)
    assert Room.of(tensor[30:]) == (tensor.data_ptr() + 30, 70)
    assert Room.of(tensor[:0]).nbytes == 0


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
        Room.of(tensor)


def test_a_part_lies_where_it_says_and_parts_of_it_too() -> None:
    room = Room(1000, 64)
    assert room.part(0, 64) == room
    assert room.part(10, 20) == (1010, 20)
    assert room.part(10, 20).part(5, 15) == (1015, 15)
    assert room.part(64, 0) == (1064, 0)


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 65), (1, 64), (64, 1), (65, 0), (-1, 2), (10, -1)])
def test_a_part_never_reaches_beyond_its_room(offset: int, nbytes: int) -> None:
    with pytest.raises(AssertionError, match=r"of 64"):
        Room(1000, 64).part(offset, nbytes)


def test_the_room_of_a_stage_is_those_bytes_of_the_memory() -> None:
    memory = StageMemory(torch.from_numpy(np.random.default_rng().integers(0, 256, 1024, dtype=np.uint8)), 7)
    room = memory.room(Stage(256, 512, "r"))
    assert room == (memory.tensor.data_ptr() + 256, 512)
    with pytest.raises(AssertionError):
        memory.room(Stage(768, 512, "r"))


def make(nbytes: int) -> StageMemory:
    return StageMemory(torch.zeros(nbytes, dtype=torch.uint8), 3)


def test_memory_is_taken_when_it_is_first_needed_and_once() -> None:
    stages = SendStages(1024, make)
    assert stages.taken == 0
    memory = stages.take()
    assert (stages.taken, memory.nbytes, memory.region) == (1024, 1024, 3)
    assert stages.take() is memory
    stages.release()
    assert stages.taken == 0


def test_without_memory_to_send_from_the_option_is_named() -> None:
    stages = SendStages(0, make)
    with pytest.raises(TransportUnavailable, match=r"Options\.staging_send is 0; raise it"):
        stages.take()
    assert stages.taken == 0
    stages.release()  # of nothing


def test_only_a_few_board_for_each_receiver() -> None:
    stages = SendStages(1024, make)
    assert [stages.board(1) for _ in range(MAX_BOARDED + 1)] == [True] * MAX_BOARDED + [False]
    assert stages.board(2), "another receiver"
    stages.leave(1)
    assert stages.board(1)
    assert not stages.board(1)
