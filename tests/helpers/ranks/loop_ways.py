"""Ways to send three pages of a cache of two layers: what the resident loop does by itself, and what it cannot do.

And ranks of which the loops have met, and what a rank's loop is given.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.ranks.small_cache import Gate, check_transfer
from tests.helpers.waiting import until
from torchkv import KVProcessGroup, KVWork
from torchkv.core.sends import Sends
from torchkv.core.way import Way

__all__ = ["READER", "WAYS", "WRITER", "acquaint", "note_sends"]

WRITER, READER = range(2)


def by_layer(kv: KVProcessGroup) -> list[KVWork]:
    return [kv.send_layer("r", layer, [1, 2, 3], READER) for layer in (0, 1)]


def gated(kv: KVProcessGroup) -> list[KVWork]:
    """The second layer waits for an event, which the loop cannot do: it takes the request back in the middle."""
    gate = Gate()
    first = kv.send_layer("r", 0, [1, 2, 3], READER)
    second = kv.send_layer("r", 1, [1, 2, 3], READER, event=gate)
    threading.Timer(0.05, gate.open.set).start()
    return [first, second]


def staged(kv: KVProcessGroup) -> list[KVWork]:
    return [kv.send_layer("r", 0, [1, 2, 3], READER), kv.staged_put("r", 1, [1, 2, 3], READER)]


def staged_first(kv: KVProcessGroup) -> list[KVWork]:
    return [kv.staged_put("r", 1, [1, 2, 3], READER), kv.send_layer("r", 0, [1, 2, 3], READER)]


def in_chunks(kv: KVProcessGroup) -> list[KVWork]:
    """Every other page first: more holes than the loop keeps are not needed, but disorder is."""
    return [kv.send_pages("r", [page], READER, start=page - 1) for page in (3, 1, 2, 1)]


def arrays(kv: KVProcessGroup) -> list[KVWork]:
    """The page ids in other forms; the caller changes them at once."""
    array, tensor = np.array([1, 2, 3]), torch.tensor([1, 2, 3])
    works = [kv.send_pages("r", array[:1], READER)]  # begins the request
    works += [kv.send_layer("r", 0, array, READER), kv.send_slice("r", None, tensor, READER)]
    array[:], tensor[:] = -1, -1
    return works


WAYS = {
    "layers": by_layer,
    "arrays": arrays,
    "gated": gated,
    "staged": staged,
    "staged first": staged_first,
    "chunks": in_chunks,
}


def note_sends(patch: pytest.MonkeyPatch, note: Callable[[Way], None]) -> None:
    """From now on ``note`` is told of each send that this rank's loop is given."""

    def noting(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(sends: Sends, way: Way, *given: Any, **more: Any) -> Any:
            if (begun := real(sends, way, *given, **more)) is not None:
                note(way)
            return begun

        return call

    for name in ("open", "wait_for_grant", "bind", "meet", "begin"):
        patch.setattr(Sends, name, noting(getattr(Sends, name)))


def acquaint(kv: KVProcessGroup, *ranks: int) -> None:
    """Each of these ranks sends to each other, as all of them call it. From then on grants are told by their loops."""
    for writer in ranks:
        for reader in ranks:
            if writer != reader:
                check_transfer(kv, writer, reader)
    assert kv._verbs is not None
    flows = kv._verbs.engine.flows
    assert flows is not None
    until(lambda: all(flows.core.peers.hears(rank) for rank in ranks if rank != kv.rank()), "the loops know each other")
