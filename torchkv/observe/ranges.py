"""Ranges around verbs, for ``torch.profiler`` and for NVTX. They cost a verb next to nothing while nobody profiles."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, cast

import torch

__all__ = ["Range"]


class Range:
    """A range that begins now, and ends with `end`, named ``torchkv::<verb>``. ``emit_nvtx`` makes NVTX ranges of them.

    request: what the range is about. nvtx: also makes an NVTX range itself, for a profiler that is not PyTorch's.
    """

    def __init__(self, verb: str, request: Any, *, nvtx: bool) -> None:
        self._nvtx = nvtx
        made = torch.autograd.profiler.record_function(f"torchkv::{verb}", str(request))
        self._range = cast(AbstractContextManager[object], made)
        self._range.__enter__()
        if nvtx:
            torch.cuda.nvtx.range_push(f"torchkv::{verb}")

    def end(self) -> None:
        if self._nvtx:
            torch.cuda.nvtx.range_pop()
        self._range.__exit__(None, None, None)
