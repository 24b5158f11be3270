"""The other process of the tests of shared device memory.

``python -m tests.helpers.ranks.memory_peer writer|owner|expandable ...``

It answers on its standard output, a line at a time, and goes on when it is sent a line.
"""

from __future__ import annotations

import hashlib
import sys
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl

from torchkv.cuda import ipc
from torchkv.errors import TransportUnavailable


@triton.jit
def _store(address, source, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - Triton reads annotations as types
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    target = address.to(tl.pointer_type(tl.uint8))
    tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


def store(address: int, source: torch.Tensor) -> None:
    """Copies uint8 ``source`` to a raw address with a kernel on source's device."""
    with torch.cuda.device(source.device):
        _store[(triton.cdiv(source.numel(), 1024),)](address, source, source.numel(), BLOCK=1024)


def as_tensor(ptr: int, nbytes: int) -> torch.Tensor:
    """A uint8 tensor over raw memory."""
    fields = {"shape": (nbytes,), "typestr": "|u1", "data": (ptr, False), "strides": None, "version": 3}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=fields))


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.cpu().numpy().tobytes()).hexdigest()


def pattern(seed: int, nbytes: int) -> torch.Tensor:
    """The same random bytes in every process."""
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def say(*words: Any) -> None:
    print(*words, flush=True)


def writer(share: str, device: str, seed: str, begin: str, middle: str, end: str) -> None:
    """Maps, says what it reads, writes [begin, middle) by a torch copy and [middle, end) by a kernel, and unmaps."""
    gpu, lo, mid, hi = torch.device("cuda", int(device)), int(begin), int(middle), int(end)
    torch.cuda.set_device(gpu)
    mapping = ipc.open_share(bytes.fromhex(share), gpu)
    again = ipc.open_share(bytes.fromhex(share), gpu)
    assert again.ptr == mapping.ptr
    again.close()
    window = as_tensor(mapping.ptr, mapping.nbytes)
    say(digest(window), window.device)
    fresh = pattern(int(seed), hi - lo).to(gpu)
    window[lo:mid].copy_(fresh[: mid - lo])
    store(mapping.ptr + mid, fresh[mid - lo :].clone())
    torch.cuda.synchronize()
    say("written")
    sys.stdin.readline()
    mapping.close()
    say("closed")
    sys.stdin.readline()


def owner(device: str, nbytes: str, seed: str) -> None:
    """Shares random bytes and waits."""
    tensor = ipc.allocate(int(nbytes), torch.device("cuda", int(device)))
    tensor.copy_(pattern(int(seed), int(nbytes)))
    torch.cuda.synchronize()
    say(ipc.share(tensor).hex())
    sys.stdin.readline()


def expandable() -> None:
    """With expandable segments on: PyTorch's memory is refused, our own is not."""
    try:
        ipc.check_shareable(torch.zeros(1 << 20, dtype=torch.uint8, device="cuda:0"))
        say("not refused")
    except TransportUnavailable as error:
        say("refused:", error)
    own = ipc.allocate(1 << 20, torch.device("cuda", 0))
    ipc.check_shareable(own)
    say(len(ipc.share(own)))


if __name__ == "__main__":
    {"writer": writer, "owner": owner, "expandable": expandable}[sys.argv[1]](*sys.argv[2:])
