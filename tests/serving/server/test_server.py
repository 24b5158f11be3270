"""The example server over real HTTP: right tokens, clients that hang up, workers that are killed, stop, and join.

Its processes take seconds to start, so all tests share them. Those that end workers come last and build on one another.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the example server needs extra 'server'")
pytest.importorskip("uvicorn", reason="the example server needs extra 'server'")
pytest.importorskip("httpx", reason="the example server needs extra 'server'")
pytest.importorskip("transformers", reason="the example server needs extra 'server'")

import httpx

from tests.helpers.jobs import new_secret_file
from tests.serving.server.cluster import Cluster, await_true
from tests.serving.server.one_process import OneProcess

PAGE, PAGE_NBYTES = 16, 4 * 2 * 16 * 4 * 16 * 4  # layers, K and V, tokens, heads, dim, float32
LONG = 300
pytestmark = pytest.mark.timeout(300)  # processes that import torch and transformers, on busy machines

STARTED = ("prefill-a", "decode-a", "decode-b")

# Of several steps of a prefill, of many pages, of whole pages, of one page; of one token, of which nothing is sent.
PROMPTS: list[str | list[int]] = [
    [(7 * i) % 250 + 3 for i in range(600)],
    "The tide mill turns when the pond is full, and stops when the sea has come back to it. " * 2,
    [(11 * i) % 250 + 3 for i in range(65)],
    "grüße, 世界",
    [42],
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(new_secret_file(tmp_path_factory.mktemp("secret") / "secret"))
    try:
        made.await_router()
        made.start(*STARTED)
        made.await_workers(*STARTED)
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def alone() -> OneProcess:
    return OneProcess()


@pytest.fixture(autouse=True)
def _nothing_left(cluster: Cluster) -> Iterator[None]:
    """After each test all blocks are free, on both sides."""
    yield
    cluster.await_idle()


@pytest.fixture(scope="module")
def expected(alone: OneProcess) -> list[int]:
    return alone(PROMPTS[1], LONG)


def test_tokens_and_text_are_those_of_one_process(cluster: Cluster, alone: OneProcess) -> None:
    golden = [alone(prompt, 12) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in golden}) == len(PROMPTS)
    before = cluster.status()["moved"]
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        streamed = list(threads.map(lambda prompt: cluster.streamed(prompt, 12), PROMPTS))
    whole = [cluster.complete(prompt, 12, return_token_ids=True).json() for prompt in PROMPTS]
    assert [tokens for tokens, _ in streamed] == golden
    assert [text for _, text in streamed] == [alone.tokenizer.decode(tokens) for tokens in golden]
    assert [answer["choices"][0]["token_ids"] for answer in whole] == golden
    assert [answer["choices"][0]["text"] for answer in whole] == [text for _, text in streamed]

    lengths = [answer["usage"]["prompt_tokens"] for answer in whole]
    assert lengths == [600, 175, 65, len("grüße, 世界".encode()) + 1, 1]
    pages = sum(-(-(length - 1) // PAGE) for length in lengths)  # the last token is computed where it decodes
    await_true(lambda: cluster.status()["moved"] == before + 2 * pages * PAGE_NBYTES)


@pytest.mark.parametrize("more", [{"temperature": 0}, {"stream_options": {"include_usage": True}, "stream": True}])
def test_an_openai_client_gets_what_it_expects(cluster: Cluster, more: dict[str, object]) -> None:
    (model,) = cluster.client.get("/v1/models").json()["data"]
    answer = cluster.complete("hello", 3, model=model["id"], **more)
    assert answer.status_code == 200
    assert '"completion_tokens":3' in answer.text.replace(" ", "")


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"temperature": 0.7}, "temperature"),
        ({"stop": ["x"]}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 3000}, "2048"),
        ({"model": "gpt"}, "gpt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [9999]}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
    ],
)
def test_what_is_not_served_is_refused(cluster: Cluster, more: dict[str, object], named: str) -> None:
    asked = {"prompt": "hello", "max_tokens": 2, **more}
    answer = cluster.client.post("/v1/completions", json=asked)
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]


def test_who_has_no_secret_is_no_worker_and_reaches_none(cluster: Cluster) -> None:
    worker = cluster.workers()["prefill-a"]
    work = {"name": "x", "prompt": [1, 2], "max_tokens": 1}
    forged = {"x-torchkv-time": "0", "x-torchkv-mac": "0" * 64}
    for headers in ({}, forged, {**forged, "x-torchkv-time": "nan"}):
        assert cluster.client.post("/workers", json=worker, headers=headers).status_code == 401
        assert cluster.client.post("/workers/leave", json=worker, headers=headers).status_code == 401
        for route in ("prefill", "decode", "cancel"):
            assert httpx.post(f"{worker['url']}/{route}", json=work, headers=headers).status_code == 401
    assert cluster.client.post("/v1/completions", content=iter([b"x"])).status_code == 413


def test_the_status_page_is_whole_in_itself(cluster: Cluster) -> None:
    page = cluster.client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert not re.search(r"(src|href)=|https?:|innerHTML", page.text), "nothing from elsewhere, no text taken for HTML"
    status = cluster.status()
    assert {worker["role"] for worker in status["workers"]} == {"prefill", "decode"}
    for name in re.findall(r"status\.(\w+)", page.text):
        assert name in status or name in {"workers", "requests"}, name
    for name in re.findall(r"worker\.(\w+)", page.text):
        assert all(name in worker for worker in status["workers"]), name


def test_the_status_page_is_live_in_chromium(cluster: Cluster, tmp_path: Path) -> None:
    if importlib.util.find_spec("PySide6") is None:
        pytest.skip("no browser: pip install pyside6-webengine")
    environment = {
        **os.environ,
        "QT_QPA_PLATFORM": "offscreen",
        "QTWEBENGINE_DISABLE_SANDBOX": "1",  # which root cannot have
        "QTWEBENGINE_CHROMIUM_FLAGS": "--disable-gpu",
    }
    picture = tmp_path / "status.png"
    command = [sys.executable, str(Path(__file__).with_name("browser.py")), cluster.url, str(picture)]
    with cluster.stream(PROMPTS[1], 1500) as events:
        next(events)
        seen = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=60)
    assert seen.returncode == 0, seen.stderr
    before, after = seen.stdout.split("THEN\n")
    for text in (before, after):
        assert "live, " in text
        for instance in cluster.workers():
            assert f"\n{instance}\t" in text
    assert picture.stat().st_size > 10_000


def test_a_client_that_hangs_up_frees_its_pages(cluster: Cluster) -> None:
    cancelled = cluster.status()["requests"]["cancelled"]
    with cluster.stream(PROMPTS[0], 1400) as events:  # longer than workers take to report their pages
        next(events)
        await_true(lambda: any(worker["free"] < worker["blocks"] for worker in cluster.workers().values()))
    cluster.await_idle()
    requests = cluster.status()["requests"]
    assert (requests["cancelled"], requests["running"]) == (cancelled + 1, 0)


def test_clients_that_hang_up_at_any_time_leave_nothing(cluster: Cluster, alone: OneProcess) -> None:
    """Before the prompt is computed, while pages move, before the first token, without a stream. Others are served."""

    def hang_up(after: float) -> None:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{cluster.url}/v1/completions", json={"prompt": PROMPTS[0], "max_tokens": 900}, timeout=after)

    with ThreadPoolExecutor(8) as threads:
        gone = [threads.submit(hang_up, 0.01 + 0.02 * number) for number in range(16)]
        served = threads.submit(cluster.streamed, PROMPTS[2], 20)
        for each in gone:
            each.result()
        assert served.result()[0] == alone(PROMPTS[2], 20)
    cluster.await_idle()


def test_a_decode_worker_is_killed_and_another_joins(cluster: Cluster, expected: list[int]) -> None:
    """What it streamed goes on where it stopped; the other worker's stream is not disturbed."""
    retried = cluster.status()["requests"]["retried"]
    with cluster.stream(PROMPTS[1], LONG) as mine, cluster.stream(PROMPTS[1], LONG) as other:
        tokens, others = [[next(events)["choices"][0]["token_ids"][0]] for events in (mine, other)]
        cluster.kill("decode-a")
        for found, events in ((tokens, mine), (others, other)):
            found += [token for event in events for token in event["choices"][0]["token_ids"]]
    assert tokens == expected
    assert others == expected
    assert cluster.status()["requests"]["retried"] == retried + 1
    assert "decode-a" not in cluster.workers()
    cluster.start("decode-a")  # a new life under the old name
    cluster.await_workers("decode-a")
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(lambda prompt: cluster.streamed(prompt, LONG)[0], [PROMPTS[1]] * 2))
    assert answers == [expected] * 2
    await_true(lambda: cluster.workers()["decode-a"]["moved"] > 0)


