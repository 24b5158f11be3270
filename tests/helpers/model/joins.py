"""An instance of two ranks and one of a single rank meet over a network that loses, doubles and reorders; one restarts.

The real `Membership` and `Greeter` of every rank; what they use of an engine is stood in for. A second life of the two
ranks listens at the same addresses, so greetings to the first one reach it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from tests.helpers.model.explorer import freeze
from torchkv.engine.joining.membership import Membership
from torchkv.engine.joining.peer_metadata import PeerMetadata
from torchkv.host.processes import ProcessId, this_process

__all__ = ["Joins"]

FIRST, SECOND, CALLER = 1, 2, 7  # lives: of the two ranks, of the one that calls them
SIZE = 2
SECRET = bytes(32)
_SKIP = frozenset({"deadline", "next_retry", "_greeting", "_answer", "_engine", "_registration", "_control", "_secret"})
_PROCESS: ProcessId = this_process()


class _Rank:
    """A rank's membership. lost, gone: numbers of ranks that do not answer, and of whom nothing is left."""

    def __init__(self, world: Joins, number: int, cards: list[PeerMetadata], life: int) -> None:
        self.life = life
        self.lost: dict[int, str] = {}
        self.gone: set[int] = set()
        self.known: dict[int, tuple[int, int]] = {}  # number here -> life, number there
        me = cards[number]
        self.instances: dict[str, tuple[int, ...]] = {me.instance: tuple(range(len(cards)))}
        group_map = SimpleNamespace(rank=number, instances=self.instances, me=SimpleNamespace(instance=me.instance))
        engine: Any = SimpleNamespace(
            group_map=group_map,
            lost=self.lost,
            drop=lambda error: None,
            whole_pages=set(),
            peers=SimpleNamespace(
                gone=self.gone.__contains__,
                forget=lambda rank, farewell="": self._forget(rank),
                named=set,  # no request needs anybody
                finished=lambda rank: True,
            ),
        )
        registration: Any = SimpleNamespace(admit=self._admit, forget=lambda rank: None)
        control: Any = SimpleNamespace(greet=world.send, rouse=lambda rank: None)
        self.membership = Membership(engine, registration, control, cards, secret=SECRET)
        self.world = world

    def _admit(self, engine: object, members: Mapping[int, PeerMetadata], *, life: int) -> None:
        lives = {card.incarnation if card.rank == 0 else card.incarnation // 10 for card in members.values()}
        if lives != {life}:
            self.world.wrong = f"ranks of the lives {sorted(lives)} are admitted as life {life}"
        name = members[min(members)].instance
        if len(members) != (SIZE if name == "p" else 1):
            self.world.wrong = f"of {name} only {len(members)} ranks are admitted"
        before = [number for number, (other, _) in self.known.items() if other == life or number not in self.lost]
        if before:
            self.world.wrong = f"life {life} of {name} is admitted while ranks {before} are here"
        self.instances[name] = tuple(members)
        self.known |= {number: (life, card.rank) for number, card in members.items()}

    def _forget(self, number: int) -> None:
        del self.known[number], self.lost[number]
        self.gone.remove(number)
        for name in [name for name, numbers in self.instances.items() if number in numbers]:
            del self.instances[name]

    def state(self) -> object:
        """Whom it knows, and what of them. Their numbers do not matter, and are never the same twice."""
        return tuple((*self.known[n], n in self.lost, n in self.gone) for n in sorted(self.known))

    def admitted(self) -> set[int]:
        return {life for life, _ in self.known.values()}


class Joins:
    """restarts: whether the two ranks may be killed and started again, once. mutual: whether these call, too."""

    def __init__(self, restarts: int = 1, *, mutual: bool = False) -> None:
        self.wrong = ""
        self.restarts = restarts
        self.mutual = mutual
        self.network: set[tuple[str, bytes]] = set()  # endpoint, greeting; may be delivered any number of times
        self.ended: list[str] = []  # what calls have ended with
        self.now = 0.0
        self.caller = _Rank(self, 0, [_card("d", 0, CALLER)], CALLER)
        self._start(FIRST)
        self._connect()

    def _start(self, life: int) -> None:
        cards = [_card("p", number, life) for number in range(SIZE)]
        self.ranks = [_Rank(self, number, cards, life) for number in range(SIZE)]
        self.life = life
        if self.mutual:
            self.ranks[-1].membership.connect("tcp://d:0", lambda name, error: None, seconds=1e9, now=self.now)

    def _connect(self) -> None:
        done = self.ended.append
        self.caller.membership.connect("tcp://p:0", lambda name, error: done(name), seconds=1e9, now=self.now)

    def send(self, endpoint: str, data: bytes) -> None:
        self.network.add((endpoint, data))

    # ------------------------------------------------------------------ the explorer's questions

    def choices(self) -> list[str]:
        found = [f"deliver {i}" for i in range(len(self.network))]
        if self.network:
            found.append("lose")  # all of it: what is lost by itself might as well not be delivered until then
        found += [f"tick {i}" for i, rank in enumerate([self.caller, *self.ranks]) if rank.membership._greeter.busy]
        if self.restarts and self.life == FIRST:
            found.append("restart")
        dead = {number for number, (life, _) in self.caller.known.items() if life != self.life}
        if dead - self.caller.lost.keys():
            found.append("see death")
        if dead & self.caller.lost.keys() - self.caller.gone:
            found.append("drain")  # nothing of theirs can land any more
        if "p" not in self.caller.membership.peers and not self.caller.membership._greeter._calls:
            found.append("connect")  # as the next verb that names it does
        return found

    def do(self, choice: str) -> None:
        verb, _, what = choice.partition(" ")
        everyone = [self.caller, *self.ranks]
        match verb:
            case "deliver":
                endpoint, data = self._sorted()[int(what)]
                to = self.caller if endpoint.startswith("tcp://d") else self.ranks[int(endpoint[-1])]
                to.membership.receive([data], self.now)
            case "lose":
                self.network.clear()
            case "tick":
                self.now += 1.0
                everyone[int(what)].membership.tick(self.now)
            case "restart":
                self._start(SECOND)
            case "see":
                dead = [number for number, (life, _) in self.caller.known.items() if life != self.life]
                self.caller.lost.update(dict.fromkeys(dead, "dead"))
                self.caller.membership.tick(self.now)
            case "drain":
                self.caller.gone.update(self.caller.lost)
                self.caller.membership.tick(self.now)
            case "connect":
                self._connect()
        for rank in everyone:
            for meeting in rank.membership._greeter._meetings.values():
                meeting.deadline = float("inf")

    def state(self) -> object:
        ranks = [(freeze(rank.membership._greeter, _SKIP), rank.state()) for rank in (self.caller, *self.ranks)]
        rest = self.life, bool(self.ended)
        return tuple(ranks), rest, tuple(self._sorted())

    def problem(self) -> str:
        return self.wrong

    def problem_at_rest(self) -> str:
        if self.caller.admitted() != {self.life}:
            return f"the caller knows the lives {self.caller.admitted()}, and {self.life} is there"
        if any(rank.admitted() != {CALLER} for rank in self.ranks):
            return "a rank that was called does not know the caller"
        if self.caller.membership._greeter._admitted.keys() != {self.life}:
            return "the dead are remembered"
        if not self.ended:
            return "connect never ends"
        return ""

    # ------------------------------------------------------------------ inside

    def _sorted(self) -> list[tuple[str, bytes]]:
        return sorted(self.network)


def _card(name: str, number: int, life: int) -> PeerMetadata:
    key = name, number, life
    if key not in _cards:
        _cards[key] = PeerMetadata(
            rank=number,
            incarnation=life if number == 0 else 10 * life + number,
            instance=name,
            process=_PROCESS,
            endpoint=f"tcp://{name}:{number}",
        )
    return _cards[key]


_cards: dict[tuple[str, int, int], PeerMetadata] = {}
