"""The control channel: small datagrams between ranks, and whether each peer is alive.

Sockets, reconnection, heartbeats, encryption and authentication (CURVE) are ZeroMQ's: its I/O thread is compiled and
needs no GIL, so a rank whose Python is busy is not taken for dead. Small frames between processes of one host bypass
ZeroMQ (`unix_datagrams`).

    FOUND --connection down for one heartbeat--> LOST --connection is back--> FOUND
      |                                           |
      +--process has ended (pidfd, same host)-----+--> DEAD, for good

A *lost* peer may still be running, and writing to this rank's memory; a *dead* one is not. So a request that waits for
a lost peer fails, but only the end of a process proves that it will write no more.
"""

from __future__ import annotations

import enum
import ipaddress
import select
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from torchkv.control.curve import CurveKeys
from torchkv.control.unix_datagrams import UnixDatagramChannel
from torchkv.errors import ProtocolError, TransportUnavailable
from torchkv.host.network import job_interface
from torchkv.host.processes import ProcessId, unwatch, watch_shared
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
    """``rank`` is in this state now. reason: for logs and errors, a sentence without its subject."""

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

    def connect(self, rank: int, endpoint: str, process: ProcessId, *, idle: bool = False) -> None:
        """Makes ``rank`` reachable at its ``endpoint``, and watches its ``process``.

        idle: whether it does not matter yet that it answers, see `rouse`.
        """

    def rouse(self, rank: int) -> None:
        """From now on it matters that ``rank`` answers. Without effect the second time."""

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
    """What is known of a peer, ``rank``. name: of the connection. pidfd: None for a process of another host.

    connected: whether ZeroMQ has been told to connect, with this ``key``. An idle peer of this host needs no
    connection: datagrams reach it, and the pidfd shows its end.
    """

    rank: int
    name: bytes
    address: bytes
    key: str
    process: ProcessId
    pidfd: int | None
    connected: bool = False
    down_since: float | None = None  # None while connected
    replaced: bool = False  # another peer has the address now: it will not be connected again
    ended_at: float | None = None  # when its process was seen to have ended
    state: PeerState = PeerState.FOUND

    @property
    def settled(self) -> bool:
        """Whether its state stays what it is until something happens, however long that takes."""
        if self.ended_at is not None:
            return self.state is PeerState.DEAD
        return self.state is (PeerState.FOUND if self.down_since is None else PeerState.LOST)


