"""An op that may be started again, for other layers, as the resident loop's callers do layer by layer."""

from __future__ import annotations

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.core.loop.state.world import REPEAT

__all__ = ["Repeat"]


class Repeat:
    """flow: of its request. checked: the page ids that its caller gave. copied: those of them that are copied.

    start, verb, staged: see `Op`. address: of the record that compiled code reads.
    """

    __slots__ = ("_record", "address", "checked", "copied", "flow", "verb")

    def __init__(self, flow: int, checked: Int64Array, copied: Int64Array, start: int, verb: int, staged: int) -> None:
        self.flow, self.verb = flow, verb
        self.checked, self.copied = checked, copied  # which are read at their addresses
        ids = checked.ctypes.data, len(checked), copied.ctypes.data, len(copied)
        # A `REPEAT`, in a third of the time that numpy takes for one.
        self._record = np.array((flow, *ids, start, verb, staged), dtype=np.int64)
        assert self._record.nbytes == REPEAT.itemsize
        self.address = self._record.ctypes.data
