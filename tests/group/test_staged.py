"""`staged_put` between real processes: what callers see of it besides the bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.helpers.harness import Ranks, kv_group
from tests.helpers.ranks.lane_transfer import adopted_cache, random_fill
from tests.helpers.ranks.served import staged_by_python
from tests.helpers.ranks.small_cache import meet, page_bytes, random_cache, small_layout
from torchkv import ChecksumMismatch, KVProcessGroup, RingExhausted
from torchkv.protocol.actions import Scatter
from torchkv.staging.host_packer import HostPacker
from torchkv.staging.transfer import StagedTransfer

PATIENCE = 30
PAGES = [5, 2, 7, 0]
TARGETS = [3, 9, 1, 14]
OTHERS = [page for page in range(16) if page not in TARGETS]
PAGE = 16 * 2 * 8 * 2  # bytes of a page of one component of one layer
# Pieces are gathered straight into a ring that is mapped here, and put into one that is not.
LANES = {"memory": {}, "tcp": {"env": {"UCX_TLS": "tcp"}, "apart": True}}


@pytest.fixture(params=LANES)
def lane(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def three(lane: str, shared_ranks: Callable[..., Ranks]) -> Ranks:
    return shared_ranks(f"staged-{lane}", 3, **LANES[lane])


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    yield
    setattr(owner, name, before)


class Held:
    """A generator method that stops before its first step, or ``after`` its last one, until it is released.

    Only the first call of it does.
    """

    def __init__(self, owner: type, name: str, *, after: bool = False) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        held, real = self, getattr(owner, name)

        def method(self: Any, *args: Any, **settings: Any) -> Generator[int, None, Any]:
            setattr(owner, name, real)
            if not after:
                yield from held._wait()
            result = yield from real(self, *args, **settings)
            if after:
                yield from held._wait()
            return result

        setattr(owner, name, method)

    def _wait(self) -> Iterator[int]:
        self.reached.set()
        while not self.go_on.is_set():
            yield 0


def send(kv: KVProcessGroup, pages: list[int], dst: Any, *, name: str = "r") -> None:
    work = kv.staged_put(name, None, pages, dst)
    kv.finish(name, dst).wait(PATIENCE)
    assert work.wait(PATIENCE)
    assert work.path == "staged"


def pass_on(kv: KVProcessGroup, src: int, mine: torch.Tensor, dst: int) -> torch.Tensor:
    """Bytes of rank ``src`` for the comparison on rank ``dst``."""
    got = mine.clone()
    if kv.rank() == src:
        dist.send(mine, dst, group=kv)
    elif kv.rank() == dst:
        dist.recv(got, src, group=kv)
    return got


def check_pages(kv: KVProcessGroup, expected: torch.Tensor, canaries: torch.Tensor) -> None:
    assert torch.equal(page_bytes(kv._verbs.cache, TARGETS), expected)
    assert torch.equal(page_bytes(kv._verbs.cache, OTHERS), canaries)


# ---------------------------------------------------------------------- a full ring


def exhausted() -> None:
    """Rank 0 sits on the only stage of rank 1's ring; rank 2 is refused in time, in words, and succeeds later."""
    ring = 2 * PAGE  # one request, exactly
    me = dist.get_rank()
    with kv_group(timeout=1.0 if me == 1 else 30.0, staging_recv=ring, staging_send=4 * ring) as kv:
        cache = random_cache(num_layers=1)
        kv.register(cache)
        if me == 0:
            held = Held(StagedTransfer, "_pack")
            kv.staged_put("slow", None, [5], 1)
            done = kv.finish("slow", 1)
            assert held.reached.wait(PATIENCE)
            meet(kv)
            meet(kv)  # rank 2 has been refused
            held.go_on.set()
            done.wait(PATIENCE)
        elif me == 1:
            slow = kv.recv_pages("slow", [3], 0, timeout=PATIENCE)
            meet(kv)
            rx = kv.recv_pages("r", [4], 2)
            with pytest.raises(RingExhausted, match="'r'"):
                rx.wait(PATIENCE)
            kv.cancel("r").wait(PATIENCE)
            meet(kv)
            slow.wait(PATIENCE)
            rx = kv.recv_pages("r", [4], 2)
            rx.wait(PATIENCE)
            assert kv.explain(0).staging["in use"] == 0
        else:
            meet(kv)
            work = kv.staged_put("r", None, [5], 1)
            with pytest.raises(RingExhausted, match="'r'") as caught:
                work.wait(PATIENCE)
            text = str(caught.value)
            assert "waited 1 s" in text
            assert f"staging ring of {ring} bytes has {ring} in use, 0 of them quarantined" in text
            assert f"held by rank 0 generation 1 ({ring} bytes)" in text
            assert "TORCHKV_STAGING_RECV" in text
            assert caught.value.retryable
            kv.cancel("r").wait(PATIENCE)
            meet(kv)
            send(kv, [5], 1)
        source = page_bytes(cache, [5])
        for src, targets in ((0, [3]), (2, [4])):
            expected = pass_on(kv, src, source, 1)
            assert me != 1 or torch.equal(page_bytes(cache, targets), expected)
        dist.barrier(kv)


