"""The resident loop's face to Python: its memory, its thread, and the calls by which requests are handed to it."""

from __future__ import annotations

import atexit
import ctypes
import os
import platform
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from torchkv.arrays import Int64Array
from torchkv.core import posting
from torchkv.core.device import NO_GATE, Gate, LoopDevice
from torchkv.core.loop import grants, loop, mailbox, network, rounds
from torchkv.core.loop.events import emit
from torchkv.core.loop.records import (
    CUT,
    DECIDED,
    DONE,
    FREE,
    FUTEX_CALL,
    GRANT,
    GRANT_NBYTES,
    MAILBOX_RECORDS,
    MAX_AUX,
    MAX_EVENTS,
    MAX_FLOWS,
    MAX_GPU_SENDS,
    MAX_GRANTED,
    MAX_INTERVALS,
    MAX_NAME,
    MAX_OPS,
    MAX_PEERS,
    MAX_ROUNDS,
    MAX_WRITERS,
    NOBODY,
    POSTED,
    SEALED,
    WORLD,
    Op,
    Peer,
    Send,
    World,
    word_at,
)
from torchkv.errors import PeerLost, TransportUnavailable
from torchkv.host import shared_memory, spin_wait
from torchkv.host.jit import at_register, libc_functions
from torchkv.transport.interface import Channel, NativeChannel

__all__ = ["Core", "GrantBody", "NetworkLane", "Notice", "ReceiveState", "WriterState"]

TURN = 1 << 20  # bytes
SLICE = 0.1  # seconds of one sleep of `wait`: then signals of Python are served

_NBYTES, _RUNS = (list(Op.__annotations__).index(name) for name in ("nbytes", "runs"))
_POSTED = list(Op.__annotations__).index("posted")
_MOVED, _GATED, _SEND_NETWORK = (list(Send.__annotations__).index(name) for name in ("moved", "gated", "network"))
_NETWORK = word_at("network") // 8
_PEER = list(Peer.__annotations__)
_OF_NETWORK = _PEER[_PEER.index("endpoint") :]

_FUNCTIONS = libc_functions("syscall", "sched_yield", "clock_gettime", "write")


@dataclass(slots=True)
class Notice:
    """An event. index: of the op or flow; source: the rank of a STRAY record. words: the record, without ``seq``."""

    kind: int
    index: int
    source: int
    words: list[int]


@dataclass(slots=True)
class WriterState:
    """intervals: of tokens that have arrived, per layer that it owes. sealed: pages of its seal; None before it."""

    intervals: list[list[tuple[int, int]]]
    sealed: int | None
    aux: bytes


@dataclass(slots=True)
class GrantBody:
    """A grant as its receiver wrote it; checked is only that the parts lie in their slot. writers: a bit for each."""

    name: bytes
    pages: Int64Array
    prefix_tokens: int
    writers: int


@dataclass(slots=True)
class ReceiveState:
    """What the loop knows of a receive, and of each of its writers."""

    nbytes: int
    writers: list[WriterState]


