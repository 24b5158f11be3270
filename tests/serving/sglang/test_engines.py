"""Real SGLang engines that are unlike, that die and come again, and that nobody should start."""

from __future__ import annotations

import itertools

import pytest

from tests.serving.models import PROMPTS
from tests.serving.sglang.conftest import TOKENS, Start
from tests.serving.sglang.engines import Engine

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]

LONG = PROMPTS[0]  # of five chunks

Pair = tuple[Engine, Engine]

rooms = itertools.count(50_000)


def transferred(prefill: Engine, decode: Engine) -> list[list[int]]:
    """What decode says to `PROMPTS`, all at once. Both forget it again."""
    used = [prefill.where(next(rooms)) for _ in PROMPTS]
    for engine in (decode, prefill):
        for i, prompt in enumerate(PROMPTS):
            engine.add(f"t{i}", prompt, TOKENS, **used[i])
    found = [decode.finished(f"t{i}").tokens for i in range(len(PROMPTS))]
    assert all(prefill.finished(f"t{i}").reason == "length" for i in range(len(PROMPTS)))
    prefill.settle()
    decode.settle()
    return found


def half_sent(prefill: Engine, decode: Engine) -> None:
    """Decode waits for a request of which prefill has computed and sent one chunk of five, and stands still."""
    prefill.hold()
    where = prefill.where(next(rooms))
    decode.add("r", LONG, TOKENS, **where)
    prefill.add("r", LONG, TOKENS, **where)
    prefill.await_held()


def test_a_killed_prefill_engine_and_its_successor(start: Start, pair: Pair, golden: list[list[int]]) -> None:
    _, decode = pair
    mortal = start("prefill")
    mortal.ready()
    assert transferred(mortal, decode) == golden
    half_sent(mortal, decode)
    mortal.kill()
    outcome = decode.finished("r")
    assert outcome.failed
    assert "ended" in outcome.message, outcome
    decode.settle()
    successor = start("prefill", port=mortal.setup.port)
    where = successor.where(next(rooms))
    successor.ready()
    decode.add("r", LONG, TOKENS, **where)
    successor.add("r", LONG, TOKENS, **where)
    assert decode.finished("r").tokens == golden[0]
    assert successor.finished("r").reason == "length"
    decode.settle()
    successor.settle()
    successor.close()


def test_a_killed_decode_engine(start: Start, pair: Pair, golden: list[list[int]]) -> None:
    prefill, other = pair
    mortal = start("decode")
    mortal.ready()
    half_sent(prefill, mortal)
    mortal.kill()
    prefill.go_on()
    assert prefill.finished("r").failed
    prefill.settle()
    assert transferred(prefill, other) == golden


def test_unlike_tensor_parallel_sizes(start: Start, pair: Pair, golden: list[list[int]]) -> None:
    prefill, decode = pair
    sharded = start("prefill", tp_size=2)
    sharded.ready()
    assert transferred(sharded, decode) == golden
    half_sent(sharded, decode)
    decode.abort("r")
    decode.settle()
    sharded.go_on()
    assert sharded.finished("r").failed
    sharded.settle()
    sharded.close()
    # And the other way, where both ranks receive.
    sharded = start("decode", tp_size=2)
    sharded.ready()
    assert transferred(prefill, sharded) == golden
    half_sent(prefill, sharded)
    sharded.abort("r")
    sharded.settle()
    prefill.go_on()
    assert prefill.finished("r").failed
    for engine in (prefill, sharded):
        engine.settle()
    sharded.close()
