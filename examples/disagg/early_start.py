"""The first decode step, begun before its cache has arrived in full: each layer waits for its own pages only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

import torchkv


class Announcement:
    """The prompt's next token, on its way to ``ranks`` by itself.

    A request's aux comes with its verdict, behind the last page: too late for a step that overlaps with those pages.
    So the token goes the way of any small message between two ranks, on the same process group.
    """

    def __init__(self, token: int, ranks: Sequence[int]) -> None:
        self._message = torch.tensor([token])
        self._sends = [dist.isend(self._message, rank) for rank in ranks]

    def wait(self) -> None:
        for send in self._sends:
            send.wait()


def announced(rank: int) -> int:
    """The token that ``rank`` announces."""
    message = torch.empty(1, dtype=torch.int64)
    dist.recv(message, rank)
    return int(message)


def confirm(received: torchkv.KVWork, token: int) -> None:
    """Returns when the request has succeeded; before that, nothing computed from its pages counts.

    ``token``: the one that was announced. The request carries it too, as aux. Raises the request's error.
    """
    received.wait()
    sealed = int.from_bytes(received.aux, "little")
    if sealed != token:
        raise RuntimeError(f"the first token was announced as {token}, but the request was sealed with {sealed}")
