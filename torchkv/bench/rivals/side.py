"""What a rival is: a way to move one request's pages, and the two processes that do it."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from torchkv.arrays import Int64Array
from torchkv.bench import gpu, pair
from torchkv.bench.check import count_wrong
from torchkv.bench.rivals.cases import Case
from torchkv.cache import KVCache

__all__ = ["INSTALL", "POISON", "PagedSide", "Rival", "Side", "Spans", "from_reader", "load_error"]

POISON = 0xDD
INSTALL = "not installed; pip install 'torchkv[bench]'"


class Side(ABC):
    """One of a rival's processes.

    counts: whether a move has ended only when this side's part of it has.
    """

    counts = True

    @abstractmethod
    def prepare(self, number: int) -> None:
        """Makes ready for request ``number``, whose bytes and pages follow from its number. Not timed."""

    @abstractmethod
    def move(self) -> None:
        """Moves the request's bytes, or takes part in it. Timed, from the page lists on."""

    @abstractmethod
    def wrong(self) -> int:
        """How many bytes of the request are not where they belong. Not timed."""

    def way(self) -> str:
        """In a word or two, how the bytes went."""
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A way to move pages.

    why_not: why it cannot move pages of a device ("cpu" or "cuda") here, or None. make: (case, bytes, rank) -> this
    rank's `Side`, in a process of its own. ranks: processes. environment: variables of these, by case. backend: of
    their process group.
    """

    name: str
    why_not: Callable[[str], str | None]
    make: Callable[[Case, int, int], Side]
    ranks: int = 2
    backend: str = "gloo"
    environment: Callable[[Case], Mapping[str, str]] = field(default=lambda case: {})


def load_error(module: str) -> str | None:
    """Why an installed module cannot be imported, or None."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        return f"does not load: {error}"
    return None


class PagedSide(Side):
    """A side with pages: rank 0 has the request's bytes, rank 1 gets them.

    cache: its pages. source_ids, target_ids: int64 [pages], the page lists of the request, of rank 0 and of rank 1.
    """

    def __init__(self, case: Case, nbytes: int, rank: int) -> None:
        self.case, self.rank = case, rank
        self.device = torch.device("cpu")
        if case.device == "cuda":
            self.device, _ = gpu.devices(rank)
        self.num_pages = case.num_pages(nbytes)
        self.cache = KVCache.empty(case.layout(rank), self.num_pages, device=self.device)
        self.source_ids: Int64Array = np.arange(self.num_pages)
        self.target_ids: Int64Array = self.source_ids
        self._number = 0
        # What the writer has, to compare with.
        self._expected = KVCache.empty(case.layout(0), self.num_pages, device=self.device) if rank else None

    @property
    def ids(self) -> Int64Array:
        """This rank's page list."""
        return self.target_ids if self.rank else self.source_ids

    def prepare(self, number: int) -> None:
        self._number = number
        rng = np.random.default_rng(number)
        self.source_ids, self.target_ids = rng.permutation(self.num_pages), rng.permutation(self.num_pages)
        if self.rank == 0:
            self._fill(self.cache)
        else:
            for storage in self.cache.storages:
                storage.fill_(POISON)
        self._synchronize()

    def wrong(self) -> int:
        if self._expected is None:
            return 0
        self._fill(self._expected)
        source, target = (torch.from_numpy(ids).to(self.device) for ids in (self.source_ids, self.target_ids))
        return count_wrong(self._expected, self.cache, source, target)

    def _fill(self, cache: KVCache) -> None:
        (pair if self.case.device == "cpu" else gpu).fill(cache, seed=self._number)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Spans:
    """Where pages lie on one side, as spans that one-sided libraries write: one for each page of K or V of each layer.

    Where the reader holds some of the heads, it is one for each token of these. nbytes: of each span. addresses: int64,
    of all spans in the order of layers, K and V, pages, tokens.
    """

    def __init__(self, side: PagedSide) -> None:
        reader = side.case.layout(1)
        self._num_pages = side.num_pages
        self._per_page = 1 if side.case.layout(0).heads == reader.heads else side.case.page_size
        self.nbytes = reader.page_nbytes("k") // self._per_page
        tensors = [side.cache[name][layer] for layer in range(side.case.layers) for name in ("k", "v")]
        first = [tensor for tensor in tensors if tensor is not None]
        assert len(first) == len(tensors)
        # The reader has the first heads, so each of its spans is the beginning of a token, or a whole page.
        bases = np.array([tensor.data_ptr() for tensor in first], dtype=np.int64)
        page, token = (first[0].stride(dim) * first[0].element_size() for dim in (0, 1))
        within = np.arange(self._num_pages)[:, None] * page + np.arange(self._per_page) * token
        self._count = len(bases)
        self.addresses: Int64Array = (bases[:, None, None] + within).reshape(-1)

    def positions(self, ids: Int64Array) -> Int64Array:
        """Of the spans of these pages, in ``addresses``."""
        pages = np.arange(self._count)[:, None] * self._num_pages + ids
        return (pages[:, :, None] * self._per_page + np.arange(self._per_page)).reshape(-1)


def from_reader(data: bytes, numbers: Int64Array) -> tuple[bytes, Int64Array]:
    """Both ranks call it, and get what rank 1 has given: bytes, and numbers of one dimension."""
    sizes = torch.tensor([len(data), len(numbers)])
    dist.broadcast(sizes, 1)
    said, listed = np.zeros(int(sizes[0]), dtype=np.uint8), np.zeros(int(sizes[1]), dtype=np.int64)
    if dist.get_rank() == 1:
        said[:], listed[:] = np.frombuffer(data, dtype=np.uint8), numbers
    dist.broadcast(torch.from_numpy(said), 1)
    dist.broadcast(torch.from_numpy(listed), 1)
    return said.tobytes(), listed
