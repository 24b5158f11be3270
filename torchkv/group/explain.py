"""`KVProcessGroup.explain`: how a peer is reached, and why not better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torchkv.cost import Choice, Costs
from torchkv.route import Counter, Route

if TYPE_CHECKING:
    from torchkv.engine import Engine
    from torchkv.progress import ProgressThread
    from torchkv.registration import Registration

__all__ = ["Explanation", "explain"]

TYPICAL_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """How this rank reaches a peer. ``str()`` is one readable line; ``as_dict()`` is for programs.

    path: what ``send_pages`` would take for all layers of 1,024 tokens in scattered pages: ``direct``, ``runs``,
    ``slices``, ``staged``, or ``none`` if nothing is owed.
    link: what carries the bytes. why: why not a better path, or empty.
    limit_gbps: measured rate of bulk bytes on this link, in 1e9 bytes/s; None if nothing is owed.
    descriptor_us, put_gbps, pack_gbps: by what the path is chosen where pages are not mapped: measured microseconds of
    each put beside its bytes, and rates of bytes put in bulk, and gathered or scattered; else None.
    notes: what else is worth knowing, such as memory taken beyond what the cache needs.
    lanes: by lane, what it has carried so far. lost: why the peer counts as lost, or empty.
    staging: bytes of staging memory: ``send`` and ``recv``, what this rank has taken to send from and for its ring,
    what is ``in use`` and ``quarantined`` of the ring, and the ``peer`` 's ring.
    """

    peer: int
    instance: str
    transport: str
    path: str
    link: str
    why: str
    limit_gbps: float | None
    descriptor_us: float | None = None
    put_gbps: float | None = None
    pack_gbps: float | None = None
    lanes: Mapping[str, Counter]
    lost: str
    dropped_frames: int
    staging: Mapping[str, int]
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        limit = "" if self.limit_gbps is None else f", limit {self.limit_gbps:.2f} GB/s"
        if self.descriptor_us is not None:
            limit += f", {self.descriptor_us:.2f} us a put"
        lanes = "; ".join(f"{lane}: {c.nbytes} B in {c.spans} spans" for lane, c in self.lanes.items()) or "unused"
        why = f" ({self.why})" if self.why else ""
        lost = f" LOST: {self.lost}" if self.lost else ""
        notes = "".join(f"; {note}" for note in self.notes)
        return f"rank {self.peer} ({self.instance}): {self.path} over {self.link}{limit}{why}; {lanes}{notes}{lost}"


def explain(
    thread: ProgressThread, engine: Engine, registration: Registration, rank: int, *, notes: Sequence[str] = ()
) -> Explanation:
    """Runs on the caller's thread; everything about routes is asked of the progress thread."""
    roster = engine.roster
    member = roster.members[rank]
    common: dict[str, Any] = {
        "peer": rank,
        "instance": member.instance,
        "transport": thread.transport.name,
        "lost": engine.lost.get(rank, ""),
        "dropped_frames": engine.dropped_frames,
        "staging": thread.call(lambda: engine.staging_use(rank)),
        "notes": tuple(notes),
    }
    if not roster.owes(rank):
        return Explanation(
            path="none", link="none", why="the two layouts share nothing", limit_gbps=None, lanes={}, **common
        )
    route = thread.call(lambda: engine.route(rank))
    lane = thread.call(lambda: route.lane)
    limit = None if common["lost"] else registration.measure(thread, route)
    forced = engine.options.forced_path
    path = route.path(forced=forced, page_for_page=roster.page_for_page(rank))
    why = "" if path == "direct" else route.no_view or f"Options.path={forced!r}"
    if path != "direct" and not common["lost"]:
        registration.calibrate(thread, route)
    if path != "direct" and forced is None:
        choice = registration.choose(engine, route, TYPICAL_TOKENS)
        why = f"{why}; {_reason(choice, path)}"
        path = choice.path
    return Explanation(
        path=path,
        link=_link(route, path, lane),
        why=why,
        limit_gbps=limit,
        lanes={lane: Counter(c.transfers, c.spans, c.nbytes) for lane, c in route.counters.items()},
        **_costs(route.costs),
        **common,
    )


def _reason(choice: Choice, puts: str) -> str:
    load = choice.load
    text = f"{TYPICAL_TOKENS} tokens as {load.descriptors} {puts} would take {1e3 * choice.put:.3g} ms"
    if choice.staged is None:
        return f"{text}, and one end has no staging memory for a page of them"
    return f"{text}, staged {1e3 * choice.staged:.3g} ms"


def _costs(costs: Costs | None) -> dict[str, Any]:
    if costs is None:
        return {}
    return {
        "descriptor_us": 1e6 * costs.descriptor,
        "put_gbps": _gbps(costs.byte),
        "pack_gbps": _gbps(costs.pack),
    }


def _gbps(byte: float) -> float:
    """byte: seconds of one. 0 is possible only where a transport's costs are given, not measured."""
    return 1e-9 / byte if byte else float("inf")


def _link(route: Route, path: str, lane: str) -> str:
    if route.channel is None:
        return "local copy"
    if path == "direct":
        view = next(view for view in route.views if view is not None)
    elif path == "staged" and route.staging_view is not None:
        view = route.staging_view
    else:
        return lane
    return "shared memory" if view.device.type == "cpu" else "peer GPU memory"
