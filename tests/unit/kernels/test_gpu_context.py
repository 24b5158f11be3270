"""`GpuContext` without a GPU: which stream work gets, and pauses."""

from __future__ import annotations

import logging
import math
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchkv.cuda import driver
from torchkv.cuda.driver import num_queues
from torchkv.cuda.events import RecordedEvent
from torchkv.cuda.side_streams import RESERVED_QUEUES, num_waiting_streams
from torchkv.errors import ProtocolError, TransportUnavailable
from torchkv.kernels import gpu_context
from torchkv.kernels.gpu_context import GpuContext, check_alive, launching

GPU = torch.device("cuda", 1)
STREAM: Any = SimpleNamespace(cuda_stream=7, synchronize=lambda: None)


with_tickets: list[Any] = []  # streams


class FakeStream:
    def __init__(self, where: torch.device, *, priority: int) -> None:
        assert (where, priority) == (GPU, -1)


@pytest.fixture
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, pin_memory, **how: zeros(*shape, **how))
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "set_device", lambda where: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda where: SimpleNamespace(multi_processor_count=132))
    for name in ("PageIdUploads", "SyncWords", "event_pool"):
        monkeypatch.setattr(gpu_context, name, lambda where: SimpleNamespace())
    monkeypatch.setattr(gpu_context, "tickets_of", with_tickets.append)
    with_tickets.clear()
    monkeypatch.setattr(driver, "ignore_captures", lambda: None)
    monkeypatch.setattr(driver, "make_current", lambda where: None)


def claim(made: GpuContext, *waits: Any, request: str) -> Any:
    """The stream that `GpuContext.claim` gives."""
    given = made.claim(waits, request)
    return None if given is None else given.stream


@pytest.mark.usefixtures("_gpu")
def test_all_side_streams_have_tickets_before_anything_is_copied() -> None:
    made = GpuContext(GPU, blocks=16)
    waiting = [claim(made, request=f"request {number}") for number in range(num_waiting_streams())]
    assert set(with_tickets) == {made.outgoing, made.incoming, *waiting}
    assert made.loop_stream in with_tickets


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize(
    ("said", "count", "enough"),
    [("1", 0, False), ("6", 1, False), ("7", 2, True), ("", 3, True), ("8", 3, True), ("32", 4, True)],
)
def test_streams_that_wait_leave_queues_to_the_others(
    said: str, count: int, enough: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", said)
    gated = num_waiting_streams()
    assert gated == count <= max(0, num_queues() - RESERVED_QUEUES)
    with caplog.at_level(logging.WARNING):
        made = GpuContext(GPU, blocks=16)
    assert enough is ("CUDA_DEVICE_MAX_CONNECTIONS" not in caplog.text)
    claimed = [claim(made, object(), request=f"{number}") for number in range(gated + 1)]
    assert claimed[gated] is None
    assert len(set(claimed)) == gated + 1


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize("blocks", [16, 132])
def test_neighbouring_pieces_have_two_streams_if_the_whole_gpu_may_be_taken(blocks: int) -> None:
    made = GpuContext(GPU, blocks=blocks)
    opened = {made.unblocked_stream for _ in range(4)}
    assert opened == ({made.outgoing, made.incoming} if blocks == 132 else {made.outgoing})


@pytest.mark.usefixtures("_gpu")
def test_requests_of_one_stream_of_the_model_wait_on_one_stream_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "7")  # two streams that may wait
    made, other = GpuContext(GPU, blocks=16), GpuContext(GPU, blocks=16)
    pool: Any = SimpleNamespace(give_back=lambda handle: None)

    def recorded(stream: int, number: int) -> RecordedEvent:
        return RecordedEvent(pool, 1, stream, number)

    first = claim(made, recorded(7, 10), request="a")
    assert claim(made, recorded(7, 11), recorded(7, 9), request="b") is first
    assert claim(made, recorded(7, 11), request="c") is first
    before = claim(made, recorded(7, 10), request="d")
    assert before is not None
    assert before is not first
    assert claim(made, recorded(8, 12), request="e") is None
    of_both = claim(other, recorded(7, 12), recorded(8, 12), request="f")
    assert claim(other, recorded(7, 13), object(), request="f") is of_both, "the request is the owner"
    assert claim(other, recorded(7, 13), request="f") is not of_both
    assert claim(other, recorded(8, 14), request="g") is None


@pytest.mark.usefixtures("_gpu")
def test_the_pause_that_ends_first_wakes_the_progress_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    made, stopped = GpuContext(GPU, blocks=16), False
    assert made.pause_ends == math.inf
    long, short = made.pause(3, lambda: stopped), made.pause(2, lambda: False)
    assert [next(long), next(short)] == [0, 0]
    assert made.pause_ends == 102
    now = 102.0
    assert [list(short), next(long)] == [[], 0]
    assert made.pause_ends == 103
    stopped = True
    assert list(long) == []
    assert made.pause_ends == math.inf


def test_what_the_gpu_refuses_and_that_it_has_failed_are_errors_of_the_transport(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    with pytest.raises(TransportUnavailable, match="refused to pack: invalid argument"), launching(STREAM, "pack"):
        raise RuntimeError("invalid argument")
    with pytest.raises(ProtocolError), launching(STREAM, "pack"):
        raise ProtocolError("ours")

    def query() -> bool:
        raise RuntimeError("unspecified launch failure")

    check_alive(SimpleNamespace(query=lambda: False))
    with pytest.raises(TransportUnavailable, match="the GPU failed: unspecified launch failure"):
        check_alive(SimpleNamespace(query=query))