class NetworkLane:
    """The loop's way to a rank of another host: see `torchkv.core.loop.network`. Made by `Core.connect_network`.

    native: None after the end, or if the transport has none. failed: whether what is on its way may never arrive.
    """

    def __init__(self) -> None:
        self.native: NativeChannel | None = None
        self.memory = np.zeros(network.NETWORK_NBYTES // 8, dtype=np.int64)
        self.failed = False


class Core:
    """One rank's loop. What is not marked "any thread" is called under the engine's lock.

    device: the GPU that this rank's pages lie on, if they do. turn, window: see `World`. Without `start` it has no
    thread, and a test calls `step`. Raises ``TransportUnavailable`` where it cannot work.
    """

    def __init__(
        self, rank: int, *, device: LoopDevice | None = None, turn: int = TURN, window: int = MAILBOX_RECORDS
    ) -> None:
        if rank >= MAX_PEERS:
            raise TransportUnavailable(f"rank {rank}: the resident loop serves ranks below {MAX_PEERS}")
        if platform.machine() not in FUTEX_CALL:
            raise TransportUnavailable(f"the resident loop knows no futex on {platform.machine()}")
        self.rank = rank
        self._memory = np.zeros(1, WORLD)
        world = self._memory[0]
        self.world = cast(World, world)
        self._words = self._memory.view(np.int64).reshape(-1)
        # Views in which Python reads words faster than in records, and faster in a memoryview than in an array.
        self._events = self._memory["events"].view(np.int64).reshape(MAX_EVENTS, -1)
        self._ops = self._memory["ops"].view(np.int64).reshape(MAX_OPS, -1).data
        self._sends = self._memory["sends"].view(np.int64).reshape(MAX_FLOWS, -1).data
        self._view = self._words.data
        self._segment: torch.Tensor = shared_memory.allocate(mailbox.SEGMENT_NBYTES)
        self._bytes = self._segment.numpy().data
        self._segment_at = self._segment.data_ptr()
        world["address"], world["rank"], world["bell"] = self._memory.ctypes.data, rank, self._segment.data_ptr()
        world["driver_fd"], world["futex"], world["one"] = -1, FUTEX_CALL[platform.machine()], 1
        world["spin"] = spin_wait.SPIN
        world["functions"][:], world["turn"], world["window"] = _FUNCTIONS, turn, window
        self._address: int = self._memory.ctypes.data
        self._granted_ids: Int64Array = np.zeros((MAX_FLOWS, MAX_GRANTED), dtype=np.int64)  # of sends; touched as used
        world["granted_ids"] = self._granted_ids.ctypes.data
        self.device = device
        if device is not None:
            device.describe(self.world)
        self._driver_word: Int64Array | None = None
        self._peers: dict[int, shared_memory.Segment] = {}
        self._lanes: dict[int, NetworkLane] = {}  # by rank
        self._slots: dict[int, int] = {rank: rank}  # of `World`'s ``peers``, by rank
        self._ranks: dict[int, int] = {rank: rank}  # by slot
        self._free_sends = list(range(MAX_FLOWS if device is None else MAX_GPU_SENDS))
        self._free_receives = list(range(MAX_FLOWS))
        self._free_ops = list(range(MAX_OPS))
        self._free_rounds = list(range(MAX_ROUNDS))
        self._kept_sends: list[list[Any]] = [[] for _ in range(MAX_FLOWS)]
        self._kept_receives: list[Any] = [None] * MAX_FLOWS
        self._kept_ops: list[Any] = [None] * MAX_OPS
        self._kept_rounds: dict[int, Int64Array] = {}
        self._network_receives: set[int] = set()  # flows of which writers are on other hosts
        self._tail, self._head = word_at("event_tail") // 8, word_at("event_head") // 8
        self._command_tail, self._command_head = word_at("command_tail") // 8, word_at("command_head") // 8
        self._news, self._sleepers = word_at("news") // 8, word_at("sleepers") // 8
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._holding = False
        self._counting = threading.Lock()

    # ------------------------------------------------------------------ mailboxes and the thread

    def descriptor(self) -> bytes:
        """With this a peer of the same host maps this rank's mailboxes: see `connect`."""
        return shared_memory.share(self._segment) or b""

    def reserve_slot(self, rank: int, slot: int | None = None) -> int:
        """The mailbox here that ``rank`` will write to. slot: which one it must be; None: any that is free.

        Raises ``TransportUnavailable`` if there is none. `disconnect` frees it.
        """
        if rank in self._slots:
            return self._slots[rank]
        if slot is None:
            slot = next((each for each in range(MAX_PEERS) if each not in self._ranks), MAX_PEERS)
        if slot >= MAX_PEERS or slot in self._ranks:
            raise TransportUnavailable(f"rank {rank}: the resident loop has {MAX_PEERS} mailboxes, and none for it")
        self._slots[rank], self._ranks[slot] = slot, rank
        return slot

    def connect(self, rank: int, descriptor: bytes, *, slot: int | None = None) -> None:
        """Maps the mailboxes of ``rank``, which has reserved ``slot`` there for this rank: see `reserve_slot`.

        slot: None among ranks that call each other by the same numbers: then these are their slots.
        Raises ``TransportUnavailable`` and ``ProtocolError`` if it cannot.
        """
        if slot is None:
            self.reserve_slot(rank, rank)
            slot = self.rank
        here = self._slots[rank]
        segment = shared_memory.open_segment(descriptor)
        if segment.nbytes < mailbox.SEGMENT_NBYTES or slot >= MAX_PEERS:
            segment.close()
            raise TransportUnavailable(f"the mailboxes of rank {rank} take {segment.nbytes} bytes: another version's")
        self._peers[rank] = segment
        base = self._segment_at
        inbox_head, inbox = (base + offset for offset in mailbox.mailbox_at(here))
        outbox_head, outbox = (segment.ptr + offset for offset in mailbox.mailbox_at(slot))
        with self.standing_still():
            peer = self._memory[0]["peers"][here]
            peer["outbox_head"], peer["outbox"], peer["bell"] = outbox_head, outbox, segment.ptr
            peer["inbox_head"], peer["inbox"], peer["grants"] = inbox_head, inbox, segment.ptr + mailbox.GRANTS_AT
            peer["written"] = 0  # records may have gone through the network before
            self._memory[0]["num_peers"] = max(here + 1, int(self._memory[0]["num_peers"]))
        ctypes.c_int64.from_address(outbox_head + mailbox.READS_AT).value = 1

    def disconnect(self, rank: int) -> None:
        """Unmaps the mailboxes of ``rank``, whose process has ended, and frees its slot. Idempotent.

        No request may be on the loop with it any more. What is still due to it is forgotten.
        """
        slot = self._slots.get(rank)
        if slot is None or rank == self.rank:
            return
        with self.standing_still():
            world = self._memory[0]
            assert not np.any((world["sends"]["state"] != FREE) & (world["sends"]["peer"] == slot))
            loop.drop_due_to(self.world, slot)
            self._cut(rank)
            world["peers"][slot] = 0
            world["votes"][slot] = world["awaited"][slot] = world["rounds_of"][slot] = 0
            head, box = mailbox.mailbox_at(slot)
            for at, nbytes in ((head, mailbox.LINE), (box, mailbox.MAILBOX_NBYTES)):
                self._bytes[at : at + nbytes] = bytes(nbytes)
        del self._ranks[slot], self._slots[rank]
        if (segment := self._peers.pop(rank, None)) is not None:
            segment.close()

    def reaches(self, rank: int) -> bool:
        """Whether records can be sent to ``rank``: both ranks have mapped each other's mailboxes."""
        at = mailbox.mailbox_at(self._slots[rank])[0] + mailbox.READS_AT if rank in self._peers else 0
        return at > 0 and self._bytes[at] != 0

    # ------------------------------------------------------------------ the network

    def connect_network(self, rank: int, channel: Channel, tags: tuple[int, int]) -> NetworkLane | None:
        """Has the loop put to ``rank`` through ``channel``; None if only Python can, or no mailbox is left for it.

        tags: of records that come from there, and that go there, unless the loops have mapped each other's mailboxes.
        No send to the rank may be on the loop.
        """
        lane = NetworkLane()
        try:
            slot = self.reserve_slot(rank)
        except TransportUnavailable:
            return None
        if (native := channel.native(partial(self.cut, rank, lane))) is None:
            return None
        lane.native = native
        with self.standing_still():
            self._cut(rank)
            world = self._memory[0]
            world["worker"], world["native"][:] = native.worker, native.functions
            for name, words in (("put_params", native.put_params), ("params", native.params)):
                world[name][: len(words)] = words
            world["key_at"] = self._address + word_at("put_params") + 8 * native.key_word
            peer = world["peers"][slot]
            for name in _OF_NETWORK if peer["outbox"] else Peer.__annotations__:
                peer[name] = 0
            peer["endpoint"], peer["memory"] = native.endpoint, lane.memory.ctypes.data
            peer["tag_in"], peer["tag_out"] = tags
            world["num_peers"] = max(slot + 1, int(world["num_peers"]))
            self._lanes[rank] = lane
            world["lanes"] = len(self._lanes)
        return lane

    def cut(self, rank: int, lane: NetworkLane) -> None:
        """The endpoint of a lane ends: nothing uses it after this. Any thread, without the engine's lock."""
        posting.hold(self._address)
        try:
            if self._lanes.get(rank) is lane:
                self._cut(rank)
        finally:
            posting.let_go(self._address)

    def _cut(self, rank: int) -> None:
        """While the loop stands still."""
        if (lane := self._lanes.pop(rank, None)) is None:
            return
        self._memory[0]["lanes"] = len(self._lanes)
        peer = self._memory[0]["peers"][self._slots[rank]]
        lane.failed = True  # what has not arrived yet may never do
        lane.native = None
        if peer["endpoint"]:
            network.cut(self.world, cast(Peer, peer))
            emit(self.world, CUT, 0, self._slots[rank])

    def lane(self, rank: int) -> NetworkLane | None:
        """The way to ``rank`` through the network, while there is one that works."""
        lane = self._lanes.get(rank)
        failed = lane is not None and self._memory[0]["peers"][self._slots[rank]]["failed"] != 0
        return None if failed else lane

    def has_arrived(self, rank: int, lane: NetworkLane, posted: int) -> bool:
        """Whether the put of this number, and all before it, are in the memory of ``rank``.

        Raises ``PeerLost`` if nobody will know.
        """
        if not lane.failed:
            peer = self._memory[0]["peers"][self._slots[rank]]
            if peer["flushed"] >= posted:
                return True
            lane.failed = bool(peer["failed"])
        if lane.failed:
            raise PeerLost(f"the connection to rank {rank} broke while pages were put: some may not have arrived")
        return False

    @property
    def drives_transport(self) -> bool:
        """Whether the loop drives the transport, so that Python need not do that for what peers put here."""
        return bool(self._view[word_at("driving") // 8])

    def hear_network(self) -> None:
        """Has the loop look for messages of the network, if it expects none."""
        if self._lanes and not self.drives_transport:
            posting.wake_loop(self._address)

    # ------------------------------------------------------------------ its thread

    @property
    def running(self) -> bool:
        """Whether the loop has a thread."""
        return self._thread is not None

    def start(self, driver_fd: int, driver_word: Int64Array) -> None:
        """Starts the loop's thread. It never takes the GIL, and ends with `stop`.

        driver_fd, driver_word: an eventfd and a word that wake Python's own thread (see `torchkv.engine.progress`).
        """
        self._driver_word = driver_word
        self._memory[0]["driver_fd"], self._memory[0]["driver_word"] = driver_fd, driver_word.ctypes.data
        self._thread = threading.Thread(target=self._run, name="torchkv-loop", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def _run(self) -> None:
        spin_wait.wake_on_time()
        if self.device is not None:
            self.device.activate()
        loop.run(self.world)

    def stop(self) -> None:
        """Ends the thread. Idempotent. In a forked child there is none."""
        atexit.unregister(self.stop)
        thread, self._thread = self._thread, None
        if thread is not None and os.getpid() == self._pid:
            posting.stop(self._address)
            thread.join()

    def close(self) -> None:
        """Ends the thread and unmaps the peers' mailboxes."""
        self.stop()
        if self.device is not None:
            self.device.close(int(self._memory[0]["posted"]))
        while self._peers:
            self._peers.popitem()[1].close()

    def step(self) -> bool:
        """One turn, for a loop without a thread. Whether there was anything to do."""
        return bool(loop.step_first(cast(Any, self._memory)))

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """The loop stands still inside: no byte moves, and no record is taken, unless the caller does it."""
        if self._holding:
            yield
            return
        posting.hold(self._address)
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
            posting.let_go(self._address)

    # ------------------------------------------------------------------ sends

    def open_send(
        self,
        *,
        peer: int,
        peer_flow: int,
        generation: int,
        geometry: Int64Array,
        kernels: Int64Array | None = None,
        pages: Int64Array,
        src_page: int,
        dst_page: int,
        network: bool = False,
    ) -> int | None:
        """A flow for a request that is bound to a grant of ``pages``; None if all are in use.

        network: whether they are put through the network, with the keys in ``geometry``.
        kernels: the launch table if kernels copy the pages, of which there are `MAX_GRANTED` at most then.
        """
        if not self._free_sends:
            return None
        flow = self._free_sends.pop()
        pages = np.ascontiguousarray(pages, dtype=np.int64)
        self._kept_sends[flow] = [geometry, kernels, pages]
        table = 0 if kernels is None else kernels.ctypes.data
        slot = self._slots[peer]
        posting.open_send(
            self._address, flow, slot, peer_flow, generation, geometry, table, pages, src_page, dst_page, int(network)
        )
        return flow

    def wait_for_grant(
        self,
        *,
        peer: int,
        hashes: tuple[int, int],
        writers: int,
        max_page: int,
        geometry: Int64Array,
        kernels: Int64Array | None = None,
        src_page: int,
        dst_page: int,
        network: bool = False,
    ) -> int | None:
        """A flow for a request whose grant has not come; None if all are in use. An event tells that it is bound.

        hashes: of its name. writers: a bit for each that the grant must name. max_page: granted pages are below this.
        network: see `open_send`.
        """
        if not self._free_sends:
            return None
        flow = self._free_sends.pop()
        self._kept_sends[flow] = [geometry, kernels]
        table = 0 if kernels is None else kernels.ctypes.data
        slot, sizes = self._slots[peer], (src_page, dst_page)
        posting.wait_for_grant(
            self._address, flow, slot, max_page, *hashes, writers, geometry, table, *sizes, int(network)
        )
        return flow

    def bound(self, flow: int) -> tuple[int, int, Int64Array]:
        """The receiver's flow, the generation and the pages of the grant that the loop has bound a send to."""
        send = self._memory[0]["sends"][flow]
        pages = self._granted_ids[flow, : int(send["granted"]) // int(send["dst_page"])].copy()
        return int(send["peer_flow"]), int(send["generation"]), pages

    def start_op(
        self, flow: int, positions: Int64Array, pages: Int64Array, start: int, gate: Gate = NO_GATE
    ) -> int | None:
        """Copies pages of the layers at ``positions``: an event ends it. Its index, or None if all are in use."""
        if not self._free_ops:
            return None
        index = self._free_ops.pop()
        self._kept_ops[index] = positions, pages
        posting.start_op(self._address, index, flow, positions, pages, start, *gate)
        return index

    def finish_send(self, flow: int, num_pages: int, aux: bytes) -> None:
        """Seals the send once its ops have ended. aux: at most `MAX_AUX` bytes."""
        assert len(aux) <= MAX_AUX
        data = np.frombuffer(aux, dtype=np.uint8)
        self._kept_sends[flow].append(data)
        posting.finish_send(self._address, flow, num_pages, data.ctypes.data if aux else 0, len(aux))

    def op_result(self, index: int) -> tuple[int, int]:
        """Bytes and contiguous runs of an op that has ended; frees its index."""
        result = self._ops[index, _NBYTES], self._ops[index, _RUNS]
        self._kept_ops[index] = None
        self._free_ops.append(index)
        return result

    def moved(self, flow: int) -> int:
        """Bytes that a send has copied so far, or has enqueued."""
        return int(self._sends[flow, _MOVED])

    def gated(self, flow: int) -> int:
        """Grows while an op of a send waits for its gate."""
        return int(self._sends[flow, _GATED])

    @property
    def broken(self) -> bool:
        """Whether the GPU's driver has refused something, so that no kernel is launched any more."""
        return self.device is not None and bool(self._memory[0]["broken"])

    def flying(self, index: int) -> int:
        """What the completion word will be once nothing of an op is under way any more; 0 if nothing is."""
        return int(self._ops[index, _POSTED])

    def put(self, index: int) -> int:
        """The number of the last put of an op that is not known to have arrived; 0 if all have. Has that found out."""
        op, world = self._memory[0]["ops"][index], self._memory[0]
        send = world["sends"][op["flow"]]
        peer = world["peers"][send["peer"]]
        if not send["network"] or op["posted"] <= peer["flushed"]:
            return 0
        peer["wanted"], world["under_way"] = max(int(peer["wanted"]), int(op["posted"])), 1
        posting.wake_loop(self._address)
        return int(op["posted"])

    def end_send(self, flow: int) -> None:
        """Frees the flow of a send that has ended."""
        if self._sends[flow, _SEND_NETWORK]:
            self._count_network(-1)
            self._sends[flow, _SEND_NETWORK] = 0
        self._kept_sends[flow] = []
        self._free_sends.append(flow)

    def take_back_send(self, flow: int, ops: list[int]) -> bool:
        """Takes a send from the loop, which stands still and has settled. Whether it was sealed. ops: not ended."""
        send = self._memory[0]["sends"][flow]
        loop.drop(self.world, flow)
        sealed = bool(send["state"] == SEALED)
        send["state"] = FREE
        for index in ops:
            self._kept_ops[index] = None
            self._free_ops.append(index)
        self.end_send(flow)
        return sealed

    # ------------------------------------------------------------------ receives

    def reserve_receive(self) -> int | None:
        """A flow for a receive, to be given to `open_receive`; None if all are in use."""
        return self._free_receives.pop() if self._free_receives else None

    def open_receive(
        self,
        flow: int,
        *,
        generation: int,
        num_tokens: int,
        page_size: int,
        leader: int,
        told: int = 0,
        writers: list[tuple[int, int, int]],
        network: bool = False,
    ) -> None:
        """From now on records for ``generation`` are taken. leader, told: see `torchkv.core.loop.records.Receive`.

        network: whether some of the writers are on other hosts.

        writers: (rank, layers that it owes, its page size).
        """
        assert 0 < len(writers) <= MAX_WRITERS
        layers = max(count for _, count, _ in writers)
        cover = np.zeros((len(writers), layers, 1 + 2 * MAX_INTERVALS), dtype=np.int64)
        self._kept_receives[flow] = cover
        leader = self._slots[leader] if leader >= 0 else leader
        posting.open_receive(self._address, flow, generation, num_tokens, page_size, leader, told, cover)
        for number, (rank, count, size) in enumerate(writers):
            last = int(number == len(writers) - 1)
            posting.add_writer(self._address, flow, self._slots[rank], count, size, last)
        if network:
            self._network_receives.add(flow)
            self._count_network(1)
            posting.wake_loop(self._address)

    def _count_network(self, change: int) -> None:
        self._view[_NETWORK] += change

    def grant(
        self, flow: int, name: bytes, hashes: tuple[int, int], pages: Int64Array, *, prefix_tokens: int, writers: int
    ) -> None:
        """Grants pages to the writers of a receive, and tells the leader. hashes: of the name.

        At most `MAX_GRANTED` pages, and `MAX_NAME` bytes of name.
        """
        at = mailbox.GRANTS_AT + flow * mailbox.GRANT_SLOT
        self._bytes[at + grants.NAME_AT : at + grants.NAME_AT + len(name)] = name
        pages = np.ascontiguousarray(pages, dtype=np.int64)
        posting.post_grant(
            self._address, flow, self._segment_at + at, *hashes, writers, prefix_tokens, len(name), pages
        )

    def granted(self, rank: int, flow: int, generation: int) -> GrantBody | None:
        """The grant that ``rank`` has given; None if another, or none, lies in the slot. Its words are not checked."""
        if rank not in self._peers or not 0 <= flow < MAX_FLOWS:
            return None
        at = self._peers[rank].ptr + mailbox.GRANTS_AT + flow * mailbox.GRANT_SLOT
        # Each part is copied once and then looked at, because the peer may change it meanwhile.
        found, _, _, writers, prefix, count, name_nbytes, _ = struct.unpack("<8q", ctypes.string_at(at, GRANT_NBYTES))
        if found != generation or not 0 <= count <= MAX_GRANTED or not 0 <= name_nbytes <= MAX_NAME:
            return None
        pages = np.frombuffer(ctypes.string_at(at + GRANT_NBYTES, 8 * count), np.int64)
        return GrantBody(ctypes.string_at(at + grants.NAME_AT, name_nbytes), pages, prefix, writers)

    def untold(self, flow: int) -> tuple[list[int], bool]:
        """Takes back what the loop has not told of a receive: the grant, to these ranks; whether of it the leader.

        While it stands still. That the receive is complete Python tells the leader in any case.
        """
        slots = int(loop.drop_due(self.world, GRANT, flow))
        loop.drop_due(self.world, DONE, flow)
        unposted = loop.drop_due(self.world, POSTED, flow) != 0
        return [self._ranks[slot] for slot in range(MAX_PEERS) if slots >> slot & 1], unposted

    def receive_state(self, flow: int, *, coverage: bool = True) -> ReceiveState:
        """What has arrived. While the loop stands still, or has ended the flow, or left it to Python.

        coverage: whether the intervals are wanted, too.
        """
        receive = self._memory[0]["receives"][flow]
        cover = self._kept_receives[flow]
        state = ReceiveState(int(receive["nbytes"]), [])
        for number in range(int(receive["num_writers"])):
            writer = receive["writers"][number]
            layers = cover[number, : int(writer["layers"]) if coverage else 0].tolist()
            intervals = [[(words[1 + 2 * i], words[2 + 2 * i]) for i in range(words[0])] for words in layers]
            sealed = None if writer["sealed"] < 0 else int(writer["sealed"])
            aux = receive["aux"].view(np.uint8)[number * MAX_AUX : number * MAX_AUX + int(writer["aux_nbytes"])]
            state.writers.append(WriterState(intervals, sealed, aux.tobytes()))
        return state

    def arrived(self, flow: int) -> int:
        """Bytes of a receive that have arrived so far."""
        return int(self._memory[0]["receives"][flow]["nbytes"])

    def close_receive(self, flow: int) -> None:
        """The loop takes nothing more for a receive. While it stands still, or has ended the receive itself."""
        self._memory[0]["receives"][flow]["state"] = FREE
        self._kept_receives[flow] = None
        if flow in self._network_receives:
            self._network_receives.remove(flow)
            self._count_network(-1)

    def free_receive(self, flow: int) -> None:
        """Frees the flow of a closed receive, and the slot of its grant, in which no writer may look any more."""
        self._free_receives.append(flow)

    # ------------------------------------------------------------------ rounds of the instance that this rank leads

    def open_round(self, members: list[tuple[int, int, int, bool]]) -> int | None:
        """Leads a round of parts (rank, flow, generation, known to be complete); None if too many are under way.

        An event tells that it is over: all ranks have been told that the request has succeeded.
        """
        if not self._free_rounds:
            return None
        index = self._free_rounds.pop()
        parts = [(self._slots[rank], flow, generation, done) for rank, flow, generation, done in members]
        self._kept_rounds[index] = np.array(parts, dtype=np.int64)
        posting.open_round(self._address, index, self._kept_rounds[index])
        return index

    def is_done(self, rank: int, flow: int, generation: int) -> bool:
        """Whether the loop has heard that this part is complete."""
        slot = self._slots.get(rank)
        return slot is not None and bool(self._memory[0]["votes"][slot, flow] == generation)

    def end_round(self, index: int) -> None:
        """Frees the index of a round that is over."""
        del self._kept_rounds[index]
        self._free_rounds.append(index)

    def take_back_round(self, index: int) -> bool:
        """Takes a round from the loop, which stands still and has settled. Whether the request has succeeded.

        Then it is not known which of the ranks have been told.
        """
        decided = bool(self._memory[0]["rounds"][index]["missing"] == 0)
        loop.drop_due(self.world, DECIDED, index)
        rounds.drop_round(self.world, index)
        self.end_round(index)
        return decided

    # ------------------------------------------------------------------ events

    @property
    def has_events(self) -> bool:
        """Whether `events` would return any. Any thread, without the lock."""
        return bool(self._view[self._tail] != self._view[self._head])

    def events(self) -> list[Notice]:
        """What has happened since the last call."""
        taken: list[Notice] = []
        head, tail = self._view[self._head], self._view[self._tail]
        while head < tail:
            first = head & (MAX_EVENTS - 1)
            last = min(first + tail - head, MAX_EVENTS)
            for kind, index, source, *words, _ in self._events[first:last].tolist():
                taken.append(Notice(kind, index, self._ranks.get(source, -1), words))
            head += last - first
        if taken:
            self._view[self._head] = tail
        return taken

    @property
    def has_commands(self) -> bool:
        """Whether the loop has not taken all commands."""
        return bool(self._view[self._command_tail] != self._view[self._command_head])

    def settle(self) -> None:
        """Takes in all commands and all messages that have come. While the loop stands still."""
        loop.settle(self.world)

    def make_eager(self) -> None:
        """Python's thread is woken for every event from now on: somebody waits for more than a verdict. Any thread."""
        self._words[word_at("eager") // 8] = 1

    def heed_grants(self, heeds: bool) -> None:
        """Whether Python's thread is woken for every grant that the loop does not bind, because requests wait there."""
        self._view[word_at("heed") // 8] = heeds
        if heeds and self.has_events:  # a grant among them did not wake it
            posting.wake_driver(self._address)

    def wake_waiters(self) -> None:
        """Changes ``news`` and wakes the threads in `wait`: Python has completed a call. Any thread."""
        posting.wake_waiters(self._address)  # also if nobody sleeps yet: somebody may be about to

    @property
    def news(self) -> int:
        """Changes with each event. Read it before looking whether what is awaited is there, then `wait`. Any thread."""
        return int(self._view[self._news])

    def wait(self, seen: int, seconds: float) -> None:
        """Waits, without the GIL, until ``news`` is not ``seen``, for so long or `SLICE` at most. Any thread.

        Spins first, as the loop does: not where cores are few.
        """
        nanoseconds = int(min(seconds, SLICE) * 1e9)
        if posting.spin_for_news(self._address, seen, nanoseconds):
            return
        with self._counting:
            self._view[self._sleepers] += 1
        try:
            posting.wait_news(self._address, seen, nanoseconds)
        finally:
            with self._counting:
                self._view[self._sleepers] -= 1


@at_register
def warm_up() -> None:
    """Compiles the loop, or loads it from disk."""
    core = Core(0)
    none = np.zeros(2, dtype=np.int64)  # a plan without layers
    world = core.world
    flow = core.open_send(peer=0, peer_flow=0, generation=0, geometry=none, pages=none, src_page=1, dst_page=1)
    assert flow is not None
    core.start_op(flow, none[:0], none, 0)
    core.wait_for_grant(peer=0, hashes=(0, 0), writers=1, max_page=0, geometry=none, src_page=1, dst_page=1)
    core.open_receive(0, generation=0, num_tokens=1, page_size=1, leader=NOBODY, writers=[(0, 1, 1)])
    core.grant(0, b"", (0, 0), none, prefix_tokens=0, writers=0)
    index = core.open_round([(0, 1, 1, False)])
    assert index is not None
    core.finish_send(1, -1, b"")
    with core.standing_still():
        core.settle()
        loop.drop(world, flow)
        core.untold(0)
        core.take_back_round(index)
        loop.drop_due_to(world, 0)
        lane = NetworkLane()
        peer = core._memory[0]["peers"][0]
        peer["memory"] = lane.memory.ctypes.data
        network.cut(world, cast(Peer, peer))
        emit(world, CUT, 0, 0)
    core.step()
    posting.wake_loop(core._address)
    posting.spin_for_news(core._address, -1, 0)
    posting.wait_news(core._address, -1, 0)
    posting.wake_waiters(core._address)
    posting.wake_driver(core._address)
    posting.stop(core._address)
    loop.run(world)
