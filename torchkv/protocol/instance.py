"""One verdict per instance: a request succeeds on all ranks of the receiving instance, or fails on all of them.

The lowest rank of an instance is its leader. Every rank tells the leader when it posts `recv_pages` (`Post`), and when
its part is complete or has failed (`Outcome`); the leader answers each with an `InstanceVerdict`. Writes may start
before that, success may not.

The k-th `recv_pages` of a request name on one rank belongs to the k-th on every other rank: together they are a
*round*. Generations cannot tell that, because each rank counts its own. The leader decides the oldest round of each
name:

    OPEN --every rank: complete--------------------------------------> SUCCEEDED: all ranks told
      |
      +--one rank failed, refused its call or is lost; posts that
         disagree; a rank not complete grant_timeout after another---> FAILED: ranks told as they join
                                                                          |
                                           all have joined, or grant_timeout has passed: next round

Invariant: all ranks of a round that are told a verdict are told the same one. So a rank that is complete has no
deadline of its own, and if its request is cancelled it asks the leader: it must not fail by itself what the leader
calls a success.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from torchkv.layout.group_map import GroupMap
from torchkv.protocol.actions import Action, Tell
from torchkv.protocol.messages import MAX_TEXT, InstanceVerdict, Outcome, Post

__all__ = ["InstanceLeader"]


@dataclass(eq=False, slots=True)
class _Entry:
    """One rank's part in a round."""

    post: Post | None  # None: the rank refused its recv_pages call
    done_at: float | None = None  # when it reported that its part is complete
    failed: tuple[str, str] | None = None  # kind and text of the error that it reported
    told: bool = False  # it knows the verdict


@dataclass(eq=False, slots=True)
class _RoundFailure:
    """Why the oldest round of a request has failed, and since when. Ranks that join it later are told at once."""

    kind: str
    text: str
    since: float


class InstanceLeader:
    """Decides the rounds of one instance; runs on its lowest rank. Not thread-safe: the caller holds a lock.

    Sessions deliver each rank's messages in order, so the k-th entry of each rank's queue belongs to the k-th round.
    grant_timeout: of Options, in seconds.
    """

    def __init__(self, group_map: GroupMap, *, grant_timeout: float) -> None:
        self._group_map = group_map
        self._members = group_map.siblings
        self._grant_timeout = grant_timeout
        self._rounds: dict[str, dict[int, deque[_Entry]]] = {}  # by request, then by rank: the oldest round first
        self._failures: dict[str, _RoundFailure] = {}  # by request: of its oldest round
        self._lost: set[int] = set()  # ranks of the instance
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
            # A rank that has reported that it is complete asks, and waits for the answer; any other has failed already.
            entry.told = entry.done_at is None
        else:
            entry.done_at = now
        self._advance(message.request, now)

    def _on_refusal(self, src: int, message: Outcome, now: float) -> None:
        """A `recv_pages` call that was refused on one rank is its part in the round, which fails on the others."""
        queues = self._rounds.setdefault(message.request, {rank: deque() for rank in self._members})
        text = f"rank {src} of the same instance: {message.text}"
        queues[src].append(_Entry(None, failed=(message.kind, text), told=True))
        self._advance(message.request, now)

    def peer_lost(self, rank: int, now: float) -> None:
        """``rank`` does not answer: if it is of this instance, every round fails until it answers again."""
        if self._is_member(rank):
            self._lost.add(rank)
            for request in list(self._rounds):
                self._advance(request, now)

    def peer_found(self, rank: int) -> None:
        """``rank`` answers again."""
        self._lost.discard(rank)

    def tick(self, now: float) -> None:
        """Fails rounds whose complete ranks have waited too long, and ends failed ones that some rank never joined."""
        for request, queues in list(self._rounds.items()):
            done = [queue[0].done_at for queue in queues.values() if queue and queue[0].done_at is not None]
            if request not in self._failures and done and now >= min(done) + self._grant_timeout:
                late = [rank for rank, queue in queues.items() if not queue or queue[0].done_at is None]
                text = (
                    f"request {request!r}: ranks {late} of instance {self._group_map.me.instance!r} were not complete "
                    f"{self._grant_timeout:g} s (Options.grant_timeout) after the first; post it on every rank"
                )
                self._failures[request] = _RoundFailure("TransferTimeout", text, now)
                self._advance(request, now)
        for request in [r for r, failure in self._failures.items() if now >= failure.since + self._grant_timeout]:
            self._close(request)
            self._advance(request, now)

    def _is_member(self, rank: int) -> bool:
        return rank in self._members

    def _note_failure(self, request: str, heads: dict[int, _Entry], now: float) -> None:
        """Fails the oldest round of ``request`` if there is a reason. heads: the oldest part of each rank."""
        if request in self._failures:
            return
        cause = next((entry.failed for entry in heads.values() if entry.failed), None)
        if cause is None and self._lost:
            cause = ("PeerLost", f"rank {min(self._lost)} of instance {self._group_map.me.instance!r} is lost")
        if cause is None and (problem := self._disagreement(request, heads)):
            cause = ("ProtocolError", problem)
        if cause is not None:
            self._failures[request] = _RoundFailure(cause[0], cause[1][:MAX_TEXT], now)

    def _advance(self, request: str, now: float) -> None:
        """Decides rounds of ``request`` as far as they can be decided, and tells the ranks."""
        while request in self._rounds:
            heads = {rank: queue[0] for rank, queue in self._rounds[request].items() if queue}
            self._note_failure(request, heads, now)
            failure = self._failures.get(request)
            all_joined = len(heads) == len(self._members)
            if failure is None and not (all_joined and all(entry.done_at is not None for entry in heads.values())):
                return
            for rank, entry in heads.items():
                if not entry.told and entry.post is not None:
                    entry.told = True
                    kind, text = (failure.kind, failure.text) if failure else ("", "")
                    self.actions.append(Tell(rank, InstanceVerdict(entry.post.generation, kind, text)))
            if not all_joined:
                return
            self._close(request)

    def _close(self, request: str) -> None:
        """Ends the oldest round of ``request``: removes the parts of all ranks that have joined it."""
        self._failures.pop(request, None)
        queues = self._rounds.get(request)
        if queues is None:
            return
        for queue in queues.values():
            if queue:
                queue.popleft()
        if not any(queues.values()):
            del self._rounds[request]

    def _disagreement(self, request: str, heads: dict[int, _Entry]) -> str | None:
        """Why the posts of a round do not belong together, or None. heads: the oldest part of each rank."""
        posts = [(rank, entry.post) for rank, entry in sorted(heads.items()) if entry.post is not None]
        if not posts:
            return None
        first_rank, first = posts[0]
        for rank, post in posts[1:]:
            if post.prefix_tokens != first.prefix_tokens:
                return (
                    f"ranks {first_rank} and {rank} of instance {self._group_map.me.instance!r} disagree on request "
                    f"{request!r}: prefix_tokens {first.prefix_tokens} and {post.prefix_tokens}; "
                    f"agree on one prefix before recv_pages"
                )
            slack = max(post.page_size, first.page_size)
            if abs(post.num_tokens - first.num_tokens) >= slack:
                return (
                    f"ranks {first_rank} and {rank} of instance {self._group_map.me.instance!r} disagree on request "
                    f"{request!r}: pages for {first.num_tokens} and {post.num_tokens} tokens; "
                    f"post as many pages on every rank"
                )
        return None
