"""The checksum of `torchkv.host.checksum`, by its definition."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchkv.host.checksum import WORD_NBYTES, keys, seed

__all__ = ["checksum_reference"]


def checksum_reference(packed: npt.NDArray[np.uint8]) -> int:
    """The checksum of ``packed``, uint8 ``[nbytes]``, as a signed number, as it is stored."""
    count = -(-len(packed) // WORD_NBYTES)
    filled = np.zeros(count * WORD_NBYTES, np.uint8)
    filled[: len(packed)] = packed
    total = seed(len(packed))
    for word, key in zip(filled.view("<u4").tolist(), keys(count).tolist(), strict=True):
        total += word * key
    total &= (1 << 64) - 1
    return total - (total >> 63 << 64)
