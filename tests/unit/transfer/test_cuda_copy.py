"""`CudaCopyTransfer` on a fake GPU: it never finishes before everything that it enqueued has run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from torchkv.kernels import copies

pytest.importorskip("triton", reason="the kernels are written in Triton")

from tests.helpers.fakes.gpu import CLAIM, Event, Gpu
from torchkv.errors import TransferCancelled, TransportUnavailable
from torchkv.protocol.actions import SendOp
from torchkv.transfer.base import TransferContext
from torchkv.transfer.cuda_copy import CudaCopyTransfer
from torchkv.transfer.peer_connection import Counter, PeerConnection

LAYERS = (0, 1, 2)
UNUSED: Any = None


def transfer(
    gpu: Gpu, *, groups: int = 1, owed: tuple[int, ...] = LAYERS, waits: bool = True, channel: Any = ...
) -> CudaCopyTransfer:
    """A transfer of two pages. groups: kernels of a launch. owed: layers of the plan. waits: whether it has a gate.

    channel: None for a transfer within one rank.
    """
    shape = SimpleNamespace(ordinals=lambda **operation: range(2), pair_nbytes=64, rows=SimpleNamespace(per_pair=1))
    job = SimpleNamespace(geometry=shape, table=None, scales=None, ranges=lambda layers: [(0, len(layers))])
    segments_of = dict.fromkeys(owed, ())
    plan = SimpleNamespace(segments_of=segments_of, src_page_size=16, nbytes=lambda tokens, layers: 128 * len(layers))
    grant: Any = SimpleNamespace(dst=1, generation=1, num_tokens=32, pages=np.array([4, 5]), plan=plan)
    connection: Any = PeerConnection(rank=1, layout=UNUSED, placements={}, channel=channel, views=[])
    return CudaCopyTransfer(
        TransferContext(
            op=SendOp("r", 1, {}, LAYERS, 0, 2, None),
            grant=grant,
            pages=np.array([2, 3]),
            local=SimpleNamespace(num_pages=8),
            connection=connection,
            report=lambda layers, nbytes, path: gpu.log.append(f"report {len(layers)} {nbytes}"),
        ),
        waits=[Event(gpu.log)] if waits else [],
        opened=lambda: gpu.log.append("opened"),
        claim=CLAIM if waits else None,
        table=SimpleNamespace(groups=[job] * groups),
        device=gpu,
    )


def advance(made: CudaCopyTransfer, times: int = 20) -> None:
    for _ in range(times):
        if not made.finished:
            made.advance()


def test_a_transfer_waits_copies_and_reports_in_order(gpu: Gpu) -> None:
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


@pytest.mark.parametrize(("channel", "lane"), [(object(), "view"), (None, "local")])
def test_what_has_arrived_is_counted_on_the_lane(gpu: Gpu, channel: Any, lane: str) -> None:
    made = transfer(gpu, groups=2, channel=channel)
    advance(made)
    assert made.connection.counters == {}
    gpu.run()
    advance(made)
    # Two groups of three layers, each of two pages of 64 bytes in one run.
    assert made.connection.counters == {lane: Counter(transfers=1, spans=12, nbytes=768)}


@pytest.mark.parametrize(("waits", "signal"), [(True, "signal"), (False, "signal copying")])
def test_the_end_of_copies_that_wait_for_nothing_is_expected_soon(gpu: Gpu, waits: bool, signal: str) -> None:
    made = transfer(gpu, waits=waits)
    advance(made)
    assert gpu.log[-1] == signal


def test_when_the_gate_opens_the_end_is_expected_soon(gpu: Gpu) -> None:
    made = transfer(gpu)
    advance(made)
    gate, end = gpu.completions
    gate.done = True
    assert made.advance() == 1
    assert gpu.log[-2:] == ["mark copying", "opened"]
    advance(made)
    assert gpu.log.count("opened") == 1
    assert not made.finished
    end.done = True
    advance(made)
    assert made.finished
    assert gpu.released_completions == [gate, end]


@pytest.mark.parametrize("halt", [False, True])
def test_the_completion_of_an_unseen_gate_is_retired_in_the_end(gpu: Gpu, halt: bool) -> None:
    made = transfer(gpu)
    advance(made)
    if halt:
        made.halt()
        advance(made, 1)
        assert gpu.released_completions == gpu.completions[:1], (
            "a completion that is not released would keep the progress thread awake"
        )
    gpu.run()
    advance(made)
    assert made.finished
    assert "opened" not in gpu.log
    assert {id(completion) for completion in gpu.released_completions} == {
        id(completion) for completion in gpu.completions
    }


def test_a_launch_that_fails_half_way_ends_when_its_first_half_has_run(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy_pages(*args: Any, **operation: Any) -> None:
        if "kernel" in gpu.log:
            raise TransportUnavailable("no second kernel")
        gpu.log.append("kernel")

    monkeypatch.setattr(copies, "copy_pages", copy_pages)
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


def test_a_halted_transfer_waits_for_its_kernels_and_reports_nothing(gpu: Gpu) -> None:
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


def test_a_transfer_that_is_halted_before_it_began_enqueues_nothing(gpu: Gpu) -> None:
    made = transfer(gpu)
    made.halt()
    advance(made)
    assert made.finished
    assert made.flushed
    assert gpu.log == []
    assert sorted(gpu.released) == ["errors", "stream"]


def test_a_transfer_of_nothing_does_not_wait_for_its_gate(gpu: Gpu) -> None:
    made = transfer(gpu, owed=())
    advance(made)
    assert made.finished
    assert made.error is None
    assert gpu.log == []


def test_if_the_gpu_failed_it_is_unknown_what_was_written(gpu: Gpu) -> None:
    made = transfer(gpu)
    made.advance()
    gpu.broken = True
    made.halt()
    advance(made)
    assert made.finished
    assert not made.flushed, "it is unknown what was written"
    assert gpu.released == []


def test_an_event_whose_query_fails_does_not_count_as_a_closed_gate(gpu: Gpu) -> None:
    made = transfer(gpu)
    assert made.gated
    made._waits[0].error = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert not made.gated
