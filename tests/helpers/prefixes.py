"""What the tests of the prefix cache share."""

from __future__ import annotations

from torchkv import PeerLost, PrefixCache
from torchkv.errors import KVError

__all__ = ["collide", "failure"]


def collide(cache: PrefixCache) -> PrefixCache:
    """Makes every page of an empty cache hash to one value."""
    cache._index.keys[:] = 0
    return cache


def failure(safe: bool) -> tuple[KVError, list[bool]]:
    """An error of a receive, and the list whose only element its ``pages_safe`` returns."""
    state = [safe]
    return PeerLost("gone", pages_safe=lambda: state[0]), state