def test_a_full_ring_is_a_retryable_error_with_a_deadline(three: Ranks) -> None:
    three.run(exhausted)


def too_large() -> None:
    """A page that fits into no stage fails at once, and only that request."""
    with kv_group(staging_recv=PAGE if dist.get_rank() == 1 else 1 << 20) as kv:
        kv.register(random_cache())
        if kv.rank() == 0:
            work = kv.staged_put("r", 0, PAGES, 1)
            with pytest.raises(RingExhausted, match=r"'r'.*rank 1.*layers 0.*STAGING_RECV") as caught:
                work.wait(PATIENCE)
            assert not caught.value.retryable
            kv.cancel("r").wait(PATIENCE)
        elif kv.rank() == 1:
            with pytest.raises(RingExhausted) as caught:
                kv.recv_pages("r", TARGETS, 0).wait(PATIENCE)
            assert not caught.value.retryable
        dist.barrier(kv)
        if kv.rank() == 1:
            send(kv, PAGES, 0)
        elif kv.rank() == 0:
            kv.recv_pages("r", TARGETS, 1).wait(PATIENCE)


def test_a_page_larger_than_the_ring_fails_that_request_only(three: Ranks) -> None:
    three.run(too_large)


# ---------------------------------------------------------------------- the source, and the stage


def overwrite_source(dst: list[int], gathered: bool) -> None:
    """The source is overwritten once ``wait_source`` has returned, or (negative control) before it is gathered.

    What was gathered is not put yet or, where the ring is mapped, not told of.
    """
    with staged_by_python(), kv_group(staging_send=64 << 10) as kv:
        cache = random_cache()
        kv.register(cache)
        source = page_bytes(cache, PAGES)
        if kv.rank() == 0:
            held = Held(StagedTransfer, "_pack", after=True) if gathered else Held(HostPacker, "gather")
            work = kv.staged_put("r", None, PAGES, dst)
            done = kv.finish("r", dst)
            assert held.reached.wait(PATIENCE)
            if gathered:
                assert work.wait_source(PATIENCE)  # the first who asks comes late, with one destination
                assert work.wait_source(PATIENCE)
            assert not work.is_completed()
            random_fill(cache, np.random.default_rng())
            held.go_on.set()
            done.wait(PATIENCE)
            assert work.wait(PATIENCE)
            assert work.bytes == len(dst) * len(source)
        elif kv.rank() in dst:
            canaries = page_bytes(cache, OTHERS)
            kv.recv_pages("r", TARGETS, 0).wait(PATIENCE)
        for rank in dst:
            expected = pass_on(kv, 0, source, rank)
            if kv.rank() == rank and gathered:
                check_pages(kv, expected, canaries)
            elif kv.rank() == rank and len(dst) == 1:
                assert not torch.equal(page_bytes(cache, TARGETS), expected)


@pytest.mark.parametrize("dst", [[1], [1, 2]], ids=["one", "two"])
@pytest.mark.parametrize("gathered", [True, False], ids=["", "control"])
def test_the_source_may_be_overwritten_after_wait_source(dst: list[int], gathered: bool, three: Ranks) -> None:
    three.run(overwrite_source, dst, gathered)


