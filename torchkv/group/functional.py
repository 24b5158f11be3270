"""``register`` and the verbs of `KVVerbs` as functions, in the style of c10d: ``torchkv.finish(..., group=None)``."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchkv.cache import KVCache
from torchkv.engine.work import KVWork
from torchkv.group.arguments import Layers, Origin, Pages, Peers, StateSlot
from torchkv.group.explain import Explanation
from torchkv.group.kv_verbs import KVVerbs, current
from torchkv.group.process_group import current_group
from torchkv.observe.stats import Stats

__all__ = [
    "cancel",
    "dump",
    "explain",
    "finish",
    "granted",
    "prefix_tokens",
    "quarantined",
    "recv_pages",
    "refuse",
    "register",
    "send_layer",
    "send_pages",
    "send_slice",
    "send_state",
    "staged_put",
    "stats",
    "withdraw",
]

Group = dist.ProcessGroup | KVVerbs | None


def register(cache: KVCache | None, instance: str | None = None, *, group: dist.ProcessGroup | None = None) -> None:
    """`KVProcessGroup.register` on ``group``, or on the default group."""
    current_group(group).register(cache, instance)


def recv_pages(
    request: str,
    pages: Pages,
    src: Peers,
    *,
    prefix_tokens: int = 0,
    state_slot: StateSlot = None,
    timeout: float | timedelta | None = None,
    group: Group = None,
) -> KVWork:
    """`KVVerbs.recv_pages` on ``group``, or on the default group."""
    return current(group).recv_pages(
        request, pages, src, prefix_tokens=prefix_tokens, state_slot=state_slot, timeout=timeout
    )


def send_layer(
    request: str,
    layer: int,
    pages: Pages,
    dst: Peers | None,
    *,
    start: int = 0,
    event: Any = None,
    origin: Origin = "prefix",
    group: Group = None,
) -> KVWork:
    """`KVVerbs.send_layer` on ``group``, or on the default group."""
    return current(group).send_layer(request, layer, pages, dst, start=start, event=event, origin=origin)


def send_slice(
    request: str,
    layers: Layers,
    pages: Pages,
    dst: Peers | None,
    *,
    start: int = 0,
    event: Any = None,
    origin: Origin = "prefix",
    group: Group = None,
) -> KVWork:
    """`KVVerbs.send_slice` on ``group``, or on the default group."""
    return current(group).send_slice(request, layers, pages, dst, start=start, event=event, origin=origin)


def staged_put(
    request: str,
    layers: Layers,
    pages: Pages,
    dst: Peers | None,
    *,
    start: int = 0,
    event: Any = None,
    origin: Origin = "prefix",
    group: Group = None,
) -> KVWork:
    """`KVVerbs.staged_put` on ``group``, or on the default group."""
    return current(group).staged_put(request, layers, pages, dst, start=start, event=event, origin=origin)


def send_pages(
    request: str,
    pages: Pages,
    dst: Peers | None,
    *,
    layers: Layers = None,
    start: int = 0,
    event: Any = None,
    origin: Origin = "prefix",
    group: Group = None,
) -> KVWork:
    """`KVVerbs.send_pages` on ``group``, or on the default group."""
    return current(group).send_pages(request, pages, dst, layers=layers, start=start, event=event, origin=origin)


def send_state(
    request: str, layer: int, state_slot: StateSlot, dst: Peers | None, *, event: Any = None, group: Group = None
) -> KVWork:
    """`KVVerbs.send_state` on ``group``, or on the default group."""
    return current(group).send_state(request, layer, state_slot, dst, event=event)


def finish(
    request: str, dst: Peers | None, *, aux: bytes = b"", state_slot: StateSlot = None, group: Group = None
) -> KVWork:
    """`KVVerbs.finish` on ``group``, or on the default group."""
    return current(group).finish(request, dst, aux=aux, state_slot=state_slot)


def prefix_tokens(request: str, dst: Peers | None, *, group: Group = None) -> int:
    """`KVVerbs.prefix_tokens` on ``group``, or on the default group."""
    return current(group).prefix_tokens(request, dst)


def granted(request: str, dst: Peers | None, *, group: Group = None) -> int | None:
    """`KVVerbs.granted` on ``group``, or on the default group."""
    return current(group).granted(request, dst)


def refuse(request: str, src: Peers, *, group: Group = None) -> None:
    """`KVVerbs.refuse` on ``group``, or on the default group."""
    current(group).refuse(request, src)


def withdraw(request: str, *, group: Group = None) -> KVWork:
    """`KVVerbs.withdraw` on ``group``, or on the default group."""
    return current(group).withdraw(request)


def cancel(request: str, *, decline: bool = False, group: Group = None) -> KVWork:
    """`KVVerbs.cancel` on ``group``, or on the default group."""
    return current(group).cancel(request, decline=decline)


def quarantined(
    *, slots: bool = False, layer_group: str | None = None, group: Group = None
) -> dict[int, tuple[int, ...]]:
    """`KVVerbs.quarantined` on ``group``, or on the default group."""
    return current(group).quarantined(slots=slots, layer_group=layer_group)


def explain(peer: int, *, group: Group = None) -> Explanation:
    """`KVVerbs.explain` on ``group``, or on the default group."""
    return current(group).explain(peer)


def stats(*, group: Group = None) -> Stats:
    """`KVVerbs.stats` on ``group``, or on the default group."""
    return current(group).stats()


def dump(folder: str | None = None, *, group: Group = None) -> Path:
    """`KVVerbs.dump` on ``group``, or on the default group."""
    return current(group).dump(folder)
