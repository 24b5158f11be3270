"""Two writers, one receiver, a page or two: grants, writes, cancels, deadlines, deaths of several lives of a request.

The real `Sender` and `Receiver`, whose messages arrive in order, whenever. A put lands whenever, between its start and
its report. The receiver's application uses a page again for another life as soon as it may.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from tests.helpers.model.explorer import freeze
from tests.helpers.protocol import group_map, receiver, sender
from tests.helpers.references.page_transfer import gqa
from torchkv.errors import KVError
from torchkv.layout.group_map import GroupMap
from torchkv.layout.layer_groups import PAGES
from torchkv.layout.layout import KVLayout
from torchkv.protocol import messages
from torchkv.protocol.actions import Account, BoundGrant, Halt, SendOp, Settle, Start, Tell
from torchkv.protocol.instance import InstanceLeader
from torchkv.protocol.messages import Message
from torchkv.protocol.receiving.receiver import Receiver
from torchkv.protocol.sending.sender import Sender

__all__ = ["Grants", "Rules"]

READER = 2
NAME = "r"
LATE = 1000.0  # seconds: all deadlines have passed
_SKIP = frozenset(
    {"_group_map", "group_map", "plan", "_requester", "_credits", "flows", "lost", "others", "guard", "_pages_safe"}
    | {"counts"}  # for reports
)


@dataclass(frozen=True, slots=True)
class Rules:
    """What may happen, and how often. lives: of the request. pages: of the receiver; lives take turns with them."""

    lives: int = 2
    pages: int = 1
    reader_cancels: int = 1
    writer_cancels: int = 0
    deaths: int = 0
    deadlines: int = 0


@dataclass(eq=False, slots=True)
class _Flight:
    """A put between its start and its report. generation, page: of its grant. dead: so is its writer."""

    writer: int
    op: SendOp
    generation: int
    page: int
    halted: bool = False
    dead: bool = False


@dataclass(eq=False, slots=True)
class _Writer:
    """What one writer's application has done. step: of the present life, how many verbs were called."""

    life: int = 0
    step: int = 0
    cancelling: bool = False
    cancels: int = 0
    failed: bool = False
    works: dict[str, bool] = field(default_factory=dict)  # settled ones: whether successfully


