"""Measuring a route's limit: bulk bytes into the scratch memory that every rank registers for this."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from torchkv import copyengine, hostcopy
from torchkv.errors import TransferTimeout
from torchkv.progress import ProgressThread
from torchkv.route import Route
from torchkv.transport import Batch, Int64Array, Region, RemoteView

if TYPE_CHECKING:
    from torchkv.device import Device

__all__ = ["PROBE_BYTES", "measure"]

PROBE_BYTES = {"cpu": 4 << 20, "cuda": 32 << 20}  # by the memory's device type
REPEATS = 8
TIMEOUT = 10.0

_Timed = Generator[None, None, float]  # yields while it works, returns seconds


def measure(
    thread: ProgressThread, route: Route, source: Region, target: int, *, device: Device | None = None
) -> float:
    """The best rate to a peer in GB/s (1e9 bytes/s). Called from any thread but the progress thread.

    source: this rank's scratch region. target: index of the peer's. device: this rank's GPU, if they lie on one.
    Raises ``TransferTimeout``, ``PeerLost``.
    """
    steps = thread.call(lambda: _probe(route, source, target, device))
    deadline = time.monotonic() + TIMEOUT
    # Step by step, so that the progress thread can serve requests in between.
    while (rate := thread.call(lambda: next(steps))) is None:
        if time.monotonic() > deadline:
            raise TransferTimeout(f"no rate to rank {route.rank} could be measured within {TIMEOUT:g} s")
    return rate


def _probe(route: Route, source: Region, target: int, device: Device | None) -> Iterator[float | None]:
    """Yields None while it works, at last the best rate over a few repeats. What it writes means nothing."""
    best = 0.0
    view = route.views[target]
    for _ in range(REPEATS):
        if view is None:
            seconds = yield from _put(route, source, target)
        elif device is None:
            seconds = yield from _store(source, view)
        else:
            seconds = yield from _copy(source, view, device)
        best = max(best, source.nbytes / seconds / 1e9)
    yield best


def _put(route: Route, source: Region, target: int) -> _Timed:
    assert route.channel is not None
    began = time.perf_counter()
    put = route.channel.put(Batch(_one(source.index), _one(0), _one(target), _one(0), _one(source.nbytes)))
    flush = route.channel.flush()
    while not (put.done and flush.done):
        yield
    if (error := put.error or flush.error) is not None:
        raise error
    return time.perf_counter() - began


def _store(source: Region, view: RemoteView) -> _Timed:
    began = time.perf_counter()
    hostcopy.copy_spans(source.ptr, view.ptr, _one(0), _one(0), _one(source.nbytes), 0, 1)
    seconds = time.perf_counter() - began
    yield
    return seconds


def _copy(source: Region, view: RemoteView, device: Device) -> _Timed:
    stream = device.open_stream
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record(stream)
    copyengine.copy_batch(_one(source.ptr), _one(view.ptr), _one(source.nbytes), stream)
    ended.record(stream)
    while not ended.query():
        yield
    seconds: float = began.elapsed_time(ended) / 1e3
    return seconds


def _one(value: int) -> Int64Array:
    return np.full(1, value, dtype=np.int64)
