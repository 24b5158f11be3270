"""Copies by kernels on the resident loop, without a GPU: gates, page ids, completion words, refusals."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from threading import Timer
from types import SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the fake GPU knows its kernels by their parameters, which Triton tells")

from tests.helpers.fakes.loop_gpu import BAD_ADDRESS, TICKETS, LoopGpu, fake_kernels
from tests.helpers.notices import kinds
from torchkv.bench.scale.loops import PAGE, TOKENS, Pair
from torchkv.core.core import Core
from torchkv.core.device import NO_GATE, Gate
from torchkv.core.loop.codes import BOUND, BROKEN, OP_DONE, RECEIVED, SENT
from torchkv.core.loop.limits import IDS, MAX_FLYING, MAX_GPU_SENDS
from torchkv.core.thread import seals_expected
from torchkv.kernels import page_copy
from torchkv.layout.kernel_geometry import Geometry, PageAddressing
from torchkv.layout.plan_segment import StridedRuns, Stripe
from torchkv.transfer.copy_tables import AddressGroup
from torchkv.transfer.launch_table import LaunchTable


class GpuPair(Pair):
    """As `Pair`, with a writer whose pages a `LoopGpu` copies."""

    def __init__(self, *, layers: int = 3, pages: int = 8, **limits: int) -> None:
        super().__init__(layers=layers, pages=pages, **limits)
        self.gpu = LoopGpu()
        self.writer = Core(0, device=self.gpu.device, **limits)
        self.writer.peers.connect(1, self.reader.peers.descriptor())
        self.reader.peers.connect(0, self.writer.peers.descriptor())
        side = PageAddressing(page_stride=PAGE, base=0, token_stride=PAGE // TOKENS, per_page=1, num_pages=pages)
        shape = Geometry(
            stripe=Stripe(TOKENS, 1), rows=StridedRuns(1, 0, 0, 1, 0, 0, PAGE), src=side, dst=side, alignment=16
        )
        rows = [[ours.ctypes.data, theirs.ctypes.data] for ours, theirs in zip(self.src, self.dst, strict=True)]
        group = AddressGroup(shape, tuple(range(layers)), torch.tensor(rows, dtype=torch.int64))
        table: Any = SimpleNamespace(plan=SimpleNamespace(layers=tuple(range(layers))), groups=[group])
        with fake_kernels():
            self.table = LaunchTable(table, device=torch.device("cpu"), errors=0, tickets=TICKETS, blocks=4)
        self.geometry = np.zeros(2, dtype=np.int64)
        self.kernels = self.table.words

    def begin(
        self, flow: int, pages: Sequence[int], *, start: int = 0, layers: Sequence[int] | None = None, gate: Gate
    ) -> int:
        positions = np.array(range(self.layers) if layers is None else layers, dtype=np.int64)
        index = self.writer.sends.start_op(flow, positions, np.array(pages, dtype=np.int64), start, gate)
        assert index is not None
        return index

    def finish(self) -> tuple[list[int], list[int]]:
        """Runs loops and stream until nothing is left to do."""
        told: list[int] = []
        heard: list[int] = []
        for _ in range(10_000):
            one, other = self.run()
            told += kinds(one)
            heard += kinds(other)
            if not self.gpu.pending:
                break
            self.gpu.run(1)
        return told, heard


def test_parameters_lie_where_the_loop_writes_them() -> None:
    """The offsets in `torchkv.core.loop.launching` are those of the kernel's parameters."""
    at, found = 0, {}
    for param in page_copy.copy.params[: page_copy.NUM_INTEGERS]:
        size = {"i32": 4, "i64": 8}[param.annotation]
        at += -at % size
        found[param.name] = at
        at += size
    assert [found[name] for name in ("jobs", "src_ids", "dst_ids", "errors", "tickets")] == [0, 8, 16, 40, 48]
    assert [found[name] for name in ("completion", "number")] == [56, 64]
    assert [found[name] for name in ("num_jobs", "first_rank", "start", "words")] == [72, 76, 80, 84]


def test_a_request() -> None:
    pair = GpuPair()
    flow = pair.receive(3)
    send = pair.send(flow, [6, 1, 4])
    op = pair.start(send, [2, 7, 0])
    pair.writer.sends.finish(send, 3, b"first token")
    told, heard = pair.run()
    assert (told, heard) == ([], [])  # nothing is announced before the kernel has written its word
    assert pair.gpu.log == ["upload", "launch"]
    assert pair.finish() == ([OP_DONE, SENT], [RECEIVED])
    assert pair.writer.sends.op_results([op]) == ([3 * 3 * PAGE], 9)
    expected = np.full_like(pair.dst, 0xAB)
    expected[:, [6, 1, 4]] = pair.src[:, [2, 7, 0]]
    assert (pair.dst == expected).all()


