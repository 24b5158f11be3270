"""The kernels that copy pages on this rank's GPU: for transfers, and for the resident loop.

Each plan has its table of addresses, which names the kernels. To load them waits for all streams: it is done before
requests come where it can be foreseen, and never while a stream is blocked (see `SyncWords.no_blocked_streams`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchkv.core.device import gate_of
from torchkv.layout.conversion import Scales
from torchkv.layout.pair_plan import PairPlan
from torchkv.transfer.peer_connection import LocalPages, PeerConnection

if TYPE_CHECKING:
    from torchkv.kernels.gpu_context import GpuContext
    from torchkv.staging.cuda_packer import CudaPacker
    from torchkv.staging.pack_table import PackTable
    from torchkv.transfer.copy_tables import BaseAddressTable, BaseAddressTables
    from torchkv.transfer.launch_table import LaunchTable

__all__ = ["GpuKernels"]


class GpuKernels:
    """One rank's, of the progress thread; also `torchkv.transfer.loop_kernels.Kernels` of a real GPU.

    errors: address of the error words of kernels that the resident loop launches, once there is a loop. packer: of this
    GPU, if pages may be staged.
    """

    def __init__(self, gpu: GpuContext, local: LocalPages, packer: CudaPacker | None) -> None:
        self.errors = 0
        self._gpu = gpu
        self._local = local
        self._packer = packer
        self._tables: BaseAddressTables | None = None

    def load(self, plan: PairPlan, connection: PeerConnection) -> None:
        """Loads the kernels of ``plan``."""
        self._load(self._table(plan, connection))

    def loaded(self, plan: PairPlan, connection: PeerConnection) -> BaseAddressTable | None:
        """The table that kernels copy by, with its kernels loaded; None while a blocked stream forbids loading them."""
        table = self._table(plan, connection)
        if not table.is_loaded:
            with self._gpu.sync_words.no_blocked_streams() as quiet:
                if not quiet:
                    return None
                self._load(table)
        return table

    def _table(self, plan: PairPlan, connection: PeerConnection) -> BaseAddressTable:
        if self._tables is None:
            # Imported here because it imports Triton, which a rank without a GPU need not have.
            from torchkv.transfer.copy_tables import BaseAddressTables

            self._tables = BaseAddressTables(self._local)
        if (table := self._tables.known(plan, connection)) is not None:
            return table
        with self._gpu.on_side_stream("make tables"):
            return self._tables.of(plan, connection)

    def _load(self, table: BaseAddressTable) -> None:
        with self._gpu.on_side_stream("load kernels"):
            table.load()

    # ---------------------------------------------------------------- for the resident loop: any thread, under the lock

    def launches(self, plan: PairPlan, connection: PeerConnection, *, first: int = 0) -> LaunchTable | None:
        table = None if self._tables is None else self._tables.known(plan, connection)
        if table is None or not table.is_loaded:
            return None
        from torchkv.transfer.launch_table import LaunchTable  # imports Triton, as in `_table`

        gpu = self._gpu
        return LaunchTable(
            table, first=first, device=gpu.device, errors=self.errors, tickets=gpu.loop_tickets, blocks=gpu.blocks
        )

    def packs(self, plan: PairPlan, scales: Scales, *, sending: bool) -> PackTable | None:
        launcher = None if self._packer is None else self._packer.loaded(plan, scales, sending=sending)
        if launcher is None:
            return None
        from torchkv.staging.pack_table import PackTable  # imports Triton, as in `_table`

        gpu = self._gpu
        return PackTable(
            plan, launcher, device=gpu.device, errors=self.errors, tickets=gpu.loop_tickets, blocks=gpu.blocks
        )

    gate = staticmethod(gate_of)
