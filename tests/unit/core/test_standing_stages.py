"""Staging through a standing stage, step by step: order, room, what is taken back, and records that lie."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the fake GPU knows its kernels by their parameters, which Triton tells")

from tests.helpers.apart import LAYERS, PAGES, TAGS
from tests.helpers.fakes.loop_gpu import BAD_ADDRESS, FakeEvent
from tests.helpers.notices import ended_ops, kinds
from tests.helpers.staged_apart import CANARY, StagedApart
from torchkv.bench.scale.loops import TOKENS
from torchkv.core.events import Notice
from torchkv.core.loop.codes import (
    BROKEN,
    CREDIT,
    CUT,
    LANDED,
    OP_DONE,
    PROMISE,
    RECEIVED,
    SEAL,
    SENT,
    STAGED,
    STRAY,
    WRITTEN,
)
from torchkv.core.loop.limits import UNPACKINGS
from torchkv.errors import PeerLost


@pytest.mark.parametrize("gpu", [False, True], ids=["host", "gpu"])
@pytest.mark.parametrize("seed", range(20))
def test_requests(seed: int, gpu: bool) -> None:
    """Layers and chunks in random order, with little work in a step, through stages of few pages: every byte."""
    dice = random.Random(seed)
    apart = StagedApart(
        seed, gpu=gpu, nbytes=dice.choice([512, 1024, 1536, 4096]), turn=dice.choice([1, 600, 1 << 20]), window=9
    )
    expected = apart.dst.clone()
    for life in range(3):
        src, dst = dice.sample(range(PAGES), 4), dice.sample(range(PAGES), 4)
        flow = apart.accept(dst, life + 1)
        send = apart.stage(flow, dst, life + 1)
        chunks = [(layer, page) for layer in range(LAYERS) for page in range(4)]
        if dice.random() < 0.5:
            apart.start(send, src)
        else:
            dice.shuffle(chunks)
            for layer, page in chunks:
                apart.start(send, [src[page]], start=page, layers=range(layer, layer + 1))
                if dice.random() < 0.5:
                    apart.step()
        apart.writer.sends.finish(send, 4, b"aux" * life)
        told, heard = apart.run(800)
        assert kinds(told)[-1] == SENT
        assert kinds(heard)[-1] == RECEIVED
        apart.writer.sends.op_results(ended_ops(told))
        apart.writer.sends.end(send)
        apart.reader.receives.close(flow)
        apart.reader.receives.free(flow)
        expected[:, dst] = apart.expected(src)
        assert torch.equal(apart.dst, expected)
    assert apart.canaries
    assert apart.writer.peers.staged(1) == (0, 0)
    assert apart.network.open == {}
    assert [int(core.world["network"]) for core in (apart.writer, apart.reader)] == [0, 0]


@pytest.mark.parametrize("gpu", [False, True], ids=["host", "gpu"])
def test_nothing_is_read_from_the_stage_of_a_writer_that_has_ended(gpu: bool) -> None:
    """Its bytes may be another writer's by then."""
    apart = StagedApart(gpu=gpu)
    before = apart.dst.clone()
    apart.start(apart.stage(apart.accept([0]), [0]), [0])
    apart.reader.peers.disconnect(0)
    assert kinds(apart.reader.events.take()) == [CUT]
    _, heard = apart.run()
    assert apart.network.puts > 0  # it was put, and told
    assert heard == []
    assert torch.equal(apart.dst, before)
    assert apart.writer.peers.staged(1)[1] > 0  # and never given back


@pytest.mark.parametrize("gpu", [False, True], ids=["host", "gpu"])
@pytest.mark.parametrize(
    ("nbytes", "taken"), [(1 << 16, True), (1024, True), (1024, False)], ids=["one piece", "more", "none"]
)
def test_the_stage_comes_back_after_the_lane_of_the_reader_alone_has_broken(
    nbytes: int, taken: bool, gpu: bool
) -> None:
    """When it has unpacked one piece, or none: the CREDIT of that is lost."""
    apart = StagedApart(gpu=gpu, nbytes=nbytes)
    apart.start(apart.stage(apart.accept([0, 1]), [0, 1]), [0, 1])
    peer = apart.reader.world["peers"][0]
    for _ in range(400 if taken else 0):
        apart.writer.runner.step()
        apart.world.advance(apart.world.now + 1e-4)
        apart.reader.runner.step()
        if peer["taken"]:
            break
    lane = apart.reader.peers.lane(0)
    assert lane is not None
    apart.reader.peers.cut(0, lane)
    apart.network.lose(apart.channels[1])
    # It goes on with others.
    assert apart.reader.peers.connect_network(2, apart.channels[1], (5, 6)) is not None
    apart.run()
    assert apart.writer.peers.staged(1)[1] > 0
    apart.read()
    apart.run()
    assert apart.writer.peers.staged(1) == (0, 0)
    again = apart.stage(apart.accept([4, 5], 2), [4, 5], 2)
    apart.start(again, [6, 7])
    apart.run()
    assert torch.equal(apart.dst[:, [4, 5]], apart.expected([6, 7]))


