"""A writer that stops, or dies, after it was given a stage and before it has written there, or all of it.

It has promised to write to the receiver's ring only, so the pages of the request are free at once; what it still writes
when it wakes up lands in the stage, which is quarantined until then. Python stages, because pages have checksums; the
last tests are of writers whose resident loop stages.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.helpers.harness import Ranks, ask, kv_world
from tests.helpers.ranks.lane_transfer import random_fill
from tests.helpers.ranks.small_cache import page_bytes, random_cache
from torchkv import KVError, KVProcessGroup, PeerLost, TransferCancelled, TransferTimeout
from torchkv.protocol.receiving.stage_allocator import Stage
from torchkv.staging import host_packer
from torchkv.staging.transfer import StagedTransfer

WRITER, RECEIVER, OTHER = range(3)
PATIENCE = 40
PAGES = [3, 9, 1, 14]
# One stage takes the whole request; two fit into the ring, one of which may be in quarantine.
RINGS = {"TORCHKV_STAGING_RECV": str(128 << 10), "TORCHKV_STAGING_SEND": str(128 << 10)}
STAGED = {"TORCHKV_CHECKSUM": "1", **RINGS}
# Where the writer stops. Into a ring that is mapped it stores, then also half way; else it puts.
LANES = {"memory": (StagedTransfer, "_pack"), "memory, half": (host_packer, "_copied"), "tcp": (StagedTransfer, "_put")}


@pytest.fixture(scope="module", params=LANES)
def lane(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def three(lane: str) -> Iterator[Ranks]:
    yield from joined(lane)


@pytest.fixture
def mortals(lane: str) -> Iterator[Ranks]:
    yield from joined(lane)


def joined(lane: str, env: dict[str, str] = STAGED) -> Iterator[Ranks]:
    tcp = lane == "tcp"
    ranks = Ranks(3, env={**env, **({"UCX_TLS": "tcp"} if tcp else {})}, apart=tcp)
    ranks.run(join, not tcp)
    yield ranks
    ranks.close()


def join(mapped: bool) -> None:
    kv = kv_world()
    kv.register(random_cache())
    if kv.rank() == WRITER:
        connection = kv._thread.call(lambda: kv._verbs.engine.connection(RECEIVER))
        assert (connection.staging_view is not None) is mapped


def fresh() -> KVProcessGroup:
    """The group, with fresh bytes everywhere in this rank's cache."""
    random_fill(kv_world()._verbs.cache, np.random.default_rng())
    return kv_world()


def write_late(lane: str) -> None:
    """The progress thread stops when the stage was granted, before all of it is written."""
    kv = fresh()
    reached, go_on = threading.Event(), threading.Event()
    owner, name = LANES[lane]
    write = getattr(owner, name)

    def held(*args: Any) -> Generator[int, None, Any]:
        setattr(owner, name, write)
        steps = write(*args)
        if lane == "memory, half":
            yield next(steps)
        reached.set()
        assert go_on.wait(PATIENCE)
        return (yield from steps)

    setattr(owner, name, held)
    kv.staged_put("r", None, [5, 6, 7, 8], RECEIVER)
    done = kv.finish("r", RECEIVER)
    assert reached.wait(PATIENCE)
    ask("stop me")
    go_on.set()
    with pytest.raises((TransferCancelled, TransferTimeout, PeerLost)):
        done.wait(PATIENCE)
    kv.cancel("r").wait(PATIENCE)


def fill_from_other() -> None:
    kv = fresh()
    work = kv.staged_put("next", None, [10, 11, 12, 13], RECEIVER)
    kv.finish("next", RECEIVER).wait(PATIENCE)
    assert work.path == "staged"
    dist.send(page_bytes(kv._verbs.cache, [10, 11, 12, 13]), RECEIVER)


def ring_bytes(kv: KVProcessGroup) -> np.ndarray:
    return kv._verbs.engine.staging.receiving.tensor.numpy().copy()


