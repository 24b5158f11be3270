"""Engines that several tests share. Without SGLang everything here is skipped, unless TORCHKV_TEST_ENGINES is set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.jobs import SECRET, new_secret_file
from tests.serving.engine_client import require
from tests.serving.models import PROMPTS, save_llama
from tests.serving.sglang.engines import Engine, free_port
from tests.serving.sglang.host import Setup

OPTIONS = {"TIMEOUT": "20", "GRANT_TIMEOUT": "60", "STAGING_RECV": str(1 << 24), "STAGING_SEND": str(1 << 23)}
TOKENS = 8

Start = Callable[..., Engine]


@pytest.fixture(autouse=True, scope="session")
def _sglang() -> None:
    require("sglang")


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory, _sglang: None) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def llama(scratch: Path) -> str:
    return save_llama(scratch / "llama")


@pytest.fixture(scope="session")
def start(scratch: Path, llama: str) -> Iterator[Start]:
    """Starts engines; they end with the tests."""
    options = {f"TORCHKV_{name}": value for name, value in OPTIONS.items()}
    environment = {SECRET: str(new_secret_file(scratch / "secret")), **options}
    engines: list[Engine] = []

    def begin(mode: str, *, port: int | None = None, tp_size: int = 1, **extra: Any) -> Engine:
        setup = Setup(model=llama, mode=mode, port=port or free_port(), tp_size=tp_size, extra=extra)
        engines.append(Engine(setup, scratch, environment=environment))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def golden(start: Start) -> list[list[int]]:
    """What one engine by itself says to `PROMPTS`."""
    single = start("null")
    single.ready()
    outcomes = [single.generate(f"golden{i}", prompt, TOKENS) for i, prompt in enumerate(PROMPTS)]
    assert {(outcome.reason, len(outcome.tokens)) for outcome in outcomes} == {("length", TOKENS)}
    single.close()
    found = [outcome.tokens for outcome in outcomes]
    assert len({tuple(tokens) for tokens in found}) == len(PROMPTS), "the model says the same to everything"
    return found


@pytest.fixture(scope="session")
def pair(start: Start, golden: list[list[int]]) -> tuple[Engine, Engine]:
    """An engine that prefills and one that decodes, for tests that harm neither."""
    prefill, decode = start("prefill"), start("decode", disaggregation_decode_enable_radix_cache=True)
    prefill.ready()
    decode.ready()
    return prefill, decode


@pytest.fixture
def engines(pair: tuple[Engine, Engine]) -> Iterator[tuple[Engine, Engine]]:
    """The shared pair: nothing is left of a test in its engines."""
    yield pair
    for engine in pair:
        engine.settle()
