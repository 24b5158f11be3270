"""Only what the receiver lacks: prefixes, chunks and `PrefixCache`, between real ranks.

Rank 0 prefills; it keeps one page per run of tokens too, so that its own prefixes come from pages that it filled long
ago. Every page that the receiver ends up with is compared with the prefiller's.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.helpers.harness import Ranks, ask, kv_group, say
from tests.helpers.ranks.lane_transfer import random_fill, views
from tests.helpers.ranks.small_cache import Never, check_transfer, meet, page_bytes, random_cache
from tests.helpers.torchrun import EXAMPLES, run_with_torchrun
from torchkv import (
    KVError,
    KVProcessGroup,
    KVWork,
    PageOutOfRange,
    PrefixCache,
    ProtocolError,
    TransferCancelled,
    TransferTimeout,
)
from torchkv.prefix.cache import Held

EXAMPLE = EXAMPLES / "multi_turn.py"
PAGE_SIZE = 16
NUM_PAGES = 32
PAGE = 2 * 2 * PAGE_SIZE * 2 * 8 * 2  # bytes: layers, K and V, tokens, heads, head_dim, bf16

A, B, C, D, E = (list(range(at, at + PAGE_SIZE)) for at in range(0, 500, 100))  # the tokens of one page each
HALF = E[:7]


def pages_for(tokens: list[int]) -> int:
    return -(-len(tokens) // PAGE_SIZE)


def grant(kv: KVProcessGroup, prefixes: PrefixCache, name: str, prompt: list[int]) -> tuple[Held, KVWork]:
    """What a decode rank does first."""
    held = prefixes.match(prompt)
    fresh = prefixes.allocate(held, pages_for(prompt) - len(held.pages))
    return held, kv.recv_pages(name, fresh, 0, prefix_tokens=held.num_tokens)


def prefill(kv: KVProcessGroup, own: PrefixCache, name: str, prompt: list[int], dst: int) -> KVWork:
    """What a prefill rank does: "computes" what it has not, sends what ``dst`` has not, whoever computed it when."""
    held = own.match(prompt)
    fresh = own.allocate(held, pages_for(prompt) - len(held.pages))
    assert kv._verbs is not None
    for array in views(kv._verbs.cache).values():
        array[fresh] = np.random.default_rng().integers(0, 256, array[fresh].shape, dtype=np.uint8)
    own.insert(held, prompt)
    skip = kv.prefix_tokens(name, dst) // PAGE_SIZE
    work = kv.send_pages(name, held.pages[skip:], dst)
    kv.finish(name, dst, aux=name.encode()).wait(30)
    dist.send(page_bytes(kv._verbs.cache, held.pages.tolist()), dst, group=kv)
    own.release(held)
    return work


def check_pages(kv: KVProcessGroup, held: Held) -> None:
    """All pages of the request, shared and fresh, are those of the prefiller."""
    assert kv._verbs is not None
    got = page_bytes(kv._verbs.cache, held.pages.tolist())
    expected = torch.empty_like(got)
    dist.recv(expected, 0, group=kv)
    assert torch.equal(got, expected)
    got[len(got) // 2] ^= 1
    assert not torch.equal(got, expected)  # negative control


# ---------------------------------------------------------------------- hits

# Prompt, tokens known before, pages that move.
DIALOGUE = [
    ("short", HALF, 0, 1),  # less than a page: nothing to know of it later
    ("miss", A + B + HALF, 0, 3),
    ("partial", A + B + C + D + HALF, 32, 3),
    ("longer than what is sent again", A + B + C, 48, 0),
    ("full", A + B + C + D, 64, 0),
    ("another question", A + B + D + C, 32, 2),
    ("another beginning", D + A + B, 0, 3),
]


def dialogue() -> None:
    with kv_group() as kv:
        cache = random_cache(NUM_PAGES)
        kv.register(cache)
        prefixes = PrefixCache(NUM_PAGES, PAGE_SIZE)
        moved = 0
        for name, prompt, known, pages in DIALOGUE:
            if kv.rank() == 0:
                work = prefill(kv, prefixes, name, prompt, 1)
                work.wait(30)
                moved += pages * PAGE
                assert work.bytes == pages * PAGE
                assert sum(lane.nbytes for lane in kv.explain(1).lanes.values()) == moved
            elif kv.rank() == 1:
                held, rx = grant(kv, prefixes, name, prompt)
                assert held.num_tokens == known
                others = [page for page in range(NUM_PAGES) if page not in held.pages[known // PAGE_SIZE :]]
                canaries = page_bytes(cache, others)
                rx.wait(30)
                assert (rx.bytes, rx.aux) == (pages * PAGE, name.encode())
                check_pages(kv, held)
                assert torch.equal(page_bytes(cache, others), canaries)  # shared pages and foreign ones alike
                prefixes.insert(held, prompt)
                prefixes.release(held)
        meet(kv)


def test_only_what_the_receiver_lacks_moves_and_prefill_s_own_hits_change_nothing(four: Ranks) -> None:
    four.run(dialogue)


def full_hits() -> None:
    """No page, but aux; with every way to say "nothing", and with a layout that lists no states."""
    with kv_group() as kv:
        cache = random_cache(NUM_PAGES, states=[])
        kv.register(cache)
        ways: dict[str, Callable[[str], object]] = {
            "finish only": lambda name: None,
            "asked first": lambda name: kv.prefix_tokens(name, 1),
            "no pages": lambda name: kv.send_pages(name, [], 1),
            "no pages of a layer": lambda name: kv.send_layer(name, 1, [], 1),
            "no pages, staged": lambda name: kv.staged_put(name, None, [], 1),
        }
        before = page_bytes(cache, list(range(NUM_PAGES)))
        for name, call in ways.items():
            if kv.rank() == 0:
                call(name)
                kv.finish(name, 1, aux=b"first token of " + name.encode()).wait(30)
            elif kv.rank() == 1:
                rx = kv.recv_pages(name, [], 0, prefix_tokens=4 * PAGE_SIZE)
                rx.wait(30)
                rx.wait_layer(1, 30)
                assert (rx.bytes, rx.path, rx.aux) == (0, "none", b"first token of " + name.encode())
        meet(kv)
        assert torch.equal(page_bytes(cache, list(range(NUM_PAGES))), before)
        if kv.rank() == 0:
            assert sum(lane.nbytes for lane in kv.explain(1).lanes.values()) == 0
        meet(kv)


def test_a_full_hit_moves_no_page_but_carries_aux(four: Ranks) -> None:
    four.run(full_hits)


def mixed_receivers() -> None:
    """Rank 1 has a prefix cache, rank 2 none: the same request, at the same time, to both."""
    with kv_group() as kv:
        kv.register(random_cache(NUM_PAGES))
        prefixes = PrefixCache(NUM_PAGES, PAGE_SIZE)
        prompt = A + B + C
        if kv.rank() == 0:
            prefill(kv, prefixes, "warm", A + B, 1)
            for dst, bytes_ in ((1, PAGE), (2, 3 * PAGE)):
                assert prefill(kv, prefixes, "r", prompt, dst).bytes == bytes_
        elif kv.rank() == 1:
            for name, tokens in (("warm", A + B), ("r", prompt)):
                held, rx = grant(kv, prefixes, name, tokens)
                rx.wait(30)
                check_pages(kv, held)
                prefixes.insert(held, tokens)
        elif kv.rank() == 2:
            held = prefixes.match([])
            kv.recv_pages("r", prefixes.allocate(held, 3), 0).wait(30)
            check_pages(kv, held)
        meet(kv)


def test_receivers_with_and_without_a_prefix_cache_share_a_prefiller(four: Ranks) -> None:
    four.run(mixed_receivers)


# ---------------------------------------------------------------------- instances


def disagreement() -> None:
    """Ranks 2 and 3 are one instance; rank 3 has lost what rank 2 still knows. Both fail; then they agree."""
    with kv_group() as kv:
        rank = kv.rank()
        cache = random_cache(NUM_PAGES, tp_rank=rank % 2, tp_size=2)
        kv.register(cache, instance="prefill" if rank < 2 else "decode")
        prefixes = PrefixCache(NUM_PAGES, PAGE_SIZE)
        source = [3, 4, 5]
        if rank < 2:
            send(kv, "first", source[:2], rank + 2)
            # Each writer serves its receiver well: nothing but their disagreement is wrong. It begins before they can
            # disagree: to one who began later, a grant that was withdrawn is as one that never came.
            kv.send_pages("r", source[2:] if rank == 0 else source, rank + 2)
            meet(kv)
            with pytest.raises(ProtocolError, match="'r'"):
                kv.finish("r", rank + 2).wait(30)
            kv.cancel("r").wait(30)
            send(kv, "again", source, rank + 2)
            dist.send(page_bytes(cache, source), rank + 2, group=kv)
        else:
            held = receive(kv, prefixes, "first", A + B)
            prefixes.insert(held, A + B)
            prefixes.release(held)
            if rank == 3:
                prefixes = PrefixCache(NUM_PAGES, PAGE_SIZE)
            held = prefixes.match(A + B + C)
            meet(kv)
            rx = kv.recv_pages(
                "r", prefixes.allocate(held, 3 - len(held.pages)), "prefill", prefix_tokens=held.num_tokens
            )
            with pytest.raises(ProtocolError, match=r"ranks 2 and 3.*'r'.*prefix_tokens 32 and 0.*agree on one") as got:
                rx.wait(30)
            prefixes.release(held, got.value)
            kv.cancel("r").wait(30)
            assert got.value.pages_safe
            assert prefixes.withheld == 0
            assert prefixes.match(A + B + C).num_tokens == (32 if rank == 2 else 0)  # nothing of it was inserted
            held = receive(kv, PrefixCache(NUM_PAGES, PAGE_SIZE), "again", A + B + C)
            expected = torch.empty_like(page_bytes(cache, source))
            dist.recv(expected, rank - 2, group=kv)
            assert torch.equal(page_bytes(cache, held.pages.tolist()), expected)
            assert not torch.equal(page_bytes(cache, held.pages.tolist()[::-1]), expected)
        meet(kv)


def send(kv: KVProcessGroup, name: str, pages: list[int], dst: int) -> None:
    kv.send_pages(name, pages, dst)
    kv.finish(name, dst).wait(30)


def receive(kv: KVProcessGroup, prefixes: PrefixCache, name: str, prompt: list[int]) -> Held:
    held = prefixes.match(prompt)
    fresh = prefixes.allocate(held, pages_for(prompt) - len(held.pages))
    kv.recv_pages(name, fresh, "prefill", prefix_tokens=held.num_tokens).wait(30)
    return held


def test_ranks_of_an_instance_that_disagree_on_the_prefix_all_fail_that_request(four: Ranks) -> None:
    four.run(disagreement)


def absence() -> None:
    """Rank 3 has no page left and posts nothing: rank 2 and the writers learn it in time, in words."""
    with kv_group(grant_timeout=0.5) as kv:
        rank = kv.rank()
        kv.register(random_cache(tp_rank=rank % 2, tp_size=2), instance="prefill" if rank < 2 else "decode")
        if rank < 2:
            kv.send_pages("r", [1], rank + 2)
            with pytest.raises(TransferTimeout, match="'r'"):
                kv.finish("r", rank + 2).wait(30)
            kv.cancel("r").wait(30)
        elif rank == 2:
            with pytest.raises(TransferTimeout, match=r"'r'.*ranks \[3\].*post it on every rank"):
                kv.recv_pages("r", [1], "prefill").wait(30)
            kv.cancel("r").wait(30)
        else:
            prefixes = PrefixCache(4, PAGE_SIZE)
            with pytest.raises(PageOutOfRange):
                prefixes.allocate(prefixes.match([]), 5)
        meet(kv)


def test_a_rank_of_an_instance_that_never_posts_fails_the_others_in_time(four: Ranks) -> None:
    four.run(absence)


# ---------------------------------------------------------------------- failures


def stopped_writer() -> None:
    """The writer stands still while its request is cancelled: nobody gets these pages until it has answered."""
    with kv_group(heartbeat=20.0) as kv:
        cache = random_cache(4)
        kv.register(cache)
        if kv.rank() == 0:
            work = kv.send_pages("r", [1, 2], 1, event=Never())
            assert kv.prefix_tokens("r", 1) == PAGE_SIZE
            ask()  # stopped here
            with pytest.raises(TransferCancelled):
                work.wait(30)
            kv.cancel("r").wait(30)
        elif kv.rank() == 1:
            prefixes = PrefixCache(4, PAGE_SIZE)
            before = prefixes.match(A)
            prefixes.allocate(before, 1)
            prefixes.insert(before, A)
            prefixes.release(before)
            held, rx = grant(kv, prefixes, "r", A + B + C)
            fresh = held.pages[1:].tolist()
            ask()  # the writer has stopped
            cancelled = kv.cancel("r")
            with pytest.raises(TransferCancelled) as caught:
                rx.wait(30)
            prefixes.release(held, caught.value)
            assert (prefixes.withheld, prefixes.available) == (2, 2)
            other = prefixes.match([])
            with pytest.raises(PageOutOfRange, match="2 withheld"):
                prefixes.allocate(other, 3)
            assert not set(prefixes.allocate(other, 1).tolist()) & set(fresh)
            with pytest.raises(PageOutOfRange, match="quarantined"):
                kv.recv_pages("next", fresh, 0)
            say()
            cancelled.wait(30)
            assert (prefixes.withheld, prefixes.available) == (0, 3)
            assert prefixes.match(A + B + C).num_tokens == PAGE_SIZE  # as before: nothing of it was inserted
            assert set(prefixes.allocate(other, 2).tolist()) == set(fresh)
        meet(kv)
        check_transfer(kv, 0, 1)


def test_a_failed_request_s_pages_come_back_when_no_write_can_land_and_are_not_inserted(four: Ranks) -> None:
    ranks = four.start(stopped_writer)
    four.hear(0)
    four.hear(1)
    four.signal(0, signal.SIGSTOP)
    try:
        four.tell(1)
        four.hear(1)
    finally:
        four.signal(0, signal.SIGCONT)
    four.tell(0)
    four.join(ranks)


def broken_promise() -> None:
    """The receiver promised a prefix that it cannot produce any more: a cancel, then the whole prompt, same name."""
    with kv_group() as kv:
        cache = random_cache(NUM_PAGES)
        kv.register(cache)
        source, target = [7, 3, 9], [4, 8, 1]
        if kv.rank() == 0:
            assert kv.prefix_tokens("r", 1) == 2 * PAGE_SIZE
            kv.send_pages("r", source[2:], 1).wait(30)
            meet(kv)
            meet(kv)  # rank 1 has cancelled
            with pytest.raises(TransferCancelled, match="'r'"):
                kv.finish("r", 1).wait(30)
            kv.cancel("r").wait(30)
            assert kv.prefix_tokens("r", 1) == 0
            send(kv, "r", source, 1)
            dist.send(page_bytes(cache, source), 1, group=kv)
        elif kv.rank() == 1:
            rx = kv.recv_pages("r", target[2:], 0, prefix_tokens=2 * PAGE_SIZE)
            meet(kv)
            cancelled = kv.cancel("r")
            with pytest.raises(TransferCancelled):
                rx.wait(30)
            meet(kv)
            cancelled.wait(30)
            random_fill(cache, np.random.default_rng())
            kv.recv_pages("r", target, 0).wait(30)
            expected = torch.empty_like(page_bytes(cache, target))
            dist.recv(expected, 0, group=kv)
            assert torch.equal(page_bytes(cache, target), expected)
            assert not torch.equal(page_bytes(cache, target[::-1]), expected)
        else:
            meet(kv)
            meet(kv)
        meet(kv)


def test_a_prefix_that_was_promised_and_lost_fails_the_request_and_the_name_works_again(four: Ranks) -> None:
    four.run(broken_promise)


def forgotten_prefix() -> None:
    """A sender that counts from the prompt's first token: refused, with nothing written and nothing inserted."""
    with kv_group() as kv:
        cache = random_cache(NUM_PAGES)
        kv.register(cache)
        for name in ("asked", "queued"):  # the grant is known before the send, or comes after it
            if kv.rank() == 0:
                if name == "asked":
                    assert kv.prefix_tokens(name, 1) == PAGE_SIZE
                    with pytest.raises(
                        PageOutOfRange, match=r"outside the grant of 2 pages.*only pages after the prefix"
                    ):
                        kv.send_pages(name, [1, 2, 3], 1)
                    with pytest.raises(PageOutOfRange):
                        kv.send_pages(name, [2, 3], 1, start=1)
                else:
                    work = kv.send_pages(name, [1, 2, 3], 1)
                    meet(kv)
                    with pytest.raises(PageOutOfRange, match="outside the grant of 2 pages"):
                        work.wait(30)
                kv.cancel(name).wait(30)
            elif kv.rank() == 1:
                before = page_bytes(cache, list(range(NUM_PAGES)))
                if name == "queued":
                    meet(kv)
                rx = kv.recv_pages(name, [5, 6], 0, prefix_tokens=PAGE_SIZE)
                with pytest.raises(KVError, match=f"'{name}'"):
                    rx.wait(30)
                kv.cancel(name).wait(30)
                assert torch.equal(page_bytes(cache, list(range(NUM_PAGES))), before)
            elif name == "queued":
                meet(kv)
        meet(kv)
        check_transfer(kv, 0, 1)


