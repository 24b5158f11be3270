"""What the resident loop tells, one notice at a time: the state machines act on it as on messages that say the same.

All methods are called under the engine's lock, but for those that say otherwise.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from torchkv.core.events import Notice
from torchkv.core.loop.codes import (
    ALL_HERE,
    AUX,
    BOUND,
    BROKEN,
    CUT,
    DECIDED,
    DONE,
    GRANTED,
    LANDED,
    NEWS,
    OP_DONE,
    OUTSIDE,
    POSTED,
    PROMISE,
    RECEIVED,
    ROUND_OVER,
    SEAL,
    SENT,
    STRAY,
    VERDICT,
    WRITTEN,
)
from torchkv.core.loop.grants import FROM_NETWORK
from torchkv.core.loop.limits import MAX_AUX, MAX_GRANTED
from torchkv.core.peers import NetworkLane
from torchkv.engine.resident.bound_grants import as_ranks, grant_bound_on
from torchkv.engine.resident.journal import Journal
from torchkv.errors import KVError
from torchkv.layout.group_map import GroupMap
from torchkv.layout.pair_plan import PairPlan
from torchkv.protocol.actions import SendOp
from torchkv.protocol.instance import InstanceLeader, Part
from torchkv.protocol.messages import Attest, InstanceVerdict, Seal, Verdict
from torchkv.protocol.receiving.receiver import Receiver
from torchkv.protocol.receiving.request import ReceiverRequest
from torchkv.protocol.sending.grant_checks import loop_grant
from torchkv.protocol.sending.request import SenderRequest
from torchkv.protocol.sending.sender import Sender
from torchkv.transfer.peer_connection import PeerConnection

if TYPE_CHECKING:
    from torchkv.core.core import Core
    from torchkv.engine.source_pages import SourcePages

__all__ = ["Notices", "OnLoop", "path_of"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OnLoop:
    """What is on the loop now. `Flows` adds to it, and `Notices` takes away what has ended.

    sends, receives: by flow. lanes: by flow, of sends whose pages are put or staged. waiting: of sends that wait for
    their grant: the plan, and the indices of their ops. ops: by the loop's index. rounds: their indices. dead: ranks of
    which something may still come through the network. unpacking: failed receives that kernels still unpack into, by
    the flow that they had.
    """

    sends: dict[int, SenderRequest] = field(default_factory=dict)
    lanes: dict[int, NetworkLane] = field(default_factory=dict)
    waiting: dict[int, tuple[PairPlan, list[int]]] = field(default_factory=dict)
    receives: dict[int, ReceiverRequest] = field(default_factory=dict)
    rounds: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    ops: dict[int, tuple[SenderRequest, SendOp]] = field(default_factory=dict)
    unpacking: dict[int, ReceiverRequest] = field(default_factory=dict)


def path_of(req: SenderRequest, op: SendOp) -> str:
    """As which the bytes of an op on the loop count."""
    source: SourcePages = op.source_pages
    return "staged" if source.path == "staged" else req.loop_path


class Leave(Protocol):
    """Closes the flow of a receive; the bytes that have arrived: see `Flows`."""

    def __call__(self, req: ReceiverRequest, *, whole: bool = False) -> int: ...


class Notices:
    """One rank's."""

    def __init__(
        self,
        core: Core,
        held: OnLoop,
        *,
        group_map: GroupMap,
        sender: Sender,
        receiver: Receiver,
        leader: InstanceLeader,
        connections: Mapping[int, PeerConnection],
        path: Callable[[int, PairPlan], str],
        journal: Journal,
        leave: Leave,
        clock: Callable[[], float],
    ) -> None:
        self.core = core
        self.journal = journal
        self._group_map = group_map
        self._sender = sender
        self._receiver = receiver
        self._leader = leader
        self._connections = connections
        self._path = path
        self._leave = leave
        self._now = clock
        self._sends, self._lanes, self._waiting, self._ops = held.sends, held.lanes, held.waiting, held.ops
        self._receives, self._rounds, self._dead = held.receives, held.rounds, held.dead
        self._unpacking = held.unpacking
        self.has_broken = False  # whether a connection has, since the engine looked last
        self._notices: deque[Notice] = deque()  # taken from the loop, and not acted upon yet

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """The loop stands still inside, and the state machines know all that it knows."""
        with self.core.runner.standing_still():
            settled = False
            while not settled:
                heard = self.core.settle()
                self.catch_up(self._now())
                settled = heard and not self.core.has_commands  # what the loop has told may have led to new ones
            yield

    @property
    def has_news(self) -> bool:
        """Whether `catch_up` has anything to do, but for grants that nobody waits for. Any thread, without the lock."""
        events = self.core.events
        return events.pending or bool(self._notices) or (events.has_unclaimed and self._awaits_grants)

    @property
    def has_unclaimed(self) -> bool:
        """Whether grants have been left that nobody waits for."""
        return self.core.events.has_unclaimed

    @property
    def _awaits_grants(self) -> bool:
        return bool(self._waiting) or self.core.heeds_grants

    def catch_up(self, now: float, *, leave_grants: bool = False) -> None:
        """Tells the state machines all that the loop has done, in its order.

        leave_grants: but for grants, if no request waits for any: the verb that begins a request takes less time if the
        state machines have not heard of its grant.
        """
        leave_grants = leave_grants and not self._awaits_grants
        self._notices.extend(self.core.events.take(leave_grants=leave_grants))
        while self._notices:
            notice = self._notices.popleft()
            if notice.kind == OP_DONE:
                self._on_ops_done(notice.words, now)
            else:
                self._act(notice, now)

    def _act(self, notice: Notice, now: float) -> None:
        match notice.kind:
            case x if x == SENT:
                sent = self._sends[notice.index]
                self.journal.end_send(sent)
                del self._sends[notice.index]
                self._lanes.pop(notice.index, None)
                self.core.sends.end(notice.index)
                sent.flow = None
                self._sender.succeeded(sent)
            case x if x == BOUND:
                self._on_bound(notice.index, now)
            case x if x == GRANTED:
                self._on_granted(notice.source, notice.words, now)
            case x if x == RECEIVED:
                received = self._receives[notice.index]
                self._receiver.received(received, self._leave(received, whole=True), now)
            case x if x == ALL_HERE:
                if (receive := self._receives.get(notice.index)) is not None:
                    with self.core.runner.standing_still():
                        self._receiver.taken_back(receive, self._leave(receive), now)
            case x if x == ROUND_OVER:
                self._rounds.remove(notice.index)
                self.core.rounds.end(notice.index)
                self._leader.round_over(notice.index, now)
            case x if x == OUTSIDE:
                if (owner := self._ops.get(notice.index)) is not None:
                    self._sender.outside(*owner)
            case x if x == BROKEN:
                log.warning("rank %d: the GPU refuses work of the resident loop; Python goes on", self.core.rank)
                self._sender.take_back_from_loop(now)
            case x if x == LANDED:
                self._receiver.landed(self._unpacking.pop(notice.index))
            case x if x == CUT:
                self._on_cut(notice.source, now)
            case x if x == STRAY:
                self._on_stray(notice.source, notice.words, now)
            case _:
                assert notice.kind == NEWS

    def _on_cut(self, rank: int, now: float) -> None:
        """What was on its way from or to ``rank`` may be lost: Python goes on with every request of it."""
        self.has_broken = True
        self._sender.connection_broke(rank, now)
        for req in [req for req in self._receives.values() if rank in req.writers]:
            self.take_back_receive(req)
        with self.core.runner.standing_still():
            self._receiver.tell_verdicts(rank, self.core.peers.unsure_verdicts(rank))

    def take_back_receive(self, req: ReceiverRequest) -> None:
        with self.standing_still():
            if req.flow is not None:
                untold, unposted = self.core.receives.untold(req.flow)
                nbytes = self._leave(req)
                self._receiver.taken_back(req, nbytes, self._now(), untold=untold, unposted=unposted)

    def _on_bound(self, flow: int, now: float) -> None:
        req = self._sends[flow]
        plan, waiting = self._waiting.pop(flow)
        grant = grant_bound_on(self.core, flow, req.request, req.dst, plan)
        self._sender.bound(req, grant, {self._ops[index][1]: index for index in waiting}, now)

    def _on_granted(self, source: int, words: list[int], now: float) -> None:
        """A grant that the loop has not bound: Python does, as if it had come in a message."""
        _, flow, generation, *_, where = words
        body = self.core.peers.granted(source, flow, generation, network=where == FROM_NETWORK)
        if body is None or source in self._dead:
            return  # its receiver has ended the request
        try:
            grant = loop_grant(
                self._group_map,
                source,
                name=body.name,
                generation=generation,
                prefix_tokens=body.prefix_tokens,
                pages=body.pages,
                writers=as_ranks(body.writers),
                state_slot=body.state_slot,
                flow=flow,
            )
            self._sender.grants.meet(grant, now)
        except KVError as error:
            log.warning("rank %d ignored a grant of rank %d: %s", self.core.rank, source, error)

    def _on_ops_done(self, indices: list[int], now: float) -> None:
        """Ops have ended. Those of one request on one path count together."""
        groups: dict[tuple[SenderRequest, str], tuple[list[int], list[SendOp]]] = {}
        for index in indices:
            req, op = self._ops.pop(index)
            key = req, path_of(req, op)
            if (group := groups.get(key)) is None:
                group = groups[key] = ([], [])
            group[0].append(index)
            group[1].append(op)
        for (req, path), (ended, ops) in groups.items():
            self._count(req, ended, ops, path, now)

    def _count(self, req: SenderRequest, indices: list[int], ops: list[SendOp], path: str, now: float) -> None:
        """These ops of a request have ended. path: of all of them."""
        spared = self.core.sends.spared(indices) if path == "staged" else 0
        nbytes, spans = self.core.sends.op_results(indices)
        connection = self._connections.get(req.dst)
        if connection is not None:  # else a transfer of Python's has found it broken meanwhile
            mapped = connection.direct or (path == "staged" and connection.staging_view is not None)
            lane = "view" if mapped else connection.lane
            connection.count(lane, transfers=len(ops), spans=spans, nbytes=sum(nbytes) - spared)
        self._sender.copied(req, ops, nbytes, path, now)

    def _on_stray(self, source: int, words: list[int], now: float) -> None:
        """A record that the loop did not take: Python judges it, as a message with the same meaning."""
        head, _, generation, *_ = words
        match head & 0xFF:
            case x if x == VERDICT:
                self._sender.on_verdict(source, Verdict(generation))
            case x if x == POSTED:
                self._on_posted(source, words, now)
            case x if x == DONE:
                self._leader.done(source, generation, now)
            case x if x == DECIDED:
                self._receiver.on_instance_verdict(source, InstanceVerdict(generation, "", ""))
            case _:
                self._on_written(source, words, now)

    def _on_posted(self, source: int, words: list[int], now: float) -> None:
        head, flow, generation, hash0, hash1, prefix, num_pages = words
        if source not in self._group_map.siblings or prefix < 0 or not 0 <= num_pages <= MAX_GRANTED:
            return
        page_size = self._group_map.layout(source).page_size
        part = Part(generation, prefix, num_pages * page_size, page_size, flow & 0xFFFFFFFF)
        self._leader.posted(source, (hash0, hash1), part, told=head >> 8, now=now)

    def _on_written(self, source: int, words: list[int], now: float) -> None:
        """A record of a writer."""
        head, _, generation, lo, hi, nbytes, _ = words
        kind = head & 0xFF
        writer = self._receiver.writer(source, generation)
        if writer is None:
            return
        if kind == WRITTEN:
            if lo >= 0 and nbytes >= 0:
                layers, state = _layers_at(writer.plan, head >> 8 & 0xFFFFFF, head >> 32)
                path = self._path(source, writer.plan)
                self._receiver.on_attest(source, Attest(generation, layers, lo, hi, nbytes, path, state), now)
        elif kind == AUX and writer.sealed is None and len(writer.aux) < MAX_AUX:
            writer.aux += np.array(words[3:7], dtype=np.int64).tobytes()[: head >> 8 & 0xFF]
        elif kind == PROMISE:
            if (req := self._receiver.requests.by_generation.get(generation)) is not None:
                self._receiver.promised(source, req)
        elif kind == SEAL and hi == len(writer.aux) and lo >= 0:
            self._receiver.on_seal(source, Seal(generation, lo, writer.aux), now)


def _layers_at(plan: PairPlan, first: int, last: int) -> tuple[list[int], bool]:
    """The layers at positions [first, last) of a plan, and whether they are those of states."""
    paged = len(plan.layers)
    if first < paged or plan.state is None:
        return list(plan.layers[first:last]), False
    return list(plan.state.layers[first - paged : max(last - paged, 0)]), True
