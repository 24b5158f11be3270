"""Real vLLM engines in processes of their own, as tests talk to them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

from tests.serving.vllm import host
from tests.serving.vllm.host import BLOCKS, Finished, Setup

__all__ = ["DEADLINE", "FREE", "Engine"]

DEADLINE = 120.0  # seconds: two engines share two cores with other tests
FREE = BLOCKS - 1


class Engine:
    """A running engine; made at once, ready after `ready`."""

    def __init__(self, setup: Setup, scratch: Path, *, environment: dict[str, str]) -> None:
        number = len(list(scratch.glob("engine*.log")))
        self.log = scratch / f"engine{number}.log"
        self.log.touch()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=host.main, args=(setup, theirs, self.log, environment))
        self.process.start()
        theirs.close()
        self._finished: dict[str, Finished] = {}
        self.problem: str | None = None  # why it did not start

    def ready(self, *, fails: bool = False) -> None:
        """Returns when the engine has started; or, if that is expected, when it has failed to."""
        assert self._pipe.poll(DEADLINE), self._tail("did not start in time")
        self.problem = self._pipe.recv()
        assert (self.problem is not None) == fails, self._tail(f"started: {self.problem}")

    # ------------------------------------------------------------------ requests

    def add(self, request: str, prompt: list[int], max_tokens: int, **params: Any) -> None:
        self._call("add", request, prompt, max_tokens, params or None)

    def produce(self, request: str, prompt: list[int], **params: Any) -> None:
        """Prefills for another engine."""
        self.add(request, prompt, 1, do_remote_decode=True, do_remote_prefill=False, **params)

    def abort(self, request: str) -> None:
        self._call("abort", request)

    def finished(self, request: str) -> Finished:
        """The outcome of a request, once it has ended."""
        until = time.monotonic() + DEADLINE
        while request not in self._finished:
            assert time.monotonic() < until, self._tail(f"{request} has not ended")
            self._finished.update(self._call("take"))
            time.sleep(0.01)
        return self._finished.pop(request)

    def take(self) -> dict[str, Finished]:
        """Outcomes that `finished` has not returned."""
        found, self._finished = self._finished, {}
        return {**found, **self._call("take")}

    def generate(self, request: str, prompt: list[int], max_tokens: int, **params: Any) -> Finished:
        self.add(request, prompt, max_tokens, **params)
        return self.finished(request)

    # ------------------------------------------------------------------ the engine

    def steps(self, number: int | None) -> None:
        """This many steps at most from now on; None: no limit."""
        self._call("steps", number)

    def await_steps(self) -> None:
        """Returns when all steps that may be made have been made."""
        self._await(lambda: self._call("state")[2] == 0, "makes no step")

    def free(self) -> int:
        """Free blocks."""
        return int(self._call("state")[0])

    def requests(self) -> list[str]:
        """Requests that the scheduler knows, also those whose blocks are kept after their end."""
        return list(self._call("state")[1])

    def settle(self) -> None:
        """Waits until no request is left and all blocks are free; forgets cached prefixes."""
        self._call("steps", None)
        self._await(lambda: not self.requests(), "still has requests")
        assert self.free() == FREE
        assert self._call("reset"), "a block is in use"
        self._call("take")
        self._finished.clear()

    def preempt(self) -> None:
        self._call("preempt")

    def await_grant(self, request: str) -> None:
        """Returns when this engine has granted blocks to whoever prefills the request."""
        self._await(lambda: self._call("granted", request), f"grants no blocks to {request}")

    def address(self) -> dict[str, Any]:
        """For a router that tells the decode engine at once where to find this one."""
        host_name, port = self._call("address")
        return {"remote_host": host_name, "remote_port": port}

    def counters(self) -> dict[str, Any]:
        return dict(self._call("counters"))

    # ------------------------------------------------------------------ its end

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.join()

    def close(self) -> None:
        self._pipe.close()
        self.process.join(10)
        if self.process.is_alive():
            self.kill()

    # ------------------------------------------------------------------ inside

    def _call(self, name: str, *args: Any) -> Any:
        try:
            self._pipe.send((name, args))
            assert self._pipe.poll(DEADLINE), self._tail(f"does not answer {name}")
            return self._pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise AssertionError(self._tail(f"has ended before it answered {name}")) from None

    def _await(self, condition: Any, text: str) -> None:
        until = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < until, self._tail(f"{text}: {self._call('state')}")
            time.sleep(0.01)

    def _tail(self, text: str) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-60:]
        return "\n".join([f"engine {self.process.pid} {text}; its log ends:", *lines])
