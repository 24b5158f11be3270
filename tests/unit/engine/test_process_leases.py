"""Leases of several groups over one memory, against the bytes of every page; and what is left of a destroyed group."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import nullcontext

import msgspec
import numpy as np
import pytest
import torch

from tests.helpers.layer_groups import hybrid, shared_cache
from tests.helpers.protocol import group_map, receiver
from torchkv.cache import KVCache
from torchkv.engine.process_leases import GroupLeases, ProcessLeases
from torchkv.errors import PageOutOfRange, TransferCancelled
from torchkv.host.processes import ProcessId, process_started, this_process
from torchkv.layout.component import Component, State
from torchkv.layout.layer_groups import PAGES, part_name
from torchkv.layout.layout import KVLayout
from torchkv.protocol.messages import Quiesced, StageAsk
from torchkv.protocol.receiving.leases import Wanted
from torchkv.protocol.receiving.request import ReceiverRequest
from torchkv.staging.memory import StageMemory

WRITER, ME = 0, 1
NUM_PAGES = 8
ELSEWHERE = ProcessId("another host", 4711, 1)
GONE = TransferCancelled("the group was destroyed")


class Group:
    """A receiver over ``cache``, and its leases among those of ``process``."""

    def __init__(
        self,
        process: ProcessLeases,
        cache: KVCache,
        name: str = "g",
        writer: ProcessId = ELSEWHERE,
        ring: StageMemory | None = None,
    ) -> None:
        self.cache = cache
        pool = {"num_pages": cache.num_pages, "num_slots": cache.num_slots}
        self.receiver = receiver(group_map(ME, ("p", cache.layout), ("d", cache.layout), **pool), pools=cache.pools)
        self.credits = self.receiver._credits
        self.lock = threading.Lock()
        self.leases = GroupLeases(
            name=name,
            rank=ME,
            cache=cache,
            receiver=self.receiver,
            credits=self.credits,
            lock=self.lock,
            processes={WRITER: writer, ME: this_process()},
            ring=ring,
            process=process,
        )

    def recv(self, *pages: int, request: str = "r", slot: int | None = None, src: int = WRITER) -> ReceiverRequest:
        ids = np.array(pages, dtype=np.int64)
        with self.lock, self.receiver.leases.guard:
            return self.receiver.posts.post(
                request, ids, (src,), prefix_tokens=0, state_slot=slot, total=None, work=request, now=0.0
            )

    def refusal(self, *pages: int, slot: int | None = None) -> str:
        with pytest.raises(PageOutOfRange) as caught:
            self.recv(*pages, request="refused", slot=slot)
        return str(caught.value)

    def fail(self) -> None:
        with self.lock:
            self.receiver.fail_all(GONE)

    def leave(self, *, unseen: tuple[int, ...] = ()) -> None:
        self.fail()
        self.leases.leave(unseen=unseen)

    @property
    def quarantined(self) -> dict[int, tuple[int, ...]]:
        return self.receiver.leases.quarantined()


def layout(page_size: int = 4, states: tuple[State, ...] = ()) -> KVLayout:
    return KVLayout.gqa(num_layers=1, num_kv_heads=1, head_dim=2, page_size=page_size, dtype=torch.int16, states=states)


def strided(memory: torch.Tensor, offset: int, stride: int, page_size: int, num_pages: int) -> torch.Tensor:
    return memory.as_strided((num_pages, page_size, 1, 2), (stride, 2, 2, 1), offset)


def plain_cache(memories: tuple[torch.Tensor, torch.Tensor]) -> KVCache:
    k, v = (strided(memory, 0, 8, 4, NUM_PAGES) for memory in memories)
    return KVCache(layout(), {"k": [k], "v": [v]})


def two_memories(elements: int = 8 * NUM_PAGES) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(elements, dtype=torch.int16), torch.zeros(elements, dtype=torch.int16)


@pytest.fixture
def writer() -> Iterator[tuple[subprocess.Popen[bytes], ProcessId]]:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        yield child, msgspec.structs.replace(this_process(), pid=child.pid, started=process_started(child.pid))
    finally:
        child.kill()
        child.communicate()


# ---------------------------------------------------------------------- which bytes


def random_cache(dice: np.random.Generator, memories: tuple[torch.Tensor, torch.Tensor]) -> KVCache:
    """Pages of random size and distance, somewhere in both memories."""
    page_size, num_pages = int(dice.integers(1, 6)), int(dice.integers(1, 9))
    tensors = []
    for memory in memories:
        stride = 2 * page_size + int(dice.integers(0, 6))
        room = len(memory) - (num_pages - 1) * stride - 2 * page_size
        tensors.append(strided(memory, int(dice.integers(0, room + 1)), stride, page_size, num_pages))
    return KVCache(layout(page_size), {"k": tensors[:1], "v": tensors[1:]})


def bytes_of(cache: KVCache, page: int) -> set[int]:
    tensors = [rows[page] for rows in (cache["k"][0], cache["v"][0]) if rows is not None]
    return {at for one in tensors for at in range(one.data_ptr(), one.data_ptr() + 2 * one.numel())}


def test_pages_that_share_a_byte_are_refused_and_only_they() -> None:
    dice = np.random.default_rng()
    outcomes: list[bool] = []
    for _ in range(60):
        process, memories = ProcessLeases(), two_memories(140)
        one = Group(process, random_cache(dice, memories))
        other = Group(process, random_cache(dice, memories))
        for page in dice.permutation(one.cache.num_pages)[:3]:
            one.recv(int(page), request=f"r{page}")
        held = set().union(*(bytes_of(one.cache, int(p)) for p in np.flatnonzero(one.receiver.leases.marks(PAGES))))
        met = [page for page in range(other.cache.num_pages) if bytes_of(other.cache, page) & held]
        for page in range(other.cache.num_pages):
            if page in met:
                assert f"page {page} shares bytes with page" in other.refusal(page)
            else:
                other.receiver.cancel("free", other.recv(page, request="free").work)
                other.receiver.on_quiesced(WRITER, Quiesced(other.receiver.posts._next_generation - 1), 0.0)
        assert other.quarantined == {}
        one.fail()
        assert other.quarantined == dict.fromkeys(met, ())
        outcomes += [page in met for page in range(other.cache.num_pages)]
    assert True in outcomes
    assert False in outcomes


def test_slots_and_pages_of_two_groups_may_share_memory() -> None:
    process, memories = ProcessLeases(), two_memories()
    states = (State("s", (16,), torch.int16, shard_dim=0),)
    pages, other = two_memories()
    hybrid = KVCache(
        layout(states=states),
        {"k": [strided(pages, 0, 8, 4, NUM_PAGES)], "v": [strided(other, 0, 8, 4, NUM_PAGES)]},
        states={"s": [memories[0].view(4, 16)]},
    )
    one, two = Group(process, hybrid, "one"), Group(process, plain_cache(memories), "two")
    one.recv(0, slot=1)
    assert "page 3 shares bytes with state slot 1 of group 'one'" in two.refusal(0, 3)
    two.recv(6)
    assert "state slot 3 shares bytes with page 6 of group 'two'" in one.refusal(5, slot=3)
    one.fail()
    two.fail()
    assert two.quarantined == {2: (), 3: (), 6: (WRITER,)}
    assert one.receiver.leases.quarantined(slots=True) == {1: (WRITER,), 3: ()}


def test_a_group_that_has_its_memory_alone_asks_nobody() -> None:
    process, memories = ProcessLeases(), two_memories()
    one = Group(process, plain_cache(memories))
    Group(process, plain_cache(two_memories()))
    assert one.receiver.leases.others is None
    assert isinstance(one.receiver.leases.guard, nullcontext)
    Group(process, plain_cache(memories))
    assert one.receiver.leases.others is one.leases


# ---------------------------------------------------------------------- two groups at once


def test_two_groups_never_lease_a_page_at_once() -> None:
    """The other group asks between check and lease of the first."""
    process, memories = ProcessLeases(), two_memories()
    one, two = Group(process, plain_cache(memories)), Group(process, plain_cache(memories))
    refused: list[str] = []
    thread = threading.Thread(target=lambda: refused.append(two.refusal(3)))
    take = one.receiver.leases.take

    def late(req: ReceiverRequest) -> None:
        thread.start()
        thread.join(0.2)
        take(req)

    one.receiver.leases.take = late
    one.recv(3)
    thread.join(10)
    assert "is leased to request 'r'" in refused[0]


def test_a_group_that_joins_sees_what_is_being_leased() -> None:
    process, memories = ProcessLeases(), two_memories()
    one = Group(process, plain_cache(memories))
    joined: list[Group] = []
    thread = threading.Thread(target=lambda: joined.append(Group(process, plain_cache(memories))))
    with one.lock:  # as in the middle of `recv_pages`, which has seen that the group is alone
        thread.start()
        thread.join(0.2)
        assert not joined
        one.receiver.posts.post("r", np.array([3]), (WRITER,), prefix_tokens=0, total=None, work="r", now=0.0)
    thread.join(10)
    assert "page 3 shares bytes" in joined[0].refusal(3)


# ---------------------------------------------------------------------- destroyed groups


def test_what_was_left_behind_is_free_when_its_writer_has_ended(
    writer: tuple[subprocess.Popen[bytes], ProcessId], caplog: pytest.LogCaptureFixture
) -> None:
    child, process_id = writer
    process, held = ProcessLeases(), np.zeros((2, 8 * NUM_PAGES), dtype=np.int16)
    memory, memories = weakref.ref(held), (torch.from_numpy(held[0]), torch.from_numpy(held[1]))
    one = Group(process, plain_cache(memories), "one", process_id)
    req = one.recv(2, 5)
    one.fail()
    error = req.error
    assert error is not None
    with caplog.at_level(logging.WARNING):
        one.leases.leave(unseen=())
    assert f"rank 0 (process {child.pid}) may still write to pages [2, 5]" in caplog.text
    assert f"{2 * 16 * NUM_PAGES} bytes" in caplog.text
    two = Group(process, plain_cache(memories), "two")
    assert two.quarantined == {2: (), 5: ()}
    refusal = two.refusal(5)
    assert f"of group 'one', which is destroyed, and is quarantined: rank 0 (process {child.pid})" in refusal
    assert "end those processes" in refusal
    generation = two.recv(1, 3).generation
    two.fail()
    two.receiver.on_quiesced(WRITER, Quiesced(generation), 0.0)
    two.leases.leave(unseen=())
    del one, two, memories, held, req
    gc.collect()
    process.look()
    assert memory() is not None
    assert not error.pages_safe
    child.kill()
    child.wait()
    process.look()
    assert error.pages_safe
    assert memory() is None


def test_a_writer_that_cannot_be_watched_is_never_thought_to_have_ended(caplog: pytest.LogCaptureFixture) -> None:
    for process_id, unseen in ((ELSEWHERE, ()), (msgspec.structs.replace(this_process(), started=1), (WRITER,))):
        process, memories = ProcessLeases(), two_memories()
        one = Group(process, plain_cache(memories), "one", process_id)
        one.recv(2)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            one.leave(unseen=unseen)
        two = Group(process, plain_cache(memories), "two")
        for text in (caplog.text, two.refusal(2)):
            assert "this process" in text
            assert "it cannot see when those have ended" in text
        assert two.quarantined == {2: ()}


def test_nothing_is_left_behind_by_a_group_whose_writers_are_quiescent(caplog: pytest.LogCaptureFixture) -> None:
    process, memories = ProcessLeases(), two_memories()
    one = Group(process, plain_cache(memories))
    req = one.recv(2)
    one.recv(3, request="own", src=ME)  # its own copies end with its threads
    one.fail()
    one.receiver.on_quiesced(WRITER, Quiesced(req.generation), 0.0)
    one.leases.leave(unseen=())
    assert process._left_behind == []
    assert one.leases._storages == []
    assert caplog.text == ""
    Group(process, plain_cache(memories)).recv(2, 3)


def test_a_ring_stays_as_long_as_a_stage_may_be_written(
    writer: tuple[subprocess.Popen[bytes], ProcessId], caplog: pytest.LogCaptureFixture
) -> None:
    child, process_id = writer
    process, memories = ProcessLeases(), two_memories()
    held = np.zeros(1 << 16, dtype=np.uint8)
    ring, memory = StageMemory(torch.from_numpy(held), 0), weakref.ref(held)
    del held
    one = Group(process, plain_cache(memories), "one", process_id, ring)
    req = one.recv(2)
    one.receiver.stages.on_stage_ask(WRITER, StageAsk(req.generation, 0, 512, 512, True), 0.0)
    one.fail()
    assert req.ended, "a writer that uses the ring only cannot reach the page"
    with caplog.at_level(logging.WARNING):
        one.leases.leave(unseen=())
    ring.release()
    assert "may still write to stages of its staging ring" in caplog.text
    assert one.leases._storages == []
    process.look()
    assert memory() is not None
    child.kill()
    child.wait()
    process.look()
    assert memory() is None


def test_what_is_left_behind_keeps_no_works_and_no_frames() -> None:
    process = ProcessLeases()
    one = Group(process, plain_cache(two_memories()))
    req = one.recv(2)
    one.fail()
    error = req.error
    assert error is not None
    req.cancels.append("cancel")
    one.leases.leave(unseen=())
    assert (req.work, req.cancels) == (None, [])
    assert req.error is not error
    assert not error.pages_safe


# ---------------------------------------------------------------------- layer groups


def recv_part(group: Group, layer_group: str, *ids: int) -> ReceiverRequest:
    name = part_name("r", layer_group)
    wanted = {name: Wanted(np.array(ids, dtype=np.int64), None, layer_group)}
    with group.lock, group.receiver.leases.guard:
        (part,) = group.receiver.posts.post_parts(
            "r", wanted, (WRITER,), prefix_tokens=0, absent_tokens={}, total=None, work=name, now=0.0
        )
    return part


@pytest.mark.parametrize("shared", [True, False])
def test_layer_groups_of_two_groups_lease_what_their_pages_occupy(shared: bool) -> None:
    """Over one cache: what one leases through a layer group, the other cannot have through any that shares it."""
    process = ProcessLeases()
    cache = shared_cache(hybrid(), NUM_PAGES) if shared else KVCache.empty(hybrid(), NUM_PAGES, "cpu")
    one, other = Group(process, cache, "one"), Group(process, cache, "other")
    recv_part(one, "near", 3, 4)
    with pytest.raises(PageOutOfRange, match="page 3 shares bytes with page 3 of group 'one'"):
        recv_part(other, "near", 3)
    if shared:
        with pytest.raises(PageOutOfRange, match="page 4 shares bytes with page 4 of group 'one'"):
            recv_part(other, "full", 4)
    else:
        recv_part(other, "full", 3, 4)
    one.fail()
    quarantined = other.receiver.leases.quarantined(group="full")
    assert quarantined == ({3: (), 4: ()} if shared else {})
    assert other.receiver.leases.quarantined(group="near") == {3: (), 4: ()}


def test_pages_without_layer_groups_meet_those_of_a_layer_group() -> None:
    """A block of the shared memory, as a page of another layout."""
    process = ProcessLeases()
    cache = shared_cache(hybrid(), NUM_PAGES)
    whole = cache.storages[0].view(NUM_PAGES, -1)
    layout = KVLayout([Component("raw", 1, whole.shape[1], torch.uint8)], num_layers=1, page_size=1)
    one, other = (
        Group(process, cache, "one"),
        Group(process, KVCache(layout, {"raw": [whole.view(NUM_PAGES, 1, 1, -1)]}), "other"),
    )
    recv_part(one, "far", 5)
    assert "page 5 shares bytes with page 5 of group 'one'" in other.refusal(5)
    other.recv(4)
    with pytest.raises(PageOutOfRange, match="page 4 shares bytes with page 4 of group 'other'"):
        recv_part(one, "full", 4)
