"""Bytes that may be kept of what has come too early: of one peer, and of all together."""

from __future__ import annotations

__all__ = ["Allowance"]


class Allowance:
    """Counts bytes. Not thread-safe.

    limit: how many may be kept at once. shared: another allowance, in which they count too.
    """

    def __init__(self, limit: int, shared: Allowance | None = None) -> None:
        self.kept = 0
        self._limit = limit
        self._shared = shared

    def take(self, nbytes: int) -> bool:
        """Whether so many more may be kept; then they count."""
        if self.kept + nbytes > self._limit or not (self._shared is None or self._shared.take(nbytes)):
            return False
        self.kept += nbytes
        return True

    def give_back(self, nbytes: int) -> None:
        """So many are kept no more."""
        assert nbytes <= self.kept
        self.kept -= nbytes
        if self._shared is not None:
            self._shared.give_back(nbytes)
