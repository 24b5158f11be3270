"""The prefix cache: sharing, eviction, failed requests, hashes, misuse, threads."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.prefixes import collide, failure
from torchkv import PageOutOfRange, PrefixCache, ProtocolError
from torchkv.prefix.cache import Held


def filled(cache: PrefixCache, tokens: list[int], *, keep: bool = False) -> Held:
    """Matches, allocates and inserts ``tokens``, as a decode loop does, and releases them unless ``keep``."""
    held = cache.match(tokens)
    cache.allocate(held, -(-len(tokens) // cache.page_size) - len(held.pages))
    cache.insert(held, tokens)
    if not keep:
        cache.release(held)
    return held


def known(cache: PrefixCache, tokens: list[int]) -> int:
    """How many of ``tokens`` the cache finds."""
    held = cache.match(tokens)
    cache.release(held)
    return held.num_tokens


# ---------------------------------------------------------------------- sharing


def test_only_whole_pages_match() -> None:
    cache = PrefixCache(8, 4)
    filled(cache, [1, 2, 3, 4, 5, 6])
    assert known(cache, [1, 2, 3]) == 0
    assert known(cache, [1, 2, 3, 4]) == 4
    assert known(cache, [1, 2, 3, 4, 5, 6]) == 4
    assert known(cache, [1, 2, 3, 9]) == 0
    assert cache.available == 8


def test_a_match_ends_where_the_window_behind_it_is_whole() -> None:
    """Of 16 tokens only the last 6 were received in all layers: the pages from token 8 on, as page 2 holds token 10."""
    cache = PrefixCache(16, 4, window=6)
    prompt = list(range(16))
    filled(cache, prompt)
    assert known(cache, prompt) == 16
    assert known(cache, [*prompt[:12], 99, 99]) == 0  # the window before token 12 reaches the page of tokens 4 to 7
    held = cache.match([*prompt, *range(20, 28)])
    cache.allocate(held, 2)
    cache.insert(held, [*prompt, *range(20, 24)])  # received
    cache.insert(held, [*prompt, *range(20, 28)])  # computed here
    cache.release(held)
    for length in (16, 20, 24):
        assert known(cache, [*prompt, *range(20, 28)][:length]) == length


def test_what_was_computed_here_is_whole_however_long() -> None:
    cache = PrefixCache(16, 4, window=4)
    held = filled(cache, [1, 2, 3, 4, 5, 6, 7, 8], keep=True)
    cache.allocate(held, 4)
    cache.insert(held, [*range(1, 9), *range(20, 36)])
    cache.release(held)
    for length in (8, 12, 16, 20, 24):
        assert known(cache, [*range(1, 9), *range(20, 36)][:length]) == length
    assert known(cache, [1, 2, 3, 4]) == 0


@settings(deadline=None)
@given(
    st.integers(1, 9),
    st.sampled_from([2, 4]),
    st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=14), st.integers(0, 6)), min_size=1),
)
def test_no_match_points_at_pages_that_were_never_filled(window: int, align: int, rounds: Any) -> None:
    """Prompts of two different tokens, so that they share long prefixes; then answers, which are computed here."""
    cache = PrefixCache(64, 2, align=align, window=window)
    whole = np.zeros(64, dtype=bool)
    for prompt, answer in rounds:
        held = cache.match(prompt)
        reach = range(max(0, held.num_tokens - window) // 2, held.num_tokens // 2)
        assert whole[held.pages[list(reach)]].all()
        fresh = cache.allocate(held, -(-(len(prompt) + answer) // 2) - len(held.pages))
        whole[fresh] = False
        first = max(held.num_tokens, len(prompt) - window) // 2
        whole[held.pages[first:]] = True  # received, or computed
        cache.insert(held, prompt)
        cache.insert(held, prompt + [2] * answer)
        cache.release(held)


def test_the_same_tokens_behind_other_ones_are_another_page() -> None:
    cache = PrefixCache(8, 2)
    first = filled(cache, [1, 1, 7, 7], keep=True)
    second = filled(cache, [2, 2, 7, 7], keep=True)
    assert not set(first.pages) & set(second.pages)
    assert known(cache, [7, 7]) == 0


def test_matches_come_in_multiples_that_writers_can_send_behind() -> None:
    cache = PrefixCache(16, 2, align=6)
    filled(cache, list(range(20)))
    for length, expected in [(5, 0), (6, 6), (11, 6), (12, 12), (20, 18)]:
        held = cache.match(range(length))
        assert (held.num_tokens, len(held.pages)) == (expected, expected // 2)
        cache.release(held)
    assert cache.available == 16


def test_two_requests_that_receive_the_same_prompt_at_once_keep_their_own_pages() -> None:
    cache = PrefixCache(8, 2)
    tokens = [1, 2, 3, 4]
    one, two = cache.match(tokens), cache.match(tokens)
    cache.allocate(one, 2)
    cache.allocate(two, 2)
    mine = two.pages.tolist()
    assert cache.insert(one, tokens) == cache.insert(two, tokens) == 4
    assert two.pages.tolist() == mine != one.pages.tolist()
    cache.release(one)
    third = cache.match(tokens)
    assert third.pages.tolist() == one.pages.tolist()
    cache.release(third)
    # ``two`` now extends the index behind the pages of ``one``, which therefore stay in the index.
    cache.allocate(two, 1)
    cache.insert(two, [*tokens, 5, 6])
    longer = cache.match([*tokens, 5, 6])
    assert longer.pages.tolist() == [*one.pages.tolist(), int(two.pages[2])]
    cache.release(longer)
    cache.release(two)
    assert cache.available == 8
    assert cache._num_free == 5  # the two pages of ``two`` that were not indexed are free, not only evictable


def test_a_sequence_may_grow_and_be_inserted_again() -> None:
    cache = PrefixCache(8, 2)
    held = filled(cache, [1, 2, 3], keep=True)
    assert known(cache, [1, 2, 3, 4, 5]) == 2
    cache.allocate(held, 1)
    assert cache.insert(held, [1, 2, 3, 4, 5]) == 4
    assert cache.insert(held, [1, 2]) == 4  # nothing is removed
    assert known(cache, [1, 2, 3, 4, 5]) == 4


# ---------------------------------------------------------------------- eviction


def test_the_least_recently_used_goes_first_and_from_its_end() -> None:
    cache = PrefixCache(6, 2)
    filled(cache, [1, 1, 2, 2, 3, 3])
    filled(cache, [9, 9, 8, 8, 7, 7])
    assert known(cache, [1, 1, 2, 2, 3, 3]) == 6  # this match makes it the most recently used
    held = cache.match([])
    cache.allocate(held, 2)
    assert known(cache, [9, 9, 8, 8, 7, 7]) == 2
    assert known(cache, [1, 1, 2, 2, 3, 3]) == 6
    cache.allocate(held, 2)
    assert known(cache, [9, 9]) == 0
    assert known(cache, [1, 1, 2, 2, 3, 3]) == 4


def test_pages_in_use_are_never_evicted() -> None:
    cache = PrefixCache(4, 2)
    filled(cache, [1, 1, 2, 2, 3, 3])
    user = cache.match([1, 1, 2, 2])
    other = cache.match([])
    assert cache.available == 2
    with pytest.raises(PageOutOfRange, match=r"3 pages wanted, but of 4 only 2 .* 2 are held by requests"):
        cache.allocate(other, 3)
    assert known(cache, [1, 1, 2, 2, 3, 3]) == 6  # the failed call evicted nothing
    fresh = cache.allocate(other, 2)
    assert not set(fresh) & set(user.pages)
    assert known(cache, [1, 1, 2, 2, 3, 3]) == 4


def test_what_a_match_locks_no_longer_counts_as_available() -> None:
    """A number of available pages that was read before the match includes pages that the match then holds."""
    cache = PrefixCache(4, 2)
    filled(cache, [1, 1, 2, 2, 3, 3, 4, 4])
    assert cache.available == 4
    held = cache.match([1, 1, 2, 2, 3, 3, 5, 5])
    assert cache.available == 1
    with pytest.raises(PageOutOfRange):
        cache.allocate(held, 2)
    cache.allocate(held, 1)
    assert cache.available == 0
    cache.release(held)
    assert cache.available == 4


def test_more_than_the_pool_is_not_worth_a_retry() -> None:
    cache = PrefixCache(4, 2)
    with pytest.raises(PageOutOfRange, match="make the pool larger") as caught:
        cache.allocate(cache.match([]), 5)
    assert not caught.value.retryable


def test_fresh_pages_lie_side_by_side() -> None:
    cache = PrefixCache(8, 2)
    held = cache.match([])
    assert cache.allocate(held, 3).tolist() == [0, 1, 2]
    cache.release(held)
    assert cache.allocate(cache.match([]), 5).tolist() == [0, 1, 2, 3, 4]


# ---------------------------------------------------------------------- failed requests


def test_pages_of_a_failed_request_stay_out_until_they_are_safe_and_are_not_inserted() -> None:
    cache = PrefixCache(4, 2)
    filled(cache, [1, 1])
    held = cache.match([1, 1, 2, 2, 3, 3])
    fresh = cache.allocate(held, 2)
    error, safe = failure(safe=False)
    cache.release(held, error)
    assert (cache.withheld, cache.available) == (2, 2)
    assert known(cache, [1, 1, 2, 2, 3, 3]) == 2  # the prefix that was matched is still in the index
    other = cache.match([])
    with pytest.raises(PageOutOfRange, match="2 withheld for failed"):
        cache.allocate(other, 3)
    assert not set(cache.allocate(other, 2)) & set(fresh)
    safe[0] = True
    assert cache.withheld == 0
    assert set(cache.allocate(other, 2)) == set(fresh)


def test_pages_that_are_safe_at_once_are_free_at_once() -> None:
    cache = PrefixCache(2, 2)
    held = cache.match([1, 1])
    cache.allocate(held, 2)
    cache.release(held, failure(safe=True)[0])
    assert (cache.withheld, cache.available) == (0, 2)


# ---------------------------------------------------------------------- hashes


def test_pages_of_equal_hash_are_told_apart() -> None:
    cache = collide(PrefixCache(64, 2))
    prompts = [[a, b, c, d] for a in range(2) for b in range(2) for c in range(2) for d in range(2)]
    held = {tuple(prompt): filled(cache, prompt) for prompt in prompts}
    assert (cache._index.buckets >= 0).sum() == 1  # they do collide
    for prompt in prompts:
        found = cache.match(prompt)
        assert found.num_tokens == 4
        assert found.pages.tolist() == held[tuple(prompt)].pages.tolist()
    assert known(cache, [0, 5]) == 0


def test_tokens_beyond_32_bits_are_compared_and_hashed_whole() -> None:
    cache = PrefixCache(32, 1)
    filled(cache, [5])
    # So many that they have one bucket by chance in no run.
    for near in (5 - (1 << 63), *(5 | (1 << bit) for bit in range(32, 63, 2))):
        assert known(cache, [near]) == 0
        filled(cache, [near])
        assert known(cache, [near]) == 1
    assert len({int(bucket) for bucket in cache._index.buckets if bucket >= 0}) > 1


def test_no_two_caches_hash_alike() -> None:
    assert not np.array_equal(PrefixCache(4, 2)._index.keys, PrefixCache(4, 2)._index.keys)


def test_random_tokens_spread_over_the_buckets() -> None:
    cache = PrefixCache(1 << 12, 4)
    filled(cache, np.random.default_rng().integers(0, 50_000, 4 << 12).tolist())
    used = (cache._index.buckets >= 0).mean()
    assert 0.55 < used < 0.70  # 1 - 1/e for random hashes


# ---------------------------------------------------------------------- misuse


def test_released_twice_or_used_after_release() -> None:
    cache = PrefixCache(4, 2)
    held, other = filled(cache, [1, 1], keep=True), cache.match([1, 1])
    cache.release(held)
    for use in (
        lambda: cache.release(held),
        lambda: cache.allocate(held, 1),
        lambda: cache.insert(held, [1, 1]),
    ):
        with pytest.raises(ProtocolError, match="released already"):
            use()
    assert cache.available == 3  # the reference of ``other`` is unchanged
    with pytest.raises(ProtocolError, match="another PrefixCache"):
        PrefixCache(4, 2).release(other)
    assert repr(held).startswith("Held(released")


def test_insert_refuses_tokens_that_are_not_those_of_the_request() -> None:
    cache = PrefixCache(8, 2)
    filled(cache, [1, 2, 3, 4])
    held = cache.match([1, 2, 3, 4, 5, 6])
    cache.allocate(held, 1)
    with pytest.raises(ProtocolError, match=r"token 9 at position 3 .* page 1"):
        cache.insert(held, [1, 2, 3, 9, 5, 6])
    with pytest.raises(ProtocolError, match="8 tokens fill 4 pages of 2, but only 3 are held"):
        cache.insert(held, [1, 2, 3, 4, 5, 6, 7, 8])
    assert cache.insert(held, [1, 2, 3, 4, 5, 6, 7]) == 6


@pytest.mark.parametrize(
    "tokens",
    [
        np.array([1, 2, 3, 4]),
        np.array([1, 2, 3, 4], dtype=np.uint32),
        np.array([[1, 2], [3, 4]], dtype=np.int32).ravel(),
        np.arange(1, 9)[::2] // 2 + 1,
        torch.tensor([1, 2, 3, 4]),
        torch.tensor([1, 2, 3, 4], dtype=torch.int32),
        (1, 2, 3, 4),
        range(1, 5),
    ],
    ids=lambda tokens: f"{type(tokens).__name__}",
)
def test_tokens_of_any_integer_kind(tokens: Any) -> None:
    cache = PrefixCache(4, 2)
    filled(cache, [1, 2, 3, 4])
    assert known(cache, tokens) == 4


def test_tokens_that_may_not_be_written_to() -> None:
    tokens = np.array([1, 2, 3, 4])
    tokens.flags.writeable = False
    cache = PrefixCache(4, 2)
    filled(cache, tokens)
    assert known(cache, tokens) == 4


@pytest.mark.parametrize(
    "tokens",
    [
        [1.0, 2.0],
        [1, None],
        [1 << 63],
        "text",
        np.array([1.0, 2.0]),
        np.array([1, 2], dtype=np.uint64),
        np.array([[1, 2]]),
        torch.tensor([[1, 2]]),
        torch.tensor([1.0]),
        torch.empty(2, dtype=torch.int64, device="meta"),
        7,
    ],
    ids=str,
)
def test_other_tokens_are_refused(tokens: Any) -> None:
    cache = PrefixCache(4, 2)
    with pytest.raises(ProtocolError, match="tokens"):
        cache.match(tokens)
    assert cache.available == 4


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (1 << 31, 1), (-1, 4)])
def test_sizes_that_make_no_sense(sizes: tuple[int, int]) -> None:
    with pytest.raises(ProtocolError, match="num_pages"):
        PrefixCache(*sizes)
    with pytest.raises(ProtocolError, match="align=6"):
        PrefixCache(4, 4, align=6)
    with pytest.raises(ProtocolError, match="window=0"):
        PrefixCache(4, 4, window=0)
    with pytest.raises(ProtocolError, match="-1"):
        PrefixCache(4, 4).allocate(PrefixCache(4, 4).match([]), -1)


# ---------------------------------------------------------------------- threads


def test_threads_may_share_a_cache() -> None:
    """A fresh page is never given to two of them."""
    cache = PrefixCache(64, 2)
    owners = np.zeros(64, dtype=np.int64)
    problems: list[str] = []

    def work(number: int) -> None:
        rng = np.random.default_rng()
        for _ in range(300):
            tokens = rng.integers(0, 2, 12).tolist()
            held = cache.match(tokens)
            fresh = cache.allocate(held, 6 - len(held.pages))
            if owners[fresh].any():
                problems.append(f"{fresh} belong to {owners[fresh]}")
            owners[fresh] = number
            cache.insert(held, tokens)
            owners[fresh] = 0
            cache.release(held)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert cache.available == 64
