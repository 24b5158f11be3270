"""Staging through a standing stage, step by step: order, room, what is taken back, and records that lie."""

from __future__ import annotations

import random

import pytest
import torch

from tests.helpers.apart import LAYERS, PAGES, TAGS, kinds
from tests.helpers.staged_apart import CANARY, StagedApart
from torchkv.bench.scale.loops import TOKENS
from torchkv.core.loop.codes import CREDIT, CUT, OP_DONE, RECEIVED, SENT, STAGED, STRAY, WRITTEN
from torchkv.errors import PeerLost


@pytest.mark.parametrize("seed", range(20))
def test_requests(seed: int) -> None:
    """Layers and chunks in random order, with little work in a step, through stages of few pages: every byte."""
    dice = random.Random(seed)
    apart = StagedApart(
        seed, nbytes=dice.choice([512, 1024, 1536, 4096]), turn=dice.choice([1, 600, 1 << 20]), window=9
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
        apart.writer.finish_send(send, 4, b"aux" * life)
        told, heard = apart.run(800)
        assert kinds(told)[-1] == SENT
        assert kinds(heard)[-1] == RECEIVED
        apart.writer.op_results([notice.index for notice in told if notice.kind == OP_DONE])
        apart.writer.end_send(send)
        apart.reader.receives.close(flow)
        apart.reader.receives.free(flow)
        expected[:, dst] = apart.expected(src)
        assert torch.equal(apart.dst, expected)
    assert apart.canaries
    assert apart.writer.peers.staged(1) == (0, 0)
    assert apart.network.open == {}
    assert [int(core.world["network"]) for core in (apart.writer, apart.reader)] == [0, 0]


def test_nothing_is_read_from_the_stage_of_a_writer_that_has_ended() -> None:
    """Its bytes may be another writer's by then."""
    apart = StagedApart()
    before = apart.dst.clone()
    apart.start(apart.stage(apart.accept([0]), [0]), [0])
    apart.reader.peers.disconnect(0)
    assert kinds(apart.reader.events.take()) == [CUT]
    _, heard = apart.run()
    assert apart.network.puts > 0  # it was put, and told
    assert heard == []
    assert torch.equal(apart.dst, before)
    assert apart.writer.peers.staged(1)[1] > 0  # and never given back


@pytest.mark.parametrize(
    ("nbytes", "taken"), [(1 << 16, True), (1024, True), (1024, False)], ids=["one piece", "more", "none"]
)
def test_the_stage_comes_back_after_the_lane_of_the_reader_alone_has_broken(nbytes: int, taken: bool) -> None:
    """When it has unpacked one piece, or none: the CREDIT of that is lost."""
    apart = StagedApart(nbytes=nbytes)
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


def test_whole_layers_share_a_piece() -> None:
    apart = StagedApart(nbytes=1 << 16)
    send = apart.stage(apart.accept(list(range(8))), list(range(8)))
    apart.start(send, list(range(8)))
    apart.run()
    assert apart.network.puts == 1


def test_nothing_is_unpacked_that_has_not_arrived() -> None:
    """At each look, the pages that count as arrived hold their bytes."""
    apart = StagedApart(turn=300)
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


def test_pieces_of_a_request_that_is_taken_back_are_not_unpacked() -> None:
    """What was put and not told: its positions stay taken until the put has landed, and come back all the same."""
    apart = StagedApart()
    flow = apart.accept([0, 1])
    send = apart.stage(flow, [0, 1])
    op = apart.start(send, [0, 1])
    apart.writer.runner.step()
    with apart.writer.runner.standing_still():
        posted, position = apart.writer.peers.staged(1)
        apart.writer.take_back_send(send, [op])
    assert posted > 0
    assert position > 0
    assert not apart.writer.peers.has_come_back(1, apart.lane, position)
    again = apart.stage(flow, [0, 1])
    apart.start(again, [4, 5])
    apart.run()
    assert torch.equal(apart.dst[:, :2], apart.expected([4, 5]))
    assert apart.writer.peers.staged(1) == (0, 0)
    assert apart.writer.peers.has_come_back(1, apart.lane, position)


def test_a_failed_request_gives_its_positions_back_and_writes_nothing() -> None:
    apart = StagedApart()
    flow = apart.accept([0, 1])
    send = apart.stage(flow, [0, 1])
    apart.start(send, [0, 1])
    apart.writer.runner.step()
    with apart.reader.runner.standing_still():
        apart.reader.receives.close(flow)
        apart.reader.receives.stop_unpacking(flow)
    _, heard = apart.run()
    assert (apart.dst == 0xAB).all()
    assert {(notice.kind, notice.words[0] & 0xFF) for notice in heard} == {(STRAY, STAGED)}
    assert apart.writer.peers.staged(1) == (0, 0)


def test_a_request_that_python_serves_is_unpacked_all_the_same() -> None:
    """Python is told of what has been written."""
    apart = StagedApart()
    flow = apart.accept([0, 1])
    send = apart.stage(flow, [0, 1])
    apart.start(send, [7, 3])
    with apart.reader.runner.standing_still():
        apart.reader.receives.close(flow)
    _, heard = apart.run()
    assert torch.equal(apart.dst[:, :2], apart.expected([7, 3]))
    assert {(notice.kind, notice.words[0] & 0xFF) for notice in heard} == {(STRAY, WRITTEN)}


def test_a_stage_ends_with_its_lane() -> None:
    apart = StagedApart()
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


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_records_that_lie(wrong: dict[str, int]) -> None:
    """None of them has a byte written, or is counted; the honest one after them is."""
    apart = StagedApart()
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
