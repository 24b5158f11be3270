"""What receivers hold already of a request: `granted` asks for it, `prefix_tokens` waits for it.

With layer groups each part of a request has a grant of its own; all grants of a request tell the same prefix.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from torchkv.engine.work import drivers
from torchkv.errors import LayoutMismatch, ProtocolError, TransferTimeout
from torchkv.group.arguments import Peers
from torchkv.layout.layout import KVLayout
from torchkv.protocol.sending.request import not_posted

if TYPE_CHECKING:
    from torchkv.engine.engine import Engine

__all__ = ["granted", "prefix_tokens"]


class Verbs(Protocol):
    """What is asked here of `torchkv.group.verbs.Verbs`."""

    engine: Engine
    clock: Callable[[], float]

    def part_names(self, request: str) -> tuple[str, ...]: ...

    def layout(self, verb: str) -> KVLayout: ...

    def check_open(self, operation: str) -> None: ...

    def check_alive(self, ranks: Sequence[int], operation: str) -> None: ...

    def granted_plain(self, request: str, dst: Peers | None) -> int | None: ...

    def prefix_of(self, request: str, rank: int) -> int | None: ...


def granted(verbs: Verbs, request: str, dst: Peers | None) -> int | None:
    """See `KVProcessGroup.granted`."""
    if (plain := verbs.granted_plain(request, dst)) is not None:
        return plain
    operation = f"granted({request!r})"
    known = _known(verbs, request, dst, operation)
    with verbs.engine.lock:
        begun = _begin(verbs, known, operation)
        prefixes = [_prefix(verbs, name, ranks) for name, ranks in begun.items()]
        return None if None in prefixes else prefixes[0]


def prefix_tokens(verbs: Verbs, request: str, dst: Peers | None) -> int:
    """See `KVProcessGroup.prefix_tokens`."""
    operation, engine = f"prefix_tokens({request!r})", verbs.engine
    if threading.get_ident() in drivers:
        raise ProtocolError(f"{operation}: a callback of a future cannot wait for a grant; ask on another thread")
    if (plain := verbs.granted_plain(request, dst)) is not None:
        return plain
    known = _known(verbs, request, dst, operation)
    (first, *others) = known.get(request, ()) or (None,)  # of a request with layer groups all parts have other names
    grant_timeout = engine.options.grant_timeout
    deadline = time.monotonic() + min(grant_timeout, threading.TIMEOUT_MAX)
    with engine.lock:
        _begin(verbs, known, operation)
        while True:
            seen = engine.news
            if first is not None and not others and (plain := verbs.prefix_of(request, first)) is not None:
                return plain
            engine.catch_up()
            verbs.check_open(operation)
            begun = _owed(verbs, known, operation)
            prefixes = {name: _prefix(verbs, name, ranks) for name, ranks in begun.items()}
            name = next((name for name, prefix in prefixes.items() if prefix is None), None)
            if name is None:
                return next(prefix for prefix in prefixes.values() if prefix is not None)
            if not engine.callers.wait_change(seen, deadline - time.monotonic()):
                missing = next(rank for rank in begun[name] if engine.sender.prefix_tokens(name, rank) is None)
                raise TransferTimeout(
                    f"{operation}: {not_posted(missing, engine.sender.named(missing))} within "
                    f"{grant_timeout:g} s (Options.grant_timeout); cancel the request or wait again"
                )


def _known(verbs: Verbs, request: str, dst: Peers | None, operation: str) -> dict[str, tuple[int, ...]]:
    """By part of the request, the ranks of ``dst`` that will grant it; none if it is not known who will."""
    names, group_map = verbs.part_names(request), verbs.engine.group_map
    verbs.layout(operation)
    ranks = {name: group_map.of(name).targets(dst, operation) for name in names}
    known = {name: some for name, some in ranks.items() if some or dst is None}
    if not known:
        raise LayoutMismatch(f"{operation}: this rank holds nothing that {dst!r} holds, so no grant will come")
    return known


def _begin(verbs: Verbs, known: Mapping[str, tuple[int, ...]], operation: str) -> dict[str, Sequence[int]]:
    """Begins all parts that this rank owes anything, as far as is known. Under the engine's lock.

    Returns the ranks that each goes to, or `ANYBODY`.
    """
    engine = verbs.engine
    verbs.check_open(operation)
    engine.catch_up()
    begun = _owed(verbs, known, operation)
    for name, ranks in begun.items():
        for rank in ranks:
            engine.sender.begin(name, rank, verbs.clock())
        verbs.check_alive(ranks, operation)
    if engine.needs_driver:
        engine.wake()
    return begun


def _owed(verbs: Verbs, known: Mapping[str, tuple[int, ...]], operation: str) -> dict[str, Sequence[int]]:
    """Where each part goes of which this rank owes anything, as far as is known. Under the engine's lock."""
    sender, now = verbs.engine.sender, verbs.clock()
    ranks = {name: some or sender.receivers(name, now) for name, some in known.items()}
    owed: dict[str, Sequence[int]] = {name: some for name, some in ranks.items() if some}
    if not owed:
        raise LayoutMismatch(
            f"{operation}: this rank holds nothing that the ranks hold which have granted it; finish() completes"
        )
    return owed


def _prefix(verbs: Verbs, name: str, ranks: Sequence[int]) -> int | None:
    """The prefix that these ranks hold, in tokens; None while a grant is missing. Under the engine's lock."""
    sender = verbs.engine.sender
    known = [sender.prefix_tokens(name, rank) for rank in ranks]
    if None not in known and len(ranks) > 1:
        sender.check_prefixes(name, ranks)
    return None if None in known else known[0]
