"""The index of `torchkv.prefix.cache`: a prefix tree of pages in flat arrays, walked by compiled code.

A node of the tree is a page, and its number is the page id. It stores the page's tokens and its parent, the page before
it in the sequence. To find a child, the one that was inserted last is tried first, as its entries lie nearby in memory,
then a hash table of all nodes. Both only propose a node: its parent and its tokens are then compared one by one.

Nodes without references form a ring, ordered by when they lost their last reference; eviction takes the oldest. A
reference to a node always comes with one to each of its ancestors, and `unlock` drops the deepest first. So on the ring
children come before their parents, and the oldest node is always a leaf.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchkv.arrays import Int64Array, UInt64Array
from torchkv.host.jit import compiled_with_gil

__all__ = ["PageIndex", "evict", "first_difference", "insert", "lock", "match", "new_index", "unlock", "warm_up"]

ROOT = -1  # the parent of a sequence's first page
_END = -1  # of the chain of a bucket
_NOWHERE = -2  # the parent of a page that is not in the tree
_LOW_HALF = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


class PageIndex(NamedTuple):
    """The arrays of the tree. All but ``keys`` and ``buckets`` have one entry for each page.

    For a page that is not in the tree, only ``parent`` has a meaning.
    """

    keys: UInt64Array  # secret random multipliers of the hash, [2 * page_size + 2]
    buckets: Int64Array  # first node of each bucket, [a power of two]
    following: Int64Array  # the next node in the same bucket
    tokens: Int64Array  # [num_pages, page_size]
    parent: Int64Array
    child: Int64Array  # inserted last, perhaps evicted since; [num_pages + 1], of which the last is the root's
    references: Int64Array
    newer: Int64Array  # the ring, [num_pages + 1]: a doubly linked list, whose last entry is the sentinel
    older: Int64Array


def new_index(num_pages: int, page_size: int) -> PageIndex:
    """An empty tree. Its hash has random keys, so that no client can prepare prompts whose pages collide."""
    num_buckets = 1 << max(1, (num_pages - 1).bit_length())
    generator = np.random.default_rng()
    return PageIndex(
        keys=generator.integers(0, 1 << 64, 2 * page_size + 2, dtype=np.uint64),
        buckets=np.full(num_buckets, _END, dtype=np.int64),
        following=np.full(num_pages, _END, dtype=np.int64),
        tokens=np.zeros((num_pages, page_size), dtype=np.int64),
        parent=np.full(num_pages, _NOWHERE, dtype=np.int64),
        child=np.zeros(num_pages + 1, dtype=np.int64),
        references=np.zeros(num_pages, dtype=np.int64),
        newer=np.full(num_pages + 1, num_pages, dtype=np.int64),
        older=np.full(num_pages + 1, num_pages, dtype=np.int64),
    )


def warm_up() -> None:
    """Loads the compiled code, or compiles it, which takes seconds: once per machine if a cache can be written."""
    index = new_index(1, 1)
    path, ids = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    match(index, ids, path)
    insert(index, ids, ids, path, 0)
    first_difference(index, ids, path)
    lock(index, path)
    unlock(index, path)
    unlock(index, path)
    evict(index, path)


@compiled_with_gil
def match(index: PageIndex, tokens: Int64Array, path: Int64Array) -> int:
    """Writes the nodes of the longest prefix of ``tokens`` into ``path``, as many as fit; returns how many."""
    page_size = index.tokens.shape[1]
    parent = ROOT
    for depth in range(len(path)):
        page = _find(index, parent, tokens[depth * page_size : (depth + 1) * page_size])
        if page == _END:
            return depth
        path[depth] = parent = page
    return len(path)


@compiled_with_gil
def lock(index: PageIndex, path: Int64Array) -> int:
    """Adds a reference to each node of ``path``; returns how many had none before."""
    woken = 0
    for page in path:
        woken += _refer(index, page)
    return woken


@compiled_with_gil
def unlock(index: PageIndex, path: Int64Array) -> int:
    """Drops a reference to each node of ``path``, which begins at the root; returns how many have none left."""
    idle = 0
    last = len(index.older) - 1
    for page in path[::-1]:
        index.references[page] -= 1
        if index.references[page] == 0:
            newest = index.older[last]
            index.older[page], index.newer[page] = newest, last
            index.newer[newest] = index.older[last] = page
            idle += 1
    return idle


@compiled_with_gil
def first_difference(index: PageIndex, tokens: Int64Array, path: Int64Array) -> int:
    """The first position at which ``tokens`` differ from the tokens of the nodes of ``path``; -1 if there is none."""
    page_size = index.tokens.shape[1]
    for at in range(len(path) * page_size):
        if index.tokens[path[at // page_size], at % page_size] != tokens[at]:
            return at
    return -1


@compiled_with_gil
def insert(index: PageIndex, tokens: Int64Array, pages: Int64Array, path: Int64Array, known: int) -> int:
    """Extends ``path`` beyond its first ``known`` nodes, which are locked, by one node for each further page of tokens.

    If the tree has a node with these tokens, takes that node; else makes the page in ``pages`` a node. Adds a reference
    to each of these nodes. Returns how many of the nodes found had none before.
    """
    page_size = index.tokens.shape[1]
    woken = 0
    for depth in range(known, len(path)):
        parent = path[depth - 1] if depth > 0 else ROOT
        page_tokens = tokens[depth * page_size : (depth + 1) * page_size]
        page = _find(index, parent, page_tokens)
        if page == _END:
            page = pages[depth]
            index.parent[page] = parent
            index.child[parent] = page
            index.tokens[page, :] = page_tokens
            index.references[page] = 1
            bucket = _bucket(index, parent, page_tokens)
            index.following[page] = index.buckets[bucket]
            index.buckets[bucket] = page
        else:
            woken += _refer(index, page)
        path[depth] = page
    return woken


@compiled_with_gil
def evict(index: PageIndex, pages: Int64Array) -> None:
    """Removes the nodes that have been without references for longest, and writes their pages into ``pages``.

    At least ``len(pages)`` nodes must be without references. Fills ``pages`` from its end, so that pages of one
    sequence are in order of position.
    """
    last = len(index.older) - 1
    for at in range(len(pages) - 1, -1, -1):
        page = index.newer[last]
        _leave_ring(index, page)
        bucket = _bucket(index, index.parent[page], index.tokens[page])
        if index.buckets[bucket] == page:
            index.buckets[bucket] = index.following[page]
        else:
            before = index.buckets[bucket]
            while index.following[before] != page:
                before = index.following[before]
            index.following[before] = index.following[page]
        index.parent[page] = _NOWHERE
        pages[at] = page


@compiled_with_gil
def _find(index: PageIndex, parent: int, page_tokens: Int64Array) -> int:
    """The child of ``parent`` with the tokens ``page_tokens``, or `_END`."""
    page: int = index.child[parent]
    if _is(index, page, parent, page_tokens):
        return page
    page = index.buckets[_bucket(index, parent, page_tokens)]
    while page != _END and not _is(index, page, parent, page_tokens):
        page = index.following[page]
    return page


@compiled_with_gil
def _is(index: PageIndex, page: int, parent: int, page_tokens: Int64Array) -> bool:
    """Whether ``page`` is the child of ``parent`` with the tokens ``page_tokens``."""
    if index.parent[page] != parent:
        return False
    at = 0
    while at < len(page_tokens) and index.tokens[page, at] == page_tokens[at]:
        at += 1
    return at == len(page_tokens)


@compiled_with_gil
def _bucket(index: PageIndex, parent: int, page_tokens: Int64Array) -> int:
    # Multilinear hashing: the high bits of a sum of 32-bit halves times secret random multipliers. Any two given pages
    # collide with the probability of two random numbers.
    keys = index.keys
    total = keys[0] + keys[1] * np.uint64(parent + 1)
    for at in range(len(page_tokens)):
        token = np.uint64(page_tokens[at])
        total += keys[2 * at + 2] * (token & _LOW_HALF) + keys[2 * at + 3] * (token >> _HALF)
    bucket: int = np.int64((total >> _HALF) & np.uint64(len(index.buckets) - 1))  # type: ignore[assignment]
    return bucket


@compiled_with_gil
def _refer(index: PageIndex, page: int) -> int:
    """Adds a reference; returns 1 if the node had none before, else 0."""
    index.references[page] += 1
    if index.references[page] > 1:
        return 0
    _leave_ring(index, page)
    return 1


@compiled_with_gil
def _leave_ring(index: PageIndex, page: int) -> None:
    """Takes a node out of the ring of those without references."""
    index.newer[index.older[page]] = index.newer[page]
    index.older[index.newer[page]] = index.older[page]
