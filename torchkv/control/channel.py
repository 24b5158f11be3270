"""The control channel: small datagrams between ranks, and whether each peer is alive.

Sockets, reconnection and heartbeats are ZeroMQ's: its I/O thread is compiled and needs no GIL, so a rank whose Python
is busy is not taken for dead. Small frames between processes of one host bypass ZeroMQ (`unix_datagrams`).

    FOUND --connection down for one heartbeat--> LOST --connection is back--> FOUND
      |                                           |
      +--process has ended (pidfd, same host)-----+--> DEAD, for good

A *lost* peer may still be running, and writing to this rank's memory; a *dead* one is not. So a request that waits for
a lost peer fails, but only the end of a process proves that it will write no more.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from torchkv.control.unix_datagrams import UnixDatagramChannel
from torchkv.errors import ProtocolError, TransportUnavailable
from torchkv.host.network import job_interface
from torchkv.host.processes import ProcessId, process_ended, watch_process
from torchkv.host.shared_memory import host_identity
from torchkv.protocol.messages import MAX_FRAME

__all__ = ["ControlChannel", "PeerEvent", "PeerState", "ZmqControlChannel"]

MISSED_HEARTBEATS = 5
RECEIVE_BURST = 256
QUEUE_LIMIT = 1 << 15
# Seconds between the end of a process and the report of its death: frames that it sent before may still be on their
# way.
GRACE = 0.1
PEER_CHECK_INTERVAL = 0.02  # seconds
GREETING_LINGER = 1000  # milliseconds that a greeting may take to leave
_DATAGRAMS, _INBOX = 1, 2  # the bit of each file descriptor in `ZmqControlChannel.fds`
_POLLIN = int(zmq.POLLIN)  # a plain int: the operators of zmq's enum are Python


class PeerState(enum.Enum):
    FOUND = "found"
    LOST = "lost"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class PeerEvent:
    """``rank`` is in this state now. reason: a sentence for logs and errors."""

    rank: int
    state: PeerState
    reason: str


class ControlChannel(Protocol):
    """Unreliable datagrams between ranks, and events about peers. Belongs to one thread, except for `send_at_once`.

    endpoint: what peers pass to `connect`. fds: file descriptors that are readable when datagrams have arrived since
    the last `receive`. unread: whether the last `receive` has left some.
    """

    endpoint: str
    fds: tuple[int, ...]
    unread: bool

    def connect(self, rank: int, endpoint: str, process: ProcessId) -> None:
        """Makes ``rank`` reachable at its ``endpoint``, and watches its ``process``."""

    def disconnect(self, rank: int) -> None:
        """Forgets ``rank``, whose process has ended."""

    def greet(self, endpoint: str, data: bytes) -> None:
        """Sends ``data`` to who may listen at an endpoint; it may be lost. Never blocks."""

    def send(self, rank: int, frames: Sequence[bytes]) -> None:
        """Sends ``frames``, each of which may be lost. Never blocks."""

    def send_at_once(self, rank: int, frames: Sequence[bytes]) -> bool:
        """Sends ``frames`` from any thread; False, with nothing sent, if only `send` can do that now."""

    def receive(self, readable: int = -1) -> list[bytes]:
        """Some of the datagrams that have arrived. readable: bit i says to read from ``fds[i]``; -1: from all."""

    def events(self, now: float) -> list[PeerEvent]:
        """The peers whose state has changed since the last call."""

    def sleep(self, seconds: float, also: Iterable[int]) -> None:
        """Blocks until something arrives here, or a file descriptor of ``also`` is readable, or for ``seconds``."""

    def close(self) -> None:
        """Releases everything. Idempotent."""


@dataclass(eq=False, slots=True)
class _Peer:
    """What sends to a peer, and what watches it. pidfd: None for a process of another host."""

    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    process: ProcessId
    pidfd: int | None
    down_since: float | None = None  # None while connected
    ended_at: float | None = None  # when its process was seen to have ended
    state: PeerState = PeerState.FOUND

    def close(self, linger: int) -> None:
        """linger: milliseconds that frames in the socket's queue may take to leave."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger)
        if self.pidfd is not None:
            os.close(self.pidfd)


