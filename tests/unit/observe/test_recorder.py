"""The flight recorder's ring, what it keeps of an operation, and what it takes for a failure."""

from __future__ import annotations

import time

import numpy as np
import pytest

from torchkv.engine.work import KVWork
from torchkv.errors import PeerLost, TransferCancelled, TransferTimeout
from torchkv.observe.histogram import BOUNDS, Histogram
from torchkv.observe.recorder import PHASES, FlightRecorder, size_of


def settle(work: KVWork, error: Exception | None = None) -> None:
    work._settle(error)


def recorded(recorder: FlightRecorder, verb: str = "send_layer", request: str = "r") -> KVWork:
    work = KVWork(f"{verb}({request!r})")
    work._expect(1)
    work._number = recorder.begin(verb, request, 1, 3, 16, work._began)
    work._recorder, work._phase = recorder, PHASES.get(verb)
    return work


def test_it_keeps_the_last_operations_in_their_order() -> None:
    recorder = FlightRecorder(4)
    for number in range(10):
        recorder.begin("send_layer", f"r{number}", "decode", number, 8, time.perf_counter())
    entries = recorder.entries()
    assert [entry.request for entry in entries] == ["r6", "r7", "r8", "r9"]
    assert [entry.layers for entry in entries] == ["6", "7", "8", "9"]
    assert {entry.state for entry in entries} == {"scheduled"}
    assert not any(entry.retired for entry in entries)


def test_an_operation_tells_how_it_ended() -> None:
    recorder = FlightRecorder(8)
    before = time.time_ns()
    work = recorded(recorder)
    work._account(640, "direct")
    settle(work)
    (entry,) = recorder.entries()
    assert (entry.verb, entry.state, entry.retired, entry.nbytes, entry.path) == (
        "send_layer",
        "completed",
        True,
        640,
        "direct",
    )
    assert before - 10_000_000 <= entry.time_created_ns <= (entry.time_discovered_completed_ns or 0)
    assert entry.duration_ms is not None
    assert not any(histogram.total for histogram in recorder.phases.values())


def test_requests_are_timed_as_their_works_end() -> None:
    recorder = FlightRecorder(8)
    settle(recorded(recorder, "recv_pages"))
    finish = recorded(recorder, "finish")
    finish._first = finish._began - 7.0
    settle(finish)
    assert {phase: sum(each.counts) for phase, each in recorder.phases.items()} == {
        "cancel": 0,
        "receive": 1,
        "send": 1,
        "verdict": 1,
    }
    assert 7.0 < recorder.phases["send"].total < 8.0


def test_an_operation_that_has_left_the_ring_changes_nothing_there() -> None:
    recorder, told = FlightRecorder(2), list[str]()
    recorder.on_failure = told.append
    works = [recorded(recorder, request=f"r{number}") for number in range(4)]
    works[0]._account(5, "staged")
    settle(works[0])
    settle(works[1], PeerLost("rank 1 has ended"))
    assert [(entry.request, entry.state) for entry in recorder.entries()] == [("r2", "scheduled"), ("r3", "scheduled")]
    assert told == ["send_layer('r1') failed: PeerLost: rank 1 has ended"]


def test_failures_are_told_but_not_cancelled_or_refused_ones() -> None:
    told: list[str] = []
    recorder = FlightRecorder(8)
    recorder.on_failure = told.append
    settle(recorded(recorder), TransferCancelled("cancelled"))
    recorder.refused("send_layer", "r", 1, 0, 1, TransferTimeout("a tombstone's error"))
    assert told == []
    settle(recorded(recorder, request="lost"), PeerLost("rank 1 has ended"))
    assert told == ["send_layer('lost') failed: PeerLost: rank 1 has ended"]
    assert [entry.state for entry in recorder.entries()] == ["failed"] * 3
    assert not any(histogram.total for histogram in recorder.phases.values())


def test_a_long_wait_in_vain_is_told_and_a_poll_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    recorder = FlightRecorder(8)
    recorder.on_failure = told.append
    work = recorded(recorder, "recv_pages")
    with pytest.raises(TransferTimeout):
        work.wait(0.001)
    assert told == []
    monkeypatch.setattr("torchkv.observe.recorder.LONG_WAIT", 0.001)
    with pytest.raises(TransferTimeout):
        work.wait(0.002)
    assert told == ["recv_pages('r'): not complete after wait(0.002 s)"]


def test_an_operation_that_settles_twice_is_counted_once() -> None:
    """The thread that completes a work and the verb that records it may both find it complete."""
    recorder = FlightRecorder(8)
    work = recorded(recorder, "recv_pages")
    settle(work)
    work._record()
    assert sum(recorder.phases["receive"].counts) == 1


def test_what_the_caller_may_change_is_copied() -> None:
    recorder = FlightRecorder(8)
    layers, peers = [1, 2], [0, 1]
    recorder.begin("send_pages", "r", peers, layers, 1, 0.0)
    layers.append(3)
    peers.clear()
    recorder.begin("send_pages", "r", None, range(40), 1, 0.0)
    recorder.begin("send_pages", "r", None, np.arange(40, 80), 1, 0.0)
    recorder.begin("send_pages", "r", None, 4.5, 1, 0.0)
    entries = recorder.entries()
    assert [entry.layers for entry in entries] == ["1, 2", "0 to 39, 40 in all", "40 to 79, 40 in all", "4.5"]
    assert [entry.peers for entry in entries] == ["0, 1", "", "", ""]


def test_sizes() -> None:
    assert size_of([1, 2]) == size_of(np.arange(2)) == size_of({"a": [1], "b": [2]}) == 2
    assert size_of(5) == 0


def test_histograms_count_each_duration_once() -> None:
    histogram = Histogram()
    for seconds in (0.0, BOUNDS[0], BOUNDS[0] * 1.01, 1e9):
        histogram.add(seconds)
    assert histogram.cumulative[0] == ("1e-05", 2)
    assert histogram.cumulative[1] == ("2.5e-05", 3)
    assert histogram.cumulative[-2:] == [("50", 3), ("+Inf", 4)]
    copied = histogram.copy()
    histogram.add(1.0)
    assert sum(copied.counts) == 4