def two_destinations_one_stage() -> None:
    """F5: own memory for one stage only; the second destination's bytes wait until the first put has been read."""
    with kv_group(staging_send=2 * 2 * len(PAGES) * PAGE) as kv:
        cache = random_cache(**({"order": "HND"} if kv.rank() == 2 else {}))
        kv.register(cache)
        source = page_bytes(cache, PAGES)
        if kv.rank() == 0:
            for number in range(20):
                send(kv, PAGES, [1, 2], name=f"r{number}")
            mine = {rank: sum(lane.nbytes for lane in kv.explain(rank).lanes.values()) for rank in (1, 2)}
            assert mine == dict.fromkeys((1, 2), 20 * len(source))  # to each of them once
        else:
            canaries = page_bytes(cache, OTHERS)
            for number in range(20):
                random_fill_targets(kv)
                kv.recv_pages(f"r{number}", TARGETS, 0).wait(PATIENCE)
                if number == 0:
                    first = page_bytes(cache, TARGETS)
                assert torch.equal(page_bytes(cache, TARGETS), first)
            assert torch.equal(page_bytes(cache, OTHERS), canaries)
        expected = pass_on(kv, 0, source, 1)
        assert kv.rank() != 1 or torch.equal(page_bytes(cache, TARGETS), expected)


def random_fill_targets(kv: KVProcessGroup) -> None:
    """Poison, and the rest of the cache as it was."""
    cache = kv._verbs.cache
    for layers in (cache.k, cache.v):
        for tensor in layers:
            tensor[TARGETS] = torch.randn(tensor[TARGETS].shape).to(tensor.dtype)


def test_two_destinations_share_the_senders_memory(three: Ranks) -> None:
    three.run(two_destinations_one_stage)


def long_then_short(checksum: bool) -> None:
    """The ring is full of other requests' bytes; a short request shows none of them, within its page or beside it."""
    with kv_group(staging_recv=32 << 10, staging_send=32 << 10, checksum=checksum) as kv:
        # Ten tokens: half of the second receiver page is covered by no sender page.
        cache = random_cache(page_size=8 if kv.rank() == 1 else 2)
        kv.register(cache)
        source = page_bytes(cache, [0, 1, 2, 3, 4])[: 4 * 10 * 32]  # layers and components, tokens, bytes
        if kv.rank() == 0:
            for number in range(3):
                send(kv, list(range(16)), 1, name=f"long {number}")
            send(kv, [0, 1, 2, 3, 4], 1)
        elif kv.rank() == 1:
            for number in range(3):
                kv.recv_pages(f"long {number}", [10, 11, 12, 13], 0).wait(PATIENCE)
            random_fill(cache, np.random.default_rng())
            before = [tensor.clone().view(torch.uint8) for tensor in (*cache.k, *cache.v)]
            kv.recv_pages("r", [6, 3], 0).wait(PATIENCE)
        else:
            return
        expected = pass_on(kv, 0, source, 1)
        if kv.rank() == 1:
            sent = expected.view(4, 10, -1)
            got = [tensor.view(torch.uint8) for tensor in (*cache.k, *cache.v)]
            for now, then, want in zip(got, before, sent, strict=True):
                then[6].view(8, -1)[:] = want[:8]
                then[3].view(8, -1)[:2] = want[8:]
                assert torch.equal(now, then)


@pytest.mark.parametrize("checksum", [False, True])
def test_a_short_transfer_after_a_long_one_shows_no_foreign_byte(checksum: bool, three: Ranks) -> None:
    three.run(long_then_short, checksum)


# ---------------------------------------------------------------------- the sender's memory


def memory_taken(own: int) -> tuple[set[str], str, int]:
    """A request arrives. Which lanes have carried it, over what link, and what memory rank 0 took to send from."""
    with kv_group(path="staged", staging_send=own) as kv:
        cache = random_cache()
        kv.register(cache)
        source = page_bytes(cache, PAGES)
        lanes: dict[str, Any] = {}
        link, taken = "", -1
        if kv.rank() == 0:
            send(kv, PAGES, 1)
            seen = kv.explain(1)
            lanes, link, taken = seen.lanes, seen.link, seen.staging["send"]
        elif kv.rank() == 1:
            canaries = page_bytes(cache, OTHERS)
            kv.recv_pages("r", TARGETS, 0).wait(PATIENCE)
        expected = pass_on(kv, 0, source, 1)
        if kv.rank() == 1:
            check_pages(kv, expected, canaries)
        return {name for name, lane in lanes.items() if lane.nbytes}, link, taken


def test_only_a_ring_that_is_not_mapped_takes_memory_to_send_from(lane: str, three: Ranks) -> None:
    lanes, link, taken = three.run(memory_taken, 64 << 10)[0]
    if lane == "memory":
        assert (lanes, link, taken) == ({"view"}, "shared memory", 0)
    else:
        assert lanes == {link}
        assert link.startswith("tcp/")
        assert taken == 64 << 10


