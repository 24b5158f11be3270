"""SyncWords and gates on a real GPU. Streams are held by the host, so that nothing here depends on time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if torch.cuda.device_count() == 0:
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from tests.helpers.sync_words import has_passed
from torchkv.cuda import driver, graph_gate, ipc
from torchkv.cuda.events import RecordedEvent, event_pool, wait_on_stream
from torchkv.cuda.page_ids import DevicePages
from torchkv.cuda.sync_words import SyncWords
from torchkv.errors import ProtocolError
from torchkv.group.arguments import as_send_pages

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
LAYERS, SIZE = 4, 1 << 20


def until(condition: Callable[[], bool]) -> None:
    """Polls, as the progress thread does; fails after a while."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it never happened"


@pytest.fixture
def sync_words() -> Any:
    torch.cuda.set_device(GPU)
    # The first launch of a kernel loads it, and that waits for all streams, held ones too.
    graph_gate.GraphGate(1).mark(0)
    torch.zeros(4, dtype=torch.int32, device=GPU).to(torch.int64)
    torch.cuda.synchronize()
    made = SyncWords(GPU)
    yield made
    made.close()
    torch.cuda.synchronize()


def test_a_hold_stops_a_stream_and_a_flag_tells_when_it_went_on(sync_words: SyncWords) -> None:
    stream, other = torch.cuda.Stream(GPU), torch.cuda.Stream(GPU, priority=-1)
    data = torch.zeros(SIZE, dtype=torch.int64, pin_memory=True)
    source = torch.zeros(SIZE, dtype=torch.int64, device=GPU)
    source.fill_(0)
    torch.cuda.synchronize()
    for value in range(1, 20):
        hold = sync_words.hold(stream)
        with torch.cuda.stream(stream):
            source.fill_(value)
            data.copy_(source, non_blocking=True)
        behind, beside = sync_words.signal(stream), sync_words.signal(other)
        until(lambda completion=beside: completion.done)
        assert not behind.done
        assert not has_passed(hold)
        assert int(data.sum()) == (value - 1) * SIZE
        hold.open()
        until(lambda completion=behind: completion.done)
        assert has_passed(hold)
        # Everything before the signal is visible to the host when the flag is.
        assert int(data.sum()) == value * SIZE
        behind.release()
        beside.release()


def test_more_uses_than_words(sync_words: SyncWords) -> None:
    stream = torch.cuda.current_stream()
    for _ in range(20_000):
        completion = sync_words.signal(stream)
        until(lambda completion=completion: completion.done)
        completion.release()


def test_close_lets_a_held_stream_go(sync_words: SyncWords) -> None:
    stream = torch.cuda.Stream(GPU)
    hold = sync_words.hold(stream)
    end = torch.cuda.Event()
    end.record(stream)
    assert not end.query()
    sync_words.close()
    until(end.query)
    assert has_passed(hold)


def test_nothing_of_ours_is_captured(sync_words: SyncWords) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in (sync_words.signal, sync_words.hold):
            with pytest.raises(ProtocolError, match="GraphGate"):
                call(torch.cuda.current_stream())
        with pytest.raises(ProtocolError, match="GraphGate"):
            graph_gate.refuse_capture("send_layer('r')", 0)
        with pytest.raises(ProtocolError, match="captured"):
            graph_gate.GraphGate(1)
        torch.zeros(4, device=GPU).add_(1)
    graph.replay()
    torch.cuda.synchronize()


def test_a_thread_that_ignores_captures_works_beside_one_and_does_not_break_it(sync_words: SyncWords) -> None:
    event = torch.cuda.Event()
    event.record()
    found: list[object] = []

    def progress() -> None:
        try:
            ipc.make_current(GPU)
            driver.ignore_captures()
            found.append(event.query())
            found.append(ipc.allocate(100, GPU).numel())
            completion = sync_words.signal(side)
            until(lambda: completion.done)
            completion.release()
        except BaseException as error:  # noqa: BLE001 - the main thread looks at it
            found.append(error)

    torch.cuda.synchronize()
    side = torch.cuda.Stream(GPU)
    graph, value = torch.cuda.CUDAGraph(), torch.zeros(1, device=GPU)
    with torch.cuda.graph(graph):  # the default mode: "global"
        value.add_(1)
        thread = threading.Thread(target=progress)
        thread.start()
        thread.join(30)
    assert found == [True, 100]
    graph.replay()
    torch.cuda.synchronize()
    assert int(value) == 1


@pytest.mark.parametrize("keep_gil", [True, False])
@pytest.mark.parametrize("own", [True, False], ids=["own-stream", "default-stream"])
def test_a_gate_is_behind_what_was_enqueued(own: bool, keep_gil: bool, sync_words: SyncWords) -> None:
    stream = torch.cuda.Stream(GPU) if own else torch.cuda.default_stream(GPU)
    with torch.cuda.stream(stream):
        before = graph_gate.record_gate(0, keep_gil=keep_gil)
        hold = sync_words.hold(stream)
        assert sync_words.holding
        event = graph_gate.record_gate(0, keep_gil=keep_gil)
    until(before.query)
    assert not event.query()
    hold.open()
    assert not sync_words.holding
    until(event.query)


