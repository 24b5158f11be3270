"""One verdict per instance: its ranks succeed together or fail together, through their lowest rank."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from torchkv.protocol.actions import Action, Tell
from torchkv.roster import Roster
from torchkv.wire import MAX_TEXT, InstanceVerdict, Outcome, Post

__all__ = ["InstanceLeader"]


@dataclass(eq=False, slots=True)
class _Entry:
    """One rank's receive of a request."""

    post: Post | None  # None if the rank refused to post
    done_at: float | None = None  # when it reported that everything is there
    failed: tuple[str, str] | None = None  # kind and text, as it reported them
    told: bool = False  # it has its verdict


@dataclass(eq=False, slots=True)
class _Fate:
    """Why the oldest round of a request failed; ranks that post later are told at once."""

    kind: str
    text: str
    since: float


class InstanceLeader:
    """Runs on the lowest rank of an instance. The k-th receive of a request on one rank meets the k-th on the others.

    Sessions deliver each rank's messages in order, so a queue per rank is enough to tell lives apart.
    """

    def __init__(self, roster: Roster, *, grant_timeout: float) -> None:
        self._roster = roster
        self._members = roster.siblings
        self._grant_timeout = grant_timeout
        self._rounds: dict[str, dict[int, deque[_Entry]]] = {}
        self._fates: dict[str, _Fate] = {}
        self._lost: set[int] = set()
        self.actions: list[Action] = []

    def on_post(self, src: int, message: Post, now: float) -> None:
        if not self._is_member(src):
            return
        queues = self._rounds.setdefault(message.request, {rank: deque() for rank in self._members})
        queues[src].append(_Entry(message))
        self._advance(message.request, now)

    def on_outcome(self, src: int, message: Outcome, now: float) -> None:
        if not self._is_member(src):
            return
        if message.generation == 0:
            self._on_refusal(src, message, now)
            return
        queues = self._rounds.get(message.request)
        if queues is None:
            return
        entry = next((e for e in queues[src] if e.post and e.post.generation == message.generation), None)
        if entry is None:
            return
        if message.kind:
            entry.failed = (message.kind, f"rank {src} of the same instance: {message.text}")
            entry.told = True
        else:
            entry.done_at = now
        self._advance(message.request, now)

    def _on_refusal(self, src: int, message: Outcome, now: float) -> None:
        """A call that was refused on one rank is that rank's part in the round: the others fail with it."""
        queues = self._rounds.setdefault(message.request, {rank: deque() for rank in self._members})
        text = f"rank {src} of the same instance: {message.text}"
        queues[src].append(_Entry(None, failed=(message.kind, text), told=True))
        self._advance(message.request, now)

    def peer_lost(self, rank: int, now: float) -> None:
        """A lost member fails every open round, and those to come until it is found again."""
        if self._is_member(rank):
            self._lost.add(rank)
            for request in list(self._rounds):
                self._advance(request, now)

    def peer_found(self, rank: int) -> None:
        self._lost.discard(rank)

    def tick(self, now: float) -> None:
        """Fails rounds that some rank keeps waiting, and forgets failed ones that some rank never joined.

        Ranks that are done have no deadline of their own, so that nobody can fail what the others call a success.
        """
        for request, queues in list(self._rounds.items()):
            done = [queue[0].done_at for queue in queues.values() if queue and queue[0].done_at is not None]
            if request not in self._fates and done and now >= min(done) + self._grant_timeout:
                late = [rank for rank, queue in queues.items() if not queue or queue[0].done_at is None]
                text = (
                    f"request {request!r}: ranks {late} of instance {self._roster.me.instance!r} were not complete "
                    f"{self._grant_timeout:g} s (Options.grant_timeout) after the first; post it on every rank"
                )
                self._fates[request] = _Fate("TransferTimeout", text, now)
                self._advance(request, now)
        for request in [r for r, fate in self._fates.items() if now >= fate.since + self._grant_timeout]:
            self._close(request)
            self._advance(request, now)

    def _is_member(self, rank: int) -> bool:
        return rank in self._members

    def _doom_if_failed(self, request: str, heads: dict[int, _Entry], now: float) -> None:
        if request in self._fates:
            return
        failure = next((entry.failed for entry in heads.values() if entry.failed), None)
        if failure is None and self._lost:
            failure = ("PeerLost", f"rank {min(self._lost)} of instance {self._roster.me.instance!r} is lost")
        if failure is None and (problem := self._disagreement(request, heads)):
            failure = ("ProtocolError", problem)
        if failure is not None:
            self._fates[request] = _Fate(failure[0], failure[1][:MAX_TEXT], now)

    def _advance(self, request: str, now: float) -> None:
        while request in self._rounds:
            heads = {rank: queue[0] for rank, queue in self._rounds[request].items() if queue}
            self._doom_if_failed(request, heads, now)
            fate = self._fates.get(request)
            everyone = len(heads) == len(self._members)
            if fate is None and not (everyone and all(entry.done_at is not None for entry in heads.values())):
                return
            for rank, entry in heads.items():
                if not entry.told and entry.post is not None:
                    entry.told = True
                    kind, text = (fate.kind, fate.text) if fate else ("", "")
                    self.actions.append(Tell(rank, InstanceVerdict(entry.post.generation, kind, text)))
            if not everyone:
                return
            self._close(request)

    def _close(self, request: str) -> None:
        """The oldest round of ``request`` is over on every rank that took part."""
        self._fates.pop(request, None)
        queues = self._rounds.get(request)
        if queues is None:
            return
        for queue in queues.values():
            if queue:
                queue.popleft()
        if not any(queues.values()):
            del self._rounds[request]

    def _disagreement(self, request: str, heads: dict[int, _Entry]) -> str | None:
        posts = [(rank, entry.post) for rank, entry in sorted(heads.items()) if entry.post is not None]
        if not posts:
            return None
        first_rank, first = posts[0]
        for rank, post in posts[1:]:
            if post.prefix_tokens != first.prefix_tokens:
                return (
                    f"ranks {first_rank} and {rank} of instance {self._roster.me.instance!r} disagree on request "
                    f"{request!r}: prefix_tokens {first.prefix_tokens} and {post.prefix_tokens}; "
                    f"agree on one prefix before recv_pages"
                )
            slack = max(post.page_size, first.page_size)
            if abs(post.num_tokens - first.num_tokens) >= slack:
                return (
                    f"ranks {first_rank} and {rank} of instance {self._roster.me.instance!r} disagree on request "
                    f"{request!r}: pages for {first.num_tokens} and {post.num_tokens} tokens; "
                    f"post as many pages on every rank"
                )
        return None
