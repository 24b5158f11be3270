"""How a rank stands: `stats` for metrics, `dump` for its flight record. On any thread; requests pay nothing for it."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchkv.layout.layer_groups import SEPARATOR, group_of
from torchkv.observe.dump_format import VERSION, Dump, Member, Receive, Send, WriterOf
from torchkv.observe.stats import Stats
from torchkv.protocol.counts import SEVERAL
from torchkv.protocol.receiving.request import ReceiverRequest
from torchkv.protocol.sending.request import SenderRequest

if TYPE_CHECKING:
    from torchkv.engine.engine import Engine
    from torchkv.group.verbs import Verbs
    from torchkv.layout.group_map import GroupMap
    from torchkv.observe.recorder import FlightRecorder

__all__ = ["dump", "stats"]

LOCK_PATIENCE = 2.0  # seconds: a dump is of use, too, without what the lock guards


def stats(verbs: Verbs, *, recorder: FlightRecorder | None) -> Stats:
    """See `Stats`."""
    engine = verbs.engine
    if not engine.closed:
        engine.poll()
    pages, slots = len(verbs.quarantined()), len(verbs.quarantined(slots=True))
    sender, receiver, ring = engine.sender, engine.receiver, engine.credits.ring
    with engine.lock:
        names = _names(engine.group_map)
        return Stats(
            instance=engine.group_map.me.instance,
            rank=engine.group_map.me.own_number,
            sends=dict(sender.counts.outcomes),
            receives=dict(receiver.counts.outcomes),
            sent=_by_peer(sender.counts.bytes, names),
            received=_by_peer(receiver.counts.bytes, names),
            lanes={
                names.get(rank, "gone"): {lane: each.nbytes for lane, each in list(connection.counters.items())}
                for rank, connection in list(engine.connections.items())
            },
            phases={
                "grant": sender.counts.grants.copy(),
                **({} if recorder is None else {phase: each.copy() for phase, each in recorder.phases.items()}),
            },
            open_sends=Counter(_send_state(req) for req in sender.requests),
            open_receives=Counter(_receive_state(req) for req in receiver.requests),
            queues=_queues(engine),
            ring={
                "capacity": ring.capacity,
                "in use": ring.in_use,
                "quarantined": ring.quarantined,
                "send": 0 if engine.staging is None else engine.staging.sending.taken,
            },
            quarantined_pages=pages,
            quarantined_slots=slots,
            retries=_retries(engine),
            dropped_frames=engine.messenger.dropped,
            lost={names.get(rank, "gone"): why for rank, why in engine.lost.items()},
        )


def dump(verbs: Verbs, reason: str, *, recorder: FlightRecorder) -> Dump:
    """The flight record of this rank, with the requests that have not ended."""
    engine, now = verbs.engine, verbs.clock()
    me = engine.group_map.me
    sends: list[Send] | None = None
    receives: list[Receive] | None = None
    counted: dict[str, Any] = {}
    if engine.lock.acquire(timeout=LOCK_PATIENCE):
        try:
            if not engine.closed:
                engine.catch_up()
            sends = [_send(req, now) for req in engine.sender.requests]
            receives = [_receive(engine, req, now) for req in engine.receiver.requests]
        finally:
            engine.lock.release()
        if not engine.closed:
            engine.wake()  # `catch_up` may have left something to do
        counted = stats(verbs, recorder=recorder).as_dict()
    return Dump(
        version=VERSION,
        reason=reason,
        time_ns=time.time_ns(),
        host=socket.gethostname(),
        pid=os.getpid(),
        rank=me.own_number,
        instance=me.instance,
        incarnation=me.incarnation,
        members=[
            Member(
                rank=info.rank,
                number=info.own_number,
                instance=info.instance,
                incarnation=info.incarnation,
                lost=engine.lost.get(info.rank, ""),
            )
            for info in list(engine.group_map.info.values())
        ],
        sends=sends,
        receives=receives,
        entries=recorder.entries(),
        stats=counted,
    )


def _queues(engine: Engine) -> dict[str, int]:
    """What waits or is under way; see `Stats`. Under the lock."""
    sends, receives = engine.sender.requests, engine.receiver.requests
    return {
        "ops awaiting grants": sum(len(req.queue) for req in sends),
        "pages awaiting grants": sends.queued_pages,
        "transfers": engine.scheduler.pending,
        "loop flows": sum(req.flow is not None for req in sends) + sum(req.flow is not None for req in receives),
        "scatters": sum(len(req.scattering) for req in receives),
    }


def _retries(engine: Engine) -> dict[str, int]:
    """What was done again; see `Stats`. Under the lock."""
    taken_back = engine.sender.counts.taken_back + engine.receiver.counts.taken_back
    return {"frames": engine.messenger.repeats, "transfers": engine.scheduler.restarts, "from loop": taken_back}


def _names(group_map: GroupMap) -> dict[int, str]:
    """Rank here -> how reports name it."""
    return {info.rank: f"{info.instance}:{info.own_number}" for info in group_map.info.values()} | {SEVERAL: "several"}


def _by_peer(counted: Mapping[tuple[int, str], int], names: Mapping[int, str]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for (rank, path), nbytes in counted.items():
        paths = found.setdefault(names.get(rank, "gone"), {})
        paths[path] = paths.get(path, 0) + nbytes
    return found


def _send_state(req: SenderRequest) -> str:
    if req.error is not None:
        return "failed"
    if req.grant is None:
        return "waiting"
    return "bound" if req.sealed_at is None else "sealed"


def _receive_state(req: ReceiverRequest) -> str:
    if req.error is not None:
        return "revoking"
    return "live" if req.complete_at is None else "complete"


def _send(req: SenderRequest, now: float) -> Send:
    group = group_of(req.request)
    return Send(
        request=_base(req.request, group),
        layer_group=group,
        to=req.dst,
        state=_send_state(req),
        age_s=now - req.begun_at,
        finished=req.finish is not None,
        queued=len(req.queue),
        running=len(req.running),
        num_pages=req.num_pages,
        generation=0 if req.grant is None else req.grant.generation,
        on_loop=req.flow is not None,
        error="" if req.error is None else f"{type(req.error).__name__}: {req.error}",
    )


def _receive(engine: Engine, req: ReceiverRequest, now: float) -> Receive:
    if req.flow is not None and engine.flows is not None and not engine.closed:
        engine.flows.look(req)
    group = req.group or ""
    return Receive(
        request=_base(req.request, group),
        layer_group=group,
        generation=req.generation,
        state=_receive_state(req),
        age_s=now - req.begun_at,
        idle_s=None if req.progress_at is None else now - req.progress_at,
        num_pages=len(req.pages),
        on_loop=req.flow is not None,
        error="" if req.error is None else f"{type(req.error).__name__}: {req.error}",
        writers=[
            WriterOf(
                rank=rank,
                sealed=writer.sealed is not None,
                quiescent=writer.quiescent,
                missing=writer.missing(None, req.num_tokens) or "",
            )
            for rank, writer in req.writers.items()
        ],
    )


def _base(name: str, group: str) -> str:
    """The caller's name of the request whose part is called so."""
    return name.removesuffix(f"{SEPARATOR}{group}") if group else name
