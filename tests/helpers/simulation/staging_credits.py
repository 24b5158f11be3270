"""A receiver with a staging ring, and its writers, in one process: messages cross a lossy network, puts land late.

One cell of the ring's memory stands for a byte. Everything random comes from one generator.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from torchkv.control.session import Session
from torchkv.errors import RingExhausted
from torchkv.protocol.messages import (
    MAX_ASKS,
    Abort,
    ControlFrame,
    Message,
    Quiesced,
    Revoke,
    Seal,
    StageAsk,
    Staged,
    StageDenied,
    StageGrant,
    Withdraw,
    Withdrawn,
)
from torchkv.protocol.receiving.stage_allocator import Stage, StagingRing
from torchkv.protocol.receiving.staging_credits import StagingCredits
from torchkv.protocol.sending.staging_requester import StagingRequester

ALIGNMENT = 4
TIMEOUT = 1000.0
RECEIVER = 0
IN_FLIGHT = 3  # stages that one request has under way at once
QUIET_ROUNDS = 40  # longer than several retransmissions, one after the other
Key = tuple[int, int, int]  # writer, generation, serial


@dataclass(eq=False)
class Put:
    """One half of a stage, on its way into the ring."""

    key: Key
    offset: int
    cells: list[int]
    landed: bool = False


@dataclass(eq=False)
class Sending:
    """A writer's part of a request. outcome: '' while it runs, then 'done' or why it failed, as the writer sees it."""

    generation: int
    todo: deque[tuple[int, int]]
    direct: bool  # at the end it also writes to pages
    open: dict[int, list[Put]] = field(default_factory=dict)
    wrote_direct: bool = False
    outcome: str = ""


class Writer:
    def __init__(self, exchange: Exchange, rank: int) -> None:
        self.exchange = exchange
        self.rank = rank
        self.requester = StagingRequester()
        self.session = Session(rank, rank + 1, 1)
        self.inbox: deque[Message] = deque()
        self.running = True
        self.dead = False
        self.sendings: dict[int, Sending] = {}

    def step(self) -> None:
        for sending in list(self.sendings.values()):
            self._progress(sending)
        self._send_stage_messages()

    def read(self) -> None:
        while self.inbox:
            message = self.inbox.popleft()
            self.on_message(message)
            self.exchange.note(RECEIVER, self.rank, message)
        self._send_stage_messages()

    def on_message(self, message: Message) -> None:
        if isinstance(message, StageGrant):
            self.requester.on_grant(RECEIVER, message, self.exchange.ring.capacity)
        elif isinstance(message, StageDenied):
            self.requester.on_denied(RECEIVER, message, self.exchange.ring.capacity)
        elif isinstance(message, Withdrawn):
            self.requester.on_withdrawn(RECEIVER, message.generation)
        elif isinstance(message, Revoke):
            sending = self.sendings.get(message.generation)
            if sending is None:
                self.session.send(Quiesced(message.generation))
            else:
                sending.outcome = sending.outcome or "revoked"

    def fail(self, sending: Sending, why: str) -> None:
        sending.outcome = why
        self._send_stage_messages()
        self.session.send(Abort(sending.generation, "TransferCancelled", why))

    def _send_stage_messages(self) -> None:
        for _, message in self.requester.outbox:
            self.session.send(message)
        self.requester.outbox.clear()

    def _progress(self, sending: Sending) -> None:
        if not sending.outcome:
            self._move(sending)
        if not sending.outcome:
            return
        if any(not put.landed for puts in sending.open.values() for put in puts):
            return
        self._send_stage_messages()
        last = Seal(sending.generation, 1, b"") if sending.outcome == "done" else Quiesced(sending.generation)
        self.session.send(last)
        self.requester.forget(RECEIVER, sending.generation)
        del self.sendings[sending.generation]

    def _move(self, sending: Sending) -> None:
        generation = sending.generation
        while sending.todo and len(sending.open) < IN_FLIGHT:
            nbytes, least = sending.todo.popleft()
            sending.open[self.requester.ask(RECEIVER, generation, nbytes=nbytes, least=least)] = []
        for serial, puts in list(sending.open.items()):
            try:
                span = self.requester.granted(RECEIVER, generation, serial)
            except RingExhausted:
                self.fail(sending, "denied")
                return
            if span is not None and not puts:
                key = (self.rank, generation, serial)
                puts += self.exchange.post(key, span.offset, span.nbytes)
            elif puts and all(put.landed for put in puts):
                self._call_written(generation, serial, puts)
                del sending.open[serial]
        if sending.todo or sending.open:
            return
        if sending.direct:
            sending.wrote_direct = self.requester.go_direct(RECEIVER, generation)
        if sending.wrote_direct or not sending.direct:
            sending.outcome = "done"

    def _call_written(self, generation: int, serial: int, puts: list[Put]) -> None:
        self.exchange.flushed[self.rank, generation, serial] = [cell for put in puts for cell in put.cells]
        piece = {"layers": (0,), "start": serial, "num_pages": 1, "checked": False}
        self.requester.staged(RECEIVER, generation, serial, **piece)


