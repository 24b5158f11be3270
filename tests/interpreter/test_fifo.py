"""Runs the kernels that pass chunks through a FIFO in a stage, without a GPU: the cases of fifo_cases.py."""

from __future__ import annotations

import pytest

from tests.helpers.interpreter import run_in_interpreter

pytest.importorskip("triton", reason="needs Triton: pip install triton (a CUDA build of PyTorch brings it)")


@pytest.mark.timeout(180)
def test_in_the_interpreter() -> None:
    run_in_interpreter("fifo_cases.py", timeout=170)
