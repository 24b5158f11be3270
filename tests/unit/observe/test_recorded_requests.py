"""Each call of a verb has one entry in a dump, whoever serves it, and whoever has to finish it: loop or Python."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from torchkv_loopback import Faults

from tests.helpers.simulation.cluster import Cluster, Place, Rank
from torchkv.engine.resident.journal import Journal
from torchkv.engine.work import KVWork
from torchkv.errors import KVError
from torchkv.group.reports.snapshot import dump, stats
from torchkv.layout.layout import KVLayout
from torchkv.observe.dump_format import Entry
from torchkv.options import Options

WRITER, READER = 0, 1
LAYERS = 3
PAGES = 4  # of a request


def cluster(seed: int = 0, *, faults: Faults | None = None, flight_recorder: int = 4096) -> Cluster:
    layout = KVLayout.gqa(num_layers=LAYERS, num_kv_heads=1, head_dim=2, page_size=2, dtype=torch.int16)
    limits = {"timeout": 3.0, "grant_timeout": 2.0, "heartbeat": 0.2}
    options = Options(transport="loopback", flight_recorder=flight_recorder, **limits)
    places = [Place("p", layout, 64), Place("d", layout, 64)]
    return Cluster(places, seed=seed, options=options, views=True, faults=faults)


def entries(rank: Rank) -> list[Entry]:
    found = dump(rank, "a test").entries
    assert [entry.time_created_ns for entry in found] == sorted(entry.time_created_ns for entry in found)
    assert len({entry.record_id for entry in found if entry.record_id >= 0}) == len(
        [entry for entry in found if entry.record_id >= 0]
    )
    return found


def test_the_loop_records_what_it_serves_and_python_nothing() -> None:
    ranks = cluster()
    work = ranks[WRITER].send_layer("r", 0, [5, 6], READER)
    assert [(each.record_id, each.state) for each in entries(ranks[WRITER])] == [(-1, "scheduled")]  # not begun
    received = ranks[READER].recv_pages("r", [3, 1], WRITER)
    assert ranks.run(work.is_completed, limit=20)
    ranks[WRITER].send_slice("r", [1, 2], [5, 6], READER)
    finished = ranks[WRITER].finish("r", READER)
    assert ranks.run(lambda: received.is_completed() and finished.is_completed(), limit=20)
    sent, (got,) = entries(ranks[WRITER]), entries(ranks[READER])
    assert [(each.verb, each.layers, each.peers, each.num_pages) for each in sent] == [
        ("send_layer", "0", "1", 2),
        ("send_slice", "1, 2", "1", 2),
        ("finish", "", "1", 0),
    ]
    assert (got.verb, got.request, got.peers, got.num_pages, got.nbytes) == ("recv_pages", "r", "0", 2, received.bytes)
    for each in (*sent, got):
        assert each.record_id % 2 == 0  # the loop's
        assert (each.state, each.retired, each.request, each.error) == ("completed", True, "r", "")
        assert each.path == ("none" if each.verb == "finish" else "direct")
    assert sum(each.nbytes for each in sent) == got.nbytes
    phases = {phase: sum(each.counts) for phase, each in stats(ranks[WRITER]).phases.items()}
    assert phases == {"grant": 1, "send": 1, "verdict": 1, "receive": 0, "cancel": 0}
    assert sum(stats(ranks[READER]).phases["receive"].counts) == 1


def test_a_verb_to_several_receivers_has_one_entry() -> None:
    """Python's, whether the verb goes the general way, as the first one, or the straight one."""

    def layout(rank: int, size: int) -> KVLayout:
        settings = {"num_layers": LAYERS, "num_kv_heads": 2, "head_dim": 2, "page_size": 2, "dtype": torch.int16}
        return KVLayout.gqa(**settings, tp_rank=rank, tp_size=size)

    places = [Place("p", layout(0, 1), 64), *(Place("d", layout(rank, 2), 64) for rank in (0, 1))]
    ranks = Cluster(places, options=Options(transport="loopback", flight_recorder=64), views=True)
    received = [rank.recv_pages("r", [3, 1], "p") for rank in ranks.ranks[1:]]
    writer = ranks[WRITER]
    works = [writer.send_slice("r", 0, [5, 6], "d")]
    assert ranks.run(works[0].is_completed, limit=20)
    works += [writer.send_slice("r", layer, [5, 6], "d") for layer in (1, 2)]
    works.append(writer.finish("r", "d"))
    assert ranks.run(lambda: all(work.is_completed() for work in (*works, *received)), limit=20)
    sent = entries(writer)
    assert [(each.verb, each.layers, each.peers, each.num_pages) for each in sent] == [
        ("send_slice", "0", "d", 2),
        ("send_slice", "1", "d", 2),
        ("send_slice", "2", "d", 2),
        ("finish", "", "d", 0),
    ]
    assert [(each.state, each.nbytes) for each in sent] == [("completed", work.bytes) for work in works]
    assert all(each.record_id % 2 for each in sent)


