"""The state machines of one rank together: which of them a message is for, and all that they ask for.

No I/O, no clock and no memory: `torchkv.engine.engine` drives them in production, `torchkv.bench.scale` on a virtual
clock.
"""

from __future__ import annotations

from torchkv.layout.group_map import GroupMap
from torchkv.layout.layer_groups import UNGROUPED, Pools
from torchkv.protocol.actions import Action, Tell
from torchkv.protocol.instance import InstanceLeader
from torchkv.protocol.messages import (
    Abort,
    Alive,
    Attest,
    Exempt,
    Grant,
    InstanceVerdict,
    Message,
    Outcome,
    Post,
    Quiesced,
    Refused,
    Revoke,
    Seal,
    StageAsk,
    Staged,
    StageDenied,
    StageGrant,
    Verdict,
    Withdraw,
    Withdrawn,
)
from torchkv.protocol.receiving.receiver import Receiver
from torchkv.protocol.receiving.staging_credits import StagingCredits
from torchkv.protocol.sending.sender import Sender
from torchkv.protocol.sending.staging_requester import StagingRequester

__all__ = ["Machines"]


class Machines:
    """See the module. Not thread-safe: the caller holds a lock.

    timeout, grant_timeout: of Options, in seconds. credits: of this rank's staging ring. pools: of its pages and slots.
    """

    def __init__(
        self,
        group_map: GroupMap,
        *,
        timeout: float,
        grant_timeout: float,
        credits: StagingCredits,
        pools: Pools = UNGROUPED,
    ) -> None:
        limits = {"timeout": timeout, "grant_timeout": grant_timeout}
        self._group_map = group_map
        self.credits = credits
        self.requester = StagingRequester()
        self.sender = Sender(group_map, **limits, requester=self.requester)
        self.receiver = Receiver(group_map, **limits, credits=credits, pools=pools)
        self.leader = InstanceLeader(group_map, grant_timeout=grant_timeout)

    def handle(self, src: int, message: Message, now: float) -> bool:
        """Takes in a message of rank ``src``, which may be this one. False if it is for none of the machines.

        Raises `KVError` for a message that breaks the protocol; then nothing has changed.
        """
        match message:
            case Grant():
                if self._is_new(src, message):
                    self.sender.on_grant(src, message, now)
            case Attest():
                self.receiver.on_attest(src, message, now)
            case Seal():
                self.receiver.on_seal(src, message, now)
            case Verdict():
                self.sender.on_verdict(src, message)
            case Revoke():
                self.sender.on_revoke(src, message, now)
            case Alive(to_writer=True):
                self.sender.on_alive(src, message, now)
            case Alive():
                self.receiver.on_alive(src, message, now)
            case Abort():
                self.receiver.on_abort(src, message)
            case Quiesced():
                self.receiver.on_quiesced(src, message, now)
            case Post():
                self.leader.on_post(src, message, now)
            case Outcome():
                self.leader.on_outcome(src, message, now)
            case InstanceVerdict():
                self.receiver.on_instance_verdict(src, message)
            case Refused():
                self.sender.grants.on_refused(src, message, now)
            case Exempt():
                self.sender.grants.on_exempt(src, message, now)
            case _:
                return self._handle_staging(src, message, now)
        return True

    def _is_new(self, src: int, grant: Grant) -> bool:
        flows = self.sender.handover.flows
        return flows is None or grant.told_as is None or flows.takes_grant(src, grant.told_as, grant.generation)

    def _handle_staging(self, src: int, message: Message, now: float) -> bool:
        match message:
            case StageAsk():
                self.receiver.stages.on_stage_ask(src, message, now)
            case Staged():
                self.receiver.stages.on_staged(src, message, now)
            case Withdraw():
                self.receiver.stages.on_withdraw(src, message)
            case StageGrant():
                self.requester.on_grant(src, message, self._group_map.info[src].staging)
            case StageDenied():
                self.requester.on_denied(src, message, self._group_map.info[src].staging)
            case Withdrawn():
                self.requester.on_withdrawn(src, message.generation)
            case _:
                return False
        return True

    def tick(self, now: float) -> bool:
        """Checks all deadlines. Whether a request that this rank sends has failed."""
        failed = self.sender.tick(now)
        self.receiver.tick(now)
        self.leader.tick(now)
        return failed

    def take_actions(self) -> list[Action]:
        """What they ask for now, in order."""
        taken: list[Action] = []
        if self.requester.outbox or self.credits.outbox:
            # First: the receiver must know of the last stage before it reads the seal.
            taken += [Tell(rank, message) for rank, message in self.take_stage_messages()]
        for machine in (self.sender, self.receiver, self.leader):
            if machine.actions:
                taken += machine.actions
                machine.actions.clear()
        return taken

    def take_stage_messages(self) -> list[tuple[int, Message]]:
        """The messages about stages, and to whom they are."""
        messages = [*self.requester.outbox, *self.credits.outbox]
        self.requester.outbox, self.credits.outbox = [], []
        return messages

    @property
    def has_actions(self) -> bool:
        """Whether `take_actions` would return any."""
        return bool(
            self.sender.actions
            or self.receiver.actions
            or self.leader.actions
            or self.requester.outbox
            or self.credits.outbox
        )