@pytest.mark.parametrize("gpu", [False, True], ids=["host", "gpu"])
def test_pieces_are_as_long_as_the_stage_allows(gpu: bool) -> None:
    """3,072 bytes through 1,024: in host memory four pieces fill it, on a GPU three, of 2 pages of 128 bytes."""
    apart = StagedApart(gpu=gpu)
    apart.start(apart.stage(apart.accept(list(range(8))), list(range(8))), list(range(8)))
    apart.run()
    assert apart.network.puts == 12
    assert torch.equal(apart.dst[:, :8], apart.expected(list(range(8))))


@pytest.mark.parametrize("gpu", [False, True], ids=["host", "gpu"])
def test_whole_layers_share_a_piece(gpu: bool) -> None:
    apart = StagedApart(gpu=gpu, nbytes=1 << 16)
    send = apart.stage(apart.accept(list(range(8))), list(range(8)))
    apart.start(send, list(range(8)))
    apart.run()
    assert apart.network.puts == 1


@pytest.mark.parametrize("gpu", [False, True], ids=["host", "gpu"])
def test_nothing_is_unpacked_that_has_not_arrived(gpu: bool) -> None:
    """At each look, the pages that count as arrived hold their bytes."""
    apart = StagedApart(gpu=gpu, turn=300)
    pages = list(range(8))
    flow = apart.accept(pages)
    send = apart.stage(flow, pages)
    for layer in range(LAYERS):
        apart.start(send, pages, layers=range(layer, layer + 1))
    seen = 0
    for _ in range(600):
        apart.step()
        for layer, intervals in enumerate(apart.reader.receives.state(flow).writers[0].intervals):
            for lo, hi in intervals:
                first, last = lo // TOKENS, hi // TOKENS
                assert torch.equal(apart.dst[layer, first:last], apart.expected(pages)[layer, first:last])
                seen = max(seen, last)
    assert seen == 8


@pytest.mark.parametrize("gpu", [False, True], ids=["host", "gpu"])
def test_pieces_of_a_request_that_is_taken_back_are_not_unpacked(gpu: bool) -> None:
    """What was put and not told: its positions stay taken until the put has landed, and come back all the same."""
    apart = StagedApart(gpu=gpu)
    flow = apart.accept([0, 1])
    send = apart.stage(flow, [0, 1])
    op = apart.start(send, [0, 1])
    apart.writer.runner.step()
    with apart.writer.runner.standing_still():
        posted, position = apart.writer.peers.staged(1)
        apart.writer.sends.take_back(send, [op])
    assert posted > 0
    assert position > 0
    assert not apart.writer.peers.has_come_back(1, apart.lane, position)
    again = apart.stage(flow, [0, 1])
    apart.start(again, [4, 5])
    apart.run()
    assert torch.equal(apart.dst[:, :2], apart.expected([4, 5]))
    assert apart.writer.peers.staged(1) == (0, 0)
    assert apart.writer.peers.has_come_back(1, apart.lane, position)


@pytest.mark.parametrize("gpu", [False, True], ids=["host", "gpu"])
def test_a_failed_request_gives_its_positions_back_and_writes_nothing(gpu: bool) -> None:
    apart = StagedApart(gpu=gpu)
    flow = apart.accept([0, 1])
    send = apart.stage(flow, [0, 1])
    apart.start(send, [0, 1])
    apart.writer.runner.step()
    with apart.reader.runner.standing_still():
        apart.reader.receives.close(flow)
        apart.reader.receives.stop_unpacking(flow)
    _, heard = apart.run()
    assert (apart.dst == 0xAB).all()
    assert {(notice.kind, notice.words[0] & 0xFF) for notice in heard} == {(STRAY, PROMISE), (STRAY, STAGED)}
    assert apart.writer.peers.staged(1) == (0, 0)


