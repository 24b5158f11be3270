"""The NVSHMEM transport between two GPUs; the cases are in `nvshmem_rank`, one process a rank."""

from __future__ import annotations

import pytest
import torch
from torchkv_nvshmem import NVSHMEMTransport

_GPUS = torch.cuda.device_count()
_REASON = NVSHMEMTransport.available()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(_GPUS < 2, reason=f"needs 2 GPUs, found {_GPUS}"),
    pytest.mark.skipif(_REASON is not None, reason=f"NVSHMEM does not work here: {_REASON}"),
]


@pytest.mark.parametrize("case", ["puts", "flushes", "views", "cancel", "memory"])
def test_two_ranks(case: str) -> None:
    from tests.helpers.ranks.nvshmem_rank import run

    run(case)


def test_a_late_rank_is_refused() -> None:
    from tests.helpers.ranks.nvshmem_rank import run

    run("late", 3)


def test_a_killed_peer_holds_nobody_up() -> None:
    from tests.helpers.ranks.nvshmem_rank import run

    run("killed", kill=1)
