"""Failpoints: named moments at which a rank of a test kills itself, as ``kill -9`` would, whatever its threads do.

``TORCHKV_FAILPOINT="mid scatter@1"`` in the environment of `Ranks` arms one on rank 1. Nothing but the tests' harness
reads it, and nothing of this is in the product: a failpoint wraps one of its functions.
"""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any

from torchkv.protocol.messages import Seal

__all__ = ["AT_JOIN", "AT_REGISTER", "OF_READERS", "OF_WRITERS", "VARIABLE", "arm", "from_environment"]

VARIABLE = "TORCHKV_FAILPOINT"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _before(real: Callable[..., Any]) -> Callable[..., Any]:
    """The function is never run."""
    return wraps(real)(lambda *args, **options: die())


def _after(real: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(real)
    def run(*args: Any, **options: Any) -> None:
        real(*args, **options)
        die()

    return run


def _amid(real: Callable[..., Iterator[int]]) -> Callable[..., Iterator[int]]:
    """After the first step of a job that has several."""

    @wraps(real)
    def run(*args: Any, **options: Any) -> Iterator[int]:
        yield next(real(*args, **options))
        die()

    return run


def _with_frames(real: Callable[..., Any]) -> Callable[..., Any]:
    """After messages have been handed to the network."""

    @wraps(real)
    def run(self: Any, frames: Any) -> None:
        real(self, frames)
        if frames:
            die()

    return run


def _with_greetings(real: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(real)
    def run(self: Any, greetings: Any, now: float) -> None:
        if greetings:
            die()
        real(self, greetings, now)

    return run


def _before_the_seal(real: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(real)
    def run(self: Any, rank: int, message: Any) -> None:
        if isinstance(message, Seal):
            die()
        real(self, rank, message)

    return run


Point = tuple[str, str, str, Callable[[Callable[..., Any]], Callable[..., Any]]]  # module, class, method, how

OF_WRITERS: Mapping[str, Point] = {
    "grant heard": ("torchkv.protocol.sending.sender", "Sender", "on_grant", _before),
    "grant bound": ("torchkv.protocol.sending.sender", "Sender", "on_grant", _after),
    "mid copy": ("torchkv_ucx.channel", "UCXChannel", "put", _after),
    "mid gather": ("torchkv.staging.host_packer", "HostPacker", "gather", _amid),
    "after the last byte, before the seal": (
        "torchkv.protocol.sending.endings",
        "SendEndings",
        "tell",
        _before_the_seal,
    ),
    "after the seal, before the verdict": ("torchkv.protocol.sending.sender", "Sender", "on_verdict", _before),
}
OF_READERS: Mapping[str, Point] = {
    "grant made": ("torchkv.control.messenger", "ControlMessenger", "send_now", _before),
    "grant sent": ("torchkv.control.messenger", "ControlMessenger", "send_now", _with_frames),
    "layer attested": ("torchkv.protocol.receiving.receiver", "Receiver", "on_attest", _before),
    "mid scatter": ("torchkv.staging.host_packer", "HostPacker", "scatter", _amid),
    "seal heard": ("torchkv.protocol.receiving.receiver", "Receiver", "on_seal", _before),
    "succeeded, before the verdict": ("torchkv.protocol.receiving.endings", "ReceiveEndings", "succeed", _after),
}
AT_REGISTER: Mapping[str, Point] = {
    "before it publishes": ("torchkv.engine.joining.registration", "Registration", "metadata", _before),
    "after it has published": ("torchkv.engine.joining.registration", "Registration", "engine", _before),
}
AT_JOIN: Mapping[str, Point] = {
    "greeted": ("torchkv.engine.joining.membership", "Membership", "receive", _with_greetings),
    "admitted": ("torchkv.engine.joining.membership", "Membership", "_admit", _after),
}
POINTS = {**OF_WRITERS, **OF_READERS, **AT_REGISTER, **AT_JOIN}


def arm(name: str) -> None:
    """From now on this process ends when it gets there."""
    module, owner, method, how = POINTS[name]
    cls = getattr(importlib.import_module(module), owner)
    setattr(cls, method, how(getattr(cls, method)))


def from_environment(rank: int) -> None:
    name, _, where = os.environ.pop(VARIABLE, "").rpartition("@")  # torchkv warns of variables that it does not know
    if name and int(where) == rank:
        arm(name)