@pytest.mark.parametrize("gpu", [False, True], ids=["host", "gpu"])
def test_a_request_that_python_serves_is_unpacked_all_the_same(gpu: bool) -> None:
    """Python is told of what has been written."""
    apart = StagedApart(gpu=gpu)
    flow = apart.accept([0, 1])
    send = apart.stage(flow, [0, 1])
    apart.start(send, [7, 3])
    with apart.reader.runner.standing_still():
        apart.reader.receives.close(flow)
    _, heard = apart.run()
    assert torch.equal(apart.dst[:, :2], apart.expected([7, 3]))
    assert {(notice.kind, notice.words[0] & 0xFF) for notice in heard} == {(STRAY, PROMISE), (STRAY, WRITTEN)}


@pytest.mark.parametrize("gpu", [False, True], ids=["host", "gpu"])
def test_a_stage_ends_with_its_lane(gpu: bool) -> None:
    apart = StagedApart(gpu=gpu)
    flow = apart.accept([0, 1])
    send = apart.stage(flow, [0, 1])
    apart.start(send, [0, 1])
    apart.writer.runner.step()
    _, position = apart.writer.peers.staged(1)
    apart.channels[0].close()
    apart.start(send, [2, 3])
    puts = apart.network.puts
    apart.run(50)
    assert apart.network.puts == puts
    with pytest.raises(PeerLost, match="rank 1"):
        apart.writer.peers.has_come_back(1, apart.lane, position)


@pytest.mark.parametrize("side", [0, 1], ids=["writer", "reader"])
def test_a_loop_does_not_wait_for_a_connection_that_has_failed(side: int) -> None:
    """What it can tell nobody any more, pieces or CREDITs, would have it look up every 50 us."""
    apart = StagedApart()
    send = apart.stage(apart.accept([0, 1]), [0, 1])
    op = apart.start(send, [0, 1])
    apart.writer.runner.step()
    core = (apart.writer, apart.reader)[side]
    core.world["peers"][1 - side]["failed"] = -1
    told = apart.run()
    assert CUT in kinds(told[side])
    if side == 0:
        with core.runner.standing_still():
            core.settle()
            core.sends.take_back(send, [op])
        core.runner.step()
    else:
        assert core.world["peers"][0]["taken"] > 0
    assert core.world["untold"] == 0
    assert core.world["due_head"] == core.world["due_tail"]


RIGHT = {"head": STAGED | 0 << 8 | 1 << 32, "generation": 1, "hi": 2 * TOKENS, "nbytes": 256}
WRONG = [
    {"spare": -1},
    {"spare": 1 << 62},
    {"spare": 1024},
    {"spare": 900},
    {"nbytes": -1},
    {"nbytes": 1 << 62},
    {"nbytes": 255},
    {"nbytes": 1024},
    {"hi": 1 << 62},
    {"hi": 4 * TOKENS},
    {"hi": 2 * TOKENS - 1},
    {"lo": -TOKENS},
    {"lo": 2 * TOKENS, "hi": TOKENS},
    {"head": STAGED | 0 << 8 | 4 << 32},
    {"head": STAGED | 2 << 8 | 1 << 32},
    {"head": STAGED | 3 << 8 | 4 << 32},
    {"head": STAGED},
    {"generation": 2},
    {"flows": 3},
    {"flows": 1 << 31},
]


@pytest.mark.parametrize("gpu", [False, True], ids=["host", "gpu"])
@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_records_that_lie(wrong: dict[str, int], gpu: bool) -> None:
    """None of them has a byte written, or is counted; the honest one after them is."""
    apart = StagedApart(gpu=gpu)
    flow = apart.accept([5, 6])
    apart.ring[CANARY:-CANARY] = torch.randint(256, (1024,), dtype=torch.uint8)
    apart.message(apart.record(**(RIGHT | {"flows": flow} | wrong)))
    apart.run(5)
    assert (apart.dst == 0xAB).all()
    assert apart.reader.receives.arrived(flow) == 0
    taken = int(apart.reader.world["peers"][0]["taken"])
    apart.message(apart.record(**(RIGHT | {"flows": flow, "spare": taken if taken + 256 <= 1024 else 1024})))
    apart.run(5)
    assert torch.equal(apart.dst[0, [5, 6]].flatten(), apart.ring[CANARY + taken % 1024 :][:256])
    assert (apart.dst[1:] == 0xAB).all()


