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

**On the resident loop.** Once all ranks have joined, and their loops serve them, a round is handed to the leader's loop
(`InstanceRounds`): parts that are complete are told to it by records, and it tells the success. As soon as anything
else is heard of the round, it is taken back. Posts may come by records, too, and overtake messages. So a record says
how many messages its rank had sent before, and waits for them; and before a message is looked at, all records that have
come are.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from torchkv.layout.group_map import GroupMap
from torchkv.protocol.actions import Action, Tell
from torchkv.protocol.flows import InstanceRounds
from torchkv.protocol.messages import MAX_TEXT, Cause, InstanceVerdict, Outcome, Post, name_hashes

__all__ = ["InstanceLeader", "Part"]


@dataclass(eq=False, slots=True)
class Part:
    """What one rank has posted: its part in a round. num_tokens: that its pages hold.

    flow: on its resident loop, if that tells the leader's when the part is complete.
    """

    generation: int
    prefix_tokens: int
    num_tokens: int
    page_size: int
    flow: int | None = None
    refused: bool = False  # its recv_pages call was refused, so that it waits for no verdict
    done_at: float | None = None  # when it reported that its part is complete
    failed: Cause | None = None  # the error that it reported
    told: bool = False  # it knows the verdict


@dataclass(eq=False, slots=True)
class _RoundFailure:
    """Why the oldest round of a request has failed, and since when. Ranks that join it later are told at once."""

    cause: Cause
    since: float


@dataclass(eq=False, slots=True)
class _Request:
    """The rounds of one request name. parts: by rank, those of the oldest round first."""

    parts: dict[int, deque[Part]]
    name: str = ""  # unknown while only loops have told of it
    failure: _RoundFailure | None = None  # of the oldest round
    index: int | None = None  # of the oldest round on the resident loop, if it is there

    def heads(self) -> dict[int, Part]:
        """The parts of the oldest round, by rank."""
        return {rank: parts[0] for rank, parts in self.parts.items() if parts}

    def __str__(self) -> str:
        return repr(self.name) if self.name else "(its name has not been told)"


Key = tuple[int, int]  # `name_hashes` of a request's name


@dataclass(eq=False, slots=True)
class _Member:
    """A rank of the instance. early: posts by records, each with the messages that must be heard before it."""

    heard: int = 0  # messages of it
    early: deque[tuple[int, Key, Part]] = field(default_factory=deque)


