"""A verb that is as the one before, but for its layers and its event, takes a short way: never with old pages."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.layer_groups import GROUPS
from tests.helpers.references.memory import page_bytes
from tests.helpers.simulation.acquainted import PAGE_SIZE, PAGES, of_layer_groups, pair, run_to_success, some_lists
from torchkv.engine.resident.plain_sends import LatestSend, PlainSends
from torchkv.engine.work import KVWork
from torchkv.errors import PageOutOfRange, ProtocolError, TransferCancelled

WRITER, READER = 0, 1
LAYERS = 3
SENT, GRANTED = [5, 6, 2], [3, 1, 9]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The layers of each verb that has gone the short way."""
    gone: list[tuple[int, ...]] = []
    again = PlainSends.again

    def noting(self: PlainSends, req: Any, last: LatestSend, layers: tuple[int, ...], *rest: Any) -> KVWork | None:
        work = again(self, req, last, layers, *rest)
        if work is not None:
            gone.append(layers)
        return work

    monkeypatch.setattr(PlainSends, "again", noting)
    return gone


class Request:
    """A request "r" of a pair, which has been granted."""

    def __init__(self, pages: int = len(GRANTED), *, prefix: int = 0) -> None:
        self.cluster = pair()
        self.writer, self.reader = self.cluster[WRITER], self.cluster[READER]
        self.granted = np.random.default_rng().permutation(PAGES)[:pages]
        self.received = self.reader.recv_pages("r", self.granted, WRITER, prefix_tokens=prefix)
        assert self.cluster.run(lambda: self.writer.granted("r", READER) is not None, limit=5)
        self.sent: list[KVWork] = []
        self.source = {key: pages.copy() for key, pages in page_bytes(self.writer).items()}
        self.before = page_bytes(self.reader)

    def send(self, layer: int, pages: Any, **given: Any) -> None:
        self.sent.append(self.writer.send_layer("r", layer, pages, READER, **given))

    def finish(self) -> None:
        self.sent.append(self.writer.finish("r", READER))
        run_to_success(self.cluster, [self.received, *self.sent])

    def arrived(self, layer: int, granted: Any, sent: Any) -> bool:
        """Whether these pages of a layer have arrived in these."""
        now = page_bytes(self.reader)
        return all((now[name, layer][granted] == self.source[name, layer][sent]).all() for name in ("k", "v"))

    def untouched(self, granted: Any) -> bool:
        """Whether all other pages of the reader are as before."""
        others = np.setdiff1d(np.arange(PAGES), granted)
        return all((pages[others] == self.before[key][others]).all() for key, pages in page_bytes(self.reader).items())


KINDS: dict[str, Callable[[], Any]] = {
    "array": lambda: np.array(SENT),
    "tensor": lambda: torch.tensor(SENT),
}


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_the_same_pages_go_the_short_way(kind: str, short: list[tuple[int, ...]]) -> None:
    request = Request()
    for layer in range(LAYERS):
        request.send(layer, KINDS[kind]())  # equal, and not the same object
    request.finish()
    assert short == [(1,), (2,)]
    assert all(request.arrived(layer, request.granted, SENT) for layer in range(LAYERS))
    assert request.untouched(request.granted)
    assert [work._operation for work in request.sent] == ["send_layer('r')"] * LAYERS + ["finish('r')"]
    assert len({work.bytes for work in request.sent[:LAYERS]}) == 1


def test_later_verbs_are_forced_to_the_path_of_the_group(short: list[tuple[int, ...]]) -> None:
    """Which they keep if Python takes them back from the loop."""
    request = Request()
    assert request.writer._verbs is not None
    request.writer._verbs.forced_path = "direct"
    for layer in range(LAYERS):
        request.send(layer, np.array(SENT))
    begun = request.writer.engine.sender.requests.by_key["r", READER]
    assert [op.source_pages.path for op in begun.running] == ["direct"] * LAYERS
    request.finish()
    assert short == [(2,)]
    assert all(request.arrived(layer, request.granted, SENT) for layer in range(LAYERS))


def test_pages_that_have_changed_in_place_are_those_that_are_sent(short: list[tuple[int, ...]]) -> None:
    request, pages = Request(), np.array(SENT)
    for layer in range(LAYERS):
        request.send(layer, pages)
        pages[:] = pages[::-1].copy()
    request.finish()
    assert not short
    assert request.arrived(0, request.granted, SENT)
    assert request.arrived(1, request.granted, SENT[::-1])
    assert request.arrived(2, request.granted, SENT)


