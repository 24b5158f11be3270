"""The requests that one rank sends, on its resident loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.core import posting, steering
from torchkv.core.device import NO_GATE, Gate, LoopDevice
from torchkv.core.loop import loop
from torchkv.core.loop.codes import FREE, SEALED, SUCCEEDED
from torchkv.core.loop.limits import MAX_AUX, MAX_FLOWS, MAX_GPU_SENDS, MAX_OPS
from torchkv.core.loop.state.requests import Op, Send
from torchkv.core.loop.state.world import REPEAT, word_at
from torchkv.core.receives import with_slot
from torchkv.core.way import Way

if TYPE_CHECKING:
    from torchkv.core.events import Events
    from torchkv.core.peers import LoopPeers
    from torchkv.core.runner import Runner

__all__ = ["Sends"]

_SEND, _OP = (list(record.__annotations__) for record in (Send, Op))
_STATE, _MOVED, _GATED, _SEND_NETWORK, _PROMISE = (
    _SEND.index(name) for name in ("state", "moved", "gated", "network", "promise")
)
_PEER_FLOW, _GENERATION, _PREFIX, _GRANTED, _DST_PAGE, _MAX_SLOT = (
    _SEND.index(name) for name in ("peer_flow", "generation", "prefix", "granted", "dst_page", "max_slot")
)
_NETWORK = word_at("network") // 8


class Sends:
    """Under the engine's lock, but for what is marked "any thread"."""

    def __init__(self, runner: Runner, peers: LoopPeers, events: Events, device: LoopDevice | None) -> None:
        self._runner = runner
        self._peers = peers
        self._events = events
        self._device = device
        self._world = runner.world
        self._address = runner.address
        self._memory = runner.memory
        self._words = runner.words
        # Views in which Python reads words faster than in records, and faster in a memoryview than in an array.
        ops = self._memory["ops"].view(np.int64).reshape(MAX_OPS, -1)
        self._nbytes, self._runs, self._posted, self._spared = (
            ops[:, _OP.index(name)].data for name in ("nbytes", "runs", "posted", "spared")
        )
        self._sends = self._memory["sends"].view(np.int64).reshape(MAX_FLOWS, -1).data
        self._free = list(range(MAX_FLOWS if device is None else MAX_GPU_SENDS))
        self._free_ops = list(range(MAX_OPS))
        # What the loop reads at addresses that it was given.
        self._kept: list[list[Any]] = [[] for _ in range(MAX_FLOWS)]
        self._kept_ops: list[Any] = [None] * MAX_OPS
        # By flow: the latest op that may be started again, and its page ids, as its caller gave them and as they go.
        self._repeats = np.zeros(MAX_FLOWS, REPEAT)
        self._repeats_at = self._repeats.ctypes.data
        self._kept_repeats: list[Any] = [None] * MAX_FLOWS

    def retire(self, way: Way) -> None:
        """No send takes this way any more, and what it leads to may go: once kernels that were launched have ended."""
        if self._device is not None:
            self._device.retire(way, int(self._memory[0]["posted"]))

    def open(
        self,
        way: Way,
        *,
        peer_flow: int,
        generation: int,
        pages: Int64Array,
        slot: int | None = None,
        serial: int = 0,
        begun: int = 0,
    ) -> int | None:
        """A flow for a request that is bound to a grant of ``pages``, and of a state slot; None if all are in use.

        If kernels copy the pages, there are `MAX_GRANTED` at most. serial, begun: see `Send`.
        """
        if not self._free:
            return None
        flow = self._free.pop()
        ids = with_slot(pages, slot if way.has_state else None)
        self._kept[flow] = [way, ids]
        network = self._network(way)
        posting.open_send(self._address, flow, way.address, network, serial, begun, peer_flow, generation, ids)
        return flow

    def wait_for_grant(
        self, way: Way, *, hashes: tuple[int, int], writers: int, serial: int = 0, begun: int = 0
    ) -> int | None:
        """A flow for a request whose grant has not come; None if all are in use. An event tells that it is bound.

        hashes: of its name. writers: a bit for each that the grant must name. serial, begun: see `Send`.
        """
        if not self._free:
            return None
        flow = self._free.pop()
        self._kept[flow] = [way]
        network = self._network(way)
        posting.wait_for_grant(self._address, flow, way.address, network, serial, begun, *hashes, writers)
        self._runner.told()
        if self._events.has_unclaimed:  # the loop knows of those alone that Python has not seen
            steering.wake_driver(self._address)
        return flow

    def bind(self, way: Way, *, hashes: tuple[int, int], writers: int, serial: int = 0, begun: int = 0) -> int | None:
        """A flow for a request whose grant is there, also behind a prefix, and no event has told of it: see `bound`.

        hashes, writers, serial, begun: see `wait_for_grant`. None, and nothing is done, if there is no such grant,
        anything speaks against it, or all flows are in use.
        """
        if not self._free:
            return None
        flow = self._free[-1]
        send = flow, way.address, self._network(way), serial, begun, *hashes, writers, -1, True
        if not posting.bind(self._address, *send):
            return None
        self._free.pop()
        self._kept[flow] = [way]
        return flow

    def whose(self, hashes: tuple[int, int]) -> int | None:
        """The rank that has given the first grant that `bind` may find of a request whose name has these hashes."""
        return self._peers.ranks.get(posting.whose(self._address, *hashes))

    def meet(
        self,
        way: Way,
        positions: Int64Array,
        pages: Int64Array,
        copied: Int64Array,
        num_pages: int,
        start: int,
        gate: Gate,
        verb: int,
        *,
        hashes: tuple[int, int],
        writers: int,
        serial: int,
        begun: int,
        prefixed: bool,
    ) -> tuple[int, int] | None:
        """`bind` and `start_more` in one. The flow and the index of the op. None also if all of these are in use.

        prefixed: whether the grant may be behind a prefix.
        """
        if not self.has_room():
            return None
        flow, index = self._free[-1], self._free_ops[-1]
        send = flow, way.address, self._network(way), serial, begun, *hashes, writers
        last = num_pages, prefixed, self._repeat_at(flow)
        if not posting.meet(self._address, *send, index, positions, pages, copied, start, *gate, verb, *last):
            return None
        return self._begun([way], positions, copied)

    def begin(
        self,
        way: Way,
        positions: Int64Array,
        pages: Int64Array,
        copied: Int64Array,
        num_pages: int,
        start: int,
        gate: Gate,
        verb: int,
        *,
        peer_flow: int,
        generation: int,
        granted: Int64Array,
        slot: int | None,
        serial: int,
        begun: int,
    ) -> tuple[int, int] | None:
        """`open`, under a grant of the pages ``granted``, and `start_more` in one. The flow, and the op's index.

        None, and nothing is done, if all are in use, or one of ``pages`` is out of range.
        """
        if not self.has_room():
            return None
        ids = with_slot(granted, slot if way.has_state else None)
        flow, index = self._free[-1], self._free_ops[-1]
        send = flow, way.address, self._network(way), serial, begun, peer_flow, generation, ids
        last = verb, self._repeat_at(flow)
        if not posting.begin(self._address, *send, index, positions, pages, copied, num_pages, start, *gate, *last):
            return None
        return self._begun([way, ids], positions, copied)

    def _begun(self, kept: list[object], positions: Int64Array, copied: Int64Array) -> tuple[int, int]:
        """The next flow and index are in use, by a send with its first op. kept: what the send needs."""
        flow, index = self._free.pop(), self._free_ops.pop()
        self._kept[flow] = kept
        self._kept_ops[index] = positions, copied
        self._kept_repeats[flow] = copied, copied
        self._runner.told(op=True)
        return flow, index

    def _network(self, way: Way) -> int:
        """`Send`'s ``network``."""
        if not way.network:
            return 0
        lane = self._peers.lane(way.rank)
        return 2 if lane is not None and not lane.is_driven else 1

    def has_room(self, count: int = 1) -> bool:
        """Whether `open` and `start_op` would find so many flows and indices."""
        return len(self._free) >= count and len(self._free_ops) >= count

    def has_ops(self, count: int) -> bool:
        """Whether `start_op` would find so many indices."""
        return len(self._free_ops) >= count

    def bound(self, flow: int) -> tuple[int, int, int, Int64Array, int | None]:
        """Of the grant that a send is bound to: the receiver's flow, generation, prefix, pages, and state slot."""
        sends, ids = self._sends, self._runner.granted_ids
        count = sends[flow, _GRANTED] // sends[flow, _DST_PAGE]
        slot = int(ids[flow, count]) if sends[flow, _MAX_SLOT] else None
        return sends[flow, _PEER_FLOW], sends[flow, _GENERATION], sends[flow, _PREFIX], ids[flow, :count].copy(), slot

    def start_op(
        self,
        flow: int,
        positions: Int64Array,
        pages: Int64Array,
        start: int,
        gate: Gate = NO_GATE,
        verb: int = 0,
        *,
        of_state: bool = False,
        staged: int = 0,
    ) -> int | None:
        """Copies pages of the layers at ``positions``: an event ends it. Its index, or None if all are in use.

        verb: see `Op`. of_state, staged: see `posting.start_op`.
        """
        if not self._free_ops:
            return None
        index = self._free_ops.pop()
        self._kept_ops[index] = positions, pages
        posting.start_op(self._address, index, flow, int(of_state), positions, pages, start, *gate, verb, staged)
        self._runner.told(op=True)
        return index

    def start_more(
        self,
        flow: int,
        positions: Int64Array,
        pages: Int64Array,
        copied: Int64Array,
        num_pages: int,
        start: int,
        gate: Gate,
        verb: int = 0,
        *,
        checked: Int64Array,
    ) -> int | None:
        """`start_op` of ``pages``, copied to ``copied`` in the same call, and `remember`.

        None also if one is not in [0, num_pages).
        """
        if not self._free_ops:
            return None
        index = self._free_ops[-1]
        op = positions, pages, copied, num_pages, start, *gate, verb
        if not posting.start_more(self._address, index, flow, *op, self._repeat_at(flow), checked):
            return None
        self._free_ops.pop()
        self._kept_ops[index] = positions, copied
        self._kept_repeats[flow] = checked, copied
        self._runner.told(op=True)
        return index

    def _repeat_at(self, flow: int) -> int:
        return self._repeats_at + REPEAT.itemsize * flow

    def remember(self, flow: int, checked: Int64Array, copied: Int64Array, start: int, verb: int) -> None:
        """An op of the pages ``copied`` may be started again. checked: the page ids that its caller gave."""
        posting.remember(self._address, self._repeat_at(flow), flow, checked, copied, start, verb)
        self._kept_repeats[flow] = checked, copied

    def start_again(self, flow: int, positions: Int64Array, pages: Int64Array, gate: Gate) -> int | None:
        """`start_op` of one that differs in these from the one that was remembered last, if its caller gave the same
        ``pages``; else None.
        """
        if not self._free_ops:
            return None
        index = self._free_ops[-1]
        if not posting.start_again(self._address, index, self._repeat_at(flow), positions, pages, *gate):
            return None
        self._free_ops.pop()
        self._kept_ops[index] = positions, self._kept_repeats[flow][1]
        self._runner.told(op=True)
        return index

    def finish(self, flow: int, num_pages: int, aux: bytes, verb: int = 0) -> None:
        """Seals the send once its ops have ended. aux: at most `MAX_AUX` bytes. verb: see `Send`."""
        assert len(aux) <= MAX_AUX
        at = 0
        if aux:
            data = np.frombuffer(aux, dtype=np.uint8)
            self._kept[flow].append(data)
            at = data.ctypes.data
        posting.finish_send(self._address, flow, num_pages, at, len(aux), verb)
        self._runner.told()

    def spared(self, indices: list[int]) -> int:
        """Bytes of these ops' pages at the receiver less those that were staged for them."""
        return sum([self._spared[index] for index in indices])

    def op_results(self, indices: list[int]) -> tuple[list[int], int]:
        """The bytes of each of these ops, which have ended, and their contiguous runs in all. Frees the indices."""
        op_nbytes, op_runs, kept = self._nbytes, self._runs, self._kept_ops
        nbytes = [op_nbytes[index] for index in indices]
        runs = sum([op_runs[index] for index in indices])
        for index in indices:
            kept[index] = None
        self._free_ops += indices
        return nbytes, runs

    def moved(self, flow: int) -> int:
        """Bytes that a send has copied so far, or has enqueued."""
        return int(self._sends[flow, _MOVED])

    def promised(self, flow: int) -> bool:
        """Whether the receiver of a send was told that nothing is written but to the standing stage."""
        return bool(self._sends[flow, _PROMISE] == 2)

    def gated(self, flow: int) -> int:
        """Grows while an op of a send waits for its gate."""
        return int(self._sends[flow, _GATED])

    def flying(self, index: int) -> int:
        """What the completion word will be once nothing of an op is under way any more; 0 if nothing is."""
        return self._posted[index]

    def put(self, index: int) -> int:
        """The number of the last put of an op that is not known to have arrived; 0 if all have. Has that found out."""
        op, world = self._memory[0]["ops"][index], self._memory[0]
        send = world["sends"][op["flow"]]
        peer = world["peers"][send["peer"]]
        if not send["network"] or op["posted"] <= peer["flushed"]:
            return 0
        peer["wanted"], world["under_way"] = max(int(peer["wanted"]), int(op["posted"])), 1
        steering.wake_loop(self._address)
        return int(op["posted"])

    def has_sent(self, flow: int) -> bool:
        """Whether the loop has ended a send, because it has succeeded, and `end` has not freed it. Any thread."""
        return bool(self._sends[flow, _STATE] == SUCCEEDED)

    def end(self, flow: int) -> None:
        """Frees the flow of a send that has ended."""
        self._sends[flow, _STATE] = FREE
        if network := self._sends[flow, _SEND_NETWORK]:
            self._words[_NETWORK] -= network & 1
            self._sends[flow, _SEND_NETWORK] = 0
        self._kept[flow], self._kept_repeats[flow] = [], None
        self._free.append(flow)

    def take_back(self, flow: int, ops: list[int]) -> bool:
        """Takes a send from the loop, which stands still and has settled. Whether it was sealed. ops: not ended."""
        send = self._memory[0]["sends"][flow]
        loop.drop(self._world, flow)
        sealed = bool(send["state"] == SEALED)
        for index in ops:
            self._kept_ops[index] = None
            self._free_ops.append(index)
        self.end(flow)
        return sealed
