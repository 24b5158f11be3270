"""What all tests share: the settings of their process, and GPUs that several pytest workers take in turns."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.helpers.gpu_lock import gpus

# Before anything imports torch: test processes and their ranks share a few cores, and idle OpenMP threads spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("torchkv", deadline=None)  # timing decides no test
settings.load_profile("torchkv")


def pytest_collection_finish() -> None:
    """Exempts what imports have made from garbage collection: it is never freed, and many tests collect."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _gpus(request: pytest.FixtureRequest) -> Iterator[None]:
    """A GPU test marked ``free_memory`` waits until no other GPU test runs, and the others wait for it."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    with gpus(alone=request.node.get_closest_marker("free_memory") is not None):
        yield
