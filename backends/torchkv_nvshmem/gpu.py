"""The GPU of one rank: its streams, marks that show how far a stream has come, and tensors over given memory."""

from __future__ import annotations

import functools
from typing import Protocol

import torch

from torchkv.cuda import driver, ipc
from torchkv.cuda.sync_words import StreamCompletion, SyncWords

__all__ = ["Device", "Gpu", "Mark", "Stream"]


class Mark(Protocol):
    """A point in a stream's order."""

    @property
    def done(self) -> bool:
        """Whether everything that was enqueued before it has finished and is visible to everyone."""

    def release(self) -> None:
        """Frees the mark; `done` is not read any more."""


class Stream(Protocol):
    """A CUDA stream. handle: its CUstream."""

    handle: int

    def mark(self) -> Mark:
        """Enqueues a mark. Raises ``TransportUnavailable`` if the device has failed."""

    def close(self) -> None:
        """Destroys the stream; what is on it still runs to its end."""


class Device(Protocol):
    """What `runtime` and `transport` need of a device; tests have one without a GPU."""

    device: torch.device

    def enter(self) -> None:
        """Makes the device current on this thread."""

    def settle(self) -> None:
        """Waits until the device has finished everything."""

    def memory(self) -> tuple[int, int]:
        """Free bytes and total bytes of the device's memory."""

    def uuid(self) -> str:
        """The GPU's UUID."""

    def reaches(self, uuid: str) -> bool:
        """False if it is certain that this device cannot access that GPU's memory."""

    def wrap(self, ptr: int, nbytes: int, owner: object) -> torch.Tensor:
        """A uint8 tensor over [ptr, ptr + nbytes); its storage keeps ``owner`` alive."""

    def stream(self) -> Stream:
        """A new stream."""

    def share(self, tensor: torch.Tensor) -> bytes:
        """A descriptor of the tensor's storage for other processes, see `torchkv.cuda.ipc.share`."""

    def open_share(self, share: bytes) -> ipc.Mapping:
        """Maps what another process has shared, see `torchkv.cuda.ipc.open_share`."""


class _CudaStream:
    """A stream for one channel alone. PyTorch's streams come from a small pool, so another user could block one."""

    def __init__(self, handle: int, device: torch.device, flags: SyncWords) -> None:
        self.handle = handle
        self._stream = torch.cuda.ExternalStream(handle, device=device)
        self._flags = flags
        self._closed = False

    def mark(self) -> StreamCompletion:
        return self._flags.signal(self._stream)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with driver.context(driver.device_index(self._stream.device)) as cuda:
                driver.check(cuda.cuStreamDestroy(self.handle), "closing a stream")


class _Span:
    """Memory in the form in which PyTorch adopts it. owner: an object that lives as long as the tensor."""

    def __init__(self, ptr: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (ptr, False), "strides": None, "version": 3,
        }  # fmt: skip


class Gpu:
    """The `Device` over CUDA. Raises ``TransportUnavailable`` if there is no such GPU."""

    def __init__(self, device: torch.device) -> None:
        self.index = driver.device_index(device)
        self.device = torch.device("cuda", self.index)
        self.enter()

    @functools.cached_property
    def _flags(self) -> SyncWords:
        return SyncWords(self.device)

    def enter(self) -> None:
        ipc.make_current(self.device)

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)

    def memory(self) -> tuple[int, int]:
        with driver.context(self.index) as cuda:
            torch.cuda.empty_cache()
            free, total = driver.check(cuda.cuMemGetInfo(), f"asking {self.device} for its free memory")
        return int(free), int(total)

    def uuid(self) -> str:
        return ipc.gpu_facts()[self.index].uuid

    def reaches(self, uuid: str) -> bool:
        facts = ipc.gpu_facts()
        # Nothing is known of a GPU that CUDA_VISIBLE_DEVICES hides from this process: it may be reachable.
        return all(facts[self.index].peers[other.index] for other in facts if other.uuid == uuid)

    def wrap(self, ptr: int, nbytes: int, owner: object) -> torch.Tensor:
        tensor = torch.as_tensor(_Span(ptr, nbytes, owner), device=self.device)
        assert tensor.data_ptr() == ptr, "PyTorch copied the memory instead of adopting it"
        return tensor

    def stream(self) -> _CudaStream:
        with driver.context(self.index) as cuda:
            # Non-blocking: not ordered with the default stream, on which a model may be running.
            flags = int(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
            handle = int(driver.check(cuda.cuStreamCreate(flags), f"making a stream on {self.device}"))
        return _CudaStream(handle, self.device, self._flags)

    def share(self, tensor: torch.Tensor) -> bytes:
        return ipc.share(tensor)

    def open_share(self, share: bytes) -> ipc.Mapping:
        return ipc.open_share(share, self.device)
