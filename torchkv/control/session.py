"""A reliable, ordered stream of messages to one peer over frames that may be lost, doubled, late or swapped."""

from __future__ import annotations

from collections import deque
from itertools import islice

from torchkv.wire import Frame, Message

__all__ = ["Session"]

FIRST_RETRY = 0.25
LAST_RETRY = 2.0
WINDOW = 1 << 14
# Most messages are answered by one that acknowledges them too; an acknowledgement by itself waits this long for it.
ACK_DELAY = 0.02


class Session:
    """Sequence numbers, cumulative acknowledgement, retransmission, reordering. No I/O; time is passed in.

    Both ends start when the group is registered and are bound to one incarnation of the peer: a frame of an
    earlier or later process under the same rank is dropped.
    """

    def __init__(self, rank: int, incarnation: int, peer_incarnation: int) -> None:
        self._rank = rank
        self._incarnation = incarnation
        self._peer_incarnation = peer_incarnation
        self._next_seq = 1
        self._unacked: deque[tuple[int, Message]] = deque()
        self._unsent = 0  # how many at the end of _unacked were never sent
        self._retry_at = float("inf")
        self._retry_after = FIRST_RETRY
        self._received = 0  # everything up to here was delivered
        self._early: dict[int, Message] = {}
        self._ack_due = False
        self._ack_at: float | None = None  # when it goes out by itself; None: not decided

    @property
    def idle(self) -> bool:
        """True if the peer has acknowledged everything, and been told that of what it sent."""
        return not self._unacked and not self._ack_due

    @property
    def next_poll(self) -> float:
        """When ``poll`` will have something to do, if nothing happens before."""
        if self._unsent or (self._ack_due and self._ack_at is None):
            return 0.0
        return self._retry_at if self._ack_at is None else min(self._retry_at, self._ack_at)

    def send(self, message: Message) -> None:
        self._unacked.append((self._next_seq, message))
        self._next_seq += 1
        self._unsent += 1

    def receive(self, frame: Frame) -> list[Message]:
        """Messages that ``frame`` makes deliverable, in the order in which they were sent."""
        if frame.incarnation != self._peer_incarnation or frame.target != self._incarnation:
            return []
        if self._unacked:
            self._acknowledged(frame.ack)
        if frame.message is None:
            return []
        self._ack_due = True
        if not self._received < frame.seq <= self._received + WINDOW:
            return []
        self._early[frame.seq] = frame.message
        ready: list[Message] = []
        while (message := self._early.pop(self._received + 1, None)) is not None:
            self._received += 1
            ready.append(message)
        return ready

    def poll(self, now: float) -> list[Frame]:
        """Frames to put on the wire now: new messages, retransmissions, or an acknowledgement that has waited."""
        frames: list[Frame] = []
        if self._unacked and now >= self._retry_at:
            frames = [self._frame(seq, message) for seq, message in self._unacked]
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
        self._unsent = 0
        if frames:
            self._ack_due = False
            self._ack_at = None
        return frames

    def _acknowledged(self, ack: int) -> None:
        if ack < self._unacked[0][0] or ack >= self._next_seq:
            return
        while self._unacked and self._unacked[0][0] <= ack:
            self._unacked.popleft()
        self._unsent = min(self._unsent, len(self._unacked))
        self._retry_after = FIRST_RETRY
        # Restarted from the next poll: what remains has just been overtaken by an acknowledgement.
        self._retry_at = float("inf") if not self._unacked else self._retry_at

    def _frame(self, seq: int, message: Message | None) -> Frame:
        return Frame(self._rank, self._incarnation, self._peer_incarnation, seq, self._received, message)
