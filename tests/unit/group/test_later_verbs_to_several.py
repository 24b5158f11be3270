"""A verb to several receivers that is as the one before, but for its layers and its event: as such a verb to one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.references.memory import page_bytes
from tests.helpers.refusals import outcome
from tests.helpers.simulation.acquainted import PAGE_SIZE, PAGES, READERS, run_to_success, two_readers
from torchkv.core.sends import Sends
from torchkv.engine.resident.plain_sends import PlainSends
from torchkv.engine.work import KVWork
from torchkv.protocol.actions import SettleCopied

LAYERS = 4
SENT = [5, 6, 2, 11]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The layers of each verb that has gone the short way."""
    gone: list[tuple[int, ...]] = []
    again_all = PlainSends.again_all

    def noting(self: PlainSends, reqs: Any, layers: tuple[int, ...], *rest: Any) -> KVWork | None:
        work = again_all(self, reqs, layers, *rest)
        if work is not None:
            gone.append(layers)
        return work

    monkeypatch.setattr(PlainSends, "again_all", noting)
    return gone


class Request:
    """A request "r", which both ranks of the instance "d" have granted."""

    def __init__(self, pages: int = len(SENT), *, prefix: int = 0, dst: str | None = "d") -> None:
        self.dst = dst
        self.cluster = two_readers()
        self.writer, self.readers = self.cluster[0], self.cluster.ranks[1:]
        for reader in self.readers:
            for storage in reader.cache.storages:
                storage.fill_(0x5A)
        shuffled = np.random.default_rng().permuted(np.tile(np.arange(PAGES), (READERS, 1)), axis=1)
        self.granted = list(shuffled[:, :pages])
        self.works = [
            reader.recv_pages("r", ids, "p", prefix_tokens=prefix)
            for reader, ids in zip(self.readers, self.granted, strict=True)
        ]
        assert self.cluster.run(lambda: self.writer.granted("r", dst) is not None, limit=5)
        self.source = {key: pages.copy() for key, pages in page_bytes(self.writer).items()}

    def send(self, layer: int, pages: Any, rank: int | None = None, **given: Any) -> KVWork:
        work = self.writer.send_slice("r", layer, pages, self.dst if rank is None else rank, **given)
        self.works.append(work)
        return work

    def finish(self) -> None:
        self.works.append(self.writer.finish("r", self.dst))
        run_to_success(self.cluster, self.works)

    def arrived(self, layer: int, sent: Any) -> bool:
        """Whether these pages of a layer have arrived at both ranks, each with its half of the heads."""
        return all(self._arrived(number, layer, sent) for number in range(READERS))

    def _arrived(self, number: int, layer: int, sent: Any) -> bool:
        now, granted = page_bytes(self.readers[number]), self.granted[number]
        for name in ("k", "v"):
            halves = self.source[name, layer][sent].reshape(len(granted), PAGE_SIZE, READERS, -1)
            if (now[name, layer][granted].reshape(len(granted), PAGE_SIZE, -1) != halves[:, :, number]).any():
                return False
        return True

    def untouched(self) -> bool:
        """Whether all pages that have not been granted are as they were."""
        return all(
            (np.delete(pages, [*granted, 0], axis=0) == 0x5A).all()
            for reader, granted in zip(self.readers, self.granted, strict=True)
            for pages in page_bytes(reader).values()
        )


@pytest.mark.parametrize("make", [np.array, torch.tensor])
@pytest.mark.parametrize("dst", ["d", None])
def test_layers_of_the_same_pages_go_the_short_way(
    make: Callable[[list[int]], Any], dst: str | None, short: list[tuple[int, ...]]
) -> None:
    request = Request(dst=dst)
    sent = [request.send(layer, make(SENT)) for layer in range(LAYERS)]
    request.finish()
    assert short == [(1,), (2,), (3,)]
    assert all(request.arrived(layer, SENT) for layer in range(LAYERS))
    assert request.untouched()
    assert [work._operation for work in sent] == ["send_slice('r')"] * LAYERS
    layer_bytes = 2 * sum(pages[SENT].nbytes for (_, layer), pages in request.source.items() if layer == 0) // READERS
    assert [work.bytes for work in sent] == [layer_bytes] * LAYERS


