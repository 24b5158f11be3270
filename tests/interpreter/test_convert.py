"""Runs the kernel that converts pages without a GPU: the cases of convert_cases.py."""

from __future__ import annotations

import pytest

from tests.helpers.interpreter import run_in_interpreter

pytest.importorskip("triton", reason="needs Triton: pip install triton (a CUDA build of PyTorch brings it)")


@pytest.mark.timeout(180)
def test_in_the_interpreter() -> None:
    run_in_interpreter("convert_cases.py", timeout=170)
