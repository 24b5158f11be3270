"""Sends and receives control messages: a session with each peer, over one control channel."""

from __future__ import annotations

import heapq
import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from torchkv.control.allowance import Allowance
from torchkv.control.channel import ControlChannel
from torchkv.control.greeting import GREETING
from torchkv.control.session import Session
from torchkv.errors import AuthError, KVError, ProtocolError
from torchkv.layout.group_map import GroupMap, RankInfo
from torchkv.protocol.messages import MAX_FRAME, ControlFrame, Left, Message, decode_frame, encode_frame

__all__ = ["ControlMessenger", "FramesByRank"]

log = logging.getLogger(__name__)

MAX_GREETINGS = 1024  # kept until they are taken
MAX_GREETINGS_NBYTES = 8 * MAX_FRAME  # of these together
MAX_EARLY = 64  # frames of ranks that are no members yet
MAX_EARLY_NBYTES = MAX_FRAME  # of these: of one rank
MAX_ALL_EARLY_NBYTES = 4 * MAX_FRAME  # of all together
SESSIONS_EARLY_NBYTES = 16 * MAX_FRAME  # of messages out of order, of all sessions: see `Session`
MAX_ABANDONED = 1024
FAREWELL_INTERVAL = 0.5  # seconds, at least, between two farewells to one peer
WARNING_INTERVAL = 10.0  # seconds, at least, between two warnings about frames that were refused


@dataclass(eq=False, slots=True)
class _Abandoned:
    """What is left of a session with a peer that was lost for long. next_farewell: when it may be told again."""

    session: Session
    endpoint: str
    next_farewell: float = 0.0


FramesByRank = list[tuple[int, list[ControlFrame]]]  # (rank, frames to send there)


