"""A fake of `GpuContext` that records what was enqueued."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from torchkv.errors import TransportUnavailable
from torchkv.kernels.gpu_context import launching

__all__ = ["CLAIM", "STREAM", "Event", "Gpu"]

STREAM: Any = SimpleNamespace(cuda_stream=0x5150, query=lambda: True)
CLAIM: Any = SimpleNamespace(stream=STREAM)


class Gpu:
    """What transfers use of `torchkv.kernels.gpu_context.GpuContext`. ``log``: what was enqueued, in order."""

    blocks = 1
    device = torch.device("cpu")
    unblocked_stream = STREAM

    def __init__(self) -> None:
        self.log: list[str] = []
        self.completions: list[Any] = []
        self.released: list[str] = []
        self.released_completions: list[Any] = []
        self.uploads = SimpleNamespace(acquire=self._acquire, release=lambda upload: self.released.append("upload"))
        self.broken = False
        self.rested = True  # False: pauses end only when stopped
        self.holding = False  # whether a stream waits for this rank's host
        self.sync_words = SimpleNamespace(no_blocked_streams=self._no_blocked_streams)
        self.freed: list[str] = []
        self.is_unblocked = False  # inside `no_blocked_streams`, which yielded True

    def _acquire(self, ids: Any, stream: Any, key: Any) -> Any:
        self.log.append(f"upload {key[0]}")
        return SimpleNamespace(ids=torch.from_numpy(ids))

    def signal(self, stream: Any, *, copying: bool = False) -> Any:
        if self.broken:
            raise TransportUnavailable("signalling from a stream failed: CUDA_ERROR_ILLEGAL_ADDRESS")
        self.log.append("signal copying" if copying else "signal")
        self.completions.append(SimpleNamespace(done=False))
        return self.completions[-1]

    def mark_copying(self, completion: Any) -> None:
        assert completion in self.completions
        self.log.append("mark copying")

    def release_completion(self, completion: Any) -> None:
        self.released_completions.append(completion)

    def release(self, claim: Any) -> None:
        assert claim is CLAIM
        self.released.append("stream")

    @contextmanager
    def _no_blocked_streams(self) -> Iterator[bool]:
        self.is_unblocked = not self.holding
        yield self.is_unblocked
        self.is_unblocked = False

    def run_deferred_frees(self) -> None:
        assert self.is_unblocked
        self.freed.append("deferred")

    def on_side_stream(self, operation: str) -> AbstractContextManager[None]:
        return launching(self.unblocked_stream, operation)

    def pause(self, seconds: float, stopped: Callable[[], bool]) -> Iterator[int]:
        self.log.append(f"pause {seconds:.3f}")
        while not stopped() and not self.rested:
            yield 0

    def take_error_words(self) -> torch.Tensor:
        return torch.zeros(2, dtype=torch.int64)

    def release_error_words(self, words: torch.Tensor) -> None:
        self.released.append("errors")

    def run(self) -> None:
        for completion in self.completions:
            completion.done = True


class Event:
    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.error: Exception | None = None

    def query(self) -> bool:
        if self.error is not None:
            raise self.error
        return False
