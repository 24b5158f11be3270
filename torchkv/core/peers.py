"""The peers of a resident loop: on this host by mailboxes, on others through the network."""

from __future__ import annotations

import ctypes
import logging
import struct
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from torchkv.arrays import Int64Array
from torchkv.core import steering
from torchkv.core.loop import grants, loop, mailbox, network, staging, unpacking
from torchkv.core.loop.codes import CREDIT, CUT, FREE, GRANTED, NEWS, VERDICT
from torchkv.core.loop.events import emit
from torchkv.core.loop.limits import DUE, LINE, MAX_FLOWS, MAX_GRANTED, MAX_NAME, MAX_PEERS, MESSAGE_NBYTES
from torchkv.core.loop.state.peers import Peer, Record
from torchkv.core.loop.state.world import GRANT_NBYTES, word_at
from torchkv.errors import PeerLost, TransportUnavailable
from torchkv.host import shared_memory
from torchkv.transport.interface import Channel, NativeChannel

if TYPE_CHECKING:
    from torchkv.core.runner import Runner

__all__ = ["GrantBody", "LoopPeers", "NetworkLane"]

log = logging.getLogger(__name__)

_PEER = list(Peer.__annotations__)
_BODY = struct.Struct(f"<{GRANT_NBYTES // 8}q")
_DRIVING = word_at("driving") // 8
_HEAD, _GENERATION = (list(Record.__annotations__).index(name) for name in ("head", "generation"))
# Fields that begin anew with each lane: all, but for the standing stages, and of a peer that has a mailbox only these.
_OF_STAGES = _PEER.index("stage")
_OF_LANE = _PEER[:_OF_STAGES]
_OF_NETWORK = _PEER[_PEER.index("endpoint") : _OF_STAGES]


@dataclass(slots=True)
class GrantBody:
    """A grant as its receiver wrote it; checked is only that the parts lie where they should. writers: a bit for each.

    state_slot: None if none is granted.
    """

    name: bytes
    pages: Int64Array
    prefix_tokens: int
    writers: int
    state_slot: int | None


