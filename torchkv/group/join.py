"""`join`: a KV cache among instances that are launched apart, and come and go. See `engine.joining.membership`."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from types import TracebackType
from typing import NoReturn

import torch
import torch.distributed as dist

from torchkv.cache import KVCache
from torchkv.engine.joining.membership import Listener, Membership, Peer
from torchkv.engine.work import drivers
from torchkv.errors import KVError, PeerLost, ProtocolError, TransferCancelled, TransferTimeout, TransportUnavailable
from torchkv.group.bring_up import Exchange, bring_up, check_instance
from torchkv.group.kv_verbs import KVVerbs
from torchkv.host.secret_file import shared_secret
from torchkv.options import Options, seconds, warn_about_unknown_variables
from torchkv.transport.interface import Transport

__all__ = ["KVMember", "join"]

ADDRESS = re.compile(r"tcp://[^\s:/]+:\d{1,5}")
STORE_POLL = 0.05  # seconds between two looks into a store
# Seconds for which an address from the store is tried before it is looked up again: it may be that of an earlier life.
ADDRESS_PATIENCE = 2.0
GONE_PATIENCE = 0.5  # seconds for which it is tried if it is that of an instance that has gone


def join(
    cache: KVCache | None,
    instance: str,
    *,
    group: dist.ProcessGroup | None = None,
    options: Options | None = None,
    store: dist.Store | None = None,
) -> KVMember:
    """Makes this process a rank of ``instance``, which other instances can exchange KV cache pages with.

    Unlike the ranks of a `KVProcessGroup`, instances are jobs of their own: they start, restart and end when they like.

    cache: this rank's pages; None joins without a cache.
    instance: the name that other instances know this one by, 1 to 128 bytes in UTF-8. A restarted instance may use it
    again: it is somebody new, and no byte meant for the earlier one reaches it.
    group: the c10d group of this instance's ranks, with a backend for tensors on the host, such as gloo. `join` is
    collective over it. None: this process is the whole instance.
    store: where instances publish their addresses under their names; the same one for all. None: addresses are told by
    other means, see `KVMember.address`.

    Only who has the same secret is let in: see `torchkv.host.secret_file`. Raises on all ranks of the instance if any
    of them fails: ``LayoutMismatch``, ``TransportUnavailable``, ``AuthError``, ``ProtocolError``.
    """
    return KVMember(cache, instance, group=group, options=options or Options(), store=store)


class KVMember(KVVerbs):
    """This process as a rank of an instance among others; made by `join`. The verbs are those of `KVProcessGroup`.

    ``src`` and ``dst`` are the name of an instance, or the address of one. What is not known yet is connected to by the
    first verb that names it, which blocks meanwhile, for `Options.timeout` at most: `connect` does that ahead of time.
    Ranks in errors are numbers of this process's own: those below `size` are the ranks of its instance, those of other
    instances are in `peers`.
    """

    def __init__(
        self,
        cache: KVCache | None,
        instance: str,
        *,
        group: dist.ProcessGroup | None,
        options: Options,
        store: dist.Store | None,
    ) -> None:
        super().__init__()
        warn_about_unknown_variables()
        _check_types(options, store)
        self._rank, self._size = (0, 1) if group is None else (group.rank(), group.size())
        self._options = options
        self._store = store
        self._closing = threading.Event()
        self._lookups = ThreadPoolExecutor(4, thread_name_prefix="torchkv-store")
        _check_group(group)

        def check(transport: type[Transport]) -> None:
            check_instance("join", cache, instance)
            _check_supported(instance, options, transport)

        running = bring_up(
            Exchange(group, rank=self._rank, size=self._size),
            cache,
            instance=instance,
            options=options,
            secret=shared_secret,
            name=instance,
            check=check,
            join_heap=None,
        )
        engine = running.engine
        assert running.secret is not None
        self._membership = Membership(
            engine, running.registration, running.thread.control, running.cards, secret=running.secret
        )
        engine.group_map.seek = self._seek
        self._attach(running, cache, name=instance)
        # Greetings that have come before now are still there.
        engine.exchange.newcomers = self._membership
        running.thread.waker.wake()
        if store is not None and self._rank == 0:
            store.set(_key(instance), self.address)

    def rank(self) -> int:
        """This process's number in its instance."""
        return self._rank

    def size(self) -> int:
        """How many ranks this instance has."""
        return self._size

    @property
    def address(self) -> str:
        """Where this instance can be reached: ``tcp://host:port``, the same on all of its ranks. See `connect`."""
        return self._membership.address

    # ------------------------------------------------------------------ peers

    def connect(
        self, peer: str, *, instance: str | None = None, timeout: float | timedelta | None = None
    ) -> Future[str]:
        """Meets another instance, both ways. The result is its name, as soon as it can be named in verbs here.

        peer: the `address` of the instance, or its name if there is a store. One that is here already is not asked
        again. instance: the name of who must be at that address; None: whoever is there. timeout: in seconds; None
        stands for ``Options.timeout``. The future fails with ``TransferTimeout``, ``PeerLost`` (one of this name has
        gone), ``LayoutMismatch``, ``TransportUnavailable`` or ``ProtocolError``; callbacks that are added to it must
        not block. Raises ``ProtocolError`` for a name without a store.
        """
        limit = self._options.timeout if timeout is None else seconds(timeout, "connect: timeout")
        (self._verbs or self._unregistered("connect")).check_open("connect")
        deadline = time.monotonic() + limit
        if (known := self._here(peer)) is not None:
            found: Future[str] = Future()
            _settle(found, known, peer, instance)
            return found
        if ADDRESS.fullmatch(peer):
            return self._greet(peer, deadline, instance)
        if self._store is None:
            raise ProtocolError(
                f"connect: no instance {peer!r} has connected here, and join was given no store to look it up in; give "
                "its address, as tcp://host:port"
            )
        return self._lookups.submit(self._meet_named, peer, deadline)

    def peers(self) -> Mapping[str, Peer]:
        """The other instances that are known here, by name. One that has gone stays until nothing of it is left."""
        return self._membership.peers

    def listen(self, listener: Listener) -> None:
        """Has ``listener(name, here)`` called when an instance comes, does not answer any more, or answers again.

        It is called on a thread of torchkv, and must not block.
        """
        self._membership.listen(listener)

    # ------------------------------------------------------------------ end

    def close(self) -> None:
        """Leaves: fails pending requests, and stops the thread. Idempotent."""
        self._closing.set()
        self._stop()
        if self._verbs is not None:
            self._verbs.engine.group_map.seek = None  # else memory would be freed by the garbage collector only
        self._lookups.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> KVMember:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ inside

    def _unregistered(self, verb: str) -> NoReturn:
        self._refuse_fork(verb, "its parent")
        raise ProtocolError(f"{verb}: joining has failed, so there are no verbs")

    def _here(self, peer: str) -> str | None:
        """The name of the instance that ``peer`` names, or whose address it is, if that answers."""
        for name, known in self._membership.peers.items():
            if known.here and peer in (name, known.address):
                return name
        return None

    def _greet(self, address: str, deadline: float, instance: str | None) -> Future[str]:
        future: Future[str] = Future()
        future.set_running_or_notify_cancel()  # nobody can cancel it

        def done(name: str, error: KVError | None) -> None:
            if error is None:
                _settle(future, name, address, instance)
            else:
                future.set_exception(error)

        def begin() -> None:
            now = time.monotonic()
            self._membership.connect(address, done, seconds=deadline - now, now=now)

        assert self._thread is not None
        self._thread.call(begin)
        return future

    def _meet_named(self, name: str, deadline: float) -> str:
        """Looks ``name`` up and connects to it. On a thread that may block."""
        while True:
            address = self._look_up(name, deadline)
            gone = self._membership.gone.get(name) == address
            patience = GONE_PATIENCE if gone else ADDRESS_PATIENCE
            try:
                return self._greet(address, min(deadline, time.monotonic() + patience), name).result()
            except TransferTimeout as error:
                if gone:
                    raise PeerLost(
                        f"connect: instance {name!r} has gone, and no other one of this name came; name another one, "
                        "or try again when it has joined again"
                    ) from error
                if time.monotonic() >= deadline:
                    raise

    def _look_up(self, name: str, deadline: float) -> str:
        assert self._store is not None
        while not self._store.check([_key(name)]):
            if self._closing.wait(STORE_POLL):
                raise TransferCancelled(f"connect: this instance left while {name!r} was looked up")
            if time.monotonic() >= deadline:
                raise TransferTimeout(
                    f"connect: no instance {name!r} has published its address in the store; has it joined, under this "
                    "very name, and was it given the same store?"
                )
        address: str = self._store.get(_key(name)).decode(errors="replace")
        if not ADDRESS.fullmatch(address):
            raise ProtocolError(f"connect: the store names {address!r:.80} as the address of {name!r}")
        return address

    def _seek(self, peer: str, operation: str) -> str:
        """For `GroupMap.seek`: what a verb names may be an address, or an instance that is not known yet."""
        if (known := self._here(peer)) is not None:
            return known
        if threading.get_ident() in drivers:
            raise ProtocolError(
                f"{operation}: {peer!r} is not connected; a callback cannot wait for that: connect first"
            )
        return self.connect(peer).result()


