"""Continuous batching of transformers: one process prefills, another decodes, with the tokens of one that does both."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.harness import Ranks
from tests.helpers.jobs import SECRET, new_secret_file

pytest.importorskip("transformers", reason="the engine is that of transformers (extra 'demo')")

from tests.helpers.ranks import batching

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
    ranks.run(batching.await_free, 1 - 10 / 64, ranks=[DECODE])
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


def test_nobody_at_the_address(ranks: Ranks, address: str, golden: dict[str, list[int]]) -> None:
    nowhere = address.rpartition(":")[0] + ":1"
    assert ranks.run(batching.generate, {"z": PROMPTS["c"]}, TOKENS, nowhere, ranks=[DECODE]) == [{"z": golden["c"]}]


def test_another_model_is_refused_and_prefilled_here(ranks: Ranks, address: str) -> None:
    ranks.run(batching.begin, "prefill", "other", 2, ranks=[ALONE])
    (other,) = ranks.run(_address, ranks=[ALONE])
    ranks.run(batching.generate, {"w": PROMPTS["b"]}, TOKENS, other, ranks=[DECODE])
    assert ranks.run(batching.take_computed, ranks=[DECODE]) == [len(PROMPTS["b"]) + TOKENS - 1]
    ranks.run(batching.end, ranks=[ALONE])


def _address() -> str:
    assert batching.Batching.endpoint is not None
    return batching.Batching.endpoint.address.result()
