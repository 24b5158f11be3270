"""Group maps and action lists for the tests of the state machines: nothing here does I/O or reads a clock."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from tests.helpers.references.page_transfer import gqa
from torchkv.arrays import Int64Array
from torchkv.errors import KVError
from torchkv.layout.group_map import GroupMap, RankInfo
from torchkv.layout.layer_groups import UNGROUPED, Pools
from torchkv.layout.layout import KVLayout
from torchkv.protocol.actions import Halt, SendOp, Settle, Start, Tell
from torchkv.protocol.instance import InstanceLeader
from torchkv.protocol.messages import Grant, Message, pack_pages
from torchkv.protocol.receiving.receiver import Receiver
from torchkv.protocol.receiving.request import ReceiverRequest
from torchkv.protocol.receiving.stage_allocator import StagingRing
from torchkv.protocol.receiving.staging_credits import StagingCredits
from torchkv.protocol.sending.sender import Sender
from torchkv.protocol.sending.staging_requester import StagingRequester

TIMEOUT, GRANT_TIMEOUT = 10.0, 100.0
RING = 1 << 16

Machine = Sender | Receiver | InstanceLeader
M = TypeVar("M", bound=Message)


def group_map(rank: int, *places: tuple[str, KVLayout | None], num_pages: int = 32, num_slots: int = 0) -> GroupMap:
    """The group map of ``rank``: ranks 0, 1, ... with these instances and layouts."""
    pool = {"num_pages": num_pages, "num_slots": num_slots}
    members = [
        RankInfo(rank=i, incarnation=100 + i, instance=name, layout=layout, **pool)
        for i, (name, layout) in enumerate(places)
    ]
    return GroupMap(rank, members)


def pair(rank: int, *, writer: KVLayout | None = None, reader: KVLayout | None = None) -> GroupMap:
    """Rank 0 writes, rank 1 receives."""
    return group_map(rank, ("p", writer or gqa()), ("d", reader or gqa()))


def pages(*ids: int) -> Int64Array:
    return np.array(ids, dtype=np.int64)


class Acts:
    """The actions that a machine has asked for since the last `Acts`."""

    def __init__(self, machine: Machine) -> None:
        taken = machine.actions[:]
        machine.actions.clear()
        self.all = taken
        self.told = [(action.rank, action.message) for action in taken if isinstance(action, Tell)]
        self.settled = {action.work: action.error for action in taken if isinstance(action, Settle)}
        self.aux = {action.work: action.aux for action in taken if isinstance(action, Settle)}
        self.started = [action.op for action in taken if isinstance(action, Start)]
        self.halted = [action.op for action in taken if isinstance(action, Halt)]

    def tells(self, kind: type[M]) -> list[tuple[int, M]]:
        return [(rank, message) for rank, message in self.told if isinstance(message, kind)]

    def error(self, work: str) -> KVError:
        error = self.settled[work]
        assert error is not None
        return error


def sender(view: GroupMap | None = None) -> Sender:
    return Sender(view or pair(0), timeout=TIMEOUT, grant_timeout=GRANT_TIMEOUT, requester=StagingRequester())


def receiver(view: GroupMap | None = None, *, ring: int = RING, pools: Pools = UNGROUPED) -> Receiver:
    credits = StagingCredits(StagingRing(ring), timeout=TIMEOUT)
    limits = {"timeout": TIMEOUT, "grant_timeout": GRANT_TIMEOUT}
    return Receiver(view or pair(1), **limits, credits=credits, pools=pools)


def grant(
    *ids: int,
    generation: int = 1,
    prefix: int = 0,
    request: str = "r",
    writers: tuple[int, ...] = (0,),
    slot: int | None = None,
) -> Grant:
    return Grant(request, generation, prefix, pack_pages(pages(*ids)), list(writers), slot)


def verb(
    machine: Sender,
    count: int,
    *,
    start: int = 0,
    dst: int = 1,
    prefixes: dict[int, int] | None = None,
    layers: tuple[int, ...] = (0, 1),
    work: str = "send",
    request: str = "r",
    now: float = 0.0,
) -> SendOp:
    """Does what `KVEndpoint` does for one verb towards one destination."""
    machine.admit(request, dst, start=start, num_pages=count)
    op = SendOp(request, dst, {} if prefixes is None else prefixes, layers, start, count, work)
    machine.submit(op, now)
    return op


def send_state(machine: Sender, *layers: int, dst: int = 1, work: str = "state") -> SendOp:
    """Does what `KVEndpoint` does for ``send_state``, or with several layers for ``finish(state_slot=)``."""
    machine.admit("r", dst, start=0, num_pages=1, state=True)
    op = SendOp("r", dst, {}, layers, 0, 1, work, state=True)
    machine.submit(op, 0.0)
    return op


def finish(
    machine: Sender,
    *,
    dst: int = 1,
    aux: bytes = b"",
    slot: int | None = None,
) -> None:
    machine.check_finish("r", dst, state_slot=slot)
    if slot is not None and (left := machine.state_left("r", dst)):
        machine.submit(SendOp("r", dst, {}, left, 0, 1, "finish", state=True), 0.0)
    machine.finish("r", dst, aux=aux, work="finish", now=0.0)


def moved(machine: Sender, op: SendOp) -> None:
    """Reports, as the engine does, that ``op`` was carried out."""
    machine.attest(op, op.layers, nbytes=64, path="runs")
    machine.op_finished(op, None, flushed=True, now=0.0)


def post(
    machine: Receiver,
    *ids: int,
    src: tuple[int, ...] = (0,),
    request: str = "r",
    prefix: int = 0,
    slot: int | None = None,
    total: float | None = None,
    work: str = "rx",
    now: float = 0.0,
) -> ReceiverRequest:
    return machine.posts.post(
        request, pages(*ids), src, prefix_tokens=prefix, state_slot=slot, total=total, work=work, now=now
    )
