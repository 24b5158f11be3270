"""Turns, deadlines, quarantine and malformed asks on the receiver's side. `test_staging_requester` has both sides."""

from __future__ import annotations

import random

import pytest

from torchkv.control.session import Session
from torchkv.errors import ProtocolError
from torchkv.options import Options
from torchkv.protocol.messages import (
    MAX_ASKS,
    MAX_TEXT,
    Message,
    StageAsk,
    StageDenied,
    StageGrant,
    Withdraw,
    Withdrawn,
)
from torchkv.protocol.receiving.stage_allocator import Stage, StagingRing
from torchkv.protocol.receiving.staging_credits import MAX_STAGES, StagingCredits

TIMEOUT = 10.0
A, B, C = 1, 2, 3


class Kit:
    """A `StagingCredits` over a ring of ``capacity`` bytes, with helpers that ask for stages and read its answers."""

    def __init__(self, capacity: int = 100, alignment: int = 1) -> None:
        self.ring = StagingRing(capacity, alignment=alignment)
        self.credits = StagingCredits(self.ring, timeout=TIMEOUT)
        self.serials: dict[tuple[int, int], int] = {}

    def ask(
        self,
        src: int,
        nbytes: int,
        least: int | None = None,
        *,
        generation: int = 1,
        now: float = 0.0,
        ring_only: bool = True,
    ) -> int:
        serial = self.serials.get((src, generation), 0)
        self.serials[src, generation] = serial + 1
        self.credits.ask(src, StageAsk(generation, serial, nbytes, nbytes if least is None else least, ring_only), now)
        return serial

    def said(self) -> list[tuple[int, Message]]:
        outbox, self.credits.outbox = self.credits.outbox, []
        return outbox

    def granted(self) -> list[tuple[int, int]]:
        """(writer, bytes) of each grant since the last call. Checks that there are no other messages."""
        said = self.said()
        grants = [(src, message.nbytes) for src, message in said if isinstance(message, StageGrant)]
        assert len(grants) == len(said), said
        return grants

    def denial(self) -> str:
        ((_, message),) = self.said()
        assert isinstance(message, StageDenied), message
        return message.text

    def fill(self, src: int, serial: int = 0, generation: int = 1) -> Stage:
        stage = self.credits.mark_written(src, generation, serial)
        assert stage is not None
        return stage

    def end(self, src: int, serial: int = 0, generation: int = 1, now: float = 0.0) -> None:
        """The stage is written and unpacked."""
        self.fill(src, serial, generation)
        self.credits.release(src, generation, serial, now)

    def assert_empty(self) -> None:
        assert self.credits._queues == {}
        assert self.credits._round_robin == {}
        assert self.ring.stages == ()


# -- one queue --------------------------------------------------------------------------------------------------------


def test_a_stage_from_its_ask_to_its_release() -> None:
    kit = Kit(alignment=10)
    assert not kit.credits.holds(A, 1)
    kit.ask(A, 25)
    assert kit.said() == [(A, StageGrant(1, 0, 0, 25))]
    assert kit.credits.holds(A, 1)
    stage = kit.fill(A)
    assert (stage.offset, stage.nbytes, stage.owner) == (0, 30, (A, 1))
    kit.credits.release(A, 1, 0, 0.0)
    assert not kit.credits.holds(A, 1)
    assert kit.ring.in_use == 0
    kit.credits.mark_quiescent(A, 1, 0.0)
    kit.assert_empty()


def test_repeated_messages_change_nothing() -> None:
    kit = Kit()
    ask = StageAsk(1, 0, 60, 60, True)
    waits = StageAsk(1, 1, 60, 60, True)
    for _ in range(2):
        kit.credits.ask(A, ask, 0.0)
    assert kit.said() == [(A, StageGrant(1, 0, 0, 60))] * 2, "granted and not written: the same grant again"
    for _ in range(2):
        kit.credits.ask(A, waits, 0.0)
    assert kit.granted() == []
    kit.fill(A)
    assert kit.credits.mark_written(A, 1, 0) is None
    assert kit.credits.mark_written(A, 1, 1) is None, "not granted yet"
    assert kit.credits.mark_written(A, 2, 0) is None
    assert kit.credits.mark_written(B, 1, 0) is None
    kit.credits.ask(A, ask, 0.0)
    assert kit.granted() == [], "written: over"
    for _ in range(3):
        kit.credits.release(A, 1, 0, 0.0)
    assert kit.granted() == [(A, 60)]
    assert kit.ring.in_use == 60
    kit.credits.ask(A, ask, 0.0)
    assert kit.granted() == []


