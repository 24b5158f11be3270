"""Greetings: how ranks of instances that started apart learn of each other. Messages, and who has to be greeted.

A rank greets another one with its own metadata and with the endpoints of all ranks of its instance. Who is greeted by a
rank of an unknown instance greets all ranks of that instance, until each has told its metadata. Then it *admits* the
instance, all ranks at once, so that a name never stands for a part of an instance:

    connect(endpoint) --greet--> ... --first greeting of the instance--> meeting --greetings of all ranks--> admitted
                                                                            |
                                                                            +--refused by either side, or too late

Greetings may be lost, doubled or late: they are sent again until they are answered, and change nothing the second time.
They cross the network with a MAC under the secret that all instances share. A *life* of an instance is the incarnation
of its rank 0: a restarted instance has another one.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Annotated, Generic, Protocol, TypeAlias, TypeVar

import msgspec

from torchkv.errors import AuthError, KVError, PeerLost, ProtocolError, TransferTimeout, error_kind, make_error

__all__ = ["GREETING", "Card", "Greeter", "Greeting", "Refusal", "decode_greeting", "encode_greeting"]

GREETING = b"tkg1"  # how the bytes of a greeting begin
RETRY = 0.2  # seconds between two greetings to a rank that has not answered
PATIENCE = 30.0  # seconds in which all ranks of an instance must have answered
MAX_INSTANCE = 1 << 10  # ranks of an instance
MAX_MEETINGS = 256  # at once
MAX_BANNED = 1024
MAX_TEXT = 2048
_MAC_NBYTES = 16

Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Endpoint: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class Greeting(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag="greeting"):
    """This is me. card: what the rank publishes. contacts: endpoints of the ranks of its instance, in their order.

    asks: whether the addressee should answer with its own greeting.
    """

    life: Number
    card: Annotated[bytes, msgspec.Meta(max_length=16 << 20)]
    contacts: Annotated[list[Endpoint], msgspec.Meta(min_length=1, max_length=MAX_INSTANCE)]
    asks: bool


class Refusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag="refusal"):
    """The instance with this ``life`` and the addressee's cannot work together, for this reason.

    contacts: as in its greetings.
    """

    life: Number
    contacts: Annotated[list[Endpoint], msgspec.Meta(min_length=1, max_length=MAX_INSTANCE)]
    kind: Annotated[str, msgspec.Meta(max_length=32)]
    text: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


_decoder: msgspec.msgpack.Decoder[Greeting | Refusal] = msgspec.msgpack.Decoder(Greeting | Refusal)


def encode_greeting(message: Greeting | Refusal, key: bytes) -> bytes:
    body = msgspec.msgpack.encode(message)
    return GREETING + _mac(key, body) + body


def decode_greeting(data: bytes, key: bytes) -> Greeting | Refusal:
    """Raises ``AuthError`` for a wrong MAC, ``ProtocolError`` for what else `encode_greeting` does not make."""
    start = len(GREETING) + _MAC_NBYTES
    mac, body = data[len(GREETING) : start], data[start:]
    if not data.startswith(GREETING) or not hmac.compare_digest(mac, _mac(key, body)):
        raise AuthError("a greeting with a wrong MAC: its sender has another secret; see TORCHKV_SECRET_FILE")
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"greeting does not decode: {error}; run one version of torchkv everywhere") from error


def _mac(key: bytes, body: bytes) -> bytes:
    return blake2b(body, key=key, digest_size=_MAC_NBYTES, person=b"torchkv-greeting").digest()


class Card(Protocol):
    """What a rank publishes, as far as greetings know it: its number in its instance, and its instance's name."""

    @property
    def rank(self) -> int: ...

    @property
    def instance(self) -> str: ...

    @property
    def endpoint(self) -> str: ...


C = TypeVar("C", bound=Card)


@dataclass(eq=False, slots=True)
class _Meeting(Generic[C]):
    """An instance that was heard of and is not admitted yet. cards: by number."""

    life: int
    contacts: list[str]
    deadline: float
    cards: dict[int, C] = field(default_factory=dict)
    next_retry: float = 0.0
    hindrance: KVError | None = None  # why all have answered, and yet the instance cannot be admitted at present

    @property
    def complete(self) -> bool:
        """Whether all ranks have answered."""
        return len(self.cards) == len(self.contacts)

    def timeout(self) -> TransferTimeout:
        missing = sorted(set(range(len(self.contacts))) - self.cards.keys())
        return TransferTimeout(f"ranks {missing} of an instance have not answered; {_ADVICE}")


