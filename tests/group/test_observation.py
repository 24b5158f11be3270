"""Real groups that are watched: dumps of failures and on a signal, metrics over HTTP, ranges for profilers, logs."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.helpers.harness import Ranks, kv_group
from tests.helpers.ranks.small_cache import check_transfer, meet, random_cache
from torchkv import ProtocolError, TransferTimeout, TransportUnavailable
from torchkv.observe.dump_format import read_dump
from torchkv.observe.waits import latest, sentences
from torchkv.trace import read

WRITER, READER = range(2)
INSTANCES = ("prefill", "decode")


@pytest.fixture
def two(shared_ranks: Callable[..., Ranks]) -> Ranks:
    return shared_ranks("two", 2)


def files(folder: str, count: int) -> list[Path]:
    """The dumps in ``folder``, once there are so many: a thread writes them."""
    deadline = time.monotonic() + 20
    while len(found := sorted(Path(folder).glob("*.json"))) < count and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def hang(folder: str) -> None:
    with kv_group(dump_dir=folder) as kv:
        kv.register(random_cache(), instance=INSTANCES[kv.rank()])
        check_transfer(kv, WRITER, READER)
        if kv.rank() == WRITER:
            kv.send_layer("r7", 0, [1, 2, 3], READER).wait(20)
            meet(kv)
            os.kill(os.getpid(), signal.SIGUSR2)
        else:
            received = kv.recv_pages("r7", [4, 5, 6], WRITER)
            meet(kv)
            with pytest.raises(TransferTimeout):
                received.wait(1.0)
        files(folder, 2)
        meet(kv)


def test_a_wait_in_vain_and_a_signal_dump_what_tells_who_waits_for_whom(two: Ranks, tmp_path: Path) -> None:
    two.run(hang, str(tmp_path))
    dumps = latest(read(files(str(tmp_path), 2)))
    assert [(each.instance, each.rank) for each in dumps] == [("decode", READER), ("prefill", WRITER)]
    assert dumps[0].reason == "recv_pages('r7'): not complete after wait(1 s)"
    assert dumps[1].reason == "signal SIGUSR2"
    (told,) = sentences(dumps)
    pattern = (
        r"decode rank 1 waits for request 'r7', \d+\.\d s old: prefill rank 0 has not called finish; "
        r"last verb send_layer 0, \d+\.\d s ago"
    )
    assert re.fullmatch(pattern, told), told
    # The loop serves it: what it has copied is seen, though Python was told of nothing.
    (receive,) = dumps[0].receives or []
    assert receive.writers[0].missing == "layer 1, token 0 after the prefix"
    verbs = [entry.verb for entry in dumps[1].entries]
    assert verbs[-1] == "send_layer"
    assert "finish" in verbs


def fail(folder: str) -> None:
    with kv_group(dump_dir=folder, grant_timeout=0.3) as kv:
        kv.register(random_cache(), instance=INSTANCES[kv.rank()])
        if kv.rank() == WRITER:
            work = kv.send_layer("r", 0, [1], READER)
            with pytest.raises(TransferTimeout):
                work.wait(20)
            (path,) = files(folder, 1)
            made = read_dump(path.read_bytes(), str(path))
            assert made.reason.startswith("send_layer('r') failed: TransferTimeout: ")
            assert [(each.request, each.state) for each in made.sends or []] == [("r", "failed")]
            assert made.entries[-1].state == "failed"
            assert path.stat().st_mode & 0o077 == 0
        meet(kv)


def test_a_request_that_fails_is_dumped(two: Ranks, tmp_path: Path) -> None:
    two.run(fail, str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 1


def on_demand(folder: str) -> None:
    with kv_group(flight_recorder=8) as kv:
        kv.register(random_cache(), instance=INSTANCES[kv.rank()])
        for number in range(6):
            check_transfer(kv, WRITER, READER, request=f"r{number}")
        with pytest.raises(ProtocolError, match="dump: give a folder"):
            kv.dump()
        path = kv.dump(folder)
        made = read_dump(path.read_bytes(), str(path))
        assert len(made.entries) == (8 if kv.rank() == WRITER else 6)
        assert made.entries[-1].request == "r5"
        assert {entry.state for entry in made.entries} == {"completed"}
        assert {entry.path for entry in made.entries} <= {"direct", "none"}
        meet(kv)
    with kv_group() as kv:
        kv.register(random_cache())
        check_transfer(kv, WRITER, READER)
        with pytest.raises(ProtocolError, match="nothing is recorded"):
            kv.dump(folder)
        assert sum((kv.stats().sends | kv.stats().receives).values()) == 1
        meet(kv)


def test_dumps_on_demand(two: Ranks, tmp_path: Path) -> None:
    two.run(on_demand, str(tmp_path))
    assert sentences(latest(read([tmp_path]))) == []


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
        return text


def serve() -> int:
    pytest.importorskip("prometheus_client")
    with kv_group(metrics_port=0) as kv, kv_group(metrics_port=0) as other:
        kv.register(random_cache(), instance=INSTANCES[kv.rank()])
        other.register(random_cache())
        check_transfer(kv, WRITER, READER)
        meet(kv)
        observation = kv._observation
        assert observation is not None
        assert observation._service is not None
        port = observation._service.port
        text = scrape(port)
        role = "send" if kv.rank() == WRITER else "receive"
        labels = f'group="{kv.group_name}",instance="{INSTANCES[kv.rank()]}"'
        assert f'torchkv_requests_total{{{labels},outcome="success",rank="{kv.rank()}",role="{role}"}} 1.0' in text
        assert f'group="{other.group_name}"' in text  # one server for all groups of the process
        meet(kv)
    with pytest.raises(OSError, match=r"refused|Connection"):
        scrape(port)
    return port


def test_metrics_are_served_until_the_last_group_ends(two: Ranks) -> None:
    pytest.importorskip("prometheus_client", reason="pip install 'torchkv[metrics]'")
    ports = two.run(serve)
    assert len(set(ports)) == 2


def taken(port: int) -> None:
    with kv_group(metrics_port=port) as kv:
        with pytest.raises(TransportUnavailable, match=r"Options\.metrics_port: nothing can listen on 127\.0\.0\.1"):
            kv.register(random_cache())
        meet(kv)


def test_a_port_that_is_taken_fails_register_on_all_ranks(two: Ranks) -> None:
    pytest.importorskip("prometheus_client", reason="pip install 'torchkv[metrics]'")
    with socket.create_server(("127.0.0.1", 0)) as held:
        two.run(taken, held.getsockname()[1])  # rank 0's; rank 1's is the next one


def profiled() -> None:
    with kv_group(flight_recorder=64) as kv:
        kv.register(random_cache())
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            check_transfer(kv, WRITER, READER)
        names = {event.name for event in profile.events()}
        wanted = {"torchkv::send_pages", "torchkv::finish"} if kv.rank() == WRITER else {"torchkv::recv_pages"}
        assert wanted <= names
        check_transfer(kv, WRITER, READER)  # without a profiler
        meet(kv)


def test_verbs_are_ranges_while_a_profiler_is_on(two: Ranks) -> None:
    two.run(profiled)


def test_the_trace_of_requests_comes_with_torch_logs() -> None:
    code = "import torch, torchkv, logging; logging.getLogger('torchkv.request').debug('a request passes')"
    lines = {}
    for value in ("+torchkv", "torchkv"):
        environment = {**os.environ, "TORCH_LOGS": value}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True, env=environment
        )
        lines[value] = done.stderr
    assert "a request passes" in lines["+torchkv"]
    assert "a request passes" not in lines["torchkv"]
