"""Two ends of a session over a network that loses, doubles, delays and reorders, and a second life of one of them.

The real `Session`. What was sent stays in the network until it is dropped, so it may be delivered any number of times.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.helpers.model.explorer import freeze
from torchkv.control.session import Session
from torchkv.protocol.messages import ControlFrame, Quiesced

__all__ = ["Sessions"]

# Incarnations: of the reader, and of the two lives of the writer.
READER, FIRST, SECOND = 1, 2, 3
_SKIP = frozenset({"_retry_at", "_retry_after", "_ack_at", "repeats"})  # every poll here is a late one


class Sessions:
    """Messages 1 to ``count`` from each life of the writer, one answer of the reader to each life. restarts: 0 or 1."""

    def __init__(self, count: int = 2, restarts: int = 1, make: Callable[[int, int, int], Session] = Session) -> None:
        self._make = make
        self._count = count
        self._restarts = restarts
        self.network: set[tuple[bool, ControlFrame]] = set()  # whether to the reader
        self.sent: dict[int, int] = {}  # by life
        self.heard: list[int] = []  # by the reader, since it knows the present life
        self.answers: list[int] = []  # heard by the present life
        self.answered = 0
        self.now = 0.0
        self.wrong = ""
        self._begin(FIRST)

    def _begin(self, life: int) -> None:
        self.life = life
        self.writer = self._make(0, life, READER)
        self.reader = self._make(1, READER, life)
        self.sent[life] = self.answered = 0
        self.heard, self.answers = [], []

    # ------------------------------------------------------------------ the explorer's questions

    def choices(self) -> list[str]:
        found = [f"deliver {i}" for i in range(len(self.network))] + [f"drop {i}" for i in range(len(self.network))]
        found += [f"poll {name}" for name in ("writer", "reader") if not getattr(self, name).idle]
        if self.sent[self.life] < self._count:
            found.append("send")
        if not self.answered and self.heard:
            found.append("answer")
        if self._restarts and self.life == FIRST:
            found.append("restart")
        return found

    def do(self, choice: str) -> None:
        verb, _, what = choice.partition(" ")
        match verb:
            case "deliver":
                self._deliver(*self._frames()[int(what)])
            case "drop":
                self.network.remove(self._frames()[int(what)])
            case "poll":
                end = getattr(self, what)
                first = end.poll(self.now)  # an acknowledgement that goes alone waits for a moment first
                self.now += 100.0
                self.network |= {(what == "writer", frame) for frame in [*first, *end.poll(self.now)]}
            case "send":
                self.sent[self.life] += 1
                self.writer.send(Quiesced(10 * self.life + self.sent[self.life]))
            case "answer":
                self.answered = 1
                self.reader.send(Quiesced(10 * self.life))
            case "restart":
                self._begin(SECOND)

    def state(self) -> object:
        ends = freeze((self.writer, self.reader), _SKIP)
        rest = (self.life, tuple(self.sent.items()), tuple(self.heard), tuple(self.answers), self.answered)
        return ends, rest, tuple(map(repr, self._frames()))

    def problem(self) -> str:
        wanted = [10 * self.life + number for number in range(1, self.sent[self.life] + 1)]
        if self.heard != wanted[: len(self.heard)]:
            return f"life {self.life} sent {wanted}, the reader has heard {self.heard}"
        if self.answers not in ([], [10 * self.life][: self.answered]):
            return f"life {self.life} has heard {self.answers}"
        return ""

    def problem_at_rest(self) -> str:
        lost = len(self.heard) < self.sent[self.life] or len(self.answers) < self.answered
        return "a message was never delivered" if lost else ""

    # ------------------------------------------------------------------ what happens

    def _frames(self) -> list[tuple[bool, ControlFrame]]:
        return sorted(self.network, key=repr)

    def _deliver(self, to_reader: bool, frame: ControlFrame) -> None:
        end, heard = (self.reader, self.heard) if to_reader else (self.writer, self.answers)
        heard += [message.generation for message in end.receive(frame) if isinstance(message, Quiesced)]
