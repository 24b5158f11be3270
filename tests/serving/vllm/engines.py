"""Real vLLM engines in processes of their own, as tests talk to them."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

from tests.serving.engine_client import EngineClient, new_log
from tests.serving.models import PROMPTS
from tests.serving.vllm import host
from tests.serving.vllm.host import BLOCKS, Finished, Setup

__all__ = ["DEADLINE", "FREE", "LONG", "TOKENS", "Engine", "begin_again", "half_prefilled", "transferred"]

DEADLINE = 120.0  # seconds: two engines share two cores with other tests
FREE = BLOCKS - 1
TOKENS = 8
LONG = PROMPTS[0]  # of five chunks


class Engine(EngineClient[Finished]):
    """A running engine; made at once, ready after `ready`."""

    def __init__(self, setup: Setup, scratch: Path, *, environment: dict[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        super().__init__(ours, new_log(scratch), deadline=DEADLINE)
        self.process = context.Process(target=host.main, args=(setup, theirs, self.log, environment))
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def ready(self, *, fails: bool = False) -> None:
        """Returns when the engine has started; or, if that is expected, when it has failed to."""
        self._await_start(fails=fails)

    # ------------------------------------------------------------------ requests

    def add(self, request: str, prompt: list[int], max_tokens: int, **params: Any) -> None:
        self._call("add", request, prompt, max_tokens, params or None)

    def produce(self, request: str, prompt: list[int], **params: Any) -> None:
        """Prefills for another engine."""
        self.add(request, prompt, 1, do_remote_decode=True, do_remote_prefill=False, **params)

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

    def close(self) -> None:
        self._pipe.close()
        self.process.join(10)
        if self.process.is_alive():
            self.kill()

    def _join(self) -> None:
        self.process.join()


def transferred(prefill: Engine, decode: Engine, name: str = "") -> list[list[int]]:
    """What decode says to `PROMPTS` after prefill's work. name: of the requests, which are p0, d0, ... behind it."""
    found = []
    for i, prompt in enumerate(PROMPTS):
        prefill.produce(f"{name}p{i}", prompt)
        told = prefill.finished(f"{name}p{i}").params
        assert told is not None
        outcome = decode.generate(f"{name}d{i}", prompt, TOKENS, **told)
        assert outcome.computed == TOKENS
        found.append(outcome.tokens)
    return found


def half_prefilled(prefill: Engine, decode: Engine, name: str = "") -> None:
    """Decode waits for `LONG`, of which prefill has computed two chunks, and makes no step.

    name: behind those of the requests, ``p`` and ``d``.
    """
    decode.add(f"d{name}", LONG, TOKENS, do_remote_prefill=True, transfer_id=f"x{name}", **prefill.address())
    decode.await_grant(f"d{name}")
    prefill.steps(2)
    prefill.produce(f"p{name}", LONG, transfer_id=f"x{name}")
    prefill.await_steps()


def begin_again(prefill: Engine, decode: Engine, tokens: list[int]) -> None:
    """The request of `half_prefilled` is preempted, and computed again. tokens: those that decode must say."""
    half_prefilled(prefill, decode)
    prefill.preempt()
    prefill.steps(None)
    assert decode.finished("d").tokens == tokens
    assert prefill.finished("p").computed > len(LONG)
