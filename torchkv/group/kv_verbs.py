"""`KVVerbs`: the KV verbs as users call them, of whatever has registered a cache. `current`: what functions act on."""

from __future__ import annotations

import os
import weakref
from abc import abstractmethod
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist

from torchkv.engine.work import KVWork
from torchkv.errors import KVError, ProtocolError
from torchkv.group.arguments import Layers, Origin, Pages, Peers, StateSlot
from torchkv.group.explain import Explanation, explain
from torchkv.group.layer_groups import GroupedVerbs
from torchkv.group.reports.observation import Observation
from torchkv.group.reports.snapshot import stats
from torchkv.group.verbs import Verbs

if TYPE_CHECKING:
    from torchkv.cache import KVCache
    from torchkv.engine.joining.registration import Registration
    from torchkv.engine.progress import ProgressThread
    from torchkv.group.bring_up import Running
    from torchkv.observe.stats import Stats

__all__ = ["KVVerbs", "current"]


class KVVerbs:
    """The KV verbs of one rank: see `KVProcessGroup` and `KVMember`, which have them. Thread-safe."""

    def __init__(self) -> None:
        self._verbs: Verbs | None = None  # while verbs may be called
        self._thread: ProgressThread | None = None
        self._registration: Registration | None = None
        self._observation: Observation | None = None
        self._notes: list[str] = []  # for explain
        self._forked = False  # whether this process is a forked child of the one that made this
        _all.add(self)

    def _attach(self, running: Running, cache: KVCache | None, *, name: str) -> None:
        """From now on verbs may be called. name: of the group, for metrics. Raises ``TransportUnavailable``."""
        self._thread, self._registration = running.thread, running.registration
        made = GroupedVerbs if cache is not None and cache.layout.groups else Verbs
        verbs = made(running.engine, cache, wake=running.thread.waker.wake)
        try:
            self._observation = Observation(verbs, group=name)
        except KVError:
            self._stop()
            raise
        self._verbs = verbs

    def _stop(self) -> None:
        """Fails what is pending, and ends the thread. Idempotent."""
        if self._observation is not None:
            self._observation.close()
        if self._thread is not None:
            assert self._registration is not None
            self._thread.stop()
            self._thread = None
            self._registration.release()

    @abstractmethod
    def _unregistered(self, verb: str) -> NoReturn:
        """Raises ``ProtocolError``, with the reason why there are no verbs."""

    def _refuse_fork(self, verb: str, owner: str) -> None:
        if self._forked:
            raise ProtocolError(
                f"{verb}: this process was forked from {owner}, and only {owner} itself can use its group; start "
                "processes with the method 'spawn', or make a group of their own in them"
            )

    # ------------------------------------------------------------------ verbs of a receiver

    def recv_pages(
        self,
        request: str,
        pages: Pages,
        src: Peers,
        *,
        prefix_tokens: int = 0,
        state_slot: StateSlot = None,
        timeout: float | timedelta | None = None,
    ) -> KVWork:
        """Grants ``pages`` to a request. The work completes when all bytes, state and aux of the request have arrived.

        request: the request's name, a str of 1 to 1,024 bytes in UTF-8.
        pages: page ids of this rank's cache, int [n], in order of position; the first one follows the prefix. If the
        layout has layer groups, ``{group: page ids}``, equally long; -1 stands for a page before every window of its
        group that this rank does not hold.
        src: the writers: a group rank, a list of ranks, or an instance name.
        prefix_tokens: tokens of the prompt that this rank already holds, a multiple of every writer's page size.
        state_slot: slot of this rank's cache that receives the request's state; required if the layout has state.
        ``{group: slot}`` if several layer groups have state.
        timeout: one deadline in seconds for the whole request, instead of ``Options.grant_timeout`` and
        ``Options.timeout``.

        Raises ``PageOutOfRange`` (an id repeated, out of range, leased or quarantined), ``LayoutMismatch`` (the ranks
        of ``src`` together do not hold every byte of this rank), ``ProtocolError`` (the request is being received
        already, or an argument is wrong), ``PeerLost``.
        """
        verbs = self._verbs or self._unregistered("recv_pages")
        return verbs.recv_pages(
            request, pages, src, prefix_tokens=prefix_tokens, state_slot=state_slot, timeout=timeout
        )

    def refuse(self, request: str, src: Peers) -> None:
        """Says that this rank will not post ``recv_pages`` for the next request of this name: it fails at its senders.

        Their verbs fail with ``TransferCancelled``, now or when they come, instead of waiting for a grant. The other
        ranks of this instance fail too. Use the name again only when the senders have failed. Raises
        ``ProtocolError`` if the request is posted (`cancel` it then), and ``PeerLost``.
        """
        verbs = self._verbs or self._unregistered("refuse")
        verbs.refuse(request, src)

    # ------------------------------------------------------------------ verbs of a sender

    def send_pages(
        self,
        request: str,
        pages: Pages,
        dst: Peers | None,
        *,
        layers: Layers = None,
        start: int = 0,
        event: Any = None,
        origin: Origin = "prefix",
    ) -> KVWork:
        """Sends pages on the path that costs least, whatever the layouts of the two sides.

        Does not block, unless ``dst`` has to be connected to first (see `KVMember`).

        request: as in the receiver's `recv_pages`.
        pages: page ids of this rank's cache, int [n], in order of position. Ids on the host are copied in the call. Ids
        in a CUDA tensor are read in the order of the current stream; leave them unchanged until the work completes. For
        layers of several layer groups ``{group: page ids}``; -1, on the host, leaves out a page before their windows.
        dst: a group rank, a list of ranks, or an instance name. None: the instance whose ranks grant the request, the
        first that does; they name this rank's whole instance in ``src``. Then pass None in all verbs of the request.
        layers: a global layer id, several, or None for all layers of this rank.
        start: the position of ``pages[0]``, in pages of this rank, counted from the end of the receiver's prefix.
        origin: ``"prompt"`` counts ``start`` from the beginning of the prompt instead, for a sender that does not know
        the prefix: what the receiver holds already is left out.
        event: says when the pages may be read: a recorded ``torch.cuda.Event``, or an object with ``query() -> bool``.
        None stands for the current CUDA stream as of this call, and for "now" if the cache lies in host memory.

        The work completes when the bytes are visible in the receiver's pages and the source pages may be overwritten.
        Raises ``PageOutOfRange``, ``ProtocolError``, ``PeerLost``, and the error with which this request failed before.
        """
        verbs = self._verbs or self._unregistered("send_pages")
        return verbs.send("send_pages", request, layers, pages, dst, start, event, origin)

    def send_layer(
        self,
        request: str,
        layer: int,
        pages: Pages,
        dst: Peers | None,
        *,
        start: int = 0,
        event: Any = None,
        origin: Origin = "prefix",
    ) -> KVWork:
        """Sends one layer between two layouts that match page for page. Otherwise as `send_pages`.

        layer: a global layer id. Raises ``LayoutMismatch`` if heads, page size or order of the two layouts differ.
        """
        verbs = self._verbs or self._unregistered("send_layer")
        return verbs.send("send_layer", request, layer, pages, dst, start, event, origin)

    def send_slice(
        self,
        request: str,
        layers: Layers,
        pages: Pages,
        dst: Peers | None,
        *,
        start: int = 0,
        event: Any = None,
        origin: Origin = "prefix",
    ) -> KVWork:
        """Sends the bytes that both sides hold, for any two layouts. Otherwise as `send_pages`."""
        verbs = self._verbs or self._unregistered("send_slice")
        return verbs.send("send_slice", request, layers, pages, dst, start, event, origin)

    def staged_put(
        self,
        request: str,
        layers: Layers,
        pages: Pages,
        dst: Peers | None,
        *,
        start: int = 0,
        event: Any = None,
        origin: Origin = "prefix",
    ) -> KVWork:
        """Sends through staging memory: gather here, one bulk put into the receiver's staging ring, scatter there.

        This rank then never writes to the receiver's pages: if the request fails, the receiver can reuse them without
        waiting for this rank. The work completes when the bytes are visible in the receiver's ring;
        ``work.wait_source()`` returns as soon as they have been gathered. Fails with ``RingExhausted`` if the ring
        stays full for ``Options.timeout``. If this rank is its own destination, the bytes are copied directly.
        Otherwise as `send_pages`.
        """
        verbs = self._verbs or self._unregistered("staged_put")
        return verbs.send("staged_put", request, layers, pages, dst, start, event, origin)

    def send_state(
        self, request: str, layer: int, state_slot: StateSlot, dst: Peers | None, *, event: Any = None
    ) -> KVWork:
        """Sends all states of one layer, as soon as they are final. A layer without state moves no bytes.

        layer: a global layer id. state_slot: the slot of this rank's cache to read; ``{group: slot}`` if several layer
        groups have state. Otherwise as `send_pages`.
        `finish` sends the states that were not sent like this, if it is given the slot.
        """
        verbs = self._verbs or self._unregistered("send_state")
        return verbs.send_state(request, layer, state_slot, dst, event=event)

    def finish(self, request: str, dst: Peers | None, *, aux: bytes = b"", state_slot: StateSlot = None) -> KVWork:
        """Seals the request: this rank sends nothing more. The work succeeds when every receiver has succeeded.

        aux: at most 64 KiB for the receiver's ``work.aux``. state_slot: the slot whose states are sent now, of all
        layers that `send_state` has not sent, or ``{group: slot}``; it is read behind the current CUDA stream.

        Raises ``ProtocolError``, naming the first layer and page, or state, that was not sent although the receiver
        awaits it; the request then stays open.
        """
        verbs = self._verbs or self._unregistered("finish")
        return verbs.finish(request, dst, aux=aux, state_slot=state_slot)

    def prefix_tokens(self, request: str, dst: Peers | None) -> int:
        """The number of tokens that the receiver already holds. Blocks until the receiver has granted the request.

        Raises ``TransferTimeout`` after ``Options.grant_timeout``, ``ProtocolError`` if the prefixes of several
        receivers differ, ``LayoutMismatch`` if this rank holds nothing that ``dst`` holds, ``PeerLost``, and the error
        with which the request failed.
        """
        verbs = self._verbs or self._unregistered("prefix_tokens")
        return verbs.prefix_tokens(request, dst)

    def granted(self, request: str, dst: Peers | None) -> int | None:
        """As `prefix_tokens`, but never blocks: None until the receiver has granted the request.

        Begins the request, as the first verb does: it fails if no grant comes within ``Options.grant_timeout``.
        """
        verbs = self._verbs or self._unregistered("granted")
        return verbs.granted(request, dst)

    def withdraw(self, request: str) -> KVWork:
        """Takes back what has been sent of an open request, as if no verb had been called: for a source that is needed
        for something else, such as the pages of a request that is preempted.

        The request goes on, with its grant if that has come: send everything again, from pages of any kind, or
        `cancel`. Works of what had not ended fail with ``TransferCancelled``. The work completes when the source may be
        overwritten. Raises ``ProtocolError`` after `finish`. Does nothing for an unknown or failed request.
        """
        verbs = self._verbs or self._unregistered("withdraw")
        return verbs.withdraw(request)

    # ------------------------------------------------------------------ verbs of either side

    def cancel(self, request: str, *, decline: bool = False) -> KVWork:
        """Fails the request here and at its peers. Idempotent; does nothing for an unknown or ended request.

        decline: this rank should have sent the request, has not begun to, and never will. Who grants it to this rank is
        told at once, if that is within ``Options.grant_timeout`` from now, instead of waiting for a first byte.

        The work completes when none of the request's writes can land any more: on a receiver once every writer has
        drained, on a sender once its own writes have. A writer that hangs never drains: ``wait()`` then raises
        ``TransferTimeout`` after ``Options.timeout``, and the pages stay in quarantine.
        """
        verbs = self._verbs or self._unregistered("cancel")
        return verbs.cancel(request, decline=decline)

    def quarantined(self, *, slots: bool = False, layer_group: str | None = None) -> dict[int, tuple[int, ...]]:
        """Pages of failed requests (or state ``slots``) -> the group ranks whose writes may still land on them.

        layer_group: those of one layer group; None: of all together. Raises ``ProtocolError`` for an unknown one.
        """
        verbs = self._verbs or self._unregistered("quarantined")
        return verbs.quarantined(slots=slots, layer_group=layer_group)

    # ------------------------------------------------------------------ reports

    def explain(self, peer: int) -> Explanation:
        """How this rank reaches ``peer``: path and link, why no better one, measured rate, bytes carried by each lane.

        peer: a group rank, or the name of an instance of one rank. Raises ``ProtocolError``, and ``TransferTimeout`` or
        ``PeerLost`` if the rate cannot be measured.
        """
        verbs = self._verbs or self._unregistered("explain")
        verbs.check_open("explain")
        assert self._thread is not None
        assert self._registration is not None
        engine = verbs.engine
        ranks = engine.group_map.resolve(peer, "explain", "peer")
        if len(ranks) != 1:
            raise ProtocolError(f"explain: peer={peer!r} names ranks {list(ranks)}; name one")
        return explain(self._thread, engine, self._registration, ranks[0], notes=self._notes)

    def stats(self) -> Stats:
        """What this rank has counted since it registered, and how things stand: requests, bytes, latencies, queues."""
        verbs = self._verbs or self._unregistered("stats")
        return stats(verbs)

    def dump(self, folder: str | None = None) -> Path:
        """Writes the flight record of this rank: its last operations, and its requests that have not ended, as JSON.

        folder: None stands for ``Options.dump_dir``. Returns the file's path; ``python -m torchkv.trace`` reads it, and
        those of other ranks. Raises ``OSError``, and ``ProtocolError`` if nothing is recorded or no folder is given.
        """
        verbs = self._verbs or self._unregistered("dump")
        assert self._observation is not None
        return self._observation.dump(verbs, folder)


_all: weakref.WeakSet[KVVerbs] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """A forked child has no verbs: it has no progress thread, and peers would take it for its parent."""
    for each in _all:
        each._forked = True
        each._verbs = each._thread = each._observation = None


os.register_at_fork(after_in_child=_after_fork_in_child)


def current(group: dist.ProcessGroup | KVVerbs | None) -> KVVerbs:
    """``group``, or the default group if that is None. Raises ``ProtocolError`` for a group of another backend."""
    if group is None:
        if not dist.is_initialized():
            raise ProtocolError('no process group: call dist.init_process_group("torchkv") first, or pass group=')
        group = dist.group.WORLD
    if not isinstance(group, KVVerbs):
        raise ProtocolError(f'{group!r} is no torchkv group; make it with dist.new_group(backend="torchkv")')
    return group