class NetworkLane:
    """The loop's way to a rank of another host: see `torchkv.core.loop.network`. Made by `LoopPeers.connect_network`.

    native: None after the end, or if the transport has none. failed: whether what is on its way may never arrive.
    """

    def __init__(self) -> None:
        self.native: NativeChannel | None = None
        self.memory = np.zeros(network.NETWORK_NBYTES // 8, dtype=np.int64)
        self.failed = False

    @property
    def is_driven(self) -> bool:
        """Whether its transport must be driven. Else a flush ends at once, and the lane carries no records."""
        return self.native is not None and self.native.worker != 0

    def verdicts(self) -> list[int]:
        """Generations of which the latest messages have told that a receive has succeeded. While the loop stands still.

        Which of them have come nobody knows.
        """
        words = self.memory[: network.RECORDS * MESSAGE_NBYTES // 8].reshape(network.RECORDS, -1)
        found: list[int] = words[words[:, _HEAD] & 0xFF == VERDICT, _GENERATION].tolist()
        return found


class LoopPeers:
    """One rank's. What is not marked "any thread" is called under the engine's lock.

    slots: of `World`'s ``peers``, by rank. ranks: by slot.
    """

    def __init__(self, rank: int, runner: Runner) -> None:
        self.slots: dict[int, int] = {rank: rank}
        self.ranks: dict[int, int] = {rank: rank}
        self._rank = rank
        self._runner = runner
        self._memory = runner.memory
        self._segment: torch.Tensor = shared_memory.allocate(mailbox.SEGMENT_NBYTES)
        self._segment_at = self._segment.data_ptr()
        self._bytes = self._segment.numpy().data
        runner.world["bell"] = self._segment_at
        self._mapped: dict[int, shared_memory.Segment] = {}  # by rank
        self._granted: dict[int, memoryview] = {}  # by rank, as long as that is mapped: the slots of its grants
        self._met: dict[int, bytes] = {}  # mailboxes of newcomers that have not said which one this rank may write to
        self._lanes: dict[int, NetworkLane] = {}  # by rank
        self._unsure: dict[int, set[int]] = {}  # by rank: see `unsure_verdicts`
        self._pieces: dict[int, Int64Array] = {}  # by rank
        self._arrivals: dict[int, Int64Array] = {}  # by rank: of its grants; longer than a lane; touched as used

    # ------------------------------------------------------------------ mailboxes

    def descriptor(self) -> bytes:
        """With this a peer of the same host maps this rank's mailboxes: see `connect`."""
        return shared_memory.share(self._segment) or b""

    def reserve_slot(self, rank: int, slot: int | None = None) -> int:
        """The mailbox here that ``rank`` will write to. slot: which one it must be; None: any that is free.

        Raises ``TransportUnavailable`` if there is none. `disconnect` frees it.
        """
        if rank in self.slots:
            return self.slots[rank]
        if slot is None:
            slot = next((each for each in range(MAX_PEERS) if each not in self.ranks), MAX_PEERS)
        if slot >= MAX_PEERS or slot in self.ranks:
            raise TransportUnavailable(f"rank {rank}: the resident loop has {MAX_PEERS} mailboxes, and none for it")
        self.slots[rank], self.ranks[slot] = slot, rank
        return slot

    def meet(self, rank: int, mailboxes: bytes) -> int | None:
        """The mailbox here that the loop of ``rank``, a newcomer of this host, may write to.

        mailboxes: the descriptor that it published. None if there is no mailbox for it: its requests go through Python.
        """
        if not mailboxes:
            return None
        try:
            slot = self.reserve_slot(rank)
        except TransportUnavailable as error:
            log.info("rank %d: requests of rank %d go through Python: %s", self._rank, rank, error)
            return None
        self._met[rank] = mailboxes
        return slot

    def on_mailbox(self, rank: int, slot: int) -> None:
        """The newcomer's loop takes records from this one in its mailbox ``slot``."""
        if (mailboxes := self._met.pop(rank, None)) is None:
            return
        try:
            self.connect(rank, mailboxes, slot=slot)
        except TransportUnavailable as error:
            log.info("rank %d: requests of rank %d go through Python: %s", self._rank, rank, error)

    def connect(self, rank: int, descriptor: bytes, *, slot: int | None = None) -> None:
        """Maps the mailboxes of ``rank``, which has reserved ``slot`` there for this rank: see `reserve_slot`.

        slot: None among ranks that call each other by the same numbers: then these are their slots.
        Raises ``TransportUnavailable`` and ``ProtocolError`` if it cannot.
        """
        if slot is None:
            self.reserve_slot(rank, rank)
            slot = self._rank
        here = self.slots[rank]
        segment = shared_memory.open_segment(descriptor)
        if segment.nbytes < mailbox.SEGMENT_NBYTES or slot >= MAX_PEERS:
            segment.close()
            raise TransportUnavailable(f"the mailboxes of rank {rank} take {segment.nbytes} bytes: another version's")
        self._mapped[rank] = segment
        slots = (ctypes.c_uint8 * (MAX_FLOWS * mailbox.GRANT_SLOT)).from_address(segment.ptr + mailbox.GRANTS_AT)
        self._granted[rank] = memoryview(slots).cast("B")
        inbox_head, inbox = (self._segment_at + offset for offset in mailbox.mailbox_at(here))
        outbox_head, outbox = (segment.ptr + offset for offset in mailbox.mailbox_at(slot))
        with self._runner.standing_still():
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
        self._met.pop(rank, None)
        slot = self.slots.get(rank)
        if slot is None or rank == self._rank:
            return
        with self._runner.standing_still():
            world = self._memory[0]
            assert not np.any((world["sends"]["state"] != FREE) & (world["sends"]["peer"] == slot))
            loop.drop_due_to(self._runner.world, slot)
            unpacking.forget_source(self._runner.world, slot)
            for events in (world["events"], world["unclaimed"]):
                events["kind"][(events["kind"] == GRANTED) & (events["source"] == slot)] = NEWS  # no more
            self._cut(rank)
            self._unsure.pop(rank, None)
            self._arrivals.pop(rank, None)
            self._pieces.pop(rank, None)
            world["stages"] = len(self._pieces)
            world["peers"][slot] = 0
            world["votes"][slot] = world["awaited"][slot] = world["rounds_of"][slot] = 0
            head, box = mailbox.mailbox_at(slot)
            for at, nbytes in ((head, LINE), (box, mailbox.MAILBOX_NBYTES)):
                self._bytes[at : at + nbytes] = bytes(nbytes)
        del self.ranks[slot], self.slots[rank]
        self._granted.pop(rank, None)
        if (segment := self._mapped.pop(rank, None)) is not None:
            segment.close()

    def close(self) -> None:
        """Unmaps all mailboxes of others. The loop has ended."""
        self._granted.clear()
        while self._mapped:
            self._mapped.popitem()[1].close()

    def reaches(self, rank: int) -> bool:
        """Whether records can be sent to ``rank``: both ranks have mapped each other's mailboxes."""
        at = mailbox.mailbox_at(self.slots[rank])[0] + mailbox.READS_AT if rank in self._mapped else 0
        return at > 0 and self._bytes[at] != 0

    # ------------------------------------------------------------------ grants, which lie behind the mailboxes

    def hears(self, rank: int) -> bool:
        """Whether the loop of ``rank`` takes grants from this one, in its mailbox or through the network."""
        if rank in self._mapped or self.lane(rank) is None:
            return self.reaches(rank)
        return bool(self._memory[0]["peers"][self.slots[rank]]["hears"] == 1)

    def name_grant(self, flow: int, name: bytes) -> int:
        """Writes the name of the grant of a receive, at most `MAX_NAME` bytes. The address of the grant's body."""
        at = mailbox.GRANTS_AT + flow * mailbox.GRANT_SLOT
        self._bytes[at + grants.NAME_AT : at + grants.NAME_AT + len(name)] = name
        return self._segment_at + at

    def granted(self, rank: int, flow: int, generation: int, *, network: bool = False) -> GrantBody | None:
        """The grant that ``rank`` has given; None if another, or none, lies in the slot. Its words are not checked.

        network: whether it has come through the network, instead of lying in mapped memory.
        """
        if rank not in (self._arrivals if network else self._mapped) or not 0 <= flow < MAX_FLOWS:
            return None
        if network:
            slots = self._arrivals[rank].data.cast("B")[grants.SLOTS_AT :]
        else:
            slots = self._granted[rank]
        at = flow * mailbox.GRANT_SLOT
        # Each part is copied once and then looked at, because the peer may change it meanwhile.
        found, _, _, writers, prefix, count, name_nbytes, num_slots = _BODY.unpack_from(slots, at)
        if found != generation or not 0 <= count <= MAX_GRANTED or not 0 <= name_nbytes <= MAX_NAME:
            return None
        if not 0 <= num_slots <= 1:
            return None
        name, ids = at + grants.NAME_AT, at + grants.IDS_AT
        granted = np.frombuffer(bytes(slots[ids : ids + 8 * (count + num_slots)]), np.int64)
        slot = int(granted[count]) if num_slots else None
        return GrantBody(bytes(slots[name : name + name_nbytes]), granted[:count], prefix, writers, slot)

    def takes_grant(self, rank: int, flow: int, generation: int) -> bool:
        """Whether a grant of ``rank`` that has come in a message is new. Then the loop will not take it, too.

        flow: under which the loop of ``rank`` may have told of it. While the loop stands still, and has settled.
        """
        arrivals = self._arrivals.get(rank)
        if arrivals is None or not 0 <= flow < MAX_FLOWS:
            return True
        if arrivals[flow] >= generation:
            return False
        arrivals[flow] = generation
        return True

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
        with self._runner.standing_still():
            self._cut(rank)
            world = self._memory[0]
            if native.worker or not world["worker"]:
                self._use_worker(native)
            peer = world["peers"][slot]
            for name in _OF_NETWORK if peer["outbox"] else _OF_LANE:
                peer[name] = 0
            peer["endpoint"], peer["memory"] = native.endpoint, lane.memory.ctypes.data
            peer["functions"] = native.functions.ctypes.data
            peer["tag_in"], peer["tag_out"] = tags
            world["num_peers"] = max(slot + 1, int(world["num_peers"]))
            self._lanes[rank] = lane
            world["lanes"] = len(self._lanes)
            if lane.is_driven and not peer["outbox"]:
                if rank not in self._arrivals:
                    self._arrivals[rank] = np.zeros(grants.ARRIVALS_NBYTES // 8, dtype=np.int64)
                peer["arrivals"] = self._arrivals[rank].ctypes.data
                grants.greet(self._runner.world, slot)
            if peer["taken"] and not peer["crediting"]:  # the last CREDIT may be lost with the lane before
                peer["crediting"] = 1
                mailbox.owe(self._runner.world, CREDIT, slot, 0, 0)
        steering.wake_loop(self._runner.address)
        return lane

    def _use_worker(self, native: NativeChannel) -> None:
        """What all lanes share, of which at most one kind has a worker."""
        world = self._memory[0]
        world["worker"], world["native"][:] = native.worker, native.functions
        world["put_params"][: len(native.put_params)] = native.put_params
        world["params"][: len(native.params)] = native.params
        world["key_at"] = self._runner.address + word_at("put_params") + 8 * native.key_word

    def cut(self, rank: int, lane: NetworkLane) -> None:
        """The endpoint of a lane ends: nothing uses it after this. Any thread, without the engine's lock."""
        held = np.zeros(1, dtype=np.int64)
        try:
            steering.hold(self._runner.address, held.ctypes.data)
            if self._lanes.get(rank) is lane:
                self._cut(rank)
        finally:
            if held[0]:
                steering.let_go(self._runner.address, held.ctypes.data)

    def _cut(self, rank: int) -> None:
        """While the loop stands still."""
        if (lane := self._lanes.pop(rank, None)) is None:
            return
        self._memory[0]["lanes"] = len(self._lanes)
        peer = self._memory[0]["peers"][self.slots[rank]]
        lane.failed = True  # what has not arrived yet may never do
        lane.native = None
        if peer["endpoint"]:
            network.cut(self._runner.world, cast(Peer, peer))
            emit(self._runner.world, CUT, 0, self.slots[rank])
        if not peer["outbox"]:
            self._unsure.setdefault(rank, set()).update(lane.verdicts())

    def unsure_verdicts(self, rank: int) -> list[int]:
        """Generations of receives that have succeeded, as their writer ``rank`` may never hear through the network.

        The loop tells it no more of them. Once no receive of ``rank`` is on the loop, while that stands still.
        """
        unsure = self._unsure.pop(rank, set())
        slot = self.slots.get(rank)
        if slot is None or self._memory[0]["peers"][slot]["outbox"]:
            return []
        lane, world = self._lanes.get(rank), self._memory[0]
        if lane is not None and not world["peers"][slot]["failed"]:
            return sorted(unsure)  # it tells what is due through this one
        if lane is not None:
            unsure.update(lane.verdicts())
        places = np.arange(world["due_head"], world["due_tail"]) & (DUE - 1)
        due = world["due"][places]
        told = due[:, 0] == (VERDICT | slot << 8)
        unsure.update(due[told, 2].tolist())
        kept = due[~told]
        world["due"][places[: len(kept)]] = kept
        world["due_tail"] = world["due_head"] + len(kept)
        return sorted(unsure)

    def lane(self, rank: int) -> NetworkLane | None:
        """The way to ``rank`` through the network, while there is one that works."""
        lane = self._lanes.get(rank)
        failed = lane is not None and self._memory[0]["peers"][self.slots[rank]]["failed"] != 0
        return None if failed else lane

    # ------------------------------------------------------------------ standing stages

    def let_stage(self, rank: int, address: int, nbytes: int) -> None:
        """From now on ``rank`` may put pieces into these bytes of this rank's ring."""
        with self._runner.standing_still():
            peer = self._memory[0]["peers"][self.slots[rank]]
            peer["ring"], peer["ring_nbytes"], peer["reached"], peer["taken"] = address, nbytes, 0, 0

    def use_stage(self, rank: int, own: tuple[int, int], there: tuple[int, int], nbytes: int) -> None:
        """``rank`` has granted a standing stage. own, there: address and key of this rank's bytes, and of the stage.

        Of a stage that is mapped here ``own`` is the stage itself, and the others are 0.
        """
        self._pieces[rank] = np.zeros(staging.PIECES_NBYTES // 8, dtype=np.int64)
        with self._runner.standing_still():
            self._memory[0]["stages"] = len(self._pieces)
            peer = self._memory[0]["peers"][self.slots[rank]]
            peer["pieces"], peer["stage_nbytes"] = self._pieces[rank].ctypes.data, nbytes
            (peer["stage"], peer["stage_key"]), (peer["there"], peer["there_key"]) = own, there

    def staged(self, rank: int) -> tuple[int, int]:
        """Of the pieces for ``rank`` the number of the last one and the position behind it; 0 where these are over."""
        peer = self._memory[0]["peers"][self.slots[rank]]
        untold, waiting = peer["piece_head"] < peer["piece_tail"], peer["freed"] < peer["packed"]
        if untold or waiting:
            self._memory[0]["under_way"] = 1
            steering.wake_loop(self._runner.address)
        return int(peer["piece_tail"]) if untold else 0, int(peer["packed"]) if waiting else 0

    def has_piece(self, rank: int, lane: NetworkLane | None, piece: int) -> bool:
        """Whether all pieces before this number have arrived in the stage of ``rank``. lane: None if that is mapped.

        Raises ``PeerLost`` if nobody will know.
        """
        posted = 1 << 62  # till all of them are put
        if rank in self._pieces and not (lane is not None and lane.failed):
            peer = self._memory[0]["peers"][self.slots[rank]]
            if peer["piece_head"] >= piece:
                return True
            if peer["piece_put"] >= piece:
                posted = staging.put_of(self._pieces[rank], piece - 1)
        return self.has_arrived(rank, lane, posted)

    def has_come_back(self, rank: int, lane: NetworkLane | None, position: int) -> bool:
        """Whether ``rank`` has unpacked its pieces up to this position. Raises ``PeerLost`` if nobody will know."""
        slot = self.slots.get(rank)
        if slot is not None and self._memory[0]["peers"][slot]["freed"] >= position:
            return True
        return self.has_arrived(rank, lane, 1 << 62)

    def has_arrived(self, rank: int, lane: NetworkLane | None, posted: int) -> bool:
        """Whether the put of this number, and all before it, are in the memory of ``rank``. lane: None if it is mapped.

        Raises ``PeerLost`` if nobody will know.
        """
        if lane is None:
            if rank not in self._pieces:
                raise PeerLost(f"rank {rank} ended while pages were staged: some may not have been unpacked")
            return posted == 0
        if not lane.failed:
            peer = self._memory[0]["peers"][self.slots[rank]]
            if peer["flushed"] >= posted:
                return True
            lane.failed = bool(peer["failed"])
        if lane.failed:
            raise PeerLost(f"the connection to rank {rank} broke while pages were put: some may not have arrived")
        return False

    @property
    def drives_transport(self) -> bool:
        """Whether the loop drives the transport, so that Python need not do that for what peers put here."""
        return self._runner.running and self._runner.words[_DRIVING] != 0

    def hear_network(self) -> None:
        """Has the loop look for messages of the network, if it expects none."""
        if self._lanes and not self.drives_transport:
            steering.wake_loop(self._runner.address)
