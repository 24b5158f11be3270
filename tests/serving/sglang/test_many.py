"""Many requests at once, some of which are aborted, on either side: right tokens, and nothing is lost."""

from __future__ import annotations

import os
import random
import time

import pytest

from tests.serving.models import PROMPTS
from tests.serving.sglang.conftest import TOKENS
from tests.serving.sglang.engines import DEADLINE, Engine

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]

REQUESTS = int(os.environ.get("TORCHKV_TEST_REQUESTS", "200"))
AT_ONCE = 6


def test_nothing_is_lost(engines: tuple[Engine, Engine], golden: list[list[int]]) -> None:
    """Half of the requests go to prefill first, half to decode. The fixture ``engines`` looks at what is left."""
    prefill, decode = engines
    chance = random.Random(1)
    going: set[int] = set()
    aborted: set[int] = set()
    right, ended_by_abort, started, began = 0, 0, 0, time.monotonic()
    while going or started < REQUESTS:
        assert time.monotonic() - began < DEADLINE + REQUESTS, going
        while len(going) < AT_ONCE and started < REQUESTS:
            number, started = started, started + 1
            prompt = PROMPTS[number % len(PROMPTS)]
            for engine in (prefill, decode) if chance.random() < 0.5 else (decode, prefill):
                engine.add(f"r{number:05}", prompt, TOKENS, **prefill.where(100_000 + number))
            going.add(number)
            if chance.random() < 0.08:
                aborted.add(number)
        for number in sorted(going & aborted):
            if chance.random() < 0.3:
                chance.choice((prefill, decode)).abort(f"r{number:05}")  # which may have ended
        for name, outcome in decode.take().items():
            number = int(name[1:])
            going.remove(number)
            if outcome.reason == "length":
                assert outcome.tokens == golden[number % len(PROMPTS)]
                right += 1
            else:
                assert number in aborted, outcome
                ended_by_abort += 1
        prefill.take()
        time.sleep(0.002)
    seconds = time.monotonic() - began
    counts = f"{len(aborted)} to be aborted, of which {ended_by_abort} were, {right} right"
    print(f"{REQUESTS} requests, {counts}, in {seconds:.1f} s")
    assert right + ended_by_abort == REQUESTS
    assert right >= REQUESTS - len(aborted)
    assert ended_by_abort