@dataclass(eq=False)
class Receiving:
    """A request on the receiver. writers: those that are not quiescent yet; without any, the request is forgotten."""

    writers: set[int]
    failed: bool = False


class Exchange:
    """Rank 0, which receives, and writers 1, 2, ..."""

    def __init__(self, writers: int, *, capacity: int, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.ring = StagingRing(capacity, alignment=ALIGNMENT)
        self.credits = StagingCredits(self.ring, timeout=TIMEOUT)
        self.writers = {rank: Writer(self, rank) for rank in range(1, writers + 1)}
        self.sessions = {rank: Session(RECEIVER, 1, rank + 1) for rank in self.writers}
        self.inbox: deque[tuple[int, Message]] = deque()
        self.air: list[tuple[int, int, ControlFrame]] = []  # (from, to, frame)
        self.puts: list[Put] = []
        self.memory = [-1] * self.ring.capacity
        self.flushed: dict[Key, list[int]] = {}
        self.scatters: list[tuple[Key, Stage]] = []
        self.scattered: list[Key] = []
        self.receivings: dict[int, Receiving] = {}
        self.all: list[tuple[int, Sending, int]] = []  # (writer, its sending, how many stages)
        self.heard: list[tuple[int, int, Message]] = []  # (from, to, message): `replay` repeats them
        self.cancelled: set[int] = set()
        self.generation = 0

    # ------------------------------------------------------------------ what happens

    def open(self, ranks: set[int], pieces: list[tuple[int, int]], *, direct: bool = False) -> int:
        """Begins a request. pieces: (bytes, least) of each stage. Returns its generation."""
        self.generation += 1
        ranks = {rank for rank in ranks if not self.writers[rank].dead}
        if ranks:
            self.receivings[self.generation] = Receiving(set(ranks))
        for rank in ranks:
            sending = Sending(self.generation, deque(pieces), direct)
            self.writers[rank].sendings[self.generation] = sending
            self.all.append((rank, sending, len(pieces)))
        return self.generation

    def post(self, key: Key, offset: int, nbytes: int) -> list[Put]:
        cells = [self.random.getrandbits(62) for _ in range(nbytes)]
        half = nbytes // 2
        puts = [Put(key, offset, cells[:half]), Put(key, offset + half, cells[half:])]
        self.puts += puts
        return puts

    def land(self, put: Put) -> None:
        src, generation, serial = put.key
        held = self.credits._queues[generation][src].stages[serial]
        assert held.state.value != "filled", f"{put.key} writes into what is being read"
        assert held.stage in self.ring.stages
        assert held.stage.offset <= put.offset
        assert put.offset + len(put.cells) <= held.stage.offset + held.nbytes
        self.memory[put.offset : put.offset + len(put.cells)] = put.cells
        put.landed = True
        self.puts.remove(put)

    def finish_scatter(self, index: int) -> None:
        """Ends one unpacking."""
        key, stage = self.scatters.pop(index)
        cells = self.flushed[key]
        assert self.memory[stage.offset : stage.offset + len(cells)] == cells, f"{key} was overwritten"
        self.scattered.append(key)
        self.credits.release(*key, self.now)
        self._send_stage_messages()

    def cancel(self, generation: int) -> None:
        receiving = self.receivings.get(generation)
        if receiving is None or receiving.failed:
            return
        receiving.failed = True
        self.cancelled.add(generation)
        self.credits.revoke(generation)
        self._send_stage_messages()
        for rank in receiving.writers:
            self.sessions[rank].send(Revoke(generation, "TransferCancelled", ""))

    def kill(self, rank: int) -> None:
        """Kills a writer: each of its puts lands or vanishes, then the receiver learns of the death."""
        writer = self.writers[rank]
        writer.running, writer.dead = False, True
        for put in [put for put in self.puts if put.key[0] == rank]:
            if self.random.random() < 0.5:
                self.land(put)
            else:
                self.puts.remove(put)
        for generation, receiving in list(self.receivings.items()):
            if rank in receiving.writers:
                self.cancel(generation)
        self.credits.peer_dead(rank, self.now)
        for generation in list(self.receivings):
            self._quiescent(rank, generation)
        self._send_stage_messages()

    def note(self, src: int, dst: int, message: Message) -> None:
        if isinstance(message, StageAsk | StageGrant | StageDenied | Staged | Withdraw | Withdrawn):
            self.heard.append((src, dst, message))

    def replay(self, index: int) -> None:
        """Delivers an earlier message once more, past the session."""
        src, dst, message = self.heard[index % len(self.heard)]
        if dst == RECEIVER:
            self.on_message(src, message)
        elif not self.writers[dst].dead:
            self.writers[dst].on_message(message)

    def receive(self) -> None:
        self.credits.tick(self.now)
        while self.inbox:
            src, message = self.inbox.popleft()
            self.on_message(src, message)
            self.note(src, RECEIVER, message)
        self._send_stage_messages()

    def on_message(self, src: int, message: Message) -> None:
        generation = getattr(message, "generation", 0)
        receiving = self.receivings.get(generation)
        known = receiving is not None and src in receiving.writers and not receiving.failed
        if isinstance(message, StageAsk) and known:
            self.credits.ask(src, message, self.now)
        elif isinstance(message, Staged):
            key = (src, generation, message.serial)
            stage = self.credits.mark_written(*key)
            if stage is not None:
                assert receiving is not None, "scattered after its writer was quiescent"
                assert not receiving.failed, "scattered for a failed request, whose pages may be in use again"
                self.scatters.append((key, stage))
        elif isinstance(message, Withdraw) and known:
            self.credits.withdraw(src, message)
        elif isinstance(message, Abort) and known:
            self.cancel(generation)
        elif isinstance(message, Quiesced | Seal):
            self.credits.mark_quiescent(src, generation, self.now)
            self._quiescent(src, generation)

    # ------------------------------------------------------------------ the net

    def messenger(self) -> None:
        """Puts every frame that is due on the air."""
        for rank, session in self.sessions.items():
            self.air += [(RECEIVER, rank, frame) for frame in session.poll(self.now)]
        for rank, writer in self.writers.items():
            if writer.running:
                self.air += [(rank, RECEIVER, frame) for frame in writer.session.poll(self.now)]

    def deliver(self, *, drop: float = 0.0, double: float = 0.0) -> None:
        """Delivers everything on the air in random order, except what is lost."""
        self.random.shuffle(self.air)
        air, self.air = self.air, []
        for src, dst, frame in air:
            if self.random.random() < drop:
                continue
            if self.random.random() < double:
                self.air.append((src, dst, frame))
            session = self.sessions[src] if dst == RECEIVER else self.writers[dst].session
            if dst != RECEIVER and self.writers[dst].dead:
                continue
            for message in session.receive(frame):
                if dst == RECEIVER:
                    self.inbox.append((src, message))
                else:
                    self.writers[dst].inbox.append(message)

    def round(self, *, drop: float = 0.0, double: float = 0.0, late: float = 0.0) -> None:
        """Each running writer, then the receiver, takes a turn. late: the share of copies that take longer."""
        self.now += 0.3
        for put in self.random.sample(self.puts, len(self.puts)):
            if self.random.random() >= late:
                self.land(put)
        for _ in range(len(self.scatters)):
            if self.random.random() >= late:
                self.finish_scatter(self.random.randrange(len(self.scatters)))
        for writer in self.random.sample(list(self.writers.values()), len(self.writers)):
            if writer.running:
                writer.read()
                writer.step()
        self.receive()
        self.messenger()
        self.deliver(drop=drop, double=double)
        self.check()

    def run_until_idle(self, *, drop: float = 0.0) -> bool:
        """Whether all running ranks finish; False after many rounds in which nothing was unpacked or ended."""
        quiet, last = 0, (-1, -1)
        while quiet < QUIET_ROUNDS:
            if self._at_rest():
                return True
            self.round(drop=drop)
            now = (len(self.scattered), sum(len(writer.sendings) for writer in self.writers.values()))
            quiet, last = (quiet + 1 if now == last else 0), now
        return False

    def _at_rest(self) -> bool:
        running = [writer for writer in self.writers.values() if writer.running]
        if self.inbox or self.scatters or self.puts:
            return False
        if any(writer.sendings or writer.inbox or not writer.session.idle for writer in running):
            return False
        return all(self.sessions[writer.rank].idle for writer in running)

    # ------------------------------------------------------------------ what must hold

    def check(self) -> None:
        stages = sorted(self.ring.stages, key=lambda stage: stage.offset)
        end = 0
        for stage in stages:
            assert end <= stage.offset, "stages overlap"
            assert stage.offset % ALIGNMENT == stage.nbytes % ALIGNMENT == 0
            end = stage.offset + stage.nbytes
        assert end <= self.ring.capacity
        assert sum(stage.nbytes for stage in stages) == self.ring.in_use
        queues = [queue for queues in self.credits._queues.values() for queue in queues.values()]
        assert sum(len(queue.stages) for queue in queues) == len(stages), "a stage of the ring belongs to no queue"
        assert all(queue.unwritten <= MAX_ASKS for queue in queues)
        assert {queue for queue in queues if queue.pending} == set(self.credits._round_robin)
        for writer in self.writers.values():
            for sending in writer.sendings.values():
                if sending.wrote_direct:
                    assert not self.credits.is_ring_only(writer.rank, sending.generation), "its pages were called safe"

    def check_over(self) -> None:
        """Nothing is left over, and every request that was not stopped has arrived, each stage once."""
        assert self.credits._queues == {}
        assert self.credits._round_robin == {}
        assert self.ring.stages == ()
        assert self.ring.in_use == self.ring.quarantined == 0
        assert self.ring.largest_possible == self.ring.capacity
        assert self.receivings == {}
        assert len(self.scattered) == len(set(self.scattered))
        for rank, sending, stages in self.all:
            stopped = sending.generation in self.cancelled
            assert stopped or sending.outcome == "done", f"{rank}, {sending}: it was not stopped"
            scattered = [key for key in self.scattered if key[:2] == (rank, sending.generation)]
            assert stopped or len(scattered) == stages, "a stage was lost"
        for writer in self.writers.values():
            assert writer.dead or writer.requester._queues == {}

    def _send_stage_messages(self) -> None:
        for rank, message in self.credits.outbox:
            self.sessions[rank].send(message)
        self.credits.outbox.clear()

    def _quiescent(self, rank: int, generation: int) -> None:
        receiving = self.receivings.get(generation)
        if receiving is not None:
            receiving.writers.discard(rank)
            if not receiving.writers:
                del self.receivings[generation]
