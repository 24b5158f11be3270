"""`Stats`: what a rank has counted, in plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchkv.observe.histogram import Histogram

__all__ = ["Stats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What a rank has counted since it registered, and how things stand. ``as_dict()`` is for programs.

    Peers are named ``<instance>:<the number that the rank calls itself>``. Sizes are in bytes.

    instance, rank: of this rank. sends, receives: how requests ended here -> how many: ``success``, or the name of an
    error's class. A request of layer groups counts once for each. sent, received: peer -> path -> bytes; of a receive
    that several ranks wrote over shared memory, the peer is ``several``. lanes: peer -> lane -> bytes sent over it.
    phases: durations of what has succeeded, as histograms: ``grant`` (a sender's first verb until the grant), ``send``
    (a sender's first verb until the verdict), ``verdict`` (``finish`` until the verdict), ``receive`` (the whole
    ``recv_pages``) and ``cancel``. Without a flight recorder they are empty, but for grants that Python has bound.
    open_sends, open_receives: state -> how many requests: those of `torchkv.observe.dump_format`.
    queues: ``ops awaiting grants``, ``pages awaiting grants``, ``transfers`` (in Python: gated, queued or under way),
    ``loop flows`` (requests on the resident loop), ``scatters`` (stages that are being unpacked).
    ring: the staging memory: ``capacity``, ``in use`` and ``quarantined`` of the ring that others write to, ``send``
    allocated to send from. quarantined_pages, quarantined_slots: see ``quarantined``.
    retries: ``frames`` (control frames sent again), ``transfers`` (begun again on another path), ``from loop``
    (requests that Python has taken back from the resident loop).
    dropped_frames: control frames that were malformed or not allowed. lost: peers that do not answer -> why.
    """

    instance: str
    rank: int
    sends: Mapping[str, int]
    receives: Mapping[str, int]
    sent: Mapping[str, Mapping[str, int]]
    received: Mapping[str, Mapping[str, int]]
    lanes: Mapping[str, Mapping[str, int]]
    phases: Mapping[str, Histogram]
    open_sends: Mapping[str, int]
    open_receives: Mapping[str, int]
    queues: Mapping[str, int]
    ring: Mapping[str, int]
    quarantined_pages: int
    quarantined_slots: int
    retries: Mapping[str, int]
    dropped_frames: int
    lost: Mapping[str, str]

    def as_dict(self) -> dict[str, Any]:
        """In types that JSON knows. A histogram becomes ``count``, ``seconds`` and ``buckets``: bound -> at most so."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        plain["phases"] = {
            phase: {
                "count": sum(each.counts),
                "seconds": each.total,
                "buckets": dict(each.cumulative),
            }
            for phase, each in self.phases.items()
        }
        return plain
