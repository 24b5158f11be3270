"""The exception tree. Every error says what happened, to whom, against which limit, and what to do next.

KVError (torch.distributed.DistBackendError)
 +- LayoutMismatch      (ValueError)       layouts that cannot be reconciled
 +- PageOutOfRange      (ValueError)       a page id or page count outside what it may be
 +- ProtocolError       (ValueError)       a call or a message that the contract does not allow
 +- PeerLost            (ConnectionError)  the peer died or does not answer
 +- TransferTimeout     (TimeoutError)     a deadline passed
 +- TransferCancelled                      somebody cancelled the request
 +- RingExhausted                          the staging ring stayed full up to the deadline
 +- ChecksumMismatch                       bytes arrived that are not the bytes sent
 +- AuthError                              a peer that does not know the group's secret
 +- TransportUnavailable                   a transport or lane that cannot work here
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

__all__ = [
    "AuthError",
    "ChecksumMismatch",
    "KVError",
    "LayoutMismatch",
    "PageOutOfRange",
    "PeerLost",
    "ProtocolError",
    "RingExhausted",
    "TransferCancelled",
    "TransferTimeout",
    "TransportUnavailable",
    "error_kind",
    "make_error",
]


class KVError(dist.DistBackendError):
    """Base of all errors that torchkv raises.

    ``retryable``: the same call may succeed later, with nothing changed by the caller.
    ``pages_safe``: whether every page of the failed request may be reused *now*; evaluated each time it is
    read, because a one-sided write may still be in flight when the error is raised.
    """

    default_retryable = False

    def __init__(
        self,
        message: str,
        *,
        retryable: bool | None = None,
        pages_safe: Callable[[], bool] | None = None,
    ) -> None:
        super().__init__(message)
        self.retryable: bool = self.default_retryable if retryable is None else retryable
        self._pages_safe = pages_safe

    def __reduce__(self) -> tuple[Callable[..., KVError], tuple[Any, ...]]:
        """Copies and pickles freeze ``pages_safe`` at what it was."""
        return _rebuild, (type(self), str(self), self.retryable, self.pages_safe)

    @property
    def pages_safe(self) -> bool:
        """True if no write of the failed request can land any more (always true where none could start)."""
        return True if self._pages_safe is None else self._pages_safe()


def _rebuild(kind: type[KVError], message: str, retryable: bool, pages_safe: bool) -> KVError:
    return kind(message, retryable=retryable, pages_safe=lambda: pages_safe)


class LayoutMismatch(KVError, ValueError):
    """Two layouts that cannot be reconciled, or a layout that contradicts itself."""


class PageOutOfRange(KVError, ValueError):
    """A page id that is out of range, repeated, leased or quarantined, or a chunk outside the grant."""


class ProtocolError(KVError, ValueError):
    """A call, or a message from a peer, that the contract does not allow."""


class PeerLost(KVError, ConnectionError):
    """The peer's process ended, or it has not answered for longer than the heartbeat allows."""

    default_retryable = True


class TransferTimeout(KVError, TimeoutError):
    """A deadline passed: the wait's own, the grant's, or the transfer's progress deadline."""

    default_retryable = True


class TransferCancelled(KVError):
    """The request was cancelled, here or by the peer."""


class RingExhausted(KVError):
    """The staging ring stayed full up to the deadline."""

    default_retryable = True


class ChecksumMismatch(KVError):
    """The bytes that arrived are not the bytes that were sent."""

    default_retryable = True


class AuthError(KVError):
    """A peer that could not prove that it belongs to the group."""


class TransportUnavailable(KVError):
    """A transport, lane or memory kind that cannot work on this machine; the message says why."""


# The closed set of kinds that may cross the wire: a peer names one of these, never a class of its choice.
_KINDS: dict[str, type[KVError]] = {
    cls.__name__: cls
    for cls in (
        AuthError,
        ChecksumMismatch,
        LayoutMismatch,
        PageOutOfRange,
        PeerLost,
        ProtocolError,
        RingExhausted,
        TransferCancelled,
        TransferTimeout,
        TransportUnavailable,
    )
}


def error_kind(error: BaseException) -> str:
    """The name under which ``error`` travels to a peer: its own class, or ``ProtocolError``."""
    name = type(error).__name__
    return name if name in _KINDS else "ProtocolError"


def make_error(kind: str, message: str) -> KVError:
    """The error that a peer reported. An unknown kind becomes a ``ProtocolError``."""
    return _KINDS.get(kind, ProtocolError)(message)
