"""What copies between two GPUs cost where both the copy engines and a kernel could do them."""

from __future__ import annotations

import numpy as np

from torchkv.transport import Int64Array

__all__ = ["copy_engine_pays", "count_runs", "engine_seconds", "kernel_seconds"]

# Measured between two H200 over NVLink. cuMemcpyBatchAsync moved many spans of 32 KiB, 128 KiB, 512 KiB, 2 MiB and
# 8 MiB at 52, 152, 277, 355 and 380 GB/s: so much for each span, and the link's rate for its bytes, meets all five
# within 3%. Few spans show what a batch costs in itself: 1, 2 and 4 of 2 MiB went at 193, 262 and 312 GB/s.
BATCH_SECONDS = 4.5e-6
SPAN_SECONDS = 0.55e-6
LINK_RATE = 392e9  # bytes a second, of one large copy
# The copy kernel with 16 blocks, whatever the length of its runs; a layer of 4 MiB took 13.3 us.
LAUNCH_SECONDS = 1.5e-6
KERNEL_RATE = 354.6e9


def engine_seconds(*, spans: int, nbytes: int) -> float:
    """What the copy engines take for one batch of ``spans`` descriptors, of ``nbytes`` bytes in all."""
    return BATCH_SECONDS + spans * SPAN_SECONDS + nbytes / LINK_RATE


def kernel_seconds(*, nbytes: int) -> float:
    """What the copy kernel takes for ``nbytes`` bytes."""
    return LAUNCH_SECONDS + nbytes / KERNEL_RATE


def copy_engine_pays(*, spans: int, nbytes: int) -> bool:
    """Whether the copy engines are at least as fast as the kernel.

    That is so for 15 MiB and more in spans of 2 MiB and more, on average. Then they are the better way, as they leave
    all multiprocessors to the model.
    """
    return engine_seconds(spans=spans, nbytes=nbytes) <= kernel_seconds(nbytes=nbytes)


def count_runs(pages: Int64Array) -> int:
    """Of how many runs of consecutive ids ``pages``, int64 ``[n]`` with n > 0, consists."""
    return 1 + int(np.count_nonzero(pages[1:] - pages[:-1] != 1))
