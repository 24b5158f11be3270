"""Two real vLLM engines, launched apart: one prefills, the other decodes, and the tokens are those of one engine.

After each test all blocks of both engines are free again: see the fixture ``engines``.
"""

from __future__ import annotations

import time

import pytest

from tests.serving.models import PROMPTS
from tests.serving.vllm.engines import FREE, LONG, TOKENS, Engine, begin_again, half_prefilled
from tests.serving.vllm.host import BLOCK, CHUNK

pytestmark = [pytest.mark.serving, pytest.mark.timeout(600)]

Pair = tuple[Engine, Engine]


@pytest.fixture(scope="session")
def golden(pair: Pair) -> list[list[int]]:
    """What one engine by itself says to `PROMPTS`."""
    prefill, _ = pair
    outcomes = [prefill.generate(f"golden{i}", prompt, TOKENS) for i, prompt in enumerate(PROMPTS)]
    assert [outcome.computed for outcome in outcomes] == [len(prompt) + TOKENS - 1 for prompt in PROMPTS]
    prefill.settle()
    found = [outcome.tokens for outcome in outcomes]
    assert len({tuple(tokens) for tokens in found}) == len(PROMPTS), "the model says the same to everything"
    return found


def test_decode_goes_on_where_prefill_ended(engines: Pair, golden: list[list[int]]) -> None:
    """As behind a router that tells prefill nothing of decode, and hands on to decode what prefill returned."""
    prefill, decode = engines
    for i, prompt in enumerate(PROMPTS):
        prefill.produce(f"p{i}", prompt)
    for i, prompt in enumerate(PROMPTS):
        told = prefill.finished(f"p{i}")
        assert told.tokens == golden[i][:1]
        assert told.params is not None
        assert prefill.free() < FREE, "blocks are kept until they have been read"
        outcome = decode.generate(f"d{i}", prompt, TOKENS, **told.params)
        assert outcome.tokens == golden[i]
        assert outcome.computed == TOKENS, "of the prompt only the last token is computed again"


def test_both_at_once(engines: Pair, golden: list[list[int]]) -> None:
    """As behind a router that sends each request to both: pages leave layer by layer, as they are computed."""
    prefill, decode = engines
    for i, prompt in enumerate(PROMPTS):
        decode.add(f"d{i}", prompt, TOKENS, do_remote_prefill=True, transfer_id=f"x{i}", **prefill.address())
        decode.await_grant(f"d{i}")
        prefill.produce(f"p{i}", prompt, transfer_id=f"x{i}")
    for i in range(len(PROMPTS)):
        outcome = decode.finished(f"d{i}")
        assert (outcome.tokens, outcome.computed) == (golden[i], TOKENS)
        assert prefill.finished(f"p{i}").tokens == golden[i][:1]


