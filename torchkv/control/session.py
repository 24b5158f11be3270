"""A session: reliable, ordered messages with one peer over frames that may be lost, duplicated, late or reordered.

An outgoing message:

    send --> unsent --poll--> unacknowledged --frame with ack >= its number--> done
                                 ^        |
                                 +--poll--+  the first RESENT of them are sent again after FIRST_RETRY, then after twice
                                             as long each time, up to LAST_RETRY; an acknowledgement of these resets
                                             that, and the next ones follow at once

An incoming message:

    frame --next number--> delivered, acknowledgement due --poll--> acknowledged: with the next message that goes out,
      |                                                             or alone after ACK_DELAY
      +--later number--> kept until the gap is filled, if there is room; else dropped, and comes again
      +--earlier number, or beyond the window--> dropped, acknowledged once more

Invariant: every message that was sent is delivered exactly once and in order, as long as both processes live: numbers
never restart within a session, and a session is bound to the incarnations of both processes.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

from torchkv.control.allowance import Allowance
from torchkv.protocol.messages import MAX_FRAME, ControlFrame, Message, message_nbytes

__all__ = ["Session"]

FIRST_RETRY = 0.25  # seconds
LAST_RETRY = 2.0  # seconds
RESENT = 64  # messages sent again at once: a peer that hangs must not be sent all that it has missed every time
WINDOW = 1 << 14  # messages beyond the next one that are kept while some in between are missing
EARLY_NBYTES = 4 * MAX_FRAME  # of these, encoded: of one session
# Seconds. Most messages are answered soon, and the answer carries the acknowledgement with it, so that none goes alone.
ACK_DELAY = 0.02


class Session:
    """This rank's end of a session: numbers, cumulative acknowledgements, retransmission, reordering.

    No I/O; time is passed in, in seconds. Both ends begin when the group is registered. Each knows the incarnation of
    its peer, so a frame of an earlier or later process under the same rank is dropped.

    early: in which the bytes of all sessions count that wait for a gap to be filled.
    """

    def __init__(self, rank: int, incarnation: int, peer_incarnation: int, early: Allowance | None = None) -> None:
        self._rank = rank
        self._incarnation = incarnation
        self._peer_incarnation = peer_incarnation
        self._next_seq = 1
        self._unacked: deque[tuple[int, Message]] = deque()  # by number, ascending
        self._unsent = 0  # how many at the end of _unacked were not sent yet
        self._retry_at = float("inf")
        self._retry_after = FIRST_RETRY
        self._resent = 0  # the number of the last message that was sent again
        self.repeats = 0  # frames that were sent again
        self._received = 0  # all messages up to this number were delivered
        self._early: dict[int, tuple[Message, int]] = {}  # received, but an earlier one is missing; with its bytes
        self._allowance = Allowance(EARLY_NBYTES, early)
        self._ack_due = False
        self._ack_at: float | None = None  # when a due acknowledgement goes out alone; None: the next poll decides

    @property
    def heard(self) -> bool:
        """Whether the peer has acknowledged everything."""
        return not self._unacked

    @property
    def idle(self) -> bool:
        """Whether nothing is left to send: the peer has acknowledged everything, and no acknowledgement is due."""
        return not self._unacked and not self._ack_due

    @property
    def next_poll(self) -> float:
        """When `poll` has something to do, unless something is sent or received before. 0.0: now."""
        if self._unsent or (self._ack_due and self._ack_at is None):
            return 0.0
        return self._retry_at if self._ack_at is None else min(self._retry_at, self._ack_at)

    def send(self, message: Message) -> None:
        """Numbers ``message``; the next `poll` sends it."""
        self._unacked.append((self._next_seq, message))
        self._next_seq += 1
        self._unsent += 1

    def receive(self, frame: ControlFrame) -> list[Message]:
        """The messages that ``frame`` makes deliverable, in the order in which they were sent."""
        if frame.incarnation != self._peer_incarnation or frame.target != self._incarnation:
            return []
        if self._unacked:
            self._acknowledged(frame.ack)
        if frame.message is None:
            return []
        self._ack_due = True
        if not self._received < frame.seq <= self._received + WINDOW:
            return []
        if frame.seq > self._received + 1:
            self._keep(frame.seq, frame.message)
            return []
        self._received += 1
        if (twice := self._early.pop(self._received, None)) is not None:
            self._allowance.give_back(twice[1])
        ready = [frame.message]
        while (early := self._early.pop(self._received + 1, None)) is not None:
            self._received += 1
            self._allowance.give_back(early[1])
            ready.append(early[0])
        return ready

    def _keep(self, seq: int, message: Message) -> None:
        """A message came before an earlier one. For what there is no room is dropped: it was not acknowledged."""
        if seq in self._early:
            return
        nbytes = message_nbytes(message)
        if self._allowance.take(nbytes):
            self._early[seq] = message, nbytes

    def close(self) -> None:
        """It is over: what is kept is dropped. Idempotent."""
        self._early.clear()
        self._allowance.give_back(self._allowance.kept)

    def unacknowledged(self) -> list[ControlFrame]:
        """The first `RESENT` messages that the peer has not acknowledged."""
        return [self._frame(seq, message) for seq, message in islice(self._unacked, RESENT)]

    def abandon(self) -> None:
        """The peer takes in nothing more: what it has not acknowledged is dropped. An acknowledgement may be due."""
        self._unacked.clear()
        self._unsent = 0
        self._retry_at = float("inf")
        self._ack_at = 0.0

    def poll(self, now: float) -> list[ControlFrame]:
        """The frames to send now: new messages, retransmissions, or an acknowledgement that has waited long enough."""
        frames: list[ControlFrame] = []
        unsent = 0
        if self._unacked and now >= self._retry_at:
            frames = [self._frame(seq, message) for seq, message in islice(self._unacked, RESENT)]
            unsent = min(self._unsent, len(self._unacked) - len(frames))
            self._resent = frames[-1].seq
            self.repeats += len(frames)
            self._retry_after = min(self._retry_after * 2, LAST_RETRY)
            self._retry_at = now + self._retry_after
        elif self._unsent:
            new = islice(self._unacked, len(self._unacked) - self._unsent, None)
            frames = [self._frame(seq, message) for seq, message in new]
            self._retry_at = min(self._retry_at, now + self._retry_after)
        elif self._ack_due:
            if self._ack_at is None:
                self._ack_at = now + ACK_DELAY
            if now < self._ack_at:
                return frames
            frames = [self._frame(0, None)]
        self._unsent = unsent
        if frames:
            self._ack_due = False
            self._ack_at = None
        return frames

    def _acknowledged(self, ack: int) -> None:
        """The peer has received all messages up to number ``ack``. Numbers that were never given are ignored."""
        if ack < self._unacked[0][0] or ack >= self._next_seq:
            return
        while self._unacked and self._unacked[0][0] <= ack:
            self._unacked.popleft()
        self._unsent = min(self._unsent, len(self._unacked))
        self._retry_after = FIRST_RETRY
        # What remains keeps its retry time, and only the time after that begins anew, at FIRST_RETRY. But once all that
        # was sent again has arrived, what comes behind it is the next to go.
        if not self._unacked:
            self._retry_at = float("inf")
        elif self._unacked[0][0] == self._resent + 1:
            self._retry_at = 0.0

    def _frame(self, seq: int, message: Message | None) -> ControlFrame:
        return ControlFrame(self._rank, self._incarnation, self._peer_incarnation, seq, self._received, message)
