"""torchkv: one ``send_pages`` of a granted request, from the verb until both ranks know that all bytes are in place."""

from __future__ import annotations

from torchkv.bench.machine import one_link
from torchkv.bench.rivals.cases import Case
from torchkv.bench.rivals.side import PagedSide, Rival
from torchkv.engine.work import KVWork
from torchkv.group.process_group import current_group

__all__ = ["TORCHKV"]


class _Side(PagedSide):
    def __init__(self, case: Case, nbytes: int, rank: int) -> None:
        super().__init__(case, nbytes, rank)
        self._kv = current_group(None)
        self._kv.register(self.cache, instance="reader" if rank else "writer")
        self._work: KVWork | None = None

    def prepare(self, number: int) -> None:
        super().prepare(number)
        self._request = f"request {number}"
        if self.rank:
            self._work = self._kv.recv_pages(self._request, self.ids, 0)
        else:
            self._kv.prefix_tokens(self._request, 1)  # returns when the reader has granted it

    def move(self) -> None:
        if self.rank == 0:
            self._work = self._kv.send_pages(self._request, self.ids, 1)
            self._kv.finish(self._request, 1).wait()
        else:
            assert self._work is not None
            self._work.wait()

    def way(self) -> str:
        if self.rank:
            return ""
        assert self._work is not None
        lanes = self._kv.explain(1).lanes
        return f"{self._work.path}, {max(lanes, key=lambda lane: lanes[lane].nbytes)}"


def _environment(case: Case) -> dict[str, str]:
    return one_link() if case.tcp else {}


TORCHKV = Rival(name="torchkv", why_not=lambda device: None, make=_Side, backend="torchkv", environment=_environment)
