"""Instances that are launched apart, each in processes of its own among those of `Ranks`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.helpers.harness import Ranks
from tests.helpers.ranks import member

__all__ = ["SECRET", "Jobs", "new_secret_file"]

SECRET = "TORCHKV_SECRET_FILE"


def new_secret_file(path: Path) -> Path:
    """Writes a new secret to ``path``, as a user would. Returns ``path``."""
    path.write_bytes(os.urandom(32).hex().encode())
    path.chmod(0o600)
    return path


class Jobs:
    """Starts instances in the processes of `Ranks`, and lets them do things together."""

    def __init__(self, ranks: Ranks, scratch: Path, *, device: str = "cpu") -> None:
        self.ranks = ranks
        self._device = device
        self._scratch = scratch
        self._numbers = itertools.count()
        self.store: str | None = None
        self.of: dict[str, tuple[list[int], int]] = {}  # name -> processes and tag

    def start(self, name: str, processes: Sequence[int], *, page_size: int = 8) -> str:
        tag = next(self._numbers)
        meeting = str(self._scratch / f"meeting{tag}")
        begun = [
            self.ranks.start(
                member.join,
                name,
                tag,
                rank,
                len(processes),
                meeting,
                self.store,
                page_size,
                self._device,
                ranks=[process],
            )
            for rank, process in enumerate(processes)
        ]
        addresses = {self.ranks.join(each)[0] for each in begun}
        assert len(addresses) == 1, "all ranks of an instance tell the same address"
        self.of[name] = list(processes), tag
        return addresses.pop()

    def run(self, name: str, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self.ranks.run(function, *args, ranks=self.of[name][0])

    def transfer(
        self, request: str, src: str, dst: str, *, pages: int = 4, page_size: int = 8, address: str | None = None
    ) -> None:
        """``pages``: of the receiver. address: all that the receiver knows of the sender, which knows nothing of it."""
        (writers, tag), (readers, _) = self.of[src], self.of[dst]
        begun = self.ranks.start(member.receive, request, address or src, tag, pages, ranks=readers)
        target = dst if address is None else None
        begun += self.ranks.start(member.send, request, target, tag, pages * page_size // 8, ranks=writers)
        self.ranks.join(begun)

    def kill(self, name: str) -> None:
        for process in self.of.pop(name)[0]:
            self.ranks.kill(process)
