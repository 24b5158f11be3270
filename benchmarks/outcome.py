"""What each benchmark hands to the command line: a line to print, a row for JSON, and a verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Outcome"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One measurement. passed: False if a gate was missed or a byte was wrong. wrong: how many bytes were."""

    line: str
    row: dict[str, Any]
    passed: bool = True
    wrong: int = 0