def test_a_copy_is_compared_not_what_the_caller_has_changed_since(short: list[tuple[int, ...]]) -> None:
    request, pages = Request(), np.array(SENT)
    request.send(0, pages)
    request.send(1, pages)
    pages[:] = 0
    request.send(2, np.array(SENT))
    request.finish()
    assert short == [(1,), (2,)]
    assert all(request.arrived(layer, request.granted, SENT) for layer in range(LAYERS))


@pytest.mark.parametrize("bad", [-1, PAGES, 1 << 40])
def test_a_page_out_of_range_is_refused_and_loses_nothing(bad: int) -> None:
    request, pages = Request(), np.array(SENT)
    request.send(0, pages)
    request.send(1, pages)
    pages[1] = bad
    with pytest.raises(PageOutOfRange, match=rf"page {bad} is outside this cache"):
        request.send(2, pages)
    request.send(2, np.array(SENT))
    request.finish()
    assert all(request.arrived(layer, request.granted, SENT) for layer in range(LAYERS))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_other_pages_at_another_start_are_sent_to_their_own_place(count: int, short: list[tuple[int, ...]]) -> None:
    request = Request(pages=8)
    order = np.random.default_rng().permutation(PAGES)[:8]
    for start in range(0, 8, count):
        for layer in range(LAYERS):
            request.send(layer, order[start : start + count], start=start)
    request.finish()
    assert len(short) == 8 // count * (LAYERS - 1)
    assert all(request.arrived(layer, request.granted, order) for layer in range(LAYERS))


def test_shorter_and_longer_lists_with_the_same_beginning_are_others(short: list[tuple[int, ...]]) -> None:
    request, order = Request(pages=4), np.array([4, 8, 1, 12])
    request.send(0, order)
    request.send(1, order[:2])
    request.send(2, order)
    request.send(1, order[2:], start=2)
    request.finish()
    assert not short
    assert all(request.arrived(layer, request.granted, order) for layer in range(LAYERS))


@pytest.mark.parametrize("origin", ["prefix", "prompt"])
def test_behind_a_prefix(origin: str, short: list[tuple[int, ...]]) -> None:
    held = 2
    request, order = Request(pages=2, prefix=held * PAGE_SIZE), np.array([4, 8, 1, 12])
    sent = order[held:]
    for layer in range(LAYERS):
        request.send(layer, order if origin == "prompt" else sent, origin=origin)
    request.finish()
    assert short == ([(2,)] if origin == "prompt" else [(1,), (2,)])  # the first one went without two pages
    assert all(request.arrived(layer, request.granted, sent) for layer in range(LAYERS))
    assert request.untouched(request.granted)


def test_the_same_pages_counted_from_elsewhere_are_not_the_same_verb() -> None:
    request, order = Request(pages=2, prefix=PAGE_SIZE), np.array([4, 8])
    request.send(0, order)
    request.send(1, order)
    request.send(2, order, origin="prompt")  # the first one of these is the one that the reader holds
    request.send(2, np.array([12]), start=1)
    request.finish()
    assert all(request.arrived(layer, request.granted, order) for layer in (0, 1))
    assert request.arrived(2, request.granted, [8, 12])


def test_the_same_pages_at_another_start_go_there() -> None:
    request, order = Request(pages=4), np.array([4, 8])
    for layer in range(LAYERS):
        request.send(layer, order)
    for layer in range(LAYERS):
        request.send(layer, order, start=2)
    request.finish()
    assert all(request.arrived(layer, request.granted, [*order, *order]) for layer in range(LAYERS))


def test_other_verbs_between(short: list[tuple[int, ...]]) -> None:
    request = Request()
    request.send(0, np.array(SENT))
    request.sent.append(request.writer.send_slice("r", (1,), np.array(SENT), READER))
    request.send(2, np.array(SENT))
    for _ in range(2):
        request.sent.append(request.writer.send_pages("r", np.array(SENT), READER))
    request.finish()
    assert short == [(2,), (0, 1, 2)]
    assert all(request.arrived(layer, request.granted, SENT) for layer in range(LAYERS))


def test_a_verb_behind_the_end_of_its_request_is_told_so() -> None:
    request, pages = Request(), np.array(SENT)
    for layer in range(LAYERS):
        request.send(layer, pages)
    request.sent.append(request.writer.finish("r", READER))
    with pytest.raises(ProtocolError, match="is finished already"):
        request.send(0, pages)


@pytest.mark.parametrize("here", [True, False])
def test_behind_a_cancel_nothing_is_written(here: bool) -> None:
    request, pages = Request(), np.array(SENT)
    request.send(0, pages)
    request.send(1, pages)
    cancelled = (request.writer if here else request.reader).cancel("r")
    if not here:
        assert request.cluster.run(cancelled.is_completed, limit=5)
    try:
        request.send(2, pages)
        request.cluster.run(lambda: False, limit=0.5)
        error = request.sent[-1].exception()
    except TransferCancelled as raised:
        error = raised
    assert isinstance(error, TransferCancelled) != here, "cancelled here, the name is free for a new request"
    now = page_bytes(request.reader)
    assert all((now[name, 2] == request.before[name, 2]).all() for name in ("k", "v"))


