"""What UCX needs where memory lies on a GPU.

Contexts. A thread needs a CUDA context when it unpacks a remote key (UCX then opens the peer's memory on the *current*
device) and when it drives UCX; the choice of lanes needs none. So the transport makes the context of its first
device region's GPU current, on registering it, and a group that keeps its cache on the host never opens a GPU.

Completion. UCX copies on CUDA streams of its own, which wait for nobody: data must be ready before a put. It sees
the end of a copy by asking the driver, so transports poll while such puts are under way. (Its sleep would enqueue a
host function on the stream, which may still run after the worker is gone.)
"""

from __future__ import annotations

import os
import re
from functools import cache

import torch

from torchkv import devicemem

__all__ = ["doorstep", "why_no_lane"]

_RESOURCE = re.compile(r"^#\s+resource \d+ .*--\s*(?P<transport>[^/\s]+)/", re.MULTILINE)
_LANES = ("cuda_ipc", "rc_", "dc_", "ud_", "gga_")


@cache
def doorstep(device: torch.device) -> torch.Tensor:
    """A little memory on ``device`` that lives as long as this process; peers unpack its key before any other.

    To learn whether it reaches a GPU at all, UCX maps the first memory of that GPU whose key it unpacks, and then
    never unmaps it. That had better not be a cache.
    """
    return devicemem.allocate(256, device)


def why_no_lane(info: str) -> str:
    """Why a UCX context, described by ``ucp_context_print_info``, can put no device memory; "" if it can."""
    found = sorted({match["transport"] for match in _RESOURCE.finditer(info)})
    if any(name.startswith(_LANES) for name in found):
        return ""
    return (
        f"UCX has no transport for device memory here, only {', '.join(found)}: cuda_ipc needs a libucx with CUDA "
        f"modules, a driver, and UCX_TLS (now {os.environ.get('UCX_TLS', 'unset')}) must not leave it out"
    )