class ZmqControlChannel:
    """`ControlChannel` over ZeroMQ and TCP: a bound socket to receive, and one with a connection to each peer to send.

    heartbeat: of Options, in seconds. secret: shared by all who may connect here; None: only they are told the key of
    this channel, in its ``endpoint``. Raises ``TransportUnavailable`` if this host's address cannot be bound, or,
    without a secret, if other hosts reach it.
    """

    def __init__(self, *, heartbeat: float, secret: bytes | None = None) -> None:
        self._heartbeat = heartbeat
        self._keys = CurveKeys(secret)
        self._datagrams = UnixDatagramChannel()
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 65536)
        self._peers: dict[int, _Peer] = {}
        self._by_address: dict[bytes, list[_Peer]] = {}
        # Only what happens costs time, however many peers there are: `events` looks at those that are not settled, and
        # one file descriptor tells of the end of any process.
        self._unsettled: dict[int, _Peer] = {}
        self._ends = select.epoll()
        self._by_pidfd: dict[int, list[_Peer]] = {}  # of processes that have not ended; several may share one
        self._closed = False
        self._next_look = 0.0
        self._inbox: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._outbox: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._monitor = self._outbox.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._poller = zmq.Poller()
        self.unread = False
        try:
            self._configure(self._inbox)
            self._configure(self._outbox)
            self._keys.serve(self._inbox)
            self._outbox.set(zmq.ROUTER_MANDATORY, 1)  # else frames to a peer whose queue is full would vanish unseen
            self.endpoint = " ".join([self._listen(), self._datagrams.name, *self._keys.told])
        except BaseException:
            # A context that is garbage-collected with an open socket blocks for ever.
            self.close()
            raise
        self._poller.register(self._inbox, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._poller.register(self._datagrams.fd, zmq.POLLIN)
        self._poller.register(self._ends.fileno(), zmq.POLLIN)
        self.fds: tuple[int, ...] = (self._datagrams.fd, self._inbox.fileno())

    def _listen(self) -> str:
        _, address = job_interface()
        if self._keys.told and not ipaddress.ip_address(address).is_loopback:
            raise TransportUnavailable(
                f"the control channel would listen on {address}, which other hosts reach, and has no secret that keeps "
                f"strangers out; set TORCHKV_SECRET_FILE to a file of mode 0600 with the same content on every host"
            )
        try:
            port = self._inbox.bind_to_random_port(f"tcp://{address}")
        except zmq.ZMQError as error:
            raise TransportUnavailable(
                f"the control channel cannot listen on {address}: {error}; set TORCHKV_INTERFACE to an "
                f"address of this host, or leave it unset"
            ) from error
        return f"tcp://{address}:{port}"

    def connect(self, rank: int, endpoint: str, process: ProcessId, *, idle: bool = False) -> None:
        address, _, rest = endpoint.partition(" ")
        datagrams, _, key = rest.partition(" ")
        peer = _Peer(rank, b"rank %d" % rank, address.encode(), key, process, watch_shared(process))
        self._peers[rank] = peer
        if peer.pidfd is not None:
            sharing = self._by_pidfd.setdefault(peer.pidfd, [])
            if not sharing:
                self._ends.register(peer.pidfd, select.EPOLLIN)
            sharing.append(peer)
        if datagrams and process.host == host_identity().hex():
            self._datagrams.open(rank, datagrams)
        if not idle or peer.pidfd is None or not datagrams:
            self._connect(peer)

    def rouse(self, rank: int) -> None:
        peer = self._peers[rank]
        if not peer.connected and peer.ended_at is None:
            self._connect(peer)
            # If it hangs, there will be no connection that could break.
            peer.down_since = time.monotonic() + (MISSED_HEARTBEATS - 1) * self._heartbeat
            self._unsettled[rank] = peer

    def _connect(self, peer: _Peer) -> None:
        self._keys.visit(self._outbox, peer.key)
        self._outbox.set(zmq.CONNECT_ROUTING_ID, peer.name)
        self._outbox.connect(peer.address.decode())
        peer.connected = True
        peer.address = self._outbox.get_string(zmq.LAST_ENDPOINT).encode()  # as ZeroMQ's events spell it
        there = self._by_address.setdefault(peer.address, [])
        for earlier in there:
            earlier.replaced = True
            earlier.down_since = earlier.down_since or time.monotonic()
            self._unsettled[earlier.rank] = earlier
        there.append(peer)

    def greet(self, endpoint: str, data: bytes) -> None:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        try:
            self._keys.visit(socket, "")
            socket.connect(endpoint.partition(" ")[0])
            socket.send(data, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise ProtocolError(f"{endpoint!r} is no endpoint of a control channel: {error}") from error
        finally:
            socket.close(GREETING_LINGER)

    def disconnect(self, rank: int) -> None:
        peer = self._peers.pop(rank)
        self._unsettled.pop(rank, None)
        self._datagrams.forget(rank)
        if peer.connected:
            there = self._by_address[peer.address]
            there.remove(peer)
            if not there:  # ZeroMQ ends all connections with an address
                del self._by_address[peer.address]
                self._outbox.disconnect(peer.address.decode())
        if peer.pidfd is not None:
            if peer.ended_at is None:
                self._by_pidfd[peer.pidfd].remove(peer)
                if not self._by_pidfd[peer.pidfd]:
                    self._watch_no_more(peer.pidfd)
            unwatch(peer.pidfd)

    def send(self, rank: int, frames: Sequence[bytes]) -> None:
        if self._datagrams.send(rank, frames):
            return
        if not self._peers[rank].connected and self._datagrams.fits(rank, frames):
            return  # its socket is full, as when many meet at once: they are lost, and sessions send them again
        self.rouse(rank)
        try:
            # As one multipart message, because each send wakes up ZeroMQ's I/O thread, which is what it costs.
            self._outbox.send_multipart([self._peers[rank].name, *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            # The queue is full, or is just being made: the frames are lost, and sessions send them again.

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
        # A check costs system calls, so a busy progress loop does not check in every step.
        if now < self._next_look:
            return []
        self._next_look = now + PEER_CHECK_INTERVAL
        found: list[PeerEvent] = []
        self._read_monitor(now)
        self._note_ends(now)
        for rank, peer in sorted(self._unsettled.items()):
            state, reason = self._judge(peer, now)
            if state is not peer.state:
                peer.state = state
                found.append(PeerEvent(rank, state, reason))
            if peer.settled:
                del self._unsettled[rank]
        return found

    def _note_ends(self, now: float) -> None:
        """Notes which processes have ended."""
        for pidfd, _ in self._ends.poll(0):
            for peer in self._by_pidfd[pidfd]:
                peer.ended_at = now
                self._unsettled[peer.rank] = peer
            self._watch_no_more(pidfd)

    def _watch_no_more(self, pidfd: int) -> None:
        self._ends.unregister(pidfd)
        del self._by_pidfd[pidfd]

    def sleep(self, seconds: float, also: Iterable[int]) -> None:
        waiting = any(
            p.down_since is not None or p.ended_at is not None
            for p in self._unsettled.values()
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
        self._outbox.set(zmq.LINGER, 0)
        for rank, peer in list(self._peers.items()):
            if peer.state is not PeerState.FOUND or peer.ended_at is not None:
                self.disconnect(rank)
        for peer in self._peers.values():
            if peer.pidfd is not None:
                unwatch(peer.pidfd)
        self._outbox.disable_monitor()
        self._monitor.close(0)
        # A last verdict may still be in the socket's queue: wait up to 1000 ms for a peer that is alive to take it.
        self._outbox.close(1000)
        self._inbox.close(0)
        self._datagrams.close()
        self._ends.close()
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

    def _read_monitor(self, now: float) -> None:
        while self._monitor.poll(0):
            message = recv_monitor_message(self._monitor)
            for peer in self._by_address.get(message["endpoint"], ()):
                if peer.replaced:
                    continue
                if message["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    peer.down_since = None
                elif peer.down_since is None:
                    peer.down_since = now
                self._unsettled[peer.rank] = peer

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
