"""Streams, by which a gather and a scatter pass chunks to each other. What runs the kernels is in stream_cases.py."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton: pip install triton (a CUDA build of PyTorch brings it)")

from triton_kit import run_in_interpreter

CASES = Path(__file__).with_name("stream_cases.py")


@pytest.mark.timeout(180)
def test_in_the_interpreter() -> None:
    run_in_interpreter(CASES, timeout=170)
