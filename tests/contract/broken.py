"""Transports that break the contract, each in one way: the conformance suite has to catch every one of them."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import struct
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import torch
from torchkv_loopback import LoopbackTransport
from torchkv_ucx import UCXTransport

from torchkv.errors import KVError, PeerLost, ProtocolError, TransferCancelled
from torchkv.transport import Batch, Capabilities, Channel, Completion, Region, RemoteView, Transport

__all__ = ["Sound", "SoundUcx"]  # every other class here is unsound


class Sound(Transport):
    """Hands everything on to another transport, unchanged; the others override what they break."""

    name = "sound"
    capabilities = Capabilities(devices=frozenset({"cpu"}))
    base: ClassVar[Callable[[], Transport]] = functools.partial(LoopbackTransport, views=True)

    @staticmethod
    def available() -> str | None:
        return None

    def __init__(self) -> None:
        self.inner = type(self).base()
        self.channels: list[SoundChannel] = []
        self.regions: list[Region] = []

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        return self.inner.allocate(nbytes, device)

    def register(self, tensor: torch.Tensor) -> Region:
        self.regions.append(self.inner.register(tensor))
        return self.regions[-1]

    def deregister(self, region: Region) -> None:
        self.inner.deregister(region)

    def address(self) -> bytes:
        return self.inner.address()

    def connect(self, address: bytes, regions: Sequence[bytes]) -> Channel:
        self.channels.append(SoundChannel(self.inner.connect(address, regions), self))
        return self.channels[-1]

    def progress(self) -> bool:
        return self.inner.progress()

    def arm(self) -> int | None:
        return self.inner.arm()

    def close(self) -> None:
        self.inner.close()
        self.channels.clear()  # which name this transport: nothing may wait for the garbage collector

    # What channels do, for subclasses to break.

    def put(self, channel: Channel, batch: Batch) -> Completion:
        return channel.put(batch)

    def flush(self, channel: Channel) -> Completion:
        return channel.flush()

    def view(self, channel: Channel, region: int) -> RemoteView | None:
        return channel.view(region)

    def drained(self, channel: Channel) -> bool:
        return channel.drained

    def close_channel(self, channel: Channel) -> None:
        channel.close()


class SoundUcx(Sound):
    """Over UCX, between processes."""

    base = UCXTransport


class SoundChannel(Channel):
    def __init__(self, inner: Channel, owner: Sound) -> None:
        self.inner = inner
        self._owner = owner

    @property
    def link(self) -> str:
        return self.inner.link

    def put(self, batch: Batch) -> Completion:
        return self._owner.put(self.inner, batch)

    def flush(self) -> Completion:
        return self._owner.flush(self.inner)

    def view(self, region: int) -> RemoteView | None:
        return self._owner.view(self.inner, region)

    @property
    def drained(self) -> bool:
        return self._owner.drained(self.inner)

    def close(self) -> None:
        self._owner.close_channel(self.inner)


class Claim:
    """A completion that says what it was told to say, whatever is true."""

    def __init__(self, *, done: bool = True, on_cancel: Callable[[], None] | None = None) -> None:
        self.done = done
        self.error: KVError | None = None
        self._on_cancel = on_cancel

    def cancel(self) -> None:
        if not self.done and self._on_cancel is not None:
            self._on_cancel()
            self.done, self.error = True, TransferCancelled("so it claims")


def rows(batch: Batch) -> list[Batch]:
    """Each span as a batch of its own."""
    columns = [getattr(batch, field.name) for field in dataclasses.fields(Batch)]
    return [Batch(*(column[i : i + 1].copy() for column in columns)) for i in range(len(batch))]


# -- bytes in wrong places -------------------------------------------------------------------------------------


class IgnoresRemoteOffsets(Sound):
    def put(self, channel: Channel, batch: Batch) -> Completion:
        return channel.put(dataclasses.replace(batch, remote_offset=np.zeros_like(batch.remote_offset)))


class IgnoresLocalOffsets(Sound):
    def put(self, channel: Channel, batch: Batch) -> Completion:
        return channel.put(dataclasses.replace(batch, local_offset=np.zeros_like(batch.local_offset)))


class ForgetsTheLastByte(Sound):
    def put(self, channel: Channel, batch: Batch) -> Completion:
        return channel.put(dataclasses.replace(batch, length=np.maximum(batch.length - 1, 0)))


class WritesOneByteMore(Sound):
    def put(self, channel: Channel, batch: Batch) -> Completion:
        try:
            return channel.put(dataclasses.replace(batch, length=batch.length + (batch.length > 0)))
        except ProtocolError:
            return channel.put(batch)


class WritesBesideARegion(Sound):
    """Behind its last byte."""

    def put(self, channel: Channel, batch: Batch) -> Completion:
        view = channel.view(0)
        assert view is not None
        ctypes.memset(view.ptr + view.nbytes, 0, 1)
        return channel.put(batch)


class ChangesItsSource(Sound):
    def put(self, channel: Channel, batch: Batch) -> Completion:
        ctypes.memset(self.regions[0].ptr, 0, 8)
        return channel.put(batch)


class WritesTwice(Sound):
    """The batch before lands again, after the next."""

    def __init__(self) -> None:
        super().__init__()
        self._before: Batch | None = None

    def put(self, channel: Channel, batch: Batch) -> Completion:
        operation = channel.put(batch)
        if self._before is not None:
            while not channel.flush().done and not operation.done:
                self.inner.progress()
            channel.put(self._before)
        self._before = batch
        return operation


class UsesOneChannelForAll(Sound):
    def connect(self, address: bytes, regions: Sequence[bytes]) -> Channel:
        return self.channels[0] if self.channels else super().connect(address, regions)


class MapsViewsAskew(Sound):
    def view(self, channel: Channel, region: int) -> RemoteView | None:
        view = channel.view(region)
        return None if view is None else RemoteView(view.ptr + 1, view.nbytes, view.device)


# -- too early ---------------------------------------------------------------------------------------------------


class CompletesPutsEarly(Sound):
    """Before the source has been read."""

    def put(self, channel: Channel, batch: Batch) -> Completion:
        channel.put(batch)
        return Claim()


class CompletesFlushesEarly(Sound):
    """Before the bytes are there."""

    def flush(self, channel: Channel) -> Completion:
        channel.flush()
        return Claim()


class BlocksInPut(Sound):
    def put(self, channel: Channel, batch: Batch) -> Completion:
        operation = channel.put(batch)
        while not operation.done:
            self.inner.progress()
        return operation


class ReadsTheBatchLater(Sound):
    """In the next round of progress, when the caller may have changed it."""

    def __init__(self) -> None:
        super().__init__()
        self._later: list[tuple[Channel, Batch, Claim]] = []

    def put(self, channel: Channel, batch: Batch) -> Completion:
        claim = Claim(done=False)
        self._later.append((channel, batch, claim))
        return claim

    def progress(self) -> bool:
        for channel, batch, claim in self._later:
            try:
                channel.put(batch)
            except KVError as error:
                claim.error = error
            claim.done = True
        self._later.clear()
        return super().progress()


# -- what must be refused ----------------------------------------------------------------------------------------


class SkipsSpansOutside(Sound):
    """Puts what is inside, and says nothing of the rest."""

    def put(self, channel: Channel, batch: Batch) -> Completion:
        try:
            return channel.put(batch)
        except ProtocolError:
            return Claim()


class ChecksWhilePutting(Sound):
    """The spans before the first bad one are written."""

    def put(self, channel: Channel, batch: Batch) -> Completion:
        try:
            return channel.put(batch)
        except ProtocolError:
            for row in rows(batch):
                try:
                    channel.put(row)
                except ProtocolError as error:
                    raise ProtocolError("span 1 and span 1999, to satisfy any test of the words") from error
            raise


class TakesDamagedBytes(Sound):
    def connect(self, address: bytes, regions: Sequence[bytes]) -> Channel:
        try:
            return super().connect(address, regions)
        except ProtocolError:
            return self.channels[0]


class CrashesOnDamagedBytes(Sound):
    def connect(self, address: bytes, regions: Sequence[bytes]) -> Channel:
        try:
            return super().connect(address, regions)
        except ProtocolError as error:
            raise struct.error("unpack requires a buffer of 40 bytes") from error


class PublishesTooMuch(Sound):
    def address(self) -> bytes:
        return self.inner.address() + bytes(16 << 10)

    def connect(self, address: bytes, regions: Sequence[bytes]) -> Channel:
        return super().connect(address[: -(16 << 10)], regions)


class CannotWorkHere(Sound):
    @staticmethod
    def available() -> str | None:
        return "the network card is missing"


# -- endings -----------------------------------------------------------------------------------------------------


class IgnoresCancel(Sound):
    """Says that the put was cancelled, and goes on with it."""

    def put(self, channel: Channel, batch: Batch) -> Completion:
        channel.put(batch)
        return Claim(done=False, on_cancel=lambda: None)


class CancelsWithoutDraining(Sound):
    """Posts nothing more, but is done while what was posted is still on its way."""

    def put(self, channel: Channel, batch: Batch) -> Completion:
        return Claim(done=False, on_cancel=channel.put(batch).cancel)


class DeregistersUnderAPut(Sound):
    def deregister(self, region: Region) -> None:
        try:
            super().deregister(region)
        except ProtocolError as error:
            if "pending" not in str(error):
                raise


class UsesIndicesAgain(Sound):
    def register(self, tensor: torch.Tensor) -> Region:
        region = super().register(tensor)
        return Region(0, tensor, region.descriptor())

    def deregister(self, region: Region) -> None:
        super().deregister(self.regions[-1])


class ForgetsToCloseChannels(Sound):
    def close_channel(self, channel: Channel) -> None:
        pass


class WorksWhenClosed(Sound):
    def progress(self) -> bool:
        return False


# -- between processes -------------------------------------------------------------------------------------------


class LosesNobody(SoundUcx):
    """Puts to the dead succeed."""

    def put(self, channel: Channel, batch: Batch) -> Completion:
        return self._hidden(channel.put(batch))

    def flush(self, channel: Channel) -> Completion:
        return self._hidden(channel.flush())

    @staticmethod
    def _hidden(operation: Completion) -> Completion:
        class Hidden:
            done = property(lambda self: operation.done)
            error = property(lambda self: None if isinstance(operation.error, PeerLost) else operation.error)

            def cancel(self) -> None:
                operation.cancel()

        return Hidden()


class IsDrainedFromTheStart(SoundUcx):
    def drained(self, channel: Channel) -> bool:
        return True


class IsNeverDrained(SoundUcx):
    def drained(self, channel: Channel) -> bool:
        return False


class WritesAfterDrained(SoundUcx):
    def __init__(self) -> None:
        super().__init__()
        self._rounds_left = 0

    def drained(self, channel: Channel) -> bool:
        if channel.drained:
            self._rounds_left = 1000
        return channel.drained

    def progress(self) -> bool:
        if self._rounds_left:
            self._rounds_left -= 1
            if self._rounds_left == 0:
                ctypes.memset(self.regions[0].ptr + self.regions[0].nbytes - 8, 0x11, 8)
        return super().progress()


class LeaksADescriptor(SoundUcx):
    def connect(self, address: bytes, regions: Sequence[bytes]) -> Channel:
        os.dup(0)
        return super().connect(address, regions)


class SleepsThroughWork(SoundUcx):
    def __init__(self) -> None:
        super().__init__()
        self._never = os.eventfd(0)

    def arm(self) -> int | None:
        return self._never


class WaitsForItsPeersInClose(SoundUcx):
    def close(self) -> None:
        try:
            flushes = [channel.inner.flush() for channel in self.channels]
        except KVError:  # a dead peer it does not wait for
            flushes = []
        while not all(flush.done for flush in flushes):
            self.inner.progress()
        super().close()


class CrashesInProgress(SoundUcx):
    def progress(self) -> bool:
        if self.channels:
            raise RuntimeError("a bug of the backend")
        return super().progress()
