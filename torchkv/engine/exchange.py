"""Carries out what a rank's state machines ask for, and hands on what they and their peers tell each other."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from torchkv.errors import KVError
from torchkv.protocol.actions import Account, Action, Halt, Scatter, Settle, SettleCopied, Split, Start, Tell
from torchkv.protocol.messages import (
    STANDING,
    Alive,
    Grant,
    Left,
    Mailbox,
    Message,
    Seal,
    StageAsk,
    Staged,
    StageGrant,
    Verdict,
)

if TYPE_CHECKING:
    from torchkv.control.messenger import ControlMessenger, FramesByRank
    from torchkv.engine.callers import Callers
    from torchkv.engine.machines import Machines
    from torchkv.engine.peers import Peers
    from torchkv.engine.resident.flows import Flows
    from torchkv.engine.scheduler import TransferScheduler
    from torchkv.layout.group_map import GroupMap
    from torchkv.staging.unpacker import StageUnpacker

__all__ = ["Exchange", "Newcomers"]

log = logging.getLogger(__name__)

REPLY_SPIN = 0.001  # seconds for which the driver should spin when a reply is due: usually it comes at once
# Messages that are soon followed by another one of the same request, or by a verb of the caller.
LATENCY_CRITICAL = (Grant, Alive, StageAsk, Staged, StageGrant)


class Newcomers(Protocol):
    """Greets those who are no members yet, and lets them in: see `joining.membership`. Driver's thread only."""

    def receive(self, greetings: Sequence[bytes], now: float) -> None: ...

    def tick(self, now: float) -> None: ...

    def close(self, error: KVError) -> None: ...


class Exchange:
    """One rank's. Its methods are called under the engine's lock, but for `receive`.

    newcomers: where instances come and go, if they do. serves: tells that the driver serves requests itself.
    spin_until: the driver should spin, not sleep, until this time: a reply is due.
    """

    def __init__(
        self,
        group_map: GroupMap,
        machines: Machines,
        *,
        lock: threading.Lock,
        messenger: ControlMessenger,
        peers: Peers,
        callers: Callers,
        scheduler: TransferScheduler,
        unpacker: StageUnpacker,
        flows: Flows | None,
    ) -> None:
        """flows: the requests that the resident loop serves, if there is one."""
        self._group_map = group_map
        self._machines = machines
        self._lock = lock
        self._messenger = messenger
        self._peers = peers
        self._callers = callers
        self._scheduler = scheduler
        self._unpacker = unpacker
        self._flows = flows
        self._to_self: deque[Message] = deque()  # messages of this rank to itself
        self.newcomers: Newcomers | None = None
        self.serves: Callable[[], None] = lambda: None
        self.spin_until = 0.0

    # ------------------------------------------------------------------ messages of peers

    def receive(self, now: float, readable: int) -> bool:
        """Takes in what has come. Whether anything has. readable: bit i is set if file descriptor i may be readable."""
        frames = self._messenger.receive(readable)
        if self.newcomers is not None:
            self.newcomers.receive(self._messenger.take_greetings(), now)
        if not frames:
            return False
        with self._lock:
            for source, frame in frames:
                for message in self._messenger.accept(source, frame):
                    self._callers.has_news = True
                    try:
                        self._handle(source, message, now)
                    except KVError as error:
                        self._messenger.dropped += 1
                        log.warning("rank %d ignored a message of rank %d: %s", self._group_map.rank, source, error)
        return True

    def _handle(self, src: int, message: Message, now: float) -> None:
        if isinstance(message, LATENCY_CRITICAL):
            self.spin_until = now + REPLY_SPIN
        elif isinstance(message, Verdict):
            self.spin_until = now
        if self._machines.handle(src, message, now):
            if isinstance(message, StageGrant) and message.generation == STANDING and self._flows is not None:
                self._flows.take_stages()
            if isinstance(message, StageAsk) and self._flows is not None:
                self._flows.offer_stage(src)
            return
        if isinstance(message, Left):
            self._peers.on_left(src, now)
        elif isinstance(message, Mailbox) and self._flows is not None:
            self._flows.core.peers.on_mailbox(src, message.slot)

    # ------------------------------------------------------------------ what the state machines ask for

    def perform(self, now: float) -> bool:
        """Carries out the state machines' actions until there are no more."""
        performed = False
        while (actions := self._machines.take_actions()) or self._to_self:
            performed = True
            for action in actions:
                self._act(action, now)
            while self._to_self:
                self._callers.has_news = True
                self._handle(self._group_map.rank, self._to_self.popleft(), now)
        return performed

    @property
    def has_actions(self) -> bool:
        """Whether the driver has something to carry out."""
        return bool(self._machines.has_actions or self._to_self or self._callers.pending)

    def take_grants(self, now: float) -> FramesByRank:
        """The frames of the grants just posted, which the caller passes to `Engine.send_now` without the lock.

        A caller sends its grants itself because waking the driver takes longer. Returns nothing, and leaves all to the
        driver, if an action is no message, or if a writer has no connection yet: only the driver can make one.
        """
        if not self._machines.receiver.actions and not self._to_self:  # the loop tells of them
            return []
        tells: list[Tell] = []
        for action in self._machines.receiver.actions:
            if not isinstance(action, Tell):
                return []
            if isinstance(action.message, Grant) and not self._peers.is_watched(action.rank):
                return []
            tells.append(action)
        self._machines.receiver.actions.clear()
        for tell in tells:
            self.tell(tell.rank, tell.message, now)
        while self._to_self:
            self._handle(self._group_map.rank, self._to_self.popleft(), now)
        return self._messenger.frames(now, {tell.rank for tell in tells if tell.rank != self._group_map.rank})

    def _act(self, action: Action, now: float) -> None:
        match action:
            case Tell():
                self.tell(action.rank, action.message, now)
            case Settle() | SettleCopied():
                self._callers.settle(action)
            case Account():
                action.work._account(action.nbytes, action.path)
            case Split():
                action.work._split(action.more)
            case Start():
                self.serves()
                self._scheduler.start(action.op, action.grant)
            case Halt():
                self._scheduler.halt(action.op)
            case Scatter():
                self.serves()
                self._unpacker.start(action)

    def tell(self, rank: int, message: Message, now: float) -> None:
        """Queues a message to ``rank``, which may be this one; nothing if it cannot be reached."""
        if rank == self._group_map.rank:
            self._to_self.append(message)
        elif self._messenger.reaches(rank):
            if isinstance(message, Grant) and not self._peers.is_watched(rank):
                self._peers.watch(rank)
            if isinstance(message, Seal) or (isinstance(message, Grant) and message.flow is None):
                self.spin_until = now + REPLY_SPIN
                self.serves()
            elif isinstance(message, Verdict):
                self.spin_until = now
            self._messenger.tell(rank, message)