class InstanceLeader:
    """Decides the rounds of one instance; runs on its lowest rank. Not thread-safe: the caller holds a lock.

    Sessions deliver each rank's messages in order, so the k-th part of each rank's queue belongs to the k-th round.
    grant_timeout: of Options, in seconds.
    """

    def __init__(self, group_map: GroupMap, *, grant_timeout: float) -> None:
        self.flows: InstanceRounds | None = None  # the rounds on the resident loop; set by the engine
        self._group_map = group_map
        self._grant_timeout = grant_timeout
        self._members = {rank: _Member() for rank in group_map.siblings}
        self._requests: dict[Key, _Request] = {}
        self._parts: dict[tuple[int, int], tuple[Key, Part]] = {}  # by rank and generation
        self._on_loop: dict[int, Key] = {}  # by the loop's index
        self._lost: set[int] = set()  # ranks of the instance
        self.actions: list[Action] = []

    # ---------------------------------------------------------------- messages

    def on_post(self, src: int, message: Post, now: float) -> None:
        key = self._listen(src, message.request)
        if key is None:
            return
        part = Part(message.generation, message.prefix_tokens, message.num_tokens, message.page_size, message.flow)
        self._join(src, key, part, now, name=message.request)
        self._heard(src, now)

    def on_outcome(self, src: int, message: Outcome, now: float) -> None:
        key = self._listen(src, message.request)
        if key is None:
            return
        self._recall(key, now)
        if message.generation == 0:  # the call itself was refused, which is its rank's part in the round
            part = Part(0, 0, 0, 0, refused=True, told=True)
            part.failed = self._cause(src, message)
            self._join(src, key, part, now, name=message.request)
        elif (found := self._parts.get((src, message.generation))) is not None:
            part = found[1]
            if message.kind:
                part.failed = self._cause(src, message)
                # A rank that has reported that it is complete asks, and waits for the answer; any other has failed.
                part.told = part.done_at is None
            else:
                part.done_at = now
        self._advance(key, now)
        self._heard(src, now)

    def _listen(self, src: int, request: str) -> Key | None:
        """Before a message is looked at: what loops have told comes first. Its key; None if it is no member's."""
        if src not in self._members:
            return None
        if self.flows is not None and src != self._group_map.rank:
            self.flows.settle()
        return name_hashes(request)

    def _heard(self, src: int, now: float) -> None:
        """A message of ``src`` has been looked at: what it had posted by records after that may be looked at, too."""
        member = self._members[src]
        member.heard += 1
        while member.early and member.early[0][0] <= member.heard:
            _, key, part = member.early.popleft()
            self._join(src, key, part, now)

    @staticmethod
    def _cause(src: int, message: Outcome) -> Cause:
        return message.kind, f"rank {src} of the same instance: {message.text}", message.retryable

    # ---------------------------------------------------------------- the resident loop

    def posted(self, src: int, key: Key, part: Part, *, told: int, now: float) -> None:
        """A record tells what ``src`` has posted after ``told`` messages. key: `name_hashes` of the name."""
        member = self._members.get(src)
        if member is None:
            return
        if member.early or told > member.heard:
            member.early.append((told, key, part))
        else:
            self._join(src, key, part, now)

    def done(self, src: int, generation: int, now: float) -> None:
        """A record tells that a part is complete, for which no round on the loop waits."""
        found = self._parts.get((src, generation))
        if found is None:
            return  # not posted yet, as far as is known here; the loop remembers
        key, part = found
        if part.done_at is None:
            part.done_at = now
        self._advance(key, now)

    def round_over(self, index: int, now: float) -> None:
        """The loop has told all ranks that a round has succeeded."""
        key = self._on_loop.pop(index)
        self._requests[key].index = None
        self._close(key)
        self._advance(key, now)

    def _hand_over(self, key: Key, heads: dict[int, Part]) -> bool:
        """Hands the oldest round to the loop, on which all of its ranks are. False if that cannot be."""
        if self.flows is None or any(part.flow is None for part in heads.values()):
            return False
        members = [
            (rank, part.flow or 0, part.generation, part.done_at is not None) for rank, part in sorted(heads.items())
        ]
        index = self.flows.open_round(members)
        if index is None:
            return False
        self._requests[key].index = index
        self._on_loop[index] = key
        return True

    def _recall(self, key: Key, now: float) -> None:
        """Takes the oldest round back from the loop, if it is there. It may be over then."""
        request = self._requests.get(key)
        if request is None or request.index is None or self.flows is None:
            return
        decided = self.flows.take_back_round(request.index)
        if decided is None:
            return
        del self._on_loop[request.index]
        request.index = None
        self._note_done(request.heads(), now)
        if decided:
            self._tell(request.heads(), None)
            self._close(key)

    def _note_done(self, parts: dict[int, Part], now: float) -> None:
        """Notes which of these parts, by rank, the loop knows to be complete."""
        if self.flows is None:
            return
        for rank, part in parts.items():
            if part.done_at is None and part.flow is not None and self.flows.is_done(rank, part.flow, part.generation):
                part.done_at = now

    # ---------------------------------------------------------------- peers and time

    def peer_lost(self, rank: int, now: float) -> None:
        """``rank`` does not answer: if it is of this instance, every round fails until it answers again."""
        if rank in self._members:
            self._lost.add(rank)
            for key in list(self._requests):
                self._recall(key, now)
                self._advance(key, now)

    def peer_found(self, rank: int) -> None:
        """``rank`` answers again."""
        self._lost.discard(rank)

    def tick(self, now: float) -> None:
        """Fails rounds whose complete ranks have waited too long, and ends failed ones that some rank never joined."""
        for key, request in list(self._requests.items()):
            if request.failure is None and (late := self._late(request, now)):
                self._recall(key, now)
                if self._requests.get(key) is not request or not (late := self._late(request, now)):
                    continue
                text = (
                    f"request {request}: ranks {late} of instance {self._group_map.me.instance!r} were not complete "
                    f"{self._grant_timeout:g} s (Options.grant_timeout) after the first; post it on every rank"
                )
                self._fail(request, ("TransferTimeout", text, None), now)
                self._advance(key, now)
            if request.failure is not None and now >= request.failure.since + self._grant_timeout:
                self._close(key)
                self._advance(key, now)

    def _late(self, request: _Request, now: float) -> list[int]:
        """The ranks that are not complete although another one has been so for too long."""
        self._note_done(request.heads(), now)
        done = {rank: part.done_at for rank, part in request.heads().items() if part.done_at is not None}
        if not done or now < min(done.values()) + self._grant_timeout:
            return []
        return [rank for rank in request.parts if rank not in done]

    # ---------------------------------------------------------------- rounds

    def _join(self, src: int, key: Key, part: Part, now: float, *, name: str = "") -> None:
        """Adds a rank's part to the round that it belongs to."""
        request = self._requests.get(key)
        if request is None:
            request = self._requests[key] = _Request({rank: deque() for rank in self._members})
        request.name = request.name or name
        request.parts[src].append(part)
        if not part.refused:
            self._parts[src, part.generation] = key, part
        self._note_done({src: part}, now)
        self._advance(key, now)

    def _note_failure(self, request: _Request, heads: dict[int, Part], now: float) -> None:
        """Fails the oldest round of ``request`` if there is a reason. heads: the oldest part of each rank."""
        if request.failure is not None:
            return
        cause = next((part.failed for part in heads.values() if part.failed), None)
        if cause is None and self._lost:
            cause = "PeerLost", f"rank {min(self._lost)} of instance {self._group_map.me.instance!r} is lost", None
        if cause is None and (problem := self._disagreement(request, heads)):
            cause = "ProtocolError", problem, None
        if cause is not None:
            self._fail(request, cause, now)

    @staticmethod
    def _fail(request: _Request, cause: Cause, now: float) -> None:
        """Fails the oldest round. cause: its text may be longer than messages can tell."""
        kind, text, retryable = cause
        request.failure = _RoundFailure((kind, text[:MAX_TEXT], retryable), now)

    def _advance(self, key: Key, now: float) -> None:
        """Decides rounds as far as they can be decided, and tells the ranks."""
        while (request := self._requests.get(key)) is not None and request.index is None:
            heads = request.heads()
            self._note_failure(request, heads, now)
            all_joined = len(heads) == len(self._members)
            if request.failure is None:
                if not all_joined or self._hand_over(key, heads):
                    return
                if any(part.done_at is None for part in heads.values()):
                    return
            self._tell(heads, request.failure)
            if not all_joined:
                return
            self._close(key)

    def _tell(self, heads: dict[int, Part], failure: _RoundFailure | None) -> None:
        """Tells the ranks that have joined a round its verdict, unless they know it."""
        cause = failure.cause if failure else ("", "", None)
        for rank, part in heads.items():
            if not part.told:
                part.told = True
                self.actions.append(Tell(rank, InstanceVerdict(part.generation, *cause)))

    def _close(self, key: Key) -> None:
        """Ends the oldest round of a request: removes the parts of all ranks that have joined it."""
        request = self._requests.get(key)
        if request is None:
            return
        request.failure = None
        for rank, parts in request.parts.items():
            if parts:
                self._parts.pop((rank, parts.popleft().generation), None)
        if not any(request.parts.values()):
            del self._requests[key]

    def _disagreement(self, request: _Request, heads: dict[int, Part]) -> str | None:
        """Why the posts of a round do not belong together, or None. heads: the oldest part of each rank."""
        posts = [(rank, part) for rank, part in sorted(heads.items()) if not part.refused]
        if not posts:
            return None
        first_rank, first = posts[0]
        for rank, post in posts[1:]:
            who = f"ranks {first_rank} and {rank} of instance {self._group_map.me.instance!r} disagree on request"
            if post.prefix_tokens != first.prefix_tokens:
                return (
                    f"{who} {request}: prefix_tokens {first.prefix_tokens} and {post.prefix_tokens}; "
                    f"agree on one prefix before recv_pages"
                )
            if abs(post.num_tokens - first.num_tokens) >= max(post.page_size, first.page_size):
                return (
                    f"{who} {request}: pages for {first.num_tokens} and {post.num_tokens} tokens; "
                    f"post as many pages on every rank"
                )
        return None