def fail(kv: KVProcessGroup, how: str) -> KVError:
    """The receive fails while its writer does not run; its pages are free all the same."""
    rx = kv.recv_pages("r", PAGES, WRITER, timeout=1.0 if how == "timeout" else None)
    ask("the writer may stop")
    if how == "cancel":
        assert kv.cancel("r").wait(PATIENCE)
    with pytest.raises(TransferTimeout if how == "timeout" else TransferCancelled, match="'r'") as caught:
        rx.wait(PATIENCE)
    assert kv.cancel("r").wait(PATIENCE)
    assert caught.value.pages_safe
    assert kv.quarantined() == {}
    return caught.value


def quarantined_stage(kv: KVProcessGroup) -> Stage:
    use = kv.explain(OTHER).staging
    assert use["quarantined"] == use["in use"] > 0
    with kv._verbs.engine.lock:
        (stage,) = kv._verbs.engine.credits.ring.stages
    return stage


def receive_from_other(kv: KVProcessGroup) -> torch.Tensor:
    """Into the very pages of the failed request. What must be in them."""
    others = [page for page in range(16) if page not in PAGES]
    poison, canaries = page_bytes(kv._verbs.cache, PAGES), page_bytes(kv._verbs.cache, others)
    kv.recv_pages("next", PAGES, OTHER).wait(PATIENCE)
    expected = torch.empty_like(poison)
    dist.recv(expected, OTHER)
    assert not torch.equal(poison, expected)
    assert torch.equal(page_bytes(kv._verbs.cache, PAGES), expected)
    assert torch.equal(page_bytes(kv._verbs.cache, others), canaries)
    return expected


def ring_is_empty(kv: KVProcessGroup) -> bool:
    engine = kv._verbs.engine
    with engine.callers.changed:
        return bool(
            engine.callers.changed.wait_for(lambda: engine.credits.ring.in_use == engine.credits.standing, PATIENCE)
        )


def receive_and_fail(how: str) -> None:
    kv = fresh()
    fail(kv, how)
    stage = quarantined_stage(kv)
    expected = receive_from_other(kv)
    before = ring_bytes(kv)
    ask("the writer may go on")
    assert ring_is_empty(kv)
    assert kv.explain(OTHER).staging["quarantined"] == 0
    changed = np.flatnonzero(ring_bytes(kv) != before)
    assert len(changed), "the late bytes never landed: this test has shown nothing"
    assert stage.offset <= changed.min()
    assert changed.max() < stage.end
    assert torch.equal(page_bytes(kv._verbs.cache, PAGES), expected)


def stop_and_go(ranks: Ranks) -> None:
    """The writer is stopped where it asks for that, and goes on once others have had the pages."""
    assert ranks.hear(WRITER) == "stop me"
    ranks.signal(WRITER, signal.SIGSTOP)
    ranks.tell(RECEIVER)
    ranks.start(fill_from_other, ranks=[OTHER])
    assert ranks.hear(RECEIVER) == "the writer may go on"
    ranks.signal(WRITER, signal.SIGCONT)
    ranks.tell(WRITER)
    ranks.tell(RECEIVER)
    ranks.join([WRITER, RECEIVER, OTHER])


@pytest.mark.parametrize("how", ["cancel", "timeout"])
def test_pages_of_a_stopped_staged_writer_are_free_at_once(how: str, lane: str, three: Ranks) -> None:
    three.start(receive_and_fail, how, ranks=[RECEIVER])
    assert three.hear(RECEIVER) == "the writer may stop"
    three.start(write_late, lane, ranks=[WRITER])
    stop_and_go(three)


def receive_and_lose() -> None:
    """Killed, not stopped: its death shows that nothing of it can land, and gives the stage back."""
    kv = fresh()
    rx = kv.recv_pages("r", PAGES, WRITER)
    ask("the writer may stop")
    with pytest.raises(PeerLost, match="'r'") as caught:
        rx.wait(PATIENCE)
    assert caught.value.pages_safe
    assert kv.quarantined() == {}
    receive_from_other(kv)
    assert kv.cancel("r").wait(PATIENCE)
    assert ring_is_empty(kv)


