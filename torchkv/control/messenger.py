"""What this rank and its peers say to each other: a session with each of them, over the control channel."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable

from torchkv.control import Control
from torchkv.errors import AuthError, ProtocolError
from torchkv.protocol.session import Session
from torchkv.roster import Roster
from torchkv.wire import Frame, Message, decode_frame, encode_frame

__all__ = ["Frames", "Talk"]

log = logging.getLogger(__name__)

Frames = list[tuple[int, list[Frame]]]  # by rank


class Talk:
    """Belongs to the engine's driver, except that callers may `say` what they got from `frames`.

    The engine's lock guards the sessions: ``tell``, ``accept``, ``frames`` and ``silence`` are called under it, what
    receives and sends is not.
    """

    def __init__(self, roster: Roster, key: bytes, control: Control) -> None:
        self.dropped = 0  # frames that were no good, or whose messages were not
        self.silent: set[int] = set()  # for ever: nothing is said to them any more
        self._rank = roster.rank
        self._key = key
        self._control = control
        self._sessions = {
            rank: Session(roster.rank, roster.me.incarnation, member.incarnation)
            for rank, member in roster.members.items()
            if rank != roster.rank
        }
        self._talking: set[int] = set()  # sessions that may have something to send
        self._late: deque[tuple[int, list[Frame]]] = deque()  # what callers could not send

    def tell(self, rank: int, message: Message) -> None:
        """Reliably, in order; nothing if ``rank`` is dead."""
        if rank not in self.silent:
            self._sessions[rank].send(message)
            self._talking.add(rank)

    def silence(self, rank: int) -> None:
        """``rank`` is dead."""
        self.silent.add(rank)
        self._talking.discard(rank)

    def hear(self, readable: int) -> list[Frame]:
        """What has come in. readable: see `Control.receive`."""
        frames: list[Frame] = []
        for data in self._control.receive(readable):
            try:
                frame = decode_frame(data, self._key)
                if frame.source not in self._sessions:
                    raise ProtocolError(f"control frame of rank {frame.source}, which is not in this group")
            except (AuthError, ProtocolError) as error:
                self.dropped += 1
                log.warning("rank %d dropped a control frame: %s", self._rank, error)
                continue
            frames.append(frame)
        return frames

    def accept(self, frame: Frame) -> list[Message]:
        """The messages that ``frame`` makes deliverable."""
        if frame.source not in self.silent:
            self._talking.add(frame.source)
        return self._sessions[frame.source].receive(frame)

    def frames(self, now: float, ranks: Iterable[int] | None = None) -> Frames:
        """What is to be sent now, to all (also what callers could not send) or to these ``ranks``."""
        frames: Frames = []
        while ranks is None and self._late:
            frames.append(self._late.popleft())
        for rank in list(self._talking if ranks is None else ranks):
            session = self._sessions[rank]
            if these := session.poll(now):
                frames.append((rank, these))
            elif session.idle:
                self._talking.discard(rank)
        return frames

    def send(self, frames: Frames) -> None:
        for rank, these in frames:
            self._control.send(rank, [encode_frame(frame, self._key) for frame in these])

    def say(self, frames: Frames) -> None:
        """The same, for any thread; the driver may have to help, so wake it afterwards."""
        for rank, these in frames:
            if not self._control.send_at_once(rank, [encode_frame(frame, self._key) for frame in these]):
                self._late.append((rank, these))

    @property
    def next_poll(self) -> float:
        """When there will be something to send, if nothing happens before."""
        earliest = float("inf")
        for rank in list(self._talking):  # a copy, which one step of the interpreter makes: callers add to the set
            earliest = min(earliest, self._sessions[rank].next_poll)
        return earliest
