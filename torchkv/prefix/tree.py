"""Which page holds which tokens behind which other page: a tree of pages in flat arrays, walked by compiled code.

A node of the tree is a page, and its number is the page's id. It knows its tokens and its parent, the page before it in
the sequence; the way down goes through the child that came last, which lies nearby in memory, or else through one hash
table for all nodes. Either only says where to look: parent and tokens are compared one by one.

Nodes without references lie on a ring, the longest unused first. A reference to a node comes with one to every node
above it, and leaves the deepest first, so on the ring children come before their parents: the oldest is always a leaf.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchkv.compiled import compiled_with_gil
from torchkv.transport import Int64Array

__all__ = ["PageIndex", "evict", "first_difference", "insert", "lock", "match", "new_index", "unlock", "warm_up"]

UInt64Array = npt.NDArray[np.uint64]

ROOT = -1  # the parent of a sequence's first page
_END = -1  # of a bucket
_NOWHERE = -2  # the parent of a page that is no node
_LOW_HALF = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


class PageIndex(NamedTuple):
    """The arrays. All but ``keys`` and ``buckets`` have a row a page; a page that is no node has only ``parent``."""

    keys: UInt64Array  # secret random multipliers of the hash, [2 * page_size + 2]
    buckets: Int64Array  # first node of each bucket, [a power of two]
    following: Int64Array  # the next node in the same bucket
    tokens: Int64Array  # [num_pages, page_size]
    parent: Int64Array
    child: Int64Array  # the one inserted last, which may have left since; [num_pages + 1], the last row is the root's
    references: Int64Array
    newer: Int64Array  # the ring, [num_pages + 1]: its last row is where it begins and ends
    older: Int64Array


def new_index(num_pages: int, page_size: int) -> PageIndex:
    """An index without nodes. Its hash is unlike that of any other one: nobody can prepare prompts that collide."""
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
    """Loads the compiled code, or compiles it (seconds, once per machine where a cache can be written)."""
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
    """Writes the nodes of the longest known prefix into ``path``, at most as many as fit; returns how many."""
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
    """One more reference to each node of ``path``; returns how many had none."""
    woken = 0
    for page in path:
        woken += _refer(index, page)
    return woken


@compiled_with_gil
def unlock(index: PageIndex, path: Int64Array) -> int:
    """One reference less to each node of ``path``, which begins at the top; returns how many have none left."""
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
    """The first position at which ``tokens`` are not those of the nodes of ``path``, or -1."""
    page_size = index.tokens.shape[1]
    for at in range(len(path) * page_size):
        if index.tokens[path[at // page_size], at % page_size] != tokens[at]:
            return at
    return -1


@compiled_with_gil
def insert(index: PageIndex, tokens: Int64Array, pages: Int64Array, path: Int64Array, known: int) -> int:
    """Completes ``path``, whose first ``known`` nodes are locked, with one locked node for each further page.

    Where a node holds these tokens already, that node; else the page in ``pages`` becomes one. Returns how many of
    the nodes found had no reference.
    """
    page_size = index.tokens.shape[1]
    woken = 0
    for depth in range(known, len(path)):
        parent = path[depth - 1] if depth > 0 else ROOT
        run = tokens[depth * page_size : (depth + 1) * page_size]
        page = _find(index, parent, run)
        if page == _END:
            page = pages[depth]
            index.parent[page] = parent
            index.child[parent] = page
            index.tokens[page, :] = run
            index.references[page] = 1
            bucket = _bucket(index, parent, run)
            index.following[page] = index.buckets[bucket]
            index.buckets[bucket] = page
        else:
            woken += _refer(index, page)
        path[depth] = page
    return woken


@compiled_with_gil
def evict(index: PageIndex, pages: Int64Array) -> None:
    """Takes the longest unused nodes out, as many as ``pages`` has room for; that many must be without references.

    Fills ``pages`` from its end, so that pages of one sequence come out in order of position.
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
def _find(index: PageIndex, parent: int, run: Int64Array) -> int:
    page: int = index.child[parent]
    if _is(index, page, parent, run):
        return page
    page = index.buckets[_bucket(index, parent, run)]
    while page != _END and not _is(index, page, parent, run):
        page = index.following[page]
    return page


@compiled_with_gil
def _is(index: PageIndex, page: int, parent: int, run: Int64Array) -> bool:
    if index.parent[page] != parent:
        return False
    at = 0
    while at < len(run) and index.tokens[page, at] == run[at]:
        at += 1
    return at == len(run)


@compiled_with_gil
def _bucket(index: PageIndex, parent: int, run: Int64Array) -> int:
    # A sum of 32-bit halves times secret multipliers, of which the high bits count: for any two pages, known to
    # whoever chooses them, the chance to meet is that of random numbers.
    keys = index.keys
    total = keys[0] + keys[1] * np.uint64(parent + 1)
    for at in range(len(run)):
        token = np.uint64(run[at])
        total += keys[2 * at + 2] * (token & _LOW_HALF) + keys[2 * at + 3] * (token >> _HALF)
    bucket: int = np.int64((total >> _HALF) & np.uint64(len(index.buckets) - 1))  # type: ignore[assignment]
    return bucket


@compiled_with_gil
def _refer(index: PageIndex, page: int) -> int:
    index.references[page] += 1
    if index.references[page] > 1:
        return 0
    _leave_ring(index, page)
    return 1


@compiled_with_gil
def _leave_ring(index: PageIndex, page: int) -> None:
    index.newer[index.older[page]] = index.newer[page]
    index.older[index.newer[page]] = index.older[page]
