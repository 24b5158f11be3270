"""Who is in the group: each rank's layout, pool size, instance and incarnation, as exchanged by ``register``."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import SupportsIndex, cast

from torchkv.errors import LayoutMismatch, ProtocolError
from torchkv.layout import KVLayout, check_compatible
from torchkv.plan import PairPlan, compile_plan, contributing, coverage_gap

__all__ = ["Member", "Roster"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One rank. ``layout`` is None for a rank that registered no cache."""

    rank: int
    incarnation: int
    instance: str
    layout: KVLayout | None
    num_pages: int
    num_slots: int
    staging: int = 0  # bytes of its staging ring
    signals: int = 0  # behind it
    channels: int = 0  # of a stream through it, at most
    checksum: bool = False  # whether what it stages has checksums


class Roster:
    """All members, and the plans between them. Immutable, so any thread may read it."""

    def __init__(self, rank: int, members: Sequence[Member]) -> None:
        self.rank = rank
        self.members: Mapping[int, Member] = {member.rank: member for member in members}
        self.me = self.members[rank]
        self.instances: dict[str, tuple[int, ...]] = {}
        for member in sorted(members, key=lambda member: member.rank):
            self.instances[member.instance] = (*self.instances.get(member.instance, ()), member.rank)
        self.siblings: tuple[int, ...] = tuple(
            r for r in self.instances[self.me.instance] if self.members[r].layout is not None
        )
        # On the caller's critical path: computed once a pair.
        self.plan = lru_cache(maxsize=4096)(self._plan)
        self.contributing = lru_cache(maxsize=4096)(self._contributing)
        self.page_for_page = lru_cache(maxsize=4096)(self._page_for_page)
        self.owed = lru_cache(maxsize=4096)(self._owed)
        self.gap = lru_cache(maxsize=4096)(self._gap)
        self._targets: dict[int | str, tuple[int, ...]] = {}

    def check(self) -> None:
        """Raises ``LayoutMismatch`` for the first pair of ranks whose layouts cannot be reconciled."""
        holders = [member for member in self.members.values() if member.layout is not None]
        seen: dict[KVLayout, int] = {}
        for member in holders:
            assert member.layout is not None
            if member.layout in seen:
                continue
            for layout, rank in seen.items():
                check_compatible(layout, member.layout, rank_a=rank, rank_b=member.rank)
            seen[member.layout] = member.rank

    def resolve(self, peers: int | str | Sequence[int], what: str, name: str) -> tuple[int, ...]:
        """``src`` or ``dst`` as ranks: a rank, a list of ranks, or the name of an instance."""
        if type(peers) is int and peers in self.members:
            return (peers,)
        if isinstance(peers, str):
            if peers not in self.instances:
                known = ", ".join(sorted(self.instances))
                raise ProtocolError(f"{what}: {name}={peers!r} is no instance of this group; it has {known}")
            return self.instances[peers]
        if not _is_index(peers) and not isinstance(peers, Iterable):
            raise ProtocolError(f"{what}: {name}={peers!r} is neither a rank, nor a list of ranks, nor an instance")
        given: tuple[object, ...] = (peers,) if _is_index(peers) else tuple(cast(Iterable[object], peers))
        if not given:
            raise ProtocolError(f"{what}: {name} is empty; name at least one rank or an instance")
        for rank in given:
            if not _is_index(rank) or operator.index(cast(SupportsIndex, rank)) not in self.members:
                size = len(self.members)
                raise ProtocolError(f"{what}: {name} names {rank!r}, which is no rank of this group (size {size})")
        ranks = tuple(operator.index(cast(SupportsIndex, rank)) for rank in given)
        if len(set(ranks)) != len(ranks):
            raise ProtocolError(f"{what}: {name}={list(ranks)} names a rank twice")
        return ranks

    def targets(self, peers: int | str | Sequence[int], what: str) -> tuple[int, ...]:
        """``dst`` as those of its ranks that this one owes something: `resolve`, then `owed`."""
        plain = type(peers) is int or type(peers) is str
        if plain and (known := self._targets.get(peers)) is not None:  # type: ignore[arg-type]  # just checked
            return known
        ranks = self.owed(self.resolve(peers, what, "dst"))
        if plain:
            self._targets[peers] = ranks  # type: ignore[index]  # a rank or an instance that exists: bounded
        return ranks

    def layout(self, rank: int) -> KVLayout:
        layout = self.members[rank].layout
        if layout is None:
            raise LayoutMismatch(f"rank {rank} registered no cache, so no page can go to it or come from it")
        return layout

    def _contributing(self, src: tuple[int, ...], reader: int) -> tuple[int, ...]:
        """Those of ``src`` whose layout intersects the reader's, in rank order; none if it has no layout."""
        if self.members[reader].layout is None:
            return ()
        return contributing(self._holders(src), self.layout(reader))

    def _gap(self, src: tuple[int, ...], reader: int) -> str | None:
        """What the reader holds and none of ``src`` does, in words, or None."""
        return coverage_gap(self._holders(src), self.layout(reader))

    def _plan(self, writer: int, writers: tuple[int, ...], reader: int) -> PairPlan:
        """What ``writer`` writes into ``reader`` when ``writers`` contribute."""
        return compile_plan(writer, {rank: self.layout(rank) for rank in writers}, self.layout(reader))

    def _page_for_page(self, reader: int) -> bool:
        """Whether whole pages of this rank are whole pages of the reader."""
        writers = tuple(sorted({*self.contributing(self.siblings, reader), self.rank}))
        return self.plan(self.rank, writers, reader).page_for_page

    def _owed(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Those of ``ranks`` to which this rank owes anything; the rest need no grant and no bytes."""
        return tuple(rank for rank in ranks if self.owes(rank))

    def owes(self, reader: int) -> bool:
        """Whether this rank's layout and the reader's intersect at all."""
        return bool(self.contributing((self.rank,), reader))

    def _holders(self, ranks: Sequence[int]) -> dict[int, KVLayout]:
        return {r: layout for r in sorted(ranks) if (layout := self.members[r].layout) is not None}


def _is_index(value: object) -> bool:
    """Whether ``value`` is one whole number: also a numpy scalar or a tensor of one element, but no bool."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return False
    try:
        operator.index(cast(SupportsIndex, value))
    except (TypeError, ValueError, RuntimeError):
        return False
    return True
