"""The KV verbs of one rank: what `KVProcessGroup` offers beyond c10d, usable without c10d in tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import ref

import numpy as np

from torchkv import arguments, gate
from torchkv.arguments import Layers, Pages, Peers
from torchkv.cache import KVCache
from torchkv.devicepages import DevicePages
from torchkv.engine import Engine
from torchkv.env import Options, seconds
from torchkv.errors import KVError, LayoutMismatch, PageOutOfRange, PeerLost, ProtocolError, TransferTimeout
from torchkv.layerwait import layer_wait
from torchkv.layout import KVLayout
from torchkv.mover import SendPayload
from torchkv.progress import Waker
from torchkv.protocol.actions import SendOp
from torchkv.transport import Int64Array
from torchkv.work import KVWork

__all__ = ["KVEndpoint", "Peers"]


class KVEndpoint:
    """The verbs, over an engine that something else drives. All methods are thread-safe."""

    _options: Options
    _forced: str | None  # Options.forced_path
    _engine: Engine | None
    _cache: KVCache | None
    _waker: Waker | None

    # ------------------------------------------------------------------ receiver

    def recv_pages(
        self,
        request: str,
        pages: Pages,
        src: Peers,
        *,
        prefix_tokens: int = 0,
        state_slot: int | None = None,
        timeout: float | timedelta | None = None,
    ) -> KVWork:
        """Grants ``pages`` to a request and returns the work that completes when all of it is in them.

        request: non-empty, at most 128 bytes in UTF-8. pages: own page ids, in order of position after the prefix.
        src: a group rank, a list of them, or an instance name. prefix_tokens: tokens this rank already holds.
        state_slot: own slot that gets the request's state, if the layout has any. timeout: one total deadline, in
        seconds, instead of ``Options.grant_timeout`` and ``Options.timeout``.

        Raises ``PageOutOfRange`` (repeated, out of range, leased or quarantined), ``LayoutMismatch`` (``src`` does
        not hold every byte this rank does), ``ProtocolError`` (name in use, bad argument), ``PeerLost``.
        """
        engine, layout = self._registered("recv_pages")
        request = arguments.as_request(request)
        what = f"recv_pages({request!r})"
        work = KVWork(what, flags=engine.flags)
        work._expect(1)
        try:
            array = arguments.as_pages(pages, num_pages=engine.roster.me.num_pages, what=what)
            if type(prefix_tokens) is not int or prefix_tokens:
                prefix_tokens = arguments.as_count(prefix_tokens, what=what, name="prefix_tokens")
            total = None if timeout is None else seconds(timeout, f"{what}: timeout")
            slot = self._checked_slot(what, state_slot, layout)
            stateful = layout.stateful
            if slot is None and stateful:
                raise ProtocolError(f"{what}: this layout has state; give state_slot, the slot that it goes to")
            ranks = engine.roster.resolve(src, what, "src")
            if (gap := engine.roster.gap(ranks, engine.roster.rank)) is not None:
                raise LayoutMismatch(f"{what}: {gap}; name every rank that holds a part in src")
            now = self._now()
            with engine.lock:
                if engine.closed:
                    self._check_open(engine, what)
                if engine.lost:
                    self._check_alive(engine, engine.roster.contributing(ranks, engine.roster.rank), what)
                receive = engine.receiver.post(
                    request,
                    array,
                    ranks,
                    prefix_tokens=prefix_tokens,
                    state_slot=slot if stateful else None,
                    total=total,
                    ticket=work,
                    now=now,
                )
                frames = engine.hurry(now)
        except KVError as error:
            with engine.lock:
                engine.receiver.refuse(request, error)
            self._wake()
            raise
        engine.say(frames)
        work._pages_safe = lambda: receive.ended
        work._layer = partial(layer_wait, ref(engine), receive)
        self._wake()
        return work

    # ------------------------------------------------------------------ sender

    def send_layer(
        self, request: str, layer: int, pages: Pages, dst: Peers, *, start: int = 0, event: Any = None
    ) -> KVWork:
        """Sends one layer to a destination whose layout matches page for page.

        layer: global id. Otherwise as `send_pages`. Raises ``LayoutMismatch`` if heads, page size or order differ.
        """
        arguments.check_one_layer("send_layer", request, layer)
        return self._send("send_layer", request, layer, pages, dst, start, event, page_for_page=True)

    def send_slice(
        self, request: str, layers: Layers, pages: Pages, dst: Peers, *, start: int = 0, event: Any = None
    ) -> KVWork:
        """Sends only the bytes that both sides hold, for any pair of layouts. Otherwise as `send_pages`."""
        return self._send("send_slice", request, layers, pages, dst, start, event)

    def staged_put(
        self, request: str, layers: Layers, pages: Pages, dst: Peers, *, start: int = 0, event: Any = None
    ) -> KVWork:
        """Sends through staging memory: gathered here, put in bulk into the receiver's ring, scattered there.

        Whatever becomes of this rank, nothing of it can land on the receiver's pages once the request has failed. The
        work completes when the bytes are visible in the receiver's ring; ``work.wait_source()`` returns as soon as
        they are gathered. Otherwise as `send_pages`. Fails with ``RingExhausted`` if the receiver's ring stays full
        for ``Options.timeout``. A destination that is this rank itself is copied to directly.
        """
        return self._send("staged_put", request, layers, pages, dst, start, event, staged=True)

    def send_pages(
        self,
        request: str,
        pages: Pages,
        dst: Peers,
        *,
        layers: Layers = None,
        start: int = 0,
        event: Any = None,
    ) -> KVWork:
        """Sends pages to any destination, on the path that costs least. Never blocks.

        pages: own page ids in order of position. dst: a group rank, a list of them, or an instance name.
        layers: a global id, several, or None for all held. start: how many own pages after the receiver's prefix
        the first of ``pages`` lies. event: a recorded ``torch.cuda.Event``, or any object with ``query() -> bool``,
        that says when the pages may be read; None means the current CUDA stream as it is now (on a host: now).
        Page ids in a CUDA tensor are read in stream order and must stay unchanged until the work is done.

        The work completes when the bytes are visible in the receiver's pages and the source may be overwritten.
        Raises ``PageOutOfRange``, ``ProtocolError``, the error of an earlier failure of this request.
        """
        return self._send("send_pages", request, layers, pages, dst, start, event)

    def send_state(self, request: str, layer: int, state_slot: int, dst: Peers, *, event: Any = None) -> KVWork:
        """Sends a layer's state as soon as it is final: all states that ``layer`` has, from slot ``state_slot``.

        layer: global id; of a layer without state nothing moves. dst, event: as for `send_pages`, also when the work
        completes and what is raised. What was not sent like this, ``finish(state_slot=)`` sends.
        """
        arguments.check_one_layer("send_state", request, layer)
        return self._send_state(request, layer, state_slot, dst, event)

    def _send_state(self, request: str, layers: Layers, state_slot: int, dst: Peers, event: Any) -> KVWork:
        engine, layout = self._registered("send_state")
        request = arguments.as_request(request)
        what = f"send_state({request!r})"
        held = arguments.as_layers(layers, layout, what=what)
        slot = self._checked_slot(what, state_slot, layout)
        if slot is None:
            raise ProtocolError(f"{what}: state_slot=None; give the slot that holds the request's state")
        ranks = engine.roster.targets(dst, what)
        payload = self._slot_payload(engine, slot, ranks, event, what)
        work = KVWork(what, flags=engine.flags)
        with engine.lock:
            self._check_open(engine, what)
            for rank in ranks:
                engine.sender.admit(request, rank, 0, 1, state=True)
            self._check_alive(engine, ranks, what)
            work._expect(len(ranks))
            for rank in ranks:
                self._submit_state(engine, request, rank, held, work, payload)
        self._wake()
        return work

    def finish(self, request: str, dst: Peers, *, aux: bytes = b"", state_slot: int | None = None) -> KVWork:
        """Seals the request: nothing more will be sent. The work succeeds when every ``dst`` has succeeded.

        aux: at most 64 KiB, delivered as ``rx.aux``. state_slot: own slot with the state of all layers of which
        `send_state` has not sent it; it is read as ``send_pages`` reads pages, behind the current CUDA stream. Raises
        ``ProtocolError`` naming the first layer and page, or state, that is owed and was not sent; the request then
        stays open.
        """
        engine, layout = self._registered("finish")
        request = arguments.as_request(request)
        what = f"finish({request!r})"
        data = arguments.as_aux(aux, what=what)
        slot = self._checked_slot(what, state_slot, layout)
        owed = engine.roster.targets(dst, what)
        payload = None if slot is None else self._slot_payload(engine, slot, owed, None, what)
        work = KVWork(what, flags=engine.flags)
        with engine.lock:
            if engine.closed:
                self._check_open(engine, what)
            for rank in owed:
                engine.sender.check_finish(request, rank, state_slot=slot)
            if engine.lost:
                self._check_alive(engine, owed, what)
            left: dict[int, tuple[int, ...]] = {}
            if payload is not None:
                left = {rank: held for rank in owed if (held := engine.sender.state_left(request, rank))}
            work._expect(len(owed) + len(left))
            for rank in owed:
                if payload is not None and rank in left:
                    self._submit_state(engine, request, rank, left[rank], work, payload)
                engine.sender.finish(request, rank, aux=data, ticket=work, now=self._now())
        self._wake()
        return work

    def prefix_tokens(self, request: str, dst: Peers) -> int:
        """Tokens that the receiver already holds. Blocks until it has granted, or raises ``TransferTimeout``."""
        engine, _ = self._registered("prefix_tokens")
        request = arguments.as_request(request)
        what = f"prefix_tokens({request!r})"
        ranks = engine.roster.targets(dst, what)
        if not ranks:
            raise LayoutMismatch(f"{what}: this rank holds nothing that {dst!r} holds, so no grant will come")
        deadline = time.monotonic() + min(self._options.grant_timeout, threading.TIMEOUT_MAX)
        with engine.lock:
            self._check_open(engine, what)
            for rank in ranks:
                engine.sender.begin(request, rank, self._now())
            self._check_alive(engine, ranks, what)
            self._wake()
            while True:
                self._check_open(engine, what)
                known = [engine.sender.prefix_tokens(request, rank) for rank in ranks]
                if None not in known:
                    if len(ranks) > 1:
                        engine.sender.check_prefixes(request, ranks)
                    return int(known[0] or 0)
                if not engine.changed.wait(deadline - time.monotonic()):
                    raise TransferTimeout(
                        f"{what}: rank {ranks[known.index(None)]} has not posted recv_pages within "
                        f"{self._options.grant_timeout:g} s (Options.grant_timeout); cancel the request or wait again"
                    )

    # ------------------------------------------------------------------ either side

    def cancel(self, request: str) -> KVWork:
        """Fails the request here and at its peers. Idempotent; does nothing for an ended or unknown request.

        The work completes when nothing of the request can land any more: on a receiver when every writer has
        drained, on a sender when this rank's own writes have.
        """
        engine = self._joined("cancel")
        request = arguments.as_request(request)
        work = KVWork(f"cancel({request!r})")
        with engine.changed:
            if engine.closed:  # every request ended with the group
                work._expect(0)
                return work
            pending = engine.sender.cancel(request, work, self._now()) + engine.receiver.cancel(request, work)
            work._expect(len(pending))
            engine.changed.notify_all()
        self._wake()
        return work

    def quarantined(self, *, slots: bool = False) -> dict[int, tuple[int, ...]]:
        """Pages, or state ``slots``, of failed requests that may still be written to -> the group ranks that may."""
        engine = self._joined("quarantined")
        with engine.lock:
            leases = engine.receiver.leases
            return leases.quarantined_slots() if slots else leases.quarantined()

    # ------------------------------------------------------------------ inside

    def _send(
        self,
        verb: str,
        request: str,
        layers: Layers,
        pages: Pages,
        dst: Peers,
        start: int,
        event: Any,
        *,
        page_for_page: bool = False,
        staged: bool = False,
    ) -> KVWork:
        # The caller's critical path: what is plain already is not looked at by a function.
        engine, layout = self._registered(verb)
        request = arguments.as_request(request)
        what = f"{verb}({request!r})"
        device = engine.device
        ids: Int64Array | DevicePages
        if device is None:
            ids = arguments.as_pages(pages, num_pages=engine.roster.me.num_pages, what=what)
        else:
            gate.refuse_capture(what, device.index)
            ids = arguments.as_send_pages(pages, num_pages=engine.roster.me.num_pages, device=device, what=what)
        held = arguments.as_layers(layers, layout, what=what)
        if type(start) is not int or start:
            start = arguments.as_count(start, what=what, name="start")
        ready = event if event is None else arguments.as_event(event, what=what)
        ranks = engine.roster.targets(dst, what)
        if page_for_page and ranks not in engine.whole_pages:
            self._check_page_for_page(engine, ranks, what, "use send_slice or send_pages")
            if len(ranks) == 1:
                engine.whole_pages.add(ranks)
        forced = "staged" if staged else self._forced
        if forced is not None:
            self._check_forced_path(engine, ranks, what, forced)
        # Page ids on the GPU bring an event of their own, behind the same stream.
        if device is not None and ready is None and not isinstance(ids, DevicePages):
            ready = device.record_gate()
        work = KVWork(what) if device is None else KVWork(what, flags=device.flags)
        # One payload and one record of prefixes for all destinations: nobody changes the former.
        payload = SendPayload(ids, ready, forced)
        prefixes: dict[int, int] = {}
        num_pages = len(ids)
        sender = engine.sender
        now = self._now()
        with engine.lock:
            if engine.closed:
                self._check_open(engine, what)
            for rank in ranks:  # first: a tombstone repeats its own error
                sender.admit(request, rank, start, num_pages)
            if engine.lost:
                self._check_alive(engine, ranks, what)
            if len(ranks) > 1:
                sender.check_prefixes(request, ranks)
            work._expect(len(ranks))
            for rank in ranks:
                sender.submit(SendOp(request, rank, prefixes, held, start, num_pages, work, payload), now)
        self._wake()
        return work

    def _joined(self, verb: str) -> Engine:
        if self._engine is None:
            raise ProtocolError(
                f"{verb}: no cache is registered; call register(cache) on every rank of the group first"
            )
        return self._engine

    def _registered(self, verb: str) -> tuple[Engine, KVLayout]:
        engine, cache = self._engine or self._joined(verb), self._cache
        if cache is None:
            raise ProtocolError(f"{verb}: this rank registered no cache; pass one to register()")
        return engine, cache.layout

    def _check_open(self, engine: Engine, what: str) -> None:
        if engine.closed:
            raise ProtocolError(f"{what}: {engine.closed}")

    def _check_alive(self, engine: Engine, ranks: Sequence[int], what: str) -> None:
        for rank in ranks:
            if rank in engine.lost:
                raise PeerLost(f"{what}: {engine.lost[rank]}; use another rank, or make a new group")

    def _check_page_for_page(self, engine: Engine, ranks: Sequence[int], what: str, advice: str) -> None:
        for rank in ranks:
            if not engine.roster.page_for_page(rank):
                raise LayoutMismatch(
                    f"{what}: {advice}: the pages of this rank and of rank {rank} differ in heads, page size or order, "
                    f"so whole pages cannot be sent"
                )

    def _check_forced_path(self, engine: Engine, ranks: tuple[int, ...], what: str, forced: str) -> None:
        if forced == "runs":
            self._check_page_for_page(engine, ranks, what, f"leave Options.path unset, it is {forced!r}")
        for rank in ranks:
            route = engine.routes.get(rank)  # not made yet towards siblings; then the transfer itself finds out
            if route is not None:
                route.path(forced=forced, page_for_page=True)

    def _checked_slot(self, what: str, state_slot: int | None, layout: KVLayout) -> int | None:
        if state_slot is None:
            return None
        if not layout.states:
            raise ProtocolError(f"{what}: state_slot={state_slot!r}, but this layout has no state; leave it out")
        assert self._cache is not None
        slot = arguments.as_count(state_slot, what=what, name="state_slot")
        if layout.stateful and slot >= self._cache.num_slots:  # of no use elsewhere: a stage without such layers
            raise PageOutOfRange(f"{what}: state_slot={slot} is outside this cache's [0, {self._cache.num_slots})")
        return slot

    def _slot_payload(self, engine: Engine, slot: int, ranks: tuple[int, ...], event: Any, what: str) -> SendPayload:
        """What sends the slot once its state is final: it has one id, as a page has."""
        device, forced = engine.device, self._forced
        ready = arguments.as_event(event, what=what)
        if forced not in (None, "runs"):  # what is cut unlike on both sides goes in slices even so
            self._check_forced_path(engine, ranks, what, forced)
        if device is not None:
            gate.refuse_capture(what, device.index)
            ready = device.record_gate() if ready is None else ready
        return SendPayload(np.array([slot], dtype=np.int64), ready, forced)

    def _submit_state(
        self, engine: Engine, request: str, rank: int, layers: tuple[int, ...], work: KVWork, payload: SendPayload
    ) -> None:
        engine.sender.submit(SendOp(request, rank, {}, layers, 0, 1, work, payload, state=True), self._now())

    def _now(self) -> float:
        return time.monotonic()

    def _wake(self) -> None:
        if self._waker is not None:
            self._waker.wake()
