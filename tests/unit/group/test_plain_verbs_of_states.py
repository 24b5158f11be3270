"""Plain verbs of layouts with states, without layer groups and with them: as the general way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.general_way import forbid_the_general_way, leave_the_straight_way
from tests.helpers.references.memory import page_bytes, slot_bytes
from tests.helpers.refusals import outcome
from tests.helpers.simulation.cluster import Cluster, Place
from torchkv.engine.resident.plain_sends import PlainSends
from torchkv.errors import ProtocolError
from torchkv.group.arguments import HeldLayers
from torchkv.layout.layout import KVLayout, State

WRITER, READER = 0, 1
PAGES, SLOTS = 16, 4
SENT, GRANTED = [5, 6, 2], [3, 1, 9]
SOURCE_SLOT, TARGET_SLOT = 2, 1
LAYERS, STATEFUL = (0, 1, 2), (0, 2)
GROUPS = {"full": LAYERS}


def layout(groups: bool) -> KVLayout:
    """With state in two of three layers. groups: pages and states are those of a layer group."""
    named: dict[str, Any] = {"groups": GROUPS} if groups else {}
    group = "full" if groups else None
    ssm = State("ssm", (3, 2), torch.int16, layers=STATEFUL, group=group)
    conv = State("conv", (5,), torch.uint8, layers=(2,), group=group)
    settings = {"num_layers": 3, "num_kv_heads": 1, "head_dim": 2, "page_size": 2, "dtype": torch.int16}
    return KVLayout.gqa(**settings, states=[ssm, conv], **named)


class Run:
    """One request behind another, whose states ``send`` and ``finish`` send. general: nothing goes the straight way."""

    def __init__(self, *, groups: bool, dst: int | str | None, patch: pytest.MonkeyPatch, general: bool) -> None:
        self.groups, self.dst = groups, dst
        places = [Place(name, layout(groups), PAGES, SLOTS) for name in ("p", "d")]
        self.cluster = Cluster(places, views=True)
        self.writer, self.reader = self.cluster[WRITER], self.cluster[READER]
        for storage in self.writer.cache.storages:
            storage.random_(0, 255)
        self._carry_one_before()
        for storage in self.reader.cache.storages:
            storage.fill_(0x5A)
        if general:
            leave_the_straight_way(patch)
        elif not groups:
            forbid_the_general_way(self.reader, patch)
            if dst is not None:
                forbid_the_general_way(self.writer, patch)
        self.works = [self.reader.recv_pages("r", self.pages(GRANTED), "p", state_slot=self.slot(TARGET_SLOT))]
        assert self.cluster.run(self._has_come, limit=2)
        if dst is None:
            assert self.writer.granted("r", None) == 0  # now it is known to whom
        self.works.append(self.writer.send_pages("r", self.pages(SENT), dst))
        if not general:
            forbid_the_general_way(self.writer, patch)

    def _carry_one_before(self) -> None:
        """So that it is known where the writer can send."""
        works = [self.reader.recv_pages("before", self.pages([0]), "p", state_slot=self.slot(0))]
        works.append(self.writer.send_pages("before", self.pages([0]), "d"))
        works.append(self.writer.finish("before", "d", state_slot=self.slot(0)))
        assert self.cluster.run(lambda: all(work.is_completed() for work in works), limit=5)

    def _has_come(self) -> bool:
        return bool(self.writer.grants())

    def pages(self, ids: list[int]) -> Any:
        return {"full": ids} if self.groups else ids

    def slot(self, slot: int) -> int | Mapping[str, int]:
        return {"full": slot} if self.groups else slot

    def send(self, layer: int) -> None:
        self.works.append(self.writer.send_state("r", layer, self.slot(SOURCE_SLOT), self.dst))

    def send_at_once(self, layers: tuple[int, ...]) -> None:
        """As `pipeline` does."""
        held = HeldLayers(layers)
        self.works.append(self.writer.send_states("r", held, self.slot(SOURCE_SLOT), self.dst, None))

    def finish(self, *, slot: bool) -> None:
        given = self.slot(SOURCE_SLOT) if slot else None
        self.works.append(self.writer.finish("r", self.dst, aux=b"aux", state_slot=given))

    def end(self) -> tuple[object, ...]:
        """Looks at every byte. What is counted, and recorded."""
        assert self.cluster.run(lambda: all(work.is_completed() for work in self.works), limit=5)
        assert all(work.is_success() for work in self.works)
        sent, arrived = page_bytes(self.writer), page_bytes(self.reader)
        for key, pages in sent.items():
            assert (arrived[key][GRANTED] == pages[SENT]).all()
            assert (np.delete(arrived[key], GRANTED, axis=0) == 0x5A).all()
        sent, arrived = slot_bytes(self.writer), slot_bytes(self.reader)
        assert {key[1] for key in sent} == set(STATEFUL)
        for key, slots in sent.items():
            assert (arrived[key][TARGET_SLOT] == slots[SOURCE_SLOT]).all()
            assert (np.delete(arrived[key], TARGET_SLOT, axis=0) == 0x5A).all()
        assert self.works[0].aux == b"aux"
        counts, received = self.writer.engine.sender.counts, self.reader.engine.receiver.counts
        works = [(work.bytes, work.path, work._operation) for work in self.works]
        leases = self.reader.engine.receiver.leases
        assert not any(leases.marks(pool).any() for pool in leases.pools.values())
        assert (counts.taken_back, received.taken_back) == (0, 0)  # the loops have served it to the end
        return works, counts.outcomes, counts.bytes, received.outcomes, received.bytes


def with_finish(run: Run) -> None:
    run.finish(slot=True)


def layer_by_layer(run: Run) -> None:
    for layer in STATEFUL:
        run.send(layer)
    run.finish(slot=False)


def all_at_once(run: Run) -> None:
    run.send_at_once(STATEFUL)
    run.finish(slot=True)  # nothing is left for it


def one_of_two(run: Run) -> None:
    run.send(STATEFUL[1])
    run.finish(slot=True)


@pytest.mark.parametrize("verbs", [with_finish, layer_by_layer, all_at_once, one_of_two])
@pytest.mark.parametrize("dst", [READER, "d", None])
@pytest.mark.parametrize("groups", [False, True], ids=["ungrouped", "grouped"])
def test_they_leave_behind_what_the_general_way_does(
    verbs: Callable[[Run], None], dst: int | str | None, groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = []
    for general in (False, True):
        with monkeypatch.context() as patch:
            run = Run(groups=groups, dst=dst, patch=patch, general=general)
            verbs(run)
            left.append(run.end())
    assert left[0] == left[1]


@pytest.mark.parametrize("groups", [False, True], ids=["ungrouped", "grouped"])
def test_a_layer_without_state_moves_no_bytes(groups: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    left = []
    for general in (False, True):
        with monkeypatch.context() as patch:
            run = Run(groups=groups, dst="d", patch=patch, general=general)
            if not general and groups:
                patch.undo()  # it is of no group that has state
            run.send(1)
            run.finish(slot=True)
            left.append(run.end())
    assert left[0] == left[1]


BAD_SLOTS = [SLOTS, -1, True, 1.0, "1", None, {"full": SLOTS}, {"full": True}, {"near": 1}]


@pytest.mark.parametrize("slot", BAD_SLOTS, ids=repr)
@pytest.mark.parametrize("groups", [False, True], ids=["ungrouped", "grouped"])
def test_slots_that_are_refused_begin_nothing(slot: Any, groups: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    for general in (False, True):
        with monkeypatch.context() as patch:
            run = Run(groups=groups, dst="d", patch=patch, general=general)
            patch.undo()
            core = run.writer.engine.flows.core
            marks = [run.reader.engine.receiver.leases.marks(pool).copy() for pool in range(2)]
            free = len(core.sends._free_ops)
            calls = [
                lambda run=run: run.writer.send_state("r", 0, slot, "d"),
                lambda run=run: run.writer.finish("r", "d", state_slot=slot),
                lambda run=run: run.reader.recv_pages("s", run.pages([4]), "p", state_slot=slot),
            ]
            said.append([outcome(call) for call in calls])
            assert len(core.sends._free_ops) == free
            for pool, before in enumerate(marks):
                assert (run.reader.engine.receiver.leases.marks(pool) == before).all()
            run.finish(slot=True)
            run.end()
    assert said[0] == said[1]
    assert "accepted" not in said[0]


def test_a_slot_that_is_leased_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(groups=False, dst="d", patch=monkeypatch, general=False)
    monkeypatch.undo()
    said = outcome(lambda: run.reader.recv_pages("s", [4], "p", state_slot=TARGET_SLOT))
    assert said.startswith(f"PageOutOfRange: recv_pages('s') on rank 1: state slot {TARGET_SLOT} is leased to")
    run.works.append(run.reader.recv_pages("s", [4], "p", state_slot=0))  # page 4 was not leased then
    assert run.reader.cancel("s")
    run.finish(slot=True)


def test_states_after_finish_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(groups=False, dst="d", patch=monkeypatch, general=False)
    monkeypatch.undo()
    run.finish(slot=True)
    with pytest.raises(ProtocolError, match=r"'r'.*is finished already"):
        run.send(0)
    run.end()


def test_what_the_loop_does_not_take_goes_the_general_way(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(groups=False, dst="d", patch=monkeypatch, general=False)
    monkeypatch.undo()
    monkeypatch.setattr(PlainSends, "start_several", lambda *_: False)
    run.send(STATEFUL[0])
    run.finish(slot=True)
    run.end()
