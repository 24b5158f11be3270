"""How many functions of torchkv a run calls: what it costs whatever the machine, its load and its caches are."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["count_calls"]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def count_calls(run: Callable[[], Any]) -> Counter[str]:
    """Runs it. The calls of each function of torchkv in Python, and of what these call in C, by name.

    The simulation's own functions are left out. A sum over n things in one call, such as ``sum(list)``, is one call.
    """
    found: Counter[str] = Counter()
    names: dict[Any, str] = {}

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "c_call"):
            return
        code = frame.f_code
        if (name := names.get(code)) is None:
            name = names[code] = _name(code.co_filename, code.co_qualname)
        if name:
            found[name if event == "call" else f"{name} > {argument.__qualname__}"] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return found


def _name(filename: str, function: str) -> str:
    path = Path(filename)
    if HERE in path.parents or ROOT not in path.parents:
        return ""
    return f"{path.relative_to(ROOT)}:{function}"
