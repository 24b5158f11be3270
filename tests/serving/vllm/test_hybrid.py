"""Models whose layers have block lists of their own: sliding windows, states of gated delta nets and Mamba 2.

After each test all blocks of both engines are free again.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving.models import PROMPTS
from tests.serving.vllm.conftest import Start
from tests.serving.vllm.engines import FREE, TOKENS, Engine, begin_again, half_prefilled, transferred

pytestmark = [pytest.mark.serving, pytest.mark.timeout(600)]

BFLOAT16 = {"dtype": "bfloat16"}  # the only type of vLLM's CPU kernels of gated delta nets
Pair = tuple[Engine, Engine]


@pytest.fixture(scope="module", params=["sliding", "gated_delta_net", "mamba2"])
def pair_of_model(request: pytest.FixtureRequest, start: Start) -> Iterator[Pair]:
    more = BFLOAT16 if request.param == "gated_delta_net" else {}
    how = {"model": request.getfixturevalue(request.param), **more}
    pair = start(f"prefill-{request.param}", **how), start(f"decode-{request.param}", **how)
    for engine in pair:
        engine.ready()
    yield pair
    for engine in pair:
        engine.close()


@pytest.fixture
def hybrids(pair_of_model: Pair) -> Iterator[Pair]:
    yield pair_of_model
    for engine in pair_of_model:
        engine.settle()
        assert engine.counters()["quarantined"] == {}


@pytest.fixture(scope="module")
def alone(pair_of_model: Pair) -> list[list[int]]:
    """What one engine by itself says to `PROMPTS`."""
    prefill, _ = pair_of_model
    found = [prefill.generate(f"golden{i}", prompt, TOKENS).tokens for i, prompt in enumerate(PROMPTS)]
    prefill.settle()
    assert len({tuple(tokens) for tokens in found}) == len(PROMPTS), "the model says the same to everything"
    return found


def test_decode_goes_on_where_prefill_ended(hybrids: Pair, alone: list[list[int]]) -> None:
    """Three times: the last time decode holds a prefix of each prompt, also its state there if it has one."""
    prefill, decode = hybrids
    received: list[list[int]] = []
    for turn in range(3):
        received.append([])
        for i, prompt in enumerate(PROMPTS):
            if turn == 2:
                assert decode.generate(f"own{i}", prompt, TOKENS).tokens == alone[i]
            prefill.produce(f"p{i}.{turn}", prompt)
            told = prefill.finished(f"p{i}.{turn}")
            assert told.params is not None
            assert prefill.free() < FREE, "blocks are kept until they have been read"
            outcome = decode.generate(f"d{i}.{turn}", prompt, TOKENS, **told.params)
            assert (outcome.tokens, outcome.computed) == (alone[i], TOKENS)
            received[-1].append(decode.counters()["bytes"])
    assert received[2][0] < received[0][0], "what decode holds is not sent again"


def test_both_at_once(hybrids: Pair, alone: list[list[int]]) -> None:
    prefill, decode = hybrids
    for i, prompt in enumerate(PROMPTS):
        decode.add(f"d{i}", prompt, TOKENS, do_remote_prefill=True, transfer_id=f"x{i}", **prefill.address())
        decode.await_grant(f"d{i}")
        prefill.produce(f"p{i}", prompt, transfer_id=f"x{i}")
    for i in range(len(PROMPTS)):
        outcome = decode.finished(f"d{i}")
        assert (outcome.tokens, outcome.computed) == (alone[i], TOKENS)


def test_a_request_that_is_preempted_while_it_is_prefilled_begins_again(hybrids: Pair, alone: list[list[int]]) -> None:
    begin_again(*hybrids, alone[0])


def test_a_request_that_is_aborted_on_either_side(hybrids: Pair) -> None:
    prefill, decode = hybrids
    for side in ("prefill", "decode"):
        half_prefilled(prefill, decode, f"-{side}")
        if side == "prefill":
            prefill.abort("p-prefill")
            prefill.steps(None)
            assert decode.finished("d-prefill").reason == "error"
        else:
            decode.abort("d-decode")
            decode.settle()
            prefill.steps(None)
            assert prefill.finished("p-decode").reason == "length"


def test_a_prompt_of_one_token_is_prefilled_where_it_decodes(hybrids: Pair) -> None:
    prefill, decode = hybrids
    prefill.produce("p", [7])
    told = prefill.finished("p")
    assert told.params is not None
    outcome = decode.generate("d", [7], TOKENS, **told.params)
    assert (outcome.tokens[:1], outcome.computed) == (told.tokens, TOKENS)


def test_states_without_prefix_caching(start: Start, gated_delta_net: str) -> None:
    """Then each request has one block of states, whichever of its tokens was computed last."""
    how = {"model": gated_delta_net, "prefix_caching": False, **BFLOAT16}
    prefill, decode = start("prefill-uncached", **how), start("decode-uncached", **how)
    for engine in (prefill, decode):
        engine.ready()
    golden = [decode.generate(f"golden{i}", prompt, TOKENS).tokens for i, prompt in enumerate(PROMPTS)]
    assert transferred(prefill, decode) == golden
    for engine in (prefill, decode):
        engine.settle()
        engine.close()
