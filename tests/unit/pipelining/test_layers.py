"""Layer pipelining without processes: finding layers, torch.compile, events of CUDA graphs, GPUs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import torchkv
from tests.helpers.fakes.model import INPUT, Fixed, Group, Model, layout
from torchkv import PeerLost, ProtocolError
from torchkv.pipelining.pass_timer import SLOWDOWN


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def kv() -> Group:
    return Group(layout())


# ---------------------------------------------------------------------- finding the layers


def test_layers_are_found_by_their_number_outermost_first() -> None:
    for num_layers, changes, sizes in [
        (3, {}, {"num_layers": 3}),
        (3, {"experts": 3}, {"num_layers": 3}),  # as many experts in each layer: no doubt
        (2, {}, {"num_layers": 6, "layers": [4, 5]}),  # PP: only this rank's layers exist
        (6, {}, {"num_layers": 6, "layers": [4, 5]}),  # PP: all exist, some as placeholders
    ]:
        kv, model = Group(layout(**sizes)), nn.Sequential(nn.Linear(4, 4), Model(num_layers, **changes))
        with torchkv.pipeline(model, kv, "r", [1], 1, group_size=1) as sending:
            model(INPUT)
        assert kv.sent() == [(layer,) for layer in kv.layout.layers]
        assert sending.swept == ()


def test_draft_layers_alone_need_no_list() -> None:
    kv = Group(layout(layers=[5]))
    with torchkv.pipeline(Model(), kv, "r", [1], 1) as sending:
        pass
    assert sending.swept == (5,)


def test_layers_in_doubt_are_refused_with_the_candidates(kv: Group) -> None:
    two = nn.ModuleDict({"encoder": Model(), "decoder": Model()})
    with pytest.raises(ProtocolError, match=r"'r'.*several: encoder\.layers, decoder\.layers; .*layers="):
        torchkv.pipeline(two, kv, "r", [1], 1)
    with pytest.raises(ProtocolError, match=r"5 \(held here\).*none.*layers="):
        torchkv.pipeline(Model(4), kv, "r", [1], 1)
    with torchkv.pipeline(two, kv, "r", [1], 1, layers=two["decoder"].layers, group_size=2):
        two["encoder"](INPUT)
        assert kv.log == []
        two["decoder"](INPUT)
    assert kv.sent() == [(0, 1), (2, 3), (4,)]


def test_given_layers(kv: Group) -> None:
    model = Model()
    some = {model.layers[3]: 3, model.layers[1]: 1}
    with torchkv.pipeline(model, kv, "r", [1], 1, layers=some, group_size=1) as sending:
        model(INPUT)
    assert kv.sent() == [(1,), (3,), (0, 2, 4)]
    assert sending.swept == (0, 2, 4)
    block = model.layers[0]
    for wrong, match in [
        ([block], "1 modules.*5 layers"),
        ([block] * 5, "one module serves several layers"),
        ({block: 0, model.layers[1]: 0}, "one layer has several modules"),
        ({block: 9}, "layer 9"),
        ({"layers.0": 0}, "str; give torch.nn.Module"),
    ]:
        with pytest.raises(ProtocolError, match=match):
            torchkv.pipeline(model, kv, "r", [1], 1, layers=wrong)
    shared = Model()
    shared.layers = nn.ModuleList([block] * 5)
    with pytest.raises(ProtocolError, match="one module serves several layers"):
        torchkv.pipeline(shared, kv, "r", [1], 1)


# ---------------------------------------------------------------------- torch.compile


@pytest.fixture
def counter() -> Iterator[CompileCounter]:
    """The "eager" backend, and how often it compiled."""
    torch._dynamo.reset()
    yield CompileCounter()
    torch._dynamo.reset()


def compile_wrapper(model: nn.Module, backend: Any) -> nn.Module:
    return torch.compile(model, backend=backend)


def compile_in_place(model: nn.Module, backend: Any) -> nn.Module:
    model.compile(backend=backend)
    return model


def compile_forward(model: nn.Module, backend: Any) -> nn.Module:
    model.forward = torch.compile(model.forward, backend=backend)
    return model


COMPILED = pytest.mark.parametrize("compiled", [compile_wrapper, compile_in_place, compile_forward])


@COMPILED
@pytest.mark.parametrize("inside", [False, True])
def test_models_compiled_as_a_whole_are_refused(
    kv: Group, counter: CompileCounter, compiled: Any, inside: bool
) -> None:
    model = compiled(Model(), counter)
    if inside:
        model = nn.ModuleDict({"language": model})
    where = r"the model\.language" if inside else "the model"
    for layers in (None, list((model["language"] if inside else model).layers)):
        with pytest.raises(ProtocolError, match=rf"'r'.*{where} is compiled as a whole.*one by one.*send_pages"):
            torchkv.pipeline(model, kv, "r", [1], 1, layers=layers)


@COMPILED
def test_compiled_layers_are_sent_as_they_run_and_not_compiled_again(
    kv: Group, counter: CompileCounter, compiled: Any
) -> None:
    model = Model()
    model.layers = nn.ModuleList(compiled(layer, counter) for layer in model.layers)
    frames = set()
    for warm in range(12):  # more than dynamo recompiles before it gives up
        kv.log.clear()
        with torchkv.pipeline(model, kv, "r", [1], 1, group_size=2) as sending:
            model(INPUT)
            assert kv.sent() == [(0, 1), (2, 3), (4,)]
        assert sending.swept == ()
        if warm:
            frames.add(counter.frame_count)
    assert len(frames) == 1
    assert frames.pop() > 0
    model(INPUT)
    assert len(kv.log) == 3


def test_compiled_layers_may_be_named_by_what_they_wrap(kv: Group, counter: CompileCounter) -> None:
    model = Model()
    originals = list(model.layers)
    model.layers = nn.ModuleList(torch.compile(layer, backend=counter) for layer in originals)
    model(INPUT)
    with torchkv.pipeline(model, kv, "r", [1], 1, layers=originals, group_size=1):
        model(INPUT)
        assert len(kv.sent()) == 5
    assert counter.frame_count > 0


def test_code_compiled_around_the_model_costs_the_overlap_but_no_layer(kv: Group, counter: CompileCounter) -> None:
    model = Model()

    @torch.compile(backend=counter)
    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    step(INPUT)
    with torchkv.pipeline(model, kv, "r", [1], 1, group_size=1):
        step(INPUT)
    assert sorted(layer for group in kv.sent() for layer in group) == [0, 1, 2, 3, 4]


# ---------------------------------------------------------------------- CUDA graphs: events instead of hooks


class Event:
    def __init__(self) -> None:
        self.ready = False

    def query(self) -> bool:
        return self.ready


def test_events_gate_the_groups(kv: Group) -> None:
    events = [Event() for _ in range(5)]
    with torchkv.pipeline(None, kv, "r", [1], 1, events=events, group_size=2) as sending:
        assert kv.sent() == [(0, 1), (2, 3), (4,)]
    gates = [entry[-1] for entry in kv.log]
    assert sending.swept == ()
    assert gates[2] is events[4]
    for event, ready in [
        *((events[1], [False] * 3), (events[2], [False] * 3), (events[4], [False, False, True])),
        *((events[0], [True, False, True]), (events[3], [True, True, True])),
    ]:
        event.ready = True
        assert [gate.query() for gate in gates] == ready
    assert gates[0].query()  # asked again


def test_events_of_some_layers(kv: Group) -> None:
    with torchkv.pipeline(None, kv, "r", [1], 1, events={3: Event(), 1: Event()}, group_size=1):
        pass
    assert kv.sent() == [(3,), (1,), (0, 2, 4)]
    assert kv.log[-1][-1] is None


def test_a_replay_that_raises_cancels(kv: Group) -> None:
    events = [Event() for _ in range(5)]
    with pytest.raises(RuntimeError), torchkv.pipeline(None, kv, "r", [1], 1, events=events):
        raise RuntimeError
    assert kv.log[-1] == ("cancel", "r")


def test_events_that_say_nothing_are_refused(kv: Group) -> None:
    good = [Event()] * 4
    for events, match in [
        (good, "4 entries.*5 layers"),
        ([*good, None], r"layer 4 is a NoneType.*GraphGate\.arm"),
        ([*good, 3], r"int without a query\(\)"),
        ({8: Event()}, "layer 8"),
    ]:
        with pytest.raises(ProtocolError, match=match):
            torchkv.pipeline(None, kv, "r", [1], 1, events=events)
    assert kv.log == []


# ---------------------------------------------------------------------- GPUs, as far as this can go without one


class FakeEvent:
    """A timing event on a stream whose time is that of the test."""

    now = 0.0
    finished = False

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.at = -1.0

    def record(self, stream: Any) -> None:
        assert stream == "stream of 3"
        self.at = FakeEvent.now

    def query(self) -> bool:
        return FakeEvent.finished

    def elapsed_time(self, other: FakeEvent) -> float:
        return 1e3 * (other.at - self.at)


@pytest.fixture
def gpu(kv: Group, monkeypatch: pytest.MonkeyPatch) -> Group:
    """A group whose cache pretends to lie on cuda:3."""
    kv._engine.gpu = SimpleNamespace(index=3)
    monkeypatch.setattr("torch.cuda.Event", FakeEvent)
    monkeypatch.setattr("torch.cuda.current_stream", lambda index: f"stream of {index}")
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("torchkv.cuda.graph_gate.refuse_capture", lambda operation, index: None)
    return kv


def test_on_a_gpu_layers_are_timed_by_events_and_the_link_by_its_limit(gpu: Group) -> None:
    policy, model, asked = Fixed(2), Model(), []

    def explain(rank: int) -> SimpleNamespace:
        asked.append(rank)
        return SimpleNamespace(limit_gbps=200.0)

    cast(Any, gpu).explain = explain
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: setattr(FakeEvent, "now", FakeEvent.now + 2.0))
    FakeEvent.finished = False
    for _ in range(2):
        with torchkv.pipeline(model, gpu, "r", [1], 1, policy=policy):
            model(INPUT)
    first, second = policy.measures
    assert first() is None  # the GPU has not come that far
    FakeEvent.finished = True
    for measure in (first, second):
        measured = measure()
        assert measured is not None
        assert measured.layer == pytest.approx(2.0)
        assert 0 < measured.enqueue < 2.0, "the thread has not waited for the layers"
        ((count, nbytes, seconds),) = measured.transfers
        assert count == 1
        assert nbytes / seconds == pytest.approx(200e9, rel=0.05)
        assert measured.slowdown == SLOWDOWN, "the limit is that of a link with nothing beside it"
    assert asked == [1]  # measured once
    assert [entry[-1] for entry in gpu.log] == [None] * 6  # the verb records the event itself


def test_a_link_that_cannot_be_measured_is_unknown(gpu: Group, caplog: pytest.LogCaptureFixture) -> None:
    def explain(rank: int) -> None:
        raise PeerLost("rank 1 is gone")

    cast(Any, gpu).explain = explain
    policy, model = Fixed(2), Model()
    FakeEvent.finished = True
    with torchkv.pipeline(model, gpu, "r", [1], 1, policy=policy):
        model(INPUT)
    with caplog.at_level(logging.WARNING):
        measured = policy.measures[0]()
    assert measured is not None
    assert measured.transfers == ()
    assert "rank 1 is gone" in caplog.text


def test_a_forward_that_is_captured_is_refused(gpu: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = ProtocolError("this stream is being captured; use GraphGate")
    model = Model()
    sending = torchkv.pipeline(model, gpu, "r", [1], 1, group_size=1)
    # The capture begins behind the entry, so it is the verb that notices.
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    gpu.fails["r"] = refusal
    with pytest.raises(ProtocolError, match="GraphGate"), sending:
        model(INPUT)
    assert gpu.log == [("cancel", "r")]

    def refuse(operation: str, index: int) -> None:
        assert index == 3
        raise refusal

    monkeypatch.setattr("torchkv.cuda.graph_gate.refuse_capture", refuse)
    with pytest.raises(ProtocolError, match="GraphGate"):
        torchkv.pipeline(model, gpu, "r", [1], 1)


def test_events_of_cuda_that_a_graph_records_are_refused(gpu: Group) -> None:
    events = [FakeEvent(enable_timing=True) for _ in range(5)]
    with pytest.raises(ProtocolError, match=r"before the graph is replayed.*GraphGate\.arm"):
        torchkv.pipeline(None, gpu, "r", [1], 1, events=events)
