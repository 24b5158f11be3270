"""As `test_later_verbs`, of verbs to an instance of several ranks: to all of them, or the long way."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tests.helpers.references.memory import page_bytes
from tests.helpers.simulation.acquainted import PAGE_SIZE, PAGES, READERS, run_to_success, two_readers
from torchkv.engine.resident.plain_sends import LatestSend, PlainSends
from torchkv.engine.work import KVWork
from torchkv.errors import KVError, PageOutOfRange, TransferCancelled
from torchkv.protocol.sending.sender import Sender

LAYERS = 4
SENT = [5, 6, 2]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The layers of each verb that has gone the short way."""
    gone: list[tuple[int, ...]] = []
    again = PlainSends.again_to_all

    def noting(
        self: PlainSends, reqs: list[Any], lasts: list[LatestSend], layers: tuple[int, ...], *rest: Any
    ) -> KVWork | None:
        work = again(self, reqs, lasts, layers, *rest)
        if work is not None:
            gone.append(layers)
        return work

    monkeypatch.setattr(PlainSends, "again_to_all", noting)
    return gone


class Request:
    """A request "r" that both readers have granted."""

    def __init__(self, pages: int = len(SENT), *, prefix: int = 0) -> None:
        self.cluster = two_readers()
        self.writer, self.readers = self.cluster[0], self.cluster.ranks[1:]
        order = np.random.default_rng()
        self.granted = [order.permutation(PAGES)[:pages] for _ in self.readers]
        self.received = [
            reader.recv_pages("r", granted, "p", prefix_tokens=prefix)
            for reader, granted in zip(self.readers, self.granted, strict=True)
        ]
        assert self.cluster.run(lambda: self.writer.granted("r", "d") is not None, limit=5)
        self.sent: list[KVWork] = []
        self.source = page_bytes(self.writer)
        self.before = [page_bytes(reader) for reader in self.readers]

    def send(self, layer: int, pages: Any, dst: str | int = "d", **given: Any) -> KVWork:
        self.sent.append(self.writer.send_slice("r", layer, pages, dst, **given))
        return self.sent[-1]

    def finish(self) -> None:
        self.sent.append(self.writer.finish("r", "d"))
        run_to_success(self.cluster, [*self.received, *self.sent])

    def check(self, sent: Any, layers: Any = range(LAYERS)) -> None:
        """These pages of these layers lie where they were granted, and nothing else has changed."""
        for number, (reader, granted, before) in enumerate(zip(self.readers, self.granted, self.before, strict=True)):
            others = np.setdiff1d(np.arange(PAGES), granted)
            for (name, layer), pages in page_bytes(reader).items():
                whole = self.source[name, layer][sent]
                half = whole.reshape(len(sent), PAGE_SIZE, READERS, -1)[:, :, number].reshape(len(sent), -1)
                if layer in layers:
                    assert (pages[granted].reshape(len(sent), -1) == half).all(), (number, name, layer)
                assert (pages[others] == before[name, layer][others]).all()


def test_layers_of_the_same_pages_go_the_short_way(short: list[tuple[int, ...]]) -> None:
    request = Request()
    for layer in range(LAYERS):
        request.send(layer, np.array(SENT))
    request.finish()
    assert short == [(2,), (3,)]
    request.check(SENT)
    assert len({work.bytes for work in request.sent[:LAYERS]}) == 1
    assert [work._operation for work in request.sent] == ["send_slice('r')"] * LAYERS + ["finish('r')"]


@pytest.mark.parametrize("origin", ["prefix", "prompt"])
def test_behind_a_prefix(origin: str, short: list[tuple[int, ...]]) -> None:
    request, order = Request(pages=2, prefix=2 * PAGE_SIZE), np.array([4, 8, 1, 12])
    for layer in range(LAYERS):
        request.send(layer, order if origin == "prompt" else order[2:], origin=origin)
    request.finish()
    assert short == [(2,), (3,)]
    request.check(order[2:])


def test_the_same_pages_at_another_start_go_there(short: list[tuple[int, ...]]) -> None:
    request, order = Request(pages=4), np.array([4, 8])
    for start in (0, 2):
        for layer in range(LAYERS):
            request.send(layer, order, start=start)
    request.finish()
    assert short == [(2,), (3,), (1,), (2,), (3,)]
    request.check([*order, *order])


def test_pages_that_have_changed_in_place_are_those_that_are_sent(short: list[tuple[int, ...]]) -> None:
    request, pages = Request(), np.array(SENT)
    for layer in range(LAYERS - 1):
        request.send(layer, pages)
    pages[:] = pages[::-1].copy()
    request.send(LAYERS - 1, pages)
    request.finish()
    assert short == [(2,)]
    request.check(SENT, range(LAYERS - 1))
    request.check(SENT[::-1], [LAYERS - 1])


