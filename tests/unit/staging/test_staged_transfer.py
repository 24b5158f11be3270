"""A `StagedTransfer` that puts its stages, against a fake transport and receiver that the test controls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.fakes.staged_peer import GENERATION, LAYER, LEAST, Case, offsets, pages_sent, run_to_end
from torchkv.errors import PeerLost, RingExhausted
from torchkv.protocol.messages import StageAsk, Staged, Withdraw
from torchkv.staging.memory import MAX_TURNS
from torchkv.staging.transfer import IN_FLIGHT, StagedTransfer

# ---------------------------------------------------------------------- in order


def test_a_verb_from_ask_to_staged() -> None:
    case = Case()
    places = offsets()
    case.step()
    (ask,) = case.take_messages()
    assert ask.ring_only
    assert case.wire.puts == []
    at = next(places)
    case.give(ask, at)
    case.step()
    (put,) = case.wire.puts
    assert int(put.batch.remote_offset[0]) == at
    assert case.take_messages() == [], "not before it is there"
    case.wire.read(put)
    case.step()
    assert case.take_messages() == [], "the put has read its source, but the flush has not told that it arrived"
    case.wire.flushes[0].end()
    case.step()
    (staged,) = case.take_messages()
    assert (tuple(staged.layers), staged.start, staged.num_pages, staged.checked) == ((0, 1), 0, 4, False)
    assert case.packed(staged, at)
    assert case.transfer.finished
    assert case.transfer.error is None
    assert case.reported == 2 * LAYER
    assert case.stages.ring.in_use == 0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_with_an_asynchronous_packer_each_staged_message_is_sent_at_once(
    asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(own=1024, ring=1024)
    monkeypatch.setattr(case.packer, "asynchronous", asynchronous)
    staged = run_to_end(case)
    assert len(staged) > 1
    assert len(case.sent_at_once) == (len(staged) if asynchronous else 0)
    assert all(case.sent_at_once), "there was nothing to say"


@pytest.mark.parametrize(("own", "ring"), [(LEAST, 1 << 16), (1 << 16, LEAST), (512, 300), (4096, 2048)])
def test_rings_of_any_size_carry_every_page_once(own: int, ring: int) -> None:
    case = Case(own=-(-own // 256) * 256, ring=ring)
    staged = run_to_end(case)
    assert case.transfer.error is None
    assert pages_sent(staged) == [(layer, page) for layer in (0, 1) for page in range(4)]
    assert all(case.packed(message, at) for message, at in staged)
    assert case.reported == 2 * LAYER
    assert case.stages.ring.in_use == 0
    assert case.source.released == 1


def test_a_transfer_is_admitted_when_one_before_it_has_ended() -> None:
    case = Case()
    assert case.transfer.admit()
    others = [case.make((0,)) for _ in range(MAX_TURNS)]
    assert [other.admit() for other in others] == [True] * (MAX_TURNS - 1) + [False]
    run_to_end(case)
    assert case.transfer.finished
    assert others[-1].admit()
    for other in others:
        other.halt()
        other.advance()
        assert other.finished
    assert all(case.stages.acquire_turn(1) for _ in range(MAX_TURNS)), "a turn was not given back"


def test_the_source_is_released_when_the_last_page_is_gathered() -> None:
    case = Case(own=1024, ring=1024)
    places = offsets()
    seen = 0
    for _ in range(100):
        case.step(1)
        for message in case.take_messages():
            if isinstance(message, StageAsk):
                case.give(message, next(places))
        if case.source.released:
            break
        for number, put in enumerate(case.wire.puts):  # the newest stays on its way
            if number < len(case.wire.puts) - 1 and not put.done:
                case.wire.read(put)
                case.wire.flushes[number].end()
                seen += 1
        if len(case.wire.puts) and case.stages.ring.in_use >= 1024 and not case.wire.puts[-1].done:
            case.wire.read(case.wire.puts[-1])
            case.wire.flushes[-1].end()
    assert case.source.released == 1
    assert not case.transfer.finished
    assert not case.wire.puts[-1].done
    assert seen > 0


# ---------------------------------------------------------------------- this rank's memory


def _overlaps(case: Case) -> list[str]:
    """Lets each put read its source late, while later pieces could be packed. Returns what arrived wrong."""
    places, at, wrong = offsets(), {}, []
    for _ in range(60):
        case.step(3)
        for message in case.take_messages():
            if isinstance(message, StageAsk):
                at[message.serial] = next(places)
                case.give(message, at[message.serial])
            elif isinstance(message, Staged) and not case.packed(message, at[message.serial]):
                wrong.append(f"stage {message.serial} holds other bytes than pages {message.start} of {message.layers}")
        if case.transfer.finished:
            return wrong
        case.step(20)  # whatever could be packed over it, is
        pending = [put for put in case.wire.puts if not put.done]
        if pending:
            case.wire.read(pending[0])
            case.wire.flushes[case.wire.puts.index(pending[0])].end()
    pytest.fail("never finished")


def test_F5_a_stage_is_not_packed_again_before_its_put_has_read_it() -> None:
    assert _overlaps(Case(own=512)) == []


def test_F5_the_check_notices_a_stage_that_is_packed_again_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a put counts as over as soon as it is posted."""
    real = StagedTransfer._put

    def put(self: StagedTransfer, nbytes: int, stage: Any, span: Any) -> Iterator[int]:
        steps = real(self, nbytes, stage, span)
        next(steps)
        return iter(())

    monkeypatch.setattr(StagedTransfer, "_put", put)
    case = Case(own=512)
    places, at = offsets(), {}
    case.step()
    while not case.transfer.finished:
        for message in case.take_messages():
            if isinstance(message, StageAsk):
                at[message.serial] = next(places)
                case.give(message, at[message.serial])
        case.step(5)
    for late in case.wire.puts:
        case.wire.read(late)
    offset = int(case.wire.puts[0].batch.remote_offset[0])
    assert not case.packed(Staged(GENERATION, 0, [0], 0, 1, False), offset)