@pytest.mark.parametrize("own", [True, False], ids=["own-stream", "default-stream"])
def test_a_verb_s_gate_is_behind_what_was_enqueued_if_anything_is_left_of_that(
    own: bool, sync_words: SyncWords
) -> None:
    stream = torch.cuda.Stream(GPU) if own else torch.cuda.default_stream(GPU)
    with torch.cuda.stream(stream):
        stream.synchronize()
        assert event_pool(0).try_gate() is None
        hold = sync_words.hold(stream)
        event = event_pool(0).try_gate()
        assert event
        assert not event.query()
        hold.open()
        until(event.query)
        stream.synchronize()
        assert event_pool(0).try_gate() is None


def test_a_verb_s_gate_on_the_default_stream_is_behind_streams_that_it_waits_for(sync_words: SyncWords) -> None:
    """The default stream waits for all streams that are made to block; PyTorch makes no such streams, others do."""
    torch.cuda.synchronize()
    made = driver.check(driver.driver().cuStreamCreate(0), "making a stream")
    hold = sync_words.hold(torch.cuda.ExternalStream(int(made), device=GPU))
    event = event_pool(0).try_gate()
    assert event
    assert not event.query()
    hold.open()
    until(event.query)
    torch.cuda.synchronize()
    driver.check(driver.driver().cuStreamDestroy(made), "destroying a stream")


def test_a_verb_looks_closer_under_a_capture(sync_words: SyncWords) -> None:
    graph = torch.cuda.CUDAGraph()
    value = torch.zeros(1, dtype=torch.int32, device=GPU)
    with torch.cuda.graph(graph):
        value += 1
        assert event_pool(0).try_gate() is False
    graph.replay()
    torch.cuda.synchronize()
    assert int(value) == 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("own", [True, False], ids=["own-stream", "default-stream"])
def test_a_gate_is_on_the_stream_of_the_gpu_that_was_asked_for(own: bool, sync_words: SyncWords) -> None:
    """And not on that of the current one."""
    stream = torch.cuda.Stream(GPU) if own else torch.cuda.default_stream(GPU)
    with torch.cuda.stream(stream):
        hold = sync_words.hold(stream)
        with torch.cuda.device(1):
            event, asynchronous = graph_gate.record_gate(0), graph_gate.record_gate(1)
            assert torch.cuda.current_device() == 1
        until(asynchronous.query)
        assert not event.query()
        hold.open()
        until(event.query)


def test_a_thread_that_has_no_context_yet_records_a_gate(sync_words: SyncWords) -> None:
    found: list[object] = []

    def record() -> None:
        try:
            event = graph_gate.record_gate(0)
            until(event.query)
            found.append("recorded")
        except BaseException as error:  # noqa: BLE001 - the main thread looks at it
            found.append(error)

    thread = threading.Thread(target=record)
    thread.start()
    thread.join(30)
    assert found == ["recorded"]


@pytest.mark.parametrize("pooled", [True, False], ids=["ours", "PyTorch's"])
def test_a_stream_waits_for_an_event_that_is_used_again_meanwhile(pooled: bool, sync_words: SyncWords) -> None:
    """What a stream waits for is what the event had recorded when it was told to wait."""
    first, second, free = torch.cuda.Stream(GPU), torch.cuda.Stream(GPU), torch.cuda.Stream(GPU, priority=-1)
    hold = sync_words.hold(first)
    with torch.cuda.stream(first):
        event: RecordedEvent | torch.cuda.Event = graph_gate.record_gate(0) if pooled else torch.cuda.Event()
        if isinstance(event, torch.cuda.Event):
            event.record(first)
    wait_on_stream(event, second)
    behind = sync_words.signal(second)
    if isinstance(event, RecordedEvent):
        handle = event.handle
        del event
        with torch.cuda.stream(free):
            again = graph_gate.record_gate(0)
        assert again.handle == handle, "the test recorded another event"
        until(again.query)
    else:
        event.record(free)
        until(event.query)
    beside = sync_words.signal(free)
    until(lambda: beside.done)
    assert not behind.done
    hold.open()
    until(lambda: behind.done)
    behind.release()
    beside.release()


def test_gates_by_the_thousand_come_from_a_pool_that_stops_growing(sync_words: SyncWords) -> None:
    pool = event_pool(0)
    handles = set()
    for _ in range(5):
        events = [graph_gate.record_gate(0) for _ in range(600)]
        assert len({event.handle for event in events}) == 600
        torch.cuda.synchronize()
        assert all(event.query() for event in events)
        handles |= {event.handle for event in events}
        del events
    assert len(pool._free) >= len(handles)
    assert len(handles) < 1200


