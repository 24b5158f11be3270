"""The requests of one rank of an SGLang engine, as SGLang's scheduler polls them, over torchkv. Needs no SGLang.

Methods have the names that SGLang calls them by, and run on its scheduler's thread. Nothing here raises because of a
peer: what goes wrong with a request ends that request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from torchkv.errors import ProtocolError, TransferCancelled
from torchkv.integrations.arrivals import Arrival
from torchkv.integrations.departures import Departure, Departures

if TYPE_CHECKING:
    from torchkv.engine.work import KVWork
    from torchkv.group.join import KVMember
    from torchkv.integrations.bootstrap import Prefills
    from torchkv.integrations.sglang_memory import AuxRows

__all__ = ["Receiver", "Requests", "Sender"]

# What ``poll`` returns: SGLang's KVPoll.
FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = range(5)


@dataclass
class Requests:
    """What the requests of one rank share. prefills: of a decode engine."""

    kv: KVMember
    aux: AuxRows
    page_size: int
    prefills: Prefills | None = None
    receivers: dict[int, Receiver] = field(default_factory=dict)  # by room, until SGLang has released their pages

    def __post_init__(self) -> None:
        self.departures = Departures(self.kv)

    def is_released(self, room: int) -> bool:
        """Whether nothing can be written any more to the pages that this rank granted for a room."""
        receiver = self.receivers.get(room)
        return receiver is None or receiver.is_quiet()


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
        self.seconds: float | None = None  # from the last page being sent until it was received
        self._early_send_wait_event: Any = None  # SGLang sets it: a CUDA event, behind which the pages are written
        self._requests: Requests = mgr.requests
        self._departure = Departure(self._requests.departures, _name(bootstrap_room))
        self._prefix = 0  # tokens that the receiver holds
        self._pages = 0  # of all that is sent
        self._sent = 0
        self._aux_index: int | None = None
        self._works: list[KVWork] = []

    @property
    def error(self) -> Exception | None:
        return self._departure.error

    @property
    def nbytes(self) -> int:
        """Bytes of a request that has succeeded."""
        return sum(work.bytes for work in self._works)

    # ------------------------------------------------------------------ in this order

    def poll(self) -> int:
        departure = self._departure
        departure.advance()
        if departure.error is not None:
            return FAILED
        if departure.sealed is not None:
            self.seconds = departure.sealed.seconds if departure.is_over else None
            return SUCCESS if departure.is_over else TRANSFERRING
        prefix = departure.granted()
        if departure.error is not None:
            return FAILED
        self._prefix = prefix or 0
        return BOOTSTRAPPING if prefix is None else WAITING

    poll_pp_consensus = poll

    def pop_decode_prefix_len(self) -> int:
        """Tokens that the decode engine holds already, and that are not sent."""
        if self._prefix % self._requests.page_size:
            self._departure.fail(
                ProtocolError(
                    f"the decode engine holds {self._prefix} tokens of this prompt, and pages here have "
                    f"{self._requests.page_size}: its --page-size must be a multiple of that"
                )
            )
        return self._prefix

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        self._pages, self._aux_index = num_kv_indices, aux_index
        if num_kv_indices < 0:
            error = ProtocolError(f"the decode engine holds {self._prefix} tokens, which is more than this prompt")
            self._departure.fail(error)

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        return num_pages > 0 or last_chunk

    def send(
        self, kv_indices: Any, state_indices: Sequence[Any] | None = None, num_kv_tokens: int | None = None
    ) -> None:
        event, self._early_send_wait_event = self._early_send_wait_event, None
        departure, pages = self._departure, np.asarray(kv_indices, dtype=np.int64)
        if departure.error is not None:
            return
        assert departure.sealed is None, "SGLang sends a request's last pages once"
        if (work := departure.send(pages, start=self._sent, event=event)) is not None:
            self._works.append(work)
        self._sent += len(pages)
        if self._sent >= self._pages and departure.error is None:
            assert self._aux_index is not None
            departure.finish(aux=self._requests.aux.row(self._aux_index))

    # ------------------------------------------------------------------ its end

    def abort(self) -> None:
        self._departure.advance()
        self._departure.fail(TransferCancelled(f"request {self._departure.name} was aborted where it is prefilled"))

    def failure_exception(self) -> NoReturn:
        """SGLang is about to release the pages of a failed request: on all ranks, if it has failed on one of them."""
        elsewhere = _failed_elsewhere(self._departure.name)
        self._departure.fail(elsewhere)
        raise self._departure.error or elsewhere

    def clear(self) -> None:
        """Nothing is kept for a request that has ended."""


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
        self._arrival: Arrival | None = None
        self._aux_index: int | None = None
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
            finding = self._requests.prefills.find(self._bootstrap)
            self._arrival = Arrival(self._requests.kv, self._name, finding)

    def poll(self) -> int:
        if self.conclude_state is not None:
            return self.conclude_state
        if self._arrival is None:
            return BOOTSTRAPPING
        if self._arrival.is_connected():
            return WAITING
        if (error := self._arrival.error) is not None:
            return self._fail(error)
        if (work := self._arrival.work) is None:
            return BOOTSTRAPPING
        return self._succeed(work) if work.is_completed() else TRANSFERRING

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
        assert self._arrival is not None
        assert aux_index is not None
        self._aux_index = aux_index
        self._arrival.grant(np.asarray(kv_indices, dtype=np.int64), prefix_tokens=decode_prefix_len or 0)

    def _succeed(self, work: KVWork) -> int:
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
        self.abort_notified = self._arrival is not None and self._arrival.work is not None

    def failure_exception(self) -> NoReturn:
        """SGLang is about to release the pages of a failed request: on all ranks, if it has failed on one of them."""
        self._fail(_failed_elsewhere(self._name))
        assert self.error is not None
        raise self.error

    def is_quiet(self) -> bool:
        """Whether nothing can be written to its pages any more."""
        return self._arrival is None or self._arrival.pages_safe

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
        if self._arrival is not None:
            self._arrival.cancel()
        return FAILED


def _name(room: int | None) -> str:
    return f"sglang-{room}"


def _failed_elsewhere(name: str) -> TransferCancelled:
    error = TransferCancelled(f"request {name} has failed on another rank of this engine")
    error.is_from_another_rank = True  # type: ignore[attr-defined]  # SGLang then logs it once only
    return error
