"""How a rank stands: `stats` for metrics, `dump` for its flight record. On any thread; requests pay nothing for it."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torchkv.layout.layer_groups import SEPARATOR, base_name, group_of
from torchkv.observe.dump_format import VERSION, Dump, Entry, Member, Receive, Send, WriterOf
from torchkv.observe.histogram import Histogram
from torchkv.observe.stats import Stats
from torchkv.protocol.counts import SEVERAL
from torchkv.protocol.receiving.request import ReceiverRequest
from torchkv.protocol.sending.request import SenderRequest

if TYPE_CHECKING:
    from torchkv.engine.engine import Engine
    from torchkv.group.verbs import Verbs
    from torchkv.layout.group_map import GroupMap

__all__ = ["dump", "stats"]

LOCK_PATIENCE = 2.0  # seconds: a dump is of use, too, without what the lock guards
LOOP_PATIENCE = 0.5  # seconds in which the resident loop ends its step, or hangs


def stats(verbs: Verbs) -> Stats:
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
            phases=_phases(engine),
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


def dump(verbs: Verbs, reason: str) -> Dump:
    """The flight record of this rank, with the requests that have not ended. Also if a lock or the loop hangs."""
    engine, now = verbs.engine, verbs.clock()
    me = engine.group_map.me
    sends: list[Send] | None = None
    receives: list[Receive] | None = None
    counted: dict[str, Any] = {}
    loop = ""
    if engine.lock.acquire(timeout=LOCK_PATIENCE):
        try:
            flows = None if engine.closed else engine.flows
            with nullcontext() if flows is None else flows.core.runner.standing_still_within(LOOP_PATIENCE) as still:
                loop = "none" if flows is None else "runs" if still else "hangs"
                if loop == "runs":
                    engine.catch_up()
                sends = [_send(req, now) for req in engine.sender.requests]
                receives = [_receive(engine, req, now, look=loop == "runs") for req in engine.receiver.requests]
        finally:
            engine.lock.release()
        if loop != "hangs":
            engine.wake()  # `catch_up` may have left something to do
            counted = stats(verbs).as_dict()
    return Dump(
        version=VERSION,
        reason=reason,
        time_ns=time.time_ns(),
        host=socket.gethostname(),
        pid=os.getpid(),
        rank=me.own_number,
        instance=me.instance,
        incarnation=me.incarnation,
        loop=loop,
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
        entries=_entries(engine),
        stats=counted,
    )


def _entries(engine: Engine) -> list[Entry]:
    """The last operations, of the loop and of Python, by the time at which they began."""
    found = [] if engine.recorder is None else engine.recorder.entries()
    if engine.flows is not None:
        found += engine.flows.journal.entries()
    found.sort(key=lambda entry: entry.time_created_ns)
    return found[-engine.options.recorded :]


def _phases(engine: Engine) -> dict[str, Histogram]:
    """Durations of what has succeeded, served by Python or by the loop; see `Stats`. Under the lock."""
    found = {"grant": engine.sender.counts.grants.copy()}
    if engine.recorder is not None:
        found |= {phase: each.copy() for phase, each in engine.recorder.phases.items()}
    if engine.flows is not None and engine.recorder is not None:
        for phase, each in engine.flows.core.operations.phases().items():
            found[phase].merge(each)
    return found


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
    return Send(
        request=base_name(req.request),
        layer_group=group_of(req.request),
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


def _receive(engine: Engine, req: ReceiverRequest, now: float, *, look: bool) -> Receive:
    """look: at what the loop knows."""
    if look and req.flow is not None and engine.flows is not None:
        engine.flows.look(req)
    group = req.group or ""
    return Receive(
        request=req.request.removesuffix(f"{SEPARATOR}{group}") if group else req.request,
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
