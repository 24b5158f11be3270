"""Page ids that a caller keeps on a GPU."""

from __future__ import annotations

import torch

from torchkv.errors import PageOutOfRange
from torchkv.events import RecordedEvent
from torchkv.transport import Int64Array

__all__ = ["DevicePages"]


class DevicePages:
    """Page ids in device memory: int64 ``[n]``, read in stream order, unchanged until the work is done.

    ready: recorded behind whatever computes them. Kernels read and bound-check them where they are; paths that need
    descriptors fetch them with `on_host`.
    """

    def __init__(self, ids: torch.Tensor, ready: RecordedEvent) -> None:
        assert ids.is_cuda
        assert (ids.dtype, ids.dim()) == (torch.int64, 1)
        self.ids = ids
        self.ready = ready
        self._copy: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def __len__(self) -> int:
        return self.ids.numel()

    def on_host(self, stream: torch.cuda.Stream, *, num_pages: int, what: str) -> Int64Array | None:
        """The ids, once they are on the host; None while they are on their way. Never blocks.

        Raises ``PageOutOfRange`` for an id outside [0, num_pages).
        """
        if self._copy is None or self._copied is None:
            with torch.cuda.stream(stream):
                self.ready.wait_on(stream)
                self._copy = torch.empty(self.ids.shape, dtype=torch.int64, pin_memory=True)
                self._copy.copy_(self.ids, non_blocking=True)
                self._copied = torch.cuda.Event()
                self._copied.record(stream)
        if not self._copied.query():
            return None
        ids: Int64Array = self._copy.numpy()
        outside = (ids < 0) | (ids >= num_pages)
        if outside.any():
            raise PageOutOfRange(f"{what}: page {ids[outside][0]} is outside this cache's [0, {num_pages})")
        return ids
