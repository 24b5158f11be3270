"""The loop over a network, step by step: what has arrived, what has no room, what fails, and messages that lie."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torchkv_loopback import Faults
from torchkv_loopback.channel import LoopbackChannel

pytest.importorskip("triton", reason="the fake GPU knows its kernels by their parameters, which Triton tells")

from tests.helpers.apart import LAYERS, PAGES, TAGS, Apart
from tests.helpers.fakes.loop_gpu import BAD_ADDRESS, FakeEvent, LoopGpu
from tests.helpers.notices import ended_ops, kinds
from torchkv.bench.scale.loops import PAGE, TOKENS
from torchkv.core.loop import network
from torchkv.core.loop.codes import BROKEN, CUT, GRANT, OP_DONE, RECEIVED, SEAL, SENT, STRAY, VERDICT, WRITTEN
from torchkv.errors import PeerLost


@pytest.mark.parametrize("seed", range(20))
def test_requests(seed: int) -> None:
    """Layer by layer and in chunks, with little work in a step: every byte, and every request is freed."""
    dice = random.Random(seed)
    apart = Apart(seed, turn=dice.choice([1, 600, 1 << 20]), window=dice.choice([9, 256]))
    expected = apart.dst.clone()
    for life in range(3):
        src, dst = dice.sample(range(PAGES), 4), dice.sample(range(PAGES), 4)
        flow = apart.receive(4, life + 1)
        send = apart.send(flow, dst, life + 1)
        chunks = [(layer, page) for layer in range(LAYERS) for page in range(4)]
        dice.shuffle(chunks)
        for layer, page in chunks:
            apart.start(send, [src[page]], start=page, layers=range(layer, layer + 1))
            if dice.random() < 0.5:
                apart.step()
        apart.writer.sends.finish(send, 4, b"aux" * life)
        told, heard = apart.run()
        assert kinds(told)[-1] == SENT
        assert kinds(heard)[-1] == RECEIVED
        assert apart.reader.receives.state(flow).writers[0].aux == b"aux" * life
        apart.writer.sends.op_results(ended_ops(told))
        apart.writer.sends.end(send)
        apart.reader.receives.close(flow)
        apart.reader.receives.free(flow)
        expected[:, dst] = apart.src[:, src]
        assert torch.equal(apart.dst, expected)
    assert apart.network.open == {}
    assert [int(core.world["network"]) for core in (apart.writer, apart.reader)] == [0, 0]


def test_what_is_adjacent_is_put_as_one() -> None:
    apart = Apart()
    flow = apart.receive(6)
    send = apart.send(flow, [3, 4, 5, 0, 8, 9])
    op = apart.start(send, [0, 1, 2, 7, 8, 10])
    told, _ = apart.run()
    assert kinds(told) == [OP_DONE]
    assert apart.writer.sends.op_results([op]) == ([LAYERS * 6 * PAGE], LAYERS * 4)
    assert apart.network.puts == LAYERS * 4


def test_nothing_is_told_before_it_has_arrived() -> None:
    """At each WRITTEN that the reader takes, the bytes that it speaks of are there."""
    apart = Apart(turn=300)
    flow = apart.receive(8)
    send = apart.send(flow, list(range(8)))
    for layer in range(LAYERS):
        apart.start(send, list(range(8)), layers=range(layer, layer + 1))
    seen: set[int] = set()
    for _ in range(300):
        apart.step()
        cover = apart.reader.receives.state(flow).writers[0].intervals
        for layer, intervals in enumerate(cover):
            if intervals:
                assert torch.equal(apart.dst[layer, :8], apart.src[layer, :8])
                seen.add(layer)
    assert seen == set(range(LAYERS))


def test_one_flush_stands_for_many_ops() -> None:
    apart = Apart()
    apart.world.faults = Faults(min_delay=0.02, max_delay=0.02)
    flow = apart.receive(8)
    send = apart.send(flow, list(range(8)))
    for page in range(8):
        apart.start(send, [page], start=page)
    flushes: list[int] = []
    real = LoopbackChannel.flush

    def flush(channel: LoopbackChannel) -> Any:
        flushes.append(1)
        return real(channel)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoopbackChannel, "flush", flush)
        told, _ = apart.run(2000)
    assert kinds(told) == [OP_DONE] * 8
    assert len(flushes) <= 2


@pytest.mark.parametrize("side", ["writer", "reader"])
def test_the_loop_drives_the_transport_from_the_verb_on(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's thread would contend for the transport until the loop's first turn, a millisecond of puts, has ended."""
    apart = Apart()
    core = getattr(apart, side)
    monkeypatch.setattr(type(core.runner), "running", True)
    assert not core.peers.drives_transport
    flow = apart.receive(2)
    if side == "writer":
        apart.start(apart.send(flow, [0, 1]), [0, 1])
    assert core.peers.drives_transport