def test_a_stage_may_be_given_back_unused() -> None:
    kit = Kit()
    kit.ask(A, 100)
    kit.ask(B, 100)
    kit.said()
    kit.credits.release(A, 1, 0, 0.0)
    assert kit.granted() == [(B, 100)]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (StageAsk(1, 2, 10, 10, True), "asks for stage 2, but the next one is 1"),
        (StageAsk(1, 1 << 61, 10, 10, True), "the next one is 1"),
        (StageAsk(1, 1, 10, 0, True), "positive"),
        (StageAsk(1, 1, 0, 0, True), "positive"),
        (StageAsk(1, 1, 10, 11, True), "no more than the first"),
        (StageAsk(1, 1, 10, 10, False), "until it is withdrawn"),
        (StageAsk(9, 1, 10, 10, True), "the next one is 0"),
    ],
)
def test_asks_that_no_honest_writer_makes(message: StageAsk, words: str) -> None:
    kit = Kit()
    kit.ask(A, 10)
    kit.said()
    with pytest.raises(ProtocolError, match=words):
        kit.credits.ask(A, message, 0.0)
    assert kit.said() == []
    kit.ask(A, 10)
    assert kit.granted() == [(A, 10)], "nothing has changed"
    kit.credits.peer_dead(A, 0.0)
    kit.assert_empty()


def test_asks_without_end_are_refused() -> None:
    """sglang#39764: an unbounded chunk index made the receiver append until it was out of memory."""
    kit = Kit()
    for _ in range(MAX_ASKS):
        kit.ask(A, 50)
    assert len(kit.granted()) == 2
    with pytest.raises(ProtocolError, match=f"while {MAX_ASKS} are waiting or unwritten"):
        kit.credits.ask(A, StageAsk(1, MAX_ASKS, 50, 50, True), 0.0)
    kit.fill(A)
    kit.credits.ask(A, StageAsk(1, MAX_ASKS, 50, 50, True), 0.0)


def test_one_queue_holds_only_so_many_stages_and_lets_others_pass() -> None:
    kit = Kit(capacity=10 * MAX_STAGES)
    for serial in range(MAX_STAGES):
        kit.ask(A, 1)
        kit.fill(A, serial)
    kit.said()
    kit.ask(A, 1)
    kit.ask(B, 5)
    assert kit.granted() == [(B, 5)]
    kit.credits.release(A, 1, 7, 0.0)
    assert kit.granted() == [(A, 1)]


# -- turns ------------------------------------------------------------------------------------------------------------


def test_queues_are_served_in_strict_turn_one_stage_each() -> None:
    kit = Kit()
    kit.ask(C, 100)
    for _ in range(3):
        kit.ask(A, 100)
    for generation in (1, 2):
        kit.ask(B, 100, generation=generation)
    kit.credits.peer_dead(C, 0.0)
    served = []
    holder: tuple[int, int, int] | None = None
    for _ in range(5):
        for src, message in kit.said():
            if isinstance(message, StageGrant) and src != C:
                holder = (src, message.serial, message.generation)
                served.append((src, message.generation, message.serial))
        assert holder is not None
        kit.end(*holder)
    assert served == [(A, 1, 0), (B, 1, 0), (B, 2, 0), (A, 1, 1), (A, 1, 2)]


def test_a_large_ask_is_not_starved_by_small_ones() -> None:
    kit = Kit()
    for src in (A, B):
        kit.ask(src, 50)
    kit.said()
    kit.ask(C, 100)
    for src in (A, B):
        kit.ask(src, 50)
    kit.end(A)
    assert kit.granted() == [], "there is room for A again, but it is C's turn"
    kit.end(B)
    assert kit.granted() == [(C, 100)]
    kit.end(C)
    assert kit.granted() == [(A, 50), (B, 50)]


