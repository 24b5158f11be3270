"""Who gets what plain verbs send, and what prefix that rank holds: see `torchkv.group.plain`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import ref

from torchkv.cache import KVCache
from torchkv.engine.loop_progress import LoopProgress
from torchkv.group.arguments import Peers
from torchkv.group.recorded_verbs import RecordedVerbs
from torchkv.protocol.actions import ANYBODY

if TYPE_CHECKING:
    from torchkv.engine.engine import Engine
    from torchkv.engine.resident.plain_sends import Bound
    from torchkv.engine.resident.routes import Route
    from torchkv.protocol.actions import BoundGrant
    from torchkv.protocol.sending.request import SenderRequest

__all__ = ["PlainTargets", "trace"]

trace = logging.getLogger("torchkv.request")  # see `KVProcessGroup`


class PlainTargets(RecordedVerbs):
    """See the module, and `Verbs`."""

    def __init__(
        self,
        engine: Engine,
        cache: KVCache | None,
        *,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(engine)
        self.cache = cache
        self.forced_path = engine.options.forced_path
        self._layout = None if cache is None else cache.layout
        self._stateful = cache is not None and cache.layout.stateful
        self._num_slots = 0 if cache is None else cache.num_slots
        layers = () if cache is None else cache.layout.layers
        self._plain_layers: dict[int | None, tuple[int, ...]] = {None: layers, **{layer: (layer,) for layer in layers}}
        self._wake = wake
        self._sync_words = None if engine.gpu is None else engine.gpu.sync_words
        self.clock = clock
        # For works that the resident loop completes.
        self._loop: ref[LoopProgress] | None = None if engine.flows is None else ref[LoopProgress](engine)

    def _targets(self, request: str, dst: Peers | None) -> tuple[int, ...]:
        """The ranks that a request goes to: of the instance that is named, or who has granted it; () if not known."""
        if type(dst) is int:
            return (dst,)
        if dst is None:
            return self.engine.sender.requests.addressed.get(request, ())
        return self.engine.group_map.of(request).known_targets(dst) if isinstance(dst, str) else ()

    def granted_plain(self, request: str, dst: Peers | None) -> int | None:
        """What `granted` returns for a request to one receiver, if `prefix_of` says it."""
        engine, flows = self.engine, self.engine.flows
        if type(request) is not str or self._layout is None or flows is None or trace.isEnabledFor(logging.DEBUG):
            return None
        ranks = self._targets(request, dst)
        if not ranks and dst is None:
            with engine.lock:
                ranks = self._address(request)
        if len(ranks) != 1:
            return None
        (rank,) = ranks
        if not flows.plain.has_served(rank) and engine.group_map.known_targets(rank) != ranks:
            return None
        with engine.lock:
            return self.prefix_of(request, rank)

    def prefix_of(self, request: str, rank: int) -> int | None:
        """The prefix that ``rank`` holds, in tokens, if its grant is known, or there: then it binds the request.

        None, and nothing is done, if there is none, or anything stands against it. Under the engine's lock.
        """
        engine, flows, now = self.engine, self.engine.flows, self.clock()
        if flows is None or self.forced_path is not None or engine.closed or engine.lost:
            return None
        grants, req = engine.sender.grants, engine.sender.requests.by_key.get((request, rank))
        if req is not None and (req.grant is not None or req.error is not None):
            return None if req.grant is None or req.error is not None else req.grant.held_tokens
        if not (grants.awaits(request, rank) if req is None else grants.expects(req)):
            return None
        bound = flows.plain.bind(request, rank, now if req is None else req.begun_at)
        if bound is None:
            return None
        grant, flow, route = bound
        if req is None:
            req = grants.begin(grant, now)
        else:
            grants.bind_expected(req, grant, now)
        self._bound(req, grant, flow, route)
        if engine.needs_driver:
            engine.wake()
        return grant.held_tokens

    def _address(self, request: str) -> tuple[int, ...]:
        """Binds a request to anybody that begins now, if Python has left its grants to that. The ranks that it goes to.

        () and nothing is done, if one is missing, or anything stands against it. Under the engine's lock.
        """
        engine, flows = self.engine, self.engine.flows
        if flows is None or (request, ANYBODY) in engine.sender.requests.by_key:  # it waits: who asks again is quick
            return ()
        if (rank := flows.plain.whose(request)) is None:
            return ()
        ranks = engine.sender.grants.addresses(request, rank)
        if not (bound := self._bind_all(request, ranks)):
            return ()
        for grant, flow, route in bound:
            self._bound(engine.sender.grants.begin(grant, self.clock()), grant, flow, route)
        engine.sender.requests.addressed[request] = ranks
        if engine.needs_driver:
            engine.wake()
        return ranks

    def _bound(self, req: SenderRequest, grant: BoundGrant, flow: int, route: Route) -> None:
        """The request is bound to its grant, and no verb was called of it yet."""
        assert self.engine.flows is not None
        self.engine.flows.plain.opened(req, flow, route)
        self.engine.sender.grants.leave_loop(req, grant, self.clock())

    def _bind_all(self, request: str, ranks: tuple[int, ...]) -> list[Bound]:
        """A flow for each rank's grant of a request of which no verb was called yet, if Python has left all of them to
        their verb; else none. They are begun, or released. Under the lock.
        """
        engine, flows, now = self.engine, self.engine.flows, self.clock()
        assert flows is not None
        if engine.closed or engine.lost or self.forced_path is not None:
            return []
        if not all(engine.sender.grants.awaits(request, rank) for rank in ranks):
            return []
        bound: list[Bound] = []
        for rank in ranks:
            if (one := flows.plain.bind(request, rank, now)) is None:
                self._release(bound)
                return []
            bound.append(one)
        return bound

    def _release(self, bound: list[Bound]) -> None:
        """Python takes these grants in, whose requests have not begun."""
        flows = self.engine.flows
        assert flows is not None
        for grant, flow, _ in bound:
            flows.core.sends.end(flow)
            self.engine.sender.grants.meet(grant, self.clock())