class ZmqControlChannel:
    """`ControlChannel` over ZeroMQ and TCP: one bound socket to receive, one connected socket per peer to send.

    heartbeat: of Options, in seconds. Raises ``TransportUnavailable`` if this host's address cannot be bound.
    """

    def __init__(self, *, heartbeat: float) -> None:
        self._heartbeat = heartbeat
        self._datagrams = UnixDatagramChannel()
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 65536)
        self._peers: dict[int, _Peer] = {}
        self._closed = False
        self._next_look = 0.0
        self._inbox: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._poller = zmq.Poller()
        self.unread = False
        try:
            self._configure(self._inbox)
            self.endpoint = f"{self._listen()} {self._datagrams.name}"
        except BaseException:
            # A context that is garbage-collected with an open socket blocks for ever.
            self.close()
            raise
        self._poller.register(self._inbox, zmq.POLLIN)
        self._poller.register(self._datagrams.fd, zmq.POLLIN)
        self.fds: tuple[int, ...] = (self._datagrams.fd, self._inbox.fileno())

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
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._configure(socket)
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        monitor = socket.get_monitor_socket(events)
        peer = _Peer(socket, monitor, process, watch_process(process))
        self._peers[rank] = peer
        self._poller.register(monitor, zmq.POLLIN)
        if peer.pidfd is not None:
            self._poller.register(peer.pidfd, zmq.POLLIN)
        address, _, name = endpoint.partition(" ")
        socket.connect(address)
        if name and process.host == host_identity().hex():
            self._datagrams.open(rank, name)

    def greet(self, endpoint: str, data: bytes) -> None:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        try:
            socket.connect(endpoint.partition(" ")[0])
            socket.send(data, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise ProtocolError(f"{endpoint!r} is no endpoint of a control channel: {error}") from error
        finally:
            socket.close(GREETING_LINGER)

    def disconnect(self, rank: int) -> None:
        peer = self._peers.pop(rank)
        self._datagrams.forget(rank)
        self._poller.unregister(peer.monitor)
        if peer.pidfd is not None and peer.ended_at is None:
            self._poller.unregister(peer.pidfd)
        peer.close(0)

    def send(self, rank: int, frames: Sequence[bytes]) -> None:
        if self._datagrams.send(rank, frames):
            return
        try:
            # As one multipart message, because each send wakes up ZeroMQ's I/O thread, which is what it costs.
            self._peers[rank].socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return  # the queue is full: the frames are lost, and sessions send them again

    def send_at_once(self, rank: int, frames: Sequence[bytes]) -> bool:
        return self._datagrams.send(rank, frames)

    def receive(self, readable: int = -1) -> list[bytes]:
        if self.unread:
            readable = -1
        frames: list[bytes] = []
        self.unread = False
        if readable & _DATAGRAMS:
            frames, self.unread = self._datagrams.receive()
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
        # A check costs two system calls per peer, so a busy progress loop does not check in every step.
        if now < self._next_look:
            return []
        self._next_look = now + PEER_CHECK_INTERVAL
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
            # Rounded up: rounding down would make a busy loop of the last millisecond of every wait.
            for source, _ in self._poller.poll(int(limit * 1000) + 1):
                if source is self._inbox:
                    self.unread = True  # polling has reset ZeroMQ's file descriptor, so that will not tell again
                elif source != self._datagrams.fd and source not in extra:
                    self._next_look = 0.0
        finally:
            for fd in extra:
                self._poller.unregister(fd)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for peer in self._peers.values():
            # A last verdict may still be in the socket's queue: wait up to 1000 ms for a peer that is alive to take it.
            peer.close(1000 if peer.state is PeerState.FOUND and peer.ended_at is None else 0)
        self._inbox.close(0)
        self._datagrams.close()
        self._context.term()

    def _configure(self, sock: zmq.Socket[bytes]) -> None:
        interval = max(1, int(self._heartbeat * 1000))
        sock.set(zmq.LINGER, 1000)
        sock.set(zmq.MAXMSGSIZE, MAX_FRAME)
        sock.set(zmq.SNDHWM, QUEUE_LIMIT)
        sock.set(zmq.RCVHWM, QUEUE_LIMIT)
        sock.set(zmq.HEARTBEAT_IVL, interval)
        sock.set(zmq.HEARTBEAT_TIMEOUT, MISSED_HEARTBEATS * interval)
        sock.set(zmq.HANDSHAKE_IVL, MISSED_HEARTBEATS * interval)
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
                f"{MISSED_HEARTBEATS} heartbeats of {self._heartbeat:g} s without an answer (Options.heartbeat)"
            )
        # A lost peer stays lost until the connection is back, a dead one stays dead.
        if peer.state is PeerState.DEAD or (peer.state is PeerState.LOST and peer.down_since is not None):
            return peer.state, ""
        return (peer.state, "") if peer.ended_at is not None else (PeerState.FOUND, "answers again")
