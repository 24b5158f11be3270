"""How tests wait for what another thread or process does in its own time."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable


def until(condition: Callable[[], bool], operation: str, *, seconds: float = 30.0) -> None:
    """Polls ``condition``. Fails with ``operation``, and what all threads are doing, if it does not come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"after {seconds:g} s not yet: {operation}\n{_stacks()}"
        time.sleep(0.002)


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames().items()
    return "\n".join(f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames)
