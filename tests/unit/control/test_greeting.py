"""Greetings over a network that loses, doubles and delays: instances meet with all of their ranks, or not at all."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchkv.control.greeting import (
    GREETING,
    MAX_MEETINGS,
    PATIENCE,
    Greeter,
    Greeting,
    Refusal,
    decode_greeting,
    encode_greeting,
)
from torchkv.errors import AuthError, KVError, LayoutMismatch, PeerLost, ProtocolError, TransferTimeout

KEY = bytes(range(32))


@dataclass(frozen=True)
class Card:
    rank: int
    instance: str
    endpoint: str


def encoded(card: Card) -> bytes:
    return f"{card.rank} {card.instance} {card.endpoint}".encode()


def decoded(data: bytes) -> Card:
    rank, instance, endpoint = data.decode().split(" ", 2)
    return Card(int(rank), instance, endpoint)


@dataclass
class Rank:
    card: Card
    greeter: Greeter[Card]
    admitted: dict[int, list[str]] = field(default_factory=dict)  # life -> endpoints
    refuses: KVError | None = None
    warnings: list[str] = field(default_factory=list)


@dataclass
class Network:
    """loss, double: probabilities. delay: the most, in seconds."""

    random: random.Random
    loss: float = 0.0
    double: float = 0.0
    delay: float = 0.01
    now: float = 0.0
    ranks: dict[str, Rank] = field(default_factory=dict)  # by endpoint
    _queue: list[tuple[float, int, str, bytes]] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)
    sent: int = 0

    def start(self, name: str, size: int, life: int) -> list[Rank]:
        cards = [Card(number, name, f"tcp://{name}{life}:{number}") for number in range(size)]
        return [self._rank(card, [c.endpoint for c in cards], life) for card in cards]

    def _rank(self, card: Card, contacts: list[str], life: int) -> Rank:
        def admit(other: int, cards: Mapping[int, Card]) -> None:
            if rank.refuses is not None:
                raise rank.refuses
            assert other not in rank.admitted, "admitted twice"
            rank.admitted[other] = [cards[number].endpoint for number in sorted(cards)]

        greeting = Greeting(life, encoded(card), contacts, asks=True)
        greeter = Greeter(
            greeting, decode=decoded, admit=admit, send=self._send, warn=lambda text: rank.warnings.append(text)
        )
        rank = Rank(card, greeter)
        self.ranks[card.endpoint] = rank
        return rank

    def _send(self, endpoint: str, message: Greeting | Refusal) -> None:
        self.sent += 1
        copies = (self.random.random() >= self.loss) * (1 + (self.random.random() < self.double))
        for _ in range(copies):
            at = self.now + self.random.uniform(0.0, self.delay)
            heapq.heappush(self._queue, (at, next(self._order), endpoint, encode_greeting(message, KEY)))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.05
            while self._queue and self._queue[0][0] <= self.now:
                _, _, endpoint, data = heapq.heappop(self._queue)
                if endpoint in self.ranks:
                    self.ranks[endpoint].greeter.receive(decode_greeting(data, KEY), self.now)
            for rank in self.ranks.values():
                rank.greeter.tick(self.now)


class Answer:
    def __init__(self) -> None:
        self.calls: list[tuple[str, KVError | None]] = []

    def __call__(self, name: str, error: KVError | None) -> None:
        self.calls.append((name, error))

    @property
    def name(self) -> str:
        ((name, error),) = self.calls
        assert error is None
        return name

    @property
    def error(self) -> KVError:
        ((_, error),) = self.calls
        assert error is not None
        return error


def connect(network: Network, rank: Rank, address: str, seconds: float = 60.0) -> Answer:
    answer = Answer()
    rank.greeter.connect(address, answer, seconds=seconds, now=network.now)
    return answer


def endpoints(ranks: list[Rank]) -> list[str]:
    return [rank.card.endpoint for rank in ranks]


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 4), st.floats(0, 0.5), st.floats(0, 0.5))
def test_one_call_brings_two_instances_together(seed: int, a: int, b: int, loss: float, double: float) -> None:
    network = Network(random.Random(seed), loss, double, delay=0.5)
    ours, theirs = network.start("decode", a, 1), network.start("prefill", b, 2)
    caller, callee = network.random.choice(ours), network.random.choice(theirs)
    answer = connect(network, caller, callee.card.endpoint)
    network.run(20.0)
    assert answer.name == "prefill"
    assert all(rank.admitted == {2: endpoints(theirs)} for rank in ours)
    assert all(rank.admitted == {1: endpoints(ours)} for rank in theirs)
    assert not any(rank.greeter.busy for rank in network.ranks.values())
    sent = network.sent
    network.run(5.0)
    assert network.sent == sent, "who has met is quiet"


def test_both_call_at_once_and_twice() -> None:
    network = Network(random.Random(1))
    (a,), (b,) = network.start("a", 1, 1), network.start("b", 1, 2)
    answers = [connect(network, a, "tcp://b2:0"), connect(network, b, "tcp://a1:0"), connect(network, a, "tcp://b2:0")]
    network.run(2.0)
    assert [answer.name for answer in answers] == ["b", "a", "b"]
    again = connect(network, a, "tcp://b2:0")
    network.run(2.0)
    assert again.name == "b"
    assert a.admitted.keys() == {2}


def test_nobody_listens() -> None:
    network = Network(random.Random(1))
    (a,) = network.start("a", 1, 1)
    answer = connect(network, a, "tcp://nowhere:1", seconds=3.0)
    network.run(2.5)
    assert not answer.calls
    network.run(1.0)
    assert isinstance(answer.error, TransferTimeout)
    assert "TORCHKV_SECRET_FILE" in str(answer.error)
    assert not a.greeter.busy


def test_an_instance_of_which_one_rank_is_silent_is_not_admitted() -> None:
    network = Network(random.Random(1))
    (a,), theirs = network.start("a", 1, 1), network.start("b", 3, 2)
    del network.ranks[theirs[1].card.endpoint]
    answer = connect(network, a, theirs[0].card.endpoint, seconds=PATIENCE * 2)
    network.run(PATIENCE + 1.0)
    assert "[1]" in str(answer.error)
    assert isinstance(answer.error, TransferTimeout)
    assert not a.admitted
    # It may still come.
    network.ranks[theirs[1].card.endpoint] = theirs[1]
    answer = connect(network, a, theirs[0].card.endpoint)
    network.run(2.0)
    assert answer.name == "b"


@pytest.mark.parametrize("refuser", [0, 1])
def test_both_sides_learn_that_one_refuses(refuser: int) -> None:
    network = Network(random.Random(1))
    (a,), (b,) = network.start("a", 1, 1), network.start("b", 1, 2)
    (a, b)[refuser].refuses = LayoutMismatch("heads differ")
    answer = connect(network, a, "tcp://b2:0")
    network.run(2.0)
    if refuser == 0 or not a.admitted:
        assert isinstance(answer.error, LayoutMismatch)
        assert "heads differ" in str(answer.error)
    assert not (a, b)[refuser].admitted
    assert not b.greeter.busy


def test_a_refusal_that_comes_without_an_answer_is_told() -> None:
    """The answer was lost, and whoever has refused does not answer again."""
    network = Network(random.Random(1))
    (a,), (b,) = network.start("a", 1, 1), network.start("b", 1, 2)
    b.refuses = LayoutMismatch("heads differ")
    connect(network, b, "tcp://a1:0")
    answer = connect(network, a, "tcp://b2:0")
    a.greeter._meetings.clear()
    a.greeter.receive(Refusal(2, ["tcp://b2:0"], "LayoutMismatch", "heads differ"), network.now)
    assert isinstance(answer.error, LayoutMismatch)


def test_who_was_refused_here_is_refused_at_once_when_called_again() -> None:
    """The other side may have admitted this one, and so answers."""
    network = Network(random.Random(1))
    (a,), (b,) = network.start("a", 1, 1), network.start("b", 1, 2)
    a.refuses = LayoutMismatch("heads differ")
    connect(network, a, "tcp://b2:0")
    network.run(1.0)
    b.greeter._refused.clear()
    again = connect(network, a, "tcp://b2:0")
    network.run(1.0)
    assert isinstance(again.error, LayoutMismatch)


def test_what_hinders_for_a_while_is_waited_for() -> None:
    """A restarted instance comes before anybody has missed the one whose name it has."""
    network = Network(random.Random(1))
    (a,), (b,) = network.start("a", 1, 1), network.start("b", 1, 2)
    a.refuses = ProtocolError("there is one already", retryable=True)
    answer = connect(network, a, "tcp://b2:0")
    network.run(3.0)
    assert not answer.calls
    a.refuses = None
    network.run(1.0)
    assert answer.name == "b"
    assert b.admitted.keys() == {1}


def test_what_hinders_for_too_long_is_told() -> None:
    network = Network(random.Random(1))
    (a,), _ = network.start("a", 1, 1), network.start("b", 1, 2)
    a.refuses = ProtocolError("there is one already", retryable=True)
    early = connect(network, a, "tcp://b2:0", seconds=5.0)
    answer = connect(network, a, "tcp://b2:0", seconds=2 * PATIENCE)
    network.run(PATIENCE + 2.0)
    assert "there is one already" in str(early.error)
    assert "there is one already" in str(answer.error)
    assert a.warnings == ["instance 'b' was not admitted: there is one already"]


def test_who_has_admitted_one_that_does_not_admit_it_is_told() -> None:
    """Its calls had succeeded before."""
    network = Network(random.Random(1))
    (a,), (b,) = network.start("a", 1, 1), network.start("b", 1, 2)
    a.refuses = ProtocolError("there is one already", retryable=True)
    answer = connect(network, b, "tcp://a1:0")
    network.run(1.0)
    assert answer.name == "a"
    assert b.warnings == []
    network.run(PATIENCE + 2.0)
    assert b.warnings == ["instance 'a' does not admit this one: there is one already"]


def test_a_restarted_instance_is_somebody_new() -> None:
    network = Network(random.Random(1))
    (a,), (old,) = network.start("a", 1, 1), network.start("b", 1, 2)
    connect(network, a, "tcp://b2:0")
    network.run(1.0)
    del network.ranks[old.card.endpoint]
    card = Card(0, "b", old.card.endpoint)  # at the same address
    network._rank(card, [card.endpoint], 3)
    answer = connect(network, a, card.endpoint)
    network.run(1.0)
    assert answer.name == "b"
    assert a.admitted.keys() == {2, 3}


def test_callers_are_told_of_the_end() -> None:
    network = Network(random.Random(1))
    (a,) = network.start("a", 1, 1)
    answer = connect(network, a, "tcp://b2:0")
    a.greeter.close(PeerLost("closed"))
    assert isinstance(answer.error, PeerLost)
    network.run(1.0)


def test_a_rank_that_claims_another_address_is_refused() -> None:
    network = Network(random.Random(1))
    (a,) = network.start("a", 1, 1)
    card = Card(0, "b", "tcp://b:0")
    for contacts in (["tcp://c:0"], ["tcp://c:0", "tcp://b:0"]):
        with pytest.raises(ProtocolError, match="elsewhere"):
            a.greeter.receive(Greeting(5, encoded(card), contacts, asks=True), 0.0)
    assert not a.greeter.busy


def test_ranks_that_do_not_agree_who_belongs_to_them_are_refused() -> None:
    network = Network(random.Random(1))
    (a,) = network.start("a", 1, 1)
    first, second = Card(0, "b", "tcp://b:0"), Card(1, "b", "tcp://b:1")
    a.greeter.receive(Greeting(5, encoded(first), ["tcp://b:0", "tcp://b:1"], asks=True), 0.0)
    with pytest.raises(ProtocolError, match="do not agree"):
        a.greeter.receive(Greeting(5, encoded(second), ["tcp://x:0", "tcp://b:1"], asks=True), 0.0)


def test_strangers_cannot_fill_memory() -> None:
    network = Network(random.Random(1))
    (a,) = network.start("a", 1, 1)
    for life in range(2, 1000):
        card = Card(0, f"b{life}", f"tcp://b{life}:0")
        greeting = Greeting(life, encoded(card), [card.endpoint, "tcp://never:1"], asks=False)
        if life < 2 + MAX_MEETINGS:
            a.greeter.receive(greeting, 0.0)
        else:
            with pytest.raises(ProtocolError, match="at once"):
                a.greeter.receive(greeting, 0.0)
    network.run(PATIENCE + 1.0)
    assert not a.greeter.busy


# ------------------------------------------------------------------ bytes

MESSAGES = st.one_of(
    st.builds(
        Greeting,
        st.integers(0, (1 << 62) - 1),
        st.binary(max_size=100),
        st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=4),
        st.booleans(),
    ),
    st.builds(
        Refusal,
        st.integers(0, (1 << 62) - 1),
        st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=4),
        st.text(max_size=32),
        st.text(max_size=50),
    ),
)


@given(MESSAGES)
def test_round_trip(message: Greeting | Refusal) -> None:
    assert decode_greeting(encode_greeting(message, KEY), KEY) == message


@given(MESSAGES, st.data())
def test_a_flipped_bit_is_noticed(message: Greeting | Refusal, data: st.DataObject) -> None:
    whole = bytearray(encode_greeting(message, KEY))
    at = data.draw(st.integers(0, len(whole) * 8 - 1))
    whole[at // 8] ^= 1 << at % 8
    with pytest.raises(AuthError):
        decode_greeting(bytes(whole), KEY)


def test_who_has_another_secret_is_refused() -> None:
    with pytest.raises(AuthError, match="TORCHKV_SECRET_FILE"):
        decode_greeting(encode_greeting(Refusal(1, ["tcp://a:1"], "", ""), KEY), bytes(32))


@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    for each in (data, GREETING + data):
        with pytest.raises((AuthError, ProtocolError)):
            decode_greeting(each, KEY)
