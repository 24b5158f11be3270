"""The two commands of docs/integrations.md: SGLang's own servers, which warm up by themselves, and plain HTTP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.jobs import SECRET, new_secret_file
from tests.serving.models import PROMPTS
from tests.serving.sglang.conftest import OPTIONS, TOKENS
from tests.serving.sglang.engines import DEADLINE, ENVIRONMENT, end, free_port
from tests.serving.sglang.host import ARGUMENTS

pytestmark = [pytest.mark.serving, pytest.mark.timeout(600)]

START = [sys.executable, "-m", "sglang.launch_server", "--disaggregation-transfer-backend", "torchkv"]
# What a CPU needs besides.
DECODE_ON_CPU = ["--disaggregation-decode-retraction-backup", "cpu_tensor"]


def on_cpu() -> list[str]:
    flags = []
    for name, value in ARGUMENTS.items():
        flag = f"--{name.replace('_', '-')}"
        flags += [flag] if value is True else [flag, str(value)]
    return flags


def post(port: int, request: dict[str, Any]) -> dict[str, Any]:
    call = urllib.request.Request(
        f"http://127.0.0.1:{port}/generate", json.dumps(request).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(call, timeout=DEADLINE) as answer:
        return dict(json.loads(answer.read()))


def is_up(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=20) as answer:
            return answer.status == 200
    except OSError:
        return False


@pytest.fixture
def servers(scratch: Path, llama: str) -> Iterator[tuple[int, int, int]]:
    """The ports of a prefill and of a decode server, and of the former's bootstrap."""
    prefill, decode, bootstrap = free_port(), free_port(), free_port()
    options = {f"TORCHKV_{name}": value for name, value in OPTIONS.items()}
    secret = str(new_secret_file(scratch / "servers-secret"))
    environment = {**os.environ, **ENVIRONMENT, **options, SECRET: secret}
    started = []
    for port, role in (
        (prefill, ["--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(bootstrap)]),
        (decode, ["--disaggregation-mode", "decode", *DECODE_ON_CPU]),
    ):
        log = (scratch / f"server{port}.log").open("wb")
        command = [*START, "--model-path", llama, "--port", str(port), *role, *on_cpu()]
        started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True))
        log.close()
    until = time.monotonic() + DEADLINE
    try:
        for port, server in zip((prefill, decode), started, strict=True):
            while not is_up(port):
                said = (scratch / f"server{port}.log").read_text(errors="replace")[-3000:]
                assert server.poll() is None, said
                assert time.monotonic() < until, said
                time.sleep(0.2)
        yield prefill, decode, bootstrap
    finally:
        for server in started:
            server.terminate()
        for server in started:
            end(server, seconds=20)


def test_the_two_commands(servers: tuple[int, int, int], golden: list[list[int]]) -> None:
    prefill, decode, bootstrap = servers
    for i, prompt in enumerate(PROMPTS):
        request = {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True},
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": bootstrap,
            "bootstrap_room": 700 + i,
        }
        first: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda sent=request, told=first: told.append(post(prefill, sent)))
        thread.start()
        assert post(decode, request)["output_ids"] == golden[i]
        thread.join()
        assert first[0]["output_ids"] == golden[i][:1]
