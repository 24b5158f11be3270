"""What a work asks of the engine if a resident loop may complete it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torchkv.observe.recorder import FlightRecorder
    from torchkv.protocol.receiving.request import ReceiverRequest
    from torchkv.protocol.sending.request import SenderRequest

__all__ = ["LoopProgress"]


class LoopProgress(Protocol):
    """An engine with a loop. Any thread."""

    @property
    def news(self) -> int:
        """Changes when a request may have ended, and while a thread listens with every event."""

    @property
    def recorder(self) -> FlightRecorder | None:
        """That of this rank."""

    def poll(self) -> None:
        """Completes the works that the loop has ended."""

    def have_succeeded(self, sends: Sequence[SenderRequest], receives: Sequence[ReceiverRequest]) -> bool:
        """Whether the loop has ended all requests of a work, with success. Then that is all that is done.

        Else as `poll`, if any request may have ended.
        """

    def take_in(self) -> None:
        """As `poll`; nobody else is about to complete a work any more."""

    def wait(self, seen: int, seconds: float, *, listens: bool) -> None:
        """Sleeps until ``news`` is not ``seen``, for so long at most. listens: for every event."""

    def make_eager(self) -> None:
        """From now on Python's own thread follows the loop, because somebody waits in another way than by `wait`."""
