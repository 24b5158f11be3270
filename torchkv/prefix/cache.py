"""`PrefixCache`: finds the longest prefix of a prompt whose pages a receiver holds already, and owns those pages.

Prefixes are shared between requests, page by page. The index itself is in `torchkv.prefix.tree`.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from torchkv.arrays import Int64Array
from torchkv.errors import KVError, PageOutOfRange, ProtocolError
from torchkv.prefix import tree

__all__ = ["Held", "PrefixCache", "Tokens"]

Tokens = Sequence[int] | npt.NDArray[np.integer] | torch.Tensor

MAX_PAGES = 1 << 31


class Held:
    """The pages of one request: first those of the prefix that it shares, then its own. Made by `PrefixCache.match`.

    num_tokens: of the shared prefix; the ``prefix_tokens`` of ``recv_pages``. pages: page ids, int64 ``[n]``, in order
    of their tokens.
    """

    __slots__ = ("_cache", "_nodes", "_received", "num_tokens", "pages")

    def __init__(self, cache: PrefixCache, pages: Int64Array, num_tokens: int) -> None:
        self.pages = pages
        self.num_tokens = num_tokens
        self._cache: PrefixCache | None = cache  # None once released
        # For each page of this request that is in the index: the page that the index has there. It is another page than
        # the request's own if another request inserted the same tokens first.
        self._nodes = pages
        self._received = False  # whether the prompt was inserted; tokens after it are computed by this rank

    def __repr__(self) -> str:
        state = "released" if self._cache is None else f"{len(self.pages)} pages"
        return f"Held({state}, num_tokens={self.num_tokens})"

    def _private(self) -> Int64Array:
        """Those pages that are not in the index."""
        private = np.ones(len(self.pages), dtype=np.bool_)
        private[: len(self._nodes)] = self.pages[: len(self._nodes)] != self._nodes
        own: Int64Array = self.pages[private]
        return own


class PrefixCache:
    """An index from token ids to pages, which allocates and owns the page ids 0 to ``num_pages - 1``.

    num_pages: of the `KVCache`. page_size: tokens per page. align: matches are multiples of so many tokens; needed if
    the writers' pages are larger than the receiver's (default ``page_size``). window: the largest sliding window of the
    layout, in tokens. Of a received prompt only the last pages then hold all layers, so a match ends only where all
    pages inside the window before its end do. Every rank of an instance has its own PrefixCache. All of them must find
    the same prefix, or the request fails: make the same calls in the same order on each.

        held = prefixes.match(prompt)
        try:
            fresh = prefixes.allocate(held, pages_for(len(prompt)) - len(held.pages))
            kv.recv_pages(request, fresh, "prefill", prefix_tokens=held.num_tokens).wait()
            prefixes.insert(held, prompt)
        except torchkv.KVError as error:
            prefixes.release(held, error)
            raise
        ...                            # decode; `allocate` and `insert` again as the sequence grows
        prefixes.release(held)

    A hash never decides whether pages are shared: the token ids are compared. Content other than token ids that affects
    the cache (images, adapters) must be given token ids of its own. All methods are thread-safe and short.
    """

    def __init__(self, num_pages: int, page_size: int, *, align: int | None = None, window: int | None = None) -> None:
        """Raises ``ProtocolError`` for sizes that are not allowed. Takes seconds if the index is not compiled yet."""
        if not 1 <= num_pages < MAX_PAGES or page_size < 1:
            raise ProtocolError(
                f"PrefixCache: num_pages={num_pages} and page_size={page_size} must be at least 1, "
                f"and num_pages below {MAX_PAGES}"
            )
        align = page_size if align is None else align
        if align < 1 or align % page_size:
            raise ProtocolError(f"PrefixCache: align={align} must be a multiple of page_size={page_size}")
        if window is not None and window < 1:
            raise ProtocolError(f"PrefixCache: window={window} must be at least 1 token; leave it out if there is none")
        self.num_pages = num_pages
        self.page_size = page_size
        self.align = align
        self.window = window
        # For each page in the index: whether it holds all layers, including those with windows.
        self._whole = np.ones(num_pages, dtype=np.bool_)
        tree.warm_up()  # here, so that the first request need not wait for it
        self._lock = threading.Lock()
        self._index = tree.new_index(num_pages, page_size)
        # A stack, with the lowest id on top, so that fresh pages have consecutive ids if possible.
        self._free: Int64Array = np.arange(num_pages - 1, -1, -1, dtype=np.int64)
        self._num_free = num_pages
        self._num_idle = 0  # pages in the index that no request holds
        self._withheld: list[tuple[KVError, Int64Array]] = []  # pages of failed requests, until they may be reused

    # ------------------------------------------------------------------ the steps of a request

    def match(self, tokens: Tokens) -> Held:
        """Finds the longest prefix of ``tokens`` in the index and holds its pages until `release`.

        tokens: one-dimensional, of integers that fit into int64. Raises ``ProtocolError`` for anything else.
        """
        ids = _as_tokens(tokens, "match")
        path: Int64Array = np.empty(len(ids) // self.page_size, dtype=np.int64)
        with self._lock:
            found = tree.match(self._index, ids, path)
            num_tokens = self._usable(path[:found])
            pages = path[: num_tokens // self.page_size].copy()
            self._num_idle -= tree.lock(self._index, pages)
        return Held(self, pages, num_tokens)

    def allocate(self, held: Held, num_pages: int) -> Int64Array:
        """Appends fresh pages to ``held`` and returns their ids, int64 ``[num_pages]``.

        If there are too few free pages, evicts the least recently used prefixes, from their ends. Never takes a page
        that a request holds, nor a page of a failed request that may still be written to. If too few pages remain,
        changes nothing and raises ``PageOutOfRange``, which is retryable: a release may help.
        """
        if num_pages < 0:
            raise ProtocolError(f"allocate: num_pages={num_pages} must be at least 0")
        with self._lock:
            self._check(held, "allocate")
            self._reclaim()
            if num_pages > self._num_free + self._num_idle:
                raise PageOutOfRange(self._exhausted(num_pages), retryable=num_pages <= self.num_pages)
            fresh: Int64Array = np.empty(num_pages, dtype=np.int64)
            at_hand = min(num_pages, self._num_free)
            fresh[:at_hand] = self._free[self._num_free - at_hand : self._num_free][::-1]
            tree.evict(self._index, fresh[at_hand:])
            self._num_free -= at_hand
            self._num_idle -= num_pages - at_hand
            held.pages = np.concatenate([held.pages, fresh])
        return fresh

    def insert(self, held: Held, tokens: Tokens) -> int:
        """Adds the full pages of ``held`` to the index, as those of ``tokens``; returns how many tokens are indexed.

        Call it when the bytes are there: first with the prompt, then whenever the sequence has grown. tokens: of the
        whole sequence, from its first token on; ``held`` must have pages for all of them. If another request has
        inserted some of these tokens meanwhile, the index keeps its pages, and ``held`` keeps its own. Raises
        ``ProtocolError`` if ``held`` was matched or inserted with other tokens.
        """
        ids = _as_tokens(tokens, "insert")
        count = len(ids) // self.page_size
        with self._lock:
            self._check(held, "insert")
            if count > len(held.pages):
                raise ProtocolError(
                    f"insert: {len(ids)} tokens fill {count} pages of {self.page_size}, but only {len(held.pages)} "
                    f"are held; allocate pages for all tokens, and wait until they are filled"
                )
            known = min(count, len(held._nodes))
            at = tree.first_difference(self._index, ids, held._nodes[:known])
            if at >= 0:
                raise ProtocolError(
                    f"insert: token {int(ids[at])} at position {at} is not the one that page {at // self.page_size} "
                    f"of this request was matched or inserted with; give the tokens of the same request"
                )
            if count > known:
                nodes: Int64Array = np.empty(count, dtype=np.int64)
                nodes[:known] = held._nodes
                self._num_idle -= tree.insert(self._index, ids, held.pages, nodes, known)
                self._note_whole(held, nodes, len(ids))
                held._nodes = nodes
            held._received = True
            return len(held._nodes) * self.page_size

    def release(self, held: Held, error: KVError | None = None) -> None:
        """Ends ``held``. Its pages in the index may be evicted from now on; its other pages are free.

        error: of a failed receive into these pages. Those not in the index are then withheld until ``error.pages_safe``
        is true, that is until no write can reach them any more; `allocate` checks this. Raises ``ProtocolError`` if
        ``held`` was released before.
        """
        with self._lock:
            self._check(held, "release")
            held._cache = None
            self._num_idle += tree.unlock(self._index, held._nodes)
            private = held._private()
            if error is None or error.pages_safe:
                self._put_back(private)
            elif len(private):
                self._withheld.append((error, private))

    # ------------------------------------------------------------------ windows

    def _usable(self, path: Int64Array) -> int:
        """Tokens of the longest allowed match. path: the pages found in the index, from the first token on."""
        unit = self.align // self.page_size
        count = len(path) // unit * unit
        if self.window is not None:
            behind = -(-self.window // self.page_size)
            whole = self._whole[path]
            # If a page inside the window is not whole, the match can at best end where that page begins.
            while count and len(gaps := np.flatnonzero(~whole[max(0, count - behind) : count])):
                count = (max(0, count - behind) + int(gaps[-1])) // unit * unit
        return count * self.page_size

    def _note_whole(self, held: Held, nodes: Int64Array, num_tokens: int) -> None:
        """Notes which new pages of the index hold all layers: those inside the window, and those computed here."""
        if self.window is None:
            return
        first = 0 if held._received else max(0, num_tokens - self.window) // self.page_size
        positions = np.arange(len(held._nodes), len(nodes))
        own = nodes[positions] == held.pages[positions]
        self._whole[nodes[positions[own]]] = positions[own] >= first

    # ------------------------------------------------------------------ how full it is

    @property
    def available(self) -> int:
        """Pages that `allocate` can take now: free pages, and pages in the index that no request holds."""
        with self._lock:
            self._reclaim()
            return self._num_free + self._num_idle

    @property
    def withheld(self) -> int:
        """Pages of failed requests that may still be written to."""
        with self._lock:
            self._reclaim()
            return self._num_withheld()

    # ------------------------------------------------------------------ internals

    def _check(self, held: Held, verb: str) -> None:
        if held._cache is None:
            raise ProtocolError(f"{verb}: these pages were released already; match() again for another request")
        if held._cache is not self:
            raise ProtocolError(f"{verb}: these pages belong to another PrefixCache; use the one that matched them")

    def _reclaim(self) -> None:
        """Frees the withheld pages that have become safe."""
        waiting, self._withheld = self._withheld, []
        for error, pages in waiting:
            if error.pages_safe:
                self._put_back(pages)
            else:
                self._withheld.append((error, pages))

    def _put_back(self, pages: Int64Array) -> None:
        self._free[self._num_free : self._num_free + len(pages)] = pages[::-1]
        self._num_free += len(pages)

    def _num_withheld(self) -> int:
        return sum(len(pages) for _, pages in self._withheld)

    def _exhausted(self, wanted: int) -> str:
        usable, withheld = self._num_free + self._num_idle, self._num_withheld()
        held = self.num_pages - usable - withheld
        return (
            f"allocate: {wanted} pages wanted, but of {self.num_pages} only {usable} are free or evictable: {held} are "
            f"held by requests, {withheld} withheld for failed ones that may still be written to; release requests, "
            f"wait for cancel() of the failed ones, or make the pool larger"
        )


def _as_tokens(tokens: Tokens, verb: str) -> Int64Array:
    """Token ids as a contiguous int64 array ``[n]``. Raises ``ProtocolError``."""
    ids: npt.NDArray[np.integer]
    try:
        if isinstance(tokens, torch.Tensor):
            ids = tokens.detach().numpy()
        elif isinstance(tokens, np.ndarray):
            ids = tokens
        else:
            ids = np.frombuffer(array("q", tokens), dtype=np.int64) if len(tokens) else np.empty(0, dtype=np.int64)
    except (TypeError, OverflowError) as error:
        raise ProtocolError(f"{verb}: tokens must be integers of 64 bits in host memory: {error}") from error
    if ids.ndim != 1 or not np.can_cast(ids.dtype, np.int64):
        raise ProtocolError(
            f"{verb}: tokens of dtype {ids.dtype} and shape {ids.shape}; give integers in one dimension"
        )
    return np.require(ids, dtype=np.int64, requirements=("C", "A", "W"))  # as the compiled code expects
