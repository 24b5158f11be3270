"""Engines of other shapes, and engines that are killed."""

from __future__ import annotations

import pytest

from tests.serving.models import PROMPTS
from tests.serving.vllm.conftest import Start
from tests.serving.vllm.engines import FREE, LONG, TOKENS, Engine, half_prefilled, transferred

pytestmark = [pytest.mark.serving, pytest.mark.timeout(600)]


def test_killed_engines_cost_their_own_requests_only(start: Start, pair: tuple[Engine, Engine]) -> None:
    """Of one that prefills: `fail` ends its requests, `recompute` prefills them where they decode. Then one that
    decodes.
    """
    stays, fails = pair
    victim, recomputes = start("prefill-1", role="kv_producer"), start("decode-1", policy="recompute")
    victim.ready()
    recomputes.ready()
    golden = [stays.generate(f"golden{i}", prompt, TOKENS).tokens for i, prompt in enumerate(PROMPTS)]
    stays.settle()
    for name, decode in (("f", fails), ("r", recomputes)):
        decode.add(f"d{name}", LONG, TOKENS, do_remote_prefill=True, transfer_id=name, **victim.address())
        decode.await_grant(f"d{name}")
    victim.steps(3)
    for name in "fr":
        victim.produce(f"p{name}", LONG, transfer_id=name)
    victim.await_steps()
    victim.kill()
    failed = fails.finished("df")
    assert (failed.reason, failed.computed) == ("error", 0)
    recomputed = recomputes.finished("dr")
    assert (recomputed.tokens, recomputed.computed) == (golden[0], len(LONG) + TOKENS - 1)
    for decode in (fails, recomputes):
        decode.settle()
        assert transferred(stays, decode, decode.log.name) == golden, "both serve on"
        decode.settle()
        stays.settle()
    # One of the same name comes again.
    again = start("prefill-1", role="kv_producer")
    again.ready()
    assert transferred(again, fails, "again") == golden
    again.settle()
    again.close()
    fails.settle()
    # Now the one that decodes is killed, while pages come.
    half_prefilled(stays, recomputes)
    recomputes.kill()
    stays.steps(None)
    assert stays.finished("p").reason == "length"
    stays.settle()
    assert stays.free() == FREE
    assert transferred(stays, fails, "last") == golden
    stays.settle()
    fails.settle()


def test_prefill_on_two_ranks_decode_on_one(start: Start, pair: tuple[Engine, Engine]) -> None:
    single, decode = pair
    golden = [single.generate(f"golden{i}", prompt, TOKENS).tokens for i, prompt in enumerate(PROMPTS)]
    single.settle()
    sharded = start("sharded", tp_size=2)
    sharded.ready()
    assert transferred(sharded, decode, "2to1.") == golden
    sharded.settle()
    decode.settle()
    # And the other way, where both ranks receive.
    assert transferred(single, sharded, "1to2.") == golden
    sharded.settle()
    # One rank's failure is that of both.
    sharded.add("d", LONG, TOKENS, do_remote_prefill=True, transfer_id="x", remote_host="127.0.0.1", remote_port=1)
    assert sharded.finished("d").reason == "error"
    for engine in (single, sharded, decode):
        engine.settle()
    sharded.close()


def test_latent_attention(start: Start, mla: str) -> None:
    # On a processor with AMX vLLM would choose a backend that cannot do float32.
    how = {"model": mla, "block_size": 16, "backend": "CPU_MLA"}
    prefill, decode = start("prefill-mla", **how), start("decode-mla", **how)
    prefill.ready()
    decode.ready()
    golden = [prefill.generate(f"golden{i}", prompt, TOKENS).tokens for i, prompt in enumerate(PROMPTS)]
    prefill.settle()
    assert transferred(prefill, decode, "mla") == golden
    for engine in (prefill, decode):
        engine.settle()
        engine.close()
