"""Page ids on their way to the GPU, in memory that was allocated before any stream could wait.

While a stream waits for the host (``KVWork.wait_stream``), an allocation for which other memory must be freed waits for
that stream; the progress thread, which would release it, must therefore not allocate. So it copies ids through slots
that it has from the start, and only lists longer than a slot take memory of their own.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch

from torchkv.transport import Int64Array

__all__ = ["Upload", "Uploads"]

SLOTS = 320  # two for each transfer that may be under way, and some that are remembered
SLOT_IDS = 4096

_Key = tuple[int, str, int, int]  # stream, whose ids, destination, generation


@dataclass(eq=False, slots=True)
class Upload:
    """Page ids in device memory: ``ids``, int64 ``[n]``, in stream order on the stream they were uploaded on."""

    ids: torch.Tensor
    source: Int64Array
    pinned: torch.Tensor
    memory: torch.Tensor
    users: int = 0


class Uploads:
    """Belongs to the progress thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        pinned = torch.empty((SLOTS, SLOT_IDS), dtype=torch.int64, pin_memory=True)
        memory = torch.empty((SLOTS, SLOT_IDS), dtype=torch.int64, device=device)
        self._free = list(zip(pinned, memory, strict=True))
        self._known: OrderedDict[_Key, Upload] = OrderedDict()
        self._replaced: list[Upload] = []  # still in use, though newer ids have their key

    def acquire(self, ids: Int64Array, stream: torch.cuda.Stream, key: tuple[str, int, int]) -> Upload:
        """``ids`` for kernels on ``stream``; give it back when they have ended.

        key: whose ids (``src`` or ``dst``), destination and generation of the grant that they belong to. The layers of
        one request have equal ids: the last upload under a key is used again if its ids are the same.
        """
        place = (stream.cuda_stream, *key)
        known = self._known.get(place)
        if known is None or not np.array_equal(known.source, ids):
            if known is not None:
                self._forget(place)
            known = self._known[place] = self._upload(ids, stream)
        self._known.move_to_end(place)
        known.users += 1
        return known

    def release(self, upload: Upload) -> None:
        """The kernels that read it have ended."""
        upload.users -= 1
        if upload in self._replaced and not upload.users:
            self._replaced.remove(upload)
            self._recycle(upload)

    def _upload(self, ids: Int64Array, stream: torch.cuda.Stream) -> Upload:
        pinned, memory = self._slot(len(ids), stream)
        pinned.numpy()[: len(ids)] = ids
        with torch.cuda.stream(stream):
            memory[: len(ids)].copy_(pinned[: len(ids)], non_blocking=True)
        return Upload(memory[: len(ids)], ids, pinned, memory)

    def _slot(self, count: int, stream: torch.cuda.Stream) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._free and count <= SLOT_IDS:
            idle = next((place for place, upload in self._known.items() if not upload.users), None)
            if idle is not None:
                self._forget(idle)
        if not self._free or count > SLOT_IDS:
            with torch.cuda.stream(stream):  # of another one's memory, kernels of that may not have ended
                memory = torch.empty(count, dtype=torch.int64, device=self._device)
            return torch.empty(count, dtype=torch.int64, pin_memory=True), memory
        return self._free.pop()

    def _forget(self, place: _Key) -> None:
        upload = self._known.pop(place)
        if upload.users:
            self._replaced.append(upload)
        else:
            self._recycle(upload)

    def _recycle(self, upload: Upload) -> None:
        if upload.pinned.numel() == SLOT_IDS:
            self._free.append((upload.pinned, upload.memory))
