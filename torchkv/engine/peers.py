"""A rank's peers: the connections to them, which of them are lost or dead, and when the dead can write no more.

    add --> FOUND <--> LOST         no answer: its requests fail, but it may still be writing
              |         |
              +----+----+
                   v
              DEAD or LEFT          dead: its process has ended; what it wrote before may still be on its way.
                   |                left: it takes part no more, and says that all that it wrote has landed (`Left`)
                   |  the channels of the dead have drained; nothing of this rank is under way to it
                   v
                 drained            nothing of it lands any more: its connections are closed, its mailboxes unmapped
                   |  no request names it any more
                   v
                 forgotten          `forget`, where members come and go

See `torchkv.control.channel` for FOUND, LOST and DEAD. `connections`, ``lost`` and the membership are shared with
callers, under the engine's lock; everything else belongs to the driver's thread.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from torchkv.control.channel import ControlChannel, PeerEvent, PeerState
from torchkv.control.messenger import ControlMessenger
from torchkv.errors import KVError
from torchkv.layout.group_map import GroupMap, RankInfo
from torchkv.protocol.instance import InstanceLeader
from torchkv.protocol.messages import Left
from torchkv.protocol.receiving.receiver import Receiver
from torchkv.protocol.sending.sender import Sender
from torchkv.transfer.peer_connection import PeerConnection

if TYPE_CHECKING:
    from torchkv.kernels.gpu_context import GpuContext

__all__ = ["Peers"]

log = logging.getLogger(__name__)

MAX_FORGOTTEN = 64  # ranks that count as lost although they are no members any more


class Peers:
    """The peers of one rank, and what its state machines are told of them.

    connect: makes the connection to a rank. moves_to: whether transfers to a rank are under way. unmap: drops what the
    resident loop shares with a rank that has ended. notify: wakes callers, under the lock.
    connections: by rank, as far as they have been made. lost: ranks that do not answer or have left -> the reason.
    """

    def __init__(
        self,
        *,
        group_map: GroupMap,
        lock: threading.Lock,
        control: ControlChannel,
        messenger: ControlMessenger,
        sender: Sender,
        receiver: Receiver,
        leader: InstanceLeader,
        gpu: GpuContext | None,
        connect: Callable[[int], PeerConnection],
        moves_to: Callable[[int], bool],
        unmap: Callable[[int], None],
        notify: Callable[[], None],
    ) -> None:
        self.connections: dict[int, PeerConnection] = {}
        self.lost: dict[int, str] = {}
        self.undrained: set[int] = set()  # that are dead or have left, and are not drained yet
        self.closing: list[PeerConnection] = []  # connections to dead ranks, to be closed by `run_deferred_frees`
        self._group_map = group_map
        self._lock = lock
        self._control = control
        self._messenger = messenger
        self._sender = sender
        self._receiver = receiver
        self._leader = leader
        self._gpu = gpu
        self._connect = connect
        self._moves_to = moves_to
        self._unmap = unmap
        self._notify = notify
        # Connections whose channel broke. They stay open: if the peer dies, they show when its writes have drained.
        self._broken: dict[int, list[PeerConnection]] = {}
        self._forgotten: deque[int] = deque()
        self._left: set[int] = set()
        self._unwatched: set[int] = set()  # writers without a connection: nothing shows when their writes have drained

    # ------------------------------------------------------------------ members

    def add(self, members: Sequence[RankInfo]) -> None:
        """Members have come. Raises ``LayoutMismatch`` if the layout of one and this rank's are incompatible."""
        with self._lock:
            self._group_map.add(members)
            for info in members:
                self._messenger.add(info)

    def leave(self) -> None:
        """Tells all peers that this rank takes part no more, except those where something that it wrote may still land.

        To be called when the resident loop has ended. Under the lock.
        """
        for rank in self._group_map.info.keys() - {self._group_map.rank}:
            if not self._moves_to(rank) and self._sender.requests.has_landed(rank):
                self._messenger.tell(rank, Left())

    def on_left(self, rank: int, now: float) -> None:
        """``rank`` has sent `Left`. Under the lock."""
        log.info("rank %d: %s has left", self._group_map.rank, self._group_map.name(rank))
        self._left.add(rank)
        self._lose(rank, f"{self._group_map.name(rank)} has left: its group was destroyed, or its instance closed", now)
        self._end(rank)
        self._messenger.mark_left(rank)

    def gone(self, rank: int) -> bool:
        """Whether nothing of ``rank`` is left, so that it can be forgotten."""
        with self._lock:
            return (
                rank in self._messenger.dead
                and rank not in self.undrained
                and all(connection.rank != rank for connection in self.closing)
                and self._sender.requests.is_done_with(rank)
                and self._receiver.is_done_with(rank)
            )

    def finished(self, rank: int) -> bool:
        """Whether nothing is under way between this rank and ``rank``, and ``rank`` may write nowhere here."""
        if self._moves_to(rank):
            return False
        with self._lock:
            return (
                rank not in self.undrained
                and self._sender.requests.is_done_with(rank)
                and self._receiver.is_done_with(rank)
            )

    def named(self) -> set[int]:
        """Ranks with which requests are under way."""
        with self._lock:
            return self._sender.requests.receivers() | self._receiver.requests.writers()

    def forget(self, rank: int, *, farewell: str = "") -> None:
        """Drops a member that is `gone`, or with which nothing has begun yet.

        farewell: the endpoint of one that is lost, and with which all is `finished`; see `ControlMessenger.abandon`. If
        something that this rank wrote there may still land, nothing is said: it would take that for a proof.
        """
        with self._lock:
            farewell = farewell if self._sender.requests.has_landed(rank) else ""
            self._sender.forget(rank)
            if farewell:
                self._messenger.abandon(self._group_map.info[rank], farewell)
            else:
                self._messenger.remove(self._group_map.info[rank])
            # A caller may have found the rank's number before, and not reached the lock yet.
            self.lost[rank] = f"{self._group_map.name(rank)} has gone"
            self._group_map.remove(rank)
            self._unmap(rank)
            self._forgotten.append(rank)
            if len(self._forgotten) > MAX_FORGOTTEN:
                del self.lost[self._forgotten.popleft()]
        left = [*self._broken.pop(rank, []), self.connections.pop(rank, None)]
        self.closing += [connection for connection in left if connection is not None and not connection.closed]
        self.run_deferred_frees()
        self._unwatched.discard(rank)
        self._left.discard(rank)
        self._control.disconnect(rank)

    # ------------------------------------------------------------------ connections

    def connection(self, rank: int) -> PeerConnection:
        """The connection to ``rank``, made on first use."""
        if rank not in self.connections:
            connection = self.connections[rank] = self._connect(rank)
            connection.name = self._group_map.name(rank)
        return self.connections[rank]

    def drop_connection(self, connection: PeerConnection) -> None:
        """The connection's channel has broken: the next transfer gets a new connection. See ``_broken``."""
        if self.connections.get(connection.rank) is connection:
            self._broken.setdefault(connection.rank, []).append(self.connections.pop(connection.rank))

    def is_watched(self, rank: int) -> bool:
        """Whether it will show when the writes of ``rank`` have drained."""
        return rank in self.connections and rank not in self._unwatched

    def watch(self, rank: int) -> None:
        """Connects to ``rank`` before it may write here: if it dies, the connection shows when its writes drained."""
        try:
            self.connection(rank)
        except (KVError, OSError) as error:
            self._unwatched.add(rank)
            log.warning(
                "rank %d: no connection to writer %d (%s): if that rank dies, the pages it writes to stay quarantined",
                self._group_map.rank,
                rank,
                error,
            )
        else:
            self._unwatched.discard(rank)

    # ------------------------------------------------------------------ who is lost, found and dead

    def follow(self, now: float) -> bool:
        """Reacts to peers that were lost or found, and to the last writes of dead peers having drained."""
        events = self._control.events(now)
        for event in events:
            self._on_event(event, now)
        drained = [rank for rank in self.undrained if self._is_drained(rank)]
        for rank in drained:
            self._on_drained(rank, now)
        return bool(events or drained)

    def run_deferred_frees(self) -> None:
        """Closes connections to dead ranks and frees the GPU memory whose release was deferred.

        Both wait for all streams of the GPU. While a stream waits for this rank, nothing is done.
        """
        with nullcontext(True) if self._gpu is None else self._gpu.sync_words.no_blocked_streams() as quiet:
            while quiet and self.closing:
                self.closing.pop().close()
            if quiet and self._gpu is not None:
                self._gpu.run_deferred_frees()

    def _is_drained(self, rank: int) -> bool:
        """Whether none of the writes of ``rank`` can land here, and none of this rank's is under way there."""
        connections = self._broken.get(rank, []) + ([self.connections[rank]] if rank in self.connections else [])
        # All are asked, and first: a channel may find out now that its peer has ended, which ends what is under way.
        drained = [connection.channel is None or connection.channel.drained for connection in connections]
        if self._moves_to(rank):
            return False
        with self._lock:  # callers begin requests meanwhile
            if not self._sender.requests.is_drained(rank):
                return False
        return rank in self._left or (rank not in self._unwatched and all(drained))

    def _on_drained(self, rank: int, now: float) -> None:
        self.undrained.discard(rank)
        self.closing += self._broken.pop(rank, [])
        if rank in self.connections:  # it maps the dead process's memory, which closing it releases
            self.closing.append(self.connections[rank])
        self.run_deferred_frees()
        if self.closing:
            log.info("rank %d: memory of dead ranks stays mapped while a stream waits", self._group_map.rank)
        with self._lock:
            self._unmap(rank)  # first: the loop reads no stage of it after this
            self._receiver.peer_dead(rank, now)

    def _on_event(self, event: PeerEvent, now: float) -> None:
        with self._lock:
            if event.rank in self._left:
                return
            reason = f"{self._group_map.name(event.rank)} {event.reason}"
            log.info("rank %d: %s", self._group_map.rank, reason)
            if event.state is PeerState.FOUND:
                self.lost.pop(event.rank, None)
                self._leader.peer_found(event.rank)
                self._receiver.peer_found(event.rank)
                self._notify()
                return
            self._lose(event.rank, reason, now)
            if event.state is PeerState.DEAD:
                self._end(event.rank)
                self._messenger.mark_dead(event.rank)

    def _lose(self, rank: int, reason: str, now: float) -> None:
        """Fails what needs ``rank``. reason: for messages."""
        self.lost[rank] = reason
        self._sender.peer_lost(rank, reason)
        self._receiver.peer_lost(rank, reason)
        self._leader.peer_lost(rank, now)
        self._notify()

    def _end(self, rank: int) -> None:
        """No message of ``rank`` comes any more."""
        self._sender.peer_dead(rank)
        self.undrained.add(rank)
