"""Two real SGLang engines, launched apart: one prefills, the other decodes, and the tokens are those of one engine.

After each test everything that either engine had allocated is free again: see the fixture ``engines``.
"""

from __future__ import annotations

import itertools
import signal
import socket
import time

import pytest

from tests.serving.models import PROMPTS
from tests.serving.sglang.conftest import TOKENS
from tests.serving.sglang.engines import Engine, free_port
from tests.serving.sglang.host import CHUNK, PAGE

pytestmark = [pytest.mark.serving, pytest.mark.timeout(600)]

LONG = PROMPTS[0]  # of five chunks
PAGE_BYTES = 2 * 4 * 4 * PAGE * 32 * 4  # K and V, layers, heads, tokens, elements, bytes
DEADLINE_OF_SGLANG = 30.0  # seconds after which by itself it gives pages away, whoever may still write to them

Pair = tuple[Engine, Engine]

rooms = itertools.count(1000)


def pages(tokens: int) -> int:
    return -(-tokens // PAGE)


def test_decode_goes_on_where_prefill_ended(engines: Pair, golden: list[list[int]]) -> None:
    prefill, decode = engines
    for first, second in ((prefill, decode), (decode, prefill)):
        used = [prefill.where(next(rooms)) for _ in PROMPTS]
        for engine in (first, second):
            for i, prompt in enumerate(PROMPTS):
                engine.add(f"r{i}", prompt, TOKENS, **used[i])
        for i in range(len(PROMPTS)):
            assert decode.finished(f"r{i}").tokens == golden[i]
            assert prefill.finished(f"r{i}").tokens == golden[i][:1]


def test_what_decode_holds_already_is_not_sent_again(engines: Pair, golden: list[list[int]]) -> None:
    prefill, decode = engines
    for turn in range(3):
        for i, prompt in enumerate(PROMPTS):
            where = prefill.where(next(rooms))
            prefill.add("r", prompt, TOKENS, **where)
            assert decode.generate("r", prompt, TOKENS, **where).tokens == golden[i]
            assert prefill.finished("r").tokens == golden[i][:1]
            held = 0 if turn == 0 else len(prompt) // PAGE
            assert decode.state()["received_bytes"] == (pages(len(prompt)) - held) * PAGE_BYTES


def test_a_room_is_used_again(engines: Pair, golden: list[list[int]]) -> None:
    prefill, decode = engines
    where = prefill.where(next(rooms))
    for turn in range(6):
        i = turn % len(PROMPTS)
        prefill.add("r", PROMPTS[i], TOKENS, **where)
        assert decode.generate("r", PROMPTS[i], TOKENS, **where).tokens == golden[i]
        assert prefill.finished("r").reason == "length"


def half_sent(engines: Pair) -> None:
    """Decode waits for a request of which prefill has computed and sent one chunk of five, and stands still."""
    prefill, decode = engines
    prefill.hold()
    where = prefill.where(next(rooms))
    decode.add("r", LONG, TOKENS, **where)
    prefill.add("r", LONG, TOKENS, **where)
    prefill.await_held()
    state = decode.state()
    assert (state["transferring"], state["free_tokens"]) == (1, decode.empty["free_tokens"] - pages(len(LONG)) * PAGE)


def test_decode_aborts_while_pages_come(engines: Pair, golden: list[list[int]]) -> None:
    prefill, decode = engines
    half_sent(engines)
    decode.abort("r")
    decode.settle()  # though prefill's scheduler stands still
    prefill.go_on()
    assert prefill.finished("r").failed
    where = prefill.where(next(rooms))
    prefill.add("again", LONG, TOKENS, **where)
    assert decode.generate("again", LONG, TOKENS, **where).tokens == golden[0]


def test_prefill_aborts_while_pages_go(engines: Pair) -> None:
    prefill, decode = engines
    half_sent(engines)
    prefill.abort("r")
    prefill.go_on()
    outcome = decode.finished("r")
    assert outcome.failed
    assert "aborted where it is prefilled" in outcome.message or "cancelled" in outcome.message


def test_an_aborted_request_keeps_its_pages_while_prefill_is_stopped(engines: Pair, golden: list[list[int]]) -> None:
    """The promise, in real engines: what a stopped writer may still write to is given to nobody else."""
    prefill, decode = engines
    half_sent(engines)
    held = decode.state()["free_tokens"]
    prefill.signal(signal.SIGSTOP)
    try:
        decode.abort("r")
        decode.await_state(lambda state: state["deferred"] == 1, "does not hold the request's pages")
        until = time.monotonic() + DEADLINE_OF_SGLANG + 5
        while time.monotonic() < until:
            state = decode.state()
            assert (state["deferred"], state["free_tokens"], state["transferring"]) == (1, held, 0)
            assert state["quarantined"] == pages(len(LONG))
            time.sleep(0.5)
    finally:
        prefill.signal(signal.SIGCONT)
    decode.settle()
    prefill.go_on()
    assert prefill.finished("r").failed
    where = prefill.where(next(rooms))
    prefill.add("again", LONG, TOKENS, **where)
    assert decode.generate("again", LONG, TOKENS, **where).tokens == golden[0]


def test_decode_aborts_what_prefill_never_heard_of(engines: Pair) -> None:
    prefill, decode = engines
    decode.add("r", LONG, TOKENS, **prefill.where(next(rooms)))
    decode.await_state(lambda state: state["transferring"] == 1, "grants nothing")
    decode.abort("r")
    decode.settle()


def test_prefill_aborts_what_decode_never_heard_of(engines: Pair) -> None:
    """And then decode hears of it: it fails at once, and not after the time that it waits for a first byte."""
    prefill, decode = engines
    where = prefill.where(next(rooms))
    prefill.add("r", LONG, TOKENS, **where)
    prefill.await_state(lambda state: state["requests"] == 1, "does not begin")
    prefill.abort("r")
    prefill.await_state(lambda state: state["requests"] == 0, "does not end")
    assert decode.generate("r", LONG, TOKENS, **where).failed


def test_decode_aborts_before_it_knows_prefill(engines: Pair) -> None:
    """Nobody listens where the request says."""
    _, decode = engines
    decode.add("r", LONG, TOKENS, bootstrap_host="127.0.0.1", bootstrap_port=free_port(), bootstrap_room=next(rooms))
    decode.await_state(lambda state: state["waiting"] == 1, "does not wait")
    decode.abort("r")
    decode.settle()


def test_who_is_no_prefill_engine_is_told_from_one(engines: Pair) -> None:
    _, decode = engines
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": server.getsockname()[1]}
        decode.add("r", LONG, TOKENS, **where, bootstrap_room=next(rooms))
        caller, _ = server.accept()
        caller.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        caller.close()
        outcome = decode.finished("r")
    assert outcome.failed
    assert "no bootstrap server of torchkv" in outcome.message


def test_two_requests_of_one_room_are_not_taken_for_each_other(engines: Pair, golden: list[list[int]]) -> None:
    prefill, decode = engines
    where = prefill.where(next(rooms))
    decode.add("first", LONG, TOKENS, **where)
    decode.await_state(lambda state: state["transferring"] == 1, "grants nothing")
    second = decode.generate("second", PROMPTS[1], TOKENS, **where)
    assert second.failed
    assert "another request" in second.message
    prefill.add("first", LONG, TOKENS, **where)
    assert decode.finished("first").tokens == golden[0]
    assert prefill.finished("first").reason == "length"


def test_unlike_prompts_in_one_room_fail(engines: Pair, golden: list[list[int]]) -> None:
    """A client's mistake: it ends these two requests, and nothing else."""
    prefill, decode = engines
    where = prefill.where(next(rooms))
    decode.add("r", LONG, TOKENS, **where)
    prefill.add("r", LONG[:CHUNK], TOKENS, **where)
    assert decode.finished("r").failed
    assert prefill.finished("r").failed
    where = prefill.where(next(rooms))
    prefill.add("again", LONG, TOKENS, **where)
    assert decode.generate("again", LONG, TOKENS, **where).tokens == golden[0]
    assert prefill.finished("again").reason == "length"