def test_the_send_ring_is_allocated_once_when_it_is_first_needed() -> None:
    case = Case()
    case.step()
    assert case.taken == []
    run_to_end(case)
    case.transfer = case.make((0, 1))
    run_to_end(case)
    assert case.taken == [1 << 16]


# ---------------------------------------------------------------------- failures


def test_a_halt_between_grant_and_put_puts_nothing() -> None:
    case = Case()
    case.step()
    (ask,) = case.take_messages()
    case.give(ask, 0)
    case.transfer.halt()
    case.step()
    assert case.transfer.finished
    assert case.transfer.flushed
    assert case.wire.puts == []
    assert case.take_messages() == []
    assert case.stages.ring.in_use == 0


def test_a_halt_waits_for_the_put_and_sends_no_message() -> None:
    case = Case()
    case.step()
    case.give(case.take_messages()[0], 0)
    case.step()
    (put,) = case.wire.puts
    case.transfer.halt()
    case.step()
    assert put.cancelled
    assert not case.transfer.finished
    assert case.stages.ring.in_use > 0, "it may still be read"
    case.wire.read(put)
    case.step()
    assert not case.transfer.finished, "it may still land"
    case.wire.flushes[0].end()
    case.step()
    assert case.transfer.finished
    assert case.transfer.flushed
    assert case.take_messages() == []
    assert case.stages.ring.in_use == 0


@pytest.mark.parametrize("broken", ["put", "flush", "both"])
def test_after_a_failed_flush_quiescence_is_unknown(broken: str) -> None:
    case = Case()
    case.step()
    case.give(case.take_messages()[0], 0)
    case.step()
    lost = PeerLost("gone")
    case.wire.puts[0].end(None if broken == "flush" else lost)
    case.wire.flushes[0].end(None if broken == "put" else lost)
    case.step()
    assert case.transfer.finished
    assert isinstance(case.transfer.error, PeerLost)
    assert case.transfer.flushed is (broken == "put")
    assert "'r'" in str(case.transfer.error)
    assert case.take_messages() == []
    assert case.stages.ring.in_use == 0


def test_a_denial_fails_the_verb_and_leaves_no_stage_in_use() -> None:
    case = Case(own=2048, ring=1024)
    case.step()
    asks = case.take_messages()
    assert len(asks) > 1
    case.give(asks[0], 0)
    case.step()
    for ask in asks[1:]:
        case.deny(ask)
    case.step()
    assert not case.transfer.finished
    case.wire.read(case.wire.puts[0])
    case.wire.flushes[0].end()
    case.step()
    assert case.transfer.finished
    error = case.transfer.error
    assert isinstance(error, RingExhausted)
    assert error.retryable
    for words in ("'r'", "rank 1", "layers 0, 1", "full of others"):
        assert words in str(error)
    assert case.stages.ring.in_use == 0
    assert not any(isinstance(message, Staged) for message in case.take_messages())


