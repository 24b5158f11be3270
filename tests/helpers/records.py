"""Records from one resident loop to another that are made by hand."""

from __future__ import annotations

from typing import cast

from torchkv.core.core import Core
from torchkv.core.loop import mailbox
from torchkv.core.loop.state.peers import Record

__all__ = ["tell"]


def tell(core: Core, rank: int, **words: int) -> None:
    """Has a loop send a record to that of ``rank``, whatever it says."""
    record = cast(dict[str, int], core.world["record"])
    for name in Record.__annotations__:
        record[name] = words.get(name, 0)
    mailbox.tell(core.world, core.world["peers"][rank])
