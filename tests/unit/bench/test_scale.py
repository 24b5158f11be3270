"""Simulated clusters: equal for equal seeds, nothing is lost, and what a request costs does not depend on the peers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from torchkv.bench import __main__ as bench
from torchkv.bench.scale import study
from torchkv.bench.scale.calls import count_calls
from torchkv.bench.scale.memory import peer_memory
from torchkv.bench.scale.network import Clock, LinkModel, Network, Nic
from torchkv.bench.scale.resident import loop_cost
from torchkv.bench.scale.simulation import Outcome, Simulation
from torchkv.bench.scale.study import Study, known_peers, message_problem
from torchkv.bench.scale.workload import LONG, SHORT, Shape, Workload
from torchkv.layout.pair_plan import PairPlan

MODEL = LinkModel()
WORKLOADS = pytest.mark.parametrize("workload", [LONG, SHORT], ids=lambda workload: workload.name)


def run(ranks: int, workload: Workload = SHORT, requests: int = 40, **given: Any) -> Outcome:
    return Simulation(Shape(ranks), workload, requests=requests, **given).run()


def calls(ranks: int, requests: int, **given: Any) -> tuple[float, Outcome]:
    """Of a request, with the outcome. Requests come so seldom that each is alone."""
    outcomes: list[Outcome] = []
    simulation = Simulation(Shape(ranks), SHORT, requests=requests, load=0.01, **given)
    total = sum(count_calls(lambda: outcomes.append(simulation.run())).values())
    return total / requests, outcomes[0]


def plain(outcome: Outcome) -> dict[str, Any]:
    """Without what is measured."""
    return {name: value for name, value in dataclasses.asdict(outcome).items() if name not in ("cpu", "wall")}


# -- a run is a function of its seed -----------------------------------------------------------------------------------


@WORKLOADS
def test_equal_seeds_make_equal_runs(workload: Workload) -> None:
    first, again, other = (run(32, workload, seed=seed) for seed in (3, 3, 4))
    assert plain(first) == plain(again)
    assert first.digest != other.digest
    assert plain(first) != plain(run(32, workload, seed=3, model=LinkModel(cpu=31e-6)))


# -- nothing is lost, and requests take the messages of their shape ----------------------------------------------------


@WORKLOADS
@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_every_byte_and_message_arrives(workload: Workload, ranks: int) -> None:
    outcome = run(ranks, workload, requests=50)
    assert outcome.problems == []
    assert outcome.nbytes == 50 * workload.nbytes
    assert message_problem(outcome) == ""
    assert outcome.frames >= sum(outcome.messages.values())


def test_messages_grow_with_requests_and_with_nothing_else() -> None:
    counts = {(ranks, n): run(ranks, requests=n).messages for ranks in (8, 64, 256) for n in (20, 60)}
    assert {kind: 3 * count for kind, count in counts[8, 20].items()} == counts[8, 60]
    assert counts[8, 20] == counts[64, 20] == counts[256, 20]
    assert counts[8, 60] == counts[64, 60] == counts[256, 60]


def test_lost_frames_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    carry, carried = Network.carry, []

    def lossy(self: Network, frames: list[bytes], *rest: Any) -> None:
        carried.append(frames)
        carry(self, [] if len(carried) == 20 else frames, *rest)
        self.frames += len(frames) if len(carried) == 20 else 0

    monkeypatch.setattr(Network, "carry", lossy)
    outcome = run(8)
    assert outcome.failed == 0, "it was sent again"
    assert [text.partition(":")[0] for text in outcome.problems] == ["frames"]


def test_bytes_too_many_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = PairPlan.nbytes
    monkeypatch.setattr(PairPlan, "nbytes", lambda *given: nbytes(*given) + 1)
    assert [text.partition(":")[0] for text in run(2).problems] == ["bytes"]


def test_a_study_says_what_is_not_as_claimed() -> None:
    good = run(8)
    assert Study(MODEL, cluster=[good]).problems == []
    more = dataclasses.replace(good, messages={**good.messages, "Alive": 1}, heard={**good.messages, "Alive": 1})
    assert "messages, not" in Study(MODEL, cluster=[more]).problems[0]
    assert "1 requests have failed" in Study(MODEL, loads=[dataclasses.replace(good, failed=1)]).problems[0]
    known = known_peers((8,), SHORT, MODEL, requests=8, seed=0)
    worse = dataclasses.replace(known[0], peers=16, calls=known[0].calls + 1)
    assert "costs more calls" in Study(MODEL, known=[*known, worse]).problems[0]


# -- what a request costs ----------------------------------------------------------------------------------------------


def test_a_request_calls_no_function_more_where_more_peers_are_known() -> None:
    """Not one call: nothing on a request's path goes through the peers."""
    known = known_peers((8, 64, 1024), LONG, MODEL, requests=8, seed=1)
    assert len({each.calls for each in known}) == 1
    assert len({each.digest for each in known}) == 1
    assert known[0].calls > 1000
    assert known[1].strangers == pytest.approx(known[2].strangers, rel=0.1)


