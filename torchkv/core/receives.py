"""The requests that one rank receives, on its resident loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.core import posting, steering
from torchkv.core.loop import loop, receiving
from torchkv.core.loop.codes import DONE, FREE, GRANT, POSTED, SUCCEEDED
from torchkv.core.loop.limits import MAX_AUX, MAX_FLOWS, MAX_INTERVALS, MAX_PEERS, MAX_WRITERS
from torchkv.core.loop.state.requests import Writer
from torchkv.core.loop.state.world import receive_word_at, word_at

if TYPE_CHECKING:
    from torchkv.core.peers import LoopPeers
    from torchkv.core.runner import Runner

__all__ = ["Pieces", "ReceiveState", "Receives", "Source", "WriterState", "with_slot"]

_WRITER = list(Writer.__annotations__)
_LAYERS, _STATES, _SEALED, _AUX_NBYTES, _RING_ONLY = (
    _WRITER.index(name) for name in ("layers", "states", "sealed", "aux_nbytes", "ring_only")
)
_STATE, _RECEIVED, _NUM_WRITERS, _UNPACKS, _PIECES, _UNPACKING, _WRITERS = (
    receive_word_at(name) for name in ("state", "nbytes", "num_writers", "unpacks", "pieces", "unpacking", "writers")
)
_NETWORK, _DRIVING = (word_at(name) // 8 for name in ("network", "driving"))


@dataclass(slots=True)
class WriterState:
    """intervals: of tokens that have arrived, per layer that it owes. states: of each whose state it owes, whether that
    has arrived. sealed: pages of its seal; None before it.

    ring_only: whether it has promised to write to the staging ring only.
    """

    intervals: list[list[tuple[int, int]]]
    states: list[bool]
    sealed: int | None
    aux: bytes
    ring_only: bool


@dataclass(slots=True)
class ReceiveState:
    """What the loop knows of a receive, and of each of its writers. staged: whether it has unpacked any of it."""

    nbytes: int
    staged: bool
    writers: list[WriterState]


class Pieces:
    """How the pieces of a writer are unpacked. geometry: of the plan. kernels: its pack table, on a GPU.

    addresses: of both, which must stay alive.
    """

    def __init__(self, geometry: Int64Array, kernels: Int64Array | None = None) -> None:
        self._kept = geometry, kernels
        self.addresses = geometry.ctypes.data, 0 if kernels is None else kernels.ctypes.data


@dataclass(slots=True)
class Source:
    """A writer, as receives from it alone know it. slot: its number on the loop.

    layers: that it owes. states: layers whose state it owes. page_size, writer_page: of this rank's pages and of its
    own, in tokens. writers: its bit in grants. network: whether the transport must be driven to hear it. pieces: if it
    may stage.
    """

    slot: int
    layers: int
    states: int
    page_size: int
    writer_page: int
    writers: int
    network: bool
    pieces: Pieces | None = None


def with_slot(pages: Int64Array, slot: int | None) -> Int64Array:
    """The ids of a grant as the loop reads them: of pages, and behind them the state slot, if one is granted."""
    if slot is None:
        return np.ascontiguousarray(pages, dtype=np.int64)
    return np.append(pages, slot).astype(np.int64, copy=False)


class Receives:
    """Under the engine's lock."""

    def __init__(self, runner: Runner, peers: LoopPeers) -> None:
        self._runner = runner
        self._peers = peers
        self._world = runner.world
        self._address = runner.address
        self._memory = runner.memory
        self._words = runner.words
        self._slots = peers.slots
        # A view in which Python reads words faster than in records, and faster in a memoryview than in an array.
        self._words_of = self._memory["receives"].view(np.int64).reshape(MAX_FLOWS, -1).data
        self._free = list(range(MAX_FLOWS))
        self._kept: list[Any] = [None] * MAX_FLOWS  # what the loop reads at addresses that it was given
        self._unpacking: dict[int, Any] = {}  # of those whose pieces may be unpacked, by flow
        self._through_network: set[int] = set()  # flows of which writers are on other hosts

    def reserve(self) -> int | None:
        """A flow for a receive, to be given to `open`; None if all are in use."""
        return self._free.pop() if self._free else None

    def open(
        self,
        flow: int,
        *,
        generation: int,
        num_tokens: int,
        page_size: int,
        leader: int,
        told: int = 0,
        writers: list[tuple[int, int, int, int]],
        network: bool = False,
        staged: Mapping[int, Pieces] | None = None,
        pages: Int64Array | None = None,
    ) -> None:
        """From now on records for ``generation`` are taken. leader, told: see `Receive`, in `core.loop.state.requests`.

        writers: (rank, layers that it owes, layers whose state it owes, its page size). network: whether the transport
        must be driven to hear some of them. staged: of those that stage, by rank, how their pieces are unpacked into
        ``pages``.
        """
        assert 0 < len(writers) <= MAX_WRITERS
        positions = max(layers + states for _, layers, states, _ in writers)
        cover = np.zeros((len(writers), positions, 1 + 2 * MAX_INTERVALS), dtype=np.int64)
        self._kept[flow] = cover
        leader = self._slots[leader] if leader >= 0 else leader
        ids = 0
        if staged:
            pages = np.ascontiguousarray(pages, dtype=np.int64)
            self._unpacking[flow] = pages, dict(staged)
            ids = pages.ctypes.data
        what = (generation, num_tokens, page_size, leader, told)
        posting.open_receive(self._address, flow, *what, cover, ids, int(bool(staged)))
        for number, (rank, layers, states, size) in enumerate(writers):
            last = int(number == len(writers) - 1)
            pieces = staged[rank].addresses if staged and rank in staged else (0, 0)
            posting.add_writer(self._address, flow, self._slots[rank], layers, states, size, *pieces, last)
        if network:
            self._count_network(flow)
            steering.wake_loop(self._address)

    def _count_network(self, flow: int) -> None:
        """The transport is driven from now on, as `posting` has it for sends."""
        self._through_network.add(flow)
        self._words[_NETWORK] += 1
        self._words[_DRIVING] = 1

    def grant(
        self,
        flow: int,
        name: bytes,
        hashes: tuple[int, int],
        pages: Int64Array,
        *,
        prefix_tokens: int,
        writers: int,
        slot: int | None = None,
        serial: int = 0,
    ) -> None:
        """Grants pages and a state slot to the writers of a receive, and tells the leader. hashes: of the name.

        serial: see `Receive`. At most `MAX_GRANTED` pages, and `MAX_NAME` bytes of name.
        """
        body = self._peers.name_grant(flow, name)
        ids, slots = with_slot(pages, slot), 0 if slot is None else 1
        posting.post_grant(self._address, flow, body, *hashes, writers, prefix_tokens, len(name), ids, slots, serial)
        self._runner.told()

    @property
    def has_room(self) -> bool:
        """Whether `reserve` would find a flow."""
        return bool(self._free)

    def post(
        self,
        source: Source,
        *,
        generation: int,
        num_tokens: int,
        leader: int,
        told: int,
        prefix_tokens: int,
        name: bytes,
        hashes: tuple[int, int],
        pages: Int64Array,
        state_slot: int | None,
        serial: int,
    ) -> int:
        """`reserve`, `open` and `grant` in one, of a receive from one writer. The flow. There must be room."""
        flow = self._free.pop()
        if source.network:
            self._count_network(flow)
        cover = self._kept[flow] = np.zeros((1, source.layers + source.states, 1 + 2 * MAX_INTERVALS), dtype=np.int64)
        body = self._peers.name_grant(flow, name)
        ids = pages if state_slot is None else with_slot(pages, state_slot)
        geometry = kernels = 0
        if source.pieces is not None:
            self._unpacking[flow] = ids, source.pieces
            geometry, kernels = source.pieces.addresses
        posting.post_receive(
            self._address,
            flow,
            generation,
            num_tokens,
            source.page_size,
            self._slots[leader] if leader >= 0 else leader,
            told,
            cover,
            source.slot,
            source.layers,
            source.states,
            source.writer_page,
            body,
            *hashes,
            source.writers,
            prefix_tokens,
            len(name),
            ids,
            0 if state_slot is None else 1,
            serial,
            geometry,
            kernels,
        )
        self._runner.told()
        return flow

    def untold(self, flow: int) -> tuple[list[int], bool]:
        """Takes back what the loop has not told of a receive: the grant, to these ranks; whether of it the leader.

        While it stands still. That the receive is complete Python tells the leader in any case. Of writers that were
        told through the network it is not known, unless something has come of them: these are among the ranks.
        """
        slots = int(loop.drop_due(self._world, GRANT, flow))
        slots |= int(receiving.unheard(self._world, flow))
        loop.drop_due(self._world, DONE, flow)
        unposted = loop.drop_due(self._world, POSTED, flow) != 0
        return [self._peers.ranks[slot] for slot in range(MAX_PEERS) if slots >> slot & 1], unposted

    def outcome(self, flow: int) -> tuple[int, bool, bytes]:
        """Of a receive that the loop has ended: its bytes, whether any were unpacked, and aux, which one writer sends.

        Much less than `state`, for requests that have succeeded are many.
        """
        words, aux = self._words_of, b""
        for number in range(words[flow, _NUM_WRITERS]):
            if nbytes := words[flow, _WRITERS + number * len(_WRITER) + _AUX_NBYTES]:
                aux = self._aux(flow, number, nbytes)
        return words[flow, _RECEIVED], words[flow, _PIECES] > 0, aux

    def _aux(self, flow: int, number: int, nbytes: int) -> bytes:
        aux: bytes = self._memory[0]["receives"][flow]["aux"].tobytes()
        return aux[number * MAX_AUX :][:nbytes]

    def state(self, flow: int) -> ReceiveState:
        """What has arrived. While the loop stands still, or has left the flow to Python."""
        words = self._words_of
        state = ReceiveState(words[flow, _RECEIVED], words[flow, _PIECES] > 0, [])
        for number in range(words[flow, _NUM_WRITERS]):
            at = _WRITERS + number * len(_WRITER)
            intervals: list[list[tuple[int, int]]] = []
            layers = words[flow, at + _LAYERS]
            cover = self._kept[flow][number]
            for row in cover[:layers].tolist():
                intervals.append([(row[1 + 2 * i], row[2 + 2 * i]) for i in range(row[0])])
            states = (cover[layers : layers + words[flow, at + _STATES], 0] > 0).tolist()
            sealed = words[flow, at + _SEALED]
            aux = self._aux(flow, number, nbytes) if (nbytes := words[flow, at + _AUX_NBYTES]) else b""
            ring_only = words[flow, at + _RING_ONLY] != 0
            state.writers.append(WriterState(intervals, states, None if sealed < 0 else sealed, aux, ring_only))
        return state

    def arrived(self, flow: int) -> int:
        """Bytes of a receive that have arrived so far."""
        return self._words_of[flow, _RECEIVED]

    def has_received(self, flow: int) -> bool:
        """Whether the loop has ended a receive, because it has succeeded, and it is not closed yet. Any thread."""
        return bool(self._words_of[flow, _STATE] == SUCCEEDED)

    def close(self, flow: int) -> None:
        """The loop takes nothing more for a receive. While it stands still, or has ended the receive itself."""
        self._words_of[flow, _STATE] = FREE
        self._kept[flow] = None
        if flow in self._through_network:
            self._through_network.remove(flow)
            self._words[_NETWORK] -= 1

    def stop_unpacking(self, flow: int) -> bool:
        """Nothing is unpacked for a receive any more, whoever serves it: it has failed, or ended.

        Whether kernels still write to its pages: then an event tells when they have ended.
        """
        if flow not in self._unpacking:
            return False
        awaited = False
        if self._words_of[flow, _UNPACKS]:  # else the loop has ended the receive itself
            with self._runner.standing_still():
                receive = self._memory[0]["receives"][flow]
                awaited = bool(receive["unpacking"] != 0)
                receive["unpacks"], receive["stopped"] = 0, int(awaited)
        del self._unpacking[flow]
        return awaited

    def free(self, flow: int) -> None:
        """Frees the flow of a closed receive, and the slot of its grant, in which no writer may look any more."""
        self.stop_unpacking(flow)
        assert not self._words_of[flow, _UNPACKING]
        self._free.append(flow)
