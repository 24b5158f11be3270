"""Plain verbs of a layout with layer groups, behind the first of each part: as the general way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.general_way import forbid_the_general_way, leave_the_straight_way
from tests.helpers.layer_groups import GROUPS, Views, check_received, views
from tests.helpers.refusals import outcome
from tests.helpers.simulation.acquainted import GROUPED_PAGES as PAGES
from tests.helpers.simulation.acquainted import of_layer_groups, some_lists
from tests.helpers.simulation.cluster import Rank
from torchkv.engine.resident.flows import Flows
from torchkv.engine.resident.plain_sends import PlainSends
from torchkv.group.arguments import HeldLayers
from torchkv.layout.layer_groups import base_name, group_of
from torchkv.protocol.receiving.posts import Posts

PAGE_SIZE, LAYERS = 4, 6
COUNT, HELD = 6, 2  # pages of the prompt, and those of them that a receiver holds where it holds a prefix
NO_WINDOW, WINDOW = GROUPS["full"], GROUPS["near"]  # layers


class Run:
    """One request of which the layers of each group behind the first go by ``send``."""

    def __init__(
        self,
        *,
        absent: int = 0,
        prefix: int = 0,
        from_prompt: bool = False,
        dst: int | str | None = "d",
    ) -> None:
        self.cluster, self.dst = of_layer_groups(), dst
        self.writer, self.reader = self.cluster[0], self.cluster[1]
        self.before: Views = {key: array.copy() for key, array in views(self.reader.cache).items()}
        self.target = some_lists(2, absent, COUNT - prefix)
        rx = self.reader.recv_pages("r", self.target, "p", prefix_tokens=prefix * PAGE_SIZE)
        self.works = [rx]
        assert self.cluster.run(lambda: self.writer.granted("r", dst) is not None, limit=2)
        self.source = some_lists(1, absent + (prefix if from_prompt else 0), COUNT if from_prompt else COUNT - prefix)
        self.origin: dict[str, Any] = {"origin": "prompt"} if from_prompt else {}
        self.sent = {name: ids[prefix if from_prompt else 0 :] for name, ids in self.source.items()}
        for layers in GROUPS.values():
            self.send(layers[0], verb="send_layer")

    def send(self, layer: int, *, verb: str = "send_pages", pages: Any = None) -> None:
        given = self.source if pages is None else pages
        if verb == "send_pages":
            work = self.writer.send_pages("r", given, self.dst, layers=layer, **self.origin)
        else:
            work = getattr(self.writer, verb)("r", layer, given, self.dst, **self.origin)
        self.works.append(work)

    def finish(self) -> None:
        self.works.append(self.writer.finish("r", self.dst, aux=b"first token"))

    def end(self) -> tuple[object, ...]:
        """Looks at every byte of a request that was finished. What is counted."""
        assert self.cluster.run(lambda: all(work.is_completed() for work in self.works), limit=5)
        assert all(work.is_success() for work in self.works)
        source = self.writer.cache.layout, views(self.writer.cache), self.sent
        assert check_received(self.reader.cache, self.before, self.target, {0: source}) == []
        for (component, layer), array in views(self.reader.cache).items():
            group = next(name for name, layers in GROUPS.items() if layer in layers)
            others = np.setdiff1d(np.arange(1, PAGES), self.target[group])
            assert (array[others] == self.before[component, layer][others]).all()
        assert self.works[0].aux == b"first token"
        counts = self.writer.engine.sender.counts
        return counts.outcomes, counts.bytes, counts.taken_back, [work.bytes for work in self.works]


@pytest.mark.parametrize("dst", [1, "d", None])
@pytest.mark.parametrize("absent", [0, 3])
@pytest.mark.parametrize(("prefix", "from_prompt"), [(0, False), (0, True), (HELD, False), (HELD, True)])
def test_it_leaves_behind_what_the_general_way_does(
    dst: int | str | None, absent: int, prefix: int, from_prompt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*, plain: bool) -> tuple[object, ...]:
        one = Run(absent=absent, prefix=prefix, from_prompt=from_prompt, dst=dst)
        with monkeypatch.context() as patch:
            if plain:
                forbid_the_general_way(one.writer, patch)
            else:
                leave_the_straight_way(patch)
            verbs = ["send_layer", "send_slice", "send_pages"]
            for (group, layers), verb in zip(GROUPS.items(), verbs, strict=True):
                # One list is enough where all layers are of one group; tensors and lists are as good as arrays.
                pages = [None, {group: one.source[group].tolist()}, torch.from_numpy(one.source[group])]
                one.send(layers[1], verb=verb, pages=pages[verbs.index(verb)])
            one.finish()
        return one.end()

    assert run(plain=True) == run(plain=False)


@pytest.mark.parametrize("absent", [0, 3])
@pytest.mark.parametrize("prefix", [0, HELD])
def test_receives_that_begin_in_one_go_leave_behind_what_others_do(
    absent: int, prefix: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*, in_one_go: bool) -> tuple[list[str], tuple[object, ...]]:
        posted: list[str] = []
        post = Flows.post

        def noting(self: Flows, req: Any, sole: Any, name: bytes, told: int) -> bool:
            posted.append(req.request)
            return post(self, req, sole, name, told)

        with monkeypatch.context() as patch:
            patch.setattr(Flows, "post", noting)
            if not in_one_go:
                patch.setattr(Posts, "_sole_writer", lambda *_: None)
            one = Run(absent=absent, prefix=prefix)
        for layers in GROUPS.values():
            one.send(layers[1])
        one.finish()
        ended = one.end()
        state = one.reader.engine.receiver.counts
        return [name for name in posted if base_name(name) == "r"], (
            *ended,
            state.outcomes,
            state.bytes,
            one.works[0].bytes,
            one.works[0].path,
        )

    posted, left = run(in_one_go=True)
    # No record tells of absent pages, so the part that has any is granted by a message.
    assert [group_of(name) for name in posted] == [group for group in GROUPS if group != "near" or not absent]
    assert run(in_one_go=False) == ([], left)


def test_layers_that_a_pipeline_sends_at_once_are_of_one_group_or_go_the_general_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = Run()
    with monkeypatch.context() as patch:
        forbid_the_general_way(one.writer, patch)
        one.works.append(one.writer.send_pages("r", one.source, "d", layers=HeldLayers(GROUPS["full"])))
        with pytest.raises(AssertionError, match="not the straight way"):
            one.writer.send_pages("r", one.source, "d", layers=HeldLayers((3, 4)))
    one.works.append(one.writer.send_pages("r", one.source, "d", layers=HeldLayers((3, 4))))
    one.finish()
    one.end()


def test_the_loop_is_given_all_but_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    start = PlainSends.start_more

    def noting(self: PlainSends, req: Any, op: Any, pages: Any, *rest: Any) -> Any:
        started.append(op.work._operation)
        return start(self, req, op, pages, *rest)

    monkeypatch.setattr(PlainSends, "start_more", noting)
    one = Run()
    started.clear()
    for layers in GROUPS.values():
        one.send(layers[1], verb="send_layer")
    one.finish()
    one.end()
    assert started == ["send_layer('r')"] * 3  # under the name that the caller gave


@pytest.mark.parametrize(
    "call",
    [
        lambda kv, pages: kv.send_slice("r", NO_WINDOW[1], {**pages, "full": [0, PAGES]}, "d"),
        lambda kv, pages: kv.send_slice("r", NO_WINDOW[1], {**pages, "full": [-1, 3]}, "d"),
        lambda kv, pages: kv.send_slice("r", WINDOW[1], {**pages, "near": [-1, 3, -1]}, "d"),
        lambda kv, pages: kv.send_slice("r", WINDOW[1], {**pages, "near": [-2, 3]}, "d"),
        lambda kv, pages: kv.send_slice("r", WINDOW[1], {**pages, "near": [0.5]}, "d"),
        lambda kv, pages: kv.send_slice("r", WINDOW[1], {**pages, "third": [1]}, "d"),
        lambda kv, pages: kv.send_slice("r", WINDOW[1], {"full": [1]}, "d"),
        lambda kv, pages: kv.send_slice("r", LAYERS, pages, "d"),
        lambda kv, pages: kv.send_slice("r", WINDOW[1], pages, "d", start=1),
        lambda kv, pages: kv.send_slice("r", WINDOW[1], pages, "d", start=-1),
        lambda kv, pages: kv.send_slice("r", WINDOW[1], pages, "d", event="now"),
        lambda kv, pages: kv.send_slice("r", WINDOW[1], pages, "e"),
        lambda kv, pages: kv.send_slice("r\N{SYMBOL FOR UNIT SEPARATOR}near", WINDOW[1], pages, "d"),
    ],
)
def test_what_is_refused_begins_nowhere(
    call: Callable[[Rank, dict[str, Any]], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Run()
    core = one.writer.engine.flows.core
    free = len(core.sends._free_ops)
    said = outcome(lambda: call(one.writer, one.source))
    assert len(core.sends._free_ops) == free
    leave_the_straight_way(monkeypatch)
    assert outcome(lambda: call(one.writer, one.source)) == said != "accepted"


@pytest.mark.parametrize(
    "call",
    [
        lambda kv: kv.finish("r", "d"),  # not all layers were sent
        lambda kv: kv.finish("r", "d", state_slot=0),
        lambda kv: kv.finish("r", "d", aux="text"),
        lambda kv: kv.finish("r", "d", aux=bytes(1 << 20)),
        lambda kv: kv.finish("r", "e"),
        lambda kv: kv.finish(7, "d"),
    ],
)
def test_what_may_not_be_finished_is_not(call: Callable[[Rank], object], monkeypatch: pytest.MonkeyPatch) -> None:
    one = Run()
    said = outcome(lambda: call(one.writer))
    with monkeypatch.context() as patch:
        leave_the_straight_way(patch)
        assert outcome(lambda: call(one.writer)) == said != "accepted"
    for layers in GROUPS.values():
        one.send(layers[1])
    one.finish()
    one.end()


def test_a_receiver_that_has_failed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Run()
    cancel = one.reader.cancel("r")
    assert one.cluster.run(cancel.is_completed, limit=5)
    assert one.cluster.run(lambda: one.works[-1].exception() is not None, limit=5)
    said = outcome(lambda: one.writer.send_slice("r", WINDOW[1], one.source, "d"))
    assert said.startswith("TransferCancelled")
    leave_the_straight_way(monkeypatch)
    assert outcome(lambda: one.writer.send_slice("r", WINDOW[1], one.source, "d")) == said
