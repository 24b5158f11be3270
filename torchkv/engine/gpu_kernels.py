"""What the resident loop needs of a rank's GPU: its kernels, and the events that it can query."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchkv.core.device import Gate, LoopDevice, gate_of
from torchkv.layout.pair_plan import PairPlan
from torchkv.transfer.peer_connection import PeerConnection

if TYPE_CHECKING:
    from torchkv.engine.scheduler import TransferScheduler
    from torchkv.transfer.launch_table import LaunchTable

__all__ = ["GpuKernels"]


class GpuKernels:
    """`torchkv.transfer.loop_kernels.Kernels` of a real GPU."""

    def __init__(self, scheduler: TransferScheduler, device: LoopDevice) -> None:
        self._scheduler = scheduler
        self._device = device

    def launches(self, plan: PairPlan, connection: PeerConnection) -> LaunchTable | None:
        return self._scheduler.launches(plan, connection, errors=self._device.errors)

    def gate(self, event: object | None) -> Gate | None:
        return gate_of(event)