def test_puts_that_find_no_room_wait() -> None:
    """Only so many requests at once: here fewer than a layer has pages."""
    apart = Apart()
    peer = apart.writer.world["peers"][apart.writer.peers.slots[1]]
    under_way = network.PUTS - 2
    peer["requests"] = under_way
    ring = int(peer["memory"]) + network.NETWORK_NBYTES - 16 * network.PUTS
    blocker = apart.network._request(_Never())
    for place in range(under_way):
        ctypes.c_int64.from_address(ring + 16 * place).value = blocker
    flow = apart.receive(8)
    send = apart.send(flow, [0, 2, 4, 6, 8, 10, 1, 3])
    apart.start(send, [0, 2, 4, 6, 8, 10, 1, 3])
    apart.run(20)
    assert apart.network.puts == network.PUTS - under_way
    assert int(peer["requests"]) == network.PUTS


class _Never:
    done, error = False, None


def test_a_broken_connection() -> None:
    """Python is told once; what was put and not flushed has not arrived, and nobody claims it."""
    apart = Apart()
    _, _, posted = apart.begin()
    assert not apart.writer.peers.has_arrived(1, apart.lane, posted)
    apart.channels[0].lose("cut")
    told, heard = apart.run(50)
    assert kinds(told) == [CUT]
    assert RECEIVED not in kinds(heard)
    with pytest.raises(PeerLost, match="rank 1"):
        apart.writer.peers.has_arrived(1, apart.lane, posted)
    assert apart.writer.peers.lane(1) is None


def test_the_reader_hears_the_writer_while_its_own_lane_is_broken() -> None:
    """The writer's goes on: it would not learn that its records were missed."""
    apart = Apart()
    send, _, _ = apart.begin()
    lane = apart.reader.peers.lane(0)
    assert lane is not None
    apart.reader.peers.cut(0, lane)
    apart.network.lose(apart.channels[1])
    assert apart.reader.peers.connect_network(2, apart.channels[1], (5, 6)) is not None
    apart.writer.sends.finish(send, 2, b"aux")
    _, heard = apart.run()
    assert kinds(heard) == [CUT, RECEIVED]
    assert torch.equal(apart.dst[:, :2], apart.src[:, :2])
    # Its success cannot be told that way any more. Nor does the loop go on trying, and look up all the time.
    assert apart.reader.peers.unsure_verdicts(0) == [1]
    assert apart.reader.peers.unsure_verdicts(0) == []
    assert apart.reader.world["due_head"] == apart.reader.world["due_tail"]


@pytest.mark.parametrize("failed", [False, True])
def test_successes_that_may_not_have_been_told(failed: bool) -> None:
    """Those of the last messages, when the connection has broken, until it is another one's."""
    apart = Apart()
    send, _, _ = apart.begin()
    apart.writer.sends.finish(send, 2, b"")
    told, _ = apart.run()
    assert kinds(told)[-1] == SENT
    lane = apart.reader.peers.lane(0)
    assert lane is not None
    assert apart.reader.peers.unsure_verdicts(0) == []
    if failed:
        apart.reader.world["peers"][0]["failed"] = -1
    else:
        apart.reader.peers.cut(0, lane)
    assert apart.reader.peers.unsure_verdicts(0) == [1]


def test_puts_of_an_op_that_is_taken_back_arrive_all_the_same() -> None:
    apart = Apart()
    send, op, posted = apart.begin()
    with apart.writer.runner.standing_still():
        apart.writer.settle()
        apart.writer.sends.take_back(send, [op])
    assert int(apart.writer.world["network"]) == 0
    while not apart.writer.peers.has_arrived(1, apart.lane, posted):
        apart.step()
    assert torch.equal(apart.dst[0, :2], apart.src[0, :2])


def test_closing_the_channel_ends_the_lane_first() -> None:
    apart = Apart()
    _, _, posted = apart.begin()
    apart.channels[0].close()
    assert apart.network.open == {}, "requests that nobody frees"
    assert kinds(apart.writer.events.take()) == [CUT]
    with pytest.raises(PeerLost):
        apart.writer.peers.has_arrived(1, apart.lane, posted)
    apart.run(10)  # nothing uses the endpoint any more: the fake network would say so


