"""A virtual clock, and the model of the network: what takes time in a simulated cluster, and how much.

Modelled: a latency; a NIC for each rank, which sends at one rate and receives at the same; a thread for each rank,
which takes so long for every control frame and verb. One transfer at a time passes through each direction of a NIC, in
the order in which they were begun. Control frames do not queue in NICs. Nothing is lost.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Clock", "LinkModel", "Network", "Nic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkModel:
    """latency: seconds, one way. bandwidth: bytes a second of a NIC, each way.

    cpu: seconds of a rank's thread for one control frame that comes or goes, and for a verb.
    """

    latency: float = 5e-6
    bandwidth: float = 50e9
    cpu: float = 30e-6


class Clock:
    """Runs actions in the order of their times; those of one time in the order in which they were noted."""

    def __init__(self) -> None:
        self.now = 0.0
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._noted = 0

    def at(self, time: float, action: Callable[[], None]) -> None:
        assert time >= self.now
        heapq.heappush(self._agenda, (time, self._noted, action))
        self._noted += 1

    def run(self, until: Callable[[], bool]) -> bool:
        """Runs what was noted, and what that notes, until something is true; False if nothing is left before."""
        while not until():
            if not self._agenda:
                return False
            self.now, _, action = heapq.heappop(self._agenda)
            action()
        return True


@dataclass(eq=False, slots=True)
class Nic:
    """When each direction is free, and for how many seconds it was busy."""

    sends_at: float = 0.0
    receives_at: float = 0.0
    sending: float = 0.0
    receiving: float = 0.0


class Network:
    """nbytes: of all transfers. frames, frame_nbytes: control frames that were sent, and their bytes."""

    def __init__(self, clock: Clock, model: LinkModel) -> None:
        self.clock = clock
        self.model = model
        self.nbytes = 0
        self.frames = 0
        self.frame_nbytes = 0

    def transfer(self, src: Nic, dst: Nic, nbytes: int, done: Callable[[], None]) -> None:
        """Moves bytes from now on. done: called when the writer knows that they are visible at the receiver."""
        seconds, latency = nbytes / self.model.bandwidth, self.model.latency
        begins = max(self.clock.now, src.sends_at)
        src.sends_at = begins + seconds
        arrives = max(begins + latency, dst.receives_at)
        dst.receives_at = arrives + seconds
        src.sending += seconds
        dst.receiving += seconds
        self.nbytes += nbytes
        self.clock.at(dst.receives_at + latency, done)

    def carry(self, frames: list[bytes], leaves: float, deliver: Callable[[list[bytes]], None]) -> None:
        """Carries control frames that leave a rank at a time."""
        nbytes = sum(len(frame) for frame in frames)
        self.frames += len(frames)
        self.frame_nbytes += nbytes
        arrives = leaves + self.model.latency + nbytes / self.model.bandwidth
        self.clock.at(arrives, lambda: deliver(frames))
