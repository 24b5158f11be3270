"""Page ids in device memory, for kernels: ids that the caller keeps on a GPU, and ids uploaded from the host.

`DevicePages` are the caller's own ids. `PageIdUploads` copies ids from the host into buffers that were allocated before
any stream could be blocked. While a stream waits for the host (``KVWork.wait_stream``), an allocation that must first
free other memory waits for that stream too. The progress thread, which would have to release the stream, must therefore
not allocate. Only lists longer than a buffer, or more lists than there are buffers, take memory of their own.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch

from torchkv.arrays import Int64Array
from torchkv.cuda.events import RecordedEvent
from torchkv.errors import PageOutOfRange

__all__ = ["DevicePages", "PageIdUpload", "PageIdUploads"]

BUFFERS = 320  # two for each transfer that may be active, and some for uploads that are kept for later layers
BUFFER_IDS = 4096

_Key = tuple[int, str, int, int]  # stream, side, destination, generation


class DevicePages:
    """Page ids that the caller keeps in device memory: int64 ``[n]``, unchanged until the work is done.

    ready: recorded behind the operation that computes the ids. Kernels read the ids in place and check their bounds.
    Paths that need descriptors fetch them with `on_host`.
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

    def behind(self, count: int) -> DevicePages:
        """All but the first ``count`` ids."""
        return DevicePages(self.ids[count:], self.ready)

    def on_host(self, stream: torch.cuda.Stream, *, num_pages: int, operation: str) -> Int64Array | None:
        """The ids in host memory, int64 ``[n]``; None until the copy, which the first call enqueues, is done.

        Never blocks. stream: on which the ids are copied. operation: names the caller in errors.
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
            raise PageOutOfRange(f"{operation}: page {ids[outside][0]} is outside this cache's [0, {num_pages})")
        return ids


@dataclass(eq=False, slots=True)
class PageIdUpload:
    """Page ids copied to device memory: ``ids``, int64 ``[n]``, valid in order on the stream they were uploaded on.

    source: the ids on the host. pinned, memory: the buffer pair that holds them. users: how often `acquire` has handed
    it out without a `release`.
    """

    ids: torch.Tensor
    source: Int64Array
    pinned: torch.Tensor
    memory: torch.Tensor
    users: int = 0


class PageIdUploads:
    """Copies page ids to one GPU and shares equal ids between kernels. Belongs to the progress thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        pinned = torch.empty((BUFFERS, BUFFER_IDS), dtype=torch.int64, pin_memory=True)
        memory = torch.empty((BUFFERS, BUFFER_IDS), dtype=torch.int64, device=device)
        self._free = list(zip(pinned, memory, strict=True))
        self._latest: OrderedDict[_Key, PageIdUpload] = OrderedDict()  # least recently acquired first
        self._replaced: list[PageIdUpload] = []  # in use, but other ids were uploaded under their key since

    def acquire(self, ids: Int64Array, stream: torch.cuda.Stream, key: tuple[str, int, int]) -> PageIdUpload:
        """``ids`` for kernels on ``stream``; `release` it when the kernels are done.

        key: side (``src``, ``dst`` or ``rx``), peer, and generation of the grant. All layers of a request have the
        same ids, so the latest upload under a key is used again if its ids are equal.
        """
        place = (stream.cuda_stream, *key)
        known = self._latest.get(place)
        if known is None or not np.array_equal(known.source, ids):
            if known is not None:
                self._forget(place)
            known = self._latest[place] = self._upload(ids, stream)
        self._latest.move_to_end(place)
        known.users += 1
        return known

    def release(self, upload: PageIdUpload) -> None:
        """Gives back what `acquire` returned, after the kernels that read it are done."""
        upload.users -= 1
        if upload in self._replaced and not upload.users:
            self._replaced.remove(upload)
            self._recycle(upload)

    def _upload(self, ids: Int64Array, stream: torch.cuda.Stream) -> PageIdUpload:
        pinned, memory = self._buffers(len(ids), stream)
        pinned.numpy()[: len(ids)] = ids
        with torch.cuda.stream(stream):
            memory[: len(ids)].copy_(pinned[: len(ids)], non_blocking=True)
        return PageIdUpload(memory[: len(ids)], ids, pinned, memory)

    def _buffers(self, count: int, stream: torch.cuda.Stream) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._free and count <= BUFFER_IDS:
            unused = next((place for place, upload in self._latest.items() if not upload.users), None)
            if unused is not None:
                self._forget(unused)
        if not self._free or count > BUFFER_IDS:
            # On this stream: PyTorch's allocator could hand out memory that kernels of another stream still use.
            with torch.cuda.stream(stream):
                memory = torch.empty(count, dtype=torch.int64, device=self._device)
            return torch.empty(count, dtype=torch.int64, pin_memory=True), memory
        return self._free.pop()

    def _forget(self, place: _Key) -> None:
        upload = self._latest.pop(place)
        if upload.users:
            self._replaced.append(upload)
        else:
            self._recycle(upload)

    def _recycle(self, upload: PageIdUpload) -> None:
        if upload.pinned.numel() == BUFFER_IDS:
            self._free.append((upload.pinned, upload.memory))
