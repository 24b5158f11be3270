"""What UCX needs for memory on a GPU: a current CUDA context, and a first allocation that may stay mapped.

Contexts. A thread needs a current CUDA context when it unpacks a remote key (UCX opens the peer's memory on the current
device) and when it drives UCX; choosing lanes needs none. So the transport makes the context of its first device
region's GPU current when that region is registered, and a group with its cache on the host opens no GPU.

Completion. UCX copies on CUDA streams of its own, which wait for no other stream: data must be ready before a put. UCX
learns of the end of a copy by asking the driver, so the transport polls while such puts are pending. (To sleep, UCX
would enqueue a host function on the stream, which may still run after the worker has been destroyed.)
"""

from __future__ import annotations

import os
import re
from functools import cache

import torch

from torchkv.cuda import ipc

__all__ = ["probe_memory", "why_no_lane"]

_RESOURCE = re.compile(r"^#\s+resource \d+ .*--\s*(?P<transport>[^/\s]+)/", re.MULTILINE)
_CLOSES_IN_PROGRESS = (1, 22, 0)
_LANES = ("cuda_ipc", "rc_", "dc_", "ud_", "gga_")


@cache
def probe_memory(device: torch.device) -> torch.Tensor:
    """256 bytes on ``device`` that live as long as this process. Peers unpack their remote key before any other.

    UCX maps the first memory of a GPU whose key it unpacks, to learn whether it can reach that GPU, and never unmaps
    it. Without these bytes that would be a region of the cache, which then stayed allocated.
    """
    return ipc.allocate(256, device)


def why_no_lane(info: str, version: tuple[int, int, int]) -> str:
    """Why a UCX context cannot put device memory; "" if it can. info: the text of ``ucp_context_print_info``.

    UCX 1.22.0 closes its mappings of a peer's memory from within ``ucp_worker_progress`` when that peer dies
    (openucx/ucx pull requests 11335 and, taking it back, 11744). ``cuIpcCloseMemHandle`` waits for all streams, so the
    progress thread would hang for as long as a stream waits for a transfer: for ever, if it is to drive that transfer.
    """
    if version == _CLOSES_IN_PROGRESS:
        return (
            "UCX 1.22.0 hangs if a peer with device memory dies while a stream waits for a transfer; "
            "use another version of UCX (UCXX's wheels bring 1.21)"
        )
    found = sorted({match["transport"] for match in _RESOURCE.finditer(info)})
    if any(name.startswith(_LANES) for name in found):
        return ""
    return (
        f"UCX has no transport for device memory here, only {', '.join(found)}: cuda_ipc needs a libucx with CUDA "
        f"modules, a driver, and UCX_TLS (now {os.environ.get('UCX_TLS', 'unset')}) must not leave it out"
    )