def test_queues_that_always_wait_get_every_nth_stage_whatever_the_sizes() -> None:
    """With n queues that always have asks, every queue gets every n-th stage, in a fixed order."""
    chance = random.Random()
    kit = Kit(capacity=1000)
    writers = range(1, 21)
    kit.ask(99, 1000)
    for src in writers:
        for _ in range(3):
            kit.ask(src, chance.choice((10, 100, 900)))
    kit.said()
    kit.credits.peer_dead(99, 0.0)
    held: list[tuple[int, int]] = []
    order: list[int] = []
    while len(order) < 400:
        for src, message in kit.said():
            assert isinstance(message, StageGrant)
            kit.fill(src, message.serial)
            held.append((src, message.serial))
            order.append(src)
            kit.ask(src, chance.choice((10, 100, 900)))
        src, serial = held.pop(chance.randrange(len(held)))
        kit.credits.release(src, 1, serial, 0.0)
    assert order == [writers[at % len(writers)] for at in range(len(order))]


def test_a_flood_of_one_writers_requests_does_not_hold_up_another_for_more_than_a_round() -> None:
    kit = Kit()
    for generation in range(2, 52):
        for _ in range(4):
            kit.ask(A, 50, generation=generation)
    kit.ask(B, 50)
    held = [(src, message) for src, message in kit.said() if isinstance(message, StageGrant)]
    turns = 0
    while held[-1][0] != B:
        turns += 1
        src, message = held.pop(0)
        kit.end(src, message.serial, message.generation)
        held += [(src, message) for src, message in kit.said() if isinstance(message, StageGrant)]
    assert turns <= 51


# -- deadlines and denials --------------------------------------------------------------------------------------------


def test_oversize_is_denied_at_once_and_names_the_setting() -> None:
    kit = Kit(capacity=100, alignment=30)
    kit.ask(A, 500, 91)
    text = kit.denial()
    assert all(word in text for word in ("91", "90", "Options.staging_recv", "TORCHKV_STAGING_RECV")), text
    kit.ask(A, 500, 90)
    assert kit.granted() == [(A, 90)], "as much as there can be"


def test_F10_a_lost_grant_ends_in_a_denial_that_says_who_holds_the_ring() -> None:
    """sglang#29978: after a lost grant or release, the receiver looped for ever without an error."""
    kit = Kit()
    kit.ask(A, 70, generation=5)
    kit.ask(B, 20, generation=6)
    kit.credits.revoke(6)
    kit.said()
    kit.ask(C, 60, 30, now=3.0)
    kit.credits.tick(3.0 + TIMEOUT - 0.01)
    assert kit.said() == []
    assert kit.credits.has_pending(1)
    kit.credits.tick(3.0 + TIMEOUT)
    text = kit.denial()
    for words in ("100 bytes", "90 in use", "20 of them quarantined", "rank 1 generation 5 (70 bytes)", "30 to 60"):
        assert words in text, text
    assert "rank 2 generation 6 (20 bytes)" in text
    assert "Options.staging_recv" in text
    assert not kit.credits.has_pending(1)
    kit.credits.ask(C, StageAsk(1, 0, 60, 30, True), 20.0)
    assert kit.said() == [], "denied is over"
    assert kit.ask(C, 5, now=20.0) == 1
    assert kit.granted() == [(C, 5)]


def test_the_deadline_starts_anew_with_every_stage_that_the_queue_gets() -> None:
    kit = Kit()
    kit.ask(A, 100)
    for _ in range(2):
        kit.ask(B, 100)
    kit.end(A, now=8.0)
    assert kit.granted() == [(A, 100), (B, 100)]
    kit.credits.tick(17.9)
    assert kit.said() == []
    kit.credits.tick(18.0)
    assert "waited" in kit.denial()


def test_asks_behind_a_denied_one_are_served() -> None:
    kit = Kit()
    kit.ask(A, 50)
    kit.ask(B, 100)
    kit.said()
    kit.ask(C, 50, now=1.0)
    assert kit.granted() == []
    kit.credits.tick(TIMEOUT)
    denied, granted = kit.said()
    assert (denied[0], granted[0]) == (B, C)
    assert isinstance(granted[1], StageGrant)


def test_denials_fit_into_a_message() -> None:
    kit = Kit(capacity=1 << 61)
    for src in range(1, 60):
        kit.ask(16_000 + src, 1 << 54, generation=(1 << 62) - src)
    kit.said()
    kit.ask(16_383, (1 << 62) - 1, 1 << 61, generation=(1 << 62) - 100)
    kit.credits.tick(TIMEOUT)
    text = kit.denial()
    assert len(text) <= MAX_TEXT
    assert text.count("generation") == 4


# -- failure ----------------------------------------------------------------------------------------------------------