LIES: dict[str, Callable[[Apart, int], bytes]] = {
    "a grant, which lies in no memory": lambda apart, flow: apart.record(head=GRANT, flows=flow, generation=1),
    "half a record": lambda apart, flow: apart.record(head=SEAL, flows=flow, generation=1, lo=2)[:32],
    "two records": lambda apart, flow: apart.record(head=SEAL, flows=flow, generation=1, lo=2) * 2,
    "nothing": lambda apart, flow: b"",
    "a kind that there is not": lambda apart, flow: apart.record(head=99, flows=flow, generation=1),
}


@pytest.mark.parametrize("lie", LIES)
def test_messages_that_are_no_records(lie: str) -> None:
    apart = Apart()
    flow = apart.receive(2)
    apart.message(LIES[lie](apart, flow))
    _, heard = apart.run(5)
    assert heard == []
    finish(apart, flow)


def finish(apart: Apart, flow: int) -> None:
    send = apart.send(flow, [0, 1])
    apart.start(send, [0, 1])
    apart.writer.sends.finish(send, 2, b"")
    _, heard = apart.run()
    assert kinds(heard) == [RECEIVED]


def test_a_record_with_the_tag_of_nobody() -> None:
    apart = Apart()
    flow = apart.receive(2)
    for tag in (0, TAGS[0], -1):
        apart.message(apart.record(head=WRITTEN | LAYERS << 32, flows=flow, generation=1, hi=2 * TOKENS), tag)
        apart.message(apart.record(head=SEAL, flows=flow, generation=1, lo=2), tag)
    _, heard = apart.run(5)
    assert heard == []
    assert all(not intervals for intervals in apart.reader.receives.state(flow).writers[0].intervals)
    finish(apart, flow)


@pytest.mark.parametrize("flow", [0, 511, 512, 0xFFFFFFFF])
@pytest.mark.parametrize("kind", [WRITTEN, SEAL, VERDICT])
def test_a_record_for_a_flow_that_is_not_here(flow: int, kind: int) -> None:
    """Python judges it."""
    apart = Apart()
    apart.message(apart.record(head=kind, flows=flow, generation=7))
    _, heard = apart.run(5)
    assert kinds(heard) == [STRAY]


def test_records_that_find_no_room_stay_due() -> None:
    """Requests of messages that the network does not end: the ring of records fills, and nothing is lost."""
    apart = Apart()
    apart.network.holding = True
    flows = [apart.receive(1, generation) for generation in range(1, 101)]
    for generation, flow in enumerate(flows, start=1):
        send = apart.send(flow, [0], generation)
        apart.start(send, [0])
        apart.writer.sends.finish(send, 1, b"")
    _, heard = apart.run()
    assert len(heard) < 100
    apart.network.holding = False
    _, more = apart.run(2000)
    assert kinds(heard + more).count(RECEIVED) == 100


def gated(gpu: LoopGpu) -> tuple[Apart, int, FakeEvent]:
    """A send of a page of a GPU whose op waits for an event, and is finished; its flow, and the event."""
    apart, event = Apart(gpu=gpu), FakeEvent(gpu)
    send = apart.send(apart.receive(1), [3])
    apart.start(send, [5], gate=event.gate)
    apart.writer.sends.finish(send, 1, b"")
    return apart, send, event


def test_pages_of_a_gpu_are_put_once_their_event_has_happened() -> None:
    apart, send, event = gated(LoopGpu())
    assert apart.run(50) == ([], [])
    assert apart.network.puts == 0
    assert apart.writer.sends.gated(send) > 0, "who waits for the event is known to be alive"
    apart.src[:, 5] = 0x77  # what the model writes last
    event.happen()
    told, heard = apart.run()
    assert kinds(told) == [OP_DONE, SENT]
    assert kinds(heard) == [RECEIVED]
    assert (apart.dst[:, 3] == 0x77).all()
    assert (apart.dst[:, [page for page in range(PAGES) if page != 3]] == 0xAB).all()


def test_a_gpu_that_answers_no_more_puts_nothing() -> None:
    gpu = LoopGpu()
    apart, _, event = gated(gpu)
    gpu.broken = BAD_ADDRESS
    event.happen()
    told, heard = apart.run(50)
    assert kinds(told) == [BROKEN], "once"
    assert heard == []
    assert apart.network.puts == 0
    assert apart.writer.broken


def test_a_send_is_taken_back_while_it_waits_for_an_event() -> None:
    apart, send, event = gated(LoopGpu())
    apart.run(5)
    with apart.writer.runner.standing_still():
        apart.writer.settle()
        assert apart.writer.sends.put(0) == 0, "nothing of it is under way"
        assert apart.writer.sends.take_back(send, [0]) is False
    event.happen()
    assert apart.run(20) == ([], [])
    assert (apart.dst == 0xAB).all()