class Grants:
    """See the module. rules: what may happen."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        places = [("p", gqa(tp_rank=0, tp_size=2)), ("p", gqa(tp_rank=1, tp_size=2)), ("d", gqa())]
        maps = [_map(rank, rules.pages, places) for rank in range(3)]
        self.senders = {rank: sender(maps[rank]) for rank in (0, 1)}
        self.receiver = receiver(maps[READER], ring=0)
        self.leader = InstanceLeader(maps[READER], grant_timeout=100.0)
        self.links: dict[tuple[int, int], deque[Message]] = {}
        self.flights: list[_Flight] = []
        self.writers = {0: _Writer(), 1: _Writer()}
        self.memory: dict[tuple[int, int], int] = {}  # page and writer, who has a part of it: under which grant written
        self.posted = 0
        self.outcomes: dict[int, bool] = {}  # of each life: whether the receive has succeeded
        self.reader_cancels = 0
        self.deaths: list[int] = []
        self.unseen: list[int] = []  # dead, and the receiver does not know
        self.late = 0
        self.now = 0.0
        self.wrong = ""

    # ------------------------------------------------------------------ the explorer's questions

    def choices(self) -> list[str]:
        found = [f"deliver {src} {dst}" for (src, dst), link in self.links.items() if link]
        for index, flight in enumerate(self.flights):
            found.append(f"land {index}")
            if flight.halted and not flight.dead:
                found.append(f"drain {index}")
        known_dead = set(self.deaths) - set(self.unseen)  # `Verbs` refuses to post what they would have to write
        turn = self.posted < self.rules.lives and len(self.outcomes) == self.posted
        if turn and not known_dead and not self._lease(self.posted % self.rules.pages):
            found.append("post")
        if self.posted > len(self.outcomes) and self.reader_cancels < self.rules.reader_cancels:
            found.append("cancel")
        for rank, writer in self.writers.items():
            if rank in self.deaths:
                continue
            if writer.failed and not writer.cancelling:
                found.append(f"give up {rank}")
            elif not writer.failed and writer.life < self.rules.lives and writer.step < 2:
                found.append(f"verb {rank}")
            if not writer.failed and writer.step > 0 and writer.cancels < self.rules.writer_cancels:
                found.append(f"give up {rank}")
            if len(self.deaths) < self.rules.deaths:
                found.append(f"die {rank}")
        found += [f"see death {rank}" for rank in self.unseen]
        if self.late < self.rules.deadlines and (self.posted > len(self.outcomes)):
            found.append("deadline")
        return found

    def do(self, choice: str) -> None:
        verb, *numbers = choice.rsplit(" ", 2) if choice.startswith("deliver") else choice.rsplit(" ", 1)
        if choice in ("post", "cancel", "deadline"):
            getattr(self, f"_{choice}")()
        else:
            getattr(self, "_" + verb.replace(" ", "_"))(*map(int, numbers))
        self._perform()

    def state(self) -> object:
        machines = (self.senders, self.receiver, self.leader, self.links, self.flights, self.writers)
        rest = (
            sorted(self.memory.items()),
            self.posted,
            self.outcomes,
            self.reader_cancels,
            self.deaths,
            self.unseen,
            self.late,
        )
        return freeze((machines, rest), _SKIP)

    def problem(self) -> str:
        return self.wrong

    def problem_at_rest(self) -> str:
        if self.posted > len(self.outcomes):
            # Without deadlines a receive waits for ever for a writer whose application has given up too often.
            waiting = [w.life for r, w in self.writers.items() if r not in self.deaths]
            if self.rules.deadlines > self.late or all(life < self.rules.lives for life in waiting):
                return f"the receive of life {self.posted - 1} never ends"
        if self.posted == len(self.outcomes) and any(self._lease(page) for page in range(self.rules.pages)):
            return "a page is leased for ever"
        for rank, writer in self.writers.items():
            if rank not in self.deaths and writer.cancelling:
                return f"the cancel of writer {rank} never ends"
        return ""

    def _lease(self, page: int) -> int:
        """The generation that has the page; 0: none."""
        return int(self.receiver.leases.marks(PAGES)[page])

    # ------------------------------------------------------------------ what happens

    def _post(self) -> None:
        work = f"rx{self.posted}"
        page = np.array([self.posted % self.rules.pages], dtype=np.int64)
        self.receiver.posts.post(NAME, page, (0, 1), prefix_tokens=0, total=None, work=work, now=self.now)
        self.posted += 1

    def _cancel(self) -> None:
        self.reader_cancels += 1
        self.receiver.cancel(NAME, "reader's cancel")

    def _deadline(self) -> None:
        self.late += 1
        self.now += LATE
        self.receiver.tick(self.now)

    def _verb(self, rank: int) -> None:
        writer, machine = self.writers[rank], self.senders[rank]
        work = f"{writer.life} {writer.step}"
        try:
            if writer.step == 0:
                machine.admit(NAME, READER, 0, 1)
                layers = machine._group_map.layout(rank).layers
                machine.submit(SendOp(NAME, READER, {}, layers, 0, 1, work), self.now)
            else:
                machine.check_finish(NAME, READER)
                machine.finish(NAME, READER, aux=b"", work=work, now=self.now)
        except KVError:
            writer.failed = True
        writer.step += 1

    def _give_up(self, rank: int) -> None:
        writer = self.writers[rank]
        writer.failed = True
        writer.cancels += 1
        writer.cancelling = bool(self.senders[rank].cancel(NAME, "cancel", self.now))
        if not writer.cancelling:
            self._next_life(rank)

    def _next_life(self, rank: int) -> None:
        writer = self.writers[rank]
        self.writers[rank] = _Writer(life=writer.life + 1, cancels=writer.cancels)

    def _land(self, index: int) -> None:
        flight = self.flights[index]
        owner = self._lease(flight.page)
        if owner != flight.generation:
            self.wrong = f"a put under grant {flight.generation} lands in a page that grant {owner} has"
        self.memory[flight.page, flight.writer] = flight.generation
        if flight.dead:
            del self.flights[index]
        else:
            machine = self.senders[flight.writer]
            machine.attest(flight.op, flight.op.layers, nbytes=1, path="direct")
            self._report(index)

    def _drain(self, index: int) -> None:
        self._report(index)

    def _report(self, index: int) -> None:
        flight = self.flights.pop(index)
        self.senders[flight.writer].op_finished(flight.op, None, flushed=True, now=self.now)

    def _die(self, rank: int) -> None:
        self._perform()
        self.deaths.append(rank)
        self.unseen.append(rank)
        for flight in self.flights:
            flight.dead |= flight.writer == rank
        self.links.pop((READER, rank), None)

    def _see_death(self, rank: int) -> None:
        """What the process had under way has landed or never will; what it had said is read first, or lost."""
        self.unseen.remove(rank)
        self.flights = [flight for flight in self.flights if flight.writer != rank]
        self.links.pop((rank, READER), None)
        self.receiver.peer_lost(rank, "dead")
        self._perform()
        self.receiver.peer_dead(rank, self.now)

    def _deliver(self, src: int, dst: int) -> None:
        message = self.links[src, dst].popleft()
        handlers = self._reader_handlers() if dst == READER else self._writer_handlers(dst)
        handlers[type(message)](src, message)

    def _writer_handlers(self, rank: int) -> Mapping[type, Callable[..., None]]:
        machine, now = self.senders[rank], self.now
        return {
            messages.Grant: lambda src, m: machine.on_grant(src, m, now),
            messages.Revoke: lambda src, m: machine.on_revoke(src, m, now),
            messages.Verdict: machine.on_verdict,
            messages.Alive: lambda src, m: machine.on_alive(src, m, now),
        }

    def _reader_handlers(self) -> Mapping[type, Callable[..., None]]:
        machine, leader, now = self.receiver, self.leader, self.now
        return {
            messages.Attest: lambda src, m: machine.on_attest(src, m, now),
            messages.Seal: lambda src, m: machine.on_seal(src, m, now),
            messages.Abort: machine.on_abort,
            messages.Quiesced: lambda src, m: machine.on_quiesced(src, m, now),
            messages.Alive: lambda src, m: machine.on_alive(src, m, now),
            messages.Post: lambda src, m: leader.on_post(src, m, now),
            messages.Outcome: lambda src, m: leader.on_outcome(src, m, now),
            messages.InstanceVerdict: machine.on_instance_verdict,
        }

    # ------------------------------------------------------------------ what the machines ask for

    def _perform(self) -> None:
        again = True
        while again:
            again = False
            machine: Sender | Receiver | InstanceLeader
            for rank, machine in [*self.senders.items(), (READER, self.receiver), (READER, self.leader)]:
                actions = machine.actions[:]
                machine.actions.clear()
                again |= bool(actions)
                for action in actions:
                    if rank not in self.deaths:
                        self._act(rank, action)

    def _act(self, rank: int, action: object) -> None:
        match action:
            case Tell(to, message) if to == rank:
                self._reader_handlers()[type(message)](rank, message)
            case Tell(to, message):
                if to not in self.deaths:
                    self.links.setdefault((rank, to), deque()).append(message)
            case Start(op, grant):
                self._start(rank, op, grant)
            case Halt(op):
                for flight in self.flights:
                    flight.halted |= flight.op is op
            case Settle():
                self._settled(rank, str(action.work), action.error)
            case Account():
                pass
            case _:
                raise AssertionError(f"an action that this world does not know: {action}")

    def _start(self, rank: int, op: SendOp, grant: BoundGrant) -> None:
        self.flights.append(_Flight(rank, op, grant.generation, int(grant.pages[0])))

    def _settled(self, rank: int, work: str, error: KVError | None) -> None:
        if rank == READER:
            if work.startswith("rx"):
                self._received(int(work[2:]), error)
            return
        writer = self.writers[rank]
        if work == "cancel":
            self._next_life(rank)
            return
        life, step = map(int, work.split())
        if life != writer.life:
            return
        writer.failed |= error is not None
        if step == 1 and error is None:
            if not any(self.outcomes.values()):
                self.wrong = f"writer {rank} is told of a success that nobody has had"
            self._next_life(rank)

    def _received(self, life: int, error: KVError | None) -> None:
        self.outcomes[life] = error is None
        generation = life + 1
        found = {self.memory.get((life % self.rules.pages, writer)) for writer in self.writers}
        if error is None and found != {generation}:
            self.wrong = f"the receive of grant {generation} has succeeded with bytes of grants {found}"


def _map(rank: int, num_pages: int, places: list[tuple[str, KVLayout]]) -> GroupMap:
    key = rank, num_pages
    if key not in _maps:
        _maps[key] = group_map(rank, *places, num_pages=num_pages)
    return _maps[key]


_maps: dict[tuple[int, int], GroupMap] = {}  # of all worlds: making one takes longer than a run
