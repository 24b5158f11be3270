"""Pooled events: each reports its own recording, on the right GPU, and none is reused while it is referenced."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.fakes.cuda_driver import FakeDriver, install
from torchkv.cuda import driver, events
from torchkv.cuda.events import EventPool, RecordedEvent, is_capturing, wait_on_stream
from torchkv.errors import TransportUnavailable

STREAM = 7


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = install(monkeypatch, FakeDriver())
    cast(Any, driver).stream = STREAM  # the calling thread's current one
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: cast(Any, driver).stream, raising=False)
    monkeypatch.setattr(events, "_GROWTH", 4)
    return driver


def enqueue(fake: FakeDriver, place: tuple[int, int]) -> None:
    fake.given[place] = fake.given.get(place, 0) + 1


def run_all(fake: FakeDriver) -> None:
    fake.ran = dict(fake.given)


def test_an_event_is_behind_what_its_stream_was_given(fake: FakeDriver) -> None:
    pool = EventPool(0)
    assert pool.record().query()
    enqueue(fake, (0, STREAM))
    event = pool.record()
    assert not event.query()
    run_all(fake)
    enqueue(fake, (0, STREAM))
    assert event.query()
    assert not pool.record().query()


@pytest.mark.parametrize("current", [0, 1, None], ids=["same", "other", "no-context"])
@pytest.mark.parametrize("stream", [0, STREAM], ids=["default", "own"])
def test_the_event_is_recorded_on_the_cache_s_gpu_whichever_is_current(
    stream: int, current: int | None, fake: FakeDriver
) -> None:
    pool = EventPool(1)
    fake.stream, fake.current = stream, current  # type: ignore[attr-defined]
    enqueue(fake, (1, stream))
    event = pool.record()
    assert fake.events[event.handle - 1].place == (1, stream)
    assert event.stream == stream
    assert pool.record().number > event.number
    assert not event.query()
    run_all(fake)
    assert event.query()
    assert not fake.contexts, "the context was not put back"


def test_streams_wait_for_both_kinds_of_event(fake: FakeDriver) -> None:
    enqueue(fake, (0, STREAM))
    event = EventPool(0).record()
    waited: list[Any] = []
    stream: Any = SimpleNamespace(cuda_stream=9, wait_event=waited.append)
    wait_on_stream(event, stream)
    assert fake.waits == [(9, (0, STREAM), 1)]
    theirs: Any = object()
    wait_on_stream(theirs, stream)
    assert waited == [theirs]


def test_an_event_is_reused_only_when_nothing_references_it(fake: FakeDriver) -> None:
    pool = EventPool(0)
    held = [pool.record() for _ in range(10)]
    assert len({event.handle for event in held}) == 10
    made = len(fake.events)
    assert made == 12, "the pool grows by four events"
    alias = held[3]
    kept = alias.handle
    held.clear()
    again = [pool.record() for _ in range(11)]
    assert len(fake.events) == made, "all but one were free"
    assert kept not in {event.handle for event in again}
    del alias
    assert pool.record().handle == kept


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.sampled_from(["enqueue", "run", "record", "drop"]), max_size=80), data=st.data())
def test_no_event_ever_tells_of_another_recording(steps: list[str], data: st.DataObject, fake: FakeDriver) -> None:
    pool = EventPool(0)
    place = (0, STREAM)
    fake.given.clear()
    fake.ran.clear()
    held: list[tuple[RecordedEvent, int]] = []
    for step in steps:
        if step == "enqueue":
            enqueue(fake, place)
        elif step == "run" and fake.ran.get(place, 0) < fake.given.get(place, 0):
            fake.ran[place] = fake.ran.get(place, 0) + 1
        elif step == "record":
            held.append((pool.record(), fake.given.get(place, 0)))
        elif step == "drop" and held:
            del held[data.draw(st.integers(0, len(held) - 1))]
        assert all(event.query() == (fake.ran.get(place, 0) >= behind) for event, behind in held)


def test_threads_share_a_pool(fake: FakeDriver) -> None:
    pool = EventPool(0)
    failed: list[BaseException] = []
    mine: list[set[int]] = [set(), set(), set()]

    def work(number: int) -> None:
        try:
            for _ in range(300):
                held = [pool.record() for _ in range(5)]
                mine[number] = {event.handle for event in held}
                assert len(mine[number]) == 5
                for other in range(3):
                    assert other == number or not mine[number] & mine[other], "two threads got one event"
                mine[number] = set()
                del held
        except BaseException as error:  # noqa: BLE001 - the main thread looks at it
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == []


def test_a_gpu_that_failed_is_an_error_and_not_an_open_gate(fake: FakeDriver) -> None:
    event = EventPool(0).record()
    assert event.query()
    fake.fail.add("cuEventQuery")
    with pytest.raises(TransportUnavailable, match="INVALID_VALUE"):
        event.query()


def test_captures_are_seen(fake: FakeDriver) -> None:
    assert not is_capturing(0)
    fake.capturing.add(STREAM)
    assert is_capturing(0)
    fake.stream = 0  # type: ignore[attr-defined]
    assert not is_capturing(0)


def test_a_driver_without_the_functions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "driver", lambda: None)
    with pytest.raises(TransportUnavailable, match="cuEventQuery"):
        driver._load(lambda name: SimpleNamespace())

    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    with pytest.raises(TransportUnavailable, match=r"libcuda\.so\.1"):
        driver._load(missing)
    library = SimpleNamespace(**{name: SimpleNamespace() for name in driver._SIGNATURES})
    assert driver._load(lambda name: library) is library
    assert len(library.cuEventRecord.argtypes) == 2
