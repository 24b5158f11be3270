"""Two real vLLM servers on this machine, over torchkv or over vLLM's NIXL connector, or one that does all.

python -m benchmarks.vllm_servers MODEL [--with torchkv nixl single wide] [--at-once 8 | --rate 2.5] [--rounds 3]

Runs where vLLM is installed. Every request goes to prefill first, then to decode with what prefill returned, as through
a router; with --router, the executable of vllm-router, through that. Over torchkv, then also to both at once, so that
pages leave while the prompt is computed. All answers must be those of the first servers.
The first token's time is counted from when the request goes to prefill until it comes from decode, as it streams.
With --pin each server has one core for all of its processes, so that one server is not given what two have to share;
``wide`` is one server that has both cores, and a thread of its forwards on each.
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
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

ONE = ("single", "wide")
PREFILL, DECODE, ROUTER = 18101, 18102, 18100
TORCHKV = {"kv_connector": "TorchKVConnector", "kv_connector_module_path": "torchkv.integrations.vllm"}
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
COMMON = (
    "--enforce-eager --max-model-len 2048 --max-num-seqs 8 --block-size 32 --dtype float32 --skip-tokenizer-init "
    "--num-gpu-blocks-override 512 --no-enable-prefix-caching --host 127.0.0.1"
)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
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
    stack: ExitStack, model: str, port: int, transfer: dict[str, Any] | None, *, step: int, cores: list[int]
) -> subprocess.Popen[bytes]:
    """cores: what all its processes may run on, as many as its forwards have threads; empty: all, and one thread."""
    command = ["taskset", "--cpu-list", ",".join(map(str, cores))] if cores else []
    command += [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
    command += [*COMMON.split(), "--max-num-batched-tokens", str(step)]
    if transfer is not None:
        command += ["--kv-transfer-config", json.dumps(transfer)]
    log = Path(tempfile.gettempdir(), f"vllm-{port}.log")
    environment = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port + 100), "OMP_NUM_THREADS": str(max(1, len(cores)))}
    return stack.enter_context(process(command, log, **environment))


@dataclass(frozen=True)
class Load:
    """prompts: their token ids; request i has prompt i modulo their number, and asks for ``tokens`` tokens."""

    model: str
    prompts: list[list[int]]
    tokens: int


@dataclass(frozen=True)
class Answer:
    """tokens: of one request. first, last: seconds until the first of them came, and the last one.

    params: what prefill has answered.
    """

    tokens: list[int]
    first: float
    last: float
    params: dict[str, Any] | None


def arrivals(requests: int, rate: float | None) -> list[float]:
    """The seconds at which they arrive, ``rate`` a second on average, independently; all at 0 without a rate."""
    random = Random(0)
    return list(accumulate(random.expovariate(rate) if rate else 0.0 for _ in range(requests)))


def ask(how: str, load: Load, number: int, due: float = 0.0, *, prefill: dict[str, Any] | None = None) -> Answer:
    """due: on ``perf_counter``; it waits until then. prefill: what it has said before, if decode is asked at once."""
    time.sleep(max(0.0, due - time.perf_counter()))
    began = time.perf_counter()
    prompt = load.prompts[number % len(load.prompts)]
    body = {"model": load.model, "prompt": prompt, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    remote: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
    first = {**body, "max_tokens": 1, "kv_transfer_params": remote}
    params = None
    if prefill is not None:
        remote["transfer_id"] = uuid.uuid4().hex
        params = {**prefill, "transfer_id": remote["transfer_id"]}
        Thread(target=post, args=(PREFILL, first)).start()
    elif how not in (*ONE, "router"):
        params = post(PREFILL, first)["kv_transfer_params"]
    if params is not None:
        body["kv_transfer_params"] = params
    found: list[int] = []
    at = 0.0
    for event in stream(ROUTER if how == "router" else DECODE, {**body, "max_tokens": load.tokens}):
        if event["choices"] and (more := event["choices"][0].get("token_ids")):
            at = at or time.perf_counter() - began
            found += more
    return Answer(found, at, time.perf_counter() - began, params)


def measure(how: str, load: Load, arguments: argparse.Namespace, golden: list[list[int]]) -> None:
    """golden: the answers of the first servers, which these must equal; filled by the first call."""
    with ExitStack() as stack:
        transfers: dict[int, dict[str, Any] | None] = {DECODE: None}
        if how == "torchkv":
            transfers = {PREFILL: {**TORCHKV, "kv_role": "kv_producer"}, DECODE: {**TORCHKV, "kv_role": "kv_consumer"}}
        elif how == "nixl":
            transfers = {PREFILL: NIXL, DECODE: NIXL}
        cores = [[0, 1]] if how == "wide" else [[0], [1]]
        servers = {
            port: server(stack, load.model, port, transfer, step=arguments.step, cores=own if arguments.pin else [])
            for (port, transfer), own in zip(transfers.items(), cores, strict=False)
        }
        for port, started in servers.items():
            await_server(port, started)
        ways = [how]
        if arguments.router and how not in ONE:
            urls = ["--prefill", f"http://127.0.0.1:{PREFILL}", "--decode", f"http://127.0.0.1:{DECODE}"]
            command = [arguments.router, "--vllm-pd-disaggregation", *urls, "--kv-connector", "nixl"]
            command += ["--host", "127.0.0.1", "--port", str(ROUTER), "--prometheus-port", "29117"]
            log = Path(tempfile.gettempdir(), "vllm-router.log")
            await_server(ROUTER, stack.enter_context(process(command, log)))
            ways.append("router")
        if how == "torchkv":
            ways.append("at once")
        answers: list[Answer] = []
        for way in ways:
            name = how if way == how else f"{how}, {way}"
            prefill = answers[0].params if way == "at once" else None
            try:
                answers = [ask(way, load, number, prefill=prefill) for number in range(len(load.prompts))]
            except urllib.error.HTTPError as error:
                print(f"{name}: {error}; see vllm-*.log in {tempfile.gettempdir()}", flush=True)
                continue
            golden[:] = golden or [answer.tokens for answer in answers]
            run(way, name, load, arguments, golden, prefill)


def run(
    way: str,
    name: str,
    load: Load,
    arguments: argparse.Namespace,
    golden: list[list[int]],
    prefill: dict[str, Any] | None,
) -> None:
    due = arrivals(arguments.requests, arguments.rate)
    for _ in range(arguments.rounds):
        began = time.perf_counter()
        with ThreadPoolExecutor(len(due) if arguments.rate else arguments.at_once) as pool:
            asked = [
                pool.submit(ask, way, load, number, began + late, prefill=prefill) for number, late in enumerate(due)
            ]
            found = [answer.result() for answer in asked]
        seconds = time.perf_counter() - began
        right = sum(answer.tokens == golden[i % len(golden)] for i, answer in enumerate(found))
        times = []
        for which in ("first", "last"):
            each = [1e3 * getattr(answer, which) for answer in found]
            times.append(f"{which} token {statistics.median(each):5.0f} ms ({max(each):5.0f})")
        rate = f"{len(found) / seconds:5.1f} requests/s"
        print(f"{name:16} {right}/{len(found)} right, {rate}, {', '.join(times)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    ways = (*ONE, "torchkv", "nixl")
    parser.add_argument("--with", dest="ways", nargs="+", choices=ways, default=["single", "torchkv"])
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--prompts", type=int, nargs="+", default=[300, 117, 33, 64], help="their lengths, in tokens")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--step", type=int, default=64, help="tokens of one forward at most")
    parser.add_argument("--rate", type=float, help="arrivals a second on average, at random, instead of --at-once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pin", action="store_true")
    parser.add_argument("--router")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the servers, which spin, must not outlive this process
    golden: list[list[int]] = []
    prompts = [[(7 + 4 * n) * i % 500 + 3 for i in range(length)] for n, length in enumerate(arguments.prompts)]
    load = Load(arguments.model, prompts, arguments.tokens)
    for how in arguments.ways:
        measure(how, load, arguments, golden)


if __name__ == "__main__":
    main()
