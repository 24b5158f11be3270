"""A writer's asks for stages by themselves, and then the whole exchange of keeper and clients at random."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from staging_kit import ALIGNMENT, TIMEOUT, Exchange

from torchkv.errors import ProtocolError, RingExhausted
from torchkv.protocol.stageclient import Span, StageClient
from torchkv.staging import Signal
from torchkv.wire import MAX_ASKS, Message, StageAsk, Staged, StageDenied, StageGrant, Withdraw

DST, GENERATION, RING = 3, 7, 4096


def taken(client: StageClient) -> list[Message]:
    """What it said since the last look, all of it to `DST`."""
    outbox, client.outbox = client.outbox, []
    assert all(rank == DST for rank, _ in outbox)
    return [message for _, message in outbox]


def ask(client: StageClient, nbytes: int = 512, least: int = 256) -> int:
    return client.ask(DST, GENERATION, nbytes=nbytes, least=least)


def grant(client: StageClient, serial: int, offset: int = 0, nbytes: int = 512) -> None:
    client.on_grant(DST, StageGrant(GENERATION, serial, offset, nbytes), RING)


def stage(client: StageClient, serial: int, num_pages: int = 2) -> None:
    client.staged(DST, GENERATION, serial, layers=(0, 5), start=4, num_pages=num_pages, checked=True)


# -- asks and grants --------------------------------------------------------------------------------------------------


def test_an_ask_from_first_to_last() -> None:
    client = StageClient()
    assert ask(client) == 0
    assert taken(client) == [StageAsk(GENERATION, 0, 512, 256, True)]
    assert client.granted(DST, GENERATION, 0) is None
    grant(client, 0, offset=1024, nbytes=300)
    assert client.granted(DST, GENERATION, 0) == Span(1024, 300)
    stage(client, 0)
    assert taken(client) == [Staged(GENERATION, 0, [0, 5], 4, 2, True)]
    assert ask(client) == 1


def test_a_stage_is_never_written_before_its_grant() -> None:
    client = StageClient()
    with pytest.raises(AssertionError, match="not granted"):
        stage(client, ask(client))


def test_asks_beyond_what_the_receiver_takes_wait_here() -> None:
    client = StageClient()
    serials = [ask(client) for _ in range(MAX_ASKS + 3)]
    assert [message.serial for message in taken(client) if isinstance(message, StageAsk)] == serials[:MAX_ASKS]
    grant(client, 1)
    assert taken(client) == [], "granted is not written"
    stage(client, 1)
    assert [type(message) for message in taken(client)] == [Staged, StageAsk], "in this order"
    client.on_denied(DST, StageDenied(GENERATION, 0, "full"), RING)
    assert taken(client) == [StageAsk(GENERATION, MAX_ASKS + 1, 512, 256, True)]
    client.on_denied(DST, StageDenied(GENERATION, 0, "full"), RING)
    assert taken(client) == [], "the same denial makes room once"


def test_a_denial_is_a_retryable_error_with_the_receivers_words() -> None:
    client = StageClient()
    serial = ask(client)
    for _ in range(2):
        client.on_denied(DST, StageDenied(GENERATION, serial, "ring of 4096 bytes, all in use"), RING)
    for _ in range(2):
        with pytest.raises(RingExhausted, match=r"rank 3 .* ring of 4096 bytes, all in use") as caught:
            client.granted(DST, GENERATION, serial)
        assert caught.value.retryable
    assert ask(client) == 1
    assert client.granted(DST, GENERATION, 1) is None


def test_answers_to_what_was_never_asked_or_is_over_change_nothing() -> None:
    client = StageClient()
    grant(client, 0)
    client.on_denied(DST, StageDenied(GENERATION, 0, ""), RING)
    client.on_withdrawn(DST, GENERATION)
    assert ask(client) == 0
    grant(client, 1)
    client.on_grant(DST + 1, StageGrant(GENERATION, 0, 0, 512), RING)
    client.on_grant(DST, StageGrant(GENERATION + 1, 0, 0, 512), RING)
    client.on_denied(DST, StageDenied(GENERATION, 5, ""), RING)
    assert client.granted(DST, GENERATION, 0) is None
    grant(client, 0)
    stage(client, 0)
    grant(client, 0, offset=512)
    client.on_denied(DST, StageDenied(GENERATION, 0, ""), RING)
    client.forget(DST, GENERATION)
    client.forget(DST, GENERATION)
    grant(client, 0)
    assert client._lines == {}


def test_an_answer_to_an_ask_that_was_not_sent_yet_changes_nothing() -> None:
    client = StageClient()
    last = [ask(client) for _ in range(MAX_ASKS + 1)][-1]
    grant(client, last)
    client.on_denied(DST, StageDenied(GENERATION, last, ""), RING)
    assert client.granted(DST, GENERATION, last) is None


@pytest.mark.parametrize(
    ("offset", "nbytes", "words"),
    [
        (RING - 511, 512, "outside"),
        (1 << 61, 512, "outside"),
        (0, 513, "asked"),
        (0, 255, "asked"),
        (0, 0, "asked"),
    ],
)
def test_a_grant_that_does_not_answer_the_ask_is_refused(offset: int, nbytes: int, words: str) -> None:
    client = StageClient()
    serial = ask(client)
    with pytest.raises(ProtocolError, match=words):
        grant(client, serial, offset, nbytes)
    assert client.granted(DST, GENERATION, serial) is None
    grant(client, serial, RING - 512, 512)
    assert client.granted(DST, GENERATION, serial) == Span(RING - 512, 512)


def test_a_stage_is_called_written_early_only_with_a_signal_of_the_receiver() -> None:
    client = StageClient()
    plain, signalled = ask(client), ask(client)
    grant(client, plain)
    with pytest.raises(ProtocolError, match="2 signal words"):
        client.on_grant(DST, StageGrant(GENERATION, signalled, 512, 512, 2, 6), RING, 2)
    assert client.granted(DST, GENERATION, signalled) is None
    client.on_grant(DST, StageGrant(GENERATION, signalled, 512, 512, 1, 6), RING, 2)
    assert client.granted(DST, GENERATION, signalled) == Span(512, 512, Signal(1, 6))
    with pytest.raises(ProtocolError, match="granted at"):
        client.on_grant(DST, StageGrant(GENERATION, signalled, 512, 512, 1, 8), RING, 2)
    taken(client)
    early = {"layers": (0,), "start": 0, "num_pages": 2, "checked": False, "early": True}
    client.staged(DST, GENERATION, signalled, **early)
    assert taken(client) == [Staged(GENERATION, signalled, [0], 0, 2, False, early=True)]
    with pytest.raises(AssertionError, match="no signal"):
        client.staged(DST, GENERATION, plain, **early)


def test_a_second_grant_may_only_repeat_the_first() -> None:
    client = StageClient()
    serial = ask(client)
    grant(client, serial, 256)
    grant(client, serial, 256)
    with pytest.raises(ProtocolError, match="granted at"):
        grant(client, serial, 512)
    with pytest.raises(ProtocolError, match="granted at"):
        client.on_denied(DST, StageDenied(GENERATION, serial, ""), RING)
    assert client.granted(DST, GENERATION, serial) == Span(256, 512)
    other = ask(client)
    client.on_denied(DST, StageDenied(GENERATION, other, ""), RING)
    with pytest.raises(ProtocolError, match="denied before"):
        grant(client, other, 1024)


# -- the promise ------------------------------------------------------------------------------------------------------


def only(client: StageClient) -> list[bool]:
    return [message.only for message in taken(client) if isinstance(message, StageAsk)]


def test_who_writes_directly_first_never_promises() -> None:
    client = StageClient()
    assert client.go_direct(DST, GENERATION)
    ask(client)
    assert only(client) == [False]
    assert client.go_direct(DST, GENERATION)
    assert taken(client) == []


def test_a_promise_is_withdrawn_once_and_only_the_receivers_word_ends_it() -> None:
    client = StageClient()
    ask(client)
    assert only(client) == [True]
    client.on_withdrawn(DST, GENERATION)
    assert not client.go_direct(DST, GENERATION), "nobody had asked for it"
    assert not client.go_direct(DST, GENERATION)
    assert taken(client) == [Withdraw(GENERATION)]
    ask(client)
    assert only(client) == [False], "it comes after the withdrawal"
    client.on_withdrawn(DST, GENERATION + 1)
    assert not client.go_direct(DST, GENERATION)
    for _ in range(2):
        client.on_withdrawn(DST, GENERATION)
        assert client.go_direct(DST, GENERATION)
    ask(client)
    assert only(client) == [False]


def test_an_ask_that_waited_here_until_after_the_withdrawal_does_not_promise() -> None:
    client = StageClient()
    for _ in range(MAX_ASKS + 1):
        ask(client)
    client.go_direct(DST, GENERATION)
    grant(client, 0)
    stage(client, 0)
    assert only(client) == [True] * MAX_ASKS + [False]


def test_promises_are_one_per_receiver_and_generation() -> None:
    client = StageClient()
    ask(client)
    assert client.go_direct(DST, GENERATION + 1)
    client.forget(DST, GENERATION)
    assert client.go_direct(DST, GENERATION)


# -- the exchange -----------------------------------------------------------------------------------------------------

WRITERS = 3
CAPACITY = 16 * ALIGNMENT
ACTIONS = (
    *("open", "open", "open huge", "open direct", "round", "round", "round", "round", "round", "round", "round"),
    *(
        "write",
        "read",
        "receive",
        "net",
        "land",
        "scatter",
        "abort",
        "cancel",
        "hang",
        "wake",
        "kill",
        "pause",
        "replay",
    ),
)


def act(exchange: Exchange, action: str, number: int) -> None:
    """One thing that may happen. ``number`` chooses what to, among what there is."""
    writer = exchange.writers[1 + number % len(exchange.writers)]
    exchange.now += 0.05
    if action.startswith("open"):
        chance = random.Random(number)
        largest = exchange.ring.capacity + ALIGNMENT if action == "open huge" else exchange.ring.capacity // 3
        sizes = [chance.randint(1, largest) for _ in range(chance.randint(1, 4))]
        ranks = {writer.rank} if number % 2 else {writer.rank, 1 + (number // 2) % len(exchange.writers)}
        pieces = [(size, chance.choice((1, size))) for size in sizes]
        exchange.open(ranks, pieces, direct=action == "open direct")
    elif action == "round":
        exchange.round(drop=number % 3 * 0.2, double=number % 2 * 0.3, late=number % 4 * 0.25)
    elif action == "write" and writer.running:
        writer.step()
    elif action == "read" and writer.running:
        writer.read()
    elif action == "receive":
        exchange.receive()
    elif action == "net":
        exchange.talk()
        exchange.deliver(drop=number % 3 * 0.2, double=number % 2 * 0.3)
    elif action == "land" and exchange.puts:
        exchange.land(exchange.puts[number % len(exchange.puts)])
    elif action == "scatter" and exchange.scatters:
        exchange.finish_scatter(number % len(exchange.scatters))
    elif action == "abort" and writer.sendings and writer.running:
        writer.fail(list(writer.sendings.values())[number % len(writer.sendings)], "cancelled")
    elif action == "cancel" and exchange.receivings:
        exchange.cancel(list(exchange.receivings)[number % len(exchange.receivings)])
    elif action == "hang":
        writer.running = False
    elif action == "wake":
        writer.running = not writer.dead
    elif action == "kill" and not writer.dead and number % 4 == 0:
        exchange.kill(writer.rank)
    elif action == "pause" and number % 4 == 0:
        exchange.now += TIMEOUT + 1
    elif action == "replay" and exchange.heard:
        exchange.replay(number)
    exchange.check()


def finish(exchange: Exchange) -> None:
    """From here on nobody may be stuck, first without those that hang, then with them too."""
    hung = [writer for writer in exchange.writers.values() if not writer.running and not writer.dead]
    for writer in hung:
        for generation in list(exchange.receivings):
            if writer.rank in exchange.receivings[generation].writers:
                exchange.cancel(generation)
    if not exchange.settle():
        room = exchange.ring.room
        waits = [line.waiting[0] for line in exchange.keeper._turn]
        assert waits, "stuck, and nobody waits for the ring"
        assert room < exchange.ring.capacity, "stuck behind nothing"
        assert all(wait.least > room for wait in waits), "stuck behind quarantined stages, though there is room"
    for writer in hung:
        writer.running = True
    assert exchange.settle(), "a request never ends"
    exchange.check_over()


@given(st.integers(0, 1 << 16), st.binary(min_size=40, max_size=80))
@settings(max_examples=2000, deadline=None)
def test_the_exchange_at_random(seed: int, plan: bytes) -> None:
    """Aborts, deaths, hung writers, lost, doubled and late messages, at any point: no overlap, no loss, no deadlock.

    plan: two bytes each action. Drawing them one by one would take longer than all the rest.
    """
    actions = [(ACTIONS[what % len(ACTIONS)], number) for what, number in zip(plan[::2], plan[1::2], strict=False)]
    note(f"{actions}")
    exchange = Exchange(WRITERS, capacity=CAPACITY, seed=seed)
    for action, number in actions:
        act(exchange, action, number)
    finish(exchange)


def test_64_senders_into_a_ring_of_4_stages_with_30_percent_aborts_all_finish() -> None:
    seed = random.SystemRandom().getrandbits(32)
    chance = random.Random(seed)
    exchange = Exchange(64, capacity=4 * 16 * ALIGNMENT, seed=seed)
    doomed: list[tuple[int, int]] = []
    for rank in exchange.writers:
        for _ in range(2):
            generation = exchange.open({rank}, [(16 * ALIGNMENT, 16 * ALIGNMENT)] * 3)
            if chance.random() < 0.3:
                doomed.append((rank, generation))
    chance.shuffle(doomed)
    for rank, generation in doomed:
        for _ in range(chance.randint(0, 3)):
            exchange.round(drop=0.1, double=0.1, late=0.3)
        writer = exchange.writers[rank]
        if generation not in writer.sendings:
            continue
        if chance.random() < 0.5:
            exchange.cancel(generation)
        else:
            writer.fail(writer.sendings[generation], "cancelled")
    assert exchange.settle(drop=0.1), f"seed {seed}: a wedge"
    exchange.check_over()
    assert len(exchange.cancelled) > 5, f"seed {seed}: too few were stopped to show anything"
