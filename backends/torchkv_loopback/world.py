"""`World`: a simulated network with a virtual clock, lossy datagrams, and nodes that die, stop or are cut off.

Nothing here reads the real clock or starts a thread, and all randomness comes from one seeded generator: the same seed
and the same calls give the same run.
"""

from __future__ import annotations

import heapq
import random
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torchkv.errors import ProtocolError
from torchkv.transport import Region
from torchkv_loopback.wire import RegionRecord

__all__ = ["Faults", "Watcher", "OpenTransport", "World"]

Link = tuple[int, int]  # source node, destination node


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The faults of the network.

    drop, duplicate: probabilities that a datagram is lost, and that it is delivered twice. min_delay, max_delay: bounds
    in seconds of every delay: a datagram's, and of a put's piece until it is read and again until it lands. survive:
    probability that a piece that a killed writer had in flight still lands. window: spans that one round of progress
    posts for one put. pieces: the most pieces into which such a window is cut.
    """

    drop: float = 0.0
    duplicate: float = 0.0
    min_delay: float = 1e-6
    max_delay: float = 1e-5
    survive: float = 0.5
    window: int = 8192
    pieces: int = 8


class Watcher(Protocol):
    """A channel of ``node``, which is told when the node it leads to has ended."""

    node: int

    def lose(self, reason: str) -> None: ...


class OpenTransport(Protocol):
    """A node's transport, as the channels of others use it."""

    node: int

    def region_of(self, record: RegionRecord) -> Region:
        """The region that its own descriptor describes. Raises ``ProtocolError`` if there is no such region."""

    def has(self, region: Region) -> bool:
        """Whether ``region`` is still registered there."""


@dataclass(slots=True)
class _Node:
    inbox: list[bytes] = field(default_factory=list)
    alive: bool = True
    paused: bool = False
    channels: list[Watcher] = field(default_factory=list)  # others' channels towards this node


