"""What the scheduler of an engine tells its workers to move, step by step. They may be processes of their own.

request: the engine's name of a request. name: that of its transfer, which both engines know.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torchkv.integrations.layer_groups import PageLists

__all__ = ["Receive", "Remote", "Send", "Step"]


@dataclass(frozen=True, slots=True)
class Remote:
    """Where a request's prompt is prefilled. instance: who should be there, if that is known."""

    name: str
    address: str
    instance: str | None


@dataclass(frozen=True, slots=True)
class Send:
    """Pages of a request that this step completes. start: position of the first of ``pages``,
    in pages from the beginning of the prompt. last: whether they are the prompt's last ones. slots: blocks that hold
    its states, by layer group.
    """

    request: str
    name: str
    start: int
    pages: PageLists
    last: bool
    slots: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Receive:
    """A request whose prompt, behind ``prefix_tokens``, comes into ``pages``. remote: None if ``problem`` says why.

    slots: blocks that its states come into, by layer group.
    """

    request: str
    remote: Remote | None
    pages: PageLists
    prefix_tokens: int
    problem: str = ""
    slots: dict[str, int] = field(default_factory=dict)

    def blocks(self) -> list[int]:
        """All blocks that are written to."""
        lists = self.pages.values() if isinstance(self.pages, dict) else [self.pages]
        return [page for pages in lists for page in pages if page >= 0] + list(self.slots.values())


@dataclass(slots=True)
class Step:
    """What the workers do in one step of the engine.

    refusals: who prefills what will never be received here. withdrawals, cancels: requests. declines: names of
    transfers that will never be sent.
    """

    sends: list[Send] = field(default_factory=list)
    receives: list[Receive] = field(default_factory=list)
    refusals: list[Remote] = field(default_factory=list)
    withdrawals: list[str] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    declines: list[str] = field(default_factory=list)
