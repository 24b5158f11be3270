"""The requests of one rank of an SGLang engine, as SGLang's scheduler polls them, over torchkv. Needs no SGLang.

Methods have the names that SGLang calls them by, and run on its scheduler's thread. Nothing here raises because of a
peer: what goes wrong with a request ends that request.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from torchkv.errors import KVError, LayoutMismatch, ProtocolError, TransferCancelled

if TYPE_CHECKING:
    from torchkv.engine.work import KVWork
    from torchkv.group.join import KVMember
    from torchkv.integrations.sglang_directory import Prefills
    from torchkv.integrations.sglang_memory import AuxRows

__all__ = ["Receiver", "Requests", "Sender"]

log = logging.getLogger(__name__)

# What ``poll`` returns: SGLang's KVPoll.
FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = range(5)


@dataclass
class Requests:
    """What the requests of one rank share. prefills: of a decode engine."""

    kv: KVMember
    aux: AuxRows
    page_size: int
    prefills: Prefills | None = None
    senders: dict[str, Sender] = field(default_factory=dict)  # by name: whose torchkv's request of this name is
    receivers: dict[int, Receiver] = field(default_factory=dict)  # by room, until SGLang has released their pages
    ended: list[Sender] = field(default_factory=list)  # in ``senders``, until torchkv reads nothing for them

    def is_released(self, room: int) -> bool:
        """Whether nothing can be written any more to the pages that this rank granted for a room."""
        receiver = self.receivers.get(room)
        return receiver is None or receiver.is_quiet()

    def take_name(self, sender: Sender) -> bool:
        """Whether ``sender`` has its name. Clients choose rooms, so an earlier request may have it."""
        self.forget()
        return self.senders.setdefault(sender.name, sender) is sender

    def forget(self) -> None:
        """Drops senders that failed and for which torchkv does nothing any more."""
        for sender in [sender for sender in self.ended if sender.is_over()]:
            self.ended.remove(sender)
            del self.senders[sender.name]


class Sender:
    """A request that is prefilled here. SGLang keeps its pages until `poll` says that it has succeeded or failed.

    If it has failed its pages may still be read: what is read then is never taken for the request, whose receiver keeps
    its own pages until nothing comes any more.
    """

    def __init__(
        self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, req_has_disagg_prefill_dp_rank: bool = False
    ) -> None:
        self.kv_mgr = mgr
        self.bootstrap_room = bootstrap_room
        self.name = _name(bootstrap_room)
        self.error: Exception | None = None
        self.nbytes = 0
        self.seconds: float | None = None  # from the last page being sent until it was received
        self._early_send_wait_event: Any = None  # SGLang sets it: a CUDA event, behind which the pages are written
        self._requests: Requests = mgr.requests
        self._begun = False  # whether torchkv knows of it
        self._prefix: int | None = None  # tokens that the receiver holds; None until it has granted pages
        self._pages = 0  # of all that is sent
        self._sent = 0
        self._aux_index: int | None = None
        self._works: list[KVWork] = []
        self._finish: KVWork | None = None
        self._cancel: KVWork | None = None

    # ------------------------------------------------------------------ in this order

    def poll(self) -> int:
        if self.error is None and self._finish is not None and self._finish.is_completed():
            if (error := self._finish.exception()) is None:
                return self._succeed()
            self._fail(error)
        if self.error is not None:
            return FAILED
        if self._finish is not None:
            return TRANSFERRING
        if not self._requests.take_name(self):
            return BOOTSTRAPPING
        self._begun = True
        try:
            prefix = self._requests.kv.granted(self.name, None)
        except LayoutMismatch:
            prefix = 0  # this rank holds nothing for the receiver, and finishes with nothing
        except KVError as error:
            self._fail(error)
            return FAILED
        if prefix is not None:
            self._prefix = prefix
        return BOOTSTRAPPING if self._prefix is None else WAITING

    poll_pp_consensus = poll

    def pop_decode_prefix_len(self) -> int:
        """Tokens that the decode engine holds already, and that are not sent."""
        prefix = self._prefix or 0
        if prefix % self._requests.page_size:
            self._fail(
                ProtocolError(
                    f"the decode engine holds {prefix} tokens of this prompt, and pages here have "
                    f"{self._requests.page_size}: its --page-size must be a multiple of that"
                )
            )
        return prefix

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        self._pages, self._aux_index = num_kv_indices, aux_index
        if num_kv_indices < 0:
            self._fail(ProtocolError(f"the decode engine holds {self._prefix} tokens, which is more than this prompt"))

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        return num_pages > 0 or last_chunk

    def send(
        self, kv_indices: Any, state_indices: Sequence[Any] | None = None, num_kv_tokens: int | None = None
    ) -> None:
        event, self._early_send_wait_event = self._early_send_wait_event, None
        if self.error is not None:
            return
        assert self._finish is None, "SGLang sends a request's last pages once"
        kv, pages = self._requests.kv, np.asarray(kv_indices, dtype=np.int64)
        try:
            if len(pages):
                self._works.append(kv.send_pages(self.name, pages, None, start=self._sent, event=event))
            self._sent += len(pages)
            if self._sent >= self._pages:
                assert self._aux_index is not None
                self._finish = kv.finish(self.name, None, aux=self._requests.aux.row(self._aux_index))
        except KVError as error:
            self._fail(error)

    # ------------------------------------------------------------------ its end

    def abort(self) -> None:
        if self.error is None and not self._has_succeeded():
            self._fail(TransferCancelled(f"request {self.name} was aborted where it is prefilled"))

    def failure_exception(self) -> NoReturn:
        """SGLang is about to release the pages of a failed request: on all ranks, if it has failed on one of them."""
        if self.error is None:
            self._fail(_failed_elsewhere(self.name))
        assert self.error is not None
        raise self.error

    def clear(self) -> None:
        """Nothing is kept for a request that has succeeded."""

    def is_over(self) -> bool:
        """Whether torchkv's request of this name has ended here."""
        return self._cancel is not None and self._cancel.is_completed()

    def _has_succeeded(self) -> bool:
        return self._finish is not None and self._finish.is_success()

    def _succeed(self) -> int:
        if self._requests.senders.get(self.name) is self:
            del self._requests.senders[self.name]
            assert self._finish is not None
            self.nbytes, self.seconds = sum(work.bytes for work in self._works), self._finish.seconds
            self._works.clear()
        return SUCCESS

    def _fail(self, error: Exception) -> None:
        if self.error is not None:
            return
        self.error = error
        self._works.clear()
        if self._requests.take_name(self):
            self._cancel = self._requests.kv.cancel(self.name, decline=not self._begun)
            self._requests.ended.append(self)


