"""Grants that a resident loop was told of: they mean what the same grants mean in messages, and no words pass by."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.helpers.protocol import pair
from torchkv.errors import ProtocolError
from torchkv.protocol.messages import Grant, pack_pages
from torchkv.protocol.sending.grant_checks import bound_grant, loop_grant

READER = 1


def words(**changed: Any) -> dict[str, Any]:
    made = {"name": b"r", "generation": 3, "prefix_tokens": 8, "pages": [5, 6], "writers": (0,), "flow": 2}
    made |= {"state_slot": None, **changed}
    return made | {"pages": np.array(made["pages"], dtype=np.int64)}


def in_a_message(given: dict[str, Any]) -> Grant:
    return Grant(
        given["name"].decode(),
        given["generation"],
        given["prefix_tokens"],
        pack_pages(given["pages"]),
        list(given["writers"]),
        given["state_slot"],
        given["flow"],
    )


def test_it_is_the_grant_that_a_message_would_be() -> None:
    members = pair(0)
    one, other = loop_grant(members, READER, **words()), bound_grant(members, READER, in_a_message(words()))
    for field in ("dst", "generation", "request", "prefix_tokens", "state_slot", "flow", "absent_tokens"):
        assert getattr(one, field) == getattr(other, field), field
    assert one.plan is other.plan
    assert one.pages.tolist() == other.pages.tolist() == [5, 6]


@pytest.mark.parametrize(
    "changed",
    [
        {"writers": ()},
        {"writers": (1,)},  # without this rank
        {"writers": (0, 5)},  # a rank that there is not
        {"pages": [5, -1]},
        {"pages": [1 << 40]},
        {"state_slot": 0},  # it has no slots
    ],
)
def test_what_a_message_is_refused_for_is_refused(changed: dict[str, Any]) -> None:
    members, given = pair(0), words(**changed)
    with pytest.raises(ProtocolError) as in_message:
        bound_grant(members, READER, in_a_message(given))
    with pytest.raises(ProtocolError) as on_loop:
        loop_grant(members, READER, **given)
    assert str(on_loop.value) == str(in_message.value)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"name": b"\xff"}, "does not decode"),
        ({"name": b""}, "a name of 0 bytes"),
        ({"name": b"n" * 1025}, "a name of 1025 bytes"),
        ({"generation": -1}, "generation -1"),
        ({"generation": 1 << 62}, "generation 46"),
        ({"prefix_tokens": -8}, "prefix of -8"),
        ({"prefix_tokens": 1 << 62}, "prefix of 46"),
    ],
)
def test_what_no_message_could_say_is_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        loop_grant(pair(0), READER, **words(**changed))
