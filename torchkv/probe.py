"""Measuring a route's limit: bulk bytes into the scratch memory that every rank registers for this."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from torchkv import hostcopy
from torchkv.errors import TransferTimeout
from torchkv.progress import ProgressThread
from torchkv.route import Route
from torchkv.transport import Batch, Region

__all__ = ["PROBE_BYTES", "measure"]

PROBE_BYTES = 4 << 20
REPEATS = 8
TIMEOUT = 10.0


def measure(thread: ProgressThread, route: Route, source: Region, target: int) -> float:
    """The best rate to a peer in GB/s (1e9 bytes/s). Called from any thread but the progress thread.

    ``source``: this rank's scratch region; ``target``: index of the peer's. Raises ``TransferTimeout``, ``PeerLost``.
    """
    steps = thread.call(lambda: _probe(route, source, target))
    deadline = time.monotonic() + TIMEOUT
    # Step by step, so that the progress thread can serve requests in between.
    while (rate := thread.call(lambda: next(steps))) is None:
        if time.monotonic() > deadline:
            raise TransferTimeout(f"no rate to rank {route.rank} could be measured within {TIMEOUT:g} s")
    return rate


def _probe(route: Route, source: Region, target: int) -> Iterator[float | None]:
    """Yields None while it works, at last the best rate over a few repeats. What it writes means nothing."""
    best = 0.0
    view = route.views[target]
    zero = np.zeros(1, dtype=np.int64)
    size = np.full(1, PROBE_BYTES, dtype=np.int64)
    for _ in range(REPEATS):
        began = time.perf_counter()
        if view is not None:
            hostcopy.copy_spans(source.ptr, view.ptr, zero, zero, size, 0, 1)
            yield None
        elif route.channel is not None:
            region, remote = np.full(1, source.index, dtype=np.int64), np.full(1, target, dtype=np.int64)
            put = route.channel.put(Batch(region, zero, remote, zero, size))
            flush = route.channel.flush()
            while not (put.done and flush.done):
                yield None
            if (error := put.error or flush.error) is not None:
                raise error
        best = max(best, PROBE_BYTES / (time.perf_counter() - began) / 1e9)
    yield best
