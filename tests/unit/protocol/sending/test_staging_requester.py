"""A writer's asks for stages, first without a receiver, then both sides together in random exchanges."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.helpers.simulation.staging_credits import ALIGNMENT, TIMEOUT, Exchange
from torchkv.errors import ProtocolError, RingExhausted
from torchkv.protocol.messages import MAX_ASKS, Message, StageAsk, Staged, StageDenied, StageGrant, Withdraw
from torchkv.protocol.sending.staging_requester import Span, StagingRequester

DST, GENERATION, RING = 3, 7, 4096


def taken(requester: StagingRequester) -> list[Message]:
    """The messages since the last call, all of them to `DST`."""
    outbox, requester.outbox = requester.outbox, []
    assert all(rank == DST for rank, _ in outbox)
    return [message for _, message in outbox]


def ask(requester: StagingRequester, nbytes: int = 512, least: int = 256) -> int:
    return requester.ask(DST, GENERATION, nbytes=nbytes, least=least)


def grant(requester: StagingRequester, serial: int, offset: int = 0, nbytes: int = 512) -> None:
    requester.on_grant(DST, StageGrant(GENERATION, serial, offset, nbytes), RING)


def stage(requester: StagingRequester, serial: int, num_pages: int = 2) -> None:
    requester.staged(DST, GENERATION, serial, layers=(0, 5), start=4, num_pages=num_pages, checked=True)


# -- asks and grants --------------------------------------------------------------------------------------------------


def test_an_ask_from_first_to_last() -> None:
    requester = StagingRequester()
    assert ask(requester) == 0
    assert taken(requester) == [StageAsk(GENERATION, 0, 512, 256, True)]
    assert requester.granted(DST, GENERATION, 0) is None
    grant(requester, 0, offset=1024, nbytes=300)
    assert requester.granted(DST, GENERATION, 0) == Span(1024, 300)
    stage(requester, 0)
    assert taken(requester) == [Staged(GENERATION, 0, [0, 5], 4, 2, True)]
    assert ask(requester) == 1


def test_a_stage_is_never_written_before_its_grant() -> None:
    requester = StagingRequester()
    with pytest.raises(AssertionError, match="not granted"):
        stage(requester, ask(requester))


def test_asks_beyond_what_the_receiver_takes_wait_here() -> None:
    requester = StagingRequester()
    serials = [ask(requester) for _ in range(MAX_ASKS + 3)]
    assert [message.serial for message in taken(requester) if isinstance(message, StageAsk)] == serials[:MAX_ASKS]
    grant(requester, 1)
    assert taken(requester) == [], "granted is not written"
    stage(requester, 1)
    assert [type(message) for message in taken(requester)] == [Staged, StageAsk], "in this order"
    requester.on_denied(DST, StageDenied(GENERATION, 0, "full"), RING)
    assert taken(requester) == [StageAsk(GENERATION, MAX_ASKS + 1, 512, 256, True)]
    requester.on_denied(DST, StageDenied(GENERATION, 0, "full"), RING)
    assert taken(requester) == [], "the same denial makes room once"


def test_a_denial_is_a_retryable_error_with_the_receivers_words() -> None:
    requester = StagingRequester()
    serial = ask(requester)
    for _ in range(2):
        requester.on_denied(DST, StageDenied(GENERATION, serial, "ring of 4096 bytes, all in use"), RING)
    for _ in range(2):
        with pytest.raises(RingExhausted, match=r"the receiver gave no .* ring of 4096 bytes, all in use") as caught:
            requester.granted(DST, GENERATION, serial)
        assert caught.value.retryable
    assert ask(requester) == 1
    assert requester.granted(DST, GENERATION, 1) is None


def test_answers_to_what_was_never_asked_or_is_over_change_nothing() -> None:
    requester = StagingRequester()
    grant(requester, 0)
    requester.on_denied(DST, StageDenied(GENERATION, 0, ""), RING)
    requester.on_withdrawn(DST, GENERATION)
    assert ask(requester) == 0
    grant(requester, 1)
    requester.on_grant(DST + 1, StageGrant(GENERATION, 0, 0, 512), RING)
    requester.on_grant(DST, StageGrant(GENERATION + 1, 0, 0, 512), RING)
    requester.on_denied(DST, StageDenied(GENERATION, 5, ""), RING)
    assert requester.granted(DST, GENERATION, 0) is None
    grant(requester, 0)
    stage(requester, 0)
    grant(requester, 0, offset=512)
    requester.on_denied(DST, StageDenied(GENERATION, 0, ""), RING)
    requester.forget(DST, GENERATION)
    requester.forget(DST, GENERATION)
    grant(requester, 0)
    assert requester._queues == {}


def test_an_answer_to_an_ask_that_was_not_sent_yet_changes_nothing() -> None:
    requester = StagingRequester()
    last = [ask(requester) for _ in range(MAX_ASKS + 1)][-1]
    grant(requester, last)
    requester.on_denied(DST, StageDenied(GENERATION, last, ""), RING)
    assert requester.granted(DST, GENERATION, last) is None


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
    requester = StagingRequester()
    serial = ask(requester)
    with pytest.raises(ProtocolError, match=words):
        grant(requester, serial, offset, nbytes)
    assert requester.granted(DST, GENERATION, serial) is None
    grant(requester, serial, RING - 512, 512)
    assert requester.granted(DST, GENERATION, serial) == Span(RING - 512, 512)


def test_a_second_grant_may_only_repeat_the_first() -> None:
    requester = StagingRequester()
    serial = ask(requester)
    grant(requester, serial, 256)
    grant(requester, serial, 256)
    with pytest.raises(ProtocolError, match="granted at"):
        grant(requester, serial, 512)
    with pytest.raises(ProtocolError, match="granted at"):
        requester.on_denied(DST, StageDenied(GENERATION, serial, ""), RING)
    assert requester.granted(DST, GENERATION, serial) == Span(256, 512)
    other = ask(requester)
    requester.on_denied(DST, StageDenied(GENERATION, other, ""), RING)
    with pytest.raises(ProtocolError, match="denied before"):
        grant(requester, other, 1024)


# -- the promise ------------------------------------------------------------------------------------------------------


def ring_only(requester: StagingRequester) -> list[bool]:
    return [message.ring_only for message in taken(requester) if isinstance(message, StageAsk)]


def test_a_writer_that_goes_direct_first_never_promises() -> None:
    requester = StagingRequester()
    assert requester.go_direct(DST, GENERATION)
    ask(requester)
    assert ring_only(requester) == [False]
    assert requester.go_direct(DST, GENERATION)
    assert taken(requester) == []


def test_a_promise_is_withdrawn_once_and_only_the_receivers_word_ends_it() -> None:
    requester = StagingRequester()
    ask(requester)
    assert ring_only(requester) == [True]
    requester.on_withdrawn(DST, GENERATION)
    assert not requester.go_direct(DST, GENERATION), "a confirmation that was not asked for changes nothing"
    assert not requester.go_direct(DST, GENERATION)
    assert taken(requester) == [Withdraw(GENERATION)]
    ask(requester)
    assert ring_only(requester) == [False], "it comes after the withdrawal"
    requester.on_withdrawn(DST, GENERATION + 1)
    assert not requester.go_direct(DST, GENERATION)
    for _ in range(2):
        requester.on_withdrawn(DST, GENERATION)
        assert requester.go_direct(DST, GENERATION)
    ask(requester)
    assert ring_only(requester) == [False]


def test_an_ask_that_waited_here_until_after_the_withdrawal_does_not_promise() -> None:
    requester = StagingRequester()
    for _ in range(MAX_ASKS + 1):
        ask(requester)
    requester.go_direct(DST, GENERATION)
    grant(requester, 0)
    stage(requester, 0)
    assert ring_only(requester) == [True] * MAX_ASKS + [False]


def test_promises_are_one_per_receiver_and_generation() -> None:
    requester = StagingRequester()
    ask(requester)
    assert requester.go_direct(DST, GENERATION + 1)
    requester.forget(DST, GENERATION)
    assert requester.go_direct(DST, GENERATION)


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
    """Performs one action. number: chooses the writer, request, put or message that it is done to."""
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
        exchange.messenger()
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
    """Everything must come to an end now: first without the writers that hang, then with them."""
    hung = [writer for writer in exchange.writers.values() if not writer.running and not writer.dead]
    for writer in hung:
        for generation in list(exchange.receivings):
            if writer.rank in exchange.receivings[generation].writers:
                exchange.cancel(generation)
    if not exchange.run_until_idle():
        largest_possible = exchange.ring.largest_possible
        waits = [queue.pending[0] for queue in exchange.credits._round_robin]
        assert waits, "stuck, but no ask waits for the ring"
        assert largest_possible < exchange.ring.capacity, "stuck behind nothing"
        assert all(wait.least > largest_possible for wait in waits), (
            "stuck behind quarantined stages, though there is room"
        )
    for writer in hung:
        writer.running = True
    assert exchange.run_until_idle(), "a request never ends"
    exchange.check_over()


@given(st.integers(0, 1 << 16), st.binary(min_size=40, max_size=80))
@settings(max_examples=examples(2000), deadline=None)
def test_the_exchange_at_random(seed: int, plan: bytes) -> None:
    """Aborts, deaths, hung writers, lost, duplicated and late messages: no overlap, no lost stage, no deadlock.

    plan: two bytes each action. Drawing them one by one would take longer than all the rest.
    """
    actions = [
        (ACTIONS[operation % len(ACTIONS)], number) for operation, number in zip(plan[::2], plan[1::2], strict=False)
    ]
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
    assert exchange.run_until_idle(drop=0.1), f"seed {seed}: a wedge"
    exchange.check_over()
    assert len(exchange.cancelled) > 5, f"seed {seed}: too few were stopped to show anything"
