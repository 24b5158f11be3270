"""Calls of a group's verbs that must be refused, and the check that they are."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from torchkv import KVError, KVProcessGroup

__all__ = ["Bad", "outcome", "refuse"]

# Name, call, type of the error, and patterns that its text must match.
Bad: TypeAlias = tuple[str, Callable[[KVProcessGroup], Any], type[KVError], tuple[str, ...]]


def outcome(call: Callable[[], object]) -> str:
    """What a call raises, in words, or "accepted"."""
    try:
        call()
    except KVError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def refuse(kv: KVProcessGroup, cases: list[Bad]) -> None:
    for name, call, kind, words in cases:
        with pytest.raises(KVError) as caught:
            call(kv)
        error = caught.value
        assert type(error) is kind, f"{name}: {error!r}"
        assert isinstance(error, ValueError), name
        for word in words:
            assert re.search(word, str(error)), f"{name}: no {word!r} in {error}"
        assert error.pages_safe, name
        assert not error.retryable, name
