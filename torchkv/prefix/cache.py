"""Which prompts a receiver holds already: token ids -> pages of its own pool, shared between requests."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from torchkv import prefixindex
from torchkv.errors import KVError, PageOutOfRange, ProtocolError
from torchkv.transport import Int64Array

__all__ = ["Held", "PrefixCache", "Tokens"]

Tokens = Sequence[int] | npt.NDArray[np.integer] | torch.Tensor

MAX_PAGES = 1 << 31


class Held:
    """The pages of one request: those of the prefix it shares, then its own. Made by `PrefixCache.match`.

    num_tokens: of the shared prefix; what ``recv_pages(prefix_tokens=)`` takes.
    pages: ids, int64 [n], in order of position.
    """

    __slots__ = ("_cache", "_nodes", "_received", "num_tokens", "pages")

    def __init__(self, cache: PrefixCache, pages: Int64Array, num_tokens: int) -> None:
        self.pages = pages
        self.num_tokens = num_tokens
        self._cache: PrefixCache | None = cache  # None once released
        self._nodes = pages  # for each position known to the index, the page there: often, not always, the own one
        self._received = False  # the prompt is here: what follows is computed here

    def __repr__(self) -> str:
        state = "released" if self._cache is None else f"{len(self.pages)} pages"
        return f"Held({state}, num_tokens={self.num_tokens})"

    def _private(self) -> Int64Array:
        """The pages that are in no index."""
        private = np.ones(len(self.pages), dtype=np.bool_)
        private[: len(self._nodes)] = self.pages[: len(self._nodes)] != self._nodes
        own: Int64Array = self.pages[private]
        return own


class PrefixCache:
    """A page-granular index of prefixes, and the owner of the pages it indexes: ids 0 to ``num_pages - 1``.

    num_pages: of the `KVCache`. page_size: tokens a page. align: matches come in multiples of so many tokens, for
    writers whose pages are larger than the receiver's own (default ``page_size``). window: the largest of the layout's
    sliding windows, in tokens; of a prompt only its last pages then hold all layers, so matches end only where the
    window behind them is whole. Every rank of an instance has one of its own and must come to the same prefix, or the
    request fails: give all of them the same calls in one order.

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

    Memory is never shared on the word of a hash: token ids are compared. Whoever puts something else than token ids
    into a sequence (images, adapters) must give it ids of its own. All methods are thread-safe, and brief.
    """

    def __init__(self, num_pages: int, page_size: int, *, align: int | None = None, window: int | None = None) -> None:
        """Raises ``ProtocolError`` for sizes that make no sense. Takes seconds where nothing is compiled yet."""
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
        self._whole = np.ones(num_pages, dtype=np.bool_)  # pages of the index that hold layers with windows too
        prefixindex.warm_up()  # not in the first request
        self._lock = threading.Lock()
        self._index = prefixindex.new_index(num_pages, page_size)
        # A stack; from its top, ascending ids, so that fresh pages lie side by side as long as they can.
        self._free: Int64Array = np.arange(num_pages - 1, -1, -1, dtype=np.int64)
        self._num_free = num_pages
        self._num_idle = 0  # in the index, and held by nobody
        self._withheld: list[tuple[KVError, Int64Array]] = []

    # ------------------------------------------------------------------ a request, from its beginning to its end

    def match(self, tokens: Tokens) -> Held:
        """Finds the longest known prefix of ``tokens`` and holds its pages until `release`.

        tokens: ids, any integers of 64 bits, in one dimension. Raises ``ProtocolError`` for anything else.
        """
        ids = _as_tokens(tokens, "match")
        path: Int64Array = np.empty(len(ids) // self.page_size, dtype=np.int64)
        with self._lock:
            found = prefixindex.match(self._index, ids, path)
            num_tokens = self._usable(path[:found])
            pages = path[: num_tokens // self.page_size].copy()
            self._num_idle -= prefixindex.lock(self._index, pages)
        return Held(self, pages, num_tokens)

    def allocate(self, held: Held, num_pages: int) -> Int64Array:
        """Appends fresh pages to ``held`` and returns their ids, int64 [num_pages].

        Where free ones do not suffice, the least recently used prefixes go, from their ends; never a page that some
        request holds, nor one of a failed request that may still be written to. Raises ``PageOutOfRange`` if too few
        remain (retryable: a release may help), with nothing changed.
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
            prefixindex.evict(self._index, fresh[at_hand:])
            self._num_free -= at_hand
            self._num_idle -= num_pages - at_hand
            held.pages = np.concatenate([held.pages, fresh])
        return fresh

    def insert(self, held: Held, tokens: Tokens) -> int:
        """Makes the whole pages of ``held`` known as those of ``tokens``; returns how many tokens of it are known now.

        Call it when the bytes are there, first with the prompt, then as often as the sequence grows. ``tokens``: from
        the first one on, with as many pages in ``held``. Pages that another request has inserted meanwhile stay what
        they are, and so do the pages of ``held``. Raises ``ProtocolError`` if ``held`` was matched or inserted with
        other tokens.
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
            at = prefixindex.first_difference(self._index, ids, held._nodes[:known])
            if at >= 0:
                raise ProtocolError(
                    f"insert: token {int(ids[at])} at position {at} is not the one that page {at // self.page_size} "
                    f"of this request was matched or inserted with; give the tokens of the same request"
                )
            if count > known:
                nodes: Int64Array = np.empty(count, dtype=np.int64)
                nodes[:known] = held._nodes
                self._num_idle -= prefixindex.insert(self._index, ids, held.pages, nodes, known)
                self._note_whole(held, nodes, len(ids))
                held._nodes = nodes
            held._received = True
            return len(held._nodes) * self.page_size

    def release(self, held: Held, error: KVError | None = None) -> None:
        """Ends ``held``: pages that are known may be evicted from now on, the others are free.

        error: of a failed receive into its pages. They are then kept out until ``error.pages_safe`` says that no
        write can land on them any more; `allocate` looks. Raises ``ProtocolError`` if released already.
        """
        with self._lock:
            self._check(held, "release")
            held._cache = None
            self._num_idle += prefixindex.unlock(self._index, held._nodes)
            private = held._private()
            if error is None or error.pages_safe:
                self._put_back(private)
            elif len(private):
                self._withheld.append((error, private))

    # ------------------------------------------------------------------ windows

    def _usable(self, path: Int64Array) -> int:
        """Tokens of the longest match among the known pages ``path``."""
        unit = self.align // self.page_size
        count = len(path) // unit * unit
        if self.window is not None:
            behind = -(-self.window // self.page_size)
            whole = self._whole[path]
            # Where the last page behind a match that is not whole may be the match's end at best.
            while count and len(gaps := np.flatnonzero(~whole[max(0, count - behind) : count])):
                count = (max(0, count - behind) + int(gaps[-1])) // unit * unit
        return count * self.page_size

    def _note_whole(self, held: Held, nodes: Int64Array, num_tokens: int) -> None:
        """Which of the pages that become known hold everything: the window's, and what was computed here later on."""
        if self.window is None:
            return
        first = 0 if held._received else max(0, num_tokens - self.window) // self.page_size
        positions = np.arange(len(held._nodes), len(nodes))
        own = nodes[positions] == held.pages[positions]
        self._whole[nodes[positions[own]]] = positions[own] >= first

    # ------------------------------------------------------------------ how full it is

    @property
    def available(self) -> int:
        """Pages that `allocate` would find now: free ones, and known ones that nobody holds."""
        with self._lock:
            self._reclaim()
            return self._num_free + self._num_idle

    @property
    def withheld(self) -> int:
        """Pages of failed requests that may still be written to."""
        with self._lock:
            self._reclaim()
            return self._num_withheld()

    # ------------------------------------------------------------------ inside

    def _check(self, held: Held, verb: str) -> None:
        if held._cache is None:
            raise ProtocolError(f"{verb}: these pages were released already; match() again for another request")
        if held._cache is not self:
            raise ProtocolError(f"{verb}: these pages belong to another PrefixCache; use the one that matched them")

    def _reclaim(self) -> None:
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
    """Token ids as an int64 array [n], contiguous. Raises ``ProtocolError``."""
    ids: npt.NDArray[np.integer]
    try:
        if isinstance(tokens, torch.Tensor):
            ids = tokens.detach().numpy()
        elif isinstance(tokens, np.ndarray):
            ids = tokens
        else:
            ids = np.frombuffer(array("q", tokens), dtype=np.int64) if len(tokens) else np.empty(0, dtype=np.int64)
    except (TypeError, OverflowError) as error:
        raise ProtocolError(f"{verb}: tokens that are no integers of 64 bits in host memory: {error}") from error
    if ids.ndim != 1 or not np.can_cast(ids.dtype, np.int64):
        raise ProtocolError(
            f"{verb}: tokens of dtype {ids.dtype} and shape {ids.shape}; give integers in one dimension"
        )
    return np.require(ids, dtype=np.int64, requirements=("C", "A", "W"))  # what the machine code is made for