def test_what_decode_holds_already_is_not_sent_again(engines: Pair, golden: list[list[int]]) -> None:
    prefill, decode = engines
    for turn in range(3):
        for i, prompt in enumerate(PROMPTS):
            prefill.produce(f"p{i}.{turn}", prompt)
            told = prefill.finished(f"p{i}.{turn}").params
            assert told is not None
            outcome = decode.generate(f"d{i}.{turn}", prompt, TOKENS, **told)
            assert (outcome.tokens, outcome.computed) == (golden[i], TOKENS)
            expected = decode.counters()["bytes"]
            held = 0 if turn == 0 else (len(prompt) - 1) // BLOCK
            assert expected == (-(-len(prompt) // BLOCK) - held) * 4 * 4 * BLOCK * 64 * 4  # layers, heads, ..., bytes


def test_twenty_requests_of_three_names(engines: Pair, golden: list[list[int]]) -> None:
    prefill, decode = engines
    going: dict[str, tuple[int, int]] = {}
    for number in range(20):
        name, prompt = f"x{number % 3}", number % len(PROMPTS)
        if name in going:
            before, i = going.pop(name)
            assert decode.finished(f"d{before}").tokens == golden[i]
        going[name] = number, prompt
        prefill.produce(f"p{number}", PROMPTS[prompt], transfer_id=name)
        address = prefill.address()
        decode.add(f"d{number}", PROMPTS[prompt], TOKENS, do_remote_prefill=True, transfer_id=name, **address)
    for number, i in going.values():
        assert decode.finished(f"d{number}").tokens == golden[i]
    for number in range(20):
        assert prefill.finished(f"p{number}").reason == "length"


def test_a_request_that_is_preempted_while_it_is_sent_begins_again(engines: Pair, golden: list[list[int]]) -> None:
    begin_again(*engines, golden[0])


def half_sent(engines: Pair) -> None:
    """Decode waits for a request of which prefill has computed and sent two chunks of five, and makes no step."""
    prefill, decode = engines
    half_prefilled(prefill, decode)
    assert decode.free() == FREE - -(-len(LONG) // BLOCK)
    assert prefill.free() <= FREE - 2 * CHUNK // BLOCK


def test_decode_aborts_while_pages_come(engines: Pair) -> None:
    prefill, decode = engines
    half_sent(engines)
    decode.abort("d")
    decode.settle()  # though prefill's engine makes no step
    prefill.steps(None)
    assert prefill.finished("p").reason == "length"


def test_prefill_aborts_while_pages_go(engines: Pair) -> None:
    prefill, decode = engines
    half_sent(engines)
    prefill.abort("p")
    prefill.steps(None)
    assert decode.finished("d").reason == "error"


def test_decode_aborts_before_it_schedules(engines: Pair) -> None:
    prefill, decode = engines
    prefill.produce("p", LONG)
    told = prefill.finished("p").params
    assert told is not None
    decode.steps(0)
    decode.add("d", LONG, TOKENS, **told)
    decode.abort("d")
    assert prefill.requests(), "prefill keeps its blocks"
    decode.steps(None)
    prefill.settle()


def test_prefill_aborts_before_it_schedules(engines: Pair) -> None:
    prefill, decode = engines
    decode.add("d", LONG, TOKENS, do_remote_prefill=True, transfer_id="x", **prefill.address())
    decode.await_grant("d")
    prefill.steps(0)
    prefill.produce("p", LONG, transfer_id="x")
    prefill.abort("p")
    prefill.steps(None)
    assert decode.finished("d").reason == "error"


def test_decode_aborts_before_it_knows_prefill(engines: Pair) -> None:
    """Nobody listens where the request says: that is found out after the abort."""
    _, decode = engines
    decode.add("d", LONG, TOKENS, do_remote_prefill=True, transfer_id="x", remote_host="127.0.0.1", remote_port=1)
    decode.steps(3)
    decode.abort("d")
    decode.settle()


@pytest.mark.parametrize(
    "params",
    [
        {"transfer_id": "x"},
        {"remote_host": "127.0.0.1", "remote_port": 4000},
        {"transfer_id": "x", "remote_host": "no such host", "remote_port": 4000},
        {"transfer_id": "x", "remote_host": "127.0.0.1", "remote_port": "4000"},
        {"transfer_id": "x" * 2000, "remote_host": "127.0.0.1", "remote_port": 4000},
    ],
    ids=["no address", "no name", "bad host", "bad port", "long name"],
)
def test_a_request_that_does_not_say_who_prefilled_it_fails(engines: Pair, params: dict[str, object]) -> None:
    """It is not silently prefilled here."""
    _, decode = engines
    outcome = decode.generate("d", LONG, TOKENS, do_remote_prefill=True, **params)
    assert (outcome.reason, outcome.computed) == ("error", 0)


def test_another_engine_at_the_address_is_refused(engines: Pair) -> None:
    prefill, decode = engines
    prefill.produce("p", LONG)
    told = prefill.finished("p").params
    assert told is not None
    outcome = decode.generate("d", LONG, TOKENS, **{**told, "remote_engine_id": "prefill-of-yesterday"})
    assert (outcome.reason, outcome.computed) == ("error", 0)
    assert "prefill-of-yesterday" in decode.log.read_text()
    assert decode.generate("again", LONG, TOKENS, **told).reason == "length"


def test_an_aborted_request_keeps_its_blocks_while_prefill_is_stopped(engines: Pair, golden: list[list[int]]) -> None:
    """The promise, in real engines: what a stopped writer may still write to is given to nobody else."""
    prefill, decode = engines
    half_sent(engines)
    held = FREE - decode.free()
    prefill.signal(19)  # SIGSTOP
    try:
        decode.abort("d")
        until = time.monotonic() + 8
        while time.monotonic() < until:
            assert decode.free() == FREE - held
            assert decode.requests()
            time.sleep(0.2)
        assert decode.generate("meanwhile", PROMPTS[1], TOKENS).tokens == golden[1]
    finally:
        prefill.signal(18)  # SIGCONT
    decode.settle()
    prefill.steps(None)
    assert prefill.finished("p").reason == "length"
    prefill.settle()
    # And they go on together.
    prefill.produce("p2", LONG)
    told = prefill.finished("p2").params
    assert told is not None
    assert decode.generate("d2", LONG, TOKENS, **told).tokens == golden[0]
