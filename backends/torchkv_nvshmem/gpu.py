"""The GPU side of one rank: streams of its own, marks that tell when a stream got somewhere, and tensors."""

from __future__ import annotations

import functools
from typing import Protocol

import torch

from torchkv import cudadriver, devicemem
from torchkv.errors import ProtocolError, TransportUnavailable
from torchkv.flags import Flag, Flags

__all__ = ["Device", "Gpu", "Mark", "Stream"]


class Mark(Protocol):
    """A point in the order of a stream."""

    @property
    def done(self) -> bool:
        """Whether everything enqueued before it has finished, and all can see it."""

    def release(self) -> None:
        """Nobody asks any more."""


class Stream(Protocol):
    handle: int  # a CUstream

    def mark(self) -> Mark:
        """Raises ``TransportUnavailable`` if the device has failed."""

    def follow(self, other: Stream) -> None:
        """Enqueues: wait for what is on ``other`` now."""

    def read_int64(self, tensor: torch.Tensor, index: int) -> int:
        """``tensor[index]`` as it is now. Waits for what is on this stream already, and no other."""

    def close(self) -> None:
        """What is on it still runs to its end."""


class Device(Protocol):
    """What `runtime` and `transport` need of a device; a fake of it runs without one."""

    device: torch.device

    def enter(self) -> None:
        """Makes the device current on this thread."""

    def settle(self) -> None:
        """Waits until the device has finished everything."""

    def memory(self) -> tuple[int, int]:
        """Bytes that a new allocation may take, and bytes there are."""

    def uuid(self) -> str:
        """Names the GPU on its host."""

    def reaches(self, uuid: str) -> bool:
        """False if this device certainly cannot load from and store to that GPU's memory."""

    def wrap(self, ptr: int, nbytes: int, owner: object) -> torch.Tensor:
        """A uint8 tensor over [ptr, ptr + nbytes); its storage keeps ``owner`` alive."""

    def stream(self) -> Stream:
        """A stream of one's own."""

    def borrow(self, stream: torch.cuda.Stream) -> Stream:
        """A caller's stream. Raises ``TransportUnavailable`` for one of another device, ``ProtocolError`` while it is
        being captured."""

    def share(self, tensor: torch.Tensor) -> bytes:
        """See `torchkv.devicemem.share`."""

    def open_share(self, share: bytes) -> devicemem.Mapping:
        """See `torchkv.devicemem.open_share`."""


class _CudaStream:
    """A stream that nobody else is given. (PyTorch's come from a small pool, and another user's may be waiting.)"""

    def __init__(self, handle: int, device: torch.device, flags: Flags, *, owned: bool) -> None:
        self.handle = handle
        self._stream = torch.cuda.ExternalStream(handle, device=device)
        self._flags = flags
        self._owned = owned

    def mark(self) -> Flag:
        return self._flags.signal(self._stream)

    def follow(self, other: Stream) -> None:
        assert isinstance(other, _CudaStream)
        self._stream.wait_stream(other._stream)

    def read_int64(self, tensor: torch.Tensor, index: int) -> int:
        with torch.cuda.stream(self._stream):
            return int(tensor[index].item())

    def close(self) -> None:
        if self._owned:
            self._owned = False
            with cudadriver.context(cudadriver.device_index(self._stream.device)) as cuda:
                cudadriver.check(cuda.cuStreamDestroy(self.handle), "closing a stream")


class _Span:
    """Memory as PyTorch adopts it, and who must live as long as its tensor."""

    def __init__(self, ptr: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (ptr, False), "strides": None, "version": 3,
        }  # fmt: skip


class Gpu:
    """The real `Device`. Raises ``TransportUnavailable`` where there is no such GPU."""

    def __init__(self, device: torch.device) -> None:
        self.index = cudadriver.device_index(device)
        self.device = torch.device("cuda", self.index)
        self.enter()

    @functools.cached_property
    def _flags(self) -> Flags:
        return Flags(self.device)

    def enter(self) -> None:
        devicemem.make_current(self.device)

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)

    def memory(self) -> tuple[int, int]:
        with cudadriver.context(self.index) as cuda:
            torch.cuda.empty_cache()
            free, total = cudadriver.check(cuda.cuMemGetInfo(), f"asking {self.device} for its free memory")
        return int(free), int(total)

    def uuid(self) -> str:
        return devicemem.gpu_facts()[self.index].uuid

    def reaches(self, uuid: str) -> bool:
        facts = devicemem.gpu_facts()
        # A GPU that this process does not see (CUDA_VISIBLE_DEVICES) may be reached all the same.
        return all(facts[self.index].peers[other.index] for other in facts if other.uuid == uuid)

    def wrap(self, ptr: int, nbytes: int, owner: object) -> torch.Tensor:
        tensor = torch.as_tensor(_Span(ptr, nbytes, owner), device=self.device)
        assert tensor.data_ptr() == ptr, "PyTorch copied the memory instead of adopting it"
        return tensor

    def stream(self) -> _CudaStream:
        with cudadriver.context(self.index) as cuda:
            # Non-blocking: unordered with the default stream, on which a model may be running.
            flags = int(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
            handle = int(cudadriver.check(cuda.cuStreamCreate(flags), f"making a stream on {self.device}"))
        return _CudaStream(handle, self.device, self._flags, owned=True)

    def borrow(self, stream: torch.cuda.Stream) -> _CudaStream:
        if stream.device != self.device:
            raise TransportUnavailable(f"a stream of {stream.device}, where NVSHMEM is bound to {self.device}")
        with cudadriver.context(self.index) as cuda:
            capture = cudadriver.check(cuda.cuStreamIsCapturing(stream.cuda_stream), "looking at a stream")
        if int(capture) != 0:
            raise ProtocolError(
                "this stream is being captured into a CUDA graph, whose replays would put again, unasked"
            )
        return _CudaStream(int(stream.cuda_stream), self.device, self._flags, owned=False)

    def share(self, tensor: torch.Tensor) -> bytes:
        return devicemem.share(tensor)

    def open_share(self, share: bytes) -> devicemem.Mapping:
        return devicemem.open_share(share, self.device)
