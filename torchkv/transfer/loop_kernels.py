"""What the resident loop needs of a rank's GPU, as interfaces: its kernels, and the events that it can query."""

from __future__ import annotations

from typing import Protocol

from torchkv.arrays import Int64Array
from torchkv.core.device import Gate
from torchkv.layout.conversion import Scales
from torchkv.layout.pair_plan import PairPlan
from torchkv.transfer.peer_connection import PeerConnection

__all__ = ["Kernels", "Launches"]


class Launches(Protocol):
    """The kernels of a plan, as the loop launches them: see `torchkv.transfer.launch_table`."""

    words: Int64Array


class Kernels(Protocol):
    """What the loop needs of a rank's GPU."""

    def launches(self, plan: PairPlan, connection: PeerConnection, *, first: int = 0) -> Launches | None:
        """The kernels of a plan; None while they are not loaded. first: the position of its first layer."""

    def packs(self, plan: PairPlan, scales: Scales, *, sending: bool) -> Launches | None:
        """The kernels that pack this rank's pages under a plan, or unpack into them; None while they are not loaded.

        scales: of the receiver's pages.
        """

    def gate(self, event: object | None) -> Gate | None:
        """The gate of an op whose pages may be read after ``event``; None if only Python can query that."""
