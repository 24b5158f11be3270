"""Verdicts, lives, tombstones, leases, deadlines and the end of a group, between real ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.helpers.harness import Ranks, kv_group
from tests.helpers.ranks.small_cache import Gate, Never, check_transfer, meet, page_bytes, random_cache
from torchkv import (
    KVCache,
    KVError,
    KVProcessGroup,
    KVWork,
    PageOutOfRange,
    ProtocolError,
    TransferCancelled,
    TransferTimeout,
)

# ---------------------------------------------------------------------- one verdict per instance


def verdict(kind: str) -> None:
    """Ranks 2 and 3 are one instance. Both succeed, or both fail."""
    with kv_group(grant_timeout=30) as kv:
        rank = kv.rank()
        changes = {"tp_rank": rank % 2, "tp_size": 2}
        cache = random_cache(**changes)
        kv.register(cache, instance="prefill" if rank < 2 else "decode")
        prefix = 16 if kind == "prefix" and rank == 3 else 0
        pages = [1, 2, 3] if kind == "count" and rank == 3 else [1, 2]
        expected: type[KVError] | None = {"fine": None, "cancel": TransferCancelled}.get(kind, ProtocolError)
        if rank < 2:
            dst = rank + 2
            if kind != "cancel" or rank == 0:
                kv.send_pages("r", [5, 6], dst)
                done = kv.finish("r", dst)
                meet(kv)
                check_outcome(done, expected)
            else:
                meet(kv)
        else:
            meet(kv)  # the writers' lives have begun: the revocation will find them
            rx = kv.recv_pages("r", pages, "prefill", prefix_tokens=prefix)
            if kind == "cancel" and rank == 3:
                dist.recv(torch.empty(1), 2, group=kv)
                kv.cancel("r")
            elif kind == "cancel":
                rx.wait_layer(1, 30)  # every byte is here, success is not
                with pytest.raises(TransferTimeout):
                    rx.wait(0.1)
                dist.send(torch.ones(1), 3, group=kv)
            check_outcome(rx, expected)
        meet(kv)
        kv.cancel("r").wait(30)
        assert kv.quarantined() == {}
        meet(kv)
        check_same_shard(kv, cache)


def check_outcome(work: KVWork, expected: type[KVError] | None) -> None:
    if expected is None:
        assert work.wait(30)
    else:
        with pytest.raises(expected, match="'r'"):
            work.wait(30)


def check_same_shard(kv: KVProcessGroup, cache: KVCache) -> None:
    """A good transfer on both pairs; both receivers are one instance and so need each other."""
    rank = kv.rank()
    if rank < 2:
        kv.send_pages("r", [7], rank + 2)
        kv.finish("r", rank + 2).wait(30)
        dist.send(page_bytes(cache, [7]), rank + 2, group=kv)
    else:
        kv.recv_pages("r", [9], "prefill").wait(30)
        expected = torch.empty_like(page_bytes(cache, [9]))
        dist.recv(expected, rank - 2, group=kv)
        assert torch.equal(page_bytes(cache, [9]), expected)
        assert not torch.equal(page_bytes(cache, [10]), expected)


@pytest.mark.parametrize("kind", ["fine", "prefix", "count", "cancel"])
def test_one_verdict_per_instance(kind: str, four: Ranks) -> None:
    four.run(verdict, kind)


# ---------------------------------------------------------------------- lives and tombstones


def check_verbs_are_cancelled(kv: KVProcessGroup) -> None:
    for verb in (
        lambda: kv.send_pages("r", [1], 1),
        lambda: kv.send_layer("r", 0, [1], 1),
        lambda: kv.finish("r", 1),
        lambda: kv.prefix_tokens("r", 1),
    ):
        with pytest.raises(TransferCancelled, match="'r'"):
            verb()


def tombstones() -> None:
    with kv_group() as kv:
        kv.register(random_cache())
        if kv.rank() == 0:
            pending = kv.send_pages("r", [1, 2], 1, event=Never())
            meet(kv)  # now rank 1 cancels
            with pytest.raises(TransferCancelled, match="'r'") as caught:
                pending.wait(30)
            assert caught.value.pages_safe
            check_verbs_are_cancelled(kv)
            kv.cancel("r").wait(30)
            kv.cancel("r").wait(30)  # idempotent
            kv.cancel("never heard of").wait(30)
        elif kv.rank() == 1:
            rx = kv.recv_pages("r", [3, 4], 0)
            with pytest.raises(TransferTimeout):
                rx.wait(0.1)
            meet(kv)
            work = kv.cancel("r")
            with pytest.raises(TransferCancelled, match=r"'r'.*rank 1"):
                rx.wait(30)
            work.wait(30)
        else:
            meet(kv)
        meet(kv)
        for _ in range(3):
            check_transfer(kv, 0, 1, request="r")  # the name, again and again


def test_tombstones_and_reuse_of_a_name(four: Ranks) -> None:
    four.run(tombstones)


def late_verbs() -> None:
    """The receiver gives up before its sender's first verb, which then raises at once."""
    with kv_group() as kv:
        kv.register(random_cache())
        if kv.rank() == 1:
            for name in ("r", "asked"):
                kv.recv_pages(name, [3, 4], 0)
                kv.cancel(name).wait(30)
        meet(kv)
        if kv.rank() == 0:
            with pytest.raises(TransferCancelled, match=r"'asked'.*rank 1"):
                kv.prefix_tokens("asked", 1)
            with pytest.raises(TransferCancelled, match=r"'r'.*rank 1"):
                kv.send_pages("r", [1, 2], 1)
            check_verbs_are_cancelled(kv)
            kv.cancel("r").wait(30)
        meet(kv)
        check_transfer(kv, 0, 1, request="r")


