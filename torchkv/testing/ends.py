"""`Ends`: the two or more ends of a conformance test, each in a process of its own, or all in the test's."""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import Any, NoReturn

from torchkv.errors import make_error
from torchkv.testing.lane import Lane
from torchkv.testing.node import Node, serve
from torchkv.testing.processes import Worker

__all__ = ["End", "Ends", "LocalEnd", "ProcessEnd"]

_EXIT_SECONDS = 20.0


class End(ABC):
    """One end of a test. `call` runs a method of its `Node`; `begin` and `end` do so in two halves."""

    @abstractmethod
    def begin(self, name: str, *arguments: Any) -> None:
        """Starts a call."""

    @abstractmethod
    def end(self) -> Any:
        """What the call returns. Raises the typed error that the transport raised, ``AssertionError`` for any other."""

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls a method of the node; see `end`."""
        self.begin(name, *arguments)
        return self.end()


class LocalEnd(End):
    """A node of this process."""

    def __init__(self, node: Node) -> None:
        self.node = node

    def begin(self, name: str, *arguments: Any) -> None:
        self._result = getattr(self.node, name)(*arguments)

    def end(self) -> Any:
        return self._result


class ProcessEnd(End):
    """A node in a process of its own. After a failure that leaves its state unknown the process is killed."""

    def __init__(self, lane: Lane, device: str) -> None:
        self._worker = Worker(serve, lane, device)
        self._seconds = 1.5 * lane.timeout  # a node that waits gives up before, and says for what
        self.alive = True
        self._answers_owed = 0

    @property
    def pid(self) -> int:
        return self._worker.pid

    @property
    def in_a_call(self) -> bool:
        """Whether a call was begun and not ended."""
        return self._answers_owed > 0

    def begin(self, name: str, *arguments: Any) -> None:
        try:
            self._worker.pipe.send((name, arguments))
        except BrokenPipeError:
            self._fail_dead()
        self._answers_owed += 1

    def end(self) -> Any:
        if not self._worker.pipe.poll(self._seconds):
            stacks = self._worker.stacks()
            self.discard()
            raise AssertionError(f"a process of the test has not answered for {self._seconds} s:\n{stacks}")
        try:
            verdict, value = self._worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._fail_dead()
        self._answers_owed -= 1
        if verdict == "error":
            raise make_error(*value)
        assert verdict == "value", f"the transport raised what is no KVError, or a test's own check failed:\n{value}"
        return value

    def _fail_dead(self) -> NoReturn:
        code, report = self._worker.join(_EXIT_SECONDS), self._worker.crash_report()
        self.discard()
        raise AssertionError(f"a process of the test died with exit code {code}\n{report}")

    def kill(self) -> None:
        """SIGKILL, as part of the test; returns when the process has ended."""
        self._worker.kill()
        assert self._worker.exitcode == -signal.SIGKILL
        self.discard()

    def discard(self) -> None:
        """Ends the process in whatever state it is."""
        if self.alive:
            self.alive = False
            self._worker.close()

    def stop(self) -> None:
        """Ends the process in good order. Raises ``AssertionError`` unless its exit code is 0."""
        self._worker.pipe.close()
        code = self._worker.join(_EXIT_SECONDS)
        report = self._worker.stacks() if code is None else self._worker.crash_report()
        self.discard()
        ended = "did not end" if code is None else f"ended with exit code {code}"
        assert code == 0, f"a process of the test {ended} after its transport was closed\n{report}"


class Ends:
    """The ends of one lane, by name. Processes stay between tests; transports are opened and closed with each test."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._ends: dict[str, End] = {}
        self._open: list[str] = []

    def end(self, name: str) -> End:
        """The end called ``name``, with an open transport."""
        known = self.closed_end(name)
        if name not in self._open:
            known.call("open")
            self._open.append(name)
            self._introduce()
        return known

    def closed_end(self, name: str) -> End:
        """The end called ``name``, which may have no transport."""
        known = self._ends.get(name)
        if known is None or (isinstance(known, ProcessEnd) and not known.alive):
            # "a" has the first device, its peers have the last.
            device = self.lane.devices[0 if name == "a" else -1]
            known = LocalEnd(Node(self.lane, device)) if self.lane.in_process else ProcessEnd(self.lane, device)
            self._ends[name] = known
            self._open = [other for other in self._open if other != name]
        return known

    def process(self, name: str) -> ProcessEnd:
        """The end called ``name``, as the process it is."""
        found = self.end(name)
        assert isinstance(found, ProcessEnd)
        return found

    def _introduce(self) -> None:
        """Nodes of one process have no loops of their own: each makes progress for the others, too."""
        nodes = [end.node for name in self._open if isinstance(end := self._ends[name], LocalEnd)]
        for node in nodes:
            node.neighbours = [other for other in nodes if other is not node]

    def close_transports(self) -> None:
        """Closes every transport that is open. An end left in the middle of a call is discarded instead."""
        opened, self._open = self._open, []
        with ExitStack() as stack:  # all of them, also if one raises
            for name in opened:
                stack.callback(self._close, self._ends[name])

    def _close(self, end: End) -> None:
        if isinstance(end, ProcessEnd) and end.in_a_call:
            end.discard()
        elif not isinstance(end, ProcessEnd) or end.alive:
            end.call("freeze", False)
            end.call("close")

    def discard(self) -> None:
        """Ends all processes in whatever state they are."""
        for end in self._ends.values():
            if isinstance(end, ProcessEnd):
                end.discard()
        self._ends.clear()
        self._open.clear()

    def stop(self) -> None:
        """Ends all processes. Raises ``AssertionError`` if one does not end with exit code 0."""
        with ExitStack() as stack:
            for end in self._ends.values():
                if isinstance(end, ProcessEnd) and end.alive:
                    stack.callback(end.stop)
        self._ends.clear()