def test_a_prefill_worker_stops_and_its_pages_are_quarantined(cluster: Cluster, expected: list[int]) -> None:
    """It may still write while it is stopped. Requests go on without it; its pages come back once it answers."""
    cluster.processes["prefill-a"].send_signal(signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as threads:
            served = threads.submit(cluster.streamed, PROMPTS[1], LONG)
            await_true(lambda: sum(worker["quarantined"] for worker in cluster.workers().values()) == 11)
            assert served.result()[0] == expected
        assert "prefill-a" not in cluster.workers()
    finally:
        cluster.processes["prefill-a"].send_signal(signal.SIGCONT)
    cluster.await_workers("prefill-a")
    cluster.await_idle()
    assert all(worker["quarantined"] == 0 for worker in cluster.workers().values())


def test_a_worker_that_is_told_to_end_finishes_what_it_has(cluster: Cluster, expected: list[int]) -> None:
    retried = cluster.status()["requests"]["retried"]
    with cluster.stream(PROMPTS[1], LONG) as mine, cluster.stream(PROMPTS[1], LONG) as other:
        streams = [[next(events)["choices"][0]["token_ids"][0]] for events in (mine, other)]
        cluster.processes["decode-b"].terminate()
        for tokens, events in zip(streams, (mine, other), strict=True):
            tokens += [token for event in events for token in event["choices"][0]["token_ids"]]
    assert streams == [expected] * 2
    assert cluster.processes.pop("decode-b").wait(60) == 0
    assert "decode-b" not in cluster.workers()
    assert cluster.status()["requests"]["retried"] == retried


def test_without_a_decode_worker_requests_fail_and_say_so(cluster: Cluster, expected: list[int]) -> None:
    with cluster.stream(PROMPTS[1], LONG) as events, ThreadPoolExecutor(1) as threads:
        next(events)
        cluster.kill("decode-a")
        late = threads.submit(cluster.complete, "hello", 2)
        *_, last = events
        assert last["error"]["type"] == "service_unavailable"
        answer = late.result()
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "there is no decode worker"
    cluster.start("decode-c", "prefill-c")
    cluster.await_workers("decode-c", "prefill-c")
    assert cluster.streamed(PROMPTS[1], LONG)[0] == expected


def test_a_prefill_worker_is_killed(cluster: Cluster, alone: OneProcess) -> None:
    """Requests that it had go on with the one that has joined."""
    golden = alone(PROMPTS[0], 8)
    with ThreadPoolExecutor(6) as threads:
        begun = [threads.submit(cluster.streamed, PROMPTS[0], 8) for _ in range(6)]
        await_true(lambda: cluster.workers()["prefill-a"]["running"] > 0 or all(each.done() for each in begun))
        cluster.kill("prefill-a")
        assert [each.result()[0] for each in begun] == [golden] * 6
    assert cluster.streamed(PROMPTS[0], 8)[0] == golden
    assert list(cluster.workers()) == ["decode-c", "prefill-c"]
    await_true(lambda: cluster.workers()["prefill-c"]["moved"] >= 38 * PAGE_NBYTES)