def a_name_again() -> None:
    """The next request of a name that its receiver alone had begun learns that, and the one after it succeeds."""
    with kv_group() as kv:
        kv.register(random_cache())
        if kv.rank() == 1:
            kv.recv_pages("r", [3, 4], 0)
            kv.cancel("r").wait(30)
        meet(kv)
        if kv.rank() == 0:
            with pytest.raises(TransferCancelled, match=r"'r'.*rank 1"):
                kv.send_pages("r", [1, 2], 1)
        meet(kv)  # a grant that came before that verb may be the one that it meets
        if kv.rank() == 0:
            kv.cancel("r").wait(30)
        for _ in range(2):
            check_transfer(kv, 0, 1, request="r")


def test_a_verb_learns_that_its_receiver_cancelled_before_it(four: Ranks) -> None:
    four.run(late_verbs)


def test_a_name_may_be_used_again_after_its_receiver_alone_gave_up(four: Ranks) -> None:
    four.run(a_name_again)


def refusals() -> None:
    """A sender that cancelled before its grant came answers it with a refusal, once."""
    with kv_group() as kv:
        kv.register(random_cache())
        if kv.rank() == 0:
            work = kv.send_pages("r", [1], 1)
            done = kv.finish("r", 1)
            kv.cancel("r").wait(30)
            for failed in (work, done):
                with pytest.raises(TransferCancelled, match=r"'r'.*rank 0"):
                    failed.wait(30)
            meet(kv)
            # A grant that no life had asked for is refused by a cancel too.
            assert kv.prefix_tokens("granted", 1) == 0
            kv.cancel("granted").wait(30)
        elif kv.rank() == 1:
            meet(kv)
            rx = kv.recv_pages("r", [3], 0)
            with pytest.raises(TransferCancelled, match="'r'"):
                rx.wait(30)
            rx = kv.recv_pages("granted", [3, 4][1:], 0)
            with pytest.raises(TransferCancelled, match="'granted'"):
                rx.wait(30)
            for name in ("r", "granted"):
                kv.cancel(name).wait(30)
            assert kv.quarantined() == {}
        else:
            meet(kv)
        meet(kv)
        check_transfer(kv, 0, 1, request="r")


def test_a_sender_that_cancelled_refuses_the_grant(four: Ranks) -> None:
    four.run(refusals)


def several_destinations() -> None:
    """One verb, two receivers, one of which cancels: the work is done when both are, and then it has failed."""
    with kv_group() as kv:
        kv.register(random_cache())
        if kv.rank() == 0:
            gate = Gate()
            work = kv.send_pages("r", [1, 2], [1, 2], event=gate)
            meet(kv)
            meet(kv)  # rank 1's share has failed by now
            assert not work.is_completed()
            assert work.exception() is None
            gate.open.set()
            with pytest.raises(TransferCancelled, match=r"'r'.*rank 1"):
                work.wait(30)
            with pytest.raises(TransferCancelled):
                kv.finish("r", [1, 2])
            kv.finish("r", 2).wait(30)  # the other receiver is none the worse for it
            kv.cancel("r").wait(30)
        elif kv.rank() == 1:
            kv.recv_pages("r", [3, 4], 0)
            with pytest.raises(TransferTimeout):
                kv.recv_pages("unsent", [5], 0).wait(0.1)
            meet(kv)
            for name in ("r", "unsent"):
                kv.cancel(name).wait(30)
            meet(kv)
        else:
            rx = kv.recv_pages("r", [3, 4], 0) if kv.rank() == 2 else None
            meet(kv)
            meet(kv)
            assert rx is None or rx.wait(30)