def test_pages_that_have_changed_in_place_are_those_that_are_sent(short: list[tuple[int, ...]]) -> None:
    request, pages = Request(), np.array(SENT)
    for layer in range(LAYERS):
        request.send(layer, pages)
        pages[:] = pages[::-1].copy()
    request.finish()
    assert not short
    assert all(request.arrived(layer, SENT[:: -1 if layer % 2 else 1]) for layer in range(LAYERS))


def test_pages_that_change_meanwhile_are_sent_as_they_were_compared(
    short: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may write to them, between the op to one receiver and that to the next."""
    request, pages = Request(), np.array(SENT)
    start_again = Sends.start_again

    def overwritten(self: Sends, *args: Any) -> int | None:
        index = start_again(self, *args)
        pages[:] = PAGES + 1
        return index

    for layer in range(LAYERS - 1):
        request.send(layer, pages)
    monkeypatch.setattr(Sends, "start_again", overwritten)
    request.send(LAYERS - 1, pages)
    request.finish()
    assert short == [(1,), (2,), (3,)]
    assert all(request.arrived(layer, SENT) for layer in range(LAYERS))
    assert request.untouched()


@pytest.mark.parametrize("bad", [-1, PAGES])
def test_a_page_out_of_range_is_refused_and_loses_nothing(bad: int) -> None:
    request = Request()
    for layer in range(LAYERS - 1):
        request.send(layer, np.array(SENT))
    assert f"page {bad} is outside this cache" in outcome(lambda: request.send(3, np.array([*SENT[:3], bad])))
    request.send(3, np.array(SENT))
    request.finish()
    assert all(request.arrived(layer, SENT) for layer in range(LAYERS))


def test_another_verb_is_called_by_its_own_name() -> None:
    request = Request()
    for layer in range(2):
        request.send(layer, np.array(SENT))
    works = [request.writer.send_pages("r", np.array(SENT), "d", layers=layer) for layer in (2, 3)]
    request.finish()
    assert [work._operation for work in works] == ["send_pages('r')"] * 2
    assert all(request.arrived(layer, SENT) for layer in range(LAYERS))


@pytest.mark.parametrize("origin", ["prefix", "prompt"])
def test_behind_a_prefix(origin: str, short: list[tuple[int, ...]]) -> None:
    request, order = Request(pages=2, prefix=2 * PAGE_SIZE), np.array(SENT)
    for layer in range(LAYERS):
        request.send(layer, order if origin == "prompt" else order[2:], origin=origin)
    request.finish()
    assert short == [(1,), (2,), (3,)]
    assert all(request.arrived(layer, SENT[2:]) for layer in range(LAYERS))
    assert request.untouched()


def test_the_same_pages_counted_from_elsewhere_are_not_the_same_verb() -> None:
    request, order = Request(pages=2, prefix=PAGE_SIZE), np.array(SENT[:2])
    for layer in range(LAYERS - 1):
        request.send(layer, order)
    request.send(3, order, origin="prompt")  # the first one of these is the one that the readers hold
    request.send(3, np.array(SENT[2:3]), start=1)
    request.finish()
    assert all(request.arrived(layer, order) for layer in range(LAYERS - 1))
    assert request.arrived(3, SENT[1:3])


def test_the_same_pages_at_another_start_go_there() -> None:
    request, order = Request(), np.array(SENT[:2])
    for start in (0, 2):
        for layer in range(LAYERS):
            request.send(layer, order, start=start)
    request.finish()
    assert all(request.arrived(layer, [*order, *order]) for layer in range(LAYERS))


def test_verbs_to_one_of_them_between(short: list[tuple[int, ...]]) -> None:
    request = Request()
    request.send(0, np.array(SENT))
    request.send(1, np.array(SENT))
    request.send(2, np.array(SENT), 1)
    request.send(3, np.array(SENT))  # short: this one's pages are those of the latest verb to both
    request.send(2, np.array(SENT[::-1]), 2)
    request.send(2, np.array(SENT))  # what is remembered of the two is not one verb's
    request.finish()
    assert short == [(1,), (3,)]
    assert all(request.arrived(layer, SENT) for layer in range(LAYERS))


def test_without_room_for_all_nothing_begins(short: list[tuple[int, ...]]) -> None:
    request = Request()
    for layer in range(2):
        request.send(layer, np.array(SENT))
    short.clear()
    free = request.writer.engine.flows.core.sends._free_ops
    free[:], kept = free[:1], free[1:]
    request.send(2, np.array(SENT))
    assert not short
    free += kept
    request.send(3, np.array(SENT))
    request.finish()
    assert all(request.arrived(layer, SENT) for layer in range(LAYERS))


@pytest.mark.parametrize("failed", [1, 2])
def test_if_one_of_them_has_failed_nothing_begins(failed: int, short: list[tuple[int, ...]]) -> None:
    request = Request()
    for layer in range(2):
        request.send(layer, np.array(SENT))
    short.clear()
    cancel = request.cluster[failed].cancel("r")
    assert request.cluster.run(cancel.is_completed, limit=5)
    known = request.writer.engine.sender.requests.by_key
    assert request.cluster.run(lambda: known["r", failed].error is not None, limit=5)
    free = len(request.writer.engine.flows.core.sends._free_ops)
    assert outcome(lambda: request.send(2, np.array(SENT))).startswith("TransferCancelled")
    assert len(request.writer.engine.flows.core.sends._free_ops) == free
    assert not short


def test_the_ends_of_their_ops_are_taken_in_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although they come in turns."""
    request = Request()
    for layer in range(LAYERS):
        request.send(layer, np.array(SENT))
    engine = request.writer.engine
    for _ in range(100):
        engine.flows.core.runner.step()
    seen: list[int] = []
    copied = engine.sender.copied

    def noting(req: Any, ops: list[Any], *rest: Any) -> None:
        seen.append(len(ops))
        copied(req, ops, *rest)

    monkeypatch.setattr(engine.sender, "copied", noting)
    with engine.lock:
        engine.catch_up()
    assert len(seen) == READERS
    assert min(seen) > 1
    assert not any(isinstance(action, SettleCopied) for action in engine.sender.actions)
    request.finish()
    assert all(request.arrived(layer, SENT) for layer in range(LAYERS))


@pytest.mark.parametrize("seed", range(30))
def test_chunks_in_any_order_with_lists_that_change(seed: int) -> None:
    """Every page of every layer, to both or to each, from arrays that are used for others next, while the loops run."""
    dice, count = random.Random(seed), 8
    request = Request(pages=count)
    orders = [dice.sample(range(PAGES), count) for _ in range(LAYERS)]
    orders[1:] = dice.choice([orders[1:], [orders[0]] * (LAYERS - 1)])
    chunks = list(itertools.pairwise(sorted({0, count, *dice.sample(range(1, count), dice.randrange(3))})))
    buffer = np.empty(count, dtype=np.int64)
    for (first, last), layer in itertools.product(chunks, range(LAYERS)):
        ids = buffer[: last - first]
        ids[:] = orders[layer][first:last]
        to_both: tuple[int | None, ...] = (None,)
        for rank in to_both if dice.random() < 0.8 else dice.choice([(1, 2), (2, None)]):
            request.send(layer, ids.copy() if dice.random() < 0.2 else ids, rank, start=first)
        buffer[:] = dice.randrange(PAGES)
        for _ in range(dice.randrange(3)):
            dice.choice(request.cluster.ranks).engine.flows.core.runner.step()
    request.finish()
    assert all(request.arrived(layer, orders[layer]) for layer in range(LAYERS))
    assert request.untouched()