class Receiver:
    """A request that is decoded here. SGLang releases its pages when `is_quiet`, or when it has succeeded."""

    require_staging = False
    supports_host_destination = False
    bootstrap_infos: tuple[()] = ()

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        self.kv_mgr = mgr
        self.bootstrap_room = bootstrap_room
        self.error: Exception | None = None
        self.conclude_state: int | None = None
        self.abort_notified = False  # SGLang keeps the pages of a failed request until `is_quiet`
        self._bootstrap = bootstrap_addr
        self._requests: Requests = mgr.requests
        self._name = _name(bootstrap_room)
        self._finding: Future[str] | None = None
        self._aux_index: int | None = None
        self._work: KVWork | None = None
        self._is_first = bootstrap_room is not None and (
            self._requests.receivers.setdefault(bootstrap_room, self) is self
        )
        if not self._is_first:
            self._fail(ProtocolError(f"bootstrap room {bootstrap_room} is that of another request of this engine"))

    # ------------------------------------------------------------------ in this order

    def init(self, prefill_dp_rank: int) -> None:
        if prefill_dp_rank:
            self._fail(ProtocolError(f"data-parallel rank {prefill_dp_rank}: a prefill engine has one only, so far"))
        elif self.error is None:
            assert self._requests.prefills is not None
            self._finding = self._requests.prefills.find(self._bootstrap)

    def poll(self) -> int:
        if self.conclude_state is not None:
            return self.conclude_state
        if self._work is not None:
            return self._poll_work(self._work)
        finding = self._finding
        if finding is None or not finding.done():
            return BOOTSTRAPPING
        if (error := finding.exception()) is not None:
            return self._fail(error)
        return WAITING

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Sequence[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: Any = "device",
    ) -> None:
        """Grants the pages behind the prefix to whoever prefills the request."""
        if self.error is not None:
            return
        assert self._finding is not None
        assert aux_index is not None
        self._aux_index = aux_index
        try:
            self._work = self._requests.kv.recv_pages(
                self._name,
                np.asarray(kv_indices, dtype=np.int64),
                self._finding.result(),
                prefix_tokens=decode_prefix_len or 0,
            )
        except KVError as error:
            self._fail(error)

    def _poll_work(self, work: KVWork) -> int:
        if not work.is_completed():
            return TRANSFERRING
        if (error := work.exception()) is not None:
            return self._fail(error)
        assert self._aux_index is not None
        try:
            self._requests.aux.put(self._aux_index, work.aux)
        except ProtocolError as problem:
            return self._fail(problem)
        self.conclude_state = SUCCESS
        return SUCCESS

    # ------------------------------------------------------------------ its end

    def abort(self) -> None:
        self._fail(TransferCancelled(f"request {self._name} was aborted where it is decoded"))
        self.ensure_abort_notified()

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """Ends the transfer, and has SGLang keep the pages until nothing can be written to them any more."""
        self._fail(_failed_elsewhere(self._name))
        self.abort_notified = self._work is not None

    def failure_exception(self) -> NoReturn:
        """SGLang is about to release the pages of a failed request: on all ranks, if it has failed on one of them."""
        self._fail(_failed_elsewhere(self._name))
        assert self.error is not None
        raise self.error

    def is_quiet(self) -> bool:
        """Whether nothing can be written to its pages any more."""
        if self._work is None:
            return True
        error = self._work.exception()
        return self._work.is_completed() and (error is None or (isinstance(error, KVError) and error.pages_safe))

    def is_abort_release_safe(self) -> bool:
        return self.is_quiet()

    def clear(self) -> None:
        """SGLang has done with it: its pages are its own, or are released.

        Raises ``RuntimeError`` if somebody may still write to them, which ends the engine: better than that these bytes
        land in the pages of another request.
        """
        if not self.is_quiet():
            raise RuntimeError(f"SGLang released the pages of request {self._name} while they may be written to")
        if self._is_first and self.bootstrap_room is not None:
            self._requests.receivers.pop(self.bootstrap_room, None)
            self._is_first = False

    def _fail(self, error: BaseException) -> int:
        """Ends the transfer, which lasts until nobody writes any more. Always `FAILED`, also after a success."""
        if self.conclude_state == FAILED:
            return FAILED
        assert isinstance(error, Exception)
        self.error, self.conclude_state = error, FAILED
        if self._work is not None:
            self._requests.kv.cancel(self._name)
        elif self._is_first and self._finding is not None:
            self._finding.add_done_callback(partial(_refuse, self._requests.kv, self._name))
        return FAILED


def _refuse(kv: KVMember, name: str, finding: Future[str]) -> None:
    """Tells who prefills the request that nobody here wants it, once that one is known."""
    if finding.cancelled() or finding.exception() is not None:
        return
    try:
        kv.refuse(name, finding.result())
    except KVError as error:
        log.warning("request %s was not refused: %s: %s", name, type(error).__name__, error)


def _name(room: int | None) -> str:
    return f"sglang-{room}"


def _failed_elsewhere(name: str) -> TransferCancelled:
    error = TransferCancelled(f"request {name} has failed on another rank of this engine")
    error.is_from_another_rank = True  # type: ignore[attr-defined]  # SGLang then logs it once only
    return error
