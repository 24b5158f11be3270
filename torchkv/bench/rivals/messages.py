"""send and receive of torch.distributed: gloo between hosts' memory, NCCL between GPUs.

Messages are contiguous and pages are not, so the writer gathers K or V of a layer into a buffer and sends it while it
gathers the next; the reader scatters each as it comes.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from torchkv.bench.rivals.cases import Case
from torchkv.bench.rivals.side import PagedSide, Rival

__all__ = ["GLOO", "NCCL"]


class _Side(PagedSide):
    backend = "gloo"

    def __init__(self, case: Case, nbytes: int, rank: int) -> None:
        super().__init__(case, nbytes, rank)
        self._group = dist.new_group(backend=self.backend)
        layout = case.layout(1)
        pairs = [(self.cache["k"][layer], self.cache["v"][layer]) for layer in range(case.layers)]
        # Of each page what the reader holds: its heads are the first ones.
        self._pages = [tensor[:, :, : len(layout.heads)] for both in pairs for tensor in both if tensor is not None]
        self._buffers = [torch.empty(page.shape, dtype=page.dtype, device=self.device) for page in self._pages]

    def move(self) -> None:
        ids = torch.from_numpy(self.ids).to(self.device)
        both = list(zip(self._pages, self._buffers, strict=True))
        if self.rank == 0:
            works = []
            for pages, buffer in both:
                torch.index_select(pages, 0, ids, out=buffer)
                works.append(dist.isend(buffer, 1, group=self._group))
            for work in works:
                assert work is not None
                work.wait()
        else:
            works = [dist.irecv(buffer, 0, group=self._group) for buffer in self._buffers]
            for work, (pages, buffer) in zip(works, both, strict=True):
                assert work is not None
                work.wait()
                pages.index_copy_(0, ids, buffer)
        self._synchronize()

    def way(self) -> str:
        return "gathered, scattered" if self.rank == 0 else ""


class _NcclSide(_Side):
    backend = "nccl"


def _why_not_gloo(device: str) -> str | None:
    return None if device == "cpu" else "sends host memory only"


def _why_not_nccl(device: str) -> str | None:
    if device != "cuda":
        return "sends memory of GPUs only"
    if not dist.is_nccl_available():
        return "this PyTorch was built without it"
    if torch.cuda.device_count() < 2:
        return "needs two GPUs"
    return None


GLOO = Rival(name="gloo", why_not=_why_not_gloo, make=_Side)
NCCL = Rival(name="nccl", why_not=_why_not_nccl, make=_NcclSide)