def test_a_stage_granted_to_a_failed_request_is_quarantined_until_its_writer_is_quiescent() -> None:
    kit = Kit()
    kit.ask(A, 60)
    kit.said()
    kit.credits.revoke(1)
    kit.credits.revoke(1)
    assert kit.ring.quarantined == 60
    assert kit.credits.mark_written(A, 1, 0) is None, "never scattered"
    kit.credits.release(A, 1, 0, 0.0)
    assert kit.ring.quarantined == 60, "and given back by quiescence only"
    assert kit.credits.holds(A, 1)
    kit.ask(B, 100, 1)
    assert kit.said() == [(B, StageGrant(1, 0, 60, 40))], "as much as is left"
    kit.ask(A, 10)
    kit.credits.ask(A, StageAsk(1, 0, 60, 60, True), 0.0)
    assert kit.said() == [], "late asks of a failed request"
    kit.credits.mark_quiescent(A, 1, 0.0)
    assert kit.ring.quarantined == 0
    assert not kit.credits.holds(A, 1)
    kit.end(B)
    kit.credits.mark_quiescent(B, 1, 0.0)
    kit.assert_empty()


def test_a_stage_leaked_by_a_hung_writer_does_not_pin_the_ring() -> None:
    """sglang#31217: not even if an ask that waits before the others needs more than is left."""
    kit = Kit()
    kit.ask(A, 40, generation=9)
    kit.credits.revoke(9)
    kit.ask(B, 80)
    kit.said()
    for serial in range(20):
        kit.ask(C, 50)
        assert kit.granted() == [(C, 50)], "past B, which no end of C's stages could help"
        kit.end(C, serial)
    kit.credits.peer_dead(A, 5.0)
    assert kit.granted() == [(B, 80)]


def test_who_may_still_write() -> None:
    kit = Kit()
    kit.ask(A, 25)
    kit.ask(B, 25)
    kit.ask(C, 100)  # waits
    assert kit.credits.writers() == {A, B}
    kit.end(A)
    kit.credits.revoke(1)
    assert kit.credits.writers() == {B}
    kit.credits.mark_quiescent(B, 1, 0.0)
    assert kit.credits.writers() == set()


@pytest.mark.parametrize("quiescent_first", [True, False])
def test_what_is_being_read_stays_until_it_has_been_read(quiescent_first: bool) -> None:
    kit = Kit()
    kit.ask(A, 60)
    kit.fill(A)
    kit.credits.revoke(1)
    assert (kit.ring.in_use, kit.ring.quarantined) == (60, 0)
    if quiescent_first:
        kit.credits.mark_quiescent(A, 1, 0.0)
        assert kit.ring.in_use == 60
    kit.credits.release(A, 1, 0, 0.0)
    assert kit.ring.in_use == 0
    if not quiescent_first:
        assert kit.credits.is_ring_only(A, 1), "remembered until it is quiescent"
        kit.credits.mark_quiescent(A, 1, 0.0)
    kit.assert_empty()


def test_a_failed_requests_asks_leave_the_turn_to_others() -> None:
    kit = Kit()
    kit.ask(A, 50)
    kit.ask(B, 100, generation=2)
    kit.ask(C, 50)
    assert kit.granted() == [(A, 50)]
    assert kit.credits.has_pending(2)
    kit.credits.revoke(2)
    assert not kit.credits.has_pending(2)
    assert kit.granted() == [(C, 50)]


def test_a_sealed_writer_leaves_nothing_behind() -> None:
    kit = Kit()
    kit.ask(A, 50)
    kit.ask(A, 100)
    kit.ask(B, 100)
    kit.said()
    kit.credits.mark_quiescent(A, 1, 0.0)
    assert kit.granted() == [(B, 100)], "neither its stage nor its ask"
    assert kit.credits.mark_written(A, 1, 0) is None
    kit.credits.mark_quiescent(A, 1, 0.0)


def test_a_dead_writer_is_quiescent_everywhere() -> None:
    kit = Kit()
    for generation in (1, 2, 3):
        kit.ask(A, 20, generation=generation)
    kit.fill(A, generation=2)
    kit.credits.revoke(3)
    kit.ask(A, 100, generation=2)
    kit.ask(B, 60, generation=2)
    kit.said()
    kit.credits.peer_dead(A, 0.0)
    kit.credits.peer_dead(A, 0.0)
    assert kit.granted() == [(B, 60)]
    assert [stage.owner for stage in kit.ring.stages] == [(A, 2), (B, 2)]
    kit.credits.ask(A, StageAsk(2, 2, 10, 10, True), 0.0)
    assert kit.said() == [], "while its last stage is read"
    kit.credits.release(A, 2, 0, 0.0)
    kit.credits.peer_dead(B, 0.0)
    kit.assert_empty()


