"""Real SGLang engines in processes of their own, as tests talk to them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.serving.engine_client import EngineClient, new_log
from tests.serving.sglang.host import Finished, Setup

__all__ = ["DEADLINE", "ENVIRONMENT", "Engine", "end", "free_port"]

DEADLINE = 180.0  # seconds: two engines share two cores with other tests
ROOT = Path(__file__).parents[3]
STANDINS = Path(__file__).parent / "standins"

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "SGLANG_USE_CPU_ENGINE": "0",  # its kernels for CPUs are in no package
    "PYTHONPATH": os.pathsep.join(filter(None, [str(STANDINS), os.environ.get("PYTHONPATH")])),
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def end(process: subprocess.Popen[bytes], *, seconds: float) -> None:
    """Waits until a process and all others of its session have ended; kills those that have not by then."""
    until = time.monotonic() + seconds
    with suppress(ProcessLookupError):
        while time.monotonic() < until:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Engine(EngineClient[Finished]):
    """A running engine; made at once, ready after `ready`."""

    def __init__(self, setup: Setup, scratch: Path, *, environment: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(Connection(ours.detach()), new_log(scratch), deadline=DEADLINE)
        self.setup = setup
        self.folder = self.log.with_suffix("")
        self.folder.mkdir()
        binding = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank) for rank in range(setup.tp_size))}
        mine = {**ENVIRONMENT, **binding, "ENGINE_PROBE": str(self.folder), **environment}
        with theirs, self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.serving.sglang", str(theirs.fileno())],
                cwd=ROOT,
                env={**os.environ, **mine},
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that all its processes can be reached together
            )
        self._pipe.send(setup)
        self.empty: dict[str, Any] = {}  # its state when it had started
        self._left_behind: Path | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    def ready(self) -> None:
        """Returns when the engine has started."""
        self._await_start()
        self.empty = self.state()
        self._left_behind = Path(self._call("shared_memory"))

    # ------------------------------------------------------------------ requests

    def add(self, request: str, prompt: list[int], max_tokens: int, **where: Any) -> None:
        self._call("add", request, prompt, max_tokens, where)

    def where(self, room: int) -> dict[str, Any]:
        """For both engines of a request that this one prefills."""
        return {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.setup.port, "bootstrap_room": room}

    # ------------------------------------------------------------------ the engine

    def state(self) -> dict[str, Any]:
        """What its scheduler holds; see ``engine_probe``."""
        return dict(self._call("state"))

    def await_state(self, condition: Callable[[dict[str, Any]], bool], text: str) -> dict[str, Any]:
        until = time.monotonic() + DEADLINE
        while not condition(state := self.state()):
            assert time.monotonic() < until, self._tail(f"{text}: {state}")
            time.sleep(0.02)
        return state

    def settle(self) -> None:
        """Waits until nothing is left of any request, and everything is as it was in the beginning."""
        self._await(lambda: bool(self._call("flush")), "is not idle")
        keys = self.empty.keys() - {"pid", "received_bytes"}
        self.await_state(lambda state: all(state[key] == self.empty[key] for key in keys), f"is not {self.empty}")
        self.take()

    def hold(self) -> None:
        """The next prompt of several chunks stops after its first one, and the engine with it."""
        (self.folder / "hold").touch()

    def await_held(self) -> None:
        self._await((self.folder / "held").exists, "does not come to its second chunk")

    def go_on(self) -> None:
        (self.folder / "held").unlink(missing_ok=True)
        (self.folder / "hold").unlink(missing_ok=True)

    # ------------------------------------------------------------------ its end

    def signal(self, number: int) -> None:
        """To all processes of the engine."""
        os.killpg(self.process.pid, number)

    def close(self) -> None:
        self._pipe.close()
        end(self.process, seconds=20)
        if self._left_behind is not None:
            self._left_behind.unlink(missing_ok=True)

    def _join(self) -> None:
        self.process.wait()
