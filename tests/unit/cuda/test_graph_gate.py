"""GraphGate's counting, with counts in host memory and steps run by hand; the rest needs a GPU (tests/gpu)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.fakes.cuda_driver import FakeDriver, install
from torchkv.cuda import graph_gate as gates
from torchkv.cuda.graph_gate import Expectation, GateEvent, GraphGate
from torchkv.errors import ProtocolError, TransportUnavailable

LAYERS = 4


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the current stream is being captured, as set by the test."""
    state = [False]
    install(monkeypatch, FakeDriver())
    monkeypatch.setattr(gates, "is_capturing", lambda index: False)
    monkeypatch.setattr(gates, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state[0])
    monkeypatch.setattr(gates, "_captured", {})

    def counters(num_layers: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        assert device.type == "cuda"
        return torch.zeros(num_layers, dtype=torch.int64), torch.zeros(num_layers, dtype=torch.int64)

    monkeypatch.setattr(gates, "_counters", counters)
    return state


def ready(events: list[GateEvent]) -> list[bool]:
    return [event.query() for event in events]


def replay(graph_gate: GraphGate, layers: range = range(LAYERS)) -> None:
    """Does what a replay does on the device: the marks' work, without a call of the host."""
    for layer in layers:
        count, seen = graph_gate._pairs[layer]
        count.add_(1)
        seen.copy_(count)


def test_each_arm_waits_for_its_own_replay(capturing: list[bool]) -> None:
    graph_gate = GraphGate(LAYERS, torch.device("cuda", 0))
    first, second = graph_gate.arm(), graph_gate.arm()
    assert ready(first) + ready(second) == [False] * 8
    replay(graph_gate, range(2))
    assert ready(first) == [True, True, False, False]
    assert ready(second) == [False] * 4
    replay(graph_gate, range(2, LAYERS))
    assert ready(first) == [True] * 4
    assert ready(second) == [False] * 4, "the first replay must not open the second's gates"
    replay(graph_gate)
    assert ready(second) == [True] * 4
    assert ready(graph_gate.arm()) == [False] * 4


def test_eager_marks_count_even_while_the_device_has_not_run_them(capturing: list[bool]) -> None:
    counts = np.zeros(2, dtype=np.int64)
    expectation = Expectation(counts)
    expectation.marked(0)  # warm-ups, still running
    expectation.marked(0)
    assert expectation.arm() == [3, 1]
    counts[0] = 2
    assert expectation.arm() == [4, 2]


def test_finished_replays_that_were_not_armed_are_skipped(capturing: list[bool]) -> None:
    graph_gate = GraphGate(LAYERS, torch.device("cuda", 0))
    replay(graph_gate)
    replay(graph_gate)
    events = graph_gate.arm()
    assert ready(events) == [False] * 4
    replay(graph_gate)
    assert ready(events) == [True] * 4


@settings(max_examples=200, deadline=None)
@given(steps=st.lists(st.sampled_from(["arm", "replay", "unarmed"]), max_size=60))
def test_no_event_is_early_whatever_the_order(steps: list[str]) -> None:
    """Arm n is open exactly when the n-th armed replay has run; unarmed ones run to their end between steps."""
    counts = np.zeros(1, dtype=np.int64)
    expectation = Expectation(counts)
    arms: list[GateEvent] = []
    replays = 0
    for step in steps:
        if step == "arm":
            arms.append(GateEvent(counts, 0, expectation.arm()[0]))
        elif step == "replay" and replays < len(arms):
            counts[0] += 1
            replays += 1
        elif step == "unarmed" and replays == len(arms):
            counts[0] += 1
        assert [event.query() for event in arms] == [n < replays for n in range(len(arms))]


def test_an_arm_whose_replay_never_came_makes_later_events_late_not_early(capturing: list[bool]) -> None:
    graph_gate = GraphGate(1, torch.device("cuda", 0))
    given_up, wanted = graph_gate.arm(), graph_gate.arm()
    replay(graph_gate, range(1))
    assert ready(given_up) == [True]
    assert ready(wanted) == [False]


def test_marks_inside_a_capture_are_not_counted_by_the_host_and_keep_the_gate_alive(capturing: list[bool]) -> None:
    graph_gate = GraphGate(LAYERS, torch.device("cuda", 0))
    capturing[0] = True
    for layer in range(LAYERS):
        graph_gate.mark(layer)
    capturing[0] = False
    assert list(gates._captured.values()) == [graph_gate]
    assert not graph_gate._expectation._enqueued.any()
    graph_gate.mark(1)
    assert graph_gate._expectation._enqueued.tolist() == [0, 1, 0, 0]


def test_counts_go_past_what_fits_32_bits(capturing: list[bool]) -> None:
    graph_gate = GraphGate(1, torch.device("cuda", 0))
    count, seen = graph_gate._pairs[0]
    count.fill_(1 << 40)
    seen.copy_(count)
    events = graph_gate.arm()
    assert ready(events) == [False]
    replay(graph_gate, range(1))
    assert ready(events) == [True]


@pytest.mark.parametrize("num_layers", [0, -1, True, 1.5, "4", None])
def test_bad_numbers_of_layers(num_layers: Any) -> None:
    with pytest.raises(ProtocolError, match="num_layers"):
        GraphGate(num_layers)


@pytest.mark.parametrize("layer", [-1, LAYERS, 1 << 40])
def test_layers_out_of_range(layer: int, capturing: list[bool]) -> None:
    with pytest.raises(ProtocolError, match=r"outside \[0, 4\)"):
        GraphGate(LAYERS, "cuda:0").mark(layer)


def test_no_gate_is_made_inside_a_capture_or_without_a_gpu(capturing: list[bool]) -> None:
    with pytest.raises(ProtocolError, match="cpu"):
        GraphGate(LAYERS, "cpu")
    with pytest.raises(TransportUnavailable, match="cuda:9"):
        GraphGate(LAYERS, "cuda:9")
    capturing[0] = True
    with pytest.raises(ProtocolError, match="captured"):
        GraphGate(LAYERS, "cuda:0")


def test_sends_are_refused_inside_a_capture_with_the_way_out(
    capturing: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    gates.refuse_capture("send_layer('r')", 1)
    capturing[0] = True
    with pytest.raises(ProtocolError, match=r"send_layer\('r'\).*GraphGate\.mark.*arm"):
        gates.refuse_capture("send_layer('r')", 1)
    capturing[0] = False  # the current device's stream is free, but not that of the cache's device
    monkeypatch.setattr(gates, "is_capturing", lambda index: index == 1)
    gates.refuse_capture("send_layer('r')", 0)
    with pytest.raises(ProtocolError, match="GraphGate"):
        gates.refuse_capture("send_layer('r')", 1)
