"""One rank's engine: connects the request state machines to control messages and transfers, one ``step`` at a time.

The engine owns no thread and reads no clock. Its driver is `progress.ProgressThread` in production, and a simulated
world in tests. ``lock`` guards the state that callers share with the driver: the state machines (`Sender`, `Receiver`,
`InstanceLeader`), ``lost`` and ``closed``. Everything else belongs to the driver's thread.

One step: deliver received messages to the state machines; carry out the actions that they ask for (send a message,
start or halt a transfer, unpack a stage, complete a work); advance transfers and stages; check deadlines.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING
from weakref import proxy

from torchkv.control.channel import ControlChannel
from torchkv.control.messenger import ControlMessenger, FramesByRank
from torchkv.core.core import Core
from torchkv.engine.callers import Callers
from torchkv.engine.exchange import Exchange
from torchkv.engine.layer_wait import LayerWait
from torchkv.engine.machines import Machines
from torchkv.engine.peers import Peers
from torchkv.engine.resident.flows import Flows
from torchkv.engine.resident.routes import Routes
from torchkv.engine.resident.standing_stages import StandingStages
from torchkv.engine.scheduler import LocalMemory, TransferScheduler
from torchkv.engine.weak_callback import weakly
from torchkv.errors import KVError, ProtocolError
from torchkv.layout.conversion import NO_SCALES
from torchkv.layout.group_map import GroupMap, RankInfo
from torchkv.layout.layer_groups import UNGROUPED
from torchkv.layout.pair_plan import PairPlan
from torchkv.observe.recorder import FlightRecorder
from torchkv.options import Options
from torchkv.protocol.messages import Left, Mailbox
from torchkv.protocol.receiving.request import ReceiverRequest
from torchkv.protocol.receiving.stage_allocator import StagingRing
from torchkv.protocol.receiving.staging_credits import StagingCredits
from torchkv.staging.packer import Staging
from torchkv.staging.unpacker import StageUnpacker
from torchkv.transfer.peer_connection import PeerConnection
from torchkv.transport.interface import Transport

if TYPE_CHECKING:
    from torchkv.engine.process_leases import GroupLeases
    from torchkv.protocol.sending.request import SenderRequest

__all__ = ["Engine"]

log = logging.getLogger(__name__)

TICK = 0.05  # seconds between two checks of all deadlines
GATE_POLL = 0.0002  # seconds between two queries of an event that only the host can query


class Engine:
    """One registered rank.

    key: the secret that authenticates control frames. memory: this rank's pages, GPU and staging memory. core: the
    resident loop, if this rank has one, and a cache. connect: makes the connection to a rank.
    """

    def __init__(
        self,
        *,
        group_map: GroupMap,
        options: Options,
        key: bytes,
        transport: Transport,
        control: ControlChannel,
        memory: LocalMemory,
        core: Core | None = None,
        connect: Callable[[int], PeerConnection],
    ) -> None:
        self.lock = threading.Lock()
        self.group_map = group_map
        self.callers = Callers(self.lock, None if core is None else core.news)
        self.options = options
        self.gpu = memory.gpu
        self.scales = NO_SCALES if memory.pages is None else memory.pages.scales
        self.staging = memory.staging
        self.credits = _staging_credits(memory.staging, options.timeout, lambda: len(group_map.info) - 1)
        self._machines = Machines(
            group_map,
            timeout=options.timeout,
            grant_timeout=options.grant_timeout,
            credits=self.credits,
            pools=UNGROUPED if memory.pages is None else memory.pages.pools,
        )
        self.sender, self.receiver = self._machines.sender, self._machines.receiver
        self._leader = self._machines.leader
        # Destinations known to match page for page, of a layer group after its name. For `Verbs`.
        self.whole_pages: set[tuple[int | str, ...]] = set()
        self.group_leases: GroupLeases | None = None  # of a rank with a cache; set by `Registration`
        self.closed = ""  # the reason why verbs are refused; empty while the group is open
        self._transport = transport
        self.messenger = ControlMessenger(group_map, key, control)
        self.scheduler = TransferScheduler(
            sender=self.sender,
            lock=self.lock,
            options=options,
            memory=memory,
            requester=self._machines.requester,
            connection=weakly(self.connection),
            on_broken=weakly(self._drop_connection),
            send_stage_messages=weakly(self._send_stage_messages),
        )
        self.peers = Peers(
            group_map=group_map,
            lock=self.lock,
            control=control,
            messenger=self.messenger,
            sender=self.sender,
            receiver=self.receiver,
            leader=self._leader,
            gpu=memory.gpu,
            connect=connect,
            moves_to=self.scheduler.moves_to,
            unmap=weakly(self._unmap),
            notify=self.callers.notify,
        )
        self.connections, self.lost = self.peers.connections, self.peers.lost  # for verbs: the very same objects
        self.sender.grants.lost = self.lost
        self._unpacker = StageUnpacker(
            stages=self.receiver.stages,
            lock=self.lock,
            packer=None if memory.staging is None else memory.staging.packer,
            send_stage_messages=weakly(self._send_stage_messages),
        )
        self.wake: Callable[[], None] = lambda: None  # tells the driver that there is something to do
        self.needs_gil: Callable[[], None] = lambda: None  # the driver is to get the GIL soon from now on
        self._next_tick = 0.0
        self._now = 0.0  # the time of the current step
        self._seen_news = -1  # of the latest `catch_up`
        self.recorder = FlightRecorder(options.recorded) if options.recorded else None
        self.flows: Flows | None = None  # the requests that the resident loop serves
        if core is not None and memory.pages is not None:
            if self.scheduler.kernels is not None and core.device is not None:
                self.scheduler.kernels.errors = core.device.errors
            self.flows = Flows(
                core,
                group_map=group_map,
                sender=self.sender,
                receiver=self.receiver,
                leader=self._leader,
                local=memory.pages,
                connections=self.connections,
                kernels=memory.kernels or (None if core.device is None else self.scheduler.kernels),
                direct=options.forced_path in (None, "direct", "staged"),  # peers should have the same options
                puts=options.forced_path in (None, "staged"),
                stages=self._standing_stages(core, memory) if not options.checksum else None,
                clock=weakly(self._clock),
                recorder=self.recorder,
            )
            # A proxy, because the flows hold the state machines: see `weak_callback`.
            self.sender.handover.flows = self.receiver.requests.flows = self._leader.flows = proxy(self.flows)
        self.exchange = Exchange(
            group_map,
            self._machines,
            lock=self.lock,
            messenger=self.messenger,
            peers=self.peers,
            callers=self.callers,
            scheduler=self.scheduler,
            unpacker=self._unpacker,
            flows=self.flows,
        )

    def _standing_stages(self, core: Core, memory: LocalMemory) -> Callable[[Routes], StandingStages] | None:
        """Makes the standing stages of the resident loop; None where it stages nothing."""
        staging = memory.staging
        if staging is None:
            return None
        credits, requester, connections = self.credits, self._machines.requester, self.connections
        return lambda routes: StandingStages(
            core,
            staging=staging,
            credits=credits,
            requester=requester,
            connection=connections.get,
            lane=weakly(routes.lane),  # the routes hold the stages
        )

    # ------------------------------------------------------------------ driving

    def step(self, now: float, *, heard: int = -1, moved: bool = True) -> bool:
        """Advances everything without blocking. True if anything happened: then another step may find more to do.

        heard: bit i is set if the control channel's file descriptor i may be readable. moved: whether the transport's
        file descriptor was readable; if not, the transport is only progressed for transfers that need it, and on ticks.
        """
        self._now = now
        busy = self._follow_loop()
        if heard:
            busy |= self.exchange.receive(now, heard)
        if self.peers.follow(now):
            busy = self.callers.has_news = True
        busy |= self._settle(now)
        busy |= self._progress_transport(now, moved)
        if self.moving:
            busy |= self.scheduler.open_gates(now)
            busy |= self.scheduler.advance(now)
            if self._unpacker.advance(now):
                busy = self.callers.has_news = True
            busy |= self._settle(now)
        if now >= self._next_tick:
            self._next_tick = now + TICK
            self.peers.run_deferred_frees()
            if self.exchange.newcomers is not None:
                self.exchange.newcomers.tick(now)
            with self.lock:
                self.callers.has_news |= self._machines.tick(now)
                if self.flows is not None:
                    self.flows.take_stages()
            busy |= self._settle(now)
        return busy

    def _progress_transport(self, now: float, moved: bool) -> bool:
        due = now >= self._next_tick
        if self.transport_is_driven:
            return due and self._transport.look_after()
        if not (moved or due or self.scheduler.posting) or not self._transport.progress():
            return False
        if self.flows is not None:
            self.flows.core.peers.hear_network()
        return True

    def _follow_loop(self) -> bool:
        """Tells the state machines what the resident loop has done. True if there was anything."""
        flows = self.flows
        if flows is None:
            return False
        # Without a thread of its own, as in tests, the loop takes its turns here.
        busy = False if flows.core.runner.running else flows.core.runner.step()
        if flows.notices.has_news:
            busy = self.callers.has_news = True
            with self.lock:
                self.catch_up(leave_grants=True)
        if flows.notices.has_broken:  # the next transfer gets a new connection
            with self.lock:
                flows.notices.has_broken = False
                for connection in flows.routes.broken():
                    self.peers.drop_connection(connection)
        return busy

    def _clock(self) -> float:
        return self._now

    def _settle(self, now: float) -> bool:
        """Carries out the state machines' actions, sends messages, completes works. True if there were any."""
        with self.lock:
            performed = self.exchange.perform(now)
            frames = self.messenger.frames(now)
        if frames:
            self.messenger.send(frames)
        # Last, after the peers have been told: a woken thread of this process competes with this one for the GIL.
        self.callers.announce()
        return performed or bool(frames)

    def _send_stage_messages(self) -> None:
        """Sends messages about stages in the middle of a step, because a stage is idle until its peer knows of it."""
        with self.lock:
            for rank, message in self._machines.take_stage_messages():
                self.exchange.tell(rank, message, self._now)
            frames = self.messenger.frames(self._now)
        self.messenger.send(frames)

    def send_now(self, frames: FramesByRank) -> None:
        """Sends what `Exchange.take_grants` returned. Any thread."""
        self.messenger.send_now(frames)

    def next_wake(self, now: float) -> float:
        """Seconds until ``step`` has something to do even if nothing arrives."""
        wake = min(self._next_tick, self.messenger.next_poll)
        if self.scheduler.gated:
            wake = min(wake, now + GATE_POLL)
        if self.gpu is not None:
            wake = min(wake, self.gpu.pause_ends)
        return max(0.0, wake - now)

    @property
    def moving(self) -> bool:
        """Whether transfers or stages are under way, so that ``step`` has to be called again and again."""
        return self.scheduler.moving or self._unpacker.busy

    @property
    def transport_is_driven(self) -> bool:
        """Whether the resident loop drives the transport, and nothing of Python's is under way on it."""
        driven = self.flows is not None and self.flows.core.peers.drives_transport
        return driven and not self.moving and not self.peers.undrained

    @property
    def awaits_writers(self) -> bool:
        """Whether a rank that answers may still write here for a failed request, and so should say `Quiesced`."""
        with self.lock:
            return bool((self.receiver.leases.pending_writers() | self.credits.writers()) - self.lost.keys())

    def stages_on_loop(self, rank: int, plan: PairPlan) -> bool | None:
        """Whether the loop would stage this plan rather than copy or put it; None if Python serves it."""
        if self.flows is None:
            return None
        with self.lock:
            route = self.flows.routes.to(rank, plan)
        return None if route is None else route.staged

    def connection(self, rank: int) -> PeerConnection:
        """The connection to ``rank``, made on first use. Driver's thread only."""
        return self.peers.connection(rank)

    def _drop_connection(self, connection: PeerConnection) -> None:
        self.peers.drop_connection(connection)

    def _unmap(self, rank: int) -> None:
        if self.flows is not None:
            self.flows.disconnect(rank)

    def layer_wait(self, req: ReceiverRequest, layer: int) -> LayerWait:
        """A wait for one layer of ``req``. Any thread. Raises ``ProtocolError`` for a layer this rank does not hold."""
        layout = self.group_map.me.layout
        assert layout is not None  # a rank without a cache cannot receive
        if layer not in layout.layers:
            raise ProtocolError(f"request {req.request!r}: this rank does not hold layer {layer!r}")
        return LayerWait(
            req,
            layer,
            changed=self.callers.changed,
            is_done=partial(self.receiver.layer_done, req, layer),
            closed=lambda: self.closed,
            stream_waits=self.callers.layer_stream_waits,
        )

    def fail_all(self, error: KVError, now: float) -> None:
        """Fails every pending call with ``error``: the group is being destroyed.

        The driver then steps until the engine is no longer ``moving`` and ``awaits_writers``, or for as long as it can
        wait, and calls `end_all`.
        """
        with self.lock:
            self.closed = str(error)
            self.sender.fail_all(error)
            self.receiver.fail_all(error)
            self.exchange.perform(now)
        self.callers.has_news = True
        self.callers.announce()

    def end_all(self, error: KVError, now: float) -> None:
        """Ends what is left after `fail_all`. Tells receivers which of their pages this rank can no longer write to."""
        with self.lock:
            self.sender.end_all(error)
        self._settle(now)
        if self.exchange.newcomers is not None:
            self.exchange.newcomers.close(error)

    def leave(self, now: float) -> None:
        """Ends the resident loop, after `end_all`, and says so. What the loop served is Python's by now."""
        if self.flows is not None:
            self.flows.core.close()
            self.sender.handover.flows = self.receiver.requests.flows = self._leader.flows = None
        with self.lock:
            self.peers.leave()
            frames = self.messenger.frames(now)
        self.messenger.send(frames)

    def is_heard(self, now: float) -> bool:
        """After `leave`: sends again what peers have not acknowledged. Whether those that answer have heard all."""
        received = self.messenger.receive(-1)
        with self.lock:
            for source, frame in received:
                if any(isinstance(message, Left) for message in self.messenger.accept(source, frame)):
                    self.messenger.mark_left(source)
            frames = self.messenger.frames(now)
            unheard = self.messenger.unheard() - self.lost.keys()
        self.messenger.send(frames)
        return not unheard

    # ------------------------------------------------------------------ control

    def meet(self, newcomers: Sequence[tuple[RankInfo, bytes]]) -> None:
        """The ranks of an instance have come. With each, the descriptor of its loop's mailboxes, which may be empty.

        Raises ``LayoutMismatch``. Driver's thread only.
        """
        self.peers.add([info for info, _ in newcomers])
        with self.lock:
            for info, mailboxes in newcomers:
                slot = None if self.flows is None else self.flows.core.peers.meet(info.rank, mailboxes)
                if slot is not None:
                    self.messenger.tell(info.rank, Mailbox(slot))

    # ------------------------------------------------------------------ what the resident loop has done

    @property
    def needs_driver(self) -> bool:
        """Whether the driver has anything to do for what a verb has just begun. Under the lock."""
        return self.flows is None or self.exchange.has_actions

    def poll(self) -> None:
        """Completes the works that the resident loop has ended. For a thread that asks whether one is complete."""
        if self.flows is None or not self.flows.notices.has_news:
            return
        with self.lock:
            self.catch_up(leave_grants=True)
            rest = self.exchange.has_actions
        if rest:
            self.wake()

    def have_succeeded(self, sends: Sequence[SenderRequest], receives: Sequence[ReceiverRequest]) -> bool:
        """Whether the resident loop has ended a work's requests, all of them successfully. Then that is all.

        Else as `poll`, if any request may have ended. So what follows from the end of a request is done while its
        caller waits for the next one, by the next verb, or by the driver a moment later.
        """
        flows = self.flows
        if flows is None or not flows.notices.has_news or flows.core.news.count == self._seen_news:
            return False
        if sends and all(map(flows.has_sent, sends)):
            return True
        if receives and all(map(flows.has_received, receives)):
            return True
        self.poll()
        return False

    def take_in(self) -> None:
        """As `poll`. No work stays incomplete of which the state machines know that it has ended."""
        with self.lock:
            self.catch_up(leave_grants=True)
            self.callers.complete(self.sender, self.receiver)  # what was taken in for another reason
            rest = self.exchange.has_actions
        if rest:
            self.wake()

    def catch_up(self, *, leave_grants: bool = False) -> None:
        """Tells the state machines what the resident loop has done, and completes its works. Under the lock.

        leave_grants: see `Notices.catch_up`; for who only looks what has ended.
        """
        if self.flows is None:
            return
        notices = self.flows.notices
        if not (notices.has_news or (notices.has_unclaimed and not leave_grants)):
            return
        self._seen_news = self.flows.core.news.count  # first: what comes after it is seen next time
        notices.catch_up(self._now, leave_grants=leave_grants)
        self.callers.complete(self.sender, self.receiver)

    def wait(self, seen: int, seconds: float, *, listens: bool) -> None:
        """Sleeps until the loop, or Python, may have completed a work: until ``news`` is not ``seen``. Any thread.

        listens: see `News.wait`.
        """
        assert self.flows is not None
        self.flows.core.news.wait(seen, seconds, listens=listens)

    @property
    def news(self) -> int:
        """Changes when a request may have ended, and with `notify` if that is awaited: see `News`. Else 0."""
        return 0 if self.flows is None else self.flows.core.news.count

    def make_eager(self) -> None:
        """Has the driver woken for everything that the resident loop does. Any thread."""
        assert self.flows is not None
        self.needs_gil()
        self.flows.core.make_eager()


def _staging_credits(staging: Staging | None, timeout: float, writers: Callable[[], int]) -> StagingCredits:
    """Who may use which part of this rank's staging ring; an empty ring if it has none. writers: see there."""
    if staging is None or staging.receiving is None:
        return StagingCredits(StagingRing(0), timeout=timeout)
    ring = staging.receiving
    device = ring.tensor.device.type
    return StagingCredits(StagingRing(ring.nbytes), timeout=timeout, device=device, writers=writers)