def nothing_to_send_from() -> None:
    with kv_group(path="staged", staging_send=0) as kv:
        cache = random_cache()
        kv.register(cache)
        if kv.rank() == 0:
            work = kv.staged_put("r", None, PAGES, 1)
            with pytest.raises(RingExhausted, match=r"'r'.*rank 1.*this rank has 0; raise .*STAGING_SEND") as caught:
                work.wait(PATIENCE)
            assert not caught.value.retryable
            assert kv.explain(1).staging["send"] == 0
            kv.cancel("r").wait(PATIENCE)
        elif kv.rank() == 1:
            before = page_bytes(cache, TARGETS)
            with pytest.raises(RingExhausted, match="STAGING_SEND"):
                kv.recv_pages("r", TARGETS, 0).wait(PATIENCE)
            assert torch.equal(page_bytes(cache, TARGETS), before)


def test_only_a_ring_that_is_not_mapped_needs_memory_to_send_from(lane: str, three: Ranks) -> None:
    if lane == "memory":
        assert three.run(memory_taken, 0)[0] == ({"view"}, "shared memory", 0)
    else:
        three.run(nothing_to_send_from)


# ---------------------------------------------------------------------- checksums


def flip(checksum: bool, choice: int) -> tuple[str, str, int] | None:
    """One byte changes in the ring, between its arrival and scatter. What was hit, and what came of it."""
    with staged_by_python(), kv_group(path="staged", checksum=checksum) as kv:
        cache = random_cache()
        kv.register(cache)
        if kv.rank() == 2:
            return None
        source = page_bytes(cache, PAGES)
        hit: list[tuple[str, str, int]] = []
        real = HostPacker.scatter

        def scatter(self: HostPacker, job: Scatter) -> Iterator[int]:
            rng = np.random.default_rng(choice)
            section = job.layout.sections[rng.integers(len(job.layout.sections))]
            layer, pair = rng.integers(len(section.layers)), rng.integers(section.pairs)
            at = section.offset + layer * section.layer_stride + pair * section.segment.pair_nbytes
            at += rng.integers(section.segment.pair_nbytes)
            self._receiving.tensor[job.stage.offset + int(at)] ^= 0x10
            page = TARGETS[job.piece.start + int(pair)]
            hit.append((f"layer {section.layers[layer]},", f"component {section.segment.component!r},", page))
            return real(self, job)

        if kv.rank() == 0:
            kv.staged_put("r", None, PAGES, 1)
            if checksum:
                with pytest.raises(ChecksumMismatch, match="'r'"):  # of finish itself, if the reader was quicker
                    kv.finish("r", 1).wait(PATIENCE)
                kv.cancel("r").wait(PATIENCE)
            else:
                kv.finish("r", 1).wait(PATIENCE)
        else:
            canaries = page_bytes(cache, OTHERS)
            with patched(HostPacker, "scatter", scatter):
                rx = kv.recv_pages("r", TARGETS, 0)
                if checksum:
                    with pytest.raises(ChecksumMismatch) as caught:
                        rx.wait(PATIENCE)
                    assert caught.value.retryable
                    for words in (*hit[0][:2], f"page {hit[0][2]} ", "rank 0", "'r'"):
                        assert words in str(caught.value)
                    kv.cancel("r").wait(PATIENCE)
                else:
                    rx.wait(PATIENCE)
            assert torch.equal(page_bytes(cache, OTHERS), canaries)
        expected = pass_on(kv, 0, source, 1)
        if kv.rank() == 1:
            wrong = int((page_bytes(cache, TARGETS) != expected).sum())
            assert wrong == 1, "the byte that was changed, and no other: without checksums nobody notices"
            # The request is retried, and arrives.
            kv.recv_pages("r", TARGETS, 0).wait(PATIENCE)
            check_pages(kv, expected, canaries)
        else:
            send(kv, PAGES, 1)
        return hit[0] if hit else None


@pytest.mark.parametrize("checksum", [True, False], ids=["", "control"])
def test_a_byte_changed_on_the_way_is_found_and_named(checksum: bool, three: Ranks) -> None:
    for _ in range(3):
        choice = int(np.random.default_rng().integers(1 << 32))
        print(f"choice {choice}")
        assert three.run(flip, checksum, choice)[1] is not None


# ---------------------------------------------------------------------- mixtures