def test_F11_a_slow_reader_delays_only_asks_that_need_its_space() -> None:
    """Stages that are read slowly stay where they are, and the rest of the ring is used (sglang: FIFO watermark)."""
    kit = Kit()
    kit.ask(A, 30)
    kit.fill(A)
    kit.said()
    for serial in range(30):
        kit.ask(B, 35)
        assert kit.granted() == [(B, 35)]
        kit.end(B, serial)


# -- the promise ------------------------------------------------------------------------------------------------------


def test_a_promise_holds_until_it_is_withdrawn_even_after_a_failure() -> None:
    kit = Kit()
    assert not kit.credits.is_ring_only(A, 1)
    kit.ask(A, 10)
    kit.ask(B, 10, ring_only=False)
    kit.ask(A, 10, generation=2)
    kit.said()
    assert [kit.credits.is_ring_only(src, 1) for src in (A, B)] == [True, False]
    kit.credits.revoke(1)
    assert kit.credits.is_ring_only(A, 1)
    for _ in range(2):
        kit.credits.withdraw(A, Withdraw(2))
        assert kit.said() == [(A, Withdrawn(2))]
        assert not kit.credits.is_ring_only(A, 2)
    with pytest.raises(ProtocolError, match="withdrawn"):
        kit.credits.ask(A, StageAsk(2, 1, 10, 10, True), 0.0)
    kit.credits.ask(A, StageAsk(2, 1, 10, 10, False), 0.0)
    assert not kit.credits.is_ring_only(A, 2)
    with pytest.raises(ProtocolError, match="never made"):
        kit.credits.ask(A, StageAsk(2, 2, 10, 10, True), 0.0)


def test_a_withdrawal_of_nothing_is_answered_and_remembered() -> None:
    """The promise of a loop takes another way, and may come after its withdrawal."""
    kit = Kit()
    kit.credits.withdraw(A, Withdraw(4))
    assert kit.said() == [(A, Withdrawn(4))]
    kit.credits.promised(A, 4)
    assert not kit.credits.is_ring_only(A, 4)
    kit.credits.mark_quiescent(A, 4, 0.0)
    kit.assert_empty()


def test_the_promise_of_a_loop_holds_until_it_is_withdrawn() -> None:
    kit = Kit()
    kit.credits.promised(A, 4)
    assert kit.credits.is_ring_only(A, 4)
    kit.credits.ask(A, StageAsk(4, 0, 10, 10, True), 0.0)
    kit.credits.withdraw(A, Withdraw(4))
    assert not kit.credits.is_ring_only(A, 4)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_standing_stage_is_no_larger_than_its_writer_can_keep_beside_it(device: str) -> None:
    """It takes as many bytes of its send ring, of which half may be given away, if it has not mapped the stage."""
    options, writers = Options(), 1
    credits = StagingCredits(StagingRing(options.staging_recv), timeout=TIMEOUT, device=device, writers=lambda: writers)
    assert credits.standing_nbytes(A, mapped=False) <= options.staging_send // 8
    assert credits.standing_nbytes(A, mapped=True) == (4 << 20 if device == "cpu" else 128 << 20)
    writers = 7
    for mapped in (False, True):
        assert 7 * credits.standing_nbytes(A, mapped=mapped) <= options.staging_recv // 2


# -- over the wire ----------------------------------------------------------------------------------------------------


def test_an_ask_sent_before_the_receiver_listens_is_served_once_it_does() -> None:
    """sglang#31217: an ask for staging that came before registration was dropped for ever."""
    kit = Kit()
    writer, receiver = Session(A, 10, 20), Session(0, 20, 10)
    writer.send(StageAsk(1, 0, 10, 10, True))
    now = 0.0
    for _ in range(5):  # the receiver does not read yet
        assert writer.poll(now)
        now += 3.0
    for frame in writer.poll(now):
        for message in receiver.receive(frame):
            assert isinstance(message, StageAsk)
            kit.credits.ask(A, message, now)
    assert kit.granted() == [(A, 10)]
