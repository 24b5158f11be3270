"""When a transfer by kernels is over: never before all that it enqueued has run. The GPU is a fake."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

from gpu_fake import CLAIM, Event, Gpu

from torchkv import kerneltransfer
from torchkv.errors import TransferCancelled, TransportUnavailable
from torchkv.kerneltransfer import KernelTransfer
from torchkv.protocol.actions import SendOp

LAYERS = (0, 1, 2)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(kerneltransfer, "wait_on_stream", lambda event, stream: event.log.append("wait"))
    monkeypatch.setattr(kerneltransfer.kernels, "copy_pages", lambda *args, **what: made.log.append("kernel"))
    return made


def transfer(gpu: Gpu, *, groups: int = 1, owed: tuple[int, ...] = LAYERS, waits: bool = True) -> KernelTransfer:
    """One of two pages; ``groups``: kernels a launch. The plan's layers are ``owed``. waits: for an event."""
    shape = SimpleNamespace(pairs=lambda **what: range(2), pair_nbytes=64, rows=SimpleNamespace(per_pair=1))
    job = SimpleNamespace(geometry=shape, table=None, ranges=lambda layers: [(0, len(layers))])
    slabs_of = dict.fromkeys(owed, ())
    plan = SimpleNamespace(slabs_of=slabs_of, src_page_size=16, nbytes=lambda tokens, layers: 128 * len(layers))
    grant: Any = SimpleNamespace(dst=1, generation=1, num_tokens=32, pages=np.array([4, 5]), plan=plan)
    route: Any = SimpleNamespace(channel=object(), count=lambda *args, **what: None)
    return KernelTransfer(
        SendOp("r", 1, {}, LAYERS, 0, 2, None),
        grant,
        pages=np.array([2, 3]),
        waits=[Event(gpu.log)] if waits else [],  # type: ignore[list-item]
        opened=lambda: gpu.log.append("opened"),
        claim=CLAIM if waits else None,
        jobs=SimpleNamespace(groups=[job] * groups),  # type: ignore[arg-type]
        device=gpu,  # type: ignore[arg-type]
        local=SimpleNamespace(num_pages=8),  # type: ignore[arg-type]
        route=route,
        report=lambda layers, nbytes, path: gpu.log.append(f"report {len(layers)} {nbytes}"),
    )


def advance(made: KernelTransfer, times: int = 20) -> None:
    for _ in range(times):
        if not made.finished:
            made.advance()


def test_it_waits_copies_and_reports_in_order(gpu: Gpu) -> None:
    made = transfer(gpu)
    advance(made)
    assert gpu.log == ["wait", "signal", "upload dst", "upload src", "kernel", "signal"]
    assert not made.finished
    assert gpu.released == []
    gpu.run()
    advance(made)
    assert made.finished
    assert made.error is None
    assert gpu.log[-1] == "report 3 384"
    assert sorted(gpu.released) == ["errors", "stream", "upload", "upload"]


@pytest.mark.parametrize(("waits", "signal"), [(True, "signal"), (False, "signal soon")])
def test_the_end_of_copies_that_wait_for_nothing_is_expected_soon(gpu: Gpu, waits: bool, signal: str) -> None:
    made = transfer(gpu, waits=waits)
    advance(made)
    assert gpu.log[-1] == signal


def test_once_its_gate_has_opened_everybody_expects_its_end(gpu: Gpu) -> None:
    made = transfer(gpu)
    advance(made)
    gate, end = gpu.flags
    gate.done = True
    assert made.advance() == 1
    assert gpu.log[-2:] == ["expect", "opened"]
    advance(made)
    assert gpu.log.count("opened") == 1
    assert not made.finished
    end.done = True
    advance(made)
    assert made.finished
    assert gpu.retired == [gate, end]


@pytest.mark.parametrize("halt", [False, True])
def test_a_gate_that_was_not_seen_to_open_is_forgotten_in_the_end(gpu: Gpu, halt: bool) -> None:
    made = transfer(gpu)
    advance(made)
    if halt:
        made.halt()
        advance(made, 1)
        assert gpu.retired == gpu.flags[:1], "a flag that nobody asks for any more would keep the thread awake"
    gpu.run()
    advance(made)
    assert made.finished
    assert "opened" not in gpu.log
    assert {id(flag) for flag in gpu.retired} == {id(flag) for flag in gpu.flags}


def test_a_launch_that_fails_half_way_is_over_when_its_first_half_is(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy_pages(*args: Any, **what: Any) -> None:
        if "kernel" in gpu.log:
            raise TransportUnavailable("no second kernel")
        gpu.log.append("kernel")

    monkeypatch.setattr(kerneltransfer.kernels, "copy_pages", copy_pages)
    made = transfer(gpu, groups=2)
    advance(made)
    assert gpu.log[-2:] == ["kernel", "signal"]
    assert not made.finished
    assert gpu.released == []
    gpu.run()
    advance(made)
    assert made.finished
    assert made.flushed
    assert "no second kernel" in str(made.error)
    assert sorted(gpu.released) == ["errors", "stream", "upload", "upload"]


def test_a_halted_one_runs_to_its_end_and_reports_nothing(gpu: Gpu) -> None:
    made = transfer(gpu)
    made.advance()
    made.halt()
    advance(made)
    assert not made.finished
    gpu.run()
    advance(made)
    assert made.finished
    assert made.flushed
    assert isinstance(made.error, TransferCancelled)
    assert not any(entry.startswith("report") for entry in gpu.log)


def test_one_that_is_halted_before_it_began_enqueues_nothing(gpu: Gpu) -> None:
    made = transfer(gpu)
    made.halt()
    advance(made)
    assert made.finished
    assert made.flushed
    assert gpu.log == []
    assert sorted(gpu.released) == ["errors", "stream"]


def test_nothing_owed_waits_for_nothing(gpu: Gpu) -> None:
    made = transfer(gpu, owed=())
    advance(made)
    assert made.finished
    assert made.error is None
    assert gpu.log == []


def test_a_gpu_that_failed_leaves_the_pages_unproven(gpu: Gpu) -> None:
    made = transfer(gpu)
    made.advance()
    gpu.broken = True
    made.halt()
    advance(made)
    assert made.finished
    assert not made.flushed, "nobody can tell what was written"
    assert gpu.released == []


def test_an_event_that_cannot_be_asked_is_no_closed_gate(gpu: Gpu) -> None:
    made = transfer(gpu)
    assert made.gated
    made._waits[0].error = RuntimeError("CUDA error: an illegal memory access was encountered")  # type: ignore[union-attr]
    assert not made.gated
