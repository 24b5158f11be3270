"""Engines that several tests share. Without vLLM everything here is skipped, unless TORCHKV_TEST_ENGINES is set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.jobs import SECRET, new_secret_file
from tests.serving.engine_client import require
from tests.serving.models import save_gated_delta_net, save_llama, save_mamba2, save_mla, save_sliding
from tests.serving.vllm.engines import Engine
from tests.serving.vllm.host import Setup

OPTIONS: dict[str, Any] = {"timeout": 20.0, "grant_timeout": 60.0, "staging_recv": 1 << 24, "staging_send": 1 << 23}

Start = Callable[..., Engine]


@pytest.fixture(autouse=True, scope="session")
def _vllm() -> None:
    require("vllm")


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory, _vllm: None) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def llama(scratch: Path) -> str:
    return save_llama(scratch / "llama")


@pytest.fixture(scope="session")
def mla(scratch: Path) -> str:
    return save_mla(scratch / "mla")


@pytest.fixture(scope="session")
def sliding(scratch: Path) -> str:
    return save_sliding(scratch / "sliding")


@pytest.fixture(scope="session")
def gated_delta_net(scratch: Path) -> str:
    return save_gated_delta_net(scratch / "gated-delta-net")


@pytest.fixture(scope="session")
def mamba2(scratch: Path) -> str:
    return save_mamba2(scratch / "mamba2")


@pytest.fixture(scope="session")
def mamba2_groups(scratch: Path) -> str:
    return save_mamba2(scratch / "mamba2-groups", groups=2)


@pytest.fixture(scope="session")
def start(scratch: Path, llama: str) -> Iterator[Start]:
    """Starts engines; they end with the tests."""
    secret = new_secret_file(scratch / "secret")
    engines: list[Engine] = []

    def begin(
        instance: str,
        *,
        role: str = "kv_both",
        model: str | None = None,
        extra: dict[str, Any] | None = None,
        **how: Any,
    ) -> Engine:
        settings = {"instance": instance, **OPTIONS, **(extra or {})}
        setup = Setup(model=model or llama, role=role, extra=settings, **how)
        engines.append(Engine(setup, scratch, environment={SECRET: str(secret)}))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def pair(start: Start) -> tuple[Engine, Engine]:
    """An engine that prefills and one that decodes, for tests that harm neither."""
    prefill, decode = start("prefill-0", role="kv_producer"), start("decode-0", role="kv_consumer")
    prefill.ready()
    decode.ready()
    return prefill, decode


@pytest.fixture
def engines(pair: tuple[Engine, Engine]) -> Iterator[tuple[Engine, Engine]]:
    """The shared pair: nothing is left of a test in its engines."""
    yield pair
    for engine in pair:
        engine.settle()
        assert engine.counters()["quarantined"] == {}
