"""The memory of a contract test's node: regions with canaries, written and read as plain bytes."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch

from torchkv.cudadriver import check, context
from torchkv.transport import RemoteView, Transport

MARGIN = 4096  # canary bytes on either side of a region
CANARY = 0xC5


class Memory(ABC):
    """Regions are uint8 tensors over a storage of their own, which begins and ends where the region does."""

    def __init__(self) -> None:
        self.regions: list[torch.Tensor] = []
        self._parents: list[torch.Tensor] = []

    @abstractmethod
    def adopt(self, nbytes: int) -> torch.Tensor:
        """Memory not made by the transport, with canaries on both sides."""

    def allocate(self, transport: Transport, nbytes: int) -> torch.Tensor:
        """Memory of the transport's own making."""
        return transport.allocate(nbytes, self.device)

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @abstractmethod
    def view_write(self, view: RemoteView, offset: int, data: bytes) -> None:
        """Stores into a peer's memory, done on return."""

    @abstractmethod
    def view_read(self, view: RemoteView, offset: int, nbytes: int) -> bytes: ...

    @abstractmethod
    def settle(self) -> None:
        """Waits until everything written here has been written: a put reads at once."""

    def margins_intact(self) -> bool:
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
        return  # stores of this thread are there at once

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

    # A view's address is good in the context of this device; PyTorch would take it for the owner's.

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
    def __init__(self, ptr: int, nbytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,), "typestr": "|u1", "data": (ptr, False), "strides": None, "version": 3,
        }  # fmt: skip


def memory_on(device: str) -> Memory:
    return HostMemory() if device == "cpu" else DeviceMemory(device)
