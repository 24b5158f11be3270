"""Measures connections: the rate of bulk bytes, and what puts cost. Every rank registers scratch memory for this.

A measurement is a generator whose steps run on the progress thread, so that it serves requests in between.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from torchkv.arrays import Int64Array
from torchkv.cuda.driver import check, driver
from torchkv.errors import KVError, TransferTimeout
from torchkv.host import copy_loops
from torchkv.layout.plan_segment import StridedRuns
from torchkv.transfer.path_cost import GPU_PACK_SECONDS
from torchkv.transfer.peer_connection import Costs, PeerConnection
from torchkv.transport.interface import Batch, Region, RemoteView

if TYPE_CHECKING:
    from torchkv.engine.progress import ProgressThread
    from torchkv.kernels.gpu_context import GpuContext

__all__ = ["PROBE_BYTES", "calibration", "measure"]

log = logging.getLogger(__name__)

PROBE_BYTES = {"cpu": 4 << 20, "cuda": 32 << 20}  # bytes of scratch memory, by the device type of the cache
REPEATS = 8  # of a rate: the best one counts
TIMEOUT = 10.0  # seconds for a rate

# Costs of puts: the best of several rounds counts. A round is one short put, many of them, and one of all the scratch
# memory.
ROUNDS = 5
FEW_ROUNDS = 3  # on a busy host, one round alone says little
LEAST_ROUNDS = 2  # the first one over TCP may stand still for 0.2 s, until the peer's kernel acknowledges
BUDGET = 0.03  # no further round begins after so many seconds, once there were FEW_ROUNDS
PATIENCE = 0.2  # no further round than the least begins after so many seconds, on a slow link
# Least costs in seconds, per put and per byte. A lower measurement was disturbed. Without them descriptors could seem
# free, and nothing would be staged.
LEAST_PUT = 0.05e-6
LEAST_BYTE = 1e-12
GIVE_UP = 2.0  # seconds, for one put
SHORT = 512  # bytes of a short put
MANY = 512  # short puts in a batch
SPACING = 2 * SHORT  # apart, so that no transport can merge them
SPIN = 0.0005  # seconds that a step waits for a put; puts that take less are timed without the thread's other work

_Progress = Callable[[], bool]  # `Transport.progress`
_Timed = Generator[None, None, float]  # yields while it works, returns seconds


def measure(
    thread: ProgressThread,
    connection: PeerConnection,
    source: Region,
    target: int,
    *,
    stores: bool,
    gpu: GpuContext | None,
) -> float:
    """The best rate to a peer in GB/s (1e9 bytes/s). Not for the progress thread.

    source: this rank's scratch region. target: index of the peer's scratch region. stores: measure stores into the
    mapped region, as direct transfers make them; else puts. gpu: this rank's GPU, if the cache lies on one.
    Raises ``TransferTimeout``, ``PeerLost``.
    """
    steps = thread.call(lambda: _probe(connection, source, target, stores, gpu, thread.transport.progress))
    deadline = time.monotonic() + TIMEOUT
    while (rate := thread.call(lambda: next(steps))) is None:
        if time.monotonic() > deadline:
            raise TransferTimeout(f"no rate to {connection.name} could be measured within {TIMEOUT:g} s")
    return rate


def calibration(connection: PeerConnection, source: Region, target: int, progress: _Progress) -> Iterator[None]:
    """Measures ``connection.costs``. Each step takes about half a millisecond at most.

    source: this rank's scratch region. target: index of the peer's scratch region. If the measurement fails, the costs
    stay unknown and `path_cost` assumes some: no transfer has to fail for that, and over a broken channel it fails by
    itself.
    """
    one, many, bulk = _puts(source, target, 1), _puts(source, target, MANY), _whole(source, target)
    try:
        yield from _put(connection, one, progress, limit=GIVE_UP)  # not measured: the first put may set up the channel
        best = [float("inf")] * 3
        began = time.perf_counter()
        for rounds in range(1, ROUNDS + 1):
            for number, batch in enumerate((one, many, bulk)):
                best[number] = min(best[number], (yield from _put(connection, batch, progress, limit=GIVE_UP)))
            spent = time.perf_counter() - began
            if rounds >= LEAST_ROUNDS and spent > (BUDGET if rounds >= FEW_ROUNDS else PATIENCE):
                break
    except KVError as error:
        log.warning("the cost of puts to rank %d could not be measured, so it is assumed: %s", connection.rank, error)
        return
    pack = _host_pack_seconds() if source.device.type == "cpu" else GPU_PACK_SECONDS
    connection.costs = _costs(*best, bulk_nbytes=source.nbytes, pack=pack)


def _costs(one: float, many: float, bulk: float, *, bulk_nbytes: int, pack: float) -> Costs:
    """one, many, bulk: seconds of one short put, of ``MANY``, and of one of ``bulk_nbytes`` bytes, with the flush.

    pack: seconds per byte to gather or scatter short runs.
    """
    byte = max((bulk - one) / bulk_nbytes, LEAST_BYTE)
    return Costs(descriptor=max((many - one) / (MANY - 1) - SHORT * byte, LEAST_PUT), byte=byte, pack=pack)


@functools.cache
def _host_pack_seconds() -> float:
    """Seconds per byte to gather on this host: runs of 512 bytes, one head of eight, from pages in random order."""
    tokens, stride, pairs = 16, 8 * SHORT, 128
    pages = np.ones(pairs * tokens * stride, np.uint8)
    packed = np.ones(pairs * tokens * SHORT, np.uint8)
    src = np.random.default_rng(0).permutation(pairs) * (tokens * stride)
    dst = np.arange(pairs, dtype=np.int64) * (tokens * SHORT)
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        rows = StridedRuns(1, 0, 0, tokens, stride, SHORT, SHORT)
        copy_loops.copy_pairs(pages.ctypes.data, packed.ctypes.data, src, dst, 0, pairs, rows)
        best = min(best, time.perf_counter() - began)
    return best / packed.nbytes


def _probe(
    connection: PeerConnection,
    source: Region,
    target: int,
    stores: bool,
    gpu: GpuContext | None,
    progress: _Progress,
) -> Iterator[float | None]:
    """Yields None while it measures, and at last the best rate in GB/s. The bytes that it writes have no meaning."""
    best = 0.0
    view = connection.views[target] if stores else None
    for _ in range(REPEATS):
        if view is None:
            seconds = yield from _put(connection, _whole(source, target), progress)
        elif gpu is None:
            seconds = yield from _store(source, view)
        else:
            seconds = yield from _copy(source, view, gpu)
        best = max(best, source.nbytes / seconds / 1e9)
    yield best


def _puts(source: Region, target: int, count: int) -> Batch:
    """``count`` short puts."""
    offset = np.arange(count, dtype=np.int64) * SPACING
    return Batch(
        np.full(count, source.index), offset, np.full(count, target), offset, np.full(count, SHORT, dtype=np.int64)
    )


def _whole(source: Region, target: int) -> Batch:
    """One put of all the scratch memory."""
    return Batch.one(
        local_region=source.index, local_offset=0, remote_region=target, remote_offset=0, length=source.nbytes
    )


def _put(connection: PeerConnection, batch: Batch, progress: _Progress, *, limit: float = TIMEOUT) -> _Timed:
    """A put and its flush. Raises ``TransferTimeout`` after ``limit`` seconds, ``PeerLost``."""
    assert connection.channel is not None
    began = time.perf_counter()
    put = connection.channel.put(batch)
    flush = connection.channel.flush()
    spun = began
    while not (put.done and flush.done):
        now = time.perf_counter()
        if now - began > limit:
            put.cancel()
            raise TransferTimeout(f"{batch.nbytes} bytes to {connection.name} took more than {limit:g} s")
        if now - spun > SPIN:
            yield
            spun = time.perf_counter()
        progress()
    if (error := put.error or flush.error) is not None:
        raise error
    return time.perf_counter() - began


def _store(source: Region, view: RemoteView) -> _Timed:
    """Stores of the host into the peer's mapped scratch memory."""
    began = time.perf_counter()
    copy_loops.copy_spans(source.ptr, view.ptr, _one(0), _one(0), _one(source.nbytes), 0, 1)
    seconds = time.perf_counter() - began
    yield
    return seconds


def _copy(source: Region, view: RemoteView, gpu: GpuContext) -> _Timed:
    """A copy by the GPU into the peer's mapped scratch memory."""
    stream = gpu.unblocked_stream
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record(stream)
    posted = driver().cuMemcpyDtoDAsync(view.ptr, source.ptr, source.nbytes, stream.cuda_stream)
    check(posted, "copying to a peer's GPU")
    ended.record(stream)
    while not ended.query():
        yield
    seconds: float = began.elapsed_time(ended) / 1e3
    return seconds


def _one(value: int) -> Int64Array:
    return np.full(1, value, dtype=np.int64)
