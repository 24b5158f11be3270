"""Runs the kernels as the resident loop launches them, without a GPU: the cases of loop_cases.py."""

from __future__ import annotations

import pytest

from tests.helpers.interpreter import run_in_interpreter

pytest.importorskip("triton", reason="needs Triton: pip install triton (a CUDA build of PyTorch brings it)")


@pytest.mark.timeout(180)
def test_in_the_interpreter() -> None:
    run_in_interpreter("loop_cases.py", timeout=170)
