"""The conformance suite of `torchkv.testing` over UCX between memory of GPUs."""

from __future__ import annotations

import pytest
import torch

from torchkv.testing import Lane, TransportConformance

GPUS = torch.cuda.device_count()
if GPUS == 0:
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("ucxx", reason="needs ucxx")

pytestmark = pytest.mark.gpu


class TestOneGpu(TransportConformance):
    lane = Lane("ucx", devices=("cuda:0",), link="cuda_ipc")


@pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, found {GPUS}")
class TestTwoGpus(TransportConformance):
    lane = Lane("ucx", devices=("cuda:0", "cuda:1"), link="cuda_ipc")
