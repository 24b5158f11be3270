"""The example server in processes of its own, as its users start them: a router, and workers that come and go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.helpers.jobs import SECRET

ROOT = Path(__file__).parents[3]
DEADLINE = 100.0


class Cluster:
    """Its processes. url: of the router."""

    def __init__(self, secret: Path) -> None:
        self._environment = {**os.environ, SECRET: str(secret), "OMP_NUM_THREADS": "1"}
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self._run("router", "router", "--port", "0", "--patience", "1", stdout=subprocess.PIPE)
        self.url = ""
        self.client = httpx.Client(timeout=DEADLINE)

    def await_router(self) -> None:
        self.url = self.processes["router"].stdout.readline().rpartition(" ")[2].strip()
        self.client.base_url = httpx.URL(self.url)

    def start(self, *instances: str, device: str = "cpu") -> None:
        """Workers, whose names begin with their role. Returns at once: see `await_workers`."""
        for instance in instances:
            role, worker = instance.partition("-")[0], ["--instance", instance, "--blocks", "128", "--device", device]
            self._run(instance, role, "--router", self.url, *worker)

    def await_workers(self, *instances: str) -> None:
        await_true(lambda: set(self.workers()) >= set(instances))

    def kill(self, instance: str) -> None:
        self.processes[instance].kill()
        self.processes.pop(instance).wait()

    def close(self) -> None:
        """Ends all workers, then the router, as a user would. Raises if one of them fails."""
        self.client.close()
        order = sorted(self.processes.items(), key=lambda item: item[0] == "router")
        for _, process in order:
            process.terminate()
        codes = {}
        for name, process in order:
            try:
                codes[name] = process.wait(DEADLINE)
            except subprocess.TimeoutExpired:
                process.kill()
                codes[name] = process.wait()
        self.processes["router"].stdout.close()
        assert set(codes.values()) == {0}, codes

    # ------------------------------------------------------------------ what it says

    def status(self) -> dict[str, Any]:
        return self.client.get("/status").raise_for_status().json()

    def workers(self) -> dict[str, dict[str, Any]]:
        return {worker["instance"]: worker for worker in self.status()["workers"]}

    def await_idle(self) -> None:
        """Waits until all blocks of all workers are free, and nobody holds a request."""
        last: list[Any] = []

        def idle() -> bool:
            last[:] = self.workers().values()
            return all(worker["free"] == worker["blocks"] and not worker["running"] for worker in last)

        await_true(idle, lambda: f"{last}")

    # ------------------------------------------------------------------ requests

    def complete(self, prompt: str | list[int], tokens: int, **more: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": tokens, **more})

    @contextmanager
    def stream(self, prompt: str | list[int], tokens: int) -> Iterator[Iterator[dict[str, Any]]]:
        """What comes, event by event. Leaving it hangs up."""
        asked = {"prompt": prompt, "max_tokens": tokens, "stream": True, "return_token_ids": True}
        with self.client.stream("POST", "/v1/completions", json=asked) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            yield _events(response)

    def streamed(self, prompt: str | list[int], tokens: int) -> tuple[list[int], str]:
        """The tokens and the text of a whole stream."""
        with self.stream(prompt, tokens) as events:
            choices = [event["choices"][0] for event in events]
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1]["finish_reason"] == "length"
        assert all(len(choice["token_ids"]) == 1 for choice in choices), "each token comes by itself"
        return [choice["token_ids"][0] for choice in choices], "".join(choice["text"] for choice in choices)

    # ------------------------------------------------------------------ inside

    def _run(self, name: str, *arguments: str, stdout: int | None = None) -> None:
        command = [sys.executable, "-m", "examples.server", *arguments]
        self.processes[name] = subprocess.Popen(command, cwd=ROOT, env=self._environment, text=True, stdout=stdout)


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    lines = (line for line in response.iter_lines() if line)
    for line in lines:
        assert line.startswith("data: "), line
        if line == "data: [DONE]":
            assert list(lines) == []
            return
        yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream ended without [DONE]")


def await_true(condition: Callable[[], bool], report: Callable[[], str] = str) -> None:
    until = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < until, report()
        time.sleep(0.05)
