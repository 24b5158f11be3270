"""What copies between two GPUs cost where both the copy engines and a kernel could do them."""

from __future__ import annotations

import numpy as np

from torchkv.transport import Int64Array

__all__ = ["copy_engine_pays", "count_runs", "engine_seconds", "kernel_seconds"]

# Measured between two H200 over NVLink. cuMemcpyBatchAsync moved spans of 32 KiB, 128 KiB, 512 KiB, 2 MiB and 8 MiB at
# 52, 152, 277, 355 and 380 GB/s: so much for each span, and the link's rate for its bytes, meets all five within 3%.
SPAN_SECONDS = 0.55e-6
LINK_RATE = 392e9  # bytes a second, of one large copy
# The copy kernel with 16 blocks, whatever the length of its runs.
KERNEL_RATE = 354.6e9


def engine_seconds(*, spans: int, nbytes: int) -> float:
    """What the copy engines take for ``spans`` descriptors of ``nbytes`` bytes in all, beside others."""
    return spans * SPAN_SECONDS + nbytes / LINK_RATE


def kernel_seconds(*, nbytes: int) -> float:
    """What the copy kernel takes for ``nbytes`` bytes, beside others."""
    return nbytes / KERNEL_RATE


def copy_engine_pays(*, spans: int, nbytes: int) -> bool:
    """Whether the copy engines are at least as fast as the kernel: if spans are of 2 MiB or more, on average.

    Then they are the better way, as they leave all multiprocessors to the model.
    """
    return engine_seconds(spans=spans, nbytes=nbytes) <= kernel_seconds(nbytes=nbytes)


def count_runs(pages: Int64Array) -> int:
    """Of how many runs of consecutive ids ``pages``, int64 ``[n]`` with n > 0, consists."""
    return 1 + int(np.count_nonzero(pages[1:] - pages[:-1] != 1))
