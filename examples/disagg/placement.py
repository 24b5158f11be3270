"""Which device a rank computes on, and what adds up the partial sums of its tensor-parallel group there."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Placement:
    """``collectives``: the c10d backend that can reduce tensors on ``device`` between all ranks of this host."""

    device: torch.device
    collectives: str


def place(kind: str) -> Placement:
    """This rank's place, ``kind`` being "cpu" or "cuda"; with "cuda" its GPU becomes the current one.

    Each rank has a GPU of its own where there are enough; else they share the GPUs in turn.
    """
    if kind == "cpu":
        return Placement(torch.device("cpu"), "gloo")
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus)
    torch.cuda.set_device(device)
    # A torchkv group reduces tensors on GPUs with NCCL, which refuses two ranks on one GPU. gloo goes through the host.
    return Placement(device, "torchkv" if int(os.environ["LOCAL_WORLD_SIZE"]) <= gpus else "gloo")
