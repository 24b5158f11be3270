"""The whole protocol under a scheduler that loses, doubles, delays, cuts, pauses and kills.

One seed is one run: set SIMULATION_SEEDS="17" or "0:2000" to replay or to look further.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "unit")]

from scenario import Scenario  # noqa: E402 - only now on the path

from torchkv.protocol.receive import Receive, Writer  # noqa: E402
from torchkv.protocol.receiver import Receiver  # noqa: E402
from torchkv.wire import Attest, Quiesced  # noqa: E402

SEEDS_PER_TEST = 20
MUTANT_SEEDS = range(50, 200)
UNSTAGED = ("layer", "slice", "pages")  # where these mutants do their damage; test_simulated_staging has others


def _seeds() -> range:
    given = os.environ.get("SIMULATION_SEEDS", "0:300")
    first, _, last = given.partition(":")
    return range(int(first), int(last or int(first) + 1))


def _batches() -> list[range]:
    seeds = _seeds()
    return [seeds[i : i + SEEDS_PER_TEST] for i in range(0, len(seeds), SEEDS_PER_TEST)]


def _ids(batch: range) -> str:
    return f"{batch.start}:{batch.stop}"


def _assert_clean(seed: int, *, benign: bool) -> Scenario:
    print(f"seed {seed}: replay with SIMULATION_SEEDS={seed}")
    scenario = Scenario(seed, benign=benign)
    problems = scenario.run()
    assert not problems, f"seed {seed}: {problems}"
    return scenario


@pytest.mark.parametrize("batch", _batches(), ids=_ids)
def test_nothing_breaks_under_faults(batch: range) -> None:
    """Every call ends, received bytes are exact, no write lands on a page after its lease, nothing is left over."""
    for seed in batch:
        _assert_clean(seed, benign=False)


@pytest.mark.parametrize("batch", _batches()[::8], ids=_ids)
def test_a_bad_network_alone_fails_nothing(batch: range) -> None:
    """Lost, doubled and swapped messages slow requests down; every one of them still succeeds."""
    for seed in batch:
        scenario = _assert_clean(seed, benign=True)
        assert all(receiving.work.is_success() for receiving in scenario.receivings)


def test_the_runs_are_worth_their_time() -> None:
    """Both outcomes are common, or the properties above were checked on nothing."""
    outcomes = [r.work.exception() for seed in range(30) for r in _assert_clean(seed, benign=False).receivings]
    succeeded = sum(error is None for error in outcomes)
    kinds = {type(error).__name__ for error in outcomes if error is not None}
    assert len(outcomes) / 5 < succeeded < len(outcomes) * 4 / 5
    assert {"TransferCancelled", "TransferTimeout", "PeerLost"} <= kinds


@pytest.mark.parametrize("seed", [3, 58])
def test_equal_seeds_give_equal_runs(seed: int) -> None:
    first, second = (_assert_clean(seed, benign=False).trace for _ in range(2))
    assert first == second
    assert len(first) > 5


# -- negative controls: broken protocols that the same checks must catch ----------------------------------------------


def _frees_at_failure(self: Receiver, receive: Receive) -> None:
    if receive.error is not None:
        self._end(receive)


def _first_ack_is_enough(self: Receiver, src: int, message: Quiesced, _now: float) -> None:
    receive = self._receives.get(message.generation)
    if receive is None or receive.error is None:
        return
    for writer in receive.writers.values():
        writer.quiescent = True
    self._end_if_quiescent(receive)


def _counts_messages(self: Receiver, src: int, message: Attest, now: float) -> None:
    """Done when as many attestations have come as there are layers: what many systems do."""
    found = self._writer(src, message.generation)
    if found is None:
        return
    receive, writer = found
    writer.attested.add(message.layers, 0, receive.num_tokens)
    if all(w.attested.first_gap(w.plan.owed(receive.num_tokens)) is None for w in receive.writers.values()):
        self._succeed(receive)


def _ignores_generations(self: Receiver, src: int, generation: int) -> tuple[Receive, Writer] | None:
    exact = self._receives.get(generation)
    live = [exact] if exact is not None and exact.error is None else list(self._live.values())
    receive = next((receive for receive in live if src in receive.writers), None)
    return None if receive is None else (receive, receive.writers[src])


def _assert_caught(symptom: str) -> None:
    for seed in MUTANT_SEEDS:
        problems = Scenario(seed, verbs=UNSTAGED).run()
        if any(symptom in problem for problem in problems):
            return
    pytest.fail(f"{len(MUTANT_SEEDS)} seeds found nothing wrong with a broken protocol")


@pytest.mark.parametrize(
    ("method", "mutant", "symptom"),
    [
        ("_end_if_quiescent", _frees_at_failure, "free, but written to"),
        ("on_quiesced", _first_ack_is_enough, "free, but written to"),
        ("on_attest", _counts_messages, "wrong bytes"),
        ("_writer", _ignores_generations, ""),
    ],
    ids=["frees at failure", "first ack", "counts messages", "no generation"],
)
def test_broken_protocols_are_caught(
    monkeypatch: pytest.MonkeyPatch, method: str, mutant: Callable[..., object], symptom: str
) -> None:
    monkeypatch.setattr(Receiver, method, mutant)
    _assert_caught(symptom)
