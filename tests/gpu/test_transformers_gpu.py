"""Continuous batching of transformers: prefill in a process on one GPU, decode in another one on another GPU.

All of it runs in host memory too, so that the tests themselves are tested where there are no GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pytest

from tests.helpers.gpu_lock import gpus
from tests.helpers.harness import Ranks
from tests.helpers.jobs import SECRET, new_secret_file
from tests.helpers.ranks.gpu_pair import needs_gpus

pytest.importorskip("transformers", "5.19", reason="the engine is that of transformers (extra 'demo')")

from tests.helpers.ranks import batching

PREFILL, DECODE, ALONE = range(3)
TOKENS = 8
START = 240.0  # seconds: a process imports transformers, and on a GPU compiles kernels

# Of ten pages; of six of them and others; of whole pages; of a chunk and a page; of less than a page.
LONG = [(7 * i) % 500 + 3 for i in range(150)]
PROMPTS = {
    "a": LONG,
    "b": [*LONG[:96], *((13 * i) % 500 + 3 for i in range(40))],
    "c": list(range(3, 67)),
    "d": [(11 * i) % 500 + 3 for i in range(81)],
    "e": [5, 9, 17],
}
# Pages of the tokens that are sent, which are all but the last one.
PAGES = {name: -(-(len(prompt) - 1) // batching.PAGE) for name, prompt in PROMPTS.items()}
PAGE_NBYTES = 3 * 2 * batching.PAGE * 4 * 16 * 4  # layers, K and V, tokens, kv heads, width, bytes of float32

pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class Way:
    """devices: of the process that prefills, and of the one that decodes. path: which all pages take."""

    devices: tuple[str, str]
    path: str


GPUS, HOST = ("cuda:0", "cuda:1"), ("cpu", "cpu")
WAYS = [
    pytest.param(Way(GPUS, "direct"), id="gpus-direct", marks=needs_gpus(2)),
    pytest.param(Way(GPUS, "staged"), id="gpus-staged", marks=needs_gpus(2)),
    pytest.param(Way(HOST, "runs"), id="host-runs"),
    pytest.param(Way(HOST, "staged"), id="host-staged"),
]


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    found: Way = request.param
    return found


@pytest.fixture(scope="module")
def ranks(way: Way, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    secret = new_secret_file(tmp_path_factory.mktemp("secret") / "secret")
    made = Ranks(3, env={SECRET: str(secret)}, world=False)
    yield made
    made.close()


def begin(ranks: Ranks, process: int, role: str, instance: str, device: str, path: str | None) -> str:
    # Who prefills shares the blocks of what prompts have in common; who receives cannot.
    function = partial(batching.begin, device=device, path=path, share_blocks=role == "prefill")
    with gpus(alone=False):
        (address,) = ranks.run(function, role, instance, ranks=[process], deadline=START)
    return address


@pytest.fixture(scope="module")
def golden(way: Way, ranks: Ranks) -> dict[str, list[int]]:
    """What one process says to each prompt."""
    begin(ranks, ALONE, "alone", "", way.devices[0], None)
    (found,) = ranks.run(batching.generate, PROMPTS, TOKENS, ranks=[ALONE], deadline=START)
    ranks.run(batching.end, ranks=[ALONE])
    assert len({tuple(tokens) for tokens in found.values()}) == len(PROMPTS), "the model says the same to everything"
    return found


@pytest.fixture(scope="module")
def address(way: Way, ranks: Ranks) -> Iterator[str]:
    """Where the process that prefills can be reached; the one that decodes runs too. Both say where their pages are."""
    found = begin(ranks, PREFILL, "prefill", "p", way.devices[0], way.path)
    begin(ranks, DECODE, "decode", "d", way.devices[1], way.path)
    assert ranks.run(batching.place, ranks=[PREFILL, DECODE]) == list(way.devices)
    yield found
    ranks.run(batching.end, ranks=[PREFILL, DECODE])


@pytest.fixture(autouse=True)
def _pools_are_as_before(ranks: Ranks, address: str) -> Iterator[None]:
    ranks.run(batching.take_computed, ranks=[PREFILL, DECODE])
    assert ranks.run(batching.free_blocks, ranks=[PREFILL, DECODE]) == [batching.BLOCKS] * 2
    yield
    ranks.run(batching.await_free, ranks=[PREFILL, DECODE])
    assert ranks.run(batching.quarantined, ranks=[PREFILL, DECODE]) == [{}, {}]


def start_all(ranks: Ranks, address: str, prompts: dict[str, list[int]]) -> None:
    """All requests are in flight at once, first where they decode."""
    for request, prompt in prompts.items():
        ranks.run(batching.add, request, prompt, TOKENS, address, ranks=[DECODE])
    for request, prompt in prompts.items():
        ranks.run(batching.add, request, prompt, 1, ranks=[PREFILL])


def check(ranks: Ranks, golden: dict[str, list[int]], names: dict[str, str]) -> None:
    """names: request -> whose prompt it has. Waits for both sides."""
    for request, prompt in names.items():
        assert ranks.run(batching.result, request, ranks=[DECODE], deadline=START) == [golden[prompt]], request
        assert ranks.run(batching.result, request, ranks=[PREFILL]) == [golden[prompt][:1]], request


def test_the_tokens_are_those_of_one_process(
    way: Way, ranks: Ranks, address: str, golden: dict[str, list[int]]
) -> None:
    """Twice: the second time prefill still holds the prompts, of which it computes no whole page again."""
    sent = dict.fromkeys([way.path], 0)
    for turn in range(2):
        names = {f"{name}{turn}": name for name in PROMPTS}
        start_all(ranks, address, {request: PROMPTS[name] for request, name in names.items()})
        check(ranks, golden, names)
        assert ranks.run(batching.take_computed, ranks=[DECODE]) == [TOKENS * len(PROMPTS)], "nothing was prefilled"
        sent[way.path] += sum(PAGES.values()) * PAGE_NBYTES
    (computed,) = ranks.run(batching.take_computed, ranks=[PREFILL])
    assert computed < 2 * sum(map(len, PROMPTS.values())) - len(LONG), "no block was shared"
    assert ranks.run(batching.paths, "d", ranks=[PREFILL]) == [sent]


def test_what_is_aborted_amid_others(ranks: Ranks, address: str, golden: dict[str, list[int]]) -> None:
    """Where it decodes, once blocks are granted and others are under way, and where it is prefilled."""
    ranks.run(batching.add, "dropped", LONG, TOKENS, address, ranks=[DECODE])
    ranks.run(batching.await_free, batching.BLOCKS - PAGES["a"], ranks=[DECODE])
    names = {f"{name}-amid": name for name in PROMPTS}
    start_all(ranks, address, {request: PROMPTS[name] for request, name in names.items()})
    ranks.run(batching.add, "dropped", LONG, 1, ranks=[PREFILL])
    ranks.run(batching.cancel, "dropped", ranks=[DECODE])
    check(ranks, golden, names)


def test_what_prefill_aborts_is_prefilled_where_it_decodes(
    ranks: Ranks, address: str, golden: dict[str, list[int]]
) -> None:
    ranks.run(batching.generate, {"y": LONG}, 1, ranks=[PREFILL])  # and keeps its blocks for whoever decodes it
    ranks.run(batching.cancel, "y", ranks=[PREFILL])
    ranks.run(batching.await_free, ranks=[PREFILL])
    ranks.run(batching.take_computed, ranks=[DECODE])
    assert ranks.run(batching.generate, {"y": LONG}, TOKENS, address, ranks=[DECODE], deadline=START) == [
        {"y": golden["a"]}
    ]
    assert ranks.run(batching.take_computed, ranks=[DECODE]) == [len(LONG) + TOKENS - 1]


def test_many_at_once_with_aborts(ranks: Ranks, address: str, golden: dict[str, list[int]]) -> None:
    """Sixty requests, six in flight; every ninth is dropped where it decodes."""
    kinds = list(PROMPTS)
    waiting: dict[str, str] = {}
    for number in range(60):
        name, prompt = f"m{number}", kinds[number % len(kinds)]
        if len(waiting) == 6:
            first = next(iter(waiting))
            check(ranks, golden, {first: waiting.pop(first)})
        start_all(ranks, address, {name: PROMPTS[prompt]})
        if number % 9 == 4:
            ranks.run(batching.cancel, name, ranks=[DECODE])
        else:
            waiting[name] = prompt
    check(ranks, golden, waiting)
