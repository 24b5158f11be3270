"""`KVProcessGroup.explain`: how this rank reaches a peer, and why not by a better path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torchkv.errors import TransportUnavailable
from torchkv.transfer.path_cost import Choice
from torchkv.transfer.peer_connection import Costs, Counter, PeerConnection

if TYPE_CHECKING:
    from torchkv.engine.engine import Engine
    from torchkv.engine.joining.registration import Registration
    from torchkv.engine.progress import ProgressThread

__all__ = ["Explanation", "explain"]

TYPICAL_TOKENS = 1024  # of the request that the reported path is chosen for


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """How this rank reaches a peer. ``str()`` is one readable line; ``as_dict()`` is for programs.

    peer, instance: the peer's group rank, and the name of its serving instance. transport: the transport's name.
    path: what ``send_pages`` would take for all layers of 1,024 tokens in scattered pages: ``direct``, ``runs``,
    ``slices``, ``staged``, or ``none`` if this rank holds nothing that the peer holds, or no path can convert it.
    link: what carries the bytes. why: why the path is no better one; may be empty.
    limit_gbps: measured rate of bulk bytes in 1e9 bytes/s; None if nothing is sent to the peer, or if it is lost.
    descriptor_us, put_gbps, pack_gbps: the costs by which the path is chosen if the peer's pages are not mapped here:
    microseconds per put besides its bytes, rate of bytes in bulk puts, rate of gathering or scattering short runs in
    1e9 bytes/s. None where they are not needed.
    lanes: lane -> what it has carried so far. lost: why the peer counts as lost, or empty.
    dropped_frames: control frames of any peer that this rank dropped because they were malformed or not allowed.
    staging: bytes of staging memory: ``send`` (allocated to send from), ``recv`` (this rank's ring), ``in use`` and
    ``quarantined`` (of this ring), ``peer`` (the peer's ring).
    notes: other facts worth knowing, such as memory taken beyond what the cache needs.
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
    thread: ProgressThread, engine: Engine, registration: Registration, rank: int, *, notes: Sequence[str]
) -> Explanation:
    """Explains ``rank``. Runs on the caller's thread, and asks the progress thread for everything that it owns.

    notes: what the group has noted so far. Raises ``TransferTimeout``, ``PeerLost`` if the rate cannot be measured.
    """
    engine.poll()  # what has ended counts
    group_map = engine.group_map
    member = group_map.info[rank]
    common: dict[str, Any] = {
        "peer": rank,
        "instance": member.instance,
        "transport": thread.transport.name,
        "lost": engine.lost.get(rank, ""),
        "dropped_frames": engine.messenger.dropped,
        "staging": thread.call(lambda: _staging_use(engine, rank)),
        "notes": tuple(notes),
    }
    if not group_map.owes(rank):
        why = group_map.refusal((rank,)) or "the two layouts share nothing"
        return Explanation(path="none", link="none", why=why, limit_gbps=None, lanes={}, **common)
    connection = thread.call(lambda: engine.connection(rank))
    lane = thread.call(lambda: connection.lane)
    limit = None if common["lost"] else registration.connector.measure(thread, connection)
    forced = engine.options.forced_path
    converts = group_map.converts(rank)
    path, why = _path(connection, forced, page_for_page=group_map.page_for_page(rank), converts=converts)
    if path != "direct" and not common["lost"]:
        registration.connector.calibrate(thread, connection)
    if path != "direct" and forced is None and not converts:
        choice = registration.choose(engine, connection, TYPICAL_TOKENS)
        why = f"{why}; {_reason(choice, path)}"
        stages = thread.call(lambda: engine.stages_on_loop(rank, registration.plan(engine, rank)))
        if stages is None:
            path = choice.path
        else:
            path = "staged" if stages else path
            why = f"{why}, by Python; the resident loop serves it"
    return Explanation(
        path=path,
        link=_link(connection, path, lane),
        why=why,
        limit_gbps=limit,
        lanes={lane: Counter(c.transfers, c.spans, c.nbytes) for lane, c in connection.counters.items()},
        **_costs(connection.costs),
        **common,
    )


def _staging_use(engine: Engine, rank: int) -> dict[str, int]:
    """Bytes of staging memory by use; see `Explanation.staging`. Progress thread only."""
    ring = engine.credits.ring
    with engine.lock:
        return {
            "send": 0 if engine.staging is None else engine.staging.sending.taken,
            "recv": ring.capacity,
            "in use": ring.in_use,
            "quarantined": ring.quarantined,
            "peer": engine.group_map.info[rank].staging,
        }


def _path(connection: PeerConnection, forced: str | None, *, page_for_page: bool, converts: bool) -> tuple[str, str]:
    """The path, before costs are compared, and why it is no better one."""
    try:
        path = connection.path(forced=forced, page_for_page=page_for_page, converts=converts)
    except TransportUnavailable as error:
        if not converts:
            raise
        return "none", str(error)
    if path == "direct":
        return path, ""
    why = connection.no_view or f"Options.path={forced!r}"
    if converts:
        why += "; pages are converted to another dtype, which puts cannot do (runs, slices)"
    return path, why


def _reason(choice: Choice, puts: str) -> str:
    """Why ``choice`` was made, in words. puts: the path to compare with, ``runs`` or ``slices``."""
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
    """byte: seconds per byte; never measured as 0, but tests set such costs."""
    return 1e-9 / byte if byte else float("inf")


def _link(connection: PeerConnection, path: str, lane: str) -> str:
    if connection.channel is None:
        return "local copy"
    if path == "direct":
        view = next(view for view in connection.views if view is not None)
    elif path == "staged" and connection.staging_view is not None:
        view = connection.staging_view
    else:
        return lane
    return "shared memory" if view.device.type == "cpu" else "peer GPU memory"
