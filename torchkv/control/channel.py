"""The control channel: small messages between ranks, and whether each rank is there.

Sockets, reconnection and heartbeats are ZeroMQ's: its I/O thread is compiled and needs no GIL, so a rank whose
Python is busy is not taken for dead. A rank counts as lost when its connection is down and does not come back;
as dead only when its process is known to have ended, which a pidfd proves on the same host.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from torchkv.errors import TransportUnavailable
from torchkv.hostlane import HostLane
from torchkv.hostmem import host_identity
from torchkv.network import job_interface
from torchkv.processes import ProcessId, process_ended, watch_process
from torchkv.wire import MAX_FRAME

__all__ = ["Control", "PeerEvent", "PeerState", "ZmqControl"]

SILENT_HEARTBEATS = 5
RECEIVE_BURST = 256
QUEUE_LIMIT = 1 << 15
# Frames that a peer sent before it went may still be on their way to our socket: let them be read first.
GRACE = 0.1
LOOK_EVERY = 0.02
_LANE, _INBOX = 1, 2  # bits of the two in `ZmqControl.fds`
_POLLIN = int(zmq.POLLIN)  # its type is an enum, whose operators are Python


class PeerState(enum.Enum):
    FOUND = "found"
    LOST = "lost"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class PeerEvent:
    rank: int
    state: PeerState
    reason: str


class Control(Protocol):
    """What the engine needs: unreliable datagrams to ranks, and news of them.

    Belongs to one thread, except for ``send_at_once``.
    """

    endpoint: str
    fds: tuple[int, ...]  # readable when datagrams have arrived since the last `receive`
    unread: bool  # whether that has left some

    def connect(self, rank: int, endpoint: str, process: ProcessId) -> None:
        """Makes ``rank`` reachable and watches it."""

    def send(self, rank: int, frames: Sequence[bytes]) -> None:
        """Sends these datagrams if it can; may lose any. Never blocks."""

    def send_at_once(self, rank: int, frames: Sequence[bytes]) -> bool:
        """From any thread: sends these datagrams, unless only ``send`` can do that. Whether it has."""

    def receive(self, readable: int = -1) -> list[bytes]:
        """Some of the datagrams that have arrived. Bit i of ``readable``: whether to look at ``fds[i]``."""

    def events(self, now: float) -> list[PeerEvent]:
        """What changed about peers since the last call."""

    def sleep(self, seconds: float, also: Iterable[int]) -> None:
        """Returns when something arrives here, or on one of the file descriptors ``also``, or after ``seconds``."""

    def close(self) -> None:
        """Releases everything. Idempotent."""


@dataclass(eq=False, slots=True)
class _Peer:
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    process: ProcessId
    pidfd: int | None
    down_since: float | None = None  # None while connected
    ended_at: float | None = None  # when its process was seen to have ended
    state: PeerState = PeerState.FOUND


class ZmqControl:
    """`Control` over TCP. One bound socket to receive, one connected socket per peer to send."""

    def __init__(self, *, heartbeat: float) -> None:
        self._heartbeat = heartbeat
        self._lane = HostLane()
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 65536)
        self._peers: dict[int, _Peer] = {}
        self._closed = False
        self._look_at = 0.0
        self._inbox: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._poller = zmq.Poller()
        self.unread = False
        try:
            self._configure(self._inbox)
            self.endpoint = f"{self._listen()} {self._lane.name}"
        except BaseException:
            # A context that is dropped with an open socket blocks the garbage collector for ever.
            self.close()
            raise
        self._poller.register(self._inbox, zmq.POLLIN)
        self._poller.register(self._lane.fd, zmq.POLLIN)
        self.fds: tuple[int, ...] = (self._lane.fd, self._inbox.fileno())

    def _listen(self) -> str:
        _, address = job_interface()
        try:
            port = self._inbox.bind_to_random_port(f"tcp://{address}")
        except zmq.ZMQError as error:
            raise TransportUnavailable(
                f"the control channel cannot listen on {address}: {error}; set TORCHKV_INTERFACE to an "
                f"address of this host, or leave it unset"
            ) from error
        return f"tcp://{address}:{port}"

    def connect(self, rank: int, endpoint: str, process: ProcessId) -> None:
        outbox: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._configure(outbox)
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        monitor = outbox.get_monitor_socket(events)
        peer = _Peer(outbox, monitor, process, watch_process(process))
        self._peers[rank] = peer
        self._poller.register(monitor, zmq.POLLIN)
        if peer.pidfd is not None:
            self._poller.register(peer.pidfd, zmq.POLLIN)
        address, _, lane = endpoint.partition(" ")
        outbox.connect(address)
        if lane and process.host == host_identity().hex():
            self._lane.open(rank, lane)

    def send(self, rank: int, frames: Sequence[bytes]) -> None:
        if self._lane.send(rank, frames):
            return
        try:
            # Together: what each send costs is waking up ZeroMQ's own thread.
            self._peers[rank].socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return  # a full queue loses the frames; sessions send them again

    def send_at_once(self, rank: int, frames: Sequence[bytes]) -> bool:
        return self._lane.send(rank, frames)

    def receive(self, readable: int = -1) -> list[bytes]:
        if self.unread:
            readable = -1
        frames: list[bytes] = []
        self.unread = False
        if readable & _LANE:
            frames, self.unread = self._lane.receive()
        if not readable & _INBOX:
            return frames
        for _ in range(RECEIVE_BURST):
            if not int(self._inbox.getsockopt(zmq.EVENTS)) & _POLLIN:
                return frames
            self._inbox.recv(zmq.NOBLOCK)  # the routing id
            while self._inbox.getsockopt(zmq.RCVMORE):
                frames.append(self._inbox.recv(zmq.NOBLOCK))
        self.unread = True
        return frames

    def events(self, now: float) -> list[PeerEvent]:
        # One look costs two system calls a peer, so a busy progress loop does not look every time round.
        if now < self._look_at:
            return []
        self._look_at = now + LOOK_EVERY
        found: list[PeerEvent] = []
        for rank, peer in self._peers.items():
            self._read_monitor(peer, now)
            if peer.pidfd is not None and peer.ended_at is None and process_ended(peer.pidfd):
                peer.ended_at = now
                self._poller.unregister(peer.pidfd)
            state, reason = self._judge(peer, now)
            if state is not peer.state:
                peer.state = state
                found.append(PeerEvent(rank, state, f"rank {rank} {reason}"))
        return found

    def sleep(self, seconds: float, also: Iterable[int]) -> None:
        waiting = any(
            p.down_since is not None or p.ended_at is not None
            for p in self._peers.values()
            if p.state is PeerState.FOUND
        )
        limit = min(seconds, GRACE / 2) if waiting else seconds
        extra = list(also)
        for fd in extra:
            self._poller.register(fd, zmq.POLLIN)
        try:
            # Rounded up: rounding down would turn the last millisecond of every wait into a busy loop.
            for source, _ in self._poller.poll(int(limit * 1000) + 1):
                if source is self._inbox:
                    self.unread = True  # by looking, ZeroMQ has taken that news from its file descriptor
                elif source != self._lane.fd and source not in extra:
                    self._look_at = 0.0
        finally:
            for fd in extra:
                self._poller.unregister(fd)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for peer in self._peers.values():
            peer.socket.disable_monitor()
            peer.monitor.close(0)
            # A last verdict may still be in the socket's queue; a peer that is gone will not take it.
            peer.socket.close(1000 if peer.state is PeerState.FOUND and peer.ended_at is None else 0)
            if peer.pidfd is not None:
                os.close(peer.pidfd)
        self._inbox.close(0)
        self._lane.close()
        self._context.term()

    def _configure(self, sock: zmq.Socket[bytes]) -> None:
        interval = max(1, int(self._heartbeat * 1000))
        sock.set(zmq.LINGER, 1000)
        sock.set(zmq.MAXMSGSIZE, MAX_FRAME)
        sock.set(zmq.SNDHWM, QUEUE_LIMIT)
        sock.set(zmq.RCVHWM, QUEUE_LIMIT)
        sock.set(zmq.HEARTBEAT_IVL, interval)
        sock.set(zmq.HEARTBEAT_TIMEOUT, SILENT_HEARTBEATS * interval)
        sock.set(zmq.HANDSHAKE_IVL, SILENT_HEARTBEATS * interval)
        sock.set(zmq.RECONNECT_IVL, 50)
        sock.set(zmq.RECONNECT_IVL_MAX, 1000)

    def _read_monitor(self, peer: _Peer, now: float) -> None:
        while peer.monitor.poll(0):
            event = recv_monitor_message(peer.monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                peer.down_since = None
            elif event == zmq.EVENT_DISCONNECTED and peer.down_since is None:
                peer.down_since = now

    def _judge(self, peer: _Peer, now: float) -> tuple[PeerState, str]:
        if peer.ended_at is not None and now >= peer.ended_at + GRACE:
            return PeerState.DEAD, f"(process {peer.process.pid}) has ended"
        if peer.ended_at is None and peer.down_since is not None and now >= peer.down_since + self._heartbeat:
            return PeerState.LOST, (
                f"does not answer: its connection broke {now - peer.down_since:.1f} s ago, after up to "
                f"{SILENT_HEARTBEATS} heartbeats of {self._heartbeat:g} s without an answer (Options.heartbeat)"
            )
        # A loss stands until the connection is back, a death for ever.
        if peer.state is PeerState.DEAD or (peer.state is PeerState.LOST and peer.down_since is not None):
            return peer.state, ""
        return (peer.state, "") if peer.ended_at is not None else (PeerState.FOUND, "answers again")
