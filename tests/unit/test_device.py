"""A GPU's streams, without one: how many there are, and whether they may wait for those of peers."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from torchkv import cudadriver, device
from torchkv.device import Device

GPU = torch.device("cuda", 1)


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
    for name in ("Flags", "Uploads", "wait_flags", "event_pool"):
        monkeypatch.setattr(device, name, lambda where: SimpleNamespace())
    for name in ("library", "ignore_captures"):
        monkeypatch.setattr(cudadriver, name, lambda: None)
    monkeypatch.setattr(cudadriver, "make_current", lambda where: None)


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize("blocks", [16, 132])
@pytest.mark.parametrize(("said", "enough_for"), [("1", 0), ("4", 0), ("8", 16), ("16", 132), ("32", 132), ("", 132)])
def test_gpus_wait_for_each_other_only_with_queues_enough(
    blocks: int, said: str, enough_for: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every fourth stream of a pool is ours, queues in turn: those that wait share none with those that do not."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", said)
    with caplog.at_level(logging.WARNING):
        made = Device(GPU, blocks=blocks)
    assert made.signals is (blocks <= enough_for)
    assert made.signals is ("CUDA_DEVICE_MAX_CONNECTIONS" not in caplog.text)
    opened, waiting = {made.open_stream for _ in range(4)}, {made.waiting_stream for _ in range(4)}
    assert len(opened) == len(waiting) == (2 if blocks == 132 else 1)
    assert made.outgoing in opened
    assert made.incoming in waiting
    queues = int(said or 32)
    places = range(len(opened) + len(waiting))  # in which they were made
    queue_of = [(4 * place + 1) % queues for place in places]
    apart = not set(queue_of[: len(opened)]) & set(queue_of[len(opened) :])
    assert apart is made.signals
