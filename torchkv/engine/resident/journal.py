"""What the resident loop records of this rank's operations: whose they are, and what is handed over to Python.

The loop writes numbers into its journal (`torchkv.core.journal`); names are Python's, written once a request. An
operation is the loop's to record if its verb has one part, and the loop takes it. When Python takes a request back, the
flight recorder goes on with those of its operations that have not ended.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchkv.core.loop.codes import FINISH, START, VERBS
from torchkv.core.loop.limits import MAX_FLOWS
from torchkv.layout.layer_groups import base_name
from torchkv.observe.recorder import entry_of, kept

if TYPE_CHECKING:
    from torchkv.core.core import Core
    from torchkv.core.operations import Seen
    from torchkv.engine.work import KVWork
    from torchkv.observe.dump_format import Entry
    from torchkv.observe.recorder import FlightRecorder
    from torchkv.protocol.actions import SendOp
    from torchkv.protocol.receiving.request import ReceiverRequest
    from torchkv.protocol.sending.request import SenderRequest

__all__ = ["Journal"]

_CODES = {verb: code for code, verb in enumerate(VERBS)}


# A request: its serial, its name, its peers, the layers of its plan, and the path of its bytes. A plain tuple, which is
# made in half of a named one's time.
_Named = tuple[int, str, Any, tuple[int, ...], str]


class Journal:
    """One rank's. Under the engine's lock, but for `entries`.

    recorder: that of this rank; None: nothing is recorded. sends, receives, ops: those on the loop, by flow and index.
    """

    def __init__(
        self,
        core: Core,
        recorder: FlightRecorder | None,
        *,
        sends: Mapping[int, SenderRequest],
        receives: Mapping[int, ReceiverRequest],
        ops: Mapping[int, tuple[SenderRequest, SendOp]],
    ) -> None:
        self._core = core
        self._recorder = recorder
        self._requests, self._received, self._ops = sends, receives, ops
        self.codes = {} if recorder is None else _CODES  # as what the loop records a verb
        self.serial = 0  # the latest one; 0 if nothing is recorded
        # Requests are named when they end: verbs are on their callers' critical path.
        # Of requests that have ended. Whoever ended after a request has an operation after its last one, or was open
        # when it ended: so no name is missing of what is still in the ring.
        self._ended: deque[_Named] = deque(maxlen=core.operations.size + 2 * MAX_FLOWS)

    def next_serial(self) -> int:
        """Of a request that is about to be the loop's; 0 if nothing is recorded."""
        if self._recorder is not None:
            self.serial += 1
        return self.serial

    def number_receive(self, req: ReceiverRequest) -> int:
        """A serial for a request that the loop is about to grant, and whose end it records then; else 0."""
        if self._recorder is None or req.work._parts != 1:
            return 0
        self.serial += 1
        req.serial = self.serial
        req.work._in_journal = True
        return self.serial

    def end_send(self, req: SenderRequest) -> None:
        """The request is about to leave the loop; not later: `entries` looks at those that have left last."""
        if req.serial:
            self._ended.append(_of_send(req))

    def end_receive(self, req: ReceiverRequest) -> None:
        """As `end_send`."""
        if req.serial:
            self._ended.append(_of_receive(req))

    # ------------------------------------------------------------------ who records an operation

    def verb_of(self, work: KVWork, verb: str) -> int:
        """What the loop is to record, if it takes the verb of this work; 0: nothing."""
        return self.codes.get(verb, 0) if work._parts == 1 and work._number < 0 else 0

    def hand_over_ops(self, req: SenderRequest, indices: list[int]) -> None:
        """Python takes back these ops, which have not ended, and the ``finish`` of their request.

        The loop stands still.
        """
        assert req.flow is not None
        for index in indices:
            op = self._ops[index][1]
            self._hand_over(
                self._core.operations.of_op(index), op.work, op.verb, req.request, req.dst, op.layers, op.num_pages
            )
        if req.finish is not None:
            number = self._core.operations.of_finish(req.flow)
            self._hand_over(number, req.finish.work, "finish", req.request, req.dst, None, 0)

    def hand_over_receive(self, req: ReceiverRequest) -> None:
        """Python takes a receive back. The loop stands still, or has left it to Python."""
        assert req.flow is not None
        number = self._core.operations.of_receive(req.flow)
        self._hand_over(number, req.work, "recv_pages", req.request, tuple(req.writers), None, len(req.pages))

    def _hand_over(
        self, number: int, work: KVWork, verb: str, request: str, peers: Any, layers: Any, num_pages: int
    ) -> None:
        if number and self._recorder is not None:
            self._core.operations.hand_over(number)
            work._record_with(self._recorder, verb, base_name(request), peers, layers, num_pages)
            work._in_journal = False

    # ------------------------------------------------------------------ reports

    def entries(self) -> list[Entry]:
        """The operations that the loop has recorded, and those whose commands it has not taken. Any thread."""
        offset = time.time_ns() - time.monotonic_ns()
        waiting = self._core.operations.unbegun()  # first: what the loop takes meanwhile is in both
        seen = self._core.operations.read()
        sends = [_of_send(req) for req in [*self._requests.values()]]
        receives = [_of_receive(req) for req in [*self._received.values()]]
        named = {each[0]: each for each in [*sends, *receives, *self._ended]}
        found = [_entry(each, named[each.serial], offset) for each in seen if each.serial in named]
        numbers = {each.number for each in seen}
        unbegun = [self._unbegun(kind, index, numbers, offset) for kind, index in waiting]
        return found + [entry for entry in unbegun if entry is not None]

    def _unbegun(self, kind: int, index: int, begun: set[int], offset: int) -> Entry | None:
        """That of a command which the loop had not taken; None if it has ``begun`` now, or is not the loop's."""
        operations, layers = self._core.operations, None
        if kind == START:
            owner, number = self._ops.get(index), operations.of_op(index)
            if owner is None:
                return None
            req, op = owner
            work, verb, request, num_pages = op.work, op.verb, req.request, op.num_pages
            peers: Any = req.dst
            layers = kept(op.layers)
        elif kind == FINISH:
            finished, number = self._requests.get(index), operations.of_finish(index)
            if finished is None or finished.finish is None:
                return None
            work, verb, request, peers, num_pages = finished.finish.work, "finish", finished.request, finished.dst, 0
        else:
            received, number = self._received.get(index), operations.of_receive(index)
            if received is None:
                return None
            work, verb, request, num_pages = received.work, "recv_pages", received.request, len(received.pages)
            peers = tuple(received.writers)
        if number in begun or not work._in_journal:
            return None
        began = int(work._began * 1e9) + offset
        return entry_of(-1, verb, base_name(request), peers, layers, num_pages, began)


def _of_send(req: SenderRequest) -> _Named:
    return req.serial, req.request, req.dst, req.loop_layers, req.loop_path


def _of_receive(req: ReceiverRequest) -> _Named:
    return req.serial, req.request, tuple(req.writers), (), req.loop_path


def _entry(seen: Seen, named: _Named, offset: int) -> Entry:
    _, request, peers, planned, path = named
    layers: Any = None
    if seen.layers and (seen.verb != "send_pages" or seen.layers < len(planned)):
        layers = planned[seen.first : seen.last + 1]
        if len(layers) == seen.layers:
            layers = kept(layers)
        else:  # with gaps, of which only the number is known
            layers = f"{layers[0]} to {layers[-1]}, {seen.layers} in all"
    return entry_of(
        2 * seen.number,
        seen.verb,
        base_name(request),
        peers,
        layers,
        seen.pages,
        seen.began + offset,
        None if seen.ended is None else seen.ended + offset,
        nbytes=seen.nbytes,
        path=path if seen.nbytes else "none",
    )
