"""NIXL as a rival, where it is installed: the same bytes between the same GPUs, one descriptor a page or slice.

Each of its processes loads NIXL's own UCX, and none of torchkv's.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchkv.bench.processes import run_two
from torchkv.errors import KVError

__all__ = ["NixlResult", "nixl_available", "nixl_rate"]

_MODULES = ("nixl_cu13", "nixl_cu12", "nixl")
DEADLINE = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlResult:
    """``descriptors`` writes of ``span`` bytes each; gbps in 1e9 bytes/s."""

    span: int
    descriptors: int
    gbps: float
    wrong: int


def nixl_available() -> str | None:
    """The name of the installed NIXL package, or None."""
    return next((name for name in _MODULES if importlib.util.find_spec(name) is not None), None)


def nixl_rate(*, span: int, stride: int, descriptors: int, repeats: int = 5) -> NixlResult:
    """Writes every ``span`` of ``stride`` bytes to shuffled places of a peer's GPU memory, in two fresh processes.

    Byte-checked. Raises ``KVError`` if NIXL reports an error or takes too long.
    """
    gbps, wrong = run_two(_write, _read, span, stride, descriptors, repeats)
    return NixlResult(span=span, descriptors=descriptors, gbps=gbps, wrong=wrong)


def _agent(rank: int, nbytes: int) -> tuple[Any, torch.Tensor, torch.device]:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
    api: Any = importlib.import_module(f"{nixl_available()}._api")
    agent = api.nixl_agent(f"rank{rank}", api.nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(memory.data_ptr(), nbytes, device.index, "")], mem_type="VRAM")
    return agent, memory, device


def _write(span: int, stride: int, descriptors: int, repeats: int) -> float:
    agent, source, device = _agent(0, span * descriptors)
    generator = torch.Generator(device).manual_seed(17)
    source.random_(0, 256, generator=generator)
    torch.cuda.synchronize()
    target, index, size = _receive(3).tolist()
    peer = agent.add_remote_agent(_receive(size).astype(np.uint8).tobytes())
    slots = np.random.default_rng(5).permutation(descriptors)
    ours = _table(source.data_ptr() + np.arange(descriptors) * span, span, device.index)
    theirs = _table(target + slots * stride, span, index)
    every = np.arange(descriptors, dtype=np.int32)
    handle = agent.make_prepped_xfer(
        "WRITE",
        agent.prep_xfer_dlist("NIXL_INIT_AGENT", ours, "VRAM"),
        every,
        agent.prep_xfer_dlist(peer, theirs, "VRAM"),
        every,
    )
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
            if time.perf_counter() - began > DEADLINE:
                raise KVError(f"NIXL did not end within {DEADLINE:g} s")
        if state != "DONE":
            raise KVError(f"NIXL reports {state}")
        seconds.append(time.perf_counter() - began)
    dist.barrier()
    return span * descriptors / statistics.median(seconds[1:]) / 1e9


def _read(span: int, stride: int, descriptors: int, repeats: int) -> int:
    agent, memory, device = _agent(1, stride * descriptors)
    memory.fill_(0xDD)
    torch.cuda.synchronize()
    metadata = agent.get_agent_metadata()
    _send(np.array([memory.data_ptr(), device.index, len(metadata)], dtype=np.int64))
    _send(np.frombuffer(metadata, dtype=np.uint8).astype(np.int64))
    dist.barrier()
    source = torch.empty(span * descriptors, dtype=torch.uint8, device=device)
    source.random_(0, 256, generator=torch.Generator(device).manual_seed(17))
    slots = torch.from_numpy(np.random.default_rng(5).permutation(descriptors)).to(device)
    expected = torch.full((descriptors, stride), 0xDD, dtype=torch.uint8, device=device)
    expected[slots, :span] = source.view(descriptors, span)
    return int((expected.view(-1) != memory).sum())


def _table(addresses: np.ndarray[Any, Any], span: int, device: int) -> np.ndarray[Any, Any]:
    """NIXL's descriptors: address, length, device."""
    count = len(addresses)
    return np.stack([addresses, np.full(count, span), np.full(count, device)], axis=1).astype(np.uint64)


def _send(values: np.ndarray[Any, Any]) -> None:
    dist.broadcast(torch.from_numpy(values), 1)


def _receive(count: int) -> np.ndarray[Any, Any]:
    """What rank 1 sends: numbers, or bytes as numbers."""
    values = torch.zeros(count, dtype=torch.int64)
    dist.broadcast(values, 1)
    return values.numpy()
