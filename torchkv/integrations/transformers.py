"""torchkv under the continuous batching of transformers: one process prefills, another one decodes.

Each side registers a scheduler, by `prefill` or `decode`, and names it in its ``ContinuousBatchingConfig``. Requests
have the same ``request_id`` on both sides, which nobody else uses meanwhile. See docs/integrations.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler

import torchkv
from torchkv.errors import KVError, LayoutMismatch

if TYPE_CHECKING:
    from torchkv.engine.work import KVWork
    from torchkv.group.join import KVMember

__all__ = ["Endpoint", "decode", "prefill"]

log = logging.getLogger(__name__)


class Endpoint:
    """This process as an instance of torchkv, from when transformers makes the scheduler until `close`.

    scheduler: for ``ContinuousBatchingConfig(scheduler_type=...)``. address: where others can reach this instance; or
    the error with which it could not join. moved: bytes of the pages that it has sent, or received.
    """

    def __init__(self, instance: str, options: torchkv.Options | None) -> None:
        self.scheduler = f"torchkv:{instance}"
        self.address: Future[str] = Future()
        self.moved = 0
        self._instance = instance
        self._options = options
        self._kv: KVMember | None = None
        self._page_nbytes = 0  # in all layers

    @property
    def member(self) -> KVMember:
        """This process among the instances. Not before `address` is known."""
        assert self._kv is not None, "no scheduler has joined yet"
        return self._kv

    def join(self, cache: Any) -> KVMember:
        """For the scheduler: adopts a ``PagedAttentionCache``."""
        assert self._kv is None, "one scheduler an endpoint"
        try:
            adopted = _adopted(cache)
            layout = adopted.layout
            self._page_nbytes = len(layout.layers) * sum(layout.page_nbytes(c.name) for c in layout.components)
            self._kv = torchkv.join(adopted, self._instance, options=self._options)
        except BaseException as error:
            self.address.set_exception(error)
            raise
        self.address.set_result(self._kv.address)
        return self._kv

    def count(self, pages: int) -> None:
        """For the scheduler: so many pages were sent or received."""
        self.moved += pages * self._page_nbytes

    def close(self) -> None:
        """Leaves. To be called once the manager has stopped."""
        SCHEDULER_MAPPING.pop(self.scheduler, None)
        if self._kv is not None:
            self._kv.close()


def prefill(instance: str, *, options: torchkv.Options | None = None) -> Endpoint:
    """Sends the pages of each request that ends here to whoever decodes it, and keeps its blocks until then.

    Give requests ``max_new_tokens=1``. A request that nobody grants within ``Options.grant_timeout`` is dropped.
    """
    endpoint = Endpoint(instance, options)
    SCHEDULER_MAPPING[endpoint.scheduler] = partial(_PrefillScheduler, endpoint)
    return endpoint


def decode(instance: str, source: Callable[[str], str], *, options: torchkv.Options | None = None) -> Endpoint:
    """Receives the prompt of each request, but for its last token, from the instance that prefilled it.

    source: the address of that instance, given a request id. It is called on the thread that generates. Requests that
    cannot be received are prefilled here. Needs ``allow_block_sharing=False``.
    """
    endpoint = Endpoint(instance, options)
    SCHEDULER_MAPPING[endpoint.scheduler] = partial(_DecodeScheduler, endpoint, source)
    return endpoint


# ---------------------------------------------------------------------- prefill


class _PrefillScheduler(FIFOScheduler):
    def __init__(self, endpoint: Endpoint, **arguments: Any) -> None:
        self._sending: dict[str, KVWork] = {}
        self._pages: dict[str, int] = {}  # of what is being sent, and has not failed
        self._endpoint = endpoint
        super().__init__(**arguments)
        self._kv = endpoint.join(self.cache)
        (self._allocator,) = self.cache.cache_allocators.values()

    def has_pending_requests(self) -> bool:
        self._poll()
        return bool(super().has_pending_requests() or self._sending)

    def schedule_batch(self, token_budget: int, cache_budget: int) -> Any:
        self._poll()
        return _or_wait(self, super().schedule_batch(token_budget, cache_budget), bool(self._sending))

    def finish_request(self, request_id: str) -> None:
        state = self.active_requests.pop(request_id, None)
        finished = state is not None and state.status.name == "FINISHED"
        if request_id in self._sending:
            log.warning("request %s was not sent: another one of this name is being sent", request_id)
        elif finished and not state.generated_tokens:
            pass  # preempted, which frees its blocks: it is computed, and sent, later
        elif finished and len(state.initial_tokens) > 1:
            self._send(request_id, len(state.initial_tokens) - 1)
            return
        else:
            self._kv.cancel(request_id, decline=True)
        self.cache.free_blocks(request_id)

    def clear_cancelled_requests(self) -> Any:
        with self._cancellation_lock:
            here = self._requests_to_cancel & self._sending.keys()
            self._requests_to_cancel -= here
            dropped = set(self._requests_to_cancel)
        for request_id in here:
            self._give_up(request_id)
        for request_id in dropped:
            self._kv.cancel(request_id, decline=True)
        return super().clear_cancelled_requests()

    def _send(self, request_id: str, tokens: int) -> None:
        pages = self._allocator.block_table[request_id][: -(-tokens // self._allocator.tokens_per_page)]
        try:
            self._kv.send_pages(request_id, pages, None, origin="prompt")
            self._sending[request_id] = self._kv.finish(request_id, None)
            self._pages[request_id] = len(pages)
        except KVError as error:
            log.warning("request %s was not sent: %s", request_id, error)
            self._give_up(request_id)

    def _give_up(self, request_id: str) -> None:
        """Its blocks are kept until nothing reads them."""
        self._pages.pop(request_id, None)
        self._sending[request_id] = self._kv.cancel(request_id)

    def _poll(self) -> None:
        for request_id, work in list(self._sending.items()):
            if not work.is_completed():
                continue
            if (error := work.exception()) is not None:
                log.warning("request %s was not sent: %s", request_id, error)
                self._give_up(request_id)
            else:
                self._endpoint.count(self._pages.pop(request_id, 0))
                del self._sending[request_id]
                self.cache.free_blocks(request_id)


# ---------------------------------------------------------------------- decode


@dataclass(slots=True)
class _Arrival:
    """A request whose prompt comes from elsewhere. It waits among ``waiting_requests``, but not in their order."""

    state: Any
    connecting: Future[str] | None = None
    work: KVWork | None = None
    error: Exception | None = None  # before anything was granted
    ended: bool = False  # transformers does not want it any more


class _DecodeScheduler(FIFOScheduler):
    def __init__(self, endpoint: Endpoint, source: Callable[[str], str], **arguments: Any) -> None:
        self._arrivals: dict[str, _Arrival] = {}
        self._endpoint = endpoint
        super().__init__(**arguments)
        if self.cache.use_prefix_sharing:
            raise LayoutMismatch("torchkv receives into blocks of one request; set allow_block_sharing=False")
        self._source = source
        self._kv = endpoint.join(self.cache)
        (self._allocator,) = self.cache.cache_allocators.values()

    def add_waiting_request(self, state: Any) -> None:
        comes_back = state.is_cpu_offloaded or state._true_initial_tokens or state.generated_tokens
        if comes_back or len(state.initial_tokens) < 2 or state.request_id in self._arrivals:
            super().add_waiting_request(state)
            return
        self.waiting_requests[state.request_id] = state
        self._arrivals[state.request_id] = _Arrival(state)

    def has_pending_requests(self) -> bool:
        self._poll()
        return bool(super().has_pending_requests() or self._arrivals)

    def schedule_batch(self, token_budget: int, cache_budget: int) -> Any:
        self._poll()
        return _or_wait(self, super().schedule_batch(token_budget, cache_budget), bool(self._arrivals))

    def clear_cancelled_requests(self) -> Any:
        with self._cancellation_lock:
            here = self._requests_to_cancel & self._arrivals.keys()
            self._requests_to_cancel -= here
        states = [self.waiting_requests.pop(name) for name in here if name in self.waiting_requests]
        return states + super().clear_cancelled_requests()

    def _poll(self) -> None:
        for request_id, arrival in list(self._arrivals.items()):
            if not arrival.ended and self.waiting_requests.get(request_id) is not arrival.state:
                arrival.ended = True
                self._drop(request_id, arrival)
            self._advance(request_id, arrival)
            if self._is_over(arrival):
                del self._arrivals[request_id]
                self._admit(request_id, arrival)

    def _advance(self, request_id: str, arrival: _Arrival) -> None:
        """Connects, then allocates and grants; nothing here waits."""
        if arrival.ended or arrival.error is not None or arrival.work is not None:
            return
        tokens = len(arrival.state.initial_tokens) - 1
        try:
            if arrival.connecting is None:
                arrival.connecting = self._connected(request_id)
            if not arrival.connecting.done() or not self.cache.can_store_request_tokens(arrival.state, tokens):
                return
            pages = self._allocator.block_table[request_id]
            arrival.work = self._kv.recv_pages(request_id, pages, arrival.connecting.result())
        except KVError as error:
            arrival.error = error

    def _connected(self, request_id: str) -> Future[str]:
        address = self._source(request_id)
        for name, peer in self._kv.peers().items():
            if peer.here and peer.address == address:
                known: Future[str] = Future()
                known.set_result(name)
                return known
        return self._kv.connect(address)

    def _drop(self, request_id: str, arrival: _Arrival) -> None:
        """Aborts it. Its blocks are kept until nothing can be written to them: see `_is_over`."""
        if arrival.work is not None:
            self._kv.cancel(request_id)
        elif arrival.connecting is not None and arrival.error is None:
            arrival.connecting.add_done_callback(partial(self._refuse, request_id))

    def _refuse(self, request_id: str, connecting: Future[str]) -> None:
        try:
            self._kv.refuse(request_id, connecting.result())
        except KVError as error:
            log.warning("request %s was not refused: %s", request_id, error)

    def _is_over(self, arrival: _Arrival) -> bool:
        if arrival.work is None:
            return arrival.ended or arrival.error is not None
        if not arrival.work.is_completed():
            return False
        error = arrival.work.exception()
        return error is None or error.pages_safe

    def _admit(self, request_id: str, arrival: _Arrival) -> None:
        """It is scheduled as any other from now on: with its prompt, or without."""
        error = arrival.error if arrival.work is None else arrival.work.exception()
        if arrival.work is not None and error is None:
            self._endpoint.count(len(self._allocator.block_table[request_id]))
        if arrival.ended or error is not None:
            self.cache.free_blocks(request_id)
        if arrival.ended:
            return
        if error is None:
            state = arrival.state
            state.position_offset = len(state.initial_tokens) - 1
            state.remaining_prefill_tokens = state.initial_tokens[-1:]
        else:
            log.warning("request %s was not received, and is prefilled here: %s", request_id, error)
        self.waiting_requests_order.append(request_id)


def _or_wait(scheduler: FIFOScheduler, scheduled: Any, transfers: bool) -> Any:
    """``scheduled``; but without a batch, instead of no way to make one, if blocks come free when transfers end.

    transfers: whether there are any. Of several active requests transformers preempts one instead.
    """
    batch, *others = scheduled
    return ([], *others) if batch is None and transfers and len(scheduler.active_requests) < 2 else scheduled


def _adopted(cache: Any) -> torchkv.KVCache:
    """The blocks of a ``PagedAttentionCache`` as pages, without copying them. Raises ``LayoutMismatch``."""
    if list(cache.cache_allocators) != ["full_attention"]:
        raise LayoutMismatch(
            f"this model has layers with {', '.join(cache.cache_allocators)}; only full attention in all layers is "
            "supported so far"
        )
    (allocator,) = cache.cache_allocators.values()
    heads = allocator.num_key_value_heads
    total = getattr(cache.config, "num_key_value_heads", None) or cache.config.num_attention_heads
    if heads != total:
        raise LayoutMismatch(f"this process holds {heads} of {total} kv heads; tensor parallelism is not supported yet")
    # One flat tensor holds, block by block, K and V of each layer. A view begins at its layer's K or V.
    stride = 2 * len(allocator.layer_indices)
    views = [allocator.get_cache_for_block_table(layer) for layer in allocator.layer_indices]
    blocks = views[-1][1][::stride].shape[0]
    layout = torchkv.KVLayout.gqa(
        num_layers=len(views),
        num_kv_heads=heads,
        head_dim=allocator.head_dim,
        page_size=allocator.tokens_per_page,
        dtype=cache.dtype,
    )
    return torchkv.KVCache(
        layout, {name: [view[at][::stride][:blocks] for view in views] for at, name in enumerate("kv")}
    )
