"""Measuring a route's limit: bulk bytes into the scratch memory that every rank registers for this."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from torchkv import hostcopy
from torchkv.route import Route
from torchkv.transport import Batch, Region

__all__ = ["PROBE_BYTES", "probe"]

PROBE_BYTES = 4 << 20
REPEATS = 8


def probe(route: Route, source: Region, target: int) -> Iterator[float | None]:
    """Yields None while it works, at last the best rate in GB/s (1e9 bytes/s) over a few repeats.

    ``source``: the local scratch region; ``target``: index of the peer's. What is written there means nothing.
    """
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
