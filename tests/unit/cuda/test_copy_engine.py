"""The batched copy with a fake driver library: which arguments the driver gets, and which are refused before."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.helpers.fakes.gpu import STREAM, FakeDriver
from torchkv.cuda import copy_engine
from torchkv.errors import ProtocolError, TransportUnavailable

CANARY = 16


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Looks up the driver anew for each test, not once per process."""
    copy_engine._post.cache_clear()
    yield
    copy_engine._post.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> FakeDriver:
    monkeypatch.setattr(copy_engine, "_driver", lambda: driver)
    return driver


@pytest.mark.parametrize(
    ("names", "used"),
    [
        (["cuMemcpyBatchAsync"], "cuMemcpyBatchAsync"),
        (["cuMemcpyBatchAsync_v2"], "cuMemcpyBatchAsync_v2"),
        (["cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2"], "cuMemcpyBatchAsync_v2"),
    ],
)
def test_copies_in_one_call(names: list[str], used: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = install(monkeypatch, FakeDriver(*names))
    assert copy_engine.available() is None
    rng = np.random.default_rng()
    count, span = 9, 64
    source = rng.integers(0, 256, count * span, dtype=np.uint8)
    target = rng.integers(0, 256, count * span + 2 * CANARY, dtype=np.uint8)
    expected = target.copy()
    order, lengths = rng.permutation(count), rng.integers(1, span + 1, count)
    for i in range(count):
        for k in range(lengths[i]):
            expected[CANARY + order[i] * span + k] = source[i * span + k]
    assert not np.array_equal(target, expected)
    src = np.arange(count, dtype=np.int64) * span + source.ctypes.data
    dst = order.astype(np.int64) * span + target.ctypes.data + CANARY
    copy_engine.copy_batch(src, dst, lengths.astype(np.int64), STREAM)
    np.testing.assert_array_equal(target, expected)
    assert driver.calls == [(used, count)]


def one(**given: Any) -> dict[str, Any]:
    return {**{name: np.ones(3, dtype=np.int64) for name in ("src", "dst", "length")}, "stream": STREAM, **given}


def test_nothing_to_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = install(monkeypatch, FakeDriver("cuMemcpyBatchAsync"))
    none = np.zeros(0, dtype=np.int64)
    copy_engine.copy_batch(none, none, none, STREAM)
    assert driver.calls == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"src": np.ones(3, dtype=np.int32)}, "int64"),
        ({"dst": np.ones(2, dtype=np.int64)}, "one length"),
        ({"length": np.ones((3, 1), dtype=np.int64)}, "one length"),
        ({"src": np.ones(6, dtype=np.int64)[::2]}, "contiguous"),
        ({"length": np.array([4, 0, 4])}, "length 0"),
        ({"length": np.array([4, -1, 4])}, "length -1"),
        ({"stream": SimpleNamespace(cuda_stream=0)}, "default stream"),
    ],
)
def test_wrong_arguments_reach_no_driver(given: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = install(monkeypatch, FakeDriver("cuMemcpyBatchAsync_v2"))
    with pytest.raises(ProtocolError, match=words):
        copy_engine.copy_batch(**one(**given))
    assert driver.calls == []


@pytest.mark.parametrize("name", ["cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2"])
def test_a_refusal_is_raised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeDriver(name, result=801))
    with pytest.raises(TransportUnavailable, match="of 3 copies failed: CUDA error 801"):
        copy_engine.copy_batch(**one())


def test_an_old_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeDriver())
    assert "CUDA 12.8 or newer" in (copy_engine.available() or "")
    with pytest.raises(TransportUnavailable, match=r"CUDA 12\.8 or newer"):
        copy_engine.copy_batch(**one())


def test_no_driver_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(copy_engine.ctypes, "CDLL", missing)
    assert "no CUDA driver" in (copy_engine.available() or "")


def test_the_lock_is_given_up_meanwhile() -> None:
    """Posting thousands of copies must not stop other threads: CDLL releases the GIL, PyDLL would not."""
    library = "libc.so.6"
    opened: list[str] = []
    real = ctypes.CDLL
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy_engine.ctypes, "CDLL", lambda name: opened.append(name) or real(library))
        driver = copy_engine._driver()
    assert opened == ["libcuda.so.1"]
    assert not driver._func_flags_ & ctypes._FUNCFLAG_PYTHONAPI