class ControlMessenger:
    """One session per peer: numbers, encodes, sends, receives, checks and decodes messages.

    Belongs to the progress thread, except that any thread may `send_now` frames that it got from `frames`. The engine's
    lock guards the sessions: `tell`, `accept`, `frames`, `mark_dead` and `mark_left` are called under it; `receive`,
    `send` and `send_now`, which do I/O, are not.

    dropped: how many frames and messages were refused, or put off until their sender is a member. dead: ranks whose
    process has ended, or that have left.
    """

    def __init__(self, group_map: GroupMap, key: bytes, control: ControlChannel) -> None:
        self.dropped = 0
        self._repeats = 0  # of sessions that are over
        self.dead: set[int] = set()
        self._left: set[int] = set()
        self._rank = group_map.rank
        self._key = key
        self._control = control
        self._incarnation = group_map.me.incarnation
        self._sessions: dict[int, Session] = {}
        self._by_incarnation: dict[int, int] = {}  # ranks: a peer may call itself otherwise than this rank does
        self._early: deque[tuple[ControlFrame, int]] = deque()  # of ranks that are no members, perhaps not yet; bytes
        self._allowance = Allowance(SESSIONS_EARLY_NBYTES)
        self._ready: list[tuple[int, ControlFrame]] = []  # early frames of those that are members now
        for info in group_map.info.values():
            if info.rank != group_map.rank:
                self.add(info)
        self._abandoned: dict[int, _Abandoned] = {}  # by incarnation
        # Ranks whose sessions may have something to send now; and when others have, unless something happens before.
        # So what a step costs depends on what it sends, and not on how many peers still owe an acknowledgement.
        self._active: set[int] = set()
        self._timers: list[tuple[float, int]] = []  # a heap of times and ranks; counts only what `_timer_of` has, too
        self._timer_of: dict[int, float] = {}
        self._greetings: list[bytes] = []
        self._greetings_nbytes = 0
        self._next_warning = 0.0
        self._unsent: deque[tuple[int, list[ControlFrame]]] = deque()  # left to the progress thread by `send_now`

    def add(self, info: RankInfo) -> None:
        """A session with a peer begins."""
        self._sessions[info.rank] = Session(self._rank, self._incarnation, info.incarnation, self._allowance)
        self._by_incarnation[info.incarnation] = info.rank
        # Of two ranks one takes the other in first, and may send at once. Else its first messages would come late.
        early = [each for each in self._early if each[0].incarnation == info.incarnation]
        self._ready += [(info.rank, frame) for frame, _ in early]
        self._early = deque(each for each in self._early if each[0].incarnation != info.incarnation)

    def remove(self, info: RankInfo) -> None:
        """The session with a peer that has ended is over."""
        self.dead.discard(info.rank)
        self._left.discard(info.rank)
        self._active.discard(info.rank)
        self._timer_of.pop(info.rank, None)
        session = self._sessions.pop(info.rank)
        self._repeats += session.repeats
        session.close()
        del self._by_incarnation[info.incarnation]

    def abandon(self, info: RankInfo, endpoint: str) -> None:
        """A peer that has not answered for long is no member any more. If it speaks after all, it is told `Left`.

        That comes behind what it was told before, so that it takes all of it in. Of the connection nothing is kept.
        """
        session = self._sessions[info.rank]
        self.remove(info)
        session.send(Left())
        self._abandoned[info.incarnation] = _Abandoned(session, endpoint)
        if len(self._abandoned) > MAX_ABANDONED:
            self._abandoned.pop(next(iter(self._abandoned))).session.close()

    def _bid_farewell(self, frame: ControlFrame) -> None:
        """To the sender of ``frame``, which was abandoned."""
        peer = self._abandoned[frame.incarnation]
        peer.session.receive(frame)
        if peer.session.heard or (now := time.monotonic()) < peer.next_farewell:
            return
        peer.next_farewell = now + FAREWELL_INTERVAL
        for each in peer.session.unacknowledged():
            self._control.greet(peer.endpoint, encode_frame(each, self._key))

    @property
    def repeats(self) -> int:
        """Frames that were sent again."""
        return self._repeats + sum(session.repeats for session in self._sessions.values())

    def reaches(self, rank: int) -> bool:
        """Whether messages to ``rank`` are not dropped."""
        return rank in self._sessions and rank not in self.dead

    def tell(self, rank: int, message: Message) -> None:
        """Queues ``message`` to ``rank``: delivered reliably and in order. Drops it if ``rank`` is dead."""
        if self.reaches(rank):
            self._sessions[rank].send(message)
            self._active.add(rank)

    def mark_dead(self, rank: int) -> None:
        """The process of ``rank`` has ended: nothing more is sent there."""
        self.dead.add(rank)
        self._active.discard(rank)
        self._timer_of.pop(rank, None)

    def mark_left(self, rank: int) -> None:
        """``rank`` has sent its last message: it is sent acknowledgements only, so that it knows that it was heard."""
        self._sessions[rank].abandon()
        self.dead.add(rank)
        self._left.add(rank)
        self._active.add(rank)

    def unheard(self) -> set[int]:
        """Ranks that have not acknowledged all that they were told."""
        return {rank for rank, session in self._sessions.items() if rank not in self.dead and not session.heard}

    def receive(self, readable: int) -> list[tuple[int, ControlFrame]]:
        """Frames that have arrived, checked and decoded, with their ranks. readable: see `ControlChannel.receive`."""
        frames, self._ready = self._ready, []
        for data in self._control.receive(readable):
            if data.startswith(GREETING):
                self._keep_greeting(data)
                continue
            try:
                frame = decode_frame(data, self._key)
            except (AuthError, ProtocolError) as error:
                self.drop(error)
                continue
            if frame.incarnation in self._abandoned:
                self._bid_farewell(frame)
                continue
            if (rank := self._by_incarnation.get(frame.incarnation)) is None:
                # It has the key, but is no member: not any more, or not yet.
                self.dropped += 1
                self._keep_early(frame, len(data))
                continue
            frames.append((rank, frame))
        return frames

    def _keep_greeting(self, data: bytes) -> None:
        count, nbytes = len(self._greetings), self._greetings_nbytes + len(data)
        if count >= MAX_GREETINGS or nbytes > MAX_GREETINGS_NBYTES:
            self.drop(ProtocolError(f"no room for one more greeting: {count} wait already", retryable=True))
            return
        self._greetings.append(data)
        self._greetings_nbytes = nbytes

    def _keep_early(self, frame: ControlFrame, nbytes: int) -> None:
        """For a while, in which its sender may become a member. What is dropped comes again."""
        log.debug("rank %d puts off a control frame of a rank %d that is no member", self._rank, frame.source)
        early = self._early
        of_this = sum(kept for other, kept in early if other.incarnation == frame.incarnation)
        if of_this + nbytes > MAX_EARLY_NBYTES:
            return
        early.append((frame, nbytes))
        while len(early) > MAX_EARLY or sum(kept for _, kept in early) > MAX_ALL_EARLY_NBYTES:
            early.popleft()

    def take_greetings(self) -> list[bytes]:
        """Of ranks that may be no members: what `receive` has met since the last call."""
        taken, self._greetings, self._greetings_nbytes = self._greetings, [], 0
        return taken

    def drop(self, error: KVError) -> None:
        """Counts a frame that was refused. Says so once in a while: a stranger who sends some must not fill the log."""
        self.dropped += 1
        if (now := time.monotonic()) >= self._next_warning:
            self._next_warning = now + WARNING_INTERVAL
            log.warning("rank %d dropped a control frame (%d so far): %s", self._rank, self.dropped, error)

    def accept(self, rank: int, frame: ControlFrame) -> list[Message]:
        """The messages that ``frame`` of ``rank`` makes deliverable, in order."""
        if rank not in self._sessions:
            return []  # it was removed after the frame had been received
        if rank not in self.dead or rank in self._left:
            self._active.add(rank)
        return self._sessions[rank].receive(frame)

    def frames(self, now: float, ranks: Iterable[int] | None = None) -> FramesByRank:
        """The frames to send now, to ``ranks`` or to all peers; to all, also those that `send_now` could not send."""
        frames: FramesByRank = []
        while ranks is None and self._unsent:
            frames.append(self._unsent.popleft())
        if ranks is None:
            self._wake_timers(now)
            ranks = list(self._active)
        for rank in ranks:
            session = self._sessions[rank]
            if these := session.poll(now):
                frames.append((rank, these))
            if session.idle:
                self._active.discard(rank)
            elif (due := session.next_poll) > now:
                self._active.discard(rank)
                self._set_timer(rank, due)
        return frames

    def _set_timer(self, rank: int, due: float) -> None:
        """The session of ``rank`` is to be polled then; earlier, if it has been said so before."""
        if due < self._timer_of.get(rank, float("inf")):
            self._timer_of[rank] = due
            heapq.heappush(self._timers, (due, rank))

    def _wake_timers(self, now: float) -> None:
        while self._timers and self._timers[0][0] <= now:
            due, rank = heapq.heappop(self._timers)
            if self._timer_of.get(rank) == due:
                del self._timer_of[rank]
                self._active.add(rank)

    def send(self, frames: FramesByRank) -> None:
        """Sends ``frames``. Progress thread only."""
        for rank, these in frames:
            self._control.send(rank, [encode_frame(frame, self._key) for frame in these])

    def send_now(self, frames: FramesByRank) -> None:
        """Sends ``frames`` from any thread. Leaves some to the progress thread if it must: wake that afterwards."""
        for rank, these in frames:
            if not self._control.send_at_once(rank, [encode_frame(frame, self._key) for frame in these]):
                self._unsent.append((rank, these))

    @property
    def next_poll(self) -> float:
        """When there is something to send, unless something is told or received before."""
        earliest = 0.0 if self._ready else float("inf")
        # Copies, because other threads change them; list() and a slice make one in one step under the GIL.
        for rank in list(self._active):
            earliest = min(earliest, self._sessions[rank].next_poll)
        for due, _ in self._timers[:1]:
            earliest = min(earliest, due)
        return earliest
