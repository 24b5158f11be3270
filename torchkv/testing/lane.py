"""`Lane`: which transport the conformance suite tests, and under which conditions."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field

from torchkv.errors import TransportUnavailable
from torchkv.transport import Transport, load_transport

__all__ = ["Lane"]


@dataclass(frozen=True, slots=True)
class Lane:
    """A transport, and the conditions under which it has to keep its contract.

    transport: its name in the entry-point group ``torchkv.backends``, or ``"package.module:Class"`` for a class that no
        installed package names there.
    environment: variables that are set in the processes of the test before they load the transport.
    link: text that ``Channel.link`` must contain, to make sure that the tests ran over the lane they were meant for.
    devices: where memory lies, as torch names devices: the first is the device of end ``"a"``, the last that of its
        peers.
    foreign_memory: whether peers can put into host memory that the transport did not allocate itself. If not,
        `register` or `put` must refuse such memory with ``TransportUnavailable``, and all tests use memory from
        `allocate`.
    in_process: whether both ends live in the process of the test, because the transport reaches no other process.
        Tests that need processes, such as those that kill a peer, are then skipped.
    timeout: seconds that a set of operations may take before the test fails.
    """

    transport: str
    _: KW_ONLY
    environment: Mapping[str, str] = field(default_factory=dict)
    link: str = ""
    devices: tuple[str, ...] = ("cpu",)
    foreign_memory: bool = True
    in_process: bool = False
    timeout: float = 60.0

    def load(self) -> type[Transport]:
        """The transport's class. Raises ``TransportUnavailable`` if there is none of this name."""
        module, colon, name = self.transport.partition(":")
        if not colon:
            return load_transport(self.transport)
        try:
            cls = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise TransportUnavailable(f"transport {self.transport!r} cannot be imported: {error}") from error
        if not (isinstance(cls, type) and issubclass(cls, Transport)):
            raise TransportUnavailable(f"{self.transport!r} is not a torchkv Transport: {cls!r}")
        return cls

    def __str__(self) -> str:
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return " ".join([self.transport, *variables, *(device for device in self.devices if device != "cpu")])
