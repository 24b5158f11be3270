"""The loopback transport of torchkv: one process, a virtual clock, and a network that misbehaves on request."""

from torchkv_loopback.transport import LoopbackTransport
from torchkv_loopback.world import Faults, World

__all__ = ["Faults", "LoopbackTransport", "World"]
