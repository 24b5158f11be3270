"""Verbs in the general way, beside which the straight way of plain verbs is tested."""

from __future__ import annotations

from typing import NoReturn

import pytest

from torchkv.group.layer_groups import GroupedVerbs
from torchkv.group.plain.verbs import PlainVerbs
from torchkv.group.verbs import Verbs

__all__ = ["forbid_the_general_way", "leave_the_straight_way"]


STRAIGHT_WAYS = ("_send_plain", "_send_states_plain", "_finish_plain", "_recv_plain", "granted_plain", "prefix_of")
WAYS = ("_send_any", "_send_states", "_finish", "_recv_pages")


def forbid_the_general_way(rank: Verbs, patch: pytest.MonkeyPatch, *ways: str) -> None:
    """From now on these of `WAYS`, or all, fail the test, at this rank."""

    def general(*_: object) -> NoReturn:
        raise AssertionError("not the straight way")

    for name in ways or WAYS:
        patch.setattr(rank, name, general)


def leave_the_straight_way(patch: pytest.MonkeyPatch) -> None:
    """From now on no verb of any rank is taken for plain."""
    for verbs in (PlainVerbs, GroupedVerbs):
        for name in STRAIGHT_WAYS:
            patch.setattr(verbs, name, lambda *_: None)