def kill_and_go(ranks: Ranks) -> None:
    """The writer is killed where it asks to be stopped."""
    assert ranks.hear(WRITER) == "stop me"
    ranks.kill(WRITER)
    ranks.tell(RECEIVER)
    ranks.start(fill_from_other, ranks=[OTHER])
    ranks.join([RECEIVER, OTHER])


def test_pages_and_stage_of_a_killed_staged_writer(lane: str, mortals: Ranks) -> None:
    mortals.start(receive_and_lose, ranks=[RECEIVER])
    assert mortals.hear(RECEIVER) == "the writer may stop"
    mortals.start(write_late, lane, ranks=[WRITER])
    kill_and_go(mortals)


# ---------------------------------------------------------------- writers whose resident loop stages


@pytest.fixture(params=["memory", "tcp"])
def loops(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    yield from joined(request.param, RINGS)


def until_loops_stage() -> None:
    """The writer's first requests are staged by Python, until its loop has a standing stage."""
    kv = fresh()
    for number in range(60):
        name, on_loop = f"warm {number}", [False]
        if kv.rank() == RECEIVER:
            kv.recv_pages(name, PAGES, WRITER).wait(PATIENCE)
        elif kv.rank() == WRITER:
            kv.staged_put(name, None, [5, 6, 7, 8], RECEIVER)
            kv.finish(name, RECEIVER).wait(PATIENCE)
            flows = kv._verbs.engine.flows
            on_loop = [flows is not None and any(route.stages for route in flows.routes.known.values())]
        dist.broadcast_object_list(on_loop, WRITER)
        if on_loop[0]:
            return
    raise AssertionError("the loop never staged")


def stage_by_loop() -> None:
    """One layer is in the receiver's pages; the rest never comes."""
    kv = fresh()
    kv.staged_put("r", 0, [5, 6, 7, 8], RECEIVER).wait(PATIENCE)
    (req,) = kv._verbs.engine.sender.requests
    assert req.flow is not None
    assert req.loop_promised
    ask("stop me")
    with pytest.raises((TransferCancelled, TransferTimeout, PeerLost)):
        stage_the_rest(kv)
    kv.cancel("r").wait(PATIENCE)


def stage_the_rest(kv: KVProcessGroup) -> None:
    kv.staged_put("r", 1, [5, 6, 7, 8], RECEIVER)
    kv.finish("r", RECEIVER).wait(PATIENCE)


def fail_beside_a_loop(how: str) -> None:
    kv = fresh()
    fail(kv, how)
    expected = receive_from_other(kv)
    ask("the writer may go on")
    assert torch.equal(page_bytes(kv._verbs.cache, PAGES), expected)


@pytest.mark.parametrize("how", ["cancel", "timeout"])
def test_pages_of_a_stopped_writer_whose_loop_stages_are_free_at_once(how: str, loops: Ranks) -> None:
    loops.run(until_loops_stage)
    loops.start(fail_beside_a_loop, how, ranks=[RECEIVER])
    assert loops.hear(RECEIVER) == "the writer may stop"
    loops.start(stage_by_loop, ranks=[WRITER])
    stop_and_go(loops)


def lose_beside_a_loop() -> None:
    """Its stage, which no request of it can keep, is given back, too."""
    receive_and_lose()
    engine = kv_world()._verbs.engine
    with engine.callers.changed:
        assert engine.callers.changed.wait_for(lambda: not engine.credits.stands(WRITER), PATIENCE)


def test_pages_and_stage_of_a_killed_writer_whose_loop_stages(loops: Ranks) -> None:
    loops.run(until_loops_stage)
    loops.start(lose_beside_a_loop, ranks=[RECEIVER])
    assert loops.hear(RECEIVER) == "the writer may stop"
    loops.start(stage_by_loop, ranks=[WRITER])
    kill_and_go(loops)
