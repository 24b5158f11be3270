"""What a resident loop has told, in tests."""

from __future__ import annotations

from collections.abc import Iterable

from torchkv.core.events import Notice
from torchkv.core.loop.codes import OP_DONE

__all__ = ["ended_ops", "kinds"]


def kinds(notices: Iterable[Notice]) -> list[int]:
    """Of each event: a notice may tell of several ops that have ended."""
    return [notice.kind for notice in notices for _ in (notice.words if notice.kind == OP_DONE else (0,))]


def ended_ops(notices: Iterable[Notice]) -> list[int]:
    """The indices of ops that have ended, in their order."""
    return [index for notice in notices if notice.kind == OP_DONE for index in notice.words]
