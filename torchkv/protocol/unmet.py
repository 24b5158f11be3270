"""Grants, cancels and revocations of a sender that have not met their counterpart yet.

Grants and requests of one name meet in the order in which both sides made them: the k-th `recv_pages` is for the k-th
sender request. So what never met is remembered, for a while:

* a grant that came before the first verb waits for it;
* a request that was cancelled before its grant came, or declined, refuses that grant when it comes;
* a grant that was revoked before the first verb, or a request that the receiver refused before, was meant for the next
  request of its name.
"""

from __future__ import annotations

from collections import deque
from typing import Any, TypeAlias

from torchkv.errors import KVError
from torchkv.protocol.actions import BoundGrant

__all__ = ["MAX_REMEMBERED", "Key", "Unmet"]

Key: TypeAlias = tuple[str, int]  # a request's name, and its receiver

MAX_REMEMBERED = 4096  # keys with refusals, and with a revocation


class Unmet:
    """One rank's. Not thread-safe. lifetime: of refusals and revocations, in seconds."""

    def __init__(self, lifetime: float) -> None:
        self._lifetime = lifetime
        self._grants: dict[Key, BoundGrant] = {}
        self._names: dict[tuple[int, int], str] = {}  # of the grants, by receiver and generation
        self._revocations: dict[Key, tuple[float, KVError]] = {}  # when, and why
        self._refusals: dict[Key, deque[float]] = {}  # until when each refuses one grant

    # ---------------------------------------------------------------- grants that wait for the first verb

    def grant(self, key: Key) -> BoundGrant | None:
        """The grant that waits."""
        return self._grants.get(key)

    def grants(self) -> list[BoundGrant]:
        return list(self._grants.values())

    def keep(self, grant: BoundGrant) -> None:
        """Remembers a grant, in place of an earlier one of this name."""
        key = grant.request, grant.dst
        self.take(key)
        self._grants[key] = grant
        self._names[grant.dst, grant.generation] = grant.request

    def take(self, key: Key) -> BoundGrant | None:
        """The grant that waits, which is forgotten."""
        grant = self._grants.pop(key, None)
        if grant is not None:
            del self._names[grant.dst, grant.generation]
        return grant

    def forget(self, dst: int) -> None:
        """Forgets what was remembered of a receiver whose process has ended."""
        for key in [key for key in self._grants if key[1] == dst]:
            self.take(key)
        for remembered in (self._revocations, self._refusals):
            for key in [key for key in remembered if key[1] == dst]:
                del remembered[key]

    # ---------------------------------------------------------------- revocations that wait for the first verb

    def revoke(self, dst: int, generation: int, error: KVError, now: float) -> None:
        """A receiver has revoked a grant: if that waits here, the next request of its name is told ``error``."""
        name = self._names.get((dst, generation))
        if name is None:
            return
        self.take((name, dst))
        self.refused((name, dst), error, now)

    def refused(self, key: Key, error: KVError, now: float) -> None:
        """A receiver grants nothing to the next request of this name, which is told ``error``."""
        _make_room(self._revocations)
        self._revocations[key] = now, error

    def take_revocation(self, key: Key) -> tuple[float, KVError] | None:
        """When and why the grant of the request that now begins was revoked, which is forgotten; None if it was not."""
        return self._revocations.pop(key, None)

    # ---------------------------------------------------------------- refusals of grants that are still to come

    def refuse(self, key: Key, now: float) -> None:
        """A request was cancelled or declined before its grant came, which must not bind a later one of this name."""
        _make_room(self._refusals)
        self._refusals.setdefault(key, deque()).append(now + self._lifetime)

    @property
    def refusing(self) -> bool:
        """Whether any grant is to be refused."""
        return bool(self._refusals)

    def refuses(self, key: Key) -> bool:
        """Whether a grant may come that was meant for a cancelled request."""
        return key in self._refusals

    def take_refusal(self, key: Key, now: float) -> bool:
        """Whether the grant that has come was meant for a request that had been cancelled. Uses up one refusal."""
        waiting = self._refusals.get(key)
        while waiting:
            until = waiting.popleft()
            if not waiting:
                del self._refusals[key]
            if until > now:
                return True
        return False

    def expire(self, now: float) -> None:
        """Forgets what is too old."""
        for key in [key for key, until in self._refusals.items() if until[-1] <= now]:
            del self._refusals[key]
        for key in [key for key, (at, _) in self._revocations.items() if now >= at + self._lifetime]:
            del self._revocations[key]


def _make_room(remembered: dict[Key, Any]) -> None:
    """Makes room for one more entry: forgets the oldest if there are `MAX_REMEMBERED`."""
    if len(remembered) >= MAX_REMEMBERED:
        del remembered[next(iter(remembered))]
