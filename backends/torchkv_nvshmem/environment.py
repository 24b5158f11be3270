"""The NVSHMEM settings that torchkv needs. NVSHMEM reads them once, when it starts.

A variable that the user has set is left alone. The reasons, one per setting:

* ``SYMMETRIC_SIZE``: bytes of the heap where CUDA's virtual memory is switched off; allocated at once, and fixed.
* ``MAX_MEMORY_PER_GPU``: bytes of address space reserved for the heap otherwise, which then grows. NVSHMEM's default is
  less than the memory of today's GPUs, and a heap that grows beyond it is destroyed.
* ``DISABLE_NVLS=1``: multicast is for reductions. Moving pages needs none, and setting it up can fail.
* ``BOOTSTRAP_UID_SOCK_IFNAME``: the bootstrap listens without authentication, so only on the interface of the job.
"""

from __future__ import annotations

import os
import re

from torchkv.host.network import job_interface

__all__ = ["HEAP_VARIABLES", "OWN_NEEDS", "heap_limit", "prepare"]

HEAP_VARIABLES = "NVSHMEM_MAX_MEMORY_PER_GPU, or NVSHMEM_SYMMETRIC_SIZE with NVSHMEM_DISABLE_CUDA_VMM=1"

OWN_NEEDS = 256 << 20  # bytes that NVSHMEM itself allocates on the heap, for teams among other things
_GRANULARITY = 512 << 20  # in which NVSHMEM's heap grows


def prepare(nbytes: int, gpu_nbytes: int) -> None:
    """Writes torchkv's settings into the environment, where the user has set nothing.

    nbytes: symmetric memory that the first allocation needs. gpu_nbytes: memory of the largest GPU of the group. Both
    must be equal on all ranks. Raises ``TransportUnavailable`` if ``TORCHKV_INTERFACE`` names no interface.
    """
    os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", str(_rounded(nbytes + OWN_NEEDS)))
    os.environ.setdefault("NVSHMEM_MAX_MEMORY_PER_GPU", str(_rounded(gpu_nbytes + OWN_NEEDS)))
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
    if "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME" not in os.environ:
        interface, _ = job_interface()
        os.environ["NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"] = f"={interface}"


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _GRANULARITY) * _GRANULARITY


def heap_limit() -> int | None:
    """Bytes to which the heap may grow, or None if the user's value has a form that only NVSHMEM parses."""
    found = re.fullmatch(r"(\d+)([KMGT]?)", os.environ.get("NVSHMEM_MAX_MEMORY_PER_GPU", ""), re.IGNORECASE)
    if found is None:
        return None
    return int(found[1]) << 10 * " KMGT".index(found[2].upper() or " ")
