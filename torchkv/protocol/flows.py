"""What the state machines ask of the resident loop. `torchkv.engine.resident.flows` answers.

A request that the loop can serve is *handed over* with its first verb (sender) or when it is posted (receiver): from
then on the loop grants or waits for the grant, copies, announces, seals, and decides about success, and only tells the
state machine. Whatever else happens to the request, a failure, a cancel, an op that the loop cannot do, a message that
Python must judge: first the request is *taken back*. Then nothing of it is under way on the loop, and the state machine
knows all that the loop knew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torchkv.layout.pair_plan import PairPlan
    from torchkv.protocol.actions import SendOp
    from torchkv.protocol.receiving.request import ReceiverRequest
    from torchkv.protocol.sending.request import SenderRequest

__all__ = ["InstanceRounds", "RequestFlows"]


class RequestFlows(Protocol):
    """The requests of one rank that the resident loop serves. ``flow`` of a request is not None while it does."""

    def serves(self, op: SendOp) -> bool:
        """Whether the loop can do ops of this kind. A request that begins with another one is not handed over."""

    def await_grant(self, req: SenderRequest, plan: PairPlan, writers: tuple[int, ...]) -> None:
        """Hands over a request that has just begun, if the loop can serve it under a grant to these writers."""

    def open_send(self, req: SenderRequest) -> None:
        """Hands over a request that is bound, and of which no op has begun, if the loop can serve it."""

    def heed_grants(self, heeds: bool) -> None:
        """Whether requests wait for grants in Python, so that it has to be told of each grant at once."""

    def takes_grant(self, rank: int, flow: int, generation: int) -> bool:
        """Whether a grant of ``rank`` that has come in a message is new: the loop may have been told of it, too.

        flow: under which the loop of ``rank`` has told of it.
        """

    def settle(self) -> None:
        """Learns all that the loop has been told by now. A message that came later, by another way, waits for that."""

    def peer_dead(self, rank: int) -> None:
        """As `settle`. The process of ``rank`` has ended, or it has left: what comes of it later grants nothing."""

    def start(self, req: SenderRequest, op: SendOp) -> bool:
        """Gives the loop an op, also of a request that waits for its grant; False if it cannot do that."""

    def may_finish(self, aux: bytes) -> bool:
        """Whether `finish` can seal a request with these bytes."""

    def finish(self, req: SenderRequest) -> bool:
        """Tells the loop that the request is finished; False if that cannot seal it."""

    def moved(self, req: SenderRequest) -> int:
        """Bytes that the loop has copied for a request."""

    def gated(self, req: SenderRequest) -> int:
        """Grows while an op of a request waits for its event."""

    def take_back_send(self, req: SenderRequest) -> bool | None:
        """Takes a request back. Whether the loop had sealed it; None if it has left the loop meanwhile.

        Ops that the loop has not ended are still ``running``, and nobody works on them; what the loop had under way for
        one may still land, as the op's ``landed`` says. What the loop tells first may
        end the request, or lead to its being taken back already: then Python may work on them.
        """

    def sole_writer(self, rank: int, plan: PairPlan, num_pages: int, name: bytes) -> Any:
        """Whether a request of this name for so many pages of one writer may be posted by `post`: then what that needs.

        Else None. name: in UTF-8.
        """

    def post(self, req: ReceiverRequest, sole: Any, name: bytes, told: int) -> bool:
        """`reserve`, `open_receive` and `grant` in one, then `posts`. sole: what `sole_writer` has just returned."""

    def reserve(self, num_pages: int, plans: Mapping[int, PairPlan]) -> int | None:
        """A flow for a receive, or None if the loop cannot serve it. plans: by writer."""

    def open_receive(self, req: ReceiverRequest, told: int) -> None:
        """Hands over a request that has reserved a flow, before its grant is sent.

        told: messages that have been sent to the instance's leader before.
        """

    def grant(self, req: ReceiverRequest) -> bool:
        """Has the loop tell the writers of the grant; False if it cannot do that. See also `posts`.

        A request that is taken back before all of them have been told is told of the others.
        """

    @property
    def posts(self) -> bool:
        """Whether `grant` has the loop tell the instance's leader, too, what this rank has posted."""

    def stop_unpacking(self, req: ReceiverRequest) -> bool:
        """A request that had reserved a flow has failed: what its writers stage is unpacked no more.

        Whether something still is, until `Receiver.landed` is told.
        """

    def free_receive(self, flow: int) -> None:
        """Frees a flow that a request had reserved. Nothing that was sent under it can arrive any more."""

    def arrived(self, req: ReceiverRequest) -> int:
        """Bytes that have arrived for a request."""

    def look(self, req: ReceiverRequest) -> None:
        """Adds to a request's coverage what has arrived. It stays on the loop."""

    def take_back_receive(self, req: ReceiverRequest) -> None:
        """Takes a request back, with all that has arrived, unless it ends meanwhile."""


class InstanceRounds(Protocol):
    """The rounds of the instance that this rank leads, as far as the resident loop decides them: see `instance`.

    What the loop hears of them, and does not expect, it tells the leader: `posted`, `done`, `round_over`.
    """

    def settle(self) -> None:
        """Learns all that the loop has been told by now."""

    def open_round(self, members: list[tuple[int, int, int, bool]]) -> int | None:
        """Hands a round over. Its index on the loop, or None if the loop cannot serve it.

        members: rank, flow and generation of every part, and whether it is known to be complete.
        """

    def take_back_round(self, index: int) -> bool | None:
        """Takes a round back. Whether it has succeeded, so that ranks may know; None if it is over meanwhile."""

    def is_done(self, rank: int, flow: int, generation: int) -> bool:
        """Whether the loop has heard that this part is complete."""
