"""The whole protocol under a seeded scheduler that loses, duplicates and delays messages, and cuts, pauses and kills.

One seed is one run: set SIMULATION_SEEDS="17" to replay it, "0:2000" to run more.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.helpers.simulation.requests import seed_batches
from tests.helpers.simulation.scenario import Scenario
from torchkv.protocol.messages import Attest, Quiesced
from torchkv.protocol.receiving.endings import ReceiveEndings
from torchkv.protocol.receiving.open_receives import OpenReceives
from torchkv.protocol.receiving.receiver import Receiver
from torchkv.protocol.receiving.request import ReceiverRequest, Writer

BATCHES = seed_batches("SIMULATION_SEEDS", "0:120", 20)
MUTANT_SEEDS = range(50, 200)
UNSTAGED = ("layer", "slice", "pages")  # those that these mutants damage; test_simulated_staging has others


def _ids(batch: range) -> str:
    return f"{batch.start}:{batch.stop}"


def _assert_clean(seed: int, *, benign: bool) -> Scenario:
    print(f"seed {seed}: replay with SIMULATION_SEEDS={seed}")
    scenario = Scenario(seed, benign=benign)
    problems = scenario.run()
    assert not problems, f"seed {seed}: {problems}"
    return scenario


@pytest.mark.parametrize("batch", BATCHES, ids=_ids)
def test_nothing_breaks_under_faults(batch: range) -> None:
    """Every call ends, received bytes are exact, no write lands on a page after its lease, nothing is left over."""
    for seed in batch:
        _assert_clean(seed, benign=False)


@pytest.mark.parametrize("batch", BATCHES[::3], ids=_ids)
def test_a_bad_network_alone_fails_nothing(batch: range) -> None:
    """Lost, duplicated and reordered messages slow requests down; every one of them still succeeds."""
    for seed in batch:
        scenario = _assert_clean(seed, benign=True)
        assert all(receiving.work.is_success() for receiving in scenario.receivings)


def test_the_runs_are_worth_their_time() -> None:
    """Success and failure are both common; otherwise the properties above were checked on nothing."""
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


def _frees_at_failure(self: ReceiveEndings, req: ReceiverRequest) -> None:
    if req.error is not None:
        self.end(req)


def _first_ack_is_enough(self: Receiver, src: int, message: Quiesced, _now: float) -> None:
    req = self.requests.by_generation.get(message.generation)
    if req is None or req.error is None:
        return
    for writer in req.writers.values():
        writer.quiescent = True
    self._endings.end_if_quiescent(req)


def _counts_messages(self: Receiver, src: int, message: Attest, now: float) -> None:
    """Completes after as many attestations as there are layers, as many systems do."""
    found = self.requests.writer(src, message.generation)
    if found is None:
        return
    req, writer = found
    writer.attested.add(message.layers, 0, req.num_tokens)
    if all(w.attested.first_gap(w.plan.owed(req.num_tokens)) is None for w in req.writers.values()):
        self._endings.succeed(req)


def _ignores_generations(self: OpenReceives, src: int, generation: int) -> tuple[ReceiverRequest, Writer] | None:
    exact = self.by_generation.get(generation)
    live = [exact] if exact is not None and exact.error is None else list(self.live.values())
    req = next((req for req in live if src in req.writers), None)
    return None if req is None else (req, req.writers[src])


def _assert_caught(symptom: str) -> None:
    for seed in MUTANT_SEEDS:
        problems = Scenario(seed, verbs=UNSTAGED).run()
        if any(symptom in problem for problem in problems):
            return
    pytest.fail(f"{len(MUTANT_SEEDS)} seeds found nothing wrong with a broken protocol")


@pytest.mark.parametrize(
    ("owner", "method", "mutant", "symptom"),
    [
        (ReceiveEndings, "end_if_quiescent", _frees_at_failure, "free, but written to"),
        (Receiver, "on_quiesced", _first_ack_is_enough, "free, but written to"),
        (Receiver, "on_attest", _counts_messages, "wrong bytes"),
        (OpenReceives, "writer", _ignores_generations, ""),
    ],
    ids=["frees at failure", "first ack", "counts messages", "no generation"],
)
def test_broken_protocols_are_caught(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, mutant: Callable[..., object], symptom: str
) -> None:
    monkeypatch.setattr(owner, method, mutant)
    _assert_caught(symptom)
