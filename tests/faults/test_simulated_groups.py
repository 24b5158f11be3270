"""Requests with layer groups under the seeded scheduler: every group's bytes, one outcome, no page given out twice.

One seed is one run: set SIMULATION_SEEDS="17" to replay it, "0:2000" to run more.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.helpers.layer_groups import check_received, hybrid, shared_cache, views
from tests.helpers.simulation.cluster import Cluster, Place
from tests.helpers.simulation.grouped import GroupScenario
from tests.helpers.simulation.requests import seed_batches
from torchkv.cache import KVCache
from torchkv.errors import PageOutOfRange
from torchkv.layout.group_map import GroupMap
from torchkv.protocol.actions import BoundGrant
from torchkv.protocol.receiving.request import ReceiverRequest
from torchkv.protocol.sending import grant_checks

Patch = pytest.MonkeyPatch
BATCHES = seed_batches("SIMULATION_SEEDS", "0:60", 15)
MUTANT_SEEDS = range(60)


def _clean(seed: int, *, benign: bool, views: bool) -> GroupScenario:
    print(f"seed {seed}: replay with SIMULATION_SEEDS={seed}")
    scenario = GroupScenario(seed, benign=benign, views=views)
    problems = scenario.run()
    assert not problems, f"seed {seed}: {problems}"
    return scenario


@pytest.mark.parametrize("views", [False, True], ids=["channel", "mapped"])
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_nothing_breaks_under_faults(batch: range, views: bool) -> None:
    for seed in batch:
        _clean(seed, benign=False, views=views)


@pytest.mark.parametrize("views", [False, True], ids=["channel", "mapped"])
def test_a_bad_network_alone_fails_nothing(views: bool) -> None:
    for seed in BATCHES[0]:
        scenario = _clean(seed, benign=True, views=views)
        assert all(received.work.is_success() for received in scenario.received)


def test_the_runs_are_worth_their_time() -> None:
    """Success and failure are common, so are absent pages, and groups that share their memory or have their own."""
    scenarios = [_clean(seed, benign=False, views=seed % 2 == 0) for seed in range(25)]
    outcomes = [received.work.exception() for s in scenarios for received in s.received]
    assert len(outcomes) / 6 < sum(error is None for error in outcomes) < len(outcomes) * 5 / 6
    kinds = {type(error).__name__ for error in outcomes if error is not None}
    assert {"TransferCancelled", "PeerLost"} <= kinds
    succeeded = [received for s in scenarios for received in s.received if received.work.is_success()]
    assert sum(any(part.absent_tokens for part in received.parts) for received in succeeded) > len(succeeded) / 4
    pools = {len({received.rank.cache.pools[g, False] for g in ("full", "near", "far")}) for received in succeeded}
    assert pools == {1, 3}


def overlapping(cluster: Cluster) -> list[str]:
    """Rank 1 receives two groups of which one page each has one id. What is wrong then."""
    writer, reader = cluster.ranks
    for rank in cluster.ranks:
        for array in views(rank.cache).values():
            array[...] = np.random.default_rng().integers(0, 256, array.shape, dtype=np.uint8)
    before = {key: array.copy() for key, array in views(reader.cache).items()}
    lists = {"full": [1, 2], "near": [2, 3], "far": [4, 5]}
    sent = {"full": [1, 2], "near": [3, 4], "far": [5, 6]}
    rx = reader.recv_pages("r", lists, "p")
    writer.send_pages("r", sent, "d")
    writer.finish("r", "d")
    assert cluster.run(rx.is_completed, limit=20.0)
    assert rx.exception() is None
    return check_received(reader.cache, before, lists, {0: (writer.cache.layout, views(writer.cache), sent)})


def pair(make: Callable[..., KVCache]) -> Cluster:
    return Cluster([Place("p", hybrid(), 16, 0, make), Place("d", hybrid(), 16, 0, make)])


def test_one_page_for_two_groups_of_one_memory_is_refused_and_would_be_corrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(PageOutOfRange, match=r"page 2 is named twice.*share their memory"):
        overlapping(pair(shared_cache))
    assert overlapping(pair(lambda layout, pages, _: KVCache.empty(layout, pages, "cpu"))) == []  # memory of their own
    spaces = [(group, slots) for group in hybrid().groups for slots in (False, True)]
    monkeypatch.setattr(KVCache, "_pool", lambda _cache: {space: number for number, space in enumerate(spaces)})
    assert any("wrong bytes" in problem for problem in overlapping(pair(shared_cache)))


# -- negative controls ------------------------------------------------------------------------------------------------


def _a_part_frees_the_pages_of_all(patch: Patch) -> None:
    patch.setattr(ReceiverRequest, "all_ended", property(lambda req: req.ended))
    patch.setattr(ReceiverRequest, "forget", lambda req: None)  # which shows at once that the others have not ended


def _absent_pages_are_counted_as_held(patch: Patch) -> None:
    patch.setattr(BoundGrant, "held_tokens", property(lambda grant: grant.prefix_tokens))
    real = grant_checks.behind

    def behind(grant: BoundGrant, start: int, num_pages: int, *, from_prompt: bool) -> tuple[int, int, int]:
        return real(grant, start, num_pages, from_prompt=True) if from_prompt else (start, num_pages, 0)

    patch.setattr(grant_checks, "behind", behind)
    patch.setattr("torchkv.protocol.sending.sender.behind", behind)


def _every_part_has_the_whole_layout(patch: Patch) -> None:
    patch.setattr(GroupMap, "of", lambda group_map, _request: group_map)


@pytest.mark.parametrize(
    ("breaks", "symptom"),
    [
        (_a_part_frees_the_pages_of_all, "free, but written to"),
        (_absent_pages_are_counted_as_held, "lies outside the grant"),
        (_every_part_has_the_whole_layout, "was not sent"),
    ],
)
def test_a_broken_version_is_caught(
    breaks: Callable[[Patch], None], symptom: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(monkeypatch)
    for seed in MUTANT_SEEDS:
        if any(symptom in problem for problem in GroupScenario(seed, benign=True).run()):
            return
    pytest.fail(f"{len(MUTANT_SEEDS)} seeds found nothing wrong with a broken version")
