"""What every byte of a rank's pools ought to be, and whether it is: the oracle of simulated runs.

Free pages hold a pattern that only the test wrote. As soon as a lease ends, the pages get a fresh pattern, as a new
owner would write there; a write that lands later destroys it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from oracle import GAP, Pool, reference
from simulation import Rank

Bytes = npt.NDArray[np.uint8]


def page_bytes(rank: Rank) -> dict[tuple[str, int], Bytes]:
    """Each (component, layer) of the rank's cache as [num_pages, page bytes], aliasing its memory."""
    cache = rank.cache
    found = {}
    for component in cache.layout.components:
        for layer, tensor in zip(cache.layout.layers, cache[component.name], strict=True):
            if tensor is not None:
                whole = tensor.view(-1).view(dtype=torch.uint8).numpy()
                found[component.name, layer] = whole.reshape(cache.num_pages, -1)
    return found


def snapshot(rank: Rank) -> Pool:
    """A copy of everything the rank holds, in the form the reference works on."""
    padded = {key: np.pad(pages, ((0, 0), (0, GAP))) for key, pages in page_bytes(rank).items()}
    return Pool(rank.cache.layout, padded)


class Shadow:
    """One rank's pools, page by page: whose they are, and what must be in them while they are free."""

    def __init__(self, rank: Rank, generator: np.random.Generator) -> None:
        self.rank = rank
        self.problems: list[str] = []
        self._generator = generator
        self._memory = page_bytes(rank)
        self._leases = self._current()
        self.refill(range(rank.cache.num_pages))
        self._expected = {key: pages.copy() for key, pages in self._memory.items()}

    def free(self) -> list[int]:
        """Pages that no lease holds."""
        return np.flatnonzero(self._current() == 0).tolist()

    def released(self) -> dict[int, list[int]]:
        """Generation -> pages whose lease has ended since the last call. Their owner must `reuse` them at once."""
        if np.array_equal(self._leases, self.rank.engine.receiver._leases):
            return {}
        before, self._leases = self._leases, self._current()
        gone: dict[int, list[int]] = {}
        for page in np.flatnonzero((before != 0) & (self._leases != before)).tolist():
            gone.setdefault(int(before[page]), []).append(page)
        return gone

    def refill(self, pages: Sequence[int]) -> None:
        """Fresh random bytes, as a new owner would write."""
        for array in self._memory.values():
            array[list(pages)] = self._generator.integers(0, 256, (len(pages), array.shape[1]), dtype=np.uint8)

    def reuse(self, pages: Sequence[int]) -> None:
        """The pages have a new owner, who writes to them now."""
        self.refill(pages)
        for key, array in self._memory.items():
            self._expected[key][list(pages)] = array[list(pages)]

    def check_free(self, when: str) -> None:
        """Nothing but the test has written to free pages."""
        free = self.free()
        for key, array in self._memory.items():
            wrong = (array[free] != self._expected[key][free]).any(axis=1)
            for page in np.array(free, dtype=np.int64)[wrong].tolist():
                self.problems.append(f"{when}: rank {self.rank.rank} page {page} {key}: free, but written to")

    def check_received(
        self,
        what: str,
        before: Pool,
        pages: Sequence[int],
        sources: Mapping[int, Pool],
        src_pages: Mapping[int, Sequence[int]],
    ) -> None:
        """``pages`` hold exactly what the reference says, and beyond the coverage what they held before."""
        want = reference(sources, src_pages, before, pages)
        for key, array in self._memory.items():
            wrong = int((array[list(pages)] != want.tensors[key][list(pages), :-GAP]).sum())
            if wrong:
                self.problems.append(f"{what} on rank {self.rank.rank}: {wrong} wrong bytes in {key}")

    def _current(self) -> npt.NDArray[np.int64]:
        leases: npt.NDArray[np.int64] = self.rank.engine.receiver._leases.copy()
        return leases
