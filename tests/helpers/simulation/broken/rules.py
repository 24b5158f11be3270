"""Loops that break a rule of the protocol: of grants, seals, verdicts, and what is taken back."""

from __future__ import annotations

from typing import Any

from tests.helpers.simulation.broken.swapping import Break, swap
from torchkv.core.loop import (
    copying,
    grants,
    loop,
    mailbox,
    receiving,
    rounds,
    sending,
    stripes,
)
from torchkv.core.loop.codes import DECIDED, DONE, OPEN, SEAL, SEALED, WAITING
from torchkv.core.sends import Sends
from torchkv.engine.resident.flows import Flows
from torchkv.engine.resident.notices import Notices
from torchkv.host.atomics import load
from torchkv.protocol.sending.sender import Sender

__all__ = ["BREAKS", "SINGLE_BREAKS"]


def _seals_while_it_copies() -> None:
    def seal_if_done(world: Any, flow: int) -> None:
        send = world["sends"][flow]
        if send["state"] == OPEN and send["num_pages"] >= 0 and send["due"] == 0:
            send["due"] = 1
            mailbox.owe(world, SEAL, 0, flow, send["generation"])

    swap(sending, seal_if_done=seal_if_done)
    swap(loop, seal_if_done=seal_if_done)


def _copies_on_when_taken_back() -> None:
    def take_back(self: Sends, flow: int, ops: list[int]) -> bool:
        sealed = bool(self._world["sends"][flow]["state"] == SEALED)
        for index in ops:
            self._free_ops.append(index)
        self._free.append(flow)
        return sealed

    swap(Sends, take_back=take_back)


def _forgets_what_has_arrived() -> None:
    swap(Flows, _add=lambda self, req: self.core.receives.state(req.flow))


def _loses_what_finds_no_room() -> None:
    real = sending.pay_seal
    swap(loop, pay_seal=lambda *arguments: bool(real(*arguments)) or True)


def _forgets_commands_when_taken_back() -> None:
    def settle(world: Any) -> bool:
        world["command_head"] = world["command_tail"]
        return True

    swap(loop, settle=settle)


def _copies_the_window_wrongly() -> None:
    swap(
        stripes,
        first_owed=lambda granted, window, unit, src_page, dst_page: max(0, granted - unit) if window >= 0 else 0,
    )


def _leaves_a_page_to_other_holders() -> None:
    real = stripes.owed_pairs

    def fewer(granted: int, src_page: int, dst_page: int, start: int, count: int, stripe: int) -> tuple[int, int]:
        begin, stop = real(granted, src_page, dst_page, start, count, stripe)
        return begin, max(begin, stop - 1) if load(stripe + 16) > 1 else stop

    swap(sending, owed_pairs=fewer)


def _drops_an_op() -> None:
    real = copying.queue_op

    def queue(world: Any, index: int) -> None:
        if index % 3:
            real(world, index)

    swap(loop, queue_op=queue)
    swap(grants, queue_op=queue)


def _binds_the_grant_of_any_name() -> None:
    def waiting(world: Any, peer: int, hash0: int, hash1: int) -> int:
        for flow, send in enumerate(world["sends"]):
            if send["state"] == WAITING and send["peer"] == peer:
                return flow
        return -1

    swap(grants, _waiting=waiting)


def _leaves_a_grant_that_it_has_met() -> None:
    real = grants.meet

    def meet(world: Any, flow: int, prefixed: int) -> bool:
        kept = {name: world[name].copy() for name in ("events", "unclaimed", "unclaimed_head")}
        met = bool(real(world, flow, prefixed))
        for name, value in kept.items():
            world[name] = value
        return met

    swap(grants, meet=meet)


def _drops_ops_that_wait() -> None:
    swap(loop, park=lambda world, index: None)


def _decides_without_the_others() -> None:
    def on_done(world: Any, source: int, flow: int, generation: int) -> bool:
        world["votes"][source][flow] = generation
        index = world["rounds_of"][source][flow] - 1
        if index < 0 or world["awaited"][source][flow] != generation:
            return False
        world["rounds_of"][source][flow] = 0
        if world["rounds"][index]["missing"] > 0:
            world["rounds"][index]["missing"] = 0
            mailbox.owe(world, DECIDED, 0, index, 0)
        return True

    swap(rounds, on_done=on_done)
    swap(loop, on_done=on_done)


def _tells_one_rank_of_a_round() -> None:
    real = rounds.pay_decided

    def pay(world: Any, index: int) -> bool:
        world["rounds"][index]["next"] = max(1, world["rounds"][index]["next"])
        return bool(real(world, index))

    swap(loop, pay_decided=pay)


def _ends_what_only_the_leader_may_end() -> None:
    real = loop._pay_one

    def pay(world: Any, kind: int, rank: int, flow: int, generation: int) -> bool:
        if kind == DONE and rank != world["rank"]:
            receiving.succeed(world, flow)
        return bool(real(world, kind, rank, flow, generation))

    swap(loop, _pay_one=pay)


def _one_seal_is_enough() -> None:
    real = receiving._on_seal

    def on_seal(world: Any, receive: Any, number: int, flow: int) -> bool:
        writers, receive["num_writers"] = receive["num_writers"], 1
        try:
            return bool(real(world, receive, 0 if number == 0 else number, flow))
        finally:
            receive["num_writers"] = writers

    swap(receiving, _on_seal=on_seal)


def _leaves_grants_that_failed_requests_refuse() -> None:
    def awaits(self: Sender) -> bool:
        hopeful = any(req.waits and req.flow is None and req.error is None for req in self.requests)
        return self.grants.unmet.refusing or hopeful

    swap(Sender, _awaits_grants=property(awaits))


BREAKS: dict[str, Break] = {
    "seal before flush": (_seals_while_it_copies, False),
    "attest by the first writer only": (_one_seal_is_enough, False),
    "copies on when taken back": (_copies_on_when_taken_back, False),
    "forgets what has arrived": (_forgets_what_has_arrived, True),
    "loses what finds no room": (_loses_what_finds_no_room, True),
    "forgets commands when taken back": (_forgets_commands_when_taken_back, True),
    "copies the window wrongly": (_copies_the_window_wrongly, True),
    "leaves a page to other holders": (_leaves_a_page_to_other_holders, True),
    "drops an op": (_drops_an_op, True),
    "drops ops that wait": (_drops_ops_that_wait, True),
    "binds the grant of any name": (_binds_the_grant_of_any_name, True),
    "decides without the others": (_decides_without_the_others, False),
    "ends what only the leader may end": (_ends_what_only_the_leader_may_end, False),
    "tells one rank of a round": (_tells_one_rank_of_a_round, True),
    "leaves grants that failed requests refuse": (_leaves_grants_that_failed_requests_refuse, False),
}


def _leaves_grants_that_requests_wait_for() -> None:
    swap(Notices, _awaits_grants=False)


SINGLE_BREAKS: dict[str, Break] = {
    "leaves a grant that it has met": (_leaves_a_grant_that_it_has_met, False),
    "leaves grants that requests wait for": (_leaves_grants_that_requests_wait_for, False),
}