def test_what_the_loop_has_staged_says_so() -> None:
    layout = KVLayout.gqa(num_layers=1, num_kv_heads=1, head_dim=2, page_size=2, dtype=torch.int16)
    staging = {"staging_send": 1 << 16, "staging_recv": 1 << 16}
    options = Options(transport="loopback", flight_recorder=64, **staging)
    ranks = Cluster([Place("p", layout), Place("d", layout)], options=options, network=True)
    for number in range(4):  # the first ones may find no stage that stands already
        received = ranks[READER].recv_pages(f"r{number}", [3, 1], WRITER)
        sent = ranks[WRITER].send_pages(f"r{number}", [5, 6], READER)
        finished = ranks[WRITER].finish(f"r{number}", READER)
        assert ranks.run(
            lambda received=received, finished=finished: received.is_completed() and finished.is_completed(), limit=20
        )
        assert ranks.run(lambda: False, limit=0.2) is False
    assert (sent.path, received.path) == ("staged", "staged")
    for rank, verb in ((WRITER, "send_pages"), (READER, "recv_pages")):
        *_, entry = (each for each in entries(ranks[rank]) if each.verb == verb)
        assert entry.record_id % 2 == 0  # the loop's
        assert (entry.path, entry.nbytes) == ("staged", received.bytes)


def test_a_request_that_fails_on_the_loop_is_told_of() -> None:
    ranks, told = cluster(), list[str]()
    recorder = ranks[WRITER].engine.recorder
    assert recorder is not None
    recorder.on_failure = told.append
    work = ranks[WRITER].send_layer("r", 0, [5, 6], READER)
    assert work._in_journal
    assert ranks.run(work.is_completed, limit=20)  # nobody grants it
    (entry,) = entries(ranks[WRITER])
    assert (entry.verb, entry.request, entry.state) == ("send_layer", "r", "failed")
    assert entry.error.startswith("TransferTimeout: ")
    assert told == [f"send_layer('r') failed: {entry.error}"]


def test_what_is_recorded_has_an_end_and_the_names_of_ended_requests_stay_as_long() -> None:
    ranks = cluster(flight_recorder=7)
    for turn in range(5):
        received = ranks[READER].recv_pages(f"r{turn}", [3, 1], WRITER)
        ranks[WRITER].send_pages(f"r{turn}", [5, 6], READER)
        finished = ranks[WRITER].finish(f"r{turn}", READER)
        assert ranks.run(lambda got=received, sent=finished: got.is_completed() and sent.is_completed(), limit=20)
    assert [(each.verb, each.request) for each in entries(ranks[WRITER])] == [
        ("finish", "r1"),
        *((verb, f"r{turn}") for turn in (2, 3, 4) for verb in ("send_pages", "finish")),
    ]


