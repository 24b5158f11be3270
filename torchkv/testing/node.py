"""One end of a contract test: a transport with its regions, channels and operations, driven by named calls.

A node runs in the test's own process (for in-process transports) or in a process of its own, see `contract_world`.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from contract_memory import memory_on

from torchkv.errors import KVError, error_kind
from torchkv.transport import Batch, Channel, Completion, Region, RemoteView, Transport, load_transport

WAIT_SECONDS = 60.0


class Node:
    """All methods take and return plain values, so that they can be called across processes."""

    def __init__(self, transport: str, device: str = "cpu") -> None:
        self._name = transport
        self._device = device
        self.frozen = False
        self.neighbours: list[Node] = []  # in-process nodes progress together

    def open(self) -> None:
        cls: Callable[[], Transport] = load_transport(self._name)
        self.transport = cls()
        self._regions: list[Region] = []
        self._memory = memory_on(self._device)
        self._bytes: list[torch.Tensor] = []
        self._channels: list[Channel] = []
        self._operations: list[Completion] = []
        self._views: list[RemoteView | None] = []

    def close(self) -> None:
        self.transport.close()

    def progress(self) -> bool:
        """One round on this node and its in-process neighbours."""
        moved = False
        for node in (self, *self.neighbours):
            if not node.frozen:
                moved = node.transport.progress() or moved
        return moved

    # -- memory ------------------------------------------------------------------------------------------------

    def adopt(self, nbytes: int) -> int:
        """Registers foreign memory with canaries on both sides."""
        return self._register(self._memory.adopt(nbytes))

    def allocate(self, nbytes: int) -> int:
        """Registers memory of the transport's own making."""
        return self._register(self._memory.allocate(self.transport, nbytes))

    def _register(self, tensor: torch.Tensor) -> int:
        region = self.transport.register(tensor)
        assert region.index == len(self._regions)
        assert (region.ptr, region.nbytes) == (tensor.data_ptr(), tensor.numel())
        self._regions.append(region)
        self._bytes.append(tensor)
        return region.index

    def register_meta(self) -> None:
        """Memory that is on no device at all."""
        self.transport.register(torch.empty(16, dtype=torch.uint8, device="meta"))

    def deregister(self, index: int) -> None:
        self.transport.deregister(self._regions[index])

    def write(self, index: int, data: bytes, offset: int = 0) -> None:
        self._memory.write(self._bytes[index], data, offset)

    def read(self, index: int) -> bytes:
        return self._memory.read(self._bytes[index])

    def read_at(self, index: int, offset: int, nbytes: int) -> bytes:
        return self._memory.read(self._bytes[index], offset, nbytes)

    def margins_intact(self) -> bool:
        return self._memory.margins_intact()

    # -- connections -------------------------------------------------------------------------------------------

    def published(self) -> tuple[bytes, list[bytes]]:
        return self.transport.address(), [region.descriptor() for region in self._regions]

    def connect(self, address: bytes, regions: list[bytes]) -> int:
        self._channels.append(self.transport.connect(address, regions))
        return len(self._channels) - 1

    def link(self, channel: int) -> str:
        return self._channels[channel].link

    def drained(self, channel: int) -> bool:
        return self._channels[channel].drained

    def wait_drained(self, channel: int) -> None:
        self._until(lambda: self._channels[channel].drained, "drained")

    def close_channel(self, channel: int) -> None:
        self._channels[channel].close()

    # -- operations --------------------------------------------------------------------------------------------

    def put(self, channel: int, *columns: np.ndarray) -> int:
        return self._track(self._channels[channel].put(Batch(*columns)))

    def flush(self, channel: int) -> int:
        return self._track(self._channels[channel].flush())

    def signal(self, channel: int, slot: int, value: int) -> int:
        return self._track(self._channels[channel].signal(slot, value))

    def _track(self, operation: Completion) -> int:
        self._operations.append(operation)
        return len(self._operations) - 1

    def wait(self, *operations: int) -> list[tuple[str, str] | None]:
        """Progresses until all are done; (kind, message) of each error, or None."""
        waited = [self._operations[operation] for operation in operations]
        self._until(lambda: all(operation.done for operation in waited), f"{len(waited)} operations")
        errors = [operation.error for operation in waited]
        return [None if error is None else (error_kind(error), str(error)) for error in errors]

    def step(self, rounds: int) -> None:
        for _ in range(rounds):
            self.progress()

    def done(self, operation: int) -> bool:
        return self._operations[operation].done

    def cancel(self, operation: int) -> None:
        self._operations[operation].cancel()

    def read_signal(self, slot: int) -> int:
        return self.transport.read_signal(slot)

    def freeze(self, frozen: bool) -> None:
        """A frozen node makes no progress of its own accord."""
        self.frozen = frozen

    def _until(self, condition: Callable[[], bool], what: str, *, spin: bool = False) -> None:
        """``spin``: never sleeps, for a condition that raises no event (a store by the peer)."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._name}: waited {WAIT_SECONDS} s for {what}")
            if not self.progress() and not spin:
                self._sleep(0.05)

    def _sleep(self, seconds: float, *others: int) -> None:
        """Sleeps until the transport or one of ``others`` has something."""
        fd = None if self.neighbours else self.transport.arm()
        if fd is not None:
            select.select([fd, *others], [], [], seconds)

    def sleep_until_signal(self, slot: int, value: int) -> bool:
        """Sleeps on ``arm()`` alone, with no timeout but the test's own; whether it had to sleep at all."""
        slept = False
        while self.transport.read_signal(slot) != value:
            if not self.transport.progress() and (fd := self.transport.arm()) is not None:
                slept = True
                ready, _, _ = select.select([fd], [], [], WAIT_SECONDS)
                assert ready, "slept through the signal"
        return slept

    # -- views -------------------------------------------------------------------------------------------------

    def view(self, channel: int, region: int) -> bool:
        """Maps the peer's region; whether it could."""
        self._views.append(self._channels[channel].view(region))
        return self._views[-1] is not None

    def view_nbytes(self, view: int) -> int:
        return self._view(view).nbytes

    def view_write(self, view: int, offset: int, data: bytes) -> None:
        self._memory.view_write(self._view(view), offset, data)

    def view_read(self, view: int, offset: int, nbytes: int) -> bytes:
        return self._memory.view_read(self._view(view), offset, nbytes)

    def _view(self, view: int) -> RemoteView:
        found = self._views[view]
        assert found is not None
        return found

    # -- what must hold of signals: bytes first ------------------------------------------------------------------

    def hammer(self, channel: int, rounds: int, nbytes: int) -> None:
        """Round i: fills region 0 with byte i, puts it, signals i; waits for the peer's echo in slot 1."""
        columns = [np.array([value], dtype=np.int64) for value in (0, 0, 0, 0, nbytes)]
        for i in range(1, rounds + 1):
            self._memory.fill(self._bytes[0][:nbytes], i % 251)
            put = self._channels[channel].put(Batch(*columns))
            sent = self._channels[channel].signal(0, i)
            self._until(lambda: put.done and sent.done, f"round {i}")  # noqa: B023 - called before the next round
            assert put.error is None
            assert sent.error is None
            self._until(lambda: self.transport.read_signal(1) == i, f"echo {i}", spin=True)  # noqa: B023

    def echo(self, channel: int, rounds: int, nbytes: int) -> int:
        """The other side of `hammer`: counts rounds in which the signal came before the bytes."""
        wrong = 0
        for i in range(1, rounds + 1):
            self._until(lambda: self.transport.read_signal(0) == i, f"signal {i}", spin=True)  # noqa: B023
            wrong += not bool((self._bytes[0][:nbytes] == i % 251).all())
            back = self._channels[channel].signal(1, i)
            self._until(lambda: back.done, f"echo {i} sent")  # noqa: B023
            assert back.error is None
        return wrong

    # -- what a transport leaves behind ------------------------------------------------------------------------

    def free_device_nbytes(self, device: int) -> int:
        """Free memory of a GPU, whoever uses the rest."""
        return torch.cuda.mem_get_info(device)[0]

    def census(self) -> tuple[int, int]:
        """Open file descriptors and threads of this process."""
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def serve(connection: Connection, transport: str, environment: dict[str, str], device: str) -> None:
    """The main function of a node's own process: progresses, and answers calls until the pipe closes."""
    os.environ.update(environment)
    node = Node(transport, device)
    ready = False
    while True:
        if not connection.poll(0):
            if ready and not node.frozen and node.progress():
                continue
            if ready and not node.frozen:
                node._sleep(0.2, connection.fileno())
            else:
                connection.poll(None)
            continue
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        verdict, value = _answer(node, name, arguments)
        if verdict == "value" and name in ("open", "close"):
            ready = name == "open"
        connection.send((verdict, value))


def _answer(node: Node, name: str, arguments: tuple[Any, ...]) -> tuple[str, Any]:
    try:
        return "value", getattr(node, name)(*arguments)
    except KVError as error:
        return "error", (error_kind(error), str(error))
    except Exception as error:  # noqa: BLE001 - goes to the test, which fails on it
        return "crash", f"{type(error).__name__}: {error}"
