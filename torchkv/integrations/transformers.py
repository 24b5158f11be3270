"""torchkv under the continuous batching of transformers: one process prefills, another one decodes.

Each side registers a scheduler, by `prefill` or `decode`, and names it in its ``ContinuousBatchingConfig``. Requests
have the same ``request_id`` on both sides, which nobody else uses meanwhile. See docs/integrations.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from packaging.version import Version
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler

import torchkv
from torchkv.errors import KVError, LayoutMismatch, TransferCancelled
from torchkv.integrations.arrivals import Arrival
from torchkv.integrations.departures import Departure, Departures, transfer_name

if TYPE_CHECKING:
    from torchkv.group.join import KVMember

__all__ = ["OLDEST", "Endpoint", "decode", "prefill"]

OLDEST = "5.19"  # whose pages and scheduler are as they are used here
_found = version("transformers")
if Version(_found) < Version(OLDEST):
    raise ImportError(
        f"torchkv needs transformers {OLDEST} or later for its continuous batching, and finds {_found}: "
        f"pip install 'transformers>={OLDEST}'"
    )

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

    source: the address of that instance, given a request id. It is called on the thread that generates, and may
    raise a ``KVError``. Requests that cannot be received are prefilled here. Needs ``allow_block_sharing=False``.
    """
    endpoint = Endpoint(instance, options)
    SCHEDULER_MAPPING[endpoint.scheduler] = partial(_DecodeScheduler, endpoint, source)
    return endpoint


# ---------------------------------------------------------------------- prefill


class _PrefillScheduler(FIFOScheduler):
    def __init__(self, endpoint: Endpoint, **arguments: Any) -> None:
        self._sending: dict[str, tuple[Departure, int]] = {}  # request id -> and pages
        self._endpoint = endpoint
        super().__init__(**arguments)
        self._departures = Departures(endpoint.join(self.cache))
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
            self._departures.decline(transfer_name(request_id))
        self.cache.free_blocks(request_id)

    def clear_cancelled_requests(self) -> Any:
        with self._cancellation_lock:
            here = self._requests_to_cancel & self._sending.keys()
            self._requests_to_cancel -= here
            dropped = set(self._requests_to_cancel)
        for request_id in here:
            self._sending[request_id][0].fail(TransferCancelled("it was cancelled where it is prefilled"))
        for request_id in dropped:
            self._departures.decline(transfer_name(request_id))
        return super().clear_cancelled_requests()

    def _send(self, request_id: str, tokens: int) -> None:
        pages = self._allocator.block_table[request_id][: -(-tokens // self._allocator.tokens_per_page)]
        departure = Departure(self._departures, transfer_name(request_id))
        assert departure.has_name(), "requests that are being sent have names of their own"
        departure.send(pages)
        departure.finish()
        self._sending[request_id] = departure, len(pages)

    def _poll(self) -> None:
        """Blocks are kept until nothing reads them."""
        for request_id, (departure, pages) in list(self._sending.items()):
            if departure.advance():
                self._endpoint.count(0 if departure.error else pages)
                del self._sending[request_id]
                self.cache.free_blocks(request_id)


# ---------------------------------------------------------------------- decode


class _Incoming:
    """A request whose prompt comes from elsewhere. It waits among ``waiting_requests``, but not in their order."""

    def __init__(self, state: Any, arrival: Arrival) -> None:
        self.state, self.arrival = state, arrival
        self.ended = False  # transformers does not want it any more


class _DecodeScheduler(FIFOScheduler):
    def __init__(self, endpoint: Endpoint, source: Callable[[str], str], **arguments: Any) -> None:
        self._incoming: dict[str, _Incoming] = {}
        self._endpoint = endpoint
        super().__init__(**arguments)
        if self.cache.use_prefix_sharing:
            raise LayoutMismatch("torchkv receives into blocks of one request; set allow_block_sharing=False")
        self._source = source
        self._kv = endpoint.join(self.cache)
        (self._allocator,) = self.cache.cache_allocators.values()

    def add_waiting_request(self, state: Any) -> None:
        comes_back = state.is_cpu_offloaded or state._true_initial_tokens or state.generated_tokens
        if comes_back or len(state.initial_tokens) < 2 or state.request_id in self._incoming:
            super().add_waiting_request(state)
            return
        self.waiting_requests[state.request_id] = state
        name = transfer_name(state.request_id)
        try:
            arrival = Arrival.at(self._kv, name, self._source(state.request_id))
        except KVError as error:  # of ``source``
            arrival = Arrival.failed(self._kv, name, error)
        self._incoming[state.request_id] = _Incoming(state, arrival)

    def has_pending_requests(self) -> bool:
        self._poll()
        return bool(super().has_pending_requests() or self._incoming)

    def schedule_batch(self, token_budget: int, cache_budget: int) -> Any:
        self._poll()
        return _or_wait(self, super().schedule_batch(token_budget, cache_budget), bool(self._incoming))

    def clear_cancelled_requests(self) -> Any:
        with self._cancellation_lock:
            here = self._requests_to_cancel & self._incoming.keys()
            self._requests_to_cancel -= here
        states = [self.waiting_requests.pop(name) for name in here if name in self.waiting_requests]
        return states + super().clear_cancelled_requests()

    def _poll(self) -> None:
        for request_id, incoming in list(self._incoming.items()):
            arrival, state = incoming.arrival, incoming.state
            if not incoming.ended and self.waiting_requests.get(request_id) is not state:
                incoming.ended = True
                arrival.cancel()
            tokens = len(state.initial_tokens) - 1
            if not incoming.ended and arrival.is_connected() and self.cache.can_store_request_tokens(state, tokens):
                arrival.grant(self._allocator.block_table[request_id])
            if arrival.is_over:  # until then its blocks are kept: somebody may write to them
                del self._incoming[request_id]
                self._admit(request_id, incoming)

    def _admit(self, request_id: str, incoming: _Incoming) -> None:
        """It is scheduled as any other from now on: with its prompt, or without."""
        arrival, state = incoming.arrival, incoming.state
        if arrival.error is None:
            self._endpoint.count(len(self._allocator.block_table[request_id]))
        if incoming.ended or arrival.error is not None:
            self.cache.free_blocks(request_id)
        if incoming.ended:
            return
        if (error := arrival.error) is None:
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
