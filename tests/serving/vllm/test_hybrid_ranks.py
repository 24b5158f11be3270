"""Models whose layers have block lists of their own, on two ranks and on one: their engines prefill for one another."""

from __future__ import annotations

import pytest

from tests.serving.models import PROMPTS
from tests.serving.vllm.conftest import Start
from tests.serving.vllm.engines import TOKENS, transferred

pytestmark = [pytest.mark.serving, pytest.mark.timeout(600)]


@pytest.mark.parametrize("model", ["sliding", "mamba2", "mamba2_groups", "gated_delta_net"])
def test_two_ranks_and_one(start: Start, request: pytest.FixtureRequest, model: str) -> None:
    """Ranks share heads, and with them states. Of Mamba 2 with one group each holds all of B and C."""
    how = {"model": request.getfixturevalue(model)}
    if model == "gated_delta_net":
        how["dtype"] = "bfloat16"  # the only type of vLLM's CPU kernels
    two, one = start(f"two-ranks-{model}", tp_size=2, **how), start(f"one-rank-{model}", **how)
    for engine in (two, one):
        engine.ready()
    golden = [one.generate(f"golden{i}", prompt, TOKENS).tokens for i, prompt in enumerate(PROMPTS)]
    assert len({tuple(tokens) for tokens in golden}) == len(PROMPTS), "the model says the same to everything"
    one.settle()
    assert transferred(two, one, "2to1.") == golden
    for engine in (two, one):
        engine.settle()  # forgets the prompts
    assert transferred(one, two, "1to2.") == golden
    for engine in (two, one):
        engine.settle()
        engine.close()