def test_a_sender_that_forgets_the_prefix_is_refused(four: Ranks) -> None:
    four.run(forgotten_prefix)


def refused_chunk() -> None:
    """A chunk that was refused is not taken for sent: what follows does not move up into its place."""
    with kv_group() as kv:
        cache = random_cache(NUM_PAGES)
        kv.register(cache)
        source, target = [7, 3, 9, 2], [4, 8, 1, 6]
        if kv.rank() == 0:
            assert kv.prefix_tokens("r", 1) == PAGE_SIZE
            kv.send_pages("r", source[:1], 1)
            with pytest.raises(PageOutOfRange, match=f"page {NUM_PAGES} is outside"):
                kv.send_pages("r", [source[1], NUM_PAGES], 1, start=1)
            kv.send_pages("r", source[3:], 1, start=3)
            with pytest.raises(ProtocolError, match=r"'r'.*layer 0 page 1 .*was not sent"):
                kv.finish("r", 1)
            kv.send_pages("r", source[1:3], 1, start=1)
            kv.finish("r", 1).wait(30)
            dist.send(page_bytes(cache, source), 1, group=kv)
        elif kv.rank() == 1:
            rx = kv.recv_pages("r", target, 0, prefix_tokens=PAGE_SIZE)
            rx.wait(30)
            assert rx.bytes == 4 * PAGE
            expected = torch.empty_like(page_bytes(cache, target))
            dist.recv(expected, 0, group=kv)
            assert torch.equal(page_bytes(cache, target), expected)
            assert not torch.equal(page_bytes(cache, [target[0], *target[2:], target[1]]), expected)
        meet(kv)


def test_a_refused_chunk_is_not_taken_for_sent(four: Ranks) -> None:
    four.run(refused_chunk)


# ---------------------------------------------------------------------- the example


def test_a_dialogue_over_a_prefix_cache_gives_the_same_bits_and_a_flipped_page_is_noticed() -> None:
    pytest.importorskip("transformers", reason="the example's model comes from transformers (extra 'demo')")
    code, lines = run_with_torchrun(EXAMPLE, 2, "--turns=3", "--layers=2", "--question-tokens=40", "--corrupt")
    assert code == 0, "\n".join(lines)
    assert lines[-1].startswith("PASS 3 turns"), "\n".join(lines)
    assert "the flipped page was noticed" in lines[-1]
    assert [line.endswith("equal, bit by bit") for line in lines[-4:-1]] == [True, True, False]
