"""The loopback transport of torchkv: a simulated network in one process, with a virtual clock and injected faults."""

from torchkv_loopback.transport import LoopbackTransport
from torchkv_loopback.world import Faults, World

__all__ = ["Faults", "LoopbackTransport", "World"]
