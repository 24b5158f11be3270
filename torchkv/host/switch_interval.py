"""Python's switch interval: how long a thread that runs Python code may keep the GIL while another one waits for it.

It is the whole process's, and 5 ms by default. A group whose Python serves requests lowers it (`ShortTurns`), because
with the default a layer would start so late if its caller goes on in Python. What the resident loop serves needs no
GIL, so a group that leaves all of its requests to the loop leaves the interval alone.
"""

from __future__ import annotations

import sys
import threading

__all__ = ["SWITCH_INTERVAL", "ShortTurns"]

SWITCH_INTERVAL = 0.0005  # seconds

_lock = threading.Lock()
_users: set[int] = set()  # ids of those that have it lowered
_before = 0.0  # what to set again when the last of them ends


class ShortTurns:
    """One group's wish that threads hand over the GIL soon. Any thread may call both methods, several times."""

    def __init__(self) -> None:
        self._wanted = False

    def begin(self) -> None:
        """Lowers the interval, unless it is as low already."""
        global _before
        if self._wanted:  # part of each request that Python serves
            return
        with _lock:
            self._wanted = True
            if not _users:
                _before = sys.getswitchinterval()
                sys.setswitchinterval(min(_before, SWITCH_INTERVAL))
            _users.add(id(self))

    def end(self) -> None:
        """Sets it to what it was, if no other group wants it low and nobody has changed it meanwhile."""
        if not self._wanted:
            return
        with _lock:
            self._wanted = False
            _users.discard(id(self))
            # Python keeps whole microseconds.
            if not _users and abs(sys.getswitchinterval() - min(_before, SWITCH_INTERVAL)) < 2e-6:
                sys.setswitchinterval(_before)
