"""Continuous batching of transformers: one process prefills, another decodes, with the tokens of one that does both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.helpers.harness import Ranks
from tests.helpers.jobs import SECRET, new_secret_file

pytest.importorskip("transformers", "5.19", reason="the engine is that of transformers (extra 'demo')")

from transformers.generation.continuous_batching.requests import RequestState, RequestStatus

from tests.helpers.ranks import batching
from torchkv.integrations import transformers as adapter

PREFILL, DECODE, ALONE = range(3)
TOKENS = 6

# Of many pages, of whole pages, of a chunk and a page; of one page, and of one token, of which nothing is sent.
PROMPTS = {
    "a": [(7 * i) % 500 + 3 for i in range(150)],
    "b": list(range(3, 67)),
    "c": [(11 * i) % 500 + 3 for i in range(81)],
    "d": [5, 9, 17],
    "e": [42],
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    secret = new_secret_file(tmp_path_factory.mktemp("secret") / "secret")
    made = Ranks(3, env={SECRET: str(secret)}, world=False)
    yield made
    made.close()


@pytest.fixture(scope="module")
def golden(ranks: Ranks) -> dict[str, list[int]]:
    ranks.run(batching.begin, "alone", "", ranks=[ALONE])
    (found,) = ranks.run(batching.generate, PROMPTS, TOKENS, ranks=[ALONE])
    ranks.run(batching.end, ranks=[ALONE])
    assert len({tuple(tokens) for tokens in found.values()}) == len(PROMPTS)
    return found


@pytest.fixture(scope="module")
def address(ranks: Ranks) -> Iterator[str]:
    """Where the process that prefills can be reached; the one that decodes runs too."""
    (found,) = ranks.run(batching.begin, "prefill", "p", ranks=[PREFILL])
    ranks.run(batching.begin, "decode", "d", ranks=[DECODE])
    yield found
    ranks.run(batching.end, ranks=[PREFILL, DECODE])


@pytest.fixture(autouse=True)
def _nothing_left(ranks: Ranks, address: str) -> Iterator[None]:
    ranks.run(batching.take_computed, ranks=[DECODE])
    yield
    ranks.run(batching.await_free, ranks=[PREFILL, DECODE])


@pytest.mark.parametrize("first", [PREFILL, DECODE], ids=["prefill first", "decode first"])
def test_the_tokens_are_those_of_one_process(
    ranks: Ranks, address: str, golden: dict[str, list[int]], first: int
) -> None:
    if first == PREFILL:
        ranks.run(batching.generate, PROMPTS, 1, ranks=[PREFILL])
        begun = ranks.start(batching.generate, PROMPTS, TOKENS, address, ranks=[DECODE])
    else:
        begun = ranks.start(batching.generate, PROMPTS, TOKENS, address, ranks=[DECODE])
        ranks.run(batching.generate, PROMPTS, 1, ranks=[PREFILL])
    assert ranks.join(begun) == [golden]
    assert ranks.run(batching.take_computed, ranks=[DECODE]) == [TOKENS * len(PROMPTS)]


def test_a_request_that_decode_cancels_holds_no_blocks(ranks: Ranks, address: str) -> None:
    """The fixture awaits that all blocks are free, on both sides."""
    ranks.run(batching.add, "x", PROMPTS["a"], TOKENS, address, ranks=[DECODE])
    ranks.run(batching.await_free, batching.BLOCKS - 10, ranks=[DECODE])
    ranks.run(batching.cancel, "x", ranks=[DECODE])
    ranks.run(batching.await_free, ranks=[DECODE])


def test_a_request_that_prefill_cancels_is_prefilled_where_it_decodes(
    ranks: Ranks, address: str, golden: dict[str, list[int]]
) -> None:
    """It was prefilled, and waits for somebody who decodes it."""
    ranks.run(batching.generate, {"y": PROMPTS["a"]}, 1, ranks=[PREFILL])
    ranks.run(batching.cancel, "y", ranks=[PREFILL])
    ranks.run(batching.await_free, ranks=[PREFILL])
    assert ranks.run(batching.generate, {"y": PROMPTS["a"]}, TOKENS, address, ranks=[DECODE]) == [{"y": golden["a"]}]
    assert ranks.run(batching.take_computed, ranks=[DECODE]) == [len(PROMPTS["a"]) + TOKENS - 1]


def test_a_request_that_a_client_named_at_any_length(ranks: Ranks, address: str, golden: dict[str, list[int]]) -> None:
    name = "\N{LATIN SMALL LETTER E WITH ACUTE}" * 600  # 1,200 bytes
    ranks.run(batching.generate, {name: PROMPTS["c"]}, 1, ranks=[PREFILL])
    assert ranks.run(batching.generate, {name: PROMPTS["c"]}, TOKENS, address, ranks=[DECODE]) == [{name: golden["c"]}]
    assert ranks.run(batching.take_computed, ranks=[DECODE]) == [TOKENS]


def test_nobody_at_the_address(ranks: Ranks, address: str, golden: dict[str, list[int]]) -> None:
    nowhere = address.rpartition(":")[0] + ":1"
    assert ranks.run(batching.generate, {"z": PROMPTS["c"]}, TOKENS, nowhere, ranks=[DECODE]) == [{"z": golden["c"]}]


def test_a_source_that_knows_nobody(ranks: Ranks, address: str, golden: dict[str, list[int]]) -> None:
    assert ranks.run(batching.generate, {"n": PROMPTS["c"]}, TOKENS, "", ranks=[DECODE]) == [{"n": golden["c"]}]


def test_another_model_is_refused_and_prefilled_here(ranks: Ranks, address: str) -> None:
    ranks.run(batching.begin, "prefill", "other", 2, ranks=[ALONE])
    (other,) = ranks.run(_address, ranks=[ALONE])
    ranks.run(batching.generate, {"w": PROMPTS["b"]}, TOKENS, other, ranks=[DECODE])
    assert ranks.run(batching.take_computed, ranks=[DECODE]) == [len(PROMPTS["b"]) + TOKENS - 1]
    ranks.run(batching.end, ranks=[ALONE])


def test_prompts_that_do_not_fit_prefill_together_wait_for_one_another(
    ranks: Ranks, address: str, golden: dict[str, list[int]]
) -> None:
    """Its 64 blocks hold one of them: the others wait until it has been received, and their tokens are right."""
    ranks.run(batching.begin, "alone", "", ranks=[ALONE])
    prompts = {name: [(k * i) % 500 + 3 for i in range(600)] for name, k in (("u", 7), ("v", 11), ("t", 13))}
    (expected,) = ranks.run(batching.generate, prompts, TOKENS, ranks=[ALONE])
    ranks.run(batching.end, ranks=[ALONE])
    for name, prompt in prompts.items():
        ranks.run(batching.add, name, prompt, 1, ranks=[PREFILL])
    # One is computed, and keeps 38 blocks until it is sent; another one has begun.
    ranks.run(batching.await_free, 3, ranks=[PREFILL])
    assert ranks.run(batching.generate, prompts, TOKENS, address, ranks=[DECODE]) == [expected]
    for name in prompts:
        ranks.run(batching.result, name, ranks=[PREFILL])
    assert ranks.run(batching.take_computed, ranks=[DECODE]) == [TOKENS * len(prompts)]


def test_what_is_preempted_while_it_is_prefilled_is_neither_sent_nor_declined() -> None:
    """transformers takes its blocks, calls it finished, and begins it anew under the same name."""
    scheduler: Any = object.__new__(adapter._PrefillScheduler)
    scheduler._departures, scheduler.cache, scheduler._sending = Mock(), Mock(), {}
    scheduler._allocator = Mock(block_table={}, tokens_per_page=16)
    state = RequestState(request_id="x", initial_tokens=list(range(100)), max_new_tokens=1)
    state._status = RequestStatus.FINISHED
    scheduler.active_requests = {"x": state}
    scheduler.finish_request("x")
    assert scheduler._departures.mock_calls == []
    assert (scheduler.active_requests, scheduler._sending) == ({}, {})
    scheduler.cache.free_blocks.assert_called_once_with("x")


def _address() -> str:
    assert batching.Batching.endpoint is not None
    return batching.Batching.endpoint.address.result()


def test_an_older_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages have other names, which would be said where a manager starts."""
    monkeypatch.setattr("importlib.metadata.version", lambda name: "5.17.0")
    code = compile(Path(adapter.__file__).read_text(), adapter.__file__, "exec")
    with pytest.raises(ImportError, match=r"transformers 5\.19 or later .* 5\.17\.0: pip install"):
        exec(code, {"__name__": adapter.__name__})
