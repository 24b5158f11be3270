"""What a state machine counts of its requests, for reports."""

from __future__ import annotations

from torchkv.errors import KVError
from torchkv.observe.histogram import Histogram

__all__ = ["SEVERAL", "Counts"]

SEVERAL = -1  # in place of a rank: bytes of several writers, of which only the sum is known
_PATHS = frozenset({"direct", "runs", "slices", "staged"})  # a peer may name any other, and must not fill the memory


class Counts:
    """outcomes: how requests ended -> how many: ``success``, or the name of the error's class.

    bytes: (peer, path) -> bytes that arrived, there or here. grants: seconds from a sender request's first verb to its
    grant, of those that Python binds. taken_back: requests that were taken back from the resident loop.
    """

    __slots__ = ("bytes", "grants", "outcomes", "taken_back")

    def __init__(self) -> None:
        self.outcomes: dict[str, int] = {}
        self.bytes: dict[tuple[int, str], int] = {}
        self.grants = Histogram()
        self.taken_back = 0

    def ended(self, error: KVError | None) -> None:
        """A request has succeeded, or failed."""
        outcome = "success" if error is None else type(error).__name__
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def moved(self, peer: int, path: str, nbytes: int) -> None:
        """Bytes to or from ``peer``, a rank or `SEVERAL`, are in their pages."""
        if nbytes:
            key = peer, path if path in _PATHS else "other"
            self.bytes[key] = self.bytes.get(key, 0) + nbytes
