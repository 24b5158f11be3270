"""Measuring a route's limit, and what puts cost on it, in the scratch memory that every rank registers for this."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from torchkv import copyengine, hostcopy
from torchkv.cost import GPU_PACK_SECONDS, Costs
from torchkv.errors import KVError, TransferTimeout
from torchkv.progress import ProgressThread
from torchkv.route import Route
from torchkv.slab import Rows
from torchkv.transport import Batch, Int64Array, Region, RemoteView

if TYPE_CHECKING:
    from torchkv.device import Device

__all__ = ["PROBE_BYTES", "calibration", "measure"]

log = logging.getLogger(__name__)

PROBE_BYTES = {"cpu": 4 << 20, "cuda": 32 << 20}  # by the memory's device type
REPEATS = 8
TIMEOUT = 10.0

# What is measured of puts: the best of so many rounds, of which each has one put, many short ones and one of all the
# scratch memory. On a slow link the first must do.
ROUNDS = 5
FEW_ROUNDS = 3  # of a host that is busy, where one round alone says little
BUDGET = 0.03  # seconds after which no other round begins, once there were a few
PATIENCE = 0.2  # the same before that
# What nothing beats. A measurement below that was disturbed; then descriptors seem free, and nothing is staged.
LEAST_PUT = 0.05e-6  # seconds
LEAST_BYTE = 1e-12
GIVE_UP = 2.0  # seconds, for one put
SHORT = 512
MANY = 512
SPACING = 2 * SHORT  # so that no transport can merge them
# The progress thread waits for a put no longer than this at a time; shorter puts are timed without its other work.
SPIN = 0.0005

_Progress = Callable[[], bool]  # `Transport.progress`
_Timed = Generator[None, None, float]  # yields while it works, returns seconds


def measure(
    thread: ProgressThread, route: Route, source: Region, target: int, *, stores: bool, device: Device | None = None
) -> float:
    """The best rate to a peer in GB/s (1e9 bytes/s). Called from any thread but the progress thread.

    source: this rank's scratch region. target: index of the peer's. stores: measure stores, else puts, although the
    scratch memory is mapped: the pages may not be. device: this rank's GPU, if they lie on one.
    Raises ``TransferTimeout``, ``PeerLost``.
    """
    steps = thread.call(lambda: _probe(route, source, target, stores, device, thread.transport.progress))
    deadline = time.monotonic() + TIMEOUT
    # Step by step, so that the progress thread can serve requests in between.
    while (rate := thread.call(lambda: next(steps))) is None:
        if time.monotonic() > deadline:
            raise TransferTimeout(f"no rate to rank {route.rank} could be measured within {TIMEOUT:g} s")
    return rate


def calibration(route: Route, source: Region, target: int, progress: _Progress) -> Iterator[None]:
    """Measures ``route.costs``. Each step takes half a millisecond at most, on the progress thread.

    source: this rank's scratch region. target: index of the peer's. What cannot be measured is left for `cost` to
    assume: it would be wrong to fail a transfer for that, and if the channel is broken, the transfer will tell.
    """
    one, many, bulk = _puts(source, target, 1), _puts(source, target, MANY), _whole(source, target)
    try:
        yield from _put(route, one, progress, limit=GIVE_UP)  # the first put of a channel may have to set it up
        best = [float("inf")] * 3
        began = time.perf_counter()
        for rounds in range(1, ROUNDS + 1):
            for number, batch in enumerate((one, many, bulk)):
                best[number] = min(best[number], (yield from _put(route, batch, progress, limit=GIVE_UP)))
            if time.perf_counter() - began > (BUDGET if rounds >= FEW_ROUNDS else PATIENCE):
                break
    except KVError as error:
        log.warning("what puts to rank %d cost could not be measured, and is assumed: %s", route.rank, error)
        return
    pack = _host_pack_seconds() if source.device.type == "cpu" else GPU_PACK_SECONDS
    route.costs = _costs(*best, bulk_nbytes=source.nbytes, pack=pack)


def _costs(one: float, many: float, bulk: float, *, bulk_nbytes: int, pack: float) -> Costs:
    """From the seconds of one short put, of ``MANY`` and of one of ``bulk_nbytes`` bytes, each flushed."""
    byte = max((bulk - one) / bulk_nbytes, LEAST_BYTE)
    return Costs(descriptor=max((many - one) / (MANY - 1) - SHORT * byte, LEAST_PUT), byte=byte, pack=pack)


@functools.cache
def _host_pack_seconds() -> float:
    """What gathering a byte costs on this host: slices of 512 bytes, of one head in eight, from shuffled pages."""
    tokens, stride, pairs = 16, 8 * SHORT, 128
    pages = np.ones(pairs * tokens * stride, np.uint8)
    packed = np.ones(pairs * tokens * SHORT, np.uint8)
    src = np.random.default_rng(0).permutation(pairs) * (tokens * stride)
    dst = np.arange(pairs, dtype=np.int64) * (tokens * SHORT)
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        rows = Rows(1, 0, 0, tokens, stride, SHORT, SHORT)
        hostcopy.copy_pairs(pages.ctypes.data, packed.ctypes.data, src, dst, 0, pairs, rows)
        best = min(best, time.perf_counter() - began)
    return best / packed.nbytes


def _probe(
    route: Route, source: Region, target: int, stores: bool, device: Device | None, progress: _Progress
) -> Iterator[float | None]:
    """Yields None while it works, at last the best rate over a few repeats. What it writes means nothing."""
    best = 0.0
    view = route.views[target] if stores else None
    for _ in range(REPEATS):
        if view is None:
            seconds = yield from _put(route, _whole(source, target), progress)
        elif device is None:
            seconds = yield from _store(source, view)
        else:
            seconds = yield from _copy(source, view, device)
        best = max(best, source.nbytes / seconds / 1e9)
    yield best


def _puts(source: Region, target: int, count: int) -> Batch:
    """So many short puts."""
    offset = np.arange(count, dtype=np.int64) * SPACING
    return Batch(
        np.full(count, source.index), offset, np.full(count, target), offset, np.full(count, SHORT, dtype=np.int64)
    )


def _whole(source: Region, target: int) -> Batch:
    return Batch.one(
        local_region=source.index, local_offset=0, remote_region=target, remote_offset=0, length=source.nbytes
    )


def _put(route: Route, batch: Batch, progress: _Progress, *, limit: float = TIMEOUT) -> _Timed:
    """Raises ``TransferTimeout``, ``PeerLost``."""
    assert route.channel is not None
    began = time.perf_counter()
    put = route.channel.put(batch)
    flush = route.channel.flush()
    spun = began
    while not (put.done and flush.done):
        now = time.perf_counter()
        if now - began > limit:
            put.cancel()
            raise TransferTimeout(f"{batch.nbytes} bytes to rank {route.rank} took more than {limit:g} s")
        if now - spun > SPIN:
            yield
            spun = time.perf_counter()
        progress()
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
