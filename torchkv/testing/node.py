"""One end of a conformance test: a transport with its regions, channels and operations, driven by named calls.

A node lives in a process of its own, or in the process of the test where a transport reaches no other; see `ends`.
"""

from __future__ import annotations

import os
import select
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from torchkv.errors import KVError, error_kind
from torchkv.testing.lane import Lane
from torchkv.testing.memory import memory_on
from torchkv.transport import Batch, Channel, Completion, Region, RemoteView, Transport

__all__ = ["Node", "serve"]


class Node:
    """All methods take and return plain values, so that they can be called across processes.

    Regions, channels, operations and views are named by their number, in the order in which they were made.
    """

    def __init__(self, lane: Lane, device: str) -> None:
        self._lane = lane
        self._device = device
        self.is_open = False
        self.frozen = False
        self.neighbours: list[Node] = []  # the other nodes of this process: none of them has a loop of its own

    def about(self) -> Mapping[str, Any]:
        """What the transport's class says of itself, without a transport having been made."""
        cls = self._lane.load()
        return {"name": cls.name, "available": cls.available(), "devices": set(cls.capabilities.devices)}

    def open(self) -> None:
        cls: Callable[[], Transport] = self._lane.load()
        self.transport = cls()
        self._regions: list[Region] = []
        self._memory = memory_on(self._device)
        self._bytes: list[torch.Tensor] = []
        self._channels: list[Channel] = []
        self._operations: list[Completion] = []
        self._views: list[RemoteView | None] = []
        self.is_open = True

    def close(self) -> None:
        self.is_open = False
        self.transport.close()

    def close_and_use(self) -> dict[str, str]:
        """Closes the transport twice and uses it: the kind of error that each use raises, "" for none."""
        self.close()
        self.close()
        kinds = {}
        for name in ("progress", "address", "arm"):
            try:
                getattr(self.transport, name)()
                kinds[name] = ""
            except KVError as error:
                kinds[name] = error_kind(error)
        return kinds

    # -- progress ----------------------------------------------------------------------------------------------

    def progress(self) -> bool:
        """One round on this node and its neighbours, frozen ones left out."""
        moved = False
        for node in (self, *self.neighbours):
            if not node.frozen:
                moved = node.transport.progress() or moved
        return moved

    def freeze(self, frozen: bool) -> None:
        """A frozen node makes progress in `step` only."""
        self.frozen = frozen

    def step(self, rounds: int) -> None:
        """Rounds of this node's own progress, and of its neighbours unless they are frozen."""
        for _ in range(rounds):
            self.transport.progress()
            for node in self.neighbours:
                if not node.frozen:
                    node.transport.progress()

    # -- memory ------------------------------------------------------------------------------------------------

    def adopt(self, nbytes: int) -> int:
        """Registers memory that the transport did not allocate, with canaries on both sides."""
        return self._register(self._memory.adopt(nbytes))

    def allocate(self, nbytes: int) -> int:
        """Registers memory that the transport allocates."""
        return self._register(self._memory.allocate(self.transport, nbytes))

    def _register(self, tensor: torch.Tensor) -> int:
        region = self.transport.register(tensor)
        assert region.index == len(self._regions), f"region {region.index} is the {len(self._regions)}th registered"
        assert (region.ptr, region.nbytes) == (tensor.data_ptr(), tensor.numel())
        self._regions.append(region)
        self._bytes.append(tensor)
        return region.index

    def register_meta(self) -> None:
        """Registers a tensor without memory, on a device that no transport knows."""
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
        """What a peer needs to `connect`: the transport's address and the descriptors of its regions."""
        return self.transport.address(), [region.descriptor() for region in self._regions]

    def connect(self, address: bytes, regions: list[bytes]) -> int:
        self._channels.append(self.transport.connect(address, regions))
        return len(self._channels) - 1

    def link(self, channel: int) -> str:
        return self._channels[channel].link

    def drained(self, channel: int) -> bool:
        return self._channels[channel].drained

    def wait_drained(self, channel: int) -> None:
        self._until(lambda: self._channels[channel].drained, f"channel {channel} to be drained")

    def close_channel(self, channel: int) -> None:
        self._channels[channel].close()

    # -- operations --------------------------------------------------------------------------------------------

    def put(self, channel: int, *columns: np.ndarray) -> int:
        return self._track(self._channels[channel].put(Batch(*columns)))

    def flush(self, channel: int) -> int:
        return self._track(self._channels[channel].flush())

    def _track(self, operation: Completion) -> int:
        self._operations.append(operation)
        return len(self._operations) - 1

    def done(self, operation: int) -> bool:
        return self._operations[operation].done

    def cancel(self, operation: int) -> None:
        self._operations[operation].cancel()

    def wait(self, *operations: int) -> list[tuple[str, str] | None]:
        """Progresses until all are done; (kind, message) of each error, or None."""
        waited = [self._operations[operation] for operation in operations]
        self._until(lambda: all(operation.done for operation in waited), f"{len(waited)} operations")
        return [_plain(operation.error) for operation in waited]

    def put_then_reuse(self, channel: int, index: int, data: bytes, *columns: np.ndarray) -> int:
        """A put, at whose end region ``index`` is overwritten with ``data`` before anything else happens."""
        operation = self.put(channel, *columns)
        self._until(lambda: self._operations[operation].done, "a put")
        self._memory.write(self._bytes[index], data)
        return operation

    def wait_asleep(self, *operations: int) -> list[tuple[str, str] | None]:
        """Progresses until all are done, and sleeps in between on ``arm()`` alone: nothing else ends a sleep."""
        waited = [self._operations[operation] for operation in operations]
        deadline = time.monotonic() + self._lane.timeout
        while not all(operation.done for operation in waited):
            left = deadline - time.monotonic()
            if left <= 0 or (not self.progress() and not self.sleep(left)):
                raise TimeoutError(f"{self._lane}: slept {self._lane.timeout} s on arm() with operations pending")
        return [_plain(operation.error) for operation in waited]

    def _until(self, condition: Callable[[], bool], awaited: str) -> None:
        deadline = time.monotonic() + self._lane.timeout
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._lane}: waited {self._lane.timeout} s for {awaited}")
            if not self.progress():
                self.sleep(0.05)

    def sleep(self, seconds: float | None, *others: int) -> bool:
        """Sleeps until the transport or one of ``others`` has something; False if neither had within ``seconds``."""
        fd = None if self.neighbours else self.transport.arm()
        return fd is None or any(select.select([fd, *others], [], [], seconds))

    # -- views -------------------------------------------------------------------------------------------------

    def view(self, channel: int, region: int) -> bool:
        """Maps the peer's region; whether it could."""
        self._views.append(self._channels[channel].view(region))
        return self._views[-1] is not None

    def why_no_view(self, channel: int, region: int) -> str:
        return self._channels[channel].why_no_view(region)

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

    # -- what a transport leaves behind ------------------------------------------------------------------------

    def free_device_nbytes(self, device: int) -> int:
        """Free memory of a GPU, as its driver counts it for all processes together."""
        return torch.cuda.mem_get_info(device)[0]

    def census(self) -> tuple[int, int]:
        """Open file descriptors and threads of this process."""
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _plain(error: KVError | None) -> tuple[str, str] | None:
    return None if error is None else (error_kind(error), str(error))


def serve(connection: Connection, lane: Lane, device: str) -> None:
    """The main function of a node's own process: makes progress, and answers calls until the pipe closes."""
    os.environ.update(lane.environment)
    torch.set_num_threads(1)
    node = Node(lane, device)
    failure = ""
    while True:
        while not connection.poll(0):
            if not node.is_open or node.frozen or failure:
                connection.poll(None)
                continue
            try:
                if not node.progress():
                    # Without a timeout: an operation of the peer that needs this end ends only if arm() is right.
                    node.sleep(None, connection.fileno())
            except Exception:  # noqa: BLE001 - the next call is answered with it
                failure = f"progress() or arm() raised:\n{traceback.format_exc()}"
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        connection.send(("crash", failure) if failure else _answer(node, name, arguments))
        failure = ""


def _answer(node: Node, name: str, arguments: tuple[Any, ...]) -> tuple[str, Any]:
    try:
        return "value", getattr(node, name)(*arguments)
    except KVError as error:
        return "error", _plain(error)
    except Exception:  # noqa: BLE001 - the test fails with it
        return "crash", traceback.format_exc()