def test_a_dump_while_the_loop_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It tells what the loop has recorded, the verbs that it has not begun, and of requests what Python knows."""
    monkeypatch.setattr("torchkv.group.reports.snapshot.LOOP_PATIENCE", 0.01)
    ranks = cluster()
    received = ranks[READER].recv_pages("r", [3, 1], WRITER)
    work = ranks[WRITER].send_layer("r", 0, [5, 6], READER)
    assert ranks.run(work.is_completed, limit=20)
    ranks[WRITER].send_layer("r", 1, [5, 6], READER)
    ranks[WRITER].send_layer("r", 2, [5, 6], READER)
    ranks[WRITER].finish("r", READER)
    for rank in ranks.ranks:
        assert rank.engine.flows is not None
        rank.engine.flows.core.world["lock"] = 1  # as a loop in the middle of a step
    sent, got = dump(ranks[WRITER], "a test"), dump(ranks[READER], "a test")
    assert (sent.loop, got.loop) == ("hangs", "hangs")
    assert [(each.verb, each.layers, each.state) for each in sent.entries] == [
        ("send_layer", "0", "completed"),
        ("send_layer", "1", "scheduled"),
        ("send_layer", "2", "scheduled"),
        ("finish", "", "scheduled"),
    ]
    assert [each.state for each in sent.sends or []] == ["bound"]
    assert [each.request for each in got.receives or []] == ["r"]
    assert not received.is_completed()


class Traffic:
    """Random calls of two ranks, with what each should have left in its rank's dump."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        faults = Faults(min_delay=1e-4, max_delay=2e-3, drop=self.dice.choice([0.0, 0.0, 0.1]))
        self.ranks = cluster(seed, faults=faults)
        self.called: tuple[list[tuple[str, str, KVWork]], ...] = ([], [])
        self.refused: tuple[Counter[tuple[str, str]], ...] = (Counter(), Counter())

    def call(self, rank: int, verb: str, request: str, *args: object) -> None:
        try:
            work = getattr(self.ranks[rank], verb)(request, *args)
        except KVError:
            self.refused[rank][verb, request] += 1
        else:
            self.called[rank].append((verb, request, work))

    def request(self, name: str) -> list[tuple[object, ...]]:
        """Calls of one request, some of which make no sense."""
        dice, calls = self.dice, list[tuple[object, ...]]()
        pages, slots = dice.sample(range(64), PAGES), dice.sample(range(64), PAGES)
        chunks = [(0, PAGES)] if dice.random() < 0.6 else [(0, 1), (1, PAGES)]
        for lo, hi in chunks:
            for layer in range(LAYERS):
                calls.append((WRITER, "send_layer", name, layer, pages[lo:hi], READER))
                if lo:
                    calls[-1] = (WRITER, "send_pages", name, pages, READER)
        calls.append((WRITER, "finish", name, READER))
        calls.insert(dice.choice([0, 0, dice.randrange(len(calls))]), (READER, "recv_pages", name, slots, WRITER))
        for verb in ("cancel", "withdraw"):
            if dice.random() < 0.25:
                who = WRITER if verb == "withdraw" else dice.choice([WRITER, READER])
                calls.insert(dice.randrange(len(calls)), (who, verb, name))
        return calls

    def run(self) -> None:
        waiting = [self.request(f"r{number}") for number in range(6)]
        while waiting:
            calls = self.dice.choice(waiting)
            rank, verb, name, *rest = calls.pop(0)
            self.call(int(str(rank)), str(verb), str(name), *rest)
            if not calls:
                waiting.remove(calls)
            if self.dice.random() < 0.3:
                self.ranks.run(lambda: self.dice.random() < 0.1, limit=0.5)
        for rank in (WRITER, READER):
            for number in range(6):
                self.call(rank, "cancel", f"r{number}")
        works = [work for called in self.called for _, _, work in called]
        assert self.ranks.run(lambda: all(work.is_completed() for work in works), limit=60)


@pytest.mark.parametrize("seed", range(40))
def test_each_call_has_one_entry_that_says_how_it_ended(seed: int) -> None:
    traffic = Traffic(seed)
    traffic.run()
    for rank in (WRITER, READER):
        expected: Counter[tuple[str, str, str]] = Counter()
        nbytes: Counter[tuple[str, str]] = Counter()
        for verb, request, work in traffic.called[rank]:
            expected[verb, request, "completed" if work.is_success() else "failed"] += 1
            nbytes[verb, request] += work.bytes if work.is_success() else 0
        for (verb, request), count in traffic.refused[rank].items():
            expected[verb, request, "failed"] += count
        found = entries(traffic.ranks[rank])
        assert Counter((each.verb, each.request, each.state) for each in found) == expected
        moved: Counter[tuple[str, str]] = Counter()
        for each in found:
            moved[each.verb, each.request] += each.nbytes
            assert (each.error != "") == (each.state == "failed")
        assert moved == nbytes


def test_the_random_calls_meet_all_ways_in_which_an_operation_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would tell little."""
    ways: Counter[str] = Counter()
    hand_over = Journal._hand_over

    def counting(self: Journal, number: int, work: KVWork, verb: str, *args: Any) -> None:
        ways[f"{verb} handed over"] += number > 0
        hand_over(self, number, work, verb, *args)

    monkeypatch.setattr(Journal, "_hand_over", counting)
    for seed in range(40):
        traffic = Traffic(seed)
        traffic.run()
        for rank in (WRITER, READER):
            for each in entries(traffic.ranks[rank]):
                ways[f"loop {each.state}" if each.record_id % 2 == 0 else f"Python {each.state}"] += 1
    wanted = ["loop completed", "Python completed", "Python failed"]
    wanted += [f"{verb} handed over" for verb in ("send_layer", "finish", "recv_pages")]
    assert min(ways[way] for way in wanted) > 4, ways
    assert not ways["loop failed"] + ways["loop scheduled"]
