"""Where the ends of a contract test live: all in this process, or each in a process of its own."""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from contract_node import Node, serve
from harness import SERVER

from torchkv.errors import make_error

CALL_SECONDS = 90.0
_EXIT_SECONDS = 20.0


class End(ABC):
    """One end; ``call`` runs a method of its `Node`, ``begin`` and ``end`` do so in two halves."""

    @abstractmethod
    def begin(self, name: str, *arguments: Any) -> None: ...

    @abstractmethod
    def end(self) -> Any: ...

    def call(self, name: str, *arguments: Any) -> Any:
        """Raises the node's own typed error if its transport raised one."""
        self.begin(name, *arguments)
        return self.end()


class LocalEnd(End):
    def __init__(self, node: Node) -> None:
        self.node = node

    def begin(self, name: str, *arguments: Any) -> None:
        self._result = getattr(self.node, name)(*arguments)

    def end(self) -> Any:
        return self._result


class ProcessEnd(End):
    def __init__(self, transport: str, environment: dict[str, str], device: str) -> None:
        self._connection, theirs = SERVER.Pipe()
        self._process = SERVER.Process(target=serve, args=(theirs, transport, environment, device), daemon=True)
        self._process.start()
        theirs.close()
        self._killed = False

    @property
    def alive(self) -> bool:
        return not self._killed

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def begin(self, name: str, *arguments: Any) -> None:
        self._connection.send((name, arguments))

    def end(self) -> Any:
        if not self._connection.poll(CALL_SECONDS):
            raise TimeoutError(f"process {self.pid} has not answered for {CALL_SECONDS} s")
        try:
            verdict, value = self._connection.recv()
        except EOFError:
            self._process.join(_EXIT_SECONDS)
            raise AssertionError(f"process {self.pid} died with exit code {self._process.exitcode}") from None
        if verdict == "error":
            raise make_error(*value)
        assert verdict == "value", value
        return value

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        self._killed = True
        self._process.kill()
        self._process.join(_EXIT_SECONDS)
        assert self._process.exitcode == -signal.SIGKILL
        self._connection.close()

    def stop(self) -> None:
        """The orderly end; the exit code must be 0."""
        self._connection.close()
        self._process.join(_EXIT_SECONDS)
        code = self._process.exitcode
        if code is None:
            self._process.kill()
            self._process.join(_EXIT_SECONDS)
        assert code == 0, f"process {self.pid} ended with exit code {code}"


@dataclass
class World:
    """The ends of one lane. They stay between tests; transports are opened and closed with each test."""

    lane: str
    transport: str
    in_process: bool
    environment: dict[str, str] = field(default_factory=dict)
    expected_link: str = ""  # a substring that Channel.link must show
    devices: tuple[str, ...] = ("cpu",)  # where the memory of ends lies, in turn
    _ends: dict[str, End] = field(default_factory=dict)
    _open: list[str] = field(default_factory=list)

    def end(self, name: str) -> End:
        """The end called ``name``, with an open transport."""
        known = self._ends.get(name)
        if known is None or (isinstance(known, ProcessEnd) and not known.alive):
            self._ends[name] = known = self._make(name)
        if name not in self._open:
            known.call("open")
            self._open.append(name)
            self._introduce()
        return known

    @property
    def wakes_for_signals(self) -> bool:
        """Lanes on which a writer stores a signal into its peer's memory wake nobody."""
        return not self.expected_link.startswith(("cma", "cuda_ipc"))

    def _make(self, name: str) -> End:
        # "a" has the first device; whoever it talks to has the second.
        device = self.devices[0 if name == "a" else -1]
        if self.in_process:
            return LocalEnd(Node(self.transport, device))
        return ProcessEnd(self.transport, self.environment, device)

    def _introduce(self) -> None:
        """In one process, whoever waits must also progress the others."""
        nodes = [end.node for name in self._open if isinstance(end := self._ends[name], LocalEnd)]
        for node in nodes:
            node.neighbours = [other for other in nodes if other is not node]

    def process(self, name: str) -> ProcessEnd:
        found = self.end(name)
        assert isinstance(found, ProcessEnd)
        return found

    def close_transports(self) -> None:
        for name in self._open:
            end = self._ends[name]
            if isinstance(end, LocalEnd) or (isinstance(end, ProcessEnd) and end.alive):
                end.call("freeze", False)
                end.call("close")
        self._open.clear()

    def stop(self) -> None:
        for end in self._ends.values():
            if isinstance(end, ProcessEnd) and end.alive:
                end.stop()
        self._ends.clear()


def device_worlds(**environment: str) -> list[World]:
    """UCX on the memory of one GPU, and of two where there are two."""
    count = torch.cuda.device_count()
    places = {"ucx-cuda-same": ("cuda:0",), "ucx-cuda-pair": ("cuda:0", "cuda:1")}
    return [
        World(lane, "ucx", in_process=False, environment=environment, expected_link="cuda_ipc", devices=devices)
        for lane, devices in places.items()
        if len(devices) <= count
    ]


def worlds_of(transport: str) -> list[World]:
    """The lanes on which the contract must hold for one installed transport."""
    if transport == "loopback":
        return [World("loopback", transport, in_process=True)]
    if transport == "ucx":
        return [
            World("ucx", transport, in_process=False, expected_link="cma"),
            World("ucx-tcp", transport, in_process=False, environment={"UCX_TLS": "tcp"}, expected_link="tcp"),
        ]
    if transport == "nvshmem":
        return []  # device memory only: tests/gpu/test_nvshmem_gpu.py
    return [World(transport, transport, in_process=False)]
