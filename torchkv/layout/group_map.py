"""The members of a group, as exchanged by ``register``, and the plans between each two of them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import SupportsIndex, cast

from torchkv.errors import LayoutMismatch, PeerLost, ProtocolError
from torchkv.layout.layer_groups import group_of
from torchkv.layout.layout import KVLayout, check_compatible
from torchkv.layout.pair_plan import PairPlan, compile_plan, contributing, coverage_gap, refusal

__all__ = ["RankInfo", "GroupMap"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """What the group knows of one rank.

    incarnation: tells this process from an earlier one of the same rank. instance: name of the group of ranks that
    serve one model replica together. layout: None for a rank that registered no cache. num_pages, num_slots: of its
    cache. staging: bytes of its staging ring. checksum: whether pieces that it packs or unpacks have checksums. number:
    what the rank calls itself in messages; None: also ``rank``. life: tells this instance from an earlier one of the
    same name, where instances come and go.
    """

    rank: int
    incarnation: int
    instance: str
    layout: KVLayout | None
    num_pages: int
    num_slots: int
    staging: int = 0
    checksum: bool = False
    number: int | None = None
    life: int = 0

    @property
    def own_number(self) -> int:
        return self.rank if self.number is None else self.number


class GroupMap:
    """All members of a group, as seen by rank ``rank``, and the plans between them. Any thread may read it.

    Members may come and go. The number of one that has gone is never given to another.

    info: by rank. me: this rank. instances: name -> ranks, ascending. siblings: the ranks of this rank's instance that
    have a cache, itself included. seek: looks for an instance that is no member, by what a caller named it, on behalf
    of an operation. Returns its name, once it is a member, or raises ``KVError``. Without it, that is an error.

    If this rank's layout has layer groups, ``parts`` has a group map of each: the same members, with only that part of
    their layouts. `of` finds the one that counts for a request.
    """

    def __init__(self, rank: int, members: Sequence[RankInfo]) -> None:
        self.rank = rank
        self.seek: Callable[[str, str], str] | None = None
        self._meets = False  # whether instances that were launched apart have come: then numbers alone name nobody
        self._lives: dict[tuple[str, int], tuple[int, ...]] = {}  # the ranks of each instance, by its name and life
        self._set_members(members)
        self.me = self.info[rank]
        self.siblings: tuple[int, ...] = tuple(
            r for r in self.instances[self.me.instance] if self.info[r].layout is not None
        )
        groups = () if self.me.layout is None else self.me.layout.groups
        self.parts: dict[str, GroupMap] = {
            group: GroupMap(rank, [_of_group(info, group) for info in members]) for group in groups
        }
        # Cached per argument, as these are on the critical path of every verb.
        self.plan = lru_cache(maxsize=4096)(self._plan)
        self.contributing = lru_cache(maxsize=4096)(self._contributing)
        self.page_for_page = lru_cache(maxsize=4096)(self._page_for_page)
        self.converts = lru_cache(maxsize=4096)(self._converts)
        self.refusal = lru_cache(maxsize=4096)(self._refusal)
        self.own_numbers = lru_cache(maxsize=4096)(self._own_numbers)
        self.owed = lru_cache(maxsize=4096)(self._owed)
        self.gap = lru_cache(maxsize=4096)(self._gap)
        self.exempt = lru_cache(maxsize=4096)(self._exempt)

    def _set_members(self, members: Iterable[RankInfo], *, rest: bool = False) -> None:
        """These are the members. rest: those who are here stay, and have lower numbers; nobody looks at them then.

        Makes new mappings, because other threads may be reading the old ones. Of two instances of one name, the later
        one has it.
        """
        info: dict[int, RankInfo] = dict(self.info) if rest else {}
        instances: dict[str, tuple[int, ...]] = dict(self.instances) if rest else {}
        lives: dict[tuple[str, int], tuple[int, ...]] = dict(self._lives) if rest else {}
        for member in sorted(members, key=lambda info: info.rank):
            info[member.rank] = member
            life = member.instance, member.life
            instances[member.instance] = lives[life] = (*lives.get(life, ()), member.rank)
        self.info: Mapping[int, RankInfo] = info
        self.instances: Mapping[str, tuple[int, ...]] = instances
        self._lives = lives
        self._targets: dict[int | str, tuple[int, ...]] = {}  # of the present members

    def siblings_of(self, rank: int) -> tuple[int, ...]:
        """The ranks of the instance of ``rank``, ascending."""
        mine = self.info[rank]
        return self._lives[mine.instance, mine.life]

    def add(self, members: Sequence[RankInfo]) -> None:
        """Members have come. Raises ``LayoutMismatch`` if the layout of one and this rank's are incompatible."""
        for info in members:
            assert info.rank not in self.info
            self._meets |= info.number is not None
            if self.me.layout is not None and info.layout is not None:
                check_compatible(self.me.layout, info.layout, rank_a=self.rank, rank_b=info.rank)
        self._set_members(members, rest=True)
        for group, part in self.parts.items():
            part.add([_of_group(info, group) for info in members])

    def of(self, request: str) -> GroupMap:
        """What counts for a request of this name: this group map, or that of the layer group that the name ends with.

        Raises ``ProtocolError`` if the layout has layer groups and the name ends with none.
        """
        if not self.parts:
            return self
        part = self.parts.get(group_of(request))
        if part is None:
            known = ", ".join(self.parts)
            raise ProtocolError(
                f"request {request!r} names no layer group of {self.name(self.rank)}, which has {known}"
            )
        return part

    def remove(self, rank: int) -> None:
        """A member has gone."""
        assert rank != self.rank
        self._set_members([info for other, info in self.info.items() if other != rank])
        for part in self.parts.values():
            part.remove(rank)

    def check(self) -> None:
        """Raises ``LayoutMismatch`` for the first pair of ranks whose layouts are incompatible."""
        holders = [info for info in self.info.values() if info.layout is not None]
        seen: dict[KVLayout, int] = {}
        for info in holders:
            assert info.layout is not None
            if info.layout in seen:
                continue
            for layout, rank in seen.items():
                check_compatible(layout, info.layout, rank_a=rank, rank_b=info.rank)
            seen[info.layout] = info.rank

    def resolve(self, peers: int | str | Sequence[int], operation: str, name: str) -> tuple[int, ...]:
        """Turns a verb's ``src`` or ``dst`` into ranks: a rank, a list of ranks, or the name of an instance.

        operation, name: the verb and the parameter, for errors. Raises ``ProtocolError``.
        """
        if type(peers) is int and peers in self.info:
            return (peers,)
        if isinstance(peers, str):
            if peers not in self.instances and self.seek is not None:
                peers = self.seek(peers, operation)
            if peers not in self.instances:
                known = ", ".join(sorted(self.instances))
                raise ProtocolError(f"{operation}: {name}={peers!r} is no instance of this group; it has {known}")
            return self.instances[peers]
        if not _is_index(peers) and not isinstance(peers, Iterable):
            raise ProtocolError(
                f"{operation}: {name}={peers!r} is neither a rank, nor a list of ranks, nor an instance"
            )
        given: tuple[object, ...] = (peers,) if _is_index(peers) else tuple(cast(Iterable[object], peers))
        if not given:
            raise ProtocolError(f"{operation}: {name} is empty; name at least one rank or an instance")
        for rank in given:
            if not _is_index(rank) or operator.index(cast(SupportsIndex, rank)) not in self.info:
                size = len(self.info)
                raise ProtocolError(f"{operation}: {name} names {rank!r}, which is no rank of this group (size {size})")
        ranks = tuple(operator.index(cast(SupportsIndex, rank)) for rank in given)
        if len(set(ranks)) != len(ranks):
            raise ProtocolError(f"{operation}: {name}={list(ranks)} names a rank twice")
        return ranks

    def name(self, rank: int) -> str:
        """What messages call a member, of which each process may have another number."""
        info = self.info.get(rank)
        if info is None or not self._meets:
            return f"rank {rank}"
        return f"rank {info.own_number} of instance {info.instance!r}"

    def names(self, ranks: Sequence[int]) -> str:
        """As `name`, of several: those of each instance together."""
        if not self._meets:
            return f"ranks {list(ranks)}"
        by_instance: dict[str, list[int]] = {}
        for rank in ranks:
            info = self.info.get(rank)
            name, number = (
                ("that have gone", rank) if info is None else (f"of instance {info.instance!r}", info.own_number)
            )
            by_instance.setdefault(name, []).append(number)
        return ", ".join(f"ranks {numbers} {name}" for name, numbers in by_instance.items())

    def _own_numbers(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """What these ranks, of one instance, call themselves in messages."""
        return tuple(self.info[rank].own_number for rank in ranks)

    def targets(self, peers: int | str | Sequence[int] | None, operation: str) -> tuple[int, ...]:
        """The ranks of ``dst`` to which this rank owes anything: `resolve`, then `owed`. None stands for nobody yet."""
        plain = type(peers) is int or type(peers) is str
        targets = self._targets
        if plain and (known := targets.get(peers)) is not None:  # type: ignore[arg-type]  # just checked
            return known
        if peers is None:
            return ()
        resolved = self.resolve(peers, operation, "dst")
        if (refused := self.refusal(resolved)) is not None:
            raise LayoutMismatch(f"{operation}: {refused}")
        ranks = self.owed(resolved)
        if plain:
            targets[peers] = ranks  # type: ignore[index]  # a rank or an instance that exists: bounded
        return ranks

    def known_targets(self, dst: int | str) -> tuple[int, ...]:
        """What `targets` has found before; () if it was not asked, or has found none. Any thread."""
        return self._targets.get(dst, ())

    def _refusal(self, ranks: tuple[int, ...]) -> str | None:
        """Why the first of ``ranks`` does not accept the dtype of this rank's pages, as a clause; None if all do."""
        if self.me.layout is None:
            return None
        for layout in self._holders(ranks).values():
            if (refused := refusal({self.rank: self.me.layout}, layout)) is not None:
                return refused
        return None

    def layout(self, rank: int) -> KVLayout:
        """The layout of ``rank``. Raises ``LayoutMismatch`` if it registered no cache."""
        layout = self._member(rank).layout
        if layout is None:
            raise LayoutMismatch(f"{self.name(rank)} registered no cache, so no page can go to it or come from it")
        return layout

    def _contributing(self, src: tuple[int, ...], reader: int) -> tuple[int, ...]:
        """The ranks of ``src`` that hold anything the reader holds, ascending; none if the reader has no cache."""
        if self._member(reader).layout is None:
            return ()
        return contributing(self._holders(src), self.layout(reader))

    def _gap(self, src: tuple[int, ...], reader: int) -> str | None:
        """The first part of the reader's cache that no rank of ``src`` holds, in words; None if there is none."""
        return coverage_gap(self._holders(src), self.layout(reader))

    def _plan(self, writer: int, writers: tuple[int, ...], reader: int) -> PairPlan:
        """What ``writer`` owes ``reader`` when all of ``writers`` send to it; see `compile_plan`."""
        return compile_plan(writer, {rank: self.layout(rank) for rank in writers}, self.layout(reader))

    def _page_for_page(self, reader: int) -> bool:
        """Whether all page pairs between this rank and the reader are whole pages on both sides."""
        writers = tuple(sorted({*self.contributing(self.siblings, reader), self.rank}))
        return self.plan(self.rank, writers, reader).page_for_page

    def _owed(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks of ``ranks`` to which this rank owes anything. The others neither grant nor receive."""
        return tuple(rank for rank in ranks if self.owes(rank))

    def _exempt(self, src: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks of ``src`` that owe this rank's instance nothing, if it is this rank that tells them."""
        if self.rank != self.siblings[0]:
            return ()
        holding = [rank for rank in src if self._member(rank).layout is not None]
        return tuple(r for r in holding if not any(self.contributing((r,), reader) for reader in self.siblings))

    def _converts(self, reader: int) -> bool:
        """Whether pages of this rank are converted to another dtype on their way to the reader."""
        writers = tuple(sorted({*self.contributing(self.siblings, reader), self.rank}))
        return self.owes(reader) and self.plan(self.rank, writers, reader).converts

    def owes(self, reader: int) -> bool:
        """Whether this rank holds anything that the reader holds."""
        return bool(self.contributing((self.rank,), reader))

    def _holders(self, ranks: Sequence[int]) -> dict[int, KVLayout]:
        return {r: layout for r in sorted(ranks) if (layout := self._member(r).layout) is not None}

    def _member(self, rank: int) -> RankInfo:
        if (info := self.info.get(rank)) is None:  # it was a member when the caller named it
            raise PeerLost(f"rank {rank} has gone")
        return info


def _of_group(info: RankInfo, group: str) -> RankInfo:
    layout = info.layout
    if layout is not None:  # of another layout `check` says what differs
        layout = layout.of_group(group) if group in layout.groups else None
    return replace(info, layout=layout)


def _is_index(value: object) -> bool:
    """Whether ``value`` is an integer, such as an int, a numpy scalar or a tensor of one element, but not a bool."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return False
    try:
        operator.index(cast(SupportsIndex, value))
    except (TypeError, ValueError, RuntimeError):
        return False
    return True