def test_one_of_several_receivers_cancels(four: Ranks) -> None:
    four.run(several_destinations)


# ---------------------------------------------------------------------- leases and deadlines


def deadlines() -> None:
    with kv_group(grant_timeout=1.0, timeout=1.0) as kv:
        kv.register(random_cache())
        if kv.rank() == 0:
            lonely = kv.send_pages("lonely", [1], 1)
            with pytest.raises(TransferTimeout, match=r"'lonely'.*rank 1.*1 s.*grant_timeout"):
                lonely.wait(30)
            kv.cancel("lonely").wait(30)
            stuck = [kv.send_pages(name, [1], 1, event=Never()) for name in ("total", "grant")]
            kv.send_pages("half", [1], 1, layers=0)  # and then nothing more
            meet(kv)
            for work in stuck:
                with pytest.raises(TransferTimeout):
                    work.wait(30)
            meet(kv)  # rank 1 has seen all its deadlines pass
            for name in ("total", "grant", "half"):
                kv.cancel(name).wait(30)
        elif kv.rank() == 1:
            meet(kv)
            total = kv.recv_pages("total", [1], 0, timeout=0.2)
            grant = kv.recv_pages("grant", [2], 0)
            half = kv.recv_pages("half", [3], 0)
            with pytest.raises(TransferTimeout, match=r"'total'.*timeout=0\.2.*\[0\]") as caught:
                total.wait()
            assert caught.value.retryable
            with pytest.raises(TransferTimeout, match=r"'grant'.*grant_timeout"):
                grant.wait()
            with pytest.raises(TransferTimeout, match=r"'half'.*Options\.timeout"):
                half.wait()
            meet(kv)
            for name in ("total", "grant", "half"):
                kv.cancel(name).wait(30)
            for work in (total, grant, half):
                error = work.exception()
                assert error is not None
                assert error.pages_safe
            assert kv.quarantined() == {}
        else:
            meet(kv)
            meet(kv)
        meet(kv)
        check_transfer(kv, 0, 1, request="lonely")


def test_deadlines(four: Ranks) -> None:
    four.run(deadlines)


def leases() -> None:
    with kv_group() as kv:
        kv.register(random_cache())
        if kv.rank() == 1:
            first = kv.recv_pages("first", [1, 2], 0)
            second = kv.recv_pages("second", [3], 0)  # other pages: independent
            with pytest.raises(PageOutOfRange, match=r"page 2 .*'first'"):
                kv.recv_pages("third", [4, 2], 0)
            third = kv.recv_pages("third", [4], 0)  # nothing of the refused call stayed behind
            meet(kv)
            second.wait(30)
            assert not first.is_completed()
            again = kv.recv_pages("again", [3], 0)  # free since success
            meet(kv)
            for work in (first, third, again):
                work.wait(30)
        elif kv.rank() == 0:
            meet(kv)
            kv.send_pages("second", [1], 1)
            kv.finish("second", 1).wait(30)
            meet(kv)
            for name, pages in (("first", [1, 2]), ("third", [3]), ("again", [4])):
                kv.send_pages(name, pages, 1)
                kv.finish(name, 1).wait(30)
        else:
            meet(kv)
            meet(kv)


def test_leases(four: Ranks) -> None:
    four.run(leases)


def threads() -> None:
    """All methods are thread-safe: many requests at once, from many threads, both ways."""
    with kv_group() as kv:
        cache = random_cache(num_pages=64)
        kv.register(cache)
        rank, peer = kv.rank(), kv.rank() ^ 1
        failures: list[BaseException] = []
        mine = page_bytes(cache, list(range(32)))

        def send(number: int) -> None:
            for round_ in range(5):
                kv.send_pages(f"{rank}->{number}.{round_}", range(number * 8, number * 8 + 8), peer)
                kv.finish(f"{rank}->{number}.{round_}", peer).wait(30)

        def receive(number: int) -> None:
            for round_ in range(5):
                kv.recv_pages(f"{peer}->{number}.{round_}", range(32 + number * 8, 40 + number * 8), peer).wait(30)

        def guarded(work: Callable[[int], None], number: int) -> None:
            try:
                work(number)
            except BaseException as error:  # noqa: BLE001 - reported below
                failures.append(error)

        everyone = [threading.Thread(target=guarded, args=(work, n)) for work in (send, receive) for n in range(4)]
        for thread in everyone:
            thread.start()
        for thread in everyone:
            thread.join(60)
        assert not failures, failures
        gathered = [torch.empty_like(mine) for _ in range(kv.size())]
        dist.all_gather(gathered, mine, group=kv)
        assert torch.equal(page_bytes(cache, list(range(32, 64))), gathered[peer])
        assert not torch.equal(page_bytes(cache, list(range(32, 64))), gathered[rank])