@pytest.mark.parametrize("credit", [-1, 1 << 62, 10_000])
def test_credits_that_lie(credit: int) -> None:
    """Nobody can give back what was not told."""
    apart = StagedApart()
    send = apart.stage(apart.accept([0, 1]), [0, 1])
    apart.start(send, [0, 1])
    apart.writer.runner.step()
    apart.message(apart.record(head=CREDIT, lo=credit), tag=TAGS[0], to=0)
    apart.writer.runner.step()
    assert int(apart.writer.world["peers"][1]["freed"]) == 0


def test_a_send_that_stages_all_promises_that_first() -> None:
    """Before anything is put. A verb that is staged among others promises nothing."""
    apart = StagedApart()
    flow = apart.accept([0, 1])
    apart.start(apart.stage(flow, [0, 1]), [4, 5])
    while not apart.reader.receives.state(flow).nbytes:
        apart.step()
        promised = apart.reader.receives.state(flow).writers[0].ring_only
        assert promised or not apart.reader.receives.state(flow).nbytes
    for generation, staged in ((2, 1), (3, 2)):
        flow = apart.accept([2, 3], generation)
        send = apart.send(flow, [2, 3], generation)
        ids = np.array([6, 7], dtype=np.int64)
        positions = np.array(range(LAYERS), dtype=np.int64)
        assert apart.writer.sends.start_op(send, positions, ids, 0, staged=staged) is not None
        apart.run()
        assert torch.equal(apart.dst[:, [2, 3]], apart.expected([6, 7]))
        assert apart.reader.receives.state(flow).writers[0].ring_only == (staged == 2)
        assert apart.writer.sends.promised(send) == (staged == 2)


# ---------------------------------------------------------------- kernels


def held() -> StagedApart:
    """The reader's stream runs nothing until it is let go."""
    apart = StagedApart(gpu=True)
    apart.held.add(apart.gpus[1])
    return apart


def unpacking_of(*, aux: bytes | None = b"") -> tuple[StagedApart, int, list[Notice], list[Notice]]:
    """Pages 7 and 3 are staged to the pages 0 and 1, where the kernels have not run: the receive, and what was told.

    aux: of the seal; None: there is none.
    """
    apart = held()
    flow = apart.accept([0, 1])
    send = apart.stage(flow, [0, 1])
    apart.start(send, [7, 3])
    if aux is not None:
        apart.writer.sends.finish(send, 2, aux)
    return apart, flow, *apart.run()


def test_a_seal_waits_until_all_pieces_are_unpacked() -> None:
    apart, flow, told, heard = unpacking_of(aux=b"aux")
    assert kinds(told) == [OP_DONE]  # it is in the stage, but the request has not ended
    assert heard == []
    assert apart.reader.receives.arrived(flow) == 0
    apart.held.clear()
    told, heard = apart.run()
    assert kinds(told) == [SENT]
    assert kinds(heard) == [RECEIVED]
    assert torch.equal(apart.dst[:, :2], apart.expected([7, 3]))
    assert apart.reader.receives.state(flow).writers[0].aux == b"aux"
    apart.reader.receives.close(flow)
    apart.reader.receives.free(flow)


def test_nothing_is_unpacked_behind_a_seal_that_waits() -> None:
    """The request may end with it, and its pages be another's."""
    apart, flow, _, _ = unpacking_of()
    position = int(apart.reader.world["peers"][0]["reached"])
    apart.message(apart.record(**(RIGHT | {"flows": flow, "spare": position if position + 256 <= 1024 else 1024})))
    _, heard = apart.run()
    assert {(notice.kind, notice.words[0] & 0xFF) for notice in heard} == {(STRAY, STAGED)}
    apart.held.clear()
    apart.run()
    assert torch.equal(apart.dst[:, :2], apart.expected([7, 3]))


@pytest.mark.parametrize("python", [False, True])
def test_a_request_that_fails_is_told_when_its_kernels_have_ended(python: bool) -> None:
    """python: it had taken the request back before."""
    apart, flow, _, _ = unpacking_of(aux=None)
    with apart.reader.runner.standing_still():
        apart.reader.receives.close(flow)
    if python:
        assert apart.run()[1] == []
    assert apart.reader.receives.stop_unpacking(flow)
    assert apart.run()[1] == []
    apart.held.clear()
    _, heard = apart.run()
    assert [(notice.kind, notice.index) for notice in heard] == [(LANDED, flow)]
    assert torch.equal(apart.dst[:, :2], apart.expected([7, 3]))  # until then they were not another's
    assert apart.writer.peers.staged(1) == (0, 0)
    apart.reader.receives.free(flow)


