"""Page lists and state slots by layer group: what is taken, and what is refused with which words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.layer_groups import GROUPS, hybrid
from torchkv.errors import KVError, PageOutOfRange, ProtocolError
from torchkv.group.group_arguments import GroupArguments
from torchkv.layout.layout import State

LISTS = {"full": [1, 2], "near": [-1, 3], "far": [4, 5]}
STATES = [State("a", (1,), torch.int8, layers=(0,), group="near"), State("b", (1,), torch.int8, group="mamba")]
ARGUMENTS = GroupArguments(hybrid(), 32)


@pytest.mark.parametrize(
    ("pages", "layers", "expected"),
    [
        (LISTS, None, LISTS),
        (LISTS, [2, 5], {"full": [1, 2]}),
        (LISTS, [0, 2], {"full": [1, 2], "near": [-1, 3]}),
        ([1, 2], [0, 3], {"near": [1, 2]}),
        ({"near": [7]}, [3], {"near": [7]}),
        ([1, 2], [], {}),
    ],
)
def test_lists_are_those_of_the_groups_in_which_the_layers_lie(
    pages: Any, layers: list[int] | None, expected: dict[str, list[int]]
) -> None:
    assert ARGUMENTS.lists(pages, "test", layers=layers) == expected


@pytest.mark.parametrize(
    ("pages", "layers", "message"),
    [
        ([1, 2], None, "one page list for layer groups full, near, far"),
        ([1, 2], [0, 1], "one page list for layer groups near, far"),
        ({"full": [1]}, None, "no pages for layer group 'near'"),
        ({**LISTS, 5: [1]}, None, "pages of 5, which is no layer group"),
        ({**LISTS, "far": [4]}, None, "unlike length: .*'far': 1"),
        ({**LISTS, "far": 5}, None, "unlike length"),
        ({**LISTS, "far": torch.tensor(5)}, None, "unlike length"),
    ],
)
def test_wrong_lists(pages: Any, layers: list[int] | None, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        ARGUMENTS.lists(pages, "test", layers=layers)


@given(st.lists(st.sampled_from([-1, 0, 5, 31]), max_size=6))
def test_absent_pages_are_those_at_the_beginning(given_ids: list[int]) -> None:
    absent = next((i for i, page in enumerate(given_ids) if page != -1), len(given_ids))
    kept = list(given_ids)
    arrays = [np.array(given_ids, dtype=dtype) for dtype in (np.int64, np.int32)]
    forms: list[Any] = [given_ids, *arrays, torch.tensor(given_ids, dtype=torch.int64)]
    for pages in forms:
        if -1 in given_ids[absent:]:
            with pytest.raises(PageOutOfRange, match=r"an absent page \(-1\) behind page"):
                ARGUMENTS.host_list(pages, "test")
        else:
            ids, found = ARGUMENTS.host_list(pages, "test")
            assert (ids.tolist(), found) == (given_ids[absent:], absent)
            ids[:] = 0  # they are the verb's own
        assert list(pages) == kept


@pytest.mark.parametrize("pages", [[-2], [32], [-1, 32], [0.5], "12", torch.tensor(5)])
def test_pages_are_checked_behind_the_absent_ones(pages: Any) -> None:
    with pytest.raises(KVError):
        ARGUMENTS.host_list(pages, "test")


def test_slots_by_group() -> None:
    one = GroupArguments(hybrid(states=STATES[:1]), 32)
    two = GroupArguments(hybrid(states=STATES), 32)
    assert one.slots(3, "test") == {"near": 3}
    assert one.slots(None, "test") == {}
    assert two.slots({"mamba": 5}, "test") == {"mamba": 5}
    for arguments, slots, message in (
        (two, 3, "state_slot=3 for layer groups with state: near, mamba"),
        (two, {"full": 1}, "state_slot of 'full', which is no layer group with state"),
        (ARGUMENTS, 3, "with state: none"),
    ):
        with pytest.raises(ProtocolError, match=message):
            arguments.slots(slots, "test")


def test_names_of_parts() -> None:
    assert list(ARGUMENTS.names("r")) == list(GROUPS)
    assert len(set(ARGUMENTS.names("r").values())) == 3
    assert ARGUMENTS.names("x" * 1016)  # three bytes for the separator, four for the longest group
    with pytest.raises(ProtocolError, match="with a layer group 1025, the limit is 1024"):
        ARGUMENTS.names("x" * 1018)
    for bad in ("", "r␟full", 5):
        with pytest.raises(ProtocolError):
            ARGUMENTS.names(bad)
