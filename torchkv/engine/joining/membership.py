"""Who belongs to a world in which instances come and go: greets, admits and forgets. Belongs to the driver's thread.

Ranks of other instances get numbers of this rank's own, from the size of its instance on; no number is given twice.
What each calls itself, its number in its own instance, is what messages name (`RankInfo.number`).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from torchkv.control.channel import ControlChannel
from torchkv.control.greeting import Greeter, Greeting, Refusal, decode_greeting, encode_greeting
from torchkv.engine.engine import Engine
from torchkv.engine.joining.peer_metadata import PeerMetadata
from torchkv.errors import KVError, PeerLost, ProtocolError

if TYPE_CHECKING:
    from torchkv.engine.joining.registration import Registration

__all__ = ["Listener", "Membership", "Peer"]

log = logging.getLogger(__name__)

MAX_GONE = 1024
LOST_FOR_GOOD = 600.0  # seconds after which an instance that has not answered is forgotten, if that is safe

# Tells that an instance has come, or that it does not answer any more: its name, and whether it is here.
Listener = Callable[[str, bool], None]


@dataclass(frozen=True, slots=True)
class Peer:
    """Another instance. ranks: numbers of its ranks here, in its own order. address: of one of them.

    here: whether all of its ranks answer.
    """

    name: str
    ranks: tuple[int, ...]
    address: str
    here: bool


class Membership:
    """The instances that one rank knows, besides its own.

    mine: what the ranks of its own instance publish, by number. secret: shared by all instances. peers: by name; of two
    lives of one name the later one. Any thread may read it.
    """

    def __init__(
        self,
        engine: Engine,
        registration: Registration,
        control: ControlChannel,
        mine: Sequence[PeerMetadata],
        *,
        secret: bytes,
    ) -> None:
        self._engine = engine
        self._registration = registration
        self._control = control
        self._secret = secret
        self._numbers = itertools.count(len(mine))
        self._instances: dict[int, Peer] = {}  # by life
        self._lost_since: dict[int, float] = {}  # lives of which no rank answers, or is seen to have ended
        self._endpoints: dict[int, list[str]] = {}  # of the ranks of each life that runs where its end is not seen
        self._idle: set[int] = set()  # lives of those with whom no request was seen yet
        self.peers: Mapping[str, Peer] = MappingProxyType({})
        self.gone: dict[str, str] = {}  # names of the last that were forgotten -> where they were
        self._listeners: list[Listener] = []
        me = next(card for card in mine if card.rank == engine.group_map.rank)
        self._host = me.process.host
        self.address = _address(mine[0])
        card = msgspec.structs.replace(me, secret=b"").encode()
        greeting = Greeting(mine[0].incarnation, card, [card.endpoint for card in mine], asks=True)
        self._greeter: Greeter[PeerMetadata] = Greeter(
            greeting, decode=PeerMetadata.decode, admit=self._admit, send=self._send, warn=self._warn
        )

    def listen(self, listener: Listener) -> None:
        """listener: called on the driver's thread when an instance comes, is lost, or answers again."""
        self._listeners.append(listener)

    def connect(self, address: str, done: Callable[[str, KVError | None], None], *, seconds: float, now: float) -> None:
        """See `Greeter.connect`."""
        self._greeter.connect(address, done, seconds=seconds, now=now)

    def receive(self, greetings: Sequence[bytes], now: float) -> None:
        for data in greetings:
            try:
                self._greeter.receive(decode_greeting(data, self._secret), now)
            except KVError as error:
                self._engine.messenger.drop(error)

    def tick(self, now: float) -> None:
        """To be called some twenty times a second."""
        self._greeter.tick(now)
        if self._idle:
            self._rouse()
        lost = self._engine.lost
        for life, peer in list(self._instances.items()):
            here = not any(rank in lost for rank in peer.ranks)
            if here != peer.here:
                self._set(life, replace(peer, here=here))
            if all(self._engine.peers.gone(rank) for rank in peer.ranks):
                self._forget(life, peer)
            elif life in self._endpoints:
                self._look_after_lost(life, peer, now)

    def close(self, error: KVError) -> None:
        """Fails what waits in `connect`."""
        self._greeter.close(error)

    # ------------------------------------------------------------------ inside

    def _send(self, endpoint: str, message: Greeting | Refusal) -> None:
        try:
            self._control.greet(endpoint, encode_greeting(message, self._secret))
        except ProtocolError as error:
            self._engine.messenger.drop(error)

    def _warn(self, text: str) -> None:
        log.warning("rank %d: %s", self._engine.group_map.rank, text)

    def _admit(self, life: int, cards: Mapping[int, PeerMetadata]) -> None:
        """Takes in an instance. Raises ``KVError`` if its ranks and this one cannot work together."""
        name = cards[0].instance
        if name in self._engine.group_map.instances:
            ranks = self._engine.group_map.instances[name]
            if not any(rank in self._engine.lost for rank in ranks):
                # It may have died, and not be missed yet.
                raise ProtocolError(
                    f"there is an instance {name!r} already, and it answers; give each its own name",
                    retryable=name != self._engine.group_map.me.instance,
                )
        if cards[0].incarnation != life:
            raise ProtocolError(f"instance {name!r}: its rank 0 is of another life than it says")
        numbers = {next(self._numbers): cards[number] for number in sorted(cards)}
        self._registration.admit(self._engine, numbers, life=life)
        self._idle.add(life)
        if any(card.process.host != self._host for card in cards.values()):
            self._endpoints[life] = [cards[number].endpoint for number in sorted(cards)]
        self._set(life, Peer(name, tuple(numbers), _address(cards[0]), True))
        log.info("rank %d: instance %r is here, ranks %s", self._engine.group_map.rank, name, list(numbers))

    def _look_after_lost(self, life: int, peer: Peer, now: float) -> None:
        """Forgets an instance of another host that has vanished, after a time and unless it may still write here."""
        if not all(rank in self._engine.lost for rank in peer.ranks):
            self._lost_since.pop(life, None)
            return
        since = self._lost_since.setdefault(life, now)
        if now >= since + LOST_FOR_GOOD and all(self._engine.peers.finished(rank) for rank in peer.ranks):
            why = PeerLost(
                f"instance {peer.name!r} did not answer for {now - since:.0f} s and was forgotten; it has to join again"
            )
            self._forget(life, peer, why)

    def _forget(self, life: int, peer: Peer, why: PeerLost | None = None) -> None:
        """why: it may still run; this life of it is not admitted again, because its control frames may still travel."""
        del self._instances[life]
        self._idle.discard(life)
        self._lost_since.pop(life, None)
        endpoints = self._endpoints.pop(life, [""] * len(peer.ranks))
        self._publish()
        self.gone.pop(peer.name, None)
        self.gone[peer.name] = peer.address
        if len(self.gone) > MAX_GONE:
            del self.gone[next(iter(self.gone))]
        self._greeter.forget(life, why)
        for rank, endpoint in zip(peer.ranks, endpoints, strict=True):
            self._engine.peers.forget(rank, farewell=endpoint if why is not None else "")
            self._registration.forget(rank)
        self._engine.whole_pages.clear()
        log.info("rank %d: nothing of instance %r is left here", self._engine.group_map.rank, peer.name)

    def _rouse(self) -> None:
        """Whether all ranks of an instance answer matters once a request needs one of them, and from then on."""
        named = self._engine.peers.named()
        for life in [life for life in self._idle if not named.isdisjoint(self._instances[life].ranks)]:
            self._idle.discard(life)
            for rank in self._instances[life].ranks:
                self._control.rouse(rank)

    def _set(self, life: int, peer: Peer) -> None:
        self._instances[life] = peer
        self._publish()
        if self.peers[peer.name] is not peer:
            return  # a later life has the name
        for listener in list(self._listeners):
            try:
                listener(peer.name, peer.here)
            except Exception:
                log.exception("a listener of peers failed")

    def _publish(self) -> None:
        self.peers = MappingProxyType({peer.name: peer for peer in self._instances.values()})


def _address(card: PeerMetadata) -> str:
    return card.endpoint.partition(" ")[0]