def test_a_request_that_python_serves_is_told_in_the_order_of_its_records() -> None:
    apart, flow, _, _ = unpacking_of()
    with apart.reader.runner.standing_still():
        apart.reader.receives.close(flow)
    assert apart.run()[1] == []
    apart.held.clear()
    _, heard = apart.run()
    found = [(notice.kind, notice.words[0] & 0xFF) for notice in heard]
    assert found[-1] == (STRAY, SEAL)
    assert set(found[:-1]) == {(STRAY, WRITTEN)}
    assert not apart.reader.receives.stop_unpacking(flow)


def test_a_reader_whose_kernels_are_late_hears_no_more_than_it_can_keep() -> None:
    """Its queue has a length. Nothing is lost, whatever comes meanwhile."""
    apart = held()
    flow = apart.accept([0])
    send = apart.stage(flow, [0])
    apart.start(send, [5], layers=range(1))
    apart.run()
    for _ in range(2 * UNPACKINGS):
        apart.message(apart.record(head=WRITTEN | 1 << 32, flows=flow, generation=1))
    apart.run(2 * UNPACKINGS)
    apart.start(send, [5], layers=range(1, LAYERS))
    apart.writer.sends.finish(send, 1, b"")
    apart.run()
    assert int(apart.reader.world["unpack_tail"] - apart.reader.world["unpack_head"]) == UNPACKINGS
    apart.held.clear()
    _, heard = apart.run()
    assert kinds(heard) == [RECEIVED]
    assert torch.equal(apart.dst[:, [0]], apart.expected([5]))


def test_an_op_waits_for_its_event() -> None:
    apart = StagedApart(gpu=True)
    event = FakeEvent(apart.gpus[0])
    flow = apart.accept([0, 1])
    apart.start(apart.stage(flow, [0, 1]), [7, 3], gate=event.gate)
    apart.run()
    assert apart.gpus[0].log == ["query"] * len(apart.gpus[0].log)
    event.happen()
    apart.run()
    assert torch.equal(apart.dst[:, :2], apart.expected([7, 3]))


def test_a_piece_is_put_once_it_is_packed() -> None:
    apart = StagedApart(gpu=True)
    apart.held.add(apart.gpus[0])
    apart.start(apart.stage(apart.accept([0, 1]), [0, 1]), [7, 3])
    apart.run()
    assert apart.network.puts == 0
    apart.held.clear()
    apart.run()
    assert apart.network.puts > 0


def test_what_is_packed_for_a_request_that_is_taken_back_is_not_put() -> None:
    """Its kernels read pages until the completion word says that they have ended."""
    apart = StagedApart(gpu=True)
    apart.held.add(apart.gpus[0])
    flow = apart.accept([0, 1])
    send = apart.stage(flow, [0, 1])
    op = apart.start(send, [0, 1])
    apart.run(5)
    with apart.writer.runner.standing_still():
        piece, position = apart.writer.peers.staged(1)
        apart.writer.sends.take_back(send, [op])
    apart.run(5)
    assert not apart.writer.peers.has_piece(1, apart.lane, piece)
    apart.held.clear()
    apart.run()
    assert apart.network.puts == 0
    assert apart.writer.peers.has_piece(1, apart.lane, piece)
    assert apart.writer.peers.has_come_back(1, apart.lane, position)
    assert apart.writer.peers.staged(1) == (0, 0)


@pytest.mark.parametrize("side", [0, 1])
def test_a_driver_that_refuses_work_is_told(side: int) -> None:
    """Whatever it has refused is not counted. What it has enqueued before is."""
    apart = StagedApart(gpu=True)
    flow = apart.accept([0, 1, 2, 3])
    send = apart.stage(flow, [0, 1, 2, 3])
    apart.start(send, [7, 3], layers=range(1))
    apart.run()
    apart.gpus[side].broken = BAD_ADDRESS
    apart.start(send, [5, 6], start=2)
    told, heard = apart.run()
    assert kinds((told, heard)[side])[:1] == [BROKEN]
    assert torch.equal(apart.dst[0, :2], apart.expected([7, 3])[0])
    assert (apart.dst[:, 2:] == 0xAB).all()
    assert [writer.intervals for writer in apart.reader.receives.state(flow).writers] == [[[(0, 2 * TOKENS)], [], []]]
