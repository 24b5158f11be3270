"""Many requests at once, some of which are aborted, on either side: right tokens, and no block is lost."""

from __future__ import annotations

import os
import random
import time

import pytest

from tests.serving.models import PROMPTS
from tests.serving.vllm.engines import DEADLINE, Engine

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]

REQUESTS = int(os.environ.get("TORCHKV_TEST_REQUESTS", "200"))
TOKENS = 4
AT_ONCE = 6


def test_no_block_is_lost(engines: tuple[Engine, Engine]) -> None:
    """Half of the requests go to both engines at once, half to decode when prefill has answered."""
    prefill, decode = engines
    chance = random.Random(1)
    golden = [prefill.generate(f"golden{i}", prompt, TOKENS).tokens for i, prompt in enumerate(PROMPTS)]
    prefill.settle()
    going: dict[int, str] = {}  # number -> who has it
    aborted: set[int] = set()
    right, started, began = 0, 0, time.monotonic()
    while going or started < REQUESTS:
        assert time.monotonic() - began < DEADLINE + REQUESTS, going
        while len(going) < AT_ONCE and started < REQUESTS:
            number, started = started, started + 1
            prompt = PROMPTS[number % len(PROMPTS)]
            if number % 2:
                prefill.produce(f"p{number}", prompt, transfer_id=f"x{number}")
                where = {"transfer_id": f"x{number}", **prefill.address()}
                decode.add(f"d{number}", prompt, TOKENS, do_remote_prefill=True, **where)
                going[number] = "decode"
            else:
                prefill.produce(f"p{number}", prompt)
                going[number] = "prefill"
            if chance.random() < 0.05:
                aborted.add(number)
        for number in [number for number in going if number in aborted and chance.random() < 0.5]:
            if going[number] == "decode" and chance.random() < 0.5:
                decode.abort(f"d{number}")
                del going[number]  # vLLM tells nothing of a request that was aborted
            else:
                prefill.abort(f"p{number}")  # which may have ended
                if going[number] == "prefill":
                    del going[number]
        done = prefill.take()
        for number, side in list(going.items()):
            told = done.get(f"p{number}")
            if side == "prefill" and told is not None:
                assert told.params is not None
                decode.add(f"d{number}", PROMPTS[number % len(PROMPTS)], TOKENS, **told.params)
                going[number] = "decode"
        for name, outcome in decode.take().items():
            number = int(name[1:])
            if going.pop(number, None) is None:
                continue  # it ended while it was aborted
            if outcome.reason == "length":
                assert outcome.tokens == golden[number % len(PROMPTS)]
                right += 1
            else:
                assert number in aborted, outcome
        time.sleep(0.002)
    seconds = time.monotonic() - began
    print(f"{REQUESTS} requests, {len(aborted)} of them to be aborted, {right} right, in {seconds:.1f} s")
    assert len(aborted) > REQUESTS // 50
    assert right >= REQUESTS - len(aborted)
