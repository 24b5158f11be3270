"""A fake GPU for `CudaCopyTransfer`, whose log says what was enqueued, in order."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from tests.helpers.fakes.gpu import Gpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    # Here, because they need Triton, which other tests of this folder do without.
    from tests.helpers.fakes.gpu import Gpu
    from torchkv.kernels import copies
    from torchkv.transfer import cuda_copy

    made = Gpu()
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(cuda_copy, "wait_on_stream", lambda event, stream: event.log.append("wait"))
    monkeypatch.setattr(copies, "copy_pages", lambda *args, **operation: made.log.append("kernel"))
    return made
