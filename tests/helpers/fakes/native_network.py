"""The functions of a `torchkv.transport.NativeChannel`, over the channels of a simulated `World`.

Compiled code calls them. Puts and flushes are the channels' own: puts land late, in pieces, in random order. Messages
arrive in order; some are read from the sender's memory only later. Requests fail with the channel. `SystemCalls` are
the other kind of lanes, within a host.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torchkv_loopback import LoopbackTransport, World
from torchkv_loopback.channel import LoopbackChannel

from torchkv.errors import KVError
from torchkv.transport import Batch, NativeChannel

__all__ = ["LOST", "NativeNetwork", "NetworkTransport", "SystemCalls"]

_WORD, _STATUS, _COUNT = ctypes.c_int64, ctypes.c_int8, ctypes.c_uint32
KEY_WORD = 5
LOST, TRUNCATED = -25, -10
PIECE = 100  # bytes
_IN_PROGRESS = 1


class _Message:
    """A message that is on its way. data: None until it is read. done: whether its request has ended."""

    def __init__(self, address: int, nbytes: int, tag: int) -> None:
        self.address, self.nbytes, self.tag = address, nbytes, tag
        self.data: bytes | None = None
        self.error: KVError | None = None
        self.dropped = False

    @property
    def done(self) -> bool:
        return self.data is not None or self.error is not None

    def read(self) -> None:
        if self.data is None:
            self.data = ctypes.string_at(self.address, self.nbytes)


class NativeNetwork:
    """All channels of a world that compiled code uses.

    puts, messages: how many there were. open: requests not freed. holding: the requests of messages do not end. pieces:
    how many of the messages that are longer than `PIECE` arrive in several. slowness: of messages.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.puts = 0
        self.messages = 0
        self.holding = False
        self.pieces = 0.0
        self.slowness = 1.0
        self.open: dict[int, Any] = {}  # by number: completions and messages
        self.inboxes: dict[int, deque[tuple[int, bytes]]] = {}  # by node: messages that have arrived
        self._endpoints: dict[int, LoopbackChannel] = {}
        self._links: dict[LoopbackChannel, deque[_Message]] = {}
        self._found: dict[int, tuple[int, bytes]] = {}  # messages that were probed
        self._next = 1
        kinds: Sequence[tuple[Any, Callable[..., int | None], int]] = (
            (_WORD, self._put, 6),
            (_WORD, self._flush, 2),
            (_STATUS, self._check, 1),
            (None, self._free, 1),
            (_COUNT, lambda worker: 0, 1),
            (_WORD, self._send, 5),
            (_WORD, self._probe, 5),
            (_WORD, self._receive, 5),
        )
        self.problems: list[str] = []  # a callback cannot raise
        self._callbacks = [ctypes.CFUNCTYPE(result, *[_WORD] * count)(self._guarded(f)) for result, f, count in kinds]
        self._functions = np.array([ctypes.cast(f, ctypes.c_void_p).value for f in self._callbacks], dtype=np.int64)

    def native(self, channel: LoopbackChannel) -> NativeChannel:
        """Of a channel, whose endpoint is new."""
        endpoint = self._number()
        self._endpoints[endpoint] = channel
        self._links.setdefault(channel, deque())
        regions = max(channel._local, default=-1) + 1
        return NativeChannel(
            functions=self._functions,
            worker=channel.node + 1,
            endpoint=endpoint,
            put_params=np.arange(8, dtype=np.int64),
            key_word=KEY_WORD,
            params=np.zeros(8, dtype=np.int64),
            local_keys=np.arange(regions, dtype=np.int64) + 1,
            remote_keys=np.arange(len(channel._remote), dtype=np.int64) + 1,
            remote_at=np.array([region.ptr for region in channel._remote], dtype=np.int64),
            put_seconds=0.0,
        )

    def end(self, channel: LoopbackChannel) -> None:
        """The endpoint of a channel has ended: nobody may use it any more."""
        self._endpoints = {number: known for number, known in self._endpoints.items() if known is not channel}

    def lose(self, channel: LoopbackChannel) -> None:
        """The endpoint of a channel has ended, and what was on its way is lost. The channel can have another one."""
        self.end(channel)
        for message in self._links[channel]:
            message.dropped = True

    def _guarded(self, function: Callable[..., int | None]) -> Callable[..., int | None]:
        def call(*arguments: int) -> int | None:
            try:
                return function(*arguments)
            except Exception as error:  # noqa: BLE001 - whatever it was, the run has failed
                self.problems.append(f"{function.__name__}{arguments}: {error!r}")
                return 0

        return call

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _request(self, what: Any) -> int:
        number = self._number()
        self.open[number] = what
        return number

    def _put(self, endpoint: int, source: int, nbytes: int, target: int, key: int, params: int) -> int:
        channel = self._endpoints[endpoint]
        batch = self._batch(channel, source, nbytes, target, key, params)
        self.puts += 1
        try:
            return self._request(channel.put(batch))
        except KVError:
            return LOST

    def _batch(self, channel: LoopbackChannel, source: int, nbytes: int, target: int, key: int, params: int) -> Batch:
        local = _WORD.from_address(params + 8 * KEY_WORD).value - 1
        return Batch.one(
            local_region=local,
            local_offset=source - channel._local[local].ptr,
            remote_region=key - 1,
            remote_offset=target - channel._remote[key - 1].ptr,
            length=nbytes,
        )

    def _flush(self, endpoint: int, params: int) -> int:
        try:
            return self._request(self._endpoints[endpoint].flush())
        except KVError:
            return LOST

    def _check(self, request: int) -> int:
        operation = self.open[request]
        if not operation.done or (self.holding and isinstance(operation, _Message)):
            return _IN_PROGRESS
        return 0 if operation.error is None else LOST

    def _free(self, request: int) -> None:
        del self.open[request]

    def _send(self, endpoint: int, address: int, nbytes: int, tag: int, params: int) -> int:
        channel = self._endpoints[endpoint]
        if channel._lost:
            return LOST
        self.messages += 1
        message = _Message(address, nbytes, tag)
        self._links[channel].append(message)
        self.world.schedule(self.slowness * self.world.delay(), lambda: self._move(channel))
        if self.world.random.random() < 0.5:
            message.read()
            return 0
        return self._request(message)

    def _move(self, channel: LoopbackChannel) -> None:
        """The oldest message on a channel arrives, unless it is lost."""
        world, node = self.world, channel._peer.node
        if world.alive(channel.node) and not world.reaches(channel.node, node):
            world.hold(channel.node, node, lambda: self._move(channel))
            return
        message = self._links[channel].popleft()
        lost = channel._lost or channel._closed or not world.alive(channel.node)
        if lost and (message.data is None or world.random.random() >= world.faults.survive):
            for later in self._links[channel]:  # a connection that has lost something carries nothing more
                later.dropped = True
            message.dropped = True
        if lost and message.data is None:
            message.error = KVError("the channel has ended")
        if message.dropped or not world.alive(node):
            return
        message.read()
        assert message.data is not None
        self.inboxes.setdefault(node, deque()).append((message.tag, message.data))

    def _probe(self, worker: int, tag: int, mask: int, remove: int, found: int) -> int:
        assert (tag, mask, remove) == (0, 0, 1)
        inbox = self.inboxes.get(worker - 1)
        if not inbox:
            return 0
        number = self._number()
        self._found[number] = inbox.popleft()
        _WORD.from_address(found).value = self._found[number][0]
        _WORD.from_address(found + 8).value = len(self._found[number][1])
        return number

    def _receive(self, worker: int, address: int, nbytes: int, message: int, params: int) -> int:
        _, data = self._found.pop(message)
        if len(data) > PIECE and self.world.random.random() < self.pieces:
            return self._receive_later(address, nbytes, data)
        ctypes.memmove(address, data, min(nbytes, len(data)))
        return TRUNCATED if len(data) > nbytes else 0

    def _receive_later(self, address: int, nbytes: int, data: bytes) -> int:
        """One piece of a message is there; others come some time later, also if its request is freed."""
        message = _Message(address, nbytes, 0)

        def rest() -> None:
            ctypes.memmove(address, data, min(nbytes, len(data)))
            message.data = data

        ctypes.memmove(address, data, min(nbytes, PIECE))
        self.world.schedule(self.world.delay(), rest)
        return self._request(message)


