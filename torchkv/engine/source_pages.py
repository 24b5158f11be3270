"""Where an op reads: which pages of this rank, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torchkv.arrays import Int64Array
from torchkv.cuda.page_ids import DevicePages

__all__ = ["Event", "SourcePages"]


class Event(Protocol):
    """Says whether data is ready, as `torch.cuda.Event` does."""

    def query(self) -> bool: ...


@dataclass(slots=True)
class SourcePages:
    """The source of a `SendOp`. pages: this rank's page ids (for state: its slot). path: the forced path, or None.

    event: says when the pages may be read; None means now.
    """

    pages: Int64Array | DevicePages
    event: Event | None
    path: str | None

    def behind(self, held: int) -> SourcePages:
        """The same without the first ``held`` pages."""
        pages = self.pages.behind(held) if isinstance(self.pages, DevicePages) else self.pages[held:]
        return SourcePages(pages, self.event, self.path)

    @property
    def gates(self) -> list[Event]:
        """The events that must be ready before the pages, and page ids on a GPU, may be read."""
        gates = [] if self.event is None else [self.event]
        return [*gates, self.pages.ready] if isinstance(self.pages, DevicePages) else gates
