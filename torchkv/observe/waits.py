"""Who waits for whom, in sentences, from the dumps of several ranks. Pure.

Ranks are told apart by their incarnations, because numbers differ from rank to rank where instances come and go.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchkv.observe.dump_format import Dump, Entry, Member, Receive, Send, WriterOf

__all__ = ["latest", "rank_name", "sentences", "timeline"]

ANYBODY = -1  # as in `torchkv.protocol.sending.unmet`


def latest(dumps: Sequence[Dump]) -> list[Dump]:
    """The newest dump of each rank, by instance and number."""
    newest: dict[int, Dump] = {}
    for dump in sorted(dumps, key=lambda each: each.time_ns):
        newest[dump.incarnation] = dump
    return sorted(newest.values(), key=lambda each: (each.instance, each.rank))


def rank_name(instance: str, number: int) -> str:
    """``decode rank 1``; without the instance if that is this rank alone, under the name that it gets by default."""
    return f"rank {number}" if instance == f"rank{number}" else f"{instance} rank {number}"


def sentences(dumps: Sequence[Dump], *, request: str | None = None) -> list[str]:
    """One sentence for each wait that the dumps show, at most one dump a rank. request: of this request only."""
    found: dict[str, None] = {}
    ranks = _Ranks(dumps)
    for dump in dumps:
        for sentence in (*_of_receives(ranks, dump, request), *_of_sends(ranks, dump, request)):
            found[sentence] = None
    return list(found)


def timeline(dumps: Sequence[Dump]) -> Iterator[tuple[int, str, Entry]]:
    """All operations by the time at which they began, each with its rank's name. Clocks of hosts may differ."""
    merged = [
        (each.time_created_ns, rank_name(dump.instance, dump.rank), each) for dump in dumps for each in dump.entries
    ]
    yield from sorted(merged, key=lambda each: each[0])


class _Ranks:
    """The dumps, by incarnation."""

    def __init__(self, dumps: Sequence[Dump]) -> None:
        self._dumps = {dump.incarnation: dump for dump in dumps}

    def member(self, dump: Dump, rank: int) -> Member | None:
        """What ``dump`` knows of a rank, by the number that it has there."""
        return next((member for member in dump.members if member.rank == rank), None)

    def dump(self, member: Member | None) -> Dump | None:
        return None if member is None else self._dumps.get(member.incarnation)

    def number_at(self, dump: Dump, incarnation: int) -> int | None:
        """The number of a rank in ``dump``."""
        return next((member.rank for member in dump.members if member.incarnation == incarnation), None)


def _of_receives(ranks: _Ranks, dump: Dump, only: str | None) -> Iterator[str]:
    me = rank_name(dump.instance, dump.rank)
    for receive in dump.receives or ():
        if only not in (None, receive.request):
            continue
        what = f"{me} waits for {_named(receive.request, receive.layer_group)}, {_ago(receive.age_s)} old"
        if receive.state == "complete":
            yield f"{what}: all of it is here, but its instance has not decided"
        elif receive.state == "revoking":
            writers = [_name(ranks.member(dump, w.rank), w.rank) for w in receive.writers if not w.quiescent]
            hold = f"{_and(writers)} may still write to its pages" if writers else "a stage is still being unpacked"
            yield f"{me} has failed {_named(receive.request, receive.layer_group)} ({receive.error}), but {hold}"
        else:
            for writer in receive.writers:
                if not writer.sealed or writer.missing:
                    yield f"{what}: {_why_not_sealed(ranks, dump, receive, writer)}"


def _why_not_sealed(ranks: _Ranks, dump: Dump, receive: Receive, writer: WriterOf) -> str:
    member = ranks.member(dump, writer.rank)
    name = _name(member, writer.rank)
    if member is not None and member.lost:
        return f"{name} does not answer ({member.lost})"
    theirs = ranks.dump(member)
    if writer.sealed:
        return f"{name} has sealed it, but {writer.missing} has not been unpacked or has not arrived"
    if theirs is None:
        return f"{name} has not sealed it ({writer.missing or 'nothing'} is missing), and there is no dump of that rank"
    if theirs.sends is None:
        return f"{name} has not sealed it, and its dump does not tell its requests: its lock was held"
    here = ranks.number_at(theirs, dump.incarnation)
    for send in theirs.sends:
        if send.request != receive.request or send.layer_group != receive.layer_group or send.to not in (here, ANYBODY):
            continue
        return f"{name} {_progress(send)}{_last_verb(theirs, receive.request)}"
    last = _last_verb(theirs, receive.request)
    return f"{name} has no such request open{last or ', and called no verb for it that its dump still has'}"


def _progress(send: Send) -> str:
    """What a writer has not done yet of a request that its receiver has granted."""
    if send.state == "failed":
        return f"has failed it ({send.error}), and has not been cancelled there"
    if send.state == "waiting":
        return "has not seen its grant"
    if send.state == "sealed":
        return "has sealed it, but the seal has not arrived"
    if send.finished:
        return f"has called finish, but {send.running} of its transfers have not ended"
    if send.running:
        return f"has not called finish, and {send.running} of its transfers have not ended"
    return "has not called finish"


def _of_sends(ranks: _Ranks, dump: Dump, only: str | None) -> Iterator[str]:
    me = rank_name(dump.instance, dump.rank)
    for send in dump.sends or ():
        if only not in (None, send.request):
            continue
        what = f"{me} waits with {_named(send.request, send.layer_group)}, {_ago(send.age_s)} old"
        member = ranks.member(dump, send.to)
        name = _name(member, send.to)
        theirs = ranks.dump(member)
        if member is not None and member.lost and send.state != "failed":
            yield f"{what}: {name} does not answer ({member.lost})"
        elif send.state == "waiting" and send.to == ANYBODY:
            yield f"{what}: no rank has granted it"
        elif send.state == "waiting":
            granted = theirs is not None and any(
                each.request == send.request and each.layer_group == send.layer_group and each.state != "revoking"
                for each in theirs.receives or ()
            )
            why = "has called recv_pages, but the grant has not arrived" if granted else "has not called recv_pages"
            last = "" if theirs is None or granted else _last_verb(theirs, send.request)
            yield f"{what}: {name} {why}{last}"
        elif send.state == "sealed" and theirs is None:
            yield f"{what}: {name} has not reported its verdict, and there is no dump of that rank"
        elif send.state == "failed":
            yield f"{me} has failed {_named(send.request, send.layer_group)} to {name} ({send.error}): cancel it"
        # What else a sender waits for is its receiver's wait, too, and is told there.


def _last_verb(dump: Dump, request: str) -> str:
    """``; last verb send_layer 17, 3.2 s ago``: the last one for ``request`` that the dump has, or nothing."""
    for entry in reversed(dump.entries):
        if entry.request == request:
            layers = f" {entry.layers}" if entry.layers else ""
            ago = _ago((dump.time_ns - entry.time_created_ns) / 1e9)
            failed = f", which raised {entry.error}" if entry.state == "failed" else ""
            return f"; last verb {entry.verb}{layers}, {ago} ago{failed}"
    return ""


def _name(member: Member | None, rank: int) -> str:
    return f"rank {rank}" if member is None else rank_name(member.instance, member.number)


def _named(request: str, layer_group: str) -> str:
    return f"request {request!r}" + (f" (layer group {layer_group!r})" if layer_group else "")


def _ago(seconds: float) -> str:
    return f"{max(seconds, 0.0):.1f} s"


def _and(names: Sequence[str]) -> str:
    return " and ".join(names)