@pytest.mark.parametrize("seed", range(40))
def test_chunks_in_any_order(seed: int) -> None:
    """Layers and pages by themselves, some twice, behind gates that open in any order, on a stream of any pace."""
    dice = random.Random(seed)
    pair = GpuPair(layers=5, turn=dice.choice([1, 1 << 20]), window=dice.choice([9, 256]))
    waits = dice.random() < 0.5
    flow = pair.receive(4)
    if waits:
        send = pair.wait()
    else:
        send = pair.send(flow, [3, 5, 0, 7])
    pages = [1, 2, 6, 4]
    whole = list(range(5))
    chunks = [(whole, page) for page in range(4)]
    chunks += [([layer], page) for layer, page in dice.sample([(a, b) for a in range(5) for b in range(4)], 4)]
    dice.shuffle(chunks)
    gates = []
    for layers, page in chunks:
        gate = pair.gpu.gate(dice.choice([-1, 0x40, 0x80])) if dice.random() < 0.5 else NO_GATE
        gates.append(gate)
        pair.begin(send, [pages[page]], start=page, layers=layers, gate=gate)
        pair.gpu.run(dice.choice([0, 0, 1, 5]))
        pair.writer.runner.step()
        pair.reader.runner.step()
    if waits:
        pair.grant(flow, [3, 5, 0, 7])
    pair.writer.sends.finish(send, 4, b"")
    told: list[int] = []
    heard: list[int] = []
    shut = [gate for gate in gates if gate.event]
    while shut or pair.gpu.pending:
        # Of one stream events happen in the order in which they were recorded.
        first = {gate.stream: gate for gate in reversed(shut) if gate.stream >= 0}
        ready = [gate for gate in shut if gate.stream < 0 or first[gate.stream] is gate]
        if ready and dice.random() < 0.5:
            gate = dice.choice(ready)
            shut.remove(gate)
            pair.gpu.events[gate.event] = 0
        pair.gpu.run(dice.choice([0, 1, 3]))
        one, other = pair.run()
        told += kinds(one)
        heard += kinds(other)
        assert shut or heard.count(RECEIVED) <= 1
        if shut:
            assert RECEIVED not in heard
    assert sorted(told) == sorted([OP_DONE] * len(chunks) + [SENT] + [BOUND] * waits)
    assert RECEIVED in heard
    assert (pair.dst[:, [3, 5, 0, 7]] == pair.src[:, pages]).all()
    untouched = [page for page in range(8) if page not in (3, 5, 0, 7)]
    assert (pair.dst[:, untouched] == 0xAB).all()


def test_equal_page_ids_are_uploaded_once() -> None:
    pair = GpuPair()
    send = pair.send(pair.receive(2), [6, 1])
    for layer in range(3):
        pair.start(send, [2, 7], layers=[layer])
    pair.start(send, [7, 2])
    pair.run()
    assert pair.gpu.log == ["upload", *["launch"] * 3, "upload", "launch"]


def test_page_ids_that_a_kernel_may_still_read_stay() -> None:
    """A list that finds no more room waits for the kernels before it, and then takes the place of the first ones."""
    count = IDS // 8
    pair = GpuPair(pages=count)
    granted = np.random.default_rng().permutation(count)
    send = pair.send(pair.receive(count), granted)
    lists = [np.random.default_rng().permutation(count) for _ in range(9)]
    for number, ids in enumerate(lists):
        pair.start(send, ids, layers=[number % 3])
    pair.run()
    assert pair.gpu.log.count("upload") == 7  # one part of eight holds the granted ids
    told, _ = pair.finish()
    assert told.count(OP_DONE) == len(lists)
    for layer, ids in enumerate(lists[-3:]):
        assert (pair.dst[layer, granted] == pair.src[layer, ids]).all()


def test_no_more_is_enqueued_than_a_stream_takes() -> None:
    pair = GpuPair()
    send = pair.send(pair.receive(1), [6])
    for _ in range(MAX_FLYING + 50):
        pair.start(send, [2])
    pair.run()
    assert pair.gpu.log.count("launch") == MAX_FLYING
    told, _ = pair.finish()
    assert told.count(OP_DONE) == MAX_FLYING + 50


def test_one_shut_gate_of_a_stream_is_asked_for_once_a_step() -> None:
    pair = GpuPair()
    send = pair.send(pair.receive(1), [6])
    for _ in range(20):
        pair.begin(send, [2], gate=pair.gpu.gate(0x40))
    pair.writer.runner.step()
    before, gated = pair.gpu.log.count("query"), pair.writer.sends.gated(send)
    pair.writer.runner.step()
    assert pair.gpu.log.count("query") == before + 1
    assert pair.writer.sends.gated(send) == gated + 20


@pytest.mark.parametrize("at", ["query", "upload"])
def test_a_broken_gpu_is_told_once(at: str) -> None:
    pair = GpuPair()
    send = pair.send(pair.receive(1), [6])
    pair.gpu.broken = BAD_ADDRESS
    for _ in range(3):
        pair.begin(send, [2], gate=pair.gpu.gate() if at == "query" else NO_GATE)
    told, _ = pair.run()
    assert kinds(told) == [BROKEN]
    assert pair.writer.broken
    assert (pair.dst == 0xAB).all()
    pair.gpu.broken = 0
    assert pair.finish() == ([], [])  # the loop tries nothing more by itself


