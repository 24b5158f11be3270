"""Rosters and action lists for the tests of the state machines: nothing here does I/O or reads a clock."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from oracle import gqa

from torchkv.errors import KVError
from torchkv.layout import KVLayout
from torchkv.protocol.actions import Halt, SendOp, Settle, Start, Tell
from torchkv.protocol.instance import InstanceLeader
from torchkv.protocol.receive import Receive
from torchkv.protocol.receiver import Receiver
from torchkv.protocol.sender import Sender
from torchkv.protocol.stageclient import StageClient
from torchkv.protocol.stagekeeper import StageKeeper
from torchkv.roster import Member, Roster
from torchkv.staging import StagingRing
from torchkv.transport import Int64Array
from torchkv.wire import Grant, Message, pack_pages

TIMEOUT, GRANT_TIMEOUT = 10.0, 100.0
RING = 1 << 16
CHANNELS = 32  # that each rank's GPU serves

Machine = Sender | Receiver | InstanceLeader
M = TypeVar("M", bound=Message)


def roster(rank: int, *places: tuple[str, KVLayout | None], num_pages: int = 32, num_slots: int = 0) -> Roster:
    """Ranks 0, 1, ... with these instances and layouts, as ``rank`` sees them."""
    pool = {"num_pages": num_pages, "num_slots": num_slots, "channels": CHANNELS}
    members = [
        Member(rank=i, incarnation=100 + i, instance=name, layout=layout, **pool)
        for i, (name, layout) in enumerate(places)
    ]
    return Roster(rank, members)


def pair(rank: int, *, writer: KVLayout | None = None, reader: KVLayout | None = None) -> Roster:
    """Rank 0 writes, rank 1 reads."""
    return roster(rank, ("p", writer or gqa()), ("d", reader or gqa()))


def pages(*ids: int) -> Int64Array:
    return np.array(ids, dtype=np.int64)


class Acts:
    """The actions a machine asked for since the last look."""

    def __init__(self, machine: Machine) -> None:
        taken, machine.actions = machine.actions, []
        self.all = taken
        self.told = [(action.rank, action.message) for action in taken if isinstance(action, Tell)]
        self.settled = {action.ticket: action.error for action in taken if isinstance(action, Settle)}
        self.aux = {action.ticket: action.aux for action in taken if isinstance(action, Settle)}
        self.started = [action.op for action in taken if isinstance(action, Start)]
        self.halted = [action.op for action in taken if isinstance(action, Halt)]

    def tells(self, kind: type[M]) -> list[tuple[int, M]]:
        return [(rank, message) for rank, message in self.told if isinstance(message, kind)]

    def error(self, ticket: str) -> KVError:
        error = self.settled[ticket]
        assert error is not None
        return error


def sender(view: Roster | None = None) -> Sender:
    return Sender(view or pair(0), timeout=TIMEOUT, grant_timeout=GRANT_TIMEOUT, stages=StageClient())


def receiver(view: Roster | None = None, *, signals: int = 0, ring: int = RING) -> Receiver:
    keeper = StageKeeper(StagingRing(ring), timeout=TIMEOUT, signals=signals)
    return Receiver(view or pair(1), timeout=TIMEOUT, grant_timeout=GRANT_TIMEOUT, keeper=keeper)


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
    ticket: str = "send",
    request: str = "r",
    now: float = 0.0,
) -> SendOp:
    """What the endpoint does for one verb towards one destination."""
    machine.admit(request, dst, start=start, num_pages=count)
    op = SendOp(request, dst, {} if prefixes is None else prefixes, layers, start, count, ticket)
    machine.submit(op, now)
    return op


def send_state(
    machine: Sender, *layers: int, dst: int = 1, ticket: str = "state", request: str = "r", now: float = 0.0
) -> SendOp:
    """What the endpoint does for ``send_state``; several layers are what ``finish`` sends."""
    machine.admit(request, dst, start=0, num_pages=1, state=True)
    op = SendOp(request, dst, {}, layers, 0, 1, ticket, state=True)
    machine.submit(op, now)
    return op


def finish(
    machine: Sender,
    ticket: str = "finish",
    *,
    dst: int = 1,
    aux: bytes = b"",
    slot: int | None = None,
    now: float = 0.0,
) -> None:
    machine.check_finish("r", dst, state_slot=slot)
    if slot is not None and (left := machine.state_left("r", dst)):
        machine.submit(SendOp("r", dst, {}, left, 0, 1, ticket, state=True), now)
    machine.finish("r", dst, aux=aux, ticket=ticket, now=now)


def moved(machine: Sender, op: SendOp, *, now: float = 0.0) -> None:
    """The driver carried ``op`` out."""
    machine.attest(op, op.layers, nbytes=64, path="runs")
    machine.op_finished(op, None, flushed=True, now=now)


def post(
    machine: Receiver,
    *ids: int,
    src: tuple[int, ...] = (0,),
    request: str = "r",
    prefix: int = 0,
    slot: int | None = None,
    total: float | None = None,
    ticket: str = "rx",
    now: float = 0.0,
) -> Receive:
    return machine.post(
        request, pages(*ids), src, prefix_tokens=prefix, state_slot=slot, total=total, ticket=ticket, now=now
    )
