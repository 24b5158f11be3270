"""The example server with workers on GPUs: tokens of one process, and a worker that is killed.

All of it runs with workers on the CPU too, so that the test itself is tested where there are no GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.helpers.jobs import new_secret_file
from tests.helpers.ranks.gpu_pair import needs_gpus

pytest.importorskip("fastapi", reason="the example server needs extra 'server'")
pytest.importorskip("uvicorn", reason="the example server needs extra 'server'")
pytest.importorskip("httpx", reason="the example server needs extra 'server'")
pytest.importorskip("transformers", reason="the example server needs extra 'server'")

from tests.serving.server.cluster import Cluster, await_true
from tests.serving.server.one_process import OneProcess

pytestmark = pytest.mark.timeout(600)

# Of several steps of a prefill, of whole pages, of one page; of one token, of which nothing is sent.
PROMPTS: list[str | list[int]] = [
    [(7 * i) % 250 + 3 for i in range(600)],
    [(11 * i) % 250 + 3 for i in range(65)],
    "grüße, 世界",
    [42],
]
DEVICES = [
    pytest.param(("cuda:0", "cuda:1"), id="gpus", marks=needs_gpus(2)),
    pytest.param(("cpu", "cpu"), id="host"),
]


@pytest.fixture(scope="module", params=DEVICES)
def devices(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


@pytest.fixture(scope="module")
def cluster(devices: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(new_secret_file(tmp_path_factory.mktemp("secret") / "secret"))
    try:
        made.await_router()
        for instance, device in zip(("prefill-a", "decode-a"), devices, strict=True):
            made.start(instance, device=device)
        made.await_workers("prefill-a", "decode-a")
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def golden(devices: tuple[str, str]) -> list[list[int]]:
    alone = OneProcess(devices[1])
    return [alone(prompt, 12) for prompt in PROMPTS]


def test_tokens_are_those_of_one_process(cluster: Cluster, golden: list[list[int]]) -> None:
    before = cluster.status()["moved"]
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        streamed = list(threads.map(lambda prompt: cluster.streamed(prompt, 12), PROMPTS))
    assert [tokens for tokens, _ in streamed] == golden
    await_true(lambda: cluster.status()["moved"] > before)
    cluster.await_idle()


def test_a_killed_worker_and_its_successor(cluster: Cluster, devices: tuple[str, str], golden: list[list[int]]) -> None:
    cluster.kill("prefill-a")
    cluster.start("prefill-b", device=devices[0])
    cluster.await_workers("prefill-b")
    await_true(lambda: "prefill-a" not in cluster.workers())
    assert [cluster.streamed(prompt, 12)[0] for prompt in PROMPTS] == golden
    cluster.await_idle()
