"""Real engines in processes of their own, as tests talk to them over a pipe: what those of all kinds have in common."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest

__all__ = ["EngineClient", "new_log", "require"]

FinishedT = TypeVar("FinishedT")


def require(package: str) -> None:
    """Skips a test without ``package``, or fails it if TORCHKV_TEST_ENGINES says that engines must be there."""
    if importlib.util.find_spec(package) is None:
        reason = (
            f"{package} is not installed here: `make test-engines` makes an environment with it, and runs these tests"
        )
        if os.environ.get("TORCHKV_TEST_ENGINES"):
            pytest.fail(reason)
        pytest.skip(reason)


def new_log(scratch: Path) -> Path:
    """An empty file for what the next engine says."""
    log = scratch / f"engine{len(list(scratch.glob('engine*.log')))}.log"
    log.touch()
    return log


class EngineClient(ABC, Generic[FinishedT]):
    """A running engine. pipe: to its process. deadline: seconds for anything that it is told to do.

    What `finished` returns is the outcome of a request, of a type of that engine's.
    """

    def __init__(self, pipe: Connection, log: Path, *, deadline: float) -> None:
        self._pipe = pipe
        self._deadline = deadline
        self.log = log
        self._finished: dict[str, FinishedT] = {}
        self.problem: str | None = None  # why it did not start

    @property
    @abstractmethod
    def pid(self) -> int: ...

    @abstractmethod
    def add(self, request: str, prompt: list[int], max_tokens: int, **params: Any) -> None:
        """Gives the engine a request. params: what it has to know of the engine that it shares it with."""

    def abort(self, request: str) -> None:
        self._call("abort", request)

    def finished(self, request: str) -> FinishedT:
        """The outcome of a request, once it has ended."""
        until = time.monotonic() + self._deadline
        while request not in self._finished:
            assert time.monotonic() < until, self._tail(f"{request} has not ended")
            self._finished.update(self._call("take"))
            time.sleep(0.01)
        return self._finished.pop(request)

    def take(self) -> dict[str, FinishedT]:
        """Outcomes that `finished` has not returned."""
        found, self._finished = self._finished, {}
        return {**found, **self._call("take")}

    def generate(self, request: str, prompt: list[int], max_tokens: int, **params: Any) -> FinishedT:
        self.add(request, prompt, max_tokens, **params)
        return self.finished(request)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._join()

    # ------------------------------------------------------------------ for engines

    @abstractmethod
    def _join(self) -> None:
        """Returns when the process has ended."""

    def _await_start(self, *, fails: bool = False) -> None:
        """Returns when the engine has started; or, if that is expected, when it has failed to."""
        try:
            assert self._pipe.poll(self._deadline), self._tail("did not start in time")
            self.problem = self._pipe.recv()
        except EOFError:
            raise AssertionError(self._tail("ended before it had started")) from None
        assert (self.problem is not None) == fails, self._tail(f"started: {self.problem}")

    def _call(self, name: str, *args: Any) -> Any:
        try:
            self._pipe.send((name, args))
            assert self._pipe.poll(self._deadline), self._tail(f"does not answer {name}")
            return self._pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise AssertionError(self._tail(f"has ended before it answered {name}")) from None

    def _await(self, condition: Callable[[], bool], text: str) -> None:
        until = time.monotonic() + self._deadline
        while not condition():
            assert time.monotonic() < until, self._tail(f"{text}: {self._call('state')}")
            time.sleep(0.01)

    def _tail(self, text: str) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-80:]
        return "\n".join([f"engine {self.pid} {text}; its log ends:", *lines])
