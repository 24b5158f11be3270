"""One rank's engine: protocol, sessions and transfers put together, advanced one ``step`` at a time.

It owns no thread and reads no clock: `progress.ProgressThread` drives it in production, the loopback world in
tests. State that callers and the driver share is guarded by ``lock``; everything else belongs to the driver.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from torchkv.control import Control, PeerEvent, PeerState
from torchkv.env import Options
from torchkv.errors import KVError
from torchkv.layerwait import HeldLayers
from torchkv.mover import Mover
from torchkv.packer import Staging
from torchkv.plan import PairPlan
from torchkv.protocol.actions import Account, Action, Halt, Scatter, Settle, Start, Tell
from torchkv.protocol.instance import InstanceLeader
from torchkv.protocol.receiver import Receiver
from torchkv.protocol.sender import Sender
from torchkv.protocol.stageclient import StageClient
from torchkv.protocol.stagekeeper import StageKeeper
from torchkv.roster import Roster
from torchkv.route import LocalPages, Route
from torchkv.staging import StagingRing
from torchkv.talk import Frames, Talk
from torchkv.transport import Transport
from torchkv.unstager import Unstager
from torchkv.weak import weakly
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
)
from torchkv.work import KVWork

if TYPE_CHECKING:
    from torchkv.device import Device
    from torchkv.flags import Flags

__all__ = ["Engine"]

log = logging.getLogger(__name__)

TICK = 0.05
EAGER = 0.001  # seconds that an answer may take which peers and callers usually give at once
GATE_POLL = 0.0002  # how often a gate is looked at that only the host can watch
_SOON = (Grant, Alive, StageAsk, Staged, StageGrant)  # its caller goes on, or the peer has done what it announced


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
        self.keeper = StageKeeper(
            StagingRing(0 if ring is None else ring.nbytes),
            timeout=options.timeout,
            signals=len(ring.signals) if staging is not None and ring is not None and staging.packer.signals else 0,
        )
        self._client = StageClient()
        self.sender = Sender(roster, **timeouts, stages=self._client)
        self.receiver = Receiver(roster, **timeouts, keeper=self.keeper)
        self.routes: dict[int, Route] = {}
        self.whole_pages: set[tuple[int, ...]] = set()  # ranks seen to match page for page; the callers'
        self.lost: dict[int, str] = {}  # peers that do not answer -> why
        self.closed = ""  # why no call is served any more
        self._leader = InstanceLeader(roster, grant_timeout=options.grant_timeout)
        self._transport = transport
        self._control = control
        self._connect = connect
        self.device = device  # where the cache lies, if that is a GPU
        self.staging = staging
        self._talk = Talk(roster, key, control)
        self._to_self: deque[Message] = deque()
        self._mover = Mover(
            sender=self.sender,
            lock=self.lock,
            options=options,
            local=local,
            device=device,
            staging=staging,
            client=self._client,
            route=weakly(self.route),
            broke=weakly(self._replace),
            speak=weakly(self._speak_of_stages),
        )
        self._unstager = Unstager(
            receiver=self.receiver,
            lock=self.lock,
            packer=None if staging is None else staging.packer,
            speak=weakly(self._speak_of_stages),
        )
        self._settled: deque[tuple[KVWork, KVError | None, bytes]] = deque()  # still to be told
        self.eager_until = 0.0  # an answer is expected any moment: a request has just begun, or is about to end
        self.held_layers = HeldLayers()
        self._news = False  # something may have changed for those who wait for ``changed``: news came, a call failed
        self._broken: dict[int, list[Route]] = {}  # replaced routes, which still show when a dead peer has drained
        self._closing: list[Route] = []  # to dead peers
        self._unwatched: set[int] = set()  # peers with a grant but no route: nobody sees their last writes land
        self._dying: set[int] = set()  # dead peers whose last writes may still land
        self._next_tick = 0.0
        self._now = 0.0  # when the present step began

    # ------------------------------------------------------------------ driving

    def step(self, now: float, *, heard: int = -1, moved: bool = True) -> bool:
        """Advances everything without blocking. True if anything happened, so that another step is worth it.

        heard: on which file descriptors of the control channel something may have arrived, a bit each. moved: whether
        the transport may have anything to do that it has not armed for.
        """
        self._now = now
        busy = self._hear(now, heard) if heard else False
        if (events := self._control.events(now)) or self._dying:
            busy |= self._look_at_peers(events, now)
        busy |= self._settle(now)
        if moved or self._mover.posting or now >= self._next_tick:
            busy |= self._transport.progress()
        if self.moving:
            busy |= self._mover.open_gates(now)
            busy |= self._mover.advance(now)
            if self._unstager.advance(now):
                busy = self._news = True
            busy |= self._settle(now)
        if now >= self._next_tick:
            self._next_tick = now + TICK
            self.let_go()
            with self.lock:
                self._news |= self.sender.tick(now)
                self.receiver.tick(now)
                self._leader.tick(now)
            busy |= self._settle(now)
        return busy

    def _settle(self, now: float) -> bool:
        """Carries out what the state machines ask for, and lets everybody know. True if there was anything."""
        with self.lock:
            performed = self._perform(now)
            frames = self._talk.frames(now)
        if frames:
            self._talk.send(frames)
        # Last, and the peers before the callers here: whoever is woken wants the GIL, which this thread holds.
        if self._settled or self._news:
            self._announce()
        return performed or bool(frames)

    def _speak_of_stages(self) -> None:
        """In the middle of a step: a stage that is full or free, and of which nobody knows, carries nothing."""
        with self.lock:
            for rank, message in self._take_credits():
                self._tell(rank, message, self._now)
            frames = self._talk.frames(self._now)
        self._talk.send(frames)

    def hurry(self, now: float) -> Frames:
        """The grants just posted, for the caller to `say` without the lock: to wake the driver would take longer.

        Under the lock. Leaves to the driver what only that can do: another action than to tell, or making a route.
        """
        tells: list[Tell] = []
        for action in self.receiver.actions:
            if not isinstance(action, Tell) or (isinstance(action.message, Grant) and not self._watched(action.rank)):
                return []
            tells.append(action)
        self.receiver.actions = []
        for tell in tells:
            self._tell(tell.rank, tell.message, now)
        return self._talk.frames(now, {tell.rank for tell in tells if tell.rank != self.roster.rank})

    def say(self, frames: Frames) -> None:
        """Any thread."""
        self._talk.say(frames)

    def next_wake(self, now: float) -> float:
        """Seconds until ``step`` has something to do on its own."""
        wake = min(self._next_tick, self._talk.next_poll)
        if self._mover.gated:
            wake = min(wake, now + GATE_POLL)
        if self.device is not None:
            wake = min(wake, self.device.pause_ends)
        return max(0.0, wake - now)

    @property
    def dropped_frames(self) -> int:
        return self._talk.dropped

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
        for plan in self._likely_plans(self.roster.rank, self.roster.siblings, rank):
            self._mover.prepare(plan, self.route(rank))

    def prepare_to_receive(self, rank: int) -> None:
        """The same for requests from ``rank``, which may be staged."""
        if self.staging is None or self.staging.receiving is None:
            return
        siblings = self.roster.instances[self.roster.members[rank].instance]
        for plan in self._likely_plans(rank, siblings, self.roster.rank):
            self.staging.packer.prepare(plan, sending=False, checksum=self.roster.members[rank].checksum)

    def _likely_plans(self, writer: int, siblings: tuple[int, ...], reader: int) -> Iterator[PairPlan]:
        """Of requests from a whole instance, and of those from one rank, where that has all that the reader holds."""
        roster = self.roster
        choices = [roster.contributing(siblings, reader)]
        if choices[0] != (writer,) and roster.gap((writer,), reader) is None:
            choices.append((writer,))
        for writers in choices:
            yield from roster.plan(writer, writers, reader).parts

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
        self._news = True
        self._announce()

    def farewell(self, error: KVError, now: float) -> None:
        """Ends what is left, and tells peers what this rank can no longer write to."""
        with self.lock:
            self.sender.farewell(error)
        self._settle(now)

    # ------------------------------------------------------------------ control

    def _hear(self, now: float, readable: int) -> bool:
        frames = self._talk.hear(readable)
        if not frames:
            return False
        with self.lock:
            for frame in frames:
                for message in self._talk.accept(frame):
                    self._news = True
                    try:
                        self._handle(frame.source, message, now)
                    except KVError as error:
                        self._talk.dropped += 1
                        log.warning("rank %d ignored a message of rank %d: %s", self.roster.rank, frame.source, error)
        return True

    def _handle(self, src: int, message: Message, now: float) -> None:
        if isinstance(message, _SOON):
            self.eager_until = now + EAGER
        match message:
            case Grant():
                self.sender.on_grant(src, message, now)
            case Attest():
                self.receiver.on_attest(src, message, now)
            case Seal():
                self.receiver.on_seal(src, message, now)
            case Verdict():
                self.eager_until = now
                self.sender.on_verdict(src, message)
            case Revoke():
                self.sender.on_revoke(src, message, now)
            case Alive(to_writer=True):
                self.sender.on_alive(src, message, now)
            case Alive():
                self.receiver.on_alive(src, message, now)
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
                peer = self.roster.members[src]
                self._client.on_grant(src, message, peer.staging, peer.signals)
            case StageDenied():
                self._client.on_denied(src, message, self.roster.members[src].staging)
            case Withdrawn():
                self._client.on_withdrawn(src, message.generation)

    def _look_at_peers(self, events: Sequence[PeerEvent], now: float) -> bool:
        for event in events:
            self._on_peer(event, now)
        for rank in list(self._dying):
            if self._drained(rank) and not self._mover.moves_to(rank):
                self._dying.discard(rank)
                self._closing += self._broken.pop(rank, [])
                if rank in self.routes:  # its memory is mapped here, and would outlive its process
                    self._closing.append(self.routes[rank])
                self.let_go()
                if self._closing:
                    log.info("rank %d: memory of dead ranks stays mapped while a stream waits", self.roster.rank)
                with self.lock:
                    self.receiver.peer_dead(rank, now)
                self._news = True
        return bool(events)

    def let_go(self) -> None:
        """Closes the routes of dead peers, on a GPU if it is `Device.quiet`, and frees what was left; else later."""
        with nullcontext(True) if self.device is None else self.device.quiet() as quiet:
            while quiet and self._closing:
                self._closing.pop().close()
            if quiet and self.device is not None:
                self.device.free_left()

    def _drained(self, rank: int) -> bool:
        """Whether nothing that the dead ``rank`` wrote can land here any more."""
        routes = self._broken.get(rank, []) + ([self.routes[rank]] if rank in self.routes else [])
        return rank not in self._unwatched and all(r.channel is None or r.channel.drained for r in routes)

    def _watched(self, rank: int) -> bool:
        return rank in self.routes and rank not in self._unwatched

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
                self.changed.notify_all()
                return
            self.lost[event.rank] = event.reason
            self.sender.peer_lost(event.rank, event.reason)
            self.receiver.peer_lost(event.rank, event.reason)
            self._leader.peer_lost(event.rank, now)
            if event.state is PeerState.DEAD:
                self.sender.peer_dead(event.rank)
                self._dying.add(event.rank)
                self._talk.silence(event.rank)
            self.changed.notify_all()

    # ------------------------------------------------------------------ actions

    def _perform(self, now: float) -> bool:
        """Carries out what the state machines asked for. Under the lock."""
        performed = False
        while (actions := self._take_actions()) or self._to_self:
            performed = True
            for action in actions:
                self._act(action, now)
            while self._to_self:
                self._news = True
                self._handle(self.roster.rank, self._to_self.popleft(), now)
        return performed

    def _announce(self) -> None:
        """Wakes those who wait for something, and runs the callbacks of completed works.

        The latter without the lock, because they may call verbs.
        """
        while self._settled:
            work, error, aux = self._settled.popleft()
            if work._settle(error, aux):
                work._announce()
        if self._news:
            self._news = False
            with self.lock:
                self.held_layers.open()
                self.changed.notify_all()

    def _take_actions(self) -> list[Action]:
        taken: list[Action] = []
        if self._client.outbox or self.keeper.outbox:
            # First: a stage must be known to be written before a seal says that this was everything.
            taken += [Tell(rank, message) for rank, message in self._take_credits()]
        for machine in (self.sender, self.receiver, self._leader):
            if machine.actions:
                taken += machine.actions
                machine.actions = []
        return taken

    def _take_credits(self) -> list[tuple[int, Message]]:
        taken = [*self._client.outbox, *self.keeper.outbox]
        self._client.outbox, self.keeper.outbox = [], []
        return taken

    def _act(self, action: Action, now: float) -> None:
        match action:
            case Tell():
                self._tell(action.rank, action.message, now)
            case Settle():
                self._news |= action.error is not None
                self._settled.append((action.ticket, action.error, action.aux))
            case Account():
                action.ticket._account(action.nbytes, action.path)
            case Start():
                self._mover.start(action.op, action.grant)
            case Halt():
                self._mover.halt(action.op)
            case Scatter():
                self._unstager.start(action)

    def _tell(self, rank: int, message: Message, now: float) -> None:
        if rank == self.roster.rank:
            self._to_self.append(message)
        elif rank not in self._talk.silent:
            if isinstance(message, Grant) and not self._watched(rank):
                self._watch(rank)
            if isinstance(message, (Grant, Seal)):
                self.eager_until = now + EAGER
            elif isinstance(message, Verdict):
                self.eager_until = now
            self._talk.tell(rank, message)
