"""Words for what a benchmark ran on."""

from __future__ import annotations

import os
import platform

import torch

__all__ = ["machine", "torchkv_version"]


def machine(device: str) -> str:
    """The machine and its software. device: "cpu" or "cuda"."""
    if device == "cuda":
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}"
    return (
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    )


def torchkv_version() -> str:
    import torchkv  # here, because the package's top stands above this module

    return torchkv.__version__
