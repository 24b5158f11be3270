"""Members that come and go, and how many of them a change looks at."""

from __future__ import annotations

from typing import Any

from torchkv.layout.group_map import GroupMap, RankInfo


def infos(instance: str, *ranks: int, life: int = 0) -> list[RankInfo]:
    common = {"instance": instance, "layout": None, "num_pages": 0, "num_slots": 0, "life": life}
    return [RankInfo(rank=rank, incarnation=rank, **common) for rank in ranks]


def test_siblings_are_of_one_life() -> None:
    view = GroupMap(0, infos("a", 0, 1))
    view.add(infos("b", 2, 3, life=1))
    view.add(infos("b", 4, 5, life=2))
    assert (view.siblings_of(0), view.siblings_of(3), view.siblings_of(4)) == ((0, 1), (2, 3), (4, 5))
    assert view.instances == {"a": (0, 1), "b": (4, 5)}
    view.remove(2)
    assert view.siblings_of(3) == (3,)
    view.remove(4)
    view.remove(5)
    assert view.instances == {"a": (0, 1), "b": (3,)}


class Watched(RankInfo):
    """A member that counts how often it is looked at."""

    __slots__ = ()
    looks = 0

    def __getattribute__(self, name: str) -> Any:
        Watched.looks += 1
        return super().__getattribute__(name)


def test_who_comes_is_looked_at_and_nobody_else() -> None:
    fields = {"instance": "a", "layout": None, "num_pages": 0, "num_slots": 0}
    view = GroupMap(0, [Watched(rank=rank, incarnation=rank, **fields) for rank in range(100)])
    looks = Watched.looks
    assert looks >= 100
    view.add(infos("b", 100, 101))
    assert len(view.info) == 102
    assert view.siblings_of(100) == (100, 101)
    assert Watched.looks - looks <= 10