def test_calls_grow_with_requests_linearly() -> None:
    few, many, more = (calls(8, requests)[0] * requests for requests in (20, 60, 100))
    assert more - many == pytest.approx(many - few, rel=0.03)


def test_first_requests_cost_the_same_in_clusters_of_any_size() -> None:
    """Where nearly every request is the first between two instances, and every acknowledgement goes alone."""
    (small, one), (large, two) = calls(512, 20, seed=5), calls(2048, 20, seed=5)
    assert one.frames_per_request == pytest.approx(two.frames_per_request, rel=0.02)
    assert small == pytest.approx(large, rel=0.02)


def test_a_scan_of_all_peers_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchkv.protocol.sending.sender import Sender

    admit = Sender.admit

    def scan(self: Sender, *args: Any, **given: Any) -> None:
        for rank in self._group_map.info:
            self.named(rank)
        admit(self, *args, **given)

    monkeypatch.setattr(Sender, "admit", scan)
    found = Study(MODEL, known=known_peers((8, 64), SHORT, MODEL, requests=8, seed=1)).problems
    assert "costs more calls" in found[0]


def test_memory_grows_with_peers_linearly() -> None:
    few, many = (peer_memory(peers, SHORT) for peers in (128, 1024))
    assert few.known == pytest.approx(many.known, rel=0.1)
    assert few.served == pytest.approx(many.served, rel=0.2)


# -- the model ---------------------------------------------------------------------------------------------------------


def test_transfers_pass_a_nic_one_after_the_other() -> None:
    clock = Clock()
    network = Network(clock, LinkModel(latency=1.0, bandwidth=10.0))
    nics, ended = [Nic() for _ in range(3)], []
    network.transfer(nics[0], nics[1], 20, lambda: ended.append(("a", clock.now)))
    network.transfer(nics[0], nics[2], 10, lambda: ended.append(("b", clock.now)))  # waits for a to be sent
    network.transfer(nics[1], nics[2], 10, lambda: ended.append(("c", clock.now)))  # waits for b to be received
    assert not clock.run(lambda: False)
    assert ended == [("a", 4.0), ("b", 5.0), ("c", 6.0)]
    assert (nics[0].sending, nics[2].receiving, network.nbytes) == (3.0, 2.0, 40)


def test_the_clock_keeps_the_order_of_times_and_of_notes() -> None:
    clock, seen = Clock(), list[int]()
    for number, time in enumerate((2.0, 1.0, 1.0)):
        clock.at(time, lambda number=number: seen.append(number))
    assert clock.run(lambda: len(seen) == 2)
    assert (seen, clock.now) == ([1, 2], 1.0)


def test_it_bends_where_something_is_busy_all_the_time() -> None:
    served, threads = run(16, requests=3000, load=400.0), run(16, requests=200)
    assert served.problems == []
    assert served.served < 0.6 * served.offered
    assert served.thread > 0.6 > 0.1 > threads.thread, "ranks wait for one another's batches of frames, too"
    assert served.p50 > 5 * threads.p50
    bytes_bound = run(16, LONG, requests=400, load=40.0)
    assert bytes_bound.served < 0.6 * bytes_bound.offered
    assert bytes_bound.nic > 0.7 > bytes_bound.thread


def test_shapes_have_unlike_tensor_parallelism() -> None:
    assert [(Shape(n).prefill_tp, Shape(n).decode_tp) for n in (2, 4, 8, 4096)] == [(1, 1), (2, 1), (4, 2), (4, 2)]
    assert Shape(16).prefills == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert Shape(16).decodes == [(8, 9), (10, 11), (12, 13), (14, 15)]
    with pytest.raises(ValueError, match="power of two"):
        Shape(12)


def test_a_loop_with_many_mailboxes_serves_the_same_requests() -> None:
    few, many = (loop_cost(loops, requests=5) for loops in (2, 64))
    assert few.turns == many.turns > 0
    assert few.request > 0 < many.turn


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(study, "LOADS", {"long": (1.0,), "short": (1.0,)})
    monkeypatch.setattr("torchkv.bench.scale.table.LOADS", study.LOADS)
    arguments = ["simulate", "--ranks", "2,8,16", "--least", "20", "--requests", "1", "--at", "8", "--no-real"]
    plot = tmp_path / "scale.svg"
    assert bench.main([*arguments, "--cpu-us", "12", "--json", "--plot", str(plot)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["model"] == {"latency": 5e-6, "bandwidth": 50e9, "cpu": 12e-6}
    assert [run["ranks"] for run in shown["cluster"]] == [2, 8, 16] * 2
    assert "<svg" in plot.read_text(encoding="utf-8")


def test_the_command_fails_if_something_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torchkv.bench.scale.table.LOADS", {"long": (), "short": ()})
    monkeypatch.setattr(study, "message_problem", lambda run: "too many")
    arguments = ["simulate", "--ranks", "2", "--least", "10", "--no-real", "--no-loops", "--cpu-us", "12"]
    assert bench.main(arguments) == 1
    assert "WRONG: too many" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [["--ranks", "3"], ["--least", "0"], ["--cpu-us", "-1"]])
def test_arguments_that_make_no_sense(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        bench.main(["simulate", *wrong])
    assert raised.value.code == 2
