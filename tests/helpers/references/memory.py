"""What every byte of a rank's pages and slots ought to be, and whether it is: the oracle of simulated runs.

Free pages and slots hold a pattern that only the test wrote. As soon as a lease ends, they get a fresh pattern, as a
new owner would write there; a write that lands later destroys it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tests.helpers.references.page_transfer import GAP, Pool, reference
from tests.helpers.references.state import held_layers, read_bytes
from tests.helpers.simulation.cluster import Cluster, Rank
from torchkv.arrays import Int64Array
from torchkv.layout.layer_groups import PAGES, SLOTS
from torchkv.layout.layout import KVLayout, State

Bytes = npt.NDArray[np.uint8]
Views = dict[tuple[str, int], Bytes]  # (component or state, layer) -> [pages or slots, bytes of one]


def page_bytes(rank: Rank) -> Views:
    """Each (component, layer) of the rank's cache as [num_pages, page bytes], aliasing its memory."""
    return _views(rank, {component.name: rank.cache[component.name] for component in rank.cache.layout.components})


def slot_bytes(rank: Rank) -> Views:
    """Each (state, layer) of the rank's cache as [num_slots, slot bytes], aliasing its memory."""
    return _views(rank, {state.name: rank.cache.state(state.name) for state in rank.cache.layout.states})


def _views(rank: Rank, tensors: Mapping[str, Sequence[torch.Tensor | None]]) -> Views:
    found = {}
    for name, by_layer in tensors.items():
        for layer, tensor in zip(rank.cache.layout.layers, by_layer, strict=True):
            if tensor is not None:
                found[name, layer] = tensor.view(-1).view(dtype=torch.uint8).numpy().reshape(len(tensor), -1)
    return found


def snapshot(rank: Rank) -> Pool:
    """A copy of everything the rank holds, in the form the reference works on."""
    padded = {key: np.pad(pages, ((0, 0), (0, GAP))) for key, pages in page_bytes(rank).items()}
    return Pool(rank.cache.layout, padded)


def slot_snapshot(rank: Rank) -> Views:
    return {key: slots.copy() for key, slots in slot_bytes(rank).items()}


class Released(NamedTuple):
    """Whose lease has ended. Their owner must `Shadow.reuse` them at once."""

    pages: list[int]
    slots: list[int]


class Places:
    """Pages of a rank, or slots: what must be in them while they are free.

    leases: the generation of each now, 0 if it is free. below: what no byte of a pattern reaches.
    """

    def __init__(
        self,
        operation: str,
        memory: Views,
        leases: Callable[[], Int64Array],
        generator: np.random.Generator,
        *,
        below: int = 256,
    ) -> None:
        self.memory = memory
        self._below = below
        self._what = operation
        self._current = leases
        self._generator = generator
        self._leases = leases().copy()
        self.refill(range(len(self._leases)))
        self._expected = {key: array.copy() for key, array in memory.items()}

    def free(self) -> list[int]:
        return np.flatnonzero(self._current() == 0).tolist()

    def released(self) -> dict[int, list[int]]:
        """By generation, since the last call."""
        now = self._current()
        if now.tobytes() == self._leases.tobytes():  # several times as fast as numpy's comparison
            return {}
        before, self._leases = self._leases, now.copy()
        gone: dict[int, list[int]] = {}
        for place in np.flatnonzero((before != 0) & (self._leases != before)).tolist():
            gone.setdefault(int(before[place]), []).append(place)
        return gone

    def refill(self, places: Sequence[int]) -> None:
        for array in self.memory.values():
            shape = len(places), array.shape[1]
            array[list(places)] = self._generator.integers(0, self._below, shape, dtype=np.uint8)

    def reuse(self, places: Sequence[int]) -> None:
        self.refill(places)
        for key, array in self.memory.items():
            self._expected[key][list(places)] = array[list(places)]

    def problems(self) -> list[str]:
        """What is free and does not hold what only the test wrote."""
        free = self.free()
        found = []
        for key, array in self.memory.items():
            wrong = (array[free] != self._expected[key][free]).any(axis=1)
            for place in np.array(free, dtype=np.int64)[wrong].tolist():
                found.append(f"{self._what} {place} {key}: free, but written to")
        return found