def test_a_denied_stage_that_is_not_needed_any_more_fails_nothing() -> None:
    """Pieces may be larger than expected, so that nothing is left for the last stage."""
    case = Case(own=4096, ring=1024)
    case.step()
    extra = case.requester.ask(1, GENERATION, nbytes=512, least=LEAST)
    pieces = case.transfer._pieces
    pieces.append(case.transfer._send_piece(extra, 512))
    surplus = pieces[-1]
    places, denied = offsets(), False
    for _ in range(100):
        pieces.sort(key=lambda piece: piece is surplus)  # as if it had been asked for last
        case.step(1)
        for message in case.take_messages():
            if isinstance(message, StageAsk) and message.serial != extra:
                case.give(message, next(places))
            elif isinstance(message, StageAsk):
                late = message
        for put, flush in zip(case.wire.puts, case.wire.flushes, strict=True):
            if not put.done:
                case.wire.read(put)
                flush.end()
        if case.transfer._cutter.done and not denied:
            case.deny(late)
            denied = True
    assert denied
    assert case.transfer.finished
    assert case.transfer.error is None
    assert case.reported == 2 * LAYER


@pytest.mark.parametrize(
    ("sizes", "words"),
    [({"own": 255}, "TORCHKV_STAGING_SEND"), ({"ring": 100}, "TORCHKV_STAGING_RECV"), ({"own": 0}, "STAGING_SEND")],
)
def test_a_page_that_fits_into_no_stage_is_refused_at_once(sizes: dict[str, int], words: str) -> None:
    case = Case(**sizes)
    case.step()
    assert case.transfer.finished
    assert isinstance(case.transfer.error, RingExhausted)
    assert not case.transfer.error.retryable
    assert words in str(case.transfer.error)
    assert str(LEAST) in str(case.transfer.error)
    assert case.take_messages() == []


# ---------------------------------------------------------------------- what a step costs


def test_of_the_pieces_that_wait_for_a_stage_only_the_first_is_polled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages are granted in order, so pieces behind the first that waits wait as well."""
    case = Case(own=4096, ring=1024)
    asked: list[int] = []
    real = case.requester.granted

    def granted(dst: int, generation: int, serial: int) -> Any:
        asked.append(serial)
        return real(dst, generation, serial)

    monkeypatch.setattr(case.requester, "granted", granted)
    case.step()
    asks = case.take_messages()
    assert len(asks) == IN_FLIGHT
    asked.clear()
    case.step(1)
    assert asked == [0]
    case.give(asks[0], 0)
    case.give(asks[1], 1024)
    asked.clear()
    case.step(1)
    assert asked == [0, 1, 2]


# ---------------------------------------------------------------------- patience


def test_the_timeout_is_longer_only_while_the_receivers_ring_is_waited_for() -> None:
    case = Case(own=512)
    case.step()
    assert case.transfer.patience > 1
    case.give(case.take_messages()[0], 0)
    case.step()
    assert case.transfer.patience == 1


def test_a_grant_is_progress_even_while_the_send_ring_is_full() -> None:
    case = Case(own=512)
    other = case.stages.ring.allocate(512, "another verb")
    assert other is not None
    case.step()
    first, *others = case.take_messages()
    case.give(first, 0)
    case.transfer.op.moved = False
    assert sum(case.transfer.advance() for _ in range(8)) > 0
    assert case.transfer.op.moved
    assert sum(case.transfer.advance() for _ in range(8)) == 0, "waiting is no progress"
    case.stages.ring.release(other)
    for ask in others:
        case.give(ask, 4096 * ask.serial)
    run_to_end(case, {ask.serial: 4096 * ask.serial for ask in (first, *others)})
    assert case.transfer.error is None


def test_no_staged_verb_ever_withdraws_its_promise() -> None:
    case = Case(own=512, ring=512)
    case.step()
    messages = list(case.take_messages())
    for number, ask in enumerate(messages):
        assert isinstance(ask, StageAsk)
        assert ask.ring_only
        case.give(ask, number * 4096)
    case.step()
    assert not any(isinstance(message, Withdraw) for message in case.take_messages())