def test_page_ids_on_the_gpu_are_gated_by_their_own_event_and_belong_on_the_cache_s_gpu(sync_words: SyncWords) -> None:
    device: Any = SimpleNamespace(index=0, record_gate=lambda: graph_gate.record_gate(0))
    ids = torch.tensor([3, 1, 2], dtype=torch.int32, device=GPU)
    torch.cuda.synchronize()
    hold = sync_words.hold(torch.cuda.current_stream())
    pages = as_send_pages(ids, num_pages=4, gpu=device, operation="test")
    assert isinstance(pages, DevicePages)
    assert not pages.ready.query()
    hold.open()
    until(pages.ready.query)
    assert pages.ids.tolist() == [3, 1, 2]
    assert pages.ids.dtype is torch.int64
    device.index = 1
    with pytest.raises(ProtocolError, match=r"cuda:0.*cuda:1"):
        as_send_pages(ids, num_pages=4, gpu=device, operation="test")


class Step:
    """A captured model step: each layer writes its pages, derived from ``content``, then marks the gate."""

    def __init__(self) -> None:
        self.content = torch.zeros(SIZE, dtype=torch.int64, device=GPU)
        self.pages = torch.full((LAYERS, SIZE), -1, dtype=torch.int64, device=GPU)
        self.gate = graph_gate.GraphGate(LAYERS, GPU)
        self.events = [torch.cuda.Event(external=True) for _ in range(LAYERS)]
        self.side = torch.cuda.Stream(GPU)
        self._run(warm_up=True)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._run(warm_up=False)
        self.graph.replay()  # not armed, and finished: later arms begin behind it
        torch.cuda.synchronize()

    def _run(self, *, warm_up: bool) -> None:
        for layer in range(LAYERS):
            self.pages[layer].copy_(self.content * (layer + 1) + layer)
            self.gate.mark(layer)
            if not warm_up:
                self.events[layer].record()

    def fresh(self) -> torch.Tensor:
        """New content, in stream order; what the pages must then hold."""
        content = torch.randint(1, 1 << 40, (SIZE,))
        self.content.copy_(content.to(GPU))
        return torch.stack([content * (layer + 1) + layer for layer in range(LAYERS)])

    def send(self, layer: int) -> torch.Tensor:
        """What a transfer that starts now reads."""
        with torch.cuda.stream(self.side):
            return self.pages[layer].cpu()


def test_two_replays_each_send_their_own_bytes(sync_words: SyncWords) -> None:
    step = Step()
    for _ in range(3):
        want = step.fresh()
        hold = sync_words.hold(torch.cuda.current_stream())
        events = step.gate.arm()
        step.graph.replay()
        assert not any(event.query() for event in events), "open before the replay has begun"
        hold.open()
        for layer, event in enumerate(events):
            until(event.query)
            assert torch.equal(step.send(layer), want[layer])
        torch.cuda.synchronize()


def test_an_external_event_sends_the_bytes_of_the_replay_before(sync_words: SyncWords) -> None:
    """Negative control: a sender that waits for a captured graph's events, from before the replay as ours does."""
    step = Step()
    old = step.fresh()
    step.graph.replay()
    torch.cuda.synchronize()
    want = step.fresh()
    torch.cuda.synchronize()
    events = step.gate.arm()
    assert all(event.query() for event in step.events), "they tell of the replay before"
    sent = [step.send(layer) for layer in range(LAYERS)]
    assert not any(event.query() for event in events), "ours wait for the next"
    step.graph.replay()
    torch.cuda.synchronize()
    for layer in range(LAYERS):
        assert torch.equal(sent[layer], old[layer])
        assert not torch.equal(sent[layer], want[layer])
        assert events[layer].query()
        assert torch.equal(step.send(layer), want[layer])


def test_several_arms_are_outstanding(sync_words: SyncWords) -> None:
    step = Step()
    stream = torch.cuda.current_stream()
    arms, holds = [], []
    for _ in range(3):
        holds.append(sync_words.hold(stream))
        arms.append(step.gate.arm())
        step.graph.replay()
    for index, hold in enumerate(holds):
        later = [event for arm in arms[index:] for event in arm]
        assert not any(event.query() for event in later)
        hold.open()
        until(lambda arm=arms[index]: all(event.query() for event in arm))
    torch.cuda.synchronize()


def test_eager_marks_and_marks_in_inference_mode(sync_words: SyncWords) -> None:
    with torch.inference_mode():
        made = graph_gate.GraphGate(2)
    stream = torch.cuda.current_stream()
    hold = sync_words.hold(stream)
    made.mark(0)  # not armed, and still waiting when the next is
    events = made.arm()
    inner = sync_words.hold(stream)
    made.mark(0)
    hold.open()
    until(lambda: has_passed(hold))
    assert not any(event.query() for event in events)
    inner.open()
    until(events[0].query)
    assert not events[1].query()
    with torch.inference_mode():
        made.mark(1)
    until(events[1].query)


def test_a_graph_outlives_its_gate(sync_words: SyncWords) -> None:
    step = Step()
    graph, seen = step.graph, step.gate._host_counts
    before = seen.clone()
    step.gate = None
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(seen, before + 1)