class Shadow:
    """One rank's pages and slots: whose they are, and what must be in them while they are free.

    numbers: whether pages are to hold numbers of any floating dtype, none of them NaN, whose bits may change when it is
    converted.
    """

    def __init__(self, rank: Rank, generator: np.random.Generator, *, numbers: bool = False) -> None:
        self.rank = rank
        self.problems: list[str] = []
        leases = rank.engine.receiver.leases
        self._pages = Places(
            "page", page_bytes(rank), lambda: leases.marks(PAGES), generator, below=0x7C if numbers else 256
        )
        self._slots = Places("slot", slot_bytes(rank), lambda: leases.marks(SLOTS), generator)

    def free(self) -> list[int]:
        """Pages that no lease holds."""
        return self._pages.free()

    def free_slots(self) -> list[int]:
        """State slots that no lease holds."""
        return self._slots.free()

    def released(self) -> dict[int, Released]:
        """Generation -> what of it has been released since the last call."""
        pages, slots = self._pages.released(), self._slots.released()
        return {
            generation: Released(pages.get(generation, []), slots.get(generation, [])) for generation in pages | slots
        }

    def reuse(self, pages: Sequence[int], slots: Sequence[int] = ()) -> None:
        """They have a new owner, who writes to them now."""
        self._pages.reuse(pages)
        self._slots.reuse(slots)

    def check_free(self, when: str) -> None:
        """Nothing but the test has written to free pages and slots."""
        for problem in self._pages.problems() + self._slots.problems():
            self.problems.append(f"{when}: rank {self.rank.rank} {problem}")

    def check_received(
        self,
        operation: str,
        before: Pool,
        pages: Sequence[int],
        sources: Mapping[int, Pool],
        src_pages: Mapping[int, Sequence[int]],
    ) -> None:
        """``pages`` hold exactly what the reference says, and beyond the coverage what they held before."""
        want = reference(sources, src_pages, before, pages, self.rank.cache.scales._values)
        for key, array in self._pages.memory.items():
            wrong = int((array[list(pages)] != want.tensors[key][list(pages), :-GAP]).sum())
            if wrong:
                self.problems.append(f"{operation} on rank {self.rank.rank}: {wrong} wrong bytes in {key}")

    def check_state(
        self, operation: str, slot: int, sources: Mapping[int, tuple[KVLayout, Views, int]], layers: Sequence[int]
    ) -> None:
        """Of each byte of these layers' state, ``slot`` holds what a rank that has it sent.

        sources: rank -> its layout, its slots, and which of them it sent.
        """
        layout = self.rank.cache.layout
        for (name, layer), array in self._slots.memory.items():
            if layer not in layers:
                continue
            state = layout.state(name)
            wanted, right = _read_bytes(layout, state), np.zeros(array.shape[1], dtype=bool)
            for theirs, slots, sent in sources.values():
                if layer in held_layers(theirs, state):
                    values = dict(
                        zip(_read_bytes(theirs, state).tolist(), slots[name, layer][sent].tolist(), strict=True)
                    )
                    right |= np.array([values.get(at, -1) for at in wanted.tolist()]) == array[slot]
            if not right.all():
                self.problems.append(
                    f"{operation} on rank {self.rank.rank}: {(~right).sum()} wrong bytes in {name, layer}"
                )


@cache
def _read_bytes(layout: KVLayout, state: State) -> Int64Array:
    return read_bytes(layout, state)


def guarded(cluster: Cluster, rank: int) -> Shadow:
    """A shadow that gives each page and slot a new owner as soon as its lease ends."""
    memory = Shadow(cluster[rank], np.random.default_rng())

    def reuse(stepped: Rank) -> None:
        if stepped.rank == rank:
            for released in memory.released().values():
                memory.reuse(*released)

    cluster.observers.append(reuse)
    return memory
