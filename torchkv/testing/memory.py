"""The memory of one end: regions with canary bytes on both sides, written and read as plain bytes."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch

from torchkv.cuda.driver import check, context
from torchkv.transport import RemoteView, Transport

__all__ = ["CANARY", "MARGIN", "Memory", "memory_on"]

MARGIN = 4096  # canary bytes on either side of a region
CANARY = 0xC5


class Memory(ABC):
    """Makes regions: uint8 tensors, each over a storage that begins and ends where the region does."""

    def __init__(self) -> None:
        self._parents: list[torch.Tensor] = []

    @abstractmethod
    def adopt(self, nbytes: int) -> torch.Tensor:
        """Memory that the transport did not allocate, with `MARGIN` canary bytes on both sides."""

    def allocate(self, transport: Transport, nbytes: int) -> torch.Tensor:
        """Memory that the transport allocates; it has no canaries around it."""
        return transport.allocate(nbytes, self.device)

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @abstractmethod
    def view_write(self, view: RemoteView, offset: int, data: bytes) -> None:
        """Stores ``data`` into a peer's memory; the stores have been made on return."""

    @abstractmethod
    def view_read(self, view: RemoteView, offset: int, nbytes: int) -> bytes:
        """Loads from a peer's memory."""

    @abstractmethod
    def settle(self) -> None:
        """Waits until everything written here is in memory: a put may read its source at once."""

    def margins_intact(self) -> bool:
        """Whether all canary bytes around adopted regions are as they were."""
        return all(bool((p[:MARGIN] == CANARY).all() and (p[-MARGIN:] == CANARY).all()) for p in self._parents)

    def write(self, tensor: torch.Tensor, data: bytes, offset: int = 0) -> None:
        tensor[offset : offset + len(data)] = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
        self.settle()

    def read(self, tensor: torch.Tensor, offset: int = 0, nbytes: int | None = None) -> bytes:
        end = len(tensor) if nbytes is None else offset + nbytes
        return tensor[offset:end].cpu().numpy().tobytes()

    def fill(self, tensor: torch.Tensor, value: int) -> None:
        tensor.fill_(value)
        self.settle()


class HostMemory(Memory):
    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def settle(self) -> None:
        return  # the stores of a CPU thread are in program order

    def adopt(self, nbytes: int) -> torch.Tensor:
        parent = np.full(nbytes + 2 * MARGIN, CANARY, dtype=np.uint8)
        self._parents.append(torch.from_numpy(parent))
        return torch.from_numpy(parent[MARGIN : MARGIN + nbytes])

    def view_write(self, view: RemoteView, offset: int, data: bytes) -> None:
        ctypes.memmove(view.ptr + offset, data, len(data))

    def view_read(self, view: RemoteView, offset: int, nbytes: int) -> bytes:
        return ctypes.string_at(view.ptr + offset, nbytes)


class DeviceMemory(Memory):
    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = torch.device(device)
        torch.cuda.set_device(self._device)

    @property
    def device(self) -> torch.device:
        return self._device

    def adopt(self, nbytes: int) -> torch.Tensor:
        parent = torch.full((nbytes + 2 * MARGIN,), CANARY, dtype=torch.uint8, device=self._device)
        self._parents.append(parent)
        self.settle()
        inner = torch.as_tensor(_Span(parent.data_ptr() + MARGIN, nbytes), device=self._device)
        assert inner.data_ptr() == parent.data_ptr() + MARGIN
        return inner

    # The driver copies and not PyTorch: the address of a view is valid in the context of this device only, and PyTorch
    # would use the context of the memory's owner.

    def view_write(self, view: RemoteView, offset: int, data: bytes) -> None:
        assert view.device == self._device
        with context(self._device.index) as cuda:
            check(cuda.cuMemcpyHtoD(view.ptr + offset, data, len(data)), "writing through a view")
            check(cuda.cuCtxSynchronize(), "writing through a view")

    def view_read(self, view: RemoteView, offset: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        with context(self._device.index) as cuda:
            check(cuda.cuMemcpyDtoH(data, view.ptr + offset, nbytes), "reading through a view")
        return bytes(data)

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)


class _Span:
    """Device memory as PyTorch adopts it."""

    def __init__(self, ptr: int, nbytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,), "typestr": "|u1", "data": (ptr, False), "strides": None, "version": 3,
        }  # fmt: skip


def memory_on(device: str) -> Memory:
    """For ``"cpu"`` or a CUDA device."""
    return HostMemory() if device == "cpu" else DeviceMemory(device)
