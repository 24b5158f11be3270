"""Two real vLLM servers on this machine, over torchkv or over vLLM's NIXL connector, or one that does all.

python -m benchmarks.vllm_servers MODEL [--with torchkv nixl single] [--requests 40] [--at-once 8] [--rounds 3] [--pin]

Runs where vLLM is installed. Every request goes to prefill first, then to decode with what prefill returned, as through
a router; with --router, the executable of vllm-router, through that. All answers must be those of the first servers.
The first token's time is counted from when the request goes to prefill until it comes from decode, as it streams.
With --pin each server has one core for all of its processes, so that one server is not given what two have to share.
`--with` may name the same servers more than once, as in `torchkv nixl torchkv nixl`: each is started anew.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOKENS = 8
PROMPTS = [
    [(7 * i) % 500 + 3 for i in range(300)],
    list(range(3, 120)),
    [(11 * i) % 500 + 3 for i in range(33)],
    list(range(64)),
]
PREFILL, DECODE, ROUTER = 18101, 18102, 18100
TORCHKV = {"kv_connector": "TorchKVConnector", "kv_connector_module_path": "torchkv.integrations.vllm"}
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
COMMON = (
    "--enforce-eager --max-model-len 1024 --max-num-seqs 8 --block-size 32 --dtype float32 --skip-tokenizer-init "
    "--max-num-batched-tokens 64 --num-gpu-blocks-override 128 --no-enable-prefix-caching --host 127.0.0.1"
)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


def request(port: int, body: dict[str, Any]) -> urllib.request.Request:
    headers = {"Content-Type": "application/json"}
    return urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), headers)


def post(port: int, body: dict[str, Any]) -> dict[str, Any]:
    with urllib.request.urlopen(request(port, body), timeout=120) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def stream(port: int, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a completion, as they come."""
    with urllib.request.urlopen(request(port, {**body, "stream": True}), timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))


def await_server(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 240
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    raise RuntimeError(f"nothing serves at port {port}")


@contextmanager
def process(command: list[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file:
        started = subprocess.Popen(
            command, stdout=file, stderr=file, env={**os.environ, **ENVIRONMENT, **environment}, start_new_session=True
        )
    try:
        yield started
    finally:
        os.killpg(started.pid, signal.SIGTERM)
        started.wait(60)


def server(
    stack: ExitStack, model: str, port: int, transfer: dict[str, Any] | None, *, core: int | None
) -> subprocess.Popen[bytes]:
    command = [] if core is None else ["taskset", "--cpu-list", str(core)]
    command += [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
    command += COMMON.split()
    if transfer is not None:
        command += ["--kv-transfer-config", json.dumps(transfer)]
    log = Path(tempfile.gettempdir(), f"vllm-{port}.log")
    return stack.enter_context(process(command, log, VLLM_NIXL_SIDE_CHANNEL_PORT=str(port + 100)))


@dataclass(frozen=True)
class Answer:
    """tokens: of one request. first, last: seconds until the first of them came, and the last one."""

    tokens: list[int]
    first: float
    last: float


def ask(how: str, prompt: list[int], model: str) -> Answer:
    began = time.perf_counter()
    body = {"model": model, "prompt": prompt, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    port = ROUTER if how == "router" else DECODE
    if how not in ("single", "router"):
        first = {"do_remote_decode": True, "do_remote_prefill": False}
        body["kv_transfer_params"] = post(PREFILL, {**body, "max_tokens": 1, "kv_transfer_params": first})[
            "kv_transfer_params"
        ]
    tokens: list[int] = []
    at = 0.0
    for event in stream(port, {**body, "max_tokens": TOKENS}):
        if event["choices"] and (more := event["choices"][0].get("token_ids")):
            at = at or time.perf_counter() - began
            tokens += more
    return Answer(tokens, at, time.perf_counter() - began)


def measure(how: str, arguments: argparse.Namespace, golden: list[list[int]]) -> None:
    """golden: the answers of the first servers, which these must equal; filled by the first call."""
    with ExitStack() as stack:
        transfers: dict[int, dict[str, Any] | None] = {DECODE: None}
        if how == "torchkv":
            transfers = {PREFILL: {**TORCHKV, "kv_role": "kv_producer"}, DECODE: {**TORCHKV, "kv_role": "kv_consumer"}}
        elif how == "nixl":
            transfers = {PREFILL: NIXL, DECODE: NIXL}
        servers = {
            port: server(stack, arguments.model, port, transfer, core=number if arguments.pin else None)
            for number, (port, transfer) in enumerate(transfers.items())
        }
        for port, started in servers.items():
            await_server(port, started)
        ways = [how]
        if arguments.router and how != "single":
            urls = ["--prefill", f"http://127.0.0.1:{PREFILL}", "--decode", f"http://127.0.0.1:{DECODE}"]
            command = [arguments.router, "--vllm-pd-disaggregation", *urls, "--kv-connector", "nixl"]
            command += ["--host", "127.0.0.1", "--port", str(ROUTER), "--prometheus-port", "29117"]
            log = Path(tempfile.gettempdir(), "vllm-router.log")
            await_server(ROUTER, stack.enter_context(process(command, log)))
            ways.append("router")
        for way in ways:
            name = how if way == how else f"{how}, router"
            try:
                answers = [ask(way, prompt, arguments.model).tokens for prompt in PROMPTS]
            except urllib.error.HTTPError as error:
                print(f"{name}: {error}; see vllm-*.log in {tempfile.gettempdir()}", flush=True)
                continue
            golden[:] = golden or answers
            run(way, name, arguments, golden)


def run(way: str, name: str, arguments: argparse.Namespace, golden: list[list[int]]) -> None:
    for _ in range(arguments.rounds):
        began = time.perf_counter()
        with ThreadPoolExecutor(arguments.at_once) as pool:
            prompts = [PROMPTS[i % len(PROMPTS)] for i in range(arguments.requests)]
            found = list(pool.map(lambda prompt: ask(way, prompt, arguments.model), prompts))
        seconds = time.perf_counter() - began
        right = sum(answer.tokens == golden[i % len(PROMPTS)] for i, answer in enumerate(found))
        times = []
        for which in ("first", "last"):
            each = [1e3 * getattr(answer, which) for answer in found]
            times.append(f"{which} token {statistics.median(each):5.0f} ms ({max(each):5.0f})")
        rate = f"{len(found) / seconds:5.1f} requests/s"
        print(f"{name:16} {right}/{len(found)} right, {rate}, {', '.join(times)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    ways = ("single", "torchkv", "nixl")
    parser.add_argument("--with", dest="ways", nargs="+", choices=ways, default=ways[:2])
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pin", action="store_true")
    parser.add_argument("--router")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the servers, which spin, must not outlive this process
    golden: list[list[int]] = []
    for how in arguments.ways:
        measure(how, arguments, golden)


if __name__ == "__main__":
    main()
