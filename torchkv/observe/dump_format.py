"""What a dump of the flight recorder holds: JSON, one file for one rank. Entries are named as those of PyTorch's own
flight recorder where they mean the same. Pure.
"""

from __future__ import annotations

import msgspec

from torchkv.errors import ProtocolError

__all__ = ["VERSION", "Dump", "Entry", "Member", "Receive", "Send", "WriterOf", "read_dump"]

VERSION = "torchkv-1"


class Entry(msgspec.Struct, kw_only=True):
    """One operation: a call of a verb, or of one that the resident loop serves, what it does towards one receiver.

    Times in nanoseconds since 1970. record_id: grows; even for operations that the loop has recorded, odd for Python's;
    -1 for one that the loop has not begun. state: ``scheduled`` (not ended, as far as Python or the loop has seen),
    ``completed`` or ``failed``. retired: whether it has ended. nbytes, path: that its work has moved. peers, layers: as
    the caller named them, or ranks and global layers; no layers: all.
    """

    record_id: int
    profiling_name: str
    request: str
    peers: str
    layers: str
    num_pages: int
    time_created_ns: int
    time_discovered_completed_ns: int | None
    duration_ms: float | None
    state: str
    retired: bool
    nbytes: int
    path: str
    error: str

    @property
    def verb(self) -> str:
        return self.profiling_name.removeprefix("torchkv:")


class Member(msgspec.Struct, kw_only=True):
    """A rank that the dumping one knows. rank: its number there. number: its own. lost: why it does not answer."""

    rank: int
    number: int
    instance: str
    incarnation: int
    lost: str = ""


class Send(msgspec.Struct, kw_only=True):
    """A sender request that has not ended. to: a rank, or -1 while nobody has granted a request to anybody.

    state: ``waiting`` for its grant, ``bound``, ``sealed`` or ``failed``. finished: whether ``finish`` was called.
    queued, running: ops that wait for the grant, and that have begun and not ended. generation: 0 without a grant.
    """

    request: str
    layer_group: str
    to: int
    state: str
    age_s: float
    finished: bool
    queued: int
    running: int
    num_pages: int
    generation: int
    on_loop: bool
    error: str


class WriterOf(msgspec.Struct, kw_only=True):
    """A writer of a receive. missing: the first thing that it owes and that has not arrived; empty if nothing is."""

    rank: int
    sealed: bool
    quiescent: bool
    missing: str


class Receive(msgspec.Struct, kw_only=True):
    """A `recv_pages` call that has not ended. state: ``live``, ``complete`` (it waits for its instance's verdict) or
    ``revoking`` (it has failed, and its writers have not said that they write no more).

    idle_s: since a writer last showed progress, as far as Python has seen; None: it has seen none.
    """

    request: str
    layer_group: str
    generation: int
    state: str
    age_s: float
    idle_s: float | None
    num_pages: int
    on_loop: bool
    error: str
    writers: list[WriterOf]


class Dump(msgspec.Struct, kw_only=True):
    """One rank at one moment. sends, receives: None if the engine's lock could not be had.

    loop: whether the rank's resident loop ``runs``, or ``hangs`` (then nothing is told of what only it knows); ``none``
    where there is none; empty if the lock could not be had.
    """

    version: str
    reason: str
    time_ns: int
    host: str
    pid: int
    rank: int
    instance: str
    incarnation: int
    members: list[Member]
    sends: list[Send] | None
    receives: list[Receive] | None
    entries: list[Entry]
    stats: dict[str, object]
    loop: str = ""


def read_dump(data: bytes, name: str) -> Dump:
    """A dump from its file's bytes. name: of the file. Raises ``ProtocolError``."""
    try:
        dump = msgspec.json.decode(data, type=Dump)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"{name} is no dump of a torchkv flight recorder: {error}") from error
    if dump.version != VERSION:
        raise ProtocolError(f"{name} is a dump of version {dump.version:.20}; this torchkv reads {VERSION}")
    return dump
