"""The exceptions that torchkv raises. Each message says what happened, to what, against which limit, and what to do.

KVError (torch.distributed.DistBackendError)
 +- LayoutMismatch      (ValueError)       incompatible layouts, or a layout that contradicts itself
 +- PageOutOfRange      (ValueError)       a page id or a number of pages that is not allowed
 +- ProtocolError       (ValueError)       a call or a message that the contract does not allow
 +- PeerLost            (ConnectionError)  the peer died or does not answer
 +- TransferTimeout     (TimeoutError)     a deadline passed
 +- TransferCancelled                      the request was cancelled, here or by a peer
 +- RingExhausted                          the staging ring stayed full until the deadline
 +- ChecksumMismatch                       the received bytes are not the bytes sent
 +- AuthError                              a peer does not know the group's secret
 +- TransportUnavailable                   a transport, path or kind of memory that does not work here
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

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
    "fresh",
    "make_error",
]


class KVError(dist.DistBackendError):
    """Base of all errors that torchkv raises.

    retryable: whether the same call, unchanged, may succeed later. Ranks that a peer tells of its error have the same.
    pages_safe: whether every page of the failed request may be reused *now*; evaluated each time it is read, because a
    one-sided write may still be in flight when the error is raised.
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
        """Copies and pickles keep the value that ``pages_safe`` has when they are made."""
        return _rebuild, (type(self), str(self), self.retryable, self.pages_safe)

    @property
    def pages_safe(self) -> bool:
        """Whether no write of the failed request can reach its pages any more. True if none could start."""
        return True if self._pages_safe is None else self._pages_safe()


def _rebuild(kind: type[KVError], message: str, retryable: bool, pages_safe: bool) -> KVError:
    return kind(message, retryable=retryable, pages_safe=lambda: pages_safe)


class LayoutMismatch(KVError, ValueError):
    """Two layouts between which pages cannot move, or a layout that contradicts itself."""


class PageOutOfRange(KVError, ValueError):
    """A page id that is out of range, repeated, leased or quarantined, or a chunk of pages outside the grant."""


class ProtocolError(KVError, ValueError):
    """A call, or a message from a peer, that the contract does not allow.

    ``retryable`` if the call only exceeds how much may be pending at once.
    """


class PeerLost(KVError, ConnectionError):
    """The peer's process ended, or it has not answered for longer than the heartbeat allows."""

    default_retryable = True


class TransferTimeout(KVError, TimeoutError):
    """A deadline passed: of the wait itself, of the grant, or of the transfer's progress."""

    default_retryable = True


class TransferCancelled(KVError):
    """The request was cancelled, here or by a peer."""


class RingExhausted(KVError):
    """The staging ring stayed full until the deadline."""

    default_retryable = True


class ChecksumMismatch(KVError):
    """The received bytes are not the bytes that were sent."""

    default_retryable = True


class AuthError(KVError):
    """A peer could not prove that it belongs to the group."""


class TransportUnavailable(KVError):
    """A transport, path or kind of memory that does not work on this machine; the message says why."""


_Error = TypeVar("_Error", bound=KVError)

# The errors that may travel between ranks, by name. A peer can name one of these and no other class.
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
    """The name under which ``error`` is sent to a peer: of its class, or ``ProtocolError`` for other exceptions."""
    name = type(error).__name__
    return name if name in _KINDS else "ProtocolError"


def make_error(kind: str, message: str, retryable: bool | None = None) -> KVError:
    """An error that a peer has reported. An unknown kind becomes a ``ProtocolError``."""
    return _KINDS.get(kind, ProtocolError)(message, retryable=retryable)


def fresh(error: _Error) -> _Error:
    """The same error once more, to be raised where ``error`` is kept: a traceback keeps all frames alive, and what they
    refer to, and several threads may raise it at once.
    """
    made = type(error)(str(error))
    made.__dict__.update(error.__dict__)
    made.__cause__ = error.__cause__
    return made