def test_many_threads(four: Ranks) -> None:
    four.run(threads, deadline=100)


def destroyed_under_way(everything: bool) -> None:
    """What waits when the group goes away fails at once, whichever call it is in."""
    group = dist.new_group(backend="torchkv")
    group.register(random_cache())
    outcomes: list[BaseException] = []

    def wait(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - looked at below
            outcomes.append(error)

    peer = group.rank() ^ 1
    calls: list[Callable[[], object]] = [lambda: group.prefix_tokens("nobody grants", peer)]
    if everything:
        rx = group.recv_pages("waits", [1], peer)
        sent = group.send_pages("ungranted", [1], peer)
        calls = [rx.wait, sent.wait, lambda: rx.wait_layer(0), *calls]
    waiting = [threading.Thread(target=wait, args=(call,), daemon=True) for call in calls]
    for thread in waiting:
        thread.start()
    waiting[-1].join(0.2)  # long enough for it to block
    dist.barrier()
    dist.destroy_process_group(group)
    for thread in waiting:
        thread.join(20)
        assert not thread.is_alive()
    assert len(outcomes) == len(calls)
    assert all(isinstance(error, KVError) for error in outcomes), outcomes
    with pytest.raises(ProtocolError, match="destroyed"):
        group.send_pages("r", [1], peer)
    dist.barrier()


@pytest.mark.parametrize("everything", [True, False])
def test_destroying_a_group_fails_what_waits_on_it(everything: bool, four: Ranks) -> None:
    four.run(destroyed_under_way, everything)


def after_destroy() -> None:
    with kv_group() as kv:
        kv.register(random_cache())
    for verb in (
        lambda: kv.recv_pages("r", [1], 0, timeout=0.5),
        lambda: kv.send_pages("r", [1], 0),
        lambda: kv.finish("r", 0),
        lambda: kv.prefix_tokens("r", 0),
        lambda: kv.explain(0),
    ):
        with pytest.raises(ProtocolError, match="destroyed"):
            verb()
    kv.cancel("r").wait(5)  # nothing of it is left


def test_a_destroyed_group_says_so(four: Ranks) -> None:
    four.run(after_destroy)


def destroy_in_a_callback() -> None:
    """Callbacks run on the progress thread, which cannot wait for its own end."""
    with kv_group() as kv:
        kv.register(random_cache())
        errors: list[BaseException] = []
        ran = threading.Event()

        def callback(_: torch.futures.Future[object]) -> None:
            try:
                kv.shutdown()
            except ProtocolError as error:
                errors.append(error)
            ran.set()

        gate = Gate()
        work = kv.send_pages("r", [1], kv.rank() ^ 1, event=gate)
        work.get_future().add_done_callback(callback)
        gate.open.set()
        rx = kv.recv_pages("r", [2], kv.rank() ^ 1)
        kv.finish("r", kv.rank() ^ 1)
        rx.wait(30)
        assert ran.wait(30)
        assert "on another thread" in str(errors[0])
        meet(kv)
        check_transfer(kv, 0, 1)


def test_a_callback_cannot_destroy_its_group(four: Ranks) -> None:
    four.run(destroy_in_a_callback)


def waits_in_a_callback() -> None:
    """A callback of a future runs on the thread that completes works, so it is told that it cannot wait there."""
    with kv_group() as kv:
        kv.register(random_cache())
        if kv.rank() == 1:
            found: list[ProtocolError] = []
            told = threading.Event()
            other = kv.recv_pages("other", [5], 0)

            def callback(_: object) -> None:
                for call in (other.wait, other.wait_source, lambda: kv.prefix_tokens("r", 0)):
                    try:
                        call()
                    except ProtocolError as error:
                        found.append(error)
                told.set()

            kv.recv_pages("r", [3, 4], 0).get_future().then(callback)
            kv.cancel("r").wait(30)
            assert told.wait(30)
            assert ["callback" in str(error) for error in found] == [True] * 3
            kv.cancel("other").wait(30)
        meet(kv)


def test_a_callback_cannot_wait_for_its_own_thread(four: Ranks) -> None:
    four.run(waits_in_a_callback)