def _settle(found: Future[str], name: str, address: str, wanted: str | None) -> None:
    """``name`` answers at ``address``. wanted: who should."""
    if wanted is None or name == wanted:
        found.set_result(name)
    else:
        found.set_exception(ProtocolError(f"connect: at {address}, where {wanted!r} should be, there is {name!r}"))


def _key(instance: str) -> str:
    return f"torchkv/instance/{instance}"


def _check_types(options: object, store: object) -> None:
    if not isinstance(options, Options):
        raise ProtocolError(f"join: options is a {type(options).__name__}; give a torchkv.Options")
    if not isinstance(store, dist.Store | None):
        raise ProtocolError(f"join: store is a {type(store).__name__}; give a dist.TCPStore or dist.FileStore, or None")


def _check_group(group: dist.ProcessGroup | None) -> None:
    if group is None:
        return
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError as error:
        raise ProtocolError(
            "join: group has no backend for tensors on the host; make one with dist.new_group(ranks, backend='gloo')"
        ) from error


def _check_supported(instance: str, options: Options, transport: type[Transport]) -> None:
    if "://" in instance:
        raise ProtocolError(f"join: instance={instance!r} looks like an address; choose another name")
    if transport.capabilities.collective_memory:
        raise TransportUnavailable(
            f"join: transport {transport.name!r} has one heap that all ranks make together, so nobody can come later; "
            "use another transport"
        )
    if options.min_gbps is not None:
        raise ProtocolError("join: Options.min_gbps is measured when a group registers; ask explain(peer) instead")