def mixed(adopted: bool, other: str) -> None:
    """Layer 0 staged, layer 1 written to its pages, in one request, and again staged: first the promise is withdrawn.

    other: the path of every verb but staged_put.
    """
    with kv_group() as kv:
        cache = adopted_cache(small_layout(), 16) if adopted else random_cache()
        random_fill(cache, np.random.default_rng())
        kv.register(cache)
        if kv.rank() == 2:
            return
        source = page_bytes(cache, PAGES)
        if kv.rank() == 0:
            kv._verbs.forced_path = other
            kv.staged_put("r", 0, PAGES[:2], 1).wait(PATIENCE)
            works = [
                kv.send_slice("r", 1, PAGES[:3], 1),
                kv.staged_put("r", 0, PAGES[2:], 1, start=2),
                kv.send_slice("r", [0, 1], PAGES[3:], 1, start=3),
            ]
            kv.finish("r", 1).wait(PATIENCE)
            assert [work.path for work in works] == [other, "staged", other]
        else:
            canaries, promises = page_bytes(cache, OTHERS), []
            credits, real = kv._verbs.engine.credits, kv._verbs.engine.credits.withdraw

            def withdraw(src: int, message: Any) -> None:
                before = credits.is_ring_only(src, message.generation)
                real(src, message)
                promises.append((before, credits.is_ring_only(src, message.generation)))

            credits.withdraw = withdraw
            rx = kv.recv_pages("r", TARGETS, 0)
            rx.wait(PATIENCE)
            assert rx.path == "mixed"
            assert promises == [(True, False)]
        expected = pass_on(kv, 0, source, 1)
        if kv.rank() == 1:
            check_pages(kv, expected, canaries)
            assert not torch.equal(expected, source)


@pytest.mark.parametrize("adopted", [False, True], ids=["own", "adopted"])
def test_a_promise_is_withdrawn_before_direct_writes(adopted: bool, lane: str, three: Ranks) -> None:
    three.run(mixed, adopted, "direct" if lane == "memory" and not adopted else "slices")


def to_itself() -> None:
    with kv_group(path="staged") as kv:
        cache = random_cache()
        kv.register(cache)
        me = kv.rank()
        other = (me + 1) % 3
        rxs = [kv.recv_pages("r", TARGETS[:2], me), kv.recv_pages("s", TARGETS[2:], (me - 1) % 3)]
        source = page_bytes(cache, [5, 2])
        own = kv.staged_put("r", None, [5, 2], me)
        far = kv.staged_put("s", None, [5, 2], other)
        for done in (kv.finish("r", me), kv.finish("s", other), *rxs):
            done.wait(PATIENCE)
        assert own.wait_source(PATIENCE)
        assert (own.path, far.path, rxs[1].path) == ("direct", "staged", "staged")
        assert torch.equal(page_bytes(cache, TARGETS[:2]), source)
        for src in range(3):
            expected = pass_on(kv, src, source, (src + 1) % 3)
            assert (src + 1) % 3 != me or torch.equal(page_bytes(cache, TARGETS[2:]), expected)


def test_to_itself_and_round_in_a_ring(three: Ranks) -> None:
    three.run(to_itself)


# ---------------------------------------------------------------------- what it costs those that wait


def wakes() -> None:
    """Python serves the request: the resident loop never has it, and whoever waits for a work is woken for its end.

    And once more, or twice, if a thread took in an event meanwhile.
    """
    with kv_group(path="staged") as kv:
        kv.register(random_cache())
        engine = kv._verbs.engine
        news = []
        for turn in range(5):
            dist.barrier(kv)
            before = engine.news
            if kv.rank() == 0:
                kv.recv_pages(f"r{turn}", TARGETS, 1).wait(PATIENCE)
            elif kv.rank() == 1:
                kv.prefix_tokens(f"r{turn}", 0)
                before = engine.news
                kv.send_pages(f"r{turn}", PAGES, 0)
                kv.finish(f"r{turn}", 0).wait(PATIENCE)
            news.append(engine.news - before)
        if kv.rank() < 2:
            assert min(news) >= 1, news
            assert sum(news) <= 2 * len(news) + 2, news  # once or twice each, now and then once more
        assert engine.sender.counts.taken_back == 0
        dist.barrier(kv)


def test_who_waits_for_a_staged_request_is_woken_for_its_end_only(three: Ranks) -> None:
    three.run(wakes)
