"""What a benchmark ran on, in words."""

from __future__ import annotations

import os
import platform

import torch

__all__ = ["machine"]


def machine(device: str) -> str:
    """device: "cpu" or "cuda"."""
    if device == "cuda":
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}"
    return (
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    )
