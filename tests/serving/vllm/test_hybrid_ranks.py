"""Models whose layers have block lists of their own, on two ranks and on one: their engines prefill for one another."""

from __future__ import annotations

import pytest

from tests.serving.models import PROMPTS
from tests.serving.vllm.conftest import Start
from tests.serving.vllm.engines import TOKENS, transferred

pytestmark = [pytest.mark.serving, pytest.mark.timeout(600)]


def agree(found: list[list[int]], golden: list[list[int]]) -> float:
    """The share of tokens that are the same."""
    pairs = [pair for each in zip(found, golden, strict=True) for pair in zip(*each, strict=True)]
    return sum(one == other for one, other in pairs) / len(pairs)


@pytest.mark.parametrize("model", ["sliding", "mamba2", "mamba2_groups", "gated_delta_net"])
def test_two_ranks_and_one(start: Start, request: pytest.FixtureRequest, model: str) -> None:
    """Ranks share heads, and with them states. Of Mamba 2 with one group each holds all of B and C.

    Gated delta nets need bfloat16, the only type of vLLM's CPU kernels. In it the order of a sum matters, which is
    another one on two ranks, so a token may differ, and then those behind it. Seen: 0.97 and 1.00 of them the same;
    0.50 with q, k and v of the convolution cut at the wrong places.
    """
    how, least = {"model": request.getfixturevalue(model)}, 1.0
    if model == "gated_delta_net":
        how["dtype"], least = "bfloat16", 0.75
    two, one = start(f"two-ranks-{model}", tp_size=2, **how), start(f"one-rank-{model}", **how)
    for engine in (two, one):
        engine.ready()
    golden = [one.generate(f"golden{i}", prompt, TOKENS).tokens for i, prompt in enumerate(PROMPTS)]
    assert agree(golden, [*golden[1:], golden[0]]) < 0.1, "the model says the same to everything"
    one.settle()
    there = agree(transferred(two, one, "2to1."), golden)
    for engine in (two, one):
        engine.settle()  # forgets the prompts
    back = agree(transferred(one, two, "1to2."), golden)
    print(f"{model}: {there:.2f} of the tokens from two ranks to one, {back:.2f} back")
    assert min(there, back) >= least
    for engine in (two, one):
        engine.settle()
        engine.close()