class World:
    """Nodes, the clock and everything in flight between them.

    Nodes are numbered from 0 in the order of `add_node`. self_driven: whether each transport's ``progress()`` advances
    the clock; if not, the test calls `advance`.
    """

    def __init__(self, seed: int = 0, *, faults: Faults | None = None, self_driven: bool = False) -> None:
        self.random = random.Random(seed)
        self.faults = Faults() if faults is None else faults
        self.self_driven = self_driven
        self.now = 0.0
        # Not from the seed alone: worlds of one seed in two processes must not be taken for one world.
        self.identity = self.random.getrandbits(64) ^ secrets.randbits(64)
        self.in_flight: Counter[Link] = Counter()  # pieces of puts that may still land
        self.injected: Counter[str] = Counter()  # faults, by kind
        self.transports: dict[int, OpenTransport] = {}  # open ones, by node
        self._nodes: list[_Node] = []
        self._stopped: set[int] = set()  # nodes that are dead or paused
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._scheduled = 0
        self._sent: Counter[Link] = Counter()  # datagrams
        self._delivered: Counter[Link] = Counter()  # the latest of them that has arrived, by number
        self._cut: set[Link] = set()
        self._held: dict[Link, list[Callable[[], None]]] = {}

    # ------------------------------------------------------------------ time

    def schedule(self, delay: float, action: Callable[[], None]) -> None:
        """Runs ``action`` ``delay`` virtual seconds from now; actions due at one time run in order of scheduling."""
        heapq.heappush(self._events, (self.now + delay, self._scheduled, action))
        self._scheduled += 1

    def delay(self) -> float:
        """A random delay in virtual seconds, within the bounds of the faults."""
        return self.random.uniform(self.faults.min_delay, self.faults.max_delay)

    @property
    def next_event(self) -> float | None:
        """When the next event is due, or None if nothing is scheduled."""
        return self._events[0][0] if self._events else None

    def run_due(self) -> bool:
        """Runs every event that is due now. True if there was one."""
        ran = False
        while self._events and self._events[0][0] <= self.now:
            heapq.heappop(self._events)[2]()
            ran = True
        return ran

    def advance(self, limit: float | None = None) -> bool:
        """Advances the clock to the next event, or to ``limit`` if that is earlier, and runs what is due then.

        False if there is neither an event nor a limit.
        """
        times = [time for time in (self.next_event, limit) if time is not None]
        if not times:
            return False
        self.now = max(self.now, min(times))
        self.run_due()
        return True

    # ------------------------------------------------------------------ nodes

    def add_node(self) -> int:
        self._nodes.append(_Node())
        return len(self._nodes) - 1

    def exists(self, node: int) -> bool:
        return 0 <= node < len(self._nodes)

    def alive(self, node: int) -> bool:
        return self._nodes[node].alive

    def paused(self, node: int) -> bool:
        return self._nodes[node].paused

    def runs(self, node: int) -> bool:
        """Whether it is alive and not paused."""
        return node not in self._stopped

    @property
    def calm(self) -> bool:
        """Whether all nodes run, and no direction is cut."""
        return not (self._stopped or self._cut)

    def kill(self, node: int) -> None:
        """Ends a node at once. Each piece that it has in flight lands or is dropped, at random."""
        self.remove(node, f"node {node} was killed")
        for link in [link for link in self._held if link[0] == node]:
            self._release(link)

    def remove(self, node: int, reason: str) -> None:
        """Ends a node; channels towards it are told after a delay."""
        found = self._nodes[node]
        if not found.alive:
            return
        found.alive = False
        self._stopped.add(node)
        self.injected["deaths"] += 1
        found.inbox.clear()
        for channel in found.channels:
            self.schedule(self.delay(), lambda channel=channel: channel.lose(reason))  # type: ignore[misc]
        found.channels.clear()

    def pause(self, node: int) -> None:
        """Stops the node like SIGSTOP: it makes no progress, but what it has posted still lands."""
        self._nodes[node].paused = True
        self._stopped.add(node)
        self.injected["pauses"] += 1

    def resume(self, node: int) -> None:
        self._nodes[node].paused = False
        if self.alive(node):
            self._stopped.discard(node)

    def sever(self, src: int, dst: int) -> None:
        """Breaks the channels from ``src`` to ``dst``, though both live; what they have in flight still lands."""
        self.injected["cuts"] += 1
        for channel in [channel for channel in self._nodes[dst].channels if channel.node == src]:
            self._nodes[dst].channels.remove(channel)
            channel.lose(f"the link from node {src} to node {dst} broke")

    def watch(self, node: int, channel: Watcher) -> None:
        """``channel.lose`` is called some time after ``node`` has ended."""
        if self.alive(node):
            self._nodes[node].channels.append(channel)
        else:
            channel.lose(f"node {node} has ended")

    def unwatch(self, node: int, channel: Watcher) -> None:
        self._nodes[node].channels = [known for known in self._nodes[node].channels if known is not channel]

    # ------------------------------------------------------------------ links

    def partition(self, src: int, dst: int) -> None:
        """Cuts one direction: datagrams are lost, pieces of puts wait until `heal` or until the writer is killed."""
        self._cut.add((src, dst))
        self.injected["cuts"] += 1

    def heal(self, src: int, dst: int) -> None:
        self._cut.discard((src, dst))
        self._release((src, dst))

    def reaches(self, src: int, dst: int) -> bool:
        """Whether the direction is not cut."""
        return (src, dst) not in self._cut

    def hold(self, src: int, dst: int, action: Callable[[], None]) -> None:
        """Runs ``action`` some time after the direction has healed."""
        self._held.setdefault((src, dst), []).append(action)

    def _release(self, link: Link) -> None:
        for action in self._held.pop(link, []):
            self.schedule(self.delay(), action)

    # ------------------------------------------------------------------ datagrams

    def send(self, src: int, dst: int, data: bytes) -> None:
        """Sends a datagram, which is lost, duplicated and delayed as `faults` says."""
        if not (self.alive(src) and self.reaches(src, dst)):
            return
        copies = 1 + (self.random.random() < self.faults.duplicate)
        self.injected["doubles"] += copies - 1
        self._sent[src, dst] += 1
        number = self._sent[src, dst]
        for _ in range(copies):
            if self.random.random() >= self.faults.drop:
                self.schedule(self.delay(), lambda: self._deliver(src, dst, data, number))
            else:
                self.injected["drops"] += 1

    def receive(self, dst: int) -> list[bytes]:
        """The datagrams that have arrived at ``dst`` since the last call."""
        node = self._nodes[dst]
        arrived, node.inbox = node.inbox, []
        return arrived

    def _deliver(self, src: int, dst: int, data: bytes, number: int) -> None:
        if not self.exists(dst):
            raise ProtocolError(f"datagram of node {src} to node {dst}, which does not exist")
        self.injected["reorders"] += number < self._delivered[src, dst]
        self._delivered[src, dst] = max(number, self._delivered[src, dst])
        if self._nodes[dst].alive and self.reaches(src, dst):
            self._nodes[dst].inbox.append(data)
