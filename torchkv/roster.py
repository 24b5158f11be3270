"""Who is in the group: each rank's layout, pool size, instance and incarnation, as exchanged by ``register``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

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


class Roster:
    """All members, and the plans between them. Immutable, so any thread may read it."""

    def __init__(self, rank: int, members: Sequence[Member]) -> None:
        self.rank = rank
        self.members: Mapping[int, Member] = {member.rank: member for member in members}
        self.me = self.members[rank]
        self.instances: dict[str, tuple[int, ...]] = {}
        for member in sorted(members, key=lambda member: member.rank):
            self.instances[member.instance] = (*self.instances.get(member.instance, ()), member.rank)
        self.plan = lru_cache(maxsize=4096)(self._plan)

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

    @property
    def siblings(self) -> tuple[int, ...]:
        """Ranks of this rank's own instance that hold a cache, this one included."""
        return tuple(r for r in self.instances[self.me.instance] if self.members[r].layout is not None)

    def resolve(self, peers: int | str | Sequence[int], what: str) -> tuple[int, ...]:
        """``src`` or ``dst`` as ranks: a rank, a list of ranks, or the name of an instance."""
        if isinstance(peers, str):
            if peers not in self.instances:
                known = ", ".join(sorted(self.instances))
                raise ProtocolError(f"{what}={peers!r} is no instance of this group; it has {known}")
            return self.instances[peers]
        ranks = (peers,) if isinstance(peers, int) else tuple(peers)
        if not ranks:
            raise ProtocolError(f"{what} is empty; name at least one rank or an instance")
        for rank in ranks:
            if isinstance(rank, bool) or not isinstance(rank, int) or rank not in self.members:
                raise ProtocolError(f"{what} names {rank!r}, which is no rank of this group (size {len(self.members)})")
        if len(set(ranks)) != len(ranks):
            raise ProtocolError(f"{what}={list(ranks)} names a rank twice")
        return ranks

    def layout(self, rank: int) -> KVLayout:
        layout = self.members[rank].layout
        if layout is None:
            raise LayoutMismatch(f"rank {rank} registered no cache, so no page can go to it or come from it")
        return layout

    def contributing(self, src: Sequence[int], reader: int) -> tuple[int, ...]:
        """Those of ``src`` whose layout intersects the reader's, in rank order."""
        return contributing(self._holders(src), self.layout(reader))

    def gap(self, src: Sequence[int], reader: int) -> str | None:
        """What the reader holds and none of ``src`` does, in words, or None."""
        return coverage_gap(self._holders(src), self.layout(reader))

    def _plan(self, writer: int, writers: tuple[int, ...], reader: int) -> PairPlan:
        """What ``writer`` writes into ``reader`` when ``writers`` contribute."""
        return compile_plan(writer, {rank: self.layout(rank) for rank in writers}, self.layout(reader))

    def owes(self, writer: int, reader: int) -> bool:
        """Whether the two layouts intersect at all."""
        if self.members[writer].layout is None or self.members[reader].layout is None:
            return False
        return bool(self.contributing([writer], reader))

    def _holders(self, ranks: Sequence[int]) -> dict[int, KVLayout]:
        return {r: layout for r in sorted(ranks) if (layout := self.members[r].layout) is not None}