def test_a_page_out_of_range_is_refused_and_loses_nothing() -> None:
    request, pages = Request(), np.array(SENT)
    for layer in range(LAYERS - 1):
        request.send(layer, pages)
    pages[1] = PAGES
    with pytest.raises(PageOutOfRange, match=f"page {PAGES} is outside this cache"):
        request.send(LAYERS - 1, pages)
    request.send(LAYERS - 1, np.array(SENT))
    request.finish()
    request.check(SENT)


def test_a_verb_to_one_of_the_ranks_is_none_to_all(short: list[tuple[int, ...]]) -> None:
    """Neither is it repeated to the others, nor do they take it for theirs."""
    request, others = Request(), np.array([9, 9, 9])
    request.send(0, np.array(SENT))
    request.send(1, np.array(SENT))
    request.send(2, others, dst=1)
    request.send(2, np.array(SENT))
    request.send(3, others, dst=2)
    request.send(3, np.array(SENT))
    request.finish()
    assert not short
    request.check(SENT)


def test_where_the_loop_has_room_for_one_op_only_both_wait(short: list[tuple[int, ...]]) -> None:
    request, core = Request(), None
    for layer in range(LAYERS - 1):
        request.send(layer, np.array(SENT))
    core = request.writer.engine.flows.core
    kept, core._free_ops[1:] = core._free_ops[1:], []
    work = request.send(LAYERS - 1, np.array(SENT))
    core._free_ops += kept
    assert short == [(2,)]
    assert not work.is_completed()
    request.finish()
    request.check(SENT)


@pytest.mark.parametrize("reader", range(READERS))
@pytest.mark.parametrize("here", [True, False])
def test_behind_a_cancel_nothing_is_written(reader: int, here: bool) -> None:
    request, pages = Request(), np.array(SENT)
    for layer in range(LAYERS - 1):
        request.send(layer, pages)
    request.cluster.run(lambda: all(work.is_completed() for work in request.sent), limit=5)
    cancelled = (request.writer if here else request.readers[reader]).cancel("r")
    if not here:
        assert request.cluster.run(cancelled.is_completed, limit=5)
    error: KVError | None
    try:
        work = request.send(LAYERS - 1, pages)
        request.cluster.run(lambda: False, limit=0.5)
        error = work.exception()
    except TransferCancelled as raised:
        error = raised
    assert isinstance(error, TransferCancelled) != here, "cancelled here, the name is free for a new request"
    for number, before in enumerate(request.before):
        now = page_bytes(request.readers[number])
        if here or number == reader:
            assert all((now[name, LAYERS - 1] == before[name, LAYERS - 1]).all() for name in ("k", "v"))


def test_ends_of_ops_to_several_ranks_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """They end in turns: once for each request, not once for each op."""
    counted: list[int] = []
    copied = Sender.copied

    def counting(self: Sender, req: Any, ops: list[Any], *rest: Any) -> None:
        counted.append(len(ops))
        copied(self, req, ops, *rest)

    request = Request()
    monkeypatch.setattr(Sender, "copied", counting)
    for layer in range(LAYERS):
        request.send(layer, np.array(SENT))
    while any(rank.engine.flows.core.runner.step() for rank in request.cluster.ranks):
        pass
    with request.writer.engine.lock:
        request.writer.engine.catch_up()
    assert len(counted) == READERS
    assert min(counted) > 1
    request.finish()
    request.check(SENT)


@pytest.mark.parametrize("seed", range(30))
def test_chunks_in_any_order_with_lists_that_change(seed: int) -> None:
    dice = random.Random(seed)
    count = 8
    request, orders = Request(pages=count), [dice.sample(range(PAGES), count) for _ in range(LAYERS)]
    orders[1:] = dice.choice([orders[1:], [orders[0]] * (LAYERS - 1)])
    cut = dice.randrange(1, count)
    calls = [(chunk, layer) for chunk in ((0, cut), (cut, count)) for layer in range(LAYERS)]
    if dice.random() < 0.3:
        dice.shuffle(calls)
    for (first, last), layer in calls:
        ids = np.array(orders[layer][first:last])
        targets: list[str | int] = dice.choice([["d"], ["d"], ["d"], [1, 2], [2, "d"]])
        for dst in targets:
            request.send(layer, ids, dst, start=first)
        for _ in range(dice.randrange(3)):
            dice.choice(request.cluster.ranks).engine.flows.core.runner.step()
    request.finish()
    for layer in range(LAYERS):
        request.check(orders[layer], [layer])