def test_what_is_taken_back_lands_later() -> None:
    """A send that is taken back while its kernels are enqueued: its number says when; its page ids stay until then."""
    pair = GpuPair()
    send = pair.send(pair.receive(2), [6, 1])
    op = pair.start(send, [2, 7])
    shut = pair.begin(send, [2, 7], gate=pair.gpu.gate())
    pair.run()
    with pair.writer.runner.standing_still():
        pair.writer.settle()
        posted = pair.writer.sends.flying(op)
        assert posted > 0
        assert pair.writer.sends.flying(shut) == 0
        assert pair.writer.sends.take_back(send, [op, shut]) is False
    device = pair.gpu.device
    assert not device.landed(posted)
    # The flow is used again at once, for other pages. Its page ids must not reach the kernel that is under way.
    again = pair.send(pair.receive(2, generation=2), [3, 4], generation=2)
    assert again == send
    pair.start(again, [0, 5])
    pair.run()
    pair.gpu.run(2)
    assert not device.landed(posted)
    assert (pair.dst[:, [6, 1]] == pair.src[:, [2, 7]]).all()
    pair.gpu.run(1)
    assert device.landed(posted)
    pair.finish()
    expected = np.full_like(pair.dst, 0xAB)
    expected[:, [6, 1]], expected[:, [3, 4]] = pair.src[:, [2, 7]], pair.src[:, [0, 5]]
    assert (pair.dst == expected).all()


def test_what_was_enqueued_before_the_driver_refused_the_rest_lands_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """An op of two kernels, of which the second is refused: the first one may still write."""
    launch = LoopGpu._launch

    def launch_once(gpu: LoopGpu, *arguments: int) -> int:
        code = launch(gpu, *arguments)
        gpu.broken = BAD_ADDRESS
        return code

    monkeypatch.setattr(LoopGpu, "_launch", launch_once)
    pair = GpuPair()
    send = pair.send(pair.receive(2), [6, 1])
    op = pair.start(send, [2, 7], layers=[0, 2])  # which do not follow each other
    assert kinds(pair.run()[0]) == [BROKEN]
    with pair.writer.runner.standing_still():
        pair.writer.settle()
        posted = pair.writer.sends.flying(op)
        pair.writer.sends.take_back(send, [op])
    assert (pair.dst == 0xAB).all()
    assert posted > 0
    assert not pair.gpu.device.landed(posted)
    pair.gpu.run()
    assert pair.gpu.device.landed(posted)
    assert (pair.dst[0, [6, 1]] == pair.src[0, [2, 7]]).all()
    assert pair.writer.world["flying"] == 0


def test_readers_expect_a_seal_once_kernels_are_all_that_is_left() -> None:
    """So their loops, and who waits there, spin until it comes."""
    pair = GpuPair()
    flow, gate = pair.receive(2), pair.gpu.gate()
    send = pair.send(flow, [6, 1])
    pair.start(send, [2, 7], layers=[0])
    pair.begin(send, [2, 7], layers=[1, 2], gate=gate)
    expected = []

    def look() -> None:
        pair.run()
        expected.append(seals_expected(pair.reader.world))

    look()  # not finished
    pair.writer.sends.finish(send, 2, b"")
    look()  # an op waits for its gate
    pair.gpu.events[gate.event] = 0
    look()
    pair.gpu.run(3)  # the first op has ended
    look()
    assert expected == [0, 0, 1, 1]
    assert pair.finish()[1] == [RECEIVED]
    assert seals_expected(pair.reader.world) == 0
    # One that is taken back comes no more.
    again = pair.send(pair.receive(2, generation=2), [6, 1], generation=2)
    late = pair.start(again, [2, 7])
    pair.writer.sends.finish(again, 2, b"")
    look()
    with pair.writer.runner.standing_still():
        pair.writer.settle()
        pair.writer.sends.take_back(again, [late])
    look()
    assert expected[-2:] == [1, 0]


def test_as_many_sends_as_have_page_ids() -> None:
    pair = GpuPair()
    flow = pair.receive(1)
    flows = [pair.send(flow, [0]) for _ in range(MAX_GPU_SENDS)]
    assert sorted(flows) == list(range(MAX_GPU_SENDS))
    with pytest.raises(AssertionError):
        pair.send(flow, [0])


def test_what_kernels_may_still_read_is_kept_until_they_have_ended() -> None:
    class Table:
        pass

    gpu, tables = LoopGpu(), [Table(), Table()]
    gone = [ref(table) for table in tables]
    gpu.device.retire(tables.pop(), 2)
    gpu.device.retire(tables.pop(), 3)
    assert [each() is None for each in gone] == [False, False]
    gpu.word[0] = 2
    gpu.device.retire(None, 0)
    assert [each() is None for each in gone] == [False, True]


def test_a_loop_that_ends_waits_for_its_kernels_for_a_while() -> None:
    gpu = LoopGpu()
    gpu.device._patience = 0.05
    began = time.monotonic()
    gpu.device.close(1)
    assert time.monotonic() - began >= 0.05
    gpu.device._patience = 600.0
    Timer(0.05, gpu.word.__setitem__, (0, 1)).start()
    gpu.device.close(1)
