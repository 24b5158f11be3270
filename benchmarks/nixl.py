"""Comparison with NIXL, where it is installed: as many bytes between two GPUs, one descriptor for each page or slice.

NIXL runs in processes of its own, which load NIXL's UCX and not torchkv's.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.outcome import Outcome
from torchkv.bench.gpu import CASES, run_gpu_case
from torchkv.bench.processes import run_two
from torchkv.errors import KVError

__all__ = ["NixlResult", "nixl_available", "nixl_rate", "run"]

_MODULES = ("nixl_cu13", "nixl_cu12", "nixl")
DEADLINE = 120.0
# (span, stride, descriptors, gate: how many times faster torchkv's direct path must be, torchkv's GPU case)
RIVALS = (
    (128 << 10, 128 << 10, 4096, 5.0, "pages of 64"),
    (512, 2048, 32768, 500.0, "slices of 512 B"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlResult:
    """``descriptors`` writes of ``span`` bytes each. gbps: in 1e9 bytes/s. wrong: bytes."""

    span: int
    descriptors: int
    gbps: float
    wrong: int


def run(repeats: int) -> Iterator[Outcome]:
    """repeats: timed runs of torchkv with each number of blocks, of which the fastest counts."""
    if nixl_available() is None:
        yield Outcome(line="NIXL: not installed, nothing compared", row={"rival": "nixl", "installed": False})
        return
    for span, stride, count, factor, name in RIVALS:
        (case,) = (case for case in CASES if case.name == name)
        results = run_gpu_case(case, repeats=repeats)
        ours, wrong = max(result.gbps for result in results), sum(result.wrong for result in results)
        rival = nixl_rate(span=span, stride=stride, descriptors=count)
        times = ours / rival.gbps
        line = (
            f"NIXL: {rival.descriptors} descriptors of {rival.span} B: {rival.gbps:.3f} GB/s, #wrong {rival.wrong}; "
            f"torchkv, {name}: {ours:.1f} GB/s, {times:.0f}x (gate {factor:g}x), #wrong {wrong}"
        )
        passed = times >= factor and wrong == 0
        row = {"rival": "nixl", **asdict(rival), "torchkv_gbps": ours, "times": times, "passed": passed}
        yield Outcome(line=line, row=row, passed=passed, wrong=wrong)


def nixl_available() -> str | None:
    """The name of the installed NIXL package, or None."""
    return next((name for name in _MODULES if importlib.util.find_spec(name) is not None), None)


def nixl_rate(*, span: int, stride: int, descriptors: int, repeats: int = 5) -> NixlResult:
    """NIXL's rate, measured in two fresh processes: writes from one GPU to shuffled places on the other, byte-checked.

    span: bytes of each write. stride: bytes between the starts of two places. Raises ``KVError`` if NIXL reports an
    error or takes too long.
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
                raise KVError(f"NIXL's transfer did not end within {DEADLINE:g} s")
        if state != "DONE":
            raise KVError(f"NIXL's transfer failed: its state is {state}")
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
    """NIXL's descriptor list: uint64 [count, 3] of address, length and device."""
    count = len(addresses)
    return np.stack([addresses, np.full(count, span), np.full(count, device)], axis=1).astype(np.uint64)


def _send(values: np.ndarray[Any, Any]) -> None:
    dist.broadcast(torch.from_numpy(values), 1)


def _receive(count: int) -> np.ndarray[Any, Any]:
    """``count`` numbers from rank 1, int64; it sends bytes as one number each."""
    values = torch.zeros(count, dtype=torch.int64)
    dist.broadcast(values, 1)
    return values.numpy()