@pytest.mark.parametrize("seed", range(40))
def test_chunks_in_any_order_with_lists_that_change(seed: int, short: list[tuple[int, ...]]) -> None:
    """Every page of every layer, some again, from arrays that are used for others next, while the loops go on."""
    dice = random.Random(seed)
    held, count = dice.choice([0, 0, 2]), 8
    request = Request(pages=count, prefix=held * PAGE_SIZE)
    orders = [dice.sample(range(PAGES), held + count) for _ in range(LAYERS)]
    orders[1:] = dice.choice([orders[1:], [orders[0]] * 2])
    cuts = sorted({0, count, *dice.sample(range(1, count), dice.randrange(3))})
    chunks = list(itertools.pairwise(cuts))
    calls = [(chunk, layer) for chunk in chunks for layer in (*range(LAYERS), *dice.choices(range(LAYERS), k=3))]
    if dice.random() < 0.2:
        dice.shuffle(calls)
    buffer = np.empty(held + count, dtype=np.int64)
    verb, from_prompt = "send_layer", False
    for (first, last), layer in calls:
        if dice.random() < 0.2:
            verb, from_prompt = dice.choice(["send_layer", "send_slice"]), dice.random() < 0.5
        start, origin = (first + held, "prompt") if from_prompt else (first, "prefix")
        begin = 0 if from_prompt and first == 0 else held + first  # with the pages that the reader holds
        ids = buffer[: held + last - begin]
        ids[:] = orders[layer][begin : held + last]
        start -= held + first - begin
        if dice.random() < 0.2:
            ids = ids.copy()
        event = Gate(request.cluster.world, dice.random() * 0.01) if dice.random() < 0.2 else None
        send = getattr(request.writer, verb)
        request.sent.append(send("r", layer, ids, READER, start=start, origin=origin, event=event))
        buffer[:] = dice.randrange(PAGES)
        for _ in range(dice.randrange(3)):
            dice.choice(request.cluster.ranks).engine.flows.core.runner.step()
    request.finish()
    assert all(request.arrived(layer, request.granted, orders[layer][held:]) for layer in range(LAYERS))
    assert request.untouched(request.granted)


class Gate:
    """An event that happens some seconds from now."""

    def __init__(self, world: Any, seconds: float) -> None:
        self._world, self._at = world, world.now + seconds

    def query(self) -> bool:
        return bool(self._world.now >= self._at)


def test_the_same_name_again_begins_anew(short: list[tuple[int, ...]]) -> None:
    request = Request()
    for layer in range(LAYERS):
        request.send(layer, np.array(SENT))
    request.finish()
    short.clear()
    granted = np.array([0, 2, 4])
    works = [request.reader.recv_pages("r", granted, WRITER)]
    assert request.cluster.run(lambda: request.writer.granted("r", READER) is not None, limit=5)
    works += [request.writer.send_layer("r", layer, np.array(SENT), READER) for layer in range(LAYERS)]
    run_to_success(request.cluster, [*works, request.writer.finish("r", READER)])
    assert short == [(1,), (2,)]
    assert all(request.arrived(layer, granted, SENT) for layer in range(LAYERS))


@pytest.mark.parametrize("absent", [0, 2])
def test_layer_groups(absent: int, short: list[tuple[int, ...]]) -> None:
    cluster = of_layer_groups()
    writer, reader = cluster[WRITER], cluster[READER]
    sent, granted = some_lists(1, absent, 4), some_lists(2, absent, 4)
    works = [reader.recv_pages("r", granted, "p")]
    assert cluster.run(lambda: writer.granted("r", "d") is not None, limit=5)
    layers = writer.cache.layout.layers
    for _ in range(2):  # a group has two layers
        works += [writer.send_layer("r", layer, sent, "d") for layer in layers]
    run_to_success(cluster, [*works, writer.finish("r", "d")])
    groups = {layer: group for group, held in GROUPS.items() for layer in held}
    assert short == [(layer,) for layer in layers if not absent or groups[layer] != "near"]
    source, arrived = page_bytes(writer), page_bytes(reader)
    for (name, layer), pages in source.items():
        here, there = sent[groups[layer]][-2:], granted[groups[layer]][-2:]  # all windows have as much
        assert (arrived[name, layer][there] == pages[here]).all(), (name, layer)
