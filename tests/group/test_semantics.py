"""The words of the contract between real ranks: order, positions, who writes, what finish says."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.helpers.harness import Ranks, kv_group
from tests.helpers.ranks.lane_transfer import random_fill, views
from tests.helpers.ranks.small_cache import Gate, meet, page_bytes, random_cache, small_layout
from torchkv import (
    KVCache,
    LayoutMismatch,
    ProtocolError,
    TransferTimeout,
)

# ---------------------------------------------------------------------- order and positions


def order() -> None:
    """Chunks, layers and verbs out of order; layers awaited one by one; an event that gates one of them."""
    with kv_group() as kv:
        cache = random_cache()
        kv.register(cache)
        rank, source, target = kv.rank(), [9, 2, 11, 4], [1, 14, 3, 8]
        if rank == 0:
            gate = Gate()
            last = kv.send_layer("r", 0, source[:1], 1, event=gate)
            works = [
                kv.send_layer("r", 1, source[2:], 1, start=2),
                kv.send_slice("r", [1], source[:2], 1),
                kv.send_pages("r", source[1:], 1, layers=0, start=1),
                kv.send_pages("r", source[1:3], 1, start=1),  # once more: changes nothing
            ]
            for work in works:
                assert work.wait(30)
            meet(kv)  # rank 1 has layer 1 now
            meet(kv)  # and knows that layer 0 is not complete
            assert not last.is_completed()
            gate.open.set()
            assert last.wait(30)
            kv.finish("r", 1).wait(30)
            dist.send(page_bytes(cache, source), 1, group=kv)
        elif rank == 1:
            canaries = page_bytes(cache, [0, 2])
            rx = kv.recv_pages("r", target, 0)
            rx.wait_layer(1, 30)
            meet(kv)
            with pytest.raises(TransferTimeout, match=r"'r'.*layer 0"):
                rx.wait_layer(0, 0.05)
            with pytest.raises(ProtocolError, match="layer 7"):
                rx.wait_layer(7)
            meet(kv)
            rx.wait(30)
            rx.wait_layer(0)
            assert rx.aux == b""
            expected = torch.empty_like(page_bytes(cache, target))
            dist.recv(expected, 0, group=kv)
            assert torch.equal(page_bytes(cache, target), expected)
            assert torch.equal(page_bytes(cache, [0, 2]), canaries)
            assert not torch.equal(page_bytes(cache, target[::-1]), expected)  # negative control
        else:
            meet(kv)
            meet(kv)


def test_order_of_chunks_layers_and_verbs_is_free(four: Ranks) -> None:
    four.run(order)


def prefixes() -> None:
    """``prefix_tokens`` blocks until the grant; several receivers need equal prefixes."""
    with kv_group() as kv:
        kv.register(random_cache())
        if kv.rank() == 0:
            answers: list[int] = []
            thread = threading.Thread(target=lambda: answers.append(kv.prefix_tokens("r", 1)))
            thread.start()
            thread.join(0.2)
            assert thread.is_alive()
            meet(kv)
            thread.join(30)
            assert answers == [48]
            with pytest.raises(ProtocolError, match=r"'r'.*unequal prefixes"):
                kv.prefix_tokens("r", [1, 2])
            with pytest.raises(ProtocolError, match=r"'r'.*unequal prefixes.*one call a receiver"):
                kv.send_pages("r", [1], [1, 2])
            kv.send_pages("r", [1, 2], 1)
            kv.send_pages("r", [2], 2)
            kv.finish("r", [1, 2]).wait(30)
            assert kv.explain(1).lanes["view"].nbytes == 2 * kv.explain(2).lanes["view"].nbytes
        elif kv.rank() == 3:
            meet(kv)
        else:
            meet(kv)
            pages, prefix = ([5, 6], 48) if kv.rank() == 1 else ([5], 64)
            kv.recv_pages("r", pages, 0, prefix_tokens=prefix).wait(30)


def test_prefixes(four: Ranks) -> None:
    four.run(prefixes)


def prefix_deadline() -> None:
    with kv_group(grant_timeout=0.3) as kv:
        kv.register(random_cache())
        if kv.rank() == 0:
            with pytest.raises(TransferTimeout, match=r"'r'.*rank 1.*0\.3 s.*grant_timeout"):
                kv.prefix_tokens("r", 1)
        meet(kv)


def test_prefix_tokens_has_a_deadline(four: Ranks) -> None:
    four.run(prefix_deadline)


# ---------------------------------------------------------------------- who


def destinations() -> None:
    """Lists, instance names and numpy integers as ``dst`` and ``src``; dst == own rank; nothing owed."""
    with kv_group() as kv:
        cache = random_cache()
        kv.register(cache, instance=["prefill", "a", "b", "c"][kv.rank()])
        if kv.rank() == 0:
            work = kv.send_pages("many", [3, 4], [1, 2, 3])
            kv.finish("many", np.array([1, 2, 3]), aux=b"all").wait(30)
            assert work.bytes == 3 * len(page_bytes(cache, [3, 4]))
            kv.send_pages("named", (3,), "b")
            kv.finish("named", "b").wait(30)
            # To itself, a local copy.
            expected = page_bytes(cache, [3, 4])
            rx = kv.recv_pages("self", [7, 8], 0)
            assert not torch.equal(page_bytes(cache, [7, 8]), expected)
            kv.send_layer("self", 0, [3, 4], 0)
            kv.send_slice("self", 1, [3, 4], "prefill")
            done = kv.finish("self", kv.rank(), aux=b"me")
            rx.wait(30)
            done.wait(30)
            assert rx.aux == b"me"
            assert torch.equal(page_bytes(cache, [7, 8]), expected)
            assert set(kv.explain(0).lanes) == {"local"}
            dist.broadcast(expected, 0, group=kv)
        else:
            rx = kv.recv_pages("many", [kv.rank(), 9], np.int64(0))
            rx.wait(30)
            assert rx.aux == b"all"
            if kv.rank() == 2:
                kv.recv_pages("named", [5], "prefill").wait(30)
            expected = torch.empty_like(page_bytes(cache, [1, 2]))
            dist.broadcast(expected, 0, group=kv)
            assert torch.equal(page_bytes(cache, [kv.rank(), 9]), expected)
            assert not torch.equal(page_bytes(cache, [kv.rank(), 10]), expected)


def test_destinations(four: Ranks) -> None:
    four.run(destinations)


def to_itself_on_any_path(path: str) -> None:
    with kv_group(path=path) as kv:
        cache = random_cache()
        kv.register(cache)
        rx = kv.recv_pages("self", [7, 8], kv.rank())
        kv.send_pages("self", [3, 4], kv.rank())
        kv.finish("self", kv.rank()).wait(30)
        rx.wait(30)
        assert torch.equal(page_bytes(cache, [7, 8]), page_bytes(cache, [3, 4]))
        assert not torch.equal(page_bytes(cache, [7, 8]), page_bytes(cache, [3, 5]))


@pytest.mark.parametrize("path", ["direct", "slices", "runs"])
def test_own_rank_is_a_local_copy_whatever_path_is_forced(path: str, four: Ranks) -> None:
    four.run(to_itself_on_any_path, path)


def nothing_owed() -> None:
    """PP: ranks 0 and 2 share no layer; a receiver whose writers do not cover it is refused."""
    with kv_group() as kv:
        held = {0: [0, 1], 1: [2], 2: [2], 3: [0, 1, 2]}[kv.rank()]
        cache = random_cache(num_layers=3, layers=held)
        kv.register(cache, instance=f"i{kv.rank()}")
        if kv.rank() == 0:
            work = kv.send_pages("r", [1, 2], 2)
            assert work.wait(30)
            assert (work.bytes, work.path) == (0, "none")
            assert kv.finish("r", 2).wait(30)
            assert kv.explain(2).path == "none"
            with pytest.raises(ProtocolError, match="layers 0 to 1"):
                kv.send_layer("r", 2, [1], 3)
            only = kv.send_pages("some", [1, 2], [2, 3])  # owes rank 2 nothing: needs no grant of it
            kv.finish("some", [2, 3]).wait(30)
            assert only.bytes == len(page_bytes(cache, [1, 2]))
        elif kv.rank() == 1:
            moved = kv.send_layer("some", 2, [5, 6], 3)
            kv.finish("some", 3).wait(30)
            assert moved.bytes == len(page_bytes(cache, [5, 6]))
        elif kv.rank() == 3:
            with pytest.raises(LayoutMismatch, match="name every rank"):
                kv.recv_pages("some", [1, 2], 0)
            kv.recv_pages("some", [1, 2], [0, 1]).wait(30)
        meet(kv)


def test_ranks_that_share_nothing_need_no_grant(four: Ranks) -> None:
    four.run(nothing_owed)


# ---------------------------------------------------------------------- finish and aux


def finishing() -> None:
    with kv_group() as kv:
        kv.register(random_cache())
        if kv.rank() == 0:
            kv.finish("empty", 1, aux=b"no pages").wait(30)
            biggest = np.random.default_rng().bytes(65536)
            kv.send_pages("aux", [1], 1)
            kv.finish("aux", 1, aux=biggest).wait(30)
            dist.send(torch.frombuffer(bytearray(biggest), dtype=torch.uint8), 1, group=kv)
            assert kv.prefix_tokens("owed", 1) == 0
            with pytest.raises(ProtocolError, match=r"'owed'.*nothing was sent.*layer 0 page 0"):
                kv.finish("owed", 1)
            gate = Gate()
            kv.send_pages("owed", [1, 2], 1, event=gate)
            done = kv.finish("owed", 1)
            for verb in (lambda: kv.send_pages("owed", [1], 1), lambda: kv.finish("owed", 1)):
                with pytest.raises(ProtocolError, match=r"'owed'.*rank 1.*finished already"):
                    verb()
            gate.open.set()
            done.wait(30)
            kv.send_pages("early", [1, 2], 1, layers=1)
            with pytest.raises(ProtocolError, match=r"'early'.*missing|'early'.*not sent"):
                kv.finish("early", 1)  # a hole is known before the grant
            kv.send_pages("early", [1, 2], 1, layers=[0])
            done = kv.finish("early", 1)
            meet(kv)
            done.wait(30)
        elif kv.rank() == 1:
            rx = kv.recv_pages("empty", [], 0)
            rx.wait(30)
            assert (rx.aux, rx.bytes, rx.path) == (b"no pages", 0, "none")
            rx = kv.recv_pages("aux", [1], 0)
            rx.wait(30)
            sent = torch.empty(65536, dtype=torch.uint8)
            dist.recv(sent, 0, group=kv)
            assert rx.aux == sent.numpy().tobytes()
            kv.recv_pages("owed", [1, 2], 0).wait(30)
            meet(kv)
            kv.recv_pages("early", [1, 2], 0).wait(30)
        else:
            meet(kv)


def test_finish_and_aux(four: Ranks) -> None:
    four.run(finishing)


def unlike_aux() -> None:
    """Two writers of one receiver: one aux, or two equal ones; two unlike ones fail closed."""
    with kv_group() as kv:
        rank = kv.rank()
        changes = {"tp_rank": rank, "tp_size": 2} if rank < 2 else {}
        kv.register(random_cache(**changes), instance="prefill" if rank < 2 else None)
        for name, auxes, ok in [("one", [b"", b"x"], True), ("same", [b"y", b"y"], True), ("two", [b"x", b"y"], False)]:
            if rank < 2:
                kv.send_pages(name, [1, 2], 2).wait(30)
                done = kv.finish(name, 2, aux=auxes[rank])
                if ok:
                    done.wait(30)
                else:
                    with pytest.raises(ProtocolError, match=r"'two'.*aux"):
                        done.wait(30)
                    kv.cancel(name).wait(30)
            elif rank == 2:
                rx = kv.recv_pages(name, [1, 2], "prefill")
                if ok:
                    rx.wait(30)
                    assert rx.aux == auxes[1]
                else:
                    with pytest.raises(ProtocolError, match=r"'two'.*aux"):
                        rx.wait(30)
                    assert rx.aux == b""
                    kv.cancel(name).wait(30)


def test_unlike_aux_of_two_writers_fails_closed(four: Ranks) -> None:
    four.run(unlike_aux)


def test_random_fill_reaches_every_byte() -> None:
    cache = KVCache.empty(small_layout(), 4, device="cpu")
    for storage in cache.storages:
        storage.zero_()
    random_fill(cache, np.random.default_rng())
    assert all(np.count_nonzero(array) > 0 for array in views(cache).values())