@dataclass(eq=False, slots=True)
class _Call:
    """A caller who waits for the instance of a rank that listens at ``address``."""

    address: str
    deadline: float
    done: Callable[[str, KVError | None], None]
    life: int | None = None  # once the rank has answered
    next_retry: float = 0.0


class Greeter(Generic[C]):
    """One rank's greetings. No I/O; time is passed in, in seconds.

    greeting: its own. decode: what another rank published. Raises ``KVError``. admit: takes in an instance: its life,
    and its cards by number. Raises ``PeerLost`` if it has ended, another ``KVError`` if that cannot be, or, with
    ``retryable``, not yet. send: (endpoint, message), which may be lost. warn: takes what nobody waits to be told.
    """

    def __init__(
        self,
        greeting: Greeting,
        *,
        decode: Callable[[bytes], C],
        admit: Callable[[int, Mapping[int, C]], None],
        send: Callable[[str, Greeting | Refusal], None],
        warn: Callable[[str], None],
    ) -> None:
        self._greeting = greeting
        self._answer = msgspec.structs.replace(greeting, asks=False)
        self._decode = decode
        self._admit = admit
        self._send = send
        self._warn = warn
        self._meetings: dict[int, _Meeting[C]] = {}  # by life, as are the three below
        self._admitted: dict[int, tuple[str, list[str]]] = {}  # name and contacts
        self._refused: dict[int, tuple[KVError, float]] = {}  # why, and until when that is remembered
        self._banned: dict[int, KVError] = {}
        self._calls: list[_Call] = []

    @property
    def busy(self) -> bool:
        """Whether greetings are to be sent again before long."""
        return bool(self._meetings or self._calls)

    def connect(self, address: str, done: Callable[[str, KVError | None], None], *, seconds: float, now: float) -> None:
        """Meets the instance of the rank that listens at ``address`` (``tcp://host:port``).

        done: called once, with the name of the instance when it is admitted, or with the error.
        """
        # Greeted even if an instance with this address is known: another one may listen there by now.
        self._calls.append(_Call(address, now + seconds, done))
        self.tick(now)

    def receive(self, message: Greeting | Refusal, now: float) -> None:
        """Raises ``KVError`` for a message that makes no sense."""
        if isinstance(message, Refusal):
            self._attach(message)
            error = make_error(message.kind, message.text)
            if message.life in self._meetings:
                self._refuse(message.life, error, now)
            elif message.life not in self._admitted:
                self._settle(message.life, "", error)
            else:
                self._warn(f"instance {self._admitted[message.life][0]!r} does not admit this one: {error}")
            return
        if message.life == self._greeting.life:
            return
        card = self._decode(message.card)
        if not 0 <= card.rank < len(message.contacts) or message.contacts[card.rank] != card.endpoint:
            raise ProtocolError(f"greeting of rank {card.rank} of {card.instance!r}: it listens elsewhere than it says")
        self._attach(message)
        refused = self._banned.get(message.life) or self._refused.get(message.life, (None, 0.0))[0]
        if refused is not None:
            self._tell_refusal(card.endpoint, refused)
            self._settle(message.life, "", refused)
            return
        if message.asks:
            self._send(card.endpoint, self._answer)
        if message.life in self._admitted:
            self._settle(message.life, self._admitted[message.life][0], None)
            return
        meeting = self._meetings.get(message.life)
        if meeting is None:
            if len(self._meetings) >= MAX_MEETINGS:
                raise ProtocolError(f"more than {MAX_MEETINGS} instances want to be admitted at once", retryable=True)
            meeting = self._meetings[message.life] = _Meeting(message.life, message.contacts, now + PATIENCE)
        if message.contacts != meeting.contacts:
            raise ProtocolError(f"two ranks of instance {card.instance!r} do not agree on who belongs to it")
        meeting.cards[card.rank] = card
        if meeting.complete or now >= meeting.next_retry:
            self._advance(meeting, now)

    def tick(self, now: float) -> None:
        """Greets again, and gives up what takes too long."""
        for call in list(self._calls):
            if now >= call.deadline:
                self._calls.remove(call)
                call.done("", self._overdue(call))
            elif call.life is None and now >= call.next_retry:
                call.next_retry = now + RETRY
                self._send(call.address, self._greeting)
        for meeting in list(self._meetings.values()):
            if now >= meeting.deadline:
                self._refuse(meeting.life, meeting.hindrance or meeting.timeout(), now, remember=False)
                if meeting.hindrance is not None:  # the other side may have admitted this one
                    self._warn(f"instance {meeting.cards[0].instance!r} was not admitted: {meeting.hindrance}")
                    for endpoint in meeting.contacts:
                        self._tell_refusal(endpoint, meeting.hindrance)
            elif now >= meeting.next_retry:
                self._advance(meeting, now)
        for life in [life for life, (_, until) in self._refused.items() if now >= until]:
            del self._refused[life]

    def forget(self, life: int, why: KVError | None = None) -> None:
        """The instance has gone. why: it may not come again, for this reason: only another life of it may."""
        self._admitted.pop(life, None)
        if why is not None:
            self._banned[life] = why
            if len(self._banned) > MAX_BANNED:
                del self._banned[next(iter(self._banned))]

    def close(self, error: KVError) -> None:
        """Fails the callers that wait."""
        calls, self._calls = self._calls, []
        for call in calls:
            call.done("", error)

    # ------------------------------------------------------------------ inside

    def _overdue(self, call: _Call) -> KVError:
        meeting = None if call.life is None else self._meetings.get(call.life)
        if meeting is None:
            return TransferTimeout(f"connect: {call.address} has not answered; {_ADVICE}")
        return meeting.hindrance or meeting.timeout()

    def _attach(self, message: Greeting | Refusal) -> None:
        """Callers that wait for a rank of this instance now wait for the instance."""
        for call in self._calls:
            if call.life is None and _listens(message.contacts, call.address):
                call.life = message.life

    def _advance(self, meeting: _Meeting[C], now: float) -> None:
        meeting.next_retry = now + RETRY
        if meeting.complete:
            self._complete(meeting, now)
            return
        for number, endpoint in enumerate(meeting.contacts):
            if number not in meeting.cards:
                self._send(endpoint, self._greeting)

    def _complete(self, meeting: _Meeting[C], now: float) -> None:
        name = meeting.cards[0].instance
        try:
            if any(card.instance != name for card in meeting.cards.values()):
                raise ProtocolError(f"two ranks of one instance call it {name!r} and otherwise")
            self._admit(meeting.life, meeting.cards)
        except KVError as error:
            meeting.hindrance = error
            if error.retryable and not isinstance(error, PeerLost):  # a process that has ended does not come again
                return
            self._refuse(meeting.life, error, now)
            for endpoint in meeting.contacts:
                self._tell_refusal(endpoint, error)
            return
        del self._meetings[meeting.life]
        self._admitted[meeting.life] = name, meeting.contacts
        self._settle(meeting.life, name, None)

    def _refuse(self, life: int, error: KVError, now: float, *, remember: bool = True) -> None:
        del self._meetings[life]
        if remember:
            self._refused[life] = error, now + PATIENCE
        self._settle(life, "", error)

    def _tell_refusal(self, endpoint: str, error: KVError) -> None:
        refusal = Refusal(self._greeting.life, self._greeting.contacts, error_kind(error), str(error)[:MAX_TEXT])
        self._send(endpoint, refusal)

    def _settle(self, life: int, name: str, error: KVError | None) -> None:
        waiting = [call for call in self._calls if call.life == life]
        self._calls = [call for call in self._calls if call.life != life]
        for call in waiting:
            call.done(name, error)


_ADVICE = "is it running, can its address be reached from here, and has it the same secret (TORCHKV_SECRET_FILE)?"


def _listens(contacts: Sequence[str], address: str) -> bool:
    """Whether one of the endpoints (``tcp://host:port``, and more behind a space) is ``address``."""
    return any(endpoint.partition(" ")[0] == address for endpoint in contacts)
