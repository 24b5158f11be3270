"""One rank's engine: protocol, sessions and transfers put together, advanced one ``step`` at a time.

It owns no thread and reads no clock: `progress.ProgressThread` drives it in production, the loopback world in
tests. State that callers and the driver share is guarded by ``lock``; everything else belongs to the driver.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from torchkv.control import Control, PeerEvent, PeerState
from torchkv.env import Options
from torchkv.errors import AuthError, KVError, ProtocolError
from torchkv.mover import Mover
from torchkv.packer import Staging
from torchkv.protocol.actions import Account, Action, Halt, Scatter, Settle, Start, Tell
from torchkv.protocol.instance import InstanceLeader
from torchkv.protocol.receiver import Receiver
from torchkv.protocol.sender import Sender
from torchkv.protocol.session import Session
from torchkv.protocol.stageclient import StageClient
from torchkv.protocol.stagekeeper import StageKeeper
from torchkv.roster import Roster
from torchkv.route import LocalPages, Route
from torchkv.staging import StagingRing
from torchkv.transport import Transport
from torchkv.unstager import Unstager
from torchkv.wire import (
    Abort,
    Alive,
    Attest,
    Grant,
    InstanceVerdict,
    Message,
    Outcome,
    Post,
    Quiesced,
    Revoke,
    Seal,
    StageAsk,
    Staged,
    StageDenied,
    StageGrant,
    Verdict,
    Withdraw,
    Withdrawn,
    decode_frame,
    encode_frame,
)
from torchkv.work import KVWork

if TYPE_CHECKING:
    from torchkv.device import Device
    from torchkv.flags import Flags

__all__ = ["Engine"]

log = logging.getLogger(__name__)

TICK = 0.05
GATE_POLL = 0.0002  # how often a gate is looked at that only the host can watch


class Engine:
    """The moving parts of one registered rank."""

    def __init__(
        self,
        *,
        roster: Roster,
        options: Options,
        key: bytes,
        transport: Transport,
        control: Control,
        local: LocalPages | None,
        connect: Callable[[int], Route],
        device: Device | None = None,
        staging: Staging | None = None,
    ) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)  # notified when a grant or a layer has arrived
        self.roster = roster
        self.options = options
        timeouts = {"timeout": options.timeout, "grant_timeout": options.grant_timeout}
        ring = None if staging is None else staging.receiving
        self.keeper = StageKeeper(StagingRing(0 if ring is None else ring.nbytes), timeout=options.timeout)
        self._client = StageClient()
        self.sender = Sender(roster, **timeouts, stages=self._client)
        self.receiver = Receiver(roster, **timeouts, keeper=self.keeper)
        self.routes: dict[int, Route] = {}
        self.whole_pages: set[tuple[int, ...]] = set()  # ranks seen to match page for page; the callers'
        self.lost: dict[int, str] = {}  # peers that do not answer -> why
        self.dropped_frames = 0
        self.closed = ""  # why no call is served any more
        self._leader = InstanceLeader(roster, grant_timeout=options.grant_timeout)
        self._key = key
        self._transport = transport
        self._control = control
        self._connect = connect
        self.device = device  # where the cache lies, if that is a GPU
        self.staging = staging
        self._sessions = {
            rank: Session(roster.rank, roster.me.incarnation, member.incarnation)
            for rank, member in roster.members.items()
            if rank != roster.rank
        }
        self._talking: set[int] = set()  # sessions that may have something to send
        self._to_self: deque[Message] = deque()
        self._mover = Mover(
            sender=self.sender,
            lock=self.lock,
            options=options,
            local=local,
            device=device,
            staging=staging,
            client=self._client,
            route=self.route,
            broke=self._replace,
        )
        self._unstager = Unstager(
            receiver=self.receiver, lock=self.lock, packer=None if staging is None else staging.packer
        )
        self._completed: deque[KVWork] = deque()  # their callbacks are still to run
        self._broken: dict[int, list[Route]] = {}  # replaced routes, which still show when a dead peer has drained
        self._unwatched: set[int] = set()  # peers with a grant but no route: nobody sees their last writes land
        self._dead: set[int] = set()  # for ever: nothing is said to them any more
        self._dying: set[int] = set()  # dead peers whose last writes may still land
        self._next_tick = 0.0

    # ------------------------------------------------------------------ driving

    def step(self, now: float) -> bool:
        """Advances everything without blocking. True if anything happened, so that another step is worth it."""
        busy = self._hear(now)
        busy |= self._look_at_peers(now)
        with self.lock:
            busy |= self._perform(now)
        self._announce()
        busy |= self._mover.open_gates(now)
        busy |= self._transport.progress()
        busy |= self._mover.advance(now)
        busy |= self._unstager.advance(now)
        if now >= self._next_tick:
            self._next_tick = now + TICK
            with self.lock:
                self.sender.tick(now)
                self.receiver.tick(now)
                self._leader.tick(now)
        with self.lock:
            busy |= self._perform(now)
        self._announce()
        return self._speak(now) or busy

    def next_wake(self, now: float) -> float:
        """Seconds until ``step`` has something to do on its own."""
        wake = self._next_tick
        for rank in self._talking:
            wake = min(wake, self._sessions[rank].next_poll)
        if self._mover.gated:
            wake = min(wake, now + GATE_POLL)
        return max(0.0, wake - now)

    @property
    def flags(self) -> Flags | None:
        """Through which streams wait for works, if the cache lies on a GPU."""
        return None if self.device is None else self.device.flags

    @property
    def moving(self) -> bool:
        """Whether transfers are under way, which only the transport's progress advances."""
        return self._mover.moving or self._unstager.busy

    def route(self, rank: int) -> Route:
        """The way to ``rank``, made on first use. Driver's thread only."""
        if rank not in self.routes:
            self.routes[rank] = self._connect(rank)
        return self.routes[rank]

    def prepare(self, rank: int) -> None:
        """Does before the first request to ``rank`` what it would otherwise have to wait for."""
        writers = self.roster.contributing(self.roster.siblings, rank)
        for plan in self.roster.plan(self.roster.rank, writers, rank).parts:
            self._mover.prepare(plan, self.route(rank))

    def prepare_to_receive(self, rank: int) -> None:
        """The same for requests from ``rank``, if they are likely to be staged."""
        if self.staging is None or not self._mover.will_stage(self.route(rank)):
            return
        writers = self.roster.contributing(self.roster.instances[self.roster.members[rank].instance], self.roster.rank)
        for plan in self.roster.plan(rank, writers, self.roster.rank).parts:
            self.staging.packer.prepare(plan, sending=False, checksum=self.options.checksum)

    def staging_use(self, rank: int) -> dict[str, int]:
        """Bytes of staging memory; see `Explanation`. Driver's thread only."""
        with self.lock:
            return {
                "send": 0 if self.staging is None else self.staging.sending.taken,
                "recv": self.keeper.ring.capacity,
                "in use": self.keeper.ring.in_use,
                "quarantined": self.keeper.ring.quarantined,
                "peer": self.roster.members[rank].staging,
            }

    def _replace(self, route: Route) -> None:
        """A channel broke under a transfer. A later request gets a new one, if the peer is still there.

        The old one stays open: were the peer dead, it would be what shows that the peer's own writes have landed.
        """
        if self.routes.get(route.rank) is route:
            self._broken.setdefault(route.rank, []).append(self.routes.pop(route.rank))

    def abandon(self, error: KVError, now: float) -> None:
        """Fails every pending call, because the group goes away. Then step until not ``moving``, and say farewell."""
        with self.lock:
            self.closed = str(error)
            self.sender.abandon(error)
            self.receiver.abandon(error)
            self._perform(now)
            self.changed.notify_all()
        self._announce()

    def farewell(self, error: KVError, now: float) -> None:
        """Ends what is left, and tells peers what this rank can no longer write to."""
        with self.lock:
            self.sender.farewell(error)
            self._perform(now)
        self._announce()
        self._speak(now)

    # ------------------------------------------------------------------ control

    def _hear(self, now: float) -> bool:
        frames = self._control.receive()
        for data in frames:
            try:
                frame = decode_frame(data, self._key)
                session = self._sessions.get(frame.source)
                if session is None:
                    raise ProtocolError(f"control frame of rank {frame.source}, which is not in this group")
                messages = session.receive(frame)
            except (AuthError, ProtocolError) as error:
                self.dropped_frames += 1
                log.warning("rank %d dropped a control frame: %s", self.roster.rank, error)
                continue
            self._talking.add(frame.source)
            for message in messages:
                self._dispatch(frame.source, message, now)
        return bool(frames)

    def _dispatch(self, src: int, message: Message, now: float) -> None:
        with self.lock:
            try:
                self._handle(src, message, now)
            except (ProtocolError, KVError) as error:
                self.dropped_frames += 1
                log.warning("rank %d ignored a message of rank %d: %s", self.roster.rank, src, error)
            self.changed.notify_all()

    def _handle(self, src: int, message: Message, now: float) -> None:
        match message:
            case Grant():
                self.sender.on_grant(src, message, now)
            case Revoke():
                self.sender.on_revoke(src, message)
            case Verdict():
                self.sender.on_verdict(src, message)
            case Alive(to_writer=True):
                self.sender.on_alive(src, message, now)
            case Alive():
                self.receiver.on_alive(src, message, now)
            case Attest():
                self.receiver.on_attest(src, message, now)
            case Seal():
                self.receiver.on_seal(src, message, now)
            case Abort():
                self.receiver.on_abort(src, message)
            case Quiesced():
                self.receiver.on_quiesced(src, message, now)
            case Post():
                self._leader.on_post(src, message, now)
            case Outcome():
                self._leader.on_outcome(src, message, now)
            case InstanceVerdict():
                self.receiver.on_instance_verdict(src, message)
            case StageAsk():
                self.receiver.on_stage_ask(src, message, now)
            case Staged():
                self.receiver.on_staged(src, message, now)
            case Withdraw():
                self.receiver.on_withdraw(src, message)
            case StageGrant():
                self._client.on_grant(src, message, self.roster.members[src].staging)
            case StageDenied():
                self._client.on_denied(src, message, self.roster.members[src].staging)
            case Withdrawn():
                self._client.on_withdrawn(src, message.generation)

    def _speak(self, now: float) -> bool:
        said = False
        self._talking -= self._dead
        for rank in list(self._talking):
            session = self._sessions[rank]
            if frames := session.poll(now):
                self._control.send(rank, [encode_frame(frame, self._key) for frame in frames])
                said = True
            if session.idle:
                self._talking.discard(rank)
        return said

    def _look_at_peers(self, now: float) -> bool:
        events = self._control.events(now)
        for event in events:
            self._on_peer(event, now)
        for rank in list(self._dying):
            if self._drained(rank) and not self._mover.moves_to(rank):
                self._dying.discard(rank)
                for route in self._broken.pop(rank, []):
                    route.close()
                if rank in self.routes:  # its memory is mapped here, and would outlive its process
                    self.routes[rank].close()
                with self.lock:
                    self.receiver.peer_dead(rank, now)
        return bool(events)

    def _drained(self, rank: int) -> bool:
        """Whether nothing that the dead ``rank`` wrote can land here any more."""
        routes = self._broken.get(rank, []) + ([self.routes[rank]] if rank in self.routes else [])
        return rank not in self._unwatched and all(r.channel is None or r.channel.drained for r in routes)

    def _watch(self, rank: int) -> None:
        """Before ``rank`` may write here: the route on which its last writes could be seen to land, if it dies."""
        try:
            self.route(rank)
        except (KVError, OSError) as error:
            self._unwatched.add(rank)
            log.warning(
                "rank %d: no route to writer %d (%s): if it dies, its pages stay quarantined",
                self.roster.rank,
                rank,
                error,
            )
        else:
            self._unwatched.discard(rank)

    def _on_peer(self, event: PeerEvent, now: float) -> None:
        log.info("rank %d: %s", self.roster.rank, event.reason)
        with self.lock:
            if event.state is PeerState.FOUND:
                self.lost.pop(event.rank, None)
                self._leader.peer_found(event.rank)
                return
            self.lost[event.rank] = event.reason
            self.sender.peer_lost(event.rank, event.reason)
            self.receiver.peer_lost(event.rank, event.reason)
            self._leader.peer_lost(event.rank, now)
            if event.state is PeerState.DEAD:
                self.sender.peer_dead(event.rank)
                self._dying.add(event.rank)
                self._dead.add(event.rank)
            self.changed.notify_all()

    # ------------------------------------------------------------------ actions

    def _perform(self, now: float) -> bool:
        """Carries out what the state machines asked for. Under the lock."""
        performed = False
        while actions := self._take_actions():
            performed = True
            for action in actions:
                self._act(action)
            while self._to_self:
                self._handle(self.roster.rank, self._to_self.popleft(), now)
        if performed:
            self.changed.notify_all()
        return performed

    def _announce(self) -> None:
        """Runs the callbacks of completed works. Without the lock, because they may call verbs."""
        while self._completed:
            self._completed.popleft()._announce()

    def _take_actions(self) -> list[Action]:
        taken: list[Action] = []
        # First: a stage must be known to be written before a seal says that this was everything.
        for credits in (self._client, self.keeper):
            taken += [Tell(rank, message) for rank, message in credits.outbox]
            credits.outbox = []
        for machine in (self.sender, self.receiver, self._leader):
            taken += machine.actions
            machine.actions = []
        return taken

    def _act(self, action: Action) -> None:
        match action:
            case Tell(rank, message) if rank == self.roster.rank:
                self._to_self.append(message)
            case Tell(rank, _) if rank in self._dead:
                pass
            case Tell(rank, message):
                if isinstance(message, Grant):
                    self._watch(rank)
                self._sessions[rank].send(message)
                self._talking.add(rank)
            case Settle(ticket, error, aux):
                work: KVWork = ticket
                if work._settle(error, aux):
                    self._completed.append(work)
                self.changed.notify_all()
            case Account(ticket, nbytes, path):
                ticket._account(nbytes, path)
            case Start(op, grant):
                self._mover.start(op, grant)
            case Halt(op):
                self._mover.halt(op)
            case Scatter():
                self._unstager.start(action)
