"""Grants, cancels and revocations of a sender that have not met their counterpart yet.

Grants and requests of one name meet in the order in which both sides made them: the k-th `recv_pages` is for the k-th
sender request. So what never met is remembered, for a while:

* a grant that came before the first verb waits for it;
* a request that was cancelled before its grant came, or declined, refuses that grant when it comes;
* a grant that was revoked before the first verb, or a request that the receiver refused before, was meant for the next
  request of its name.

A request may be meant for `ANYBODY`: for whoever grants it first.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from torchkv.errors import KVError
from torchkv.protocol.actions import ANYBODY, BoundGrant, Key

__all__ = ["MAX_REMEMBERED", "Unmet"]

MAX_GRANTS = 1 << 14  # of one receiver that wait for their first verb
MAX_GRANTED_PAGES = 1 << 22  # of all these together
MAX_REMEMBERED = 4096  # keys with refusals, with a revocation, and names with an exemption


class Unmet:
    """One rank's. Not thread-safe. lifetime: of refusals and revocations, in seconds."""

    def __init__(self, lifetime: float) -> None:
        self._lifetime = lifetime
        self._grants: dict[str, dict[int, BoundGrant]] = {}  # by name and receiver
        self._waiting: dict[int, tuple[int, int]] = {}  # by receiver: how many grants, and pages of these
        self._names: dict[tuple[int, int], str] = {}  # of the grants, by receiver and generation
        self._revocations: dict[Key, tuple[float, KVError]] = {}  # when, and why
        self._revokers: dict[str, dict[int, None]] = {}  # of these: by name, the receivers
        self._refusals: dict[Key, deque[float]] = {}  # until when each refuses one grant
        self._exemptions: dict[str, tuple[float, int]] = {}  # by name: when, and who told

    # ---------------------------------------------------------------- grants that wait for the first verb

    def grant(self, key: Key) -> BoundGrant | None:
        """The grant that waits."""
        return self._grants.get(key[0], {}).get(key[1])

    def grants(self) -> list[BoundGrant]:
        """All that wait."""
        return [grant for named in self._grants.values() for grant in named.values()]

    def named(self, request: str) -> list[BoundGrant]:
        """Those of one name, the earliest first."""
        return list(self._grants.get(request, {}).values())

    def has_room(self, grant: BoundGrant) -> bool:
        """Whether the grant may be kept: what one receiver makes this rank remember is bounded."""
        count, pages = self._waiting.get(grant.dst, (0, 0))
        return count < MAX_GRANTS and pages + len(grant.pages) <= MAX_GRANTED_PAGES

    def keep(self, grant: BoundGrant) -> None:
        """Remembers a grant, in place of an earlier one of this name."""
        key = grant.request, grant.dst
        self.take(key)
        self._count(grant, 1)
        self._grants.setdefault(grant.request, {})[grant.dst] = grant
        self._names[grant.dst, grant.generation] = grant.request

    def take(self, key: Key) -> BoundGrant | None:
        """The grant that waits, which is forgotten."""
        named = self._grants.get(key[0], {})
        grant = named.pop(key[1], None)
        if grant is not None:
            self._count(grant, -1)
            del self._names[grant.dst, grant.generation]
            if not named:
                del self._grants[key[0]]
        return grant

    def _count(self, grant: BoundGrant, sign: int) -> None:
        count, pages = self._waiting.pop(grant.dst, (0, 0))
        if count + sign:
            self._waiting[grant.dst] = count + sign, pages + sign * len(grant.pages)

    def forget(self, dst: int) -> None:
        """Forgets what was remembered of a receiver whose process has ended."""
        for name in [name for name, named in self._grants.items() if dst in named]:
            self.take((name, dst))
        for key in [key for key in self._revocations if key[1] == dst]:
            self._take_revocation(key)
        for key in [key for key in self._refusals if key[1] == dst]:
            del self._refusals[key]
        for name in [name for name, (_, source) in self._exemptions.items() if source == dst]:
            del self._exemptions[name]

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
        if len(self._revocations) >= MAX_REMEMBERED:
            self._take_revocation(next(iter(self._revocations)))
        self._revocations[key] = now, error
        self._revokers.setdefault(key[0], {})[key[1]] = None

    def _take_revocation(self, key: Key) -> tuple[float, KVError] | None:
        taken = self._revocations.pop(key, None)
        if taken is not None:
            named = self._revokers[key[0]]
            del named[key[1]]
            if not named:
                del self._revokers[key[0]]
        return taken

    def take_revocation(self, key: Key) -> tuple[float, KVError] | None:
        """When and why the grant of the request that now begins was revoked, which is forgotten; None if it was not."""
        if key[1] != ANYBODY:
            return self._take_revocation(key)
        # All of them: the ranks of one instance have given up together.
        taken = [self._take_revocation((key[0], dst)) for dst in self.revoked(key[0])]
        return taken[0] if taken else None

    def is_revoked(self, key: Key) -> bool:
        """Whether the request that begins next was refused, or its grant revoked."""
        return key in self._revocations

    def revoked(self, request: str) -> list[int]:
        """The receivers whose revocations wait for the next request of this name."""
        return list(self._revokers.get(request, ()))

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

    # ---------------------------------------------------------------- requests of which this rank owes nothing

    def exempt(self, request: str, source: int, now: float) -> None:
        """An instance has granted the next request of this name, and needs nothing of this rank. source: who tells."""
        _make_room(self._exemptions)
        self._exemptions[request] = now, source

    def is_exempt(self, request: str) -> bool:
        """Whether an instance has told of it."""
        return request in self._exemptions

    def take_exemption(self, request: str) -> int | None:
        """Who has told of it; it is forgotten. None if nobody has."""
        return self._exemptions.pop(request, (0.0, None))[1]

    def expire(self, now: float) -> None:
        """Forgets what is too old."""
        for key in [key for key, until in self._refusals.items() if until[-1] <= now]:
            del self._refusals[key]
        for key in [key for key, (at, _) in self._revocations.items() if now >= at + self._lifetime]:
            self._take_revocation(key)
        for name in [name for name, (at, _) in self._exemptions.items() if now >= at + self._lifetime]:
            del self._exemptions[name]


def _make_room(remembered: dict[Any, Any]) -> None:
    """Makes room for one more entry: forgets the oldest if there are `MAX_REMEMBERED`."""
    if len(remembered) >= MAX_REMEMBERED:
        del remembered[next(iter(remembered))]