class SystemCalls(NativeNetwork):
    """Of lanes within a host, as `torchkv_ucx.local_native` makes them: a flush writes what puts have gathered.

    Nothing is driven, and there are no messages: who sends one has a problem.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._gathered: dict[int, list[tuple[int, int, int]]] = {}  # by endpoint: target, source, bytes

    def native(self, channel: LoopbackChannel) -> NativeChannel:
        return replace(super().native(channel), worker=0)

    def _put(self, endpoint: int, source: int, nbytes: int, target: int, key: int, params: int) -> int:
        channel = self._endpoints[endpoint]
        channel._spans(self._batch(channel, source, nbytes, target, key, params))  # which checks it
        self.puts += 1
        self._gathered.setdefault(endpoint, []).append((target, source, nbytes))
        return self._flush(endpoint, 0) if self.world.random.random() < 0.3 else 0

    def _flush(self, endpoint: int, params: int) -> int:
        channel, gathered = self._endpoints[endpoint], self._gathered.pop(endpoint, [])
        if (
            channel._lost
            or not self.world.alive(channel._peer.node)
            or not all(map(channel._peer.has, channel._remote))
        ):
            return LOST
        for target, source, nbytes in gathered:
            ctypes.memmove(target, source, nbytes)
        return 0

    def _send(self, endpoint: int, address: int, nbytes: int, tag: int, params: int) -> int:
        self.problems.append(f"a message of {nbytes} bytes through a lane that carries none")
        return 0

    def _probe(self, worker: int, tag: int, mask: int, remove: int, found: int) -> int:
        return 0


class NetworkTransport(LoopbackTransport):
    """Channels of which compiled code can put, and maps nothing."""

    def __init__(self, world: World, network: NativeNetwork) -> None:
        super().__init__(world, views=False)
        self._network = network

    def connect(self, address: bytes, regions: Sequence[bytes]) -> LoopbackChannel:
        channel = super().connect(address, regions)
        network, closings = self._network, []
        close = channel.close

        def native(closing: Callable[[], None]) -> NativeChannel | None:
            if channel._lost or channel._closed:
                return None
            closings.append(closing)
            return network.native(channel)

        def end() -> None:
            for closing in closings:
                closing()
            closings.clear()
            network.end(channel)
            close()

        channel.native, channel.close = native, end
        return channel
