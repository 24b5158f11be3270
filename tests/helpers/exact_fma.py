"""`tl.fma` in Triton's interpreter, which would round the product as well as the sum."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

__all__ = ["exact_fma", "rounded_once"]

Floats = npt.NDArray[np.float32]


def rounded_once(x: Floats, y: Floats, z: Floats) -> Floats:
    """x * y + z, rounded once, as GPUs do it.

    In float64 the product is exact. Where the sum is not, its last bit is made odd, so that to round once more, to
    float32, decides as the exact sum would (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
    product, other = np.float64(x) * np.float64(y), np.float64(z)
    total = np.asarray(product + other)
    part = total - product
    rest = (product - (total - part)) + (other - part)  # what the sum lost: Knuth's two-sum
    even = total.view(np.int64) & 1 == 0
    away = np.where((rest > 0) == (total > 0), 1, -1)
    inexact = np.isfinite(rest) & (rest != 0) & even
    return np.where(inexact, (total.view(np.int64) + away).view(np.float64), total).astype(np.float32)


@pytest.fixture(autouse=True)
def exact_fma(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        return interpreter.TensorHandle(rounded_once(x.data, y.data, z.data), z.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", fma)
