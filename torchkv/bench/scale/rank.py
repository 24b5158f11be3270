"""One simulated rank: the real state machines, sessions and codec of control messages, on a virtual clock.

What `torchkv.engine.engine` does with a thread, sockets and memory, this does with a `Clock` and a `Network`. The real
functions are timed as they run, in CPU time of this thread, and counted. What they take does not change the virtual
clock, on which every frame and verb takes `LinkModel.cpu`: so a run is a function of its seed.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

from torchkv.arrays import Int64Array
from torchkv.bench.scale.network import Network, Nic
from torchkv.control.channel import ControlChannel
from torchkv.control.messenger import ControlMessenger
from torchkv.engine.engine import TICK
from torchkv.engine.machines import Machines
from torchkv.errors import KVError
from torchkv.layout.group_map import GroupMap, RankInfo
from torchkv.protocol.actions import Account, Action, BoundGrant, SendOp, Settle, Start, Tell, Work
from torchkv.protocol.messages import Message
from torchkv.protocol.receiving.stage_allocator import StagingRing
from torchkv.protocol.receiving.staging_credits import StagingCredits

__all__ = ["KEY", "Meter", "SimulatedRank"]

KEY = b"a key of 32 bytes for simulation"
TIMEOUT, GRANT_TIMEOUT = 30.0, 300.0  # seconds, as in Options


@dataclass(eq=False, slots=True)
class Meter:
    """What the ranks of a cluster have done: nanoseconds of CPU, and counts.

    cpu: ``verbs`` (what a caller's thread does), ``messages`` (decode, sessions, state machines), ``frames`` (sessions,
    encode), ``meeting`` (taking in another instance). told, heard: control messages by kind, without those of a rank to
    itself. attested: bytes that receivers were told of.
    """

    cpu: Counter[str] = field(default_factory=Counter)
    told: Counter[str] = field(default_factory=Counter)
    heard: Counter[str] = field(default_factory=Counter)
    verbs: int = 0
    steps: int = 0
    frames_heard: int = 0
    attested: int = 0
    refused: int = 0  # messages that a state machine has refused

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        began = time.thread_time_ns()
        try:
            yield
        finally:
            self.cpu[kind] += time.thread_time_ns() - began


class _Channel:
    """The part of `ControlChannel` that a messenger uses: what came, and what is to go."""

    def __init__(self) -> None:
        self.came: list[bytes] = []
        self.goes: list[tuple[int, list[bytes]]] = []

    def send(self, rank: int, frames: Sequence[bytes]) -> None:
        self.goes.append((rank, list(frames)))

    def receive(self, readable: int = -1) -> list[bytes]:
        came, self.came = self.came, []
        return came


class SimulatedRank:
    """See the module. instance: all ranks of its instance. peers: all ranks of the cluster, by number.

    settled: called with each work that is settled, and its error. nic: its own.
    """

    def __init__(
        self,
        info: RankInfo,
        instance: Sequence[RankInfo],
        *,
        network: Network,
        peers: dict[int, SimulatedRank],
        meter: Meter,
        settled: Callable[[Work, KVError | None], None],
    ) -> None:
        self.info = info
        self.nic = Nic()
        self.group_map = GroupMap(info.rank, instance)
        credits = StagingCredits(StagingRing(0), timeout=TIMEOUT)
        self.machines = Machines(self.group_map, timeout=TIMEOUT, grant_timeout=GRANT_TIMEOUT, credits=credits)
        self._channel = _Channel()
        self.messenger = ControlMessenger(self.group_map, KEY, cast(ControlChannel, self._channel))
        self.requests = 0  # under way; kept by the application
        self.thread_seconds = 0.0  # for which its thread was busy, on the virtual clock
        self._network = network
        self._clock = network.clock
        self._peers = peers
        self._meter = meter
        self._settled = settled
        self._to_self: deque[Message] = deque()
        self._landed: list[tuple[SendOp, int]] = []
        self._free_at = 0.0  # when its thread is
        self._step_at = float("inf")
        self._tick_at = 0.0

    # ------------------------------------------------------------------ what applications do

    def meet(self, instance: Sequence[RankInfo]) -> None:
        """Takes in the ranks of another instance, as `torchkv.join` does after the greeting."""
        with self._meter.timed("meeting"):
            self.group_map.add(instance)
            for info in instance:
                self.messenger.add(info)

    def receive(self, request: str, pages: Int64Array, src: tuple[int, ...], work: Work) -> None:
        """`recv_pages`."""
        with self._verb():
            self.machines.receiver.posts.post(
                request, pages, src, prefix_tokens=0, total=None, work=work, now=self._clock.now
            )

    def send(self, request: str, num_pages: int, layers: tuple[int, ...], dst: tuple[int, ...], work: Work) -> None:
        """`send_slice`."""
        with self._verb():
            sender, prefixes = self.machines.sender, dict[int, int]()
            for rank in dst:
                sender.admit(request, rank, 0, num_pages)
            for rank in dst:
                sender.submit(SendOp(request, rank, prefixes, layers, 0, num_pages, work), self._clock.now)

    def finish(self, request: str, dst: tuple[int, ...], work: Work) -> None:
        with self._verb():
            for rank in dst:
                self.machines.sender.check_finish(request, rank)
            for rank in dst:
                self.machines.sender.finish(request, rank, aux=b"", work=work, now=self._clock.now)

    @contextmanager
    def _verb(self) -> Iterator[None]:
        with self._meter.timed("verbs"):
            yield
        self._meter.verbs += 1
        self._work_for(self._network.model.cpu)
        self._wake(self._free_at)

    # ------------------------------------------------------------------ its thread

    def deliver(self, frames: list[bytes]) -> None:
        self._channel.came += frames
        self._wake(self._clock.now)

    def _work_for(self, seconds: float) -> None:
        self._free_at = max(self._free_at, self._clock.now) + seconds
        self.thread_seconds += seconds

    def _wake(self, at: float) -> None:
        at = max(at, self._free_at)
        if at < self._step_at:
            self._step_at = at
            self._clock.at(at, self._step_if_due)

    def _step_if_due(self) -> None:
        if self._clock.now != self._step_at:
            return  # it was woken earlier
        self._step_at = float("inf")
        if self._clock.now < self._free_at:  # a verb has come in between
            self._wake(self._free_at)
        else:
            self._step(self._clock.now)

    def _step(self, now: float) -> None:
        """As `Engine.step`: takes in what has come, carries out what the machines ask for, sends what there is."""
        meter, frames_in = self._meter, len(self._channel.came)
        with meter.timed("messages"):
            for src, frame in self.messenger.receive(-1):
                for message in self.messenger.accept(src, frame):
                    meter.heard[type(message).__name__] += 1
                    self._handle(src, message, now)
            for op, nbytes in self._landed:
                self.machines.sender.attest(op, op.layers, nbytes=nbytes, path="runs")
                self.machines.sender.op_finished(op, None, flushed=True, now=now)
            self._landed.clear()
            if now >= self._tick_at:
                self._tick_at = now + TICK
                self.machines.tick(now)
            asked = self._perform(now)
        with meter.timed("frames"):
            frames = self.messenger.frames(now)
            if frames:
                self.messenger.send(frames)
        meter.steps += 1
        meter.frames_heard += frames_in
        self._send(frames_in)
        for action in asked:
            self._act(action)
        wake = self.messenger.next_poll
        if self.requests:
            wake = min(wake, self._tick_at)  # without requests there are no deadlines
        if wake < float("inf"):
            self._wake(max(wake, now))

    def _send(self, frames_in: int) -> None:
        goes, self._channel.goes = self._channel.goes, []
        self._work_for(self._network.model.cpu * (frames_in + sum(len(frames) for _, frames in goes)))
        for rank, frames in goes:
            self._network.carry(frames, self._free_at, self._peers[rank].deliver)

    def _handle(self, src: int, message: Message, now: float) -> None:
        try:
            assert self.machines.handle(src, message, now)
        except KVError:
            self._meter.refused += 1

    def _perform(self, now: float) -> list[Action]:
        """Tells what the machines have to tell. What else they ask for."""
        others: list[Action] = []
        while (actions := self.machines.take_actions()) or self._to_self:
            for action in actions:
                if not isinstance(action, Tell):
                    others.append(action)
                elif action.rank == self.info.rank:
                    self._to_self.append(action.message)
                else:
                    self._meter.told[type(action.message).__name__] += 1
                    self.messenger.tell(action.rank, action.message)
            while self._to_self:
                self._handle(self.info.rank, self._to_self.popleft(), now)
        return others

    def _act(self, action: Action) -> None:
        match action:
            case Start(op, grant):
                self._start(op, grant)
            case Settle():
                self._settled(action.work, action.error)
            case Account():
                if action.work.receives:
                    self._meter.attested += action.nbytes
            case _:  # Halt: what is on the link lands all the same. Nothing is staged here, and sent to nobody unknown.
                pass

    def _start(self, op: SendOp, grant: BoundGrant) -> None:
        nbytes = grant.plan.nbytes(grant.num_tokens, op.layers)

        def landed() -> None:
            self._landed.append((op, nbytes))
            self._wake(self._clock.now)

        self._network.transfer(self.nic, self._peers[op.dst].nic, nbytes, landed)
