"""KVProcessGroup: a c10d process group with KV verbs. Importing torchkv registers it as backend ``"torchkv"``."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from torchkv.cache import KVCache, allocate
from torchkv.engine.joining.probe import PROBE_BYTES
from torchkv.engine.joining.registration import choose_transport
from torchkv.errors import ProtocolError, TransportUnavailable
from torchkv.group.bring_up import Exchange, bring_up, check_instance
from torchkv.group.kv_verbs import KVVerbs, current
from torchkv.host.network import job_interface
from torchkv.host.processes import this_process
from torchkv.host.secret_file import shared_secret
from torchkv.options import Options, interface_from_env, secret_file_from_env
from torchkv.transport.interface import Transport

__all__ = ["KVProcessGroup"]

log = logging.getLogger(__name__)


T = TypeVar("T")

# All c10d operations, under their names of old and new torch releases. Each is forwarded in Python to an inner, plain
# ProcessGroup. Inheriting them instead deadlocks: the C++ trampoline keeps the GIL while gloo's thread waits for it.
_FORWARDED = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)


class KVProcessGroup(KVVerbs, dist.ProcessGroup):
    """A process group whose ranks exchange KV cache pages. All collectives of c10d work on it too.

    Made by ``dist.init_process_group("torchkv")`` or ``dist.new_group(backend="torchkv", pg_options=Options(...))``.
    Call `register` on all ranks first. Then the receiver of a request calls `recv_pages`; each sender calls any of the
    ``send_*`` verbs and `staged_put`, any number of times, and `finish`. The verbs are thread-safe.

    The logger ``torchkv.request`` traces every request at level DEBUG. On a sender: verb queued, grant bound, transfer
    started (with its path), bytes attested, sealed, verdict. On a receiver: granted, covered, verdict.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, options: Options) -> None:
        _claim(store, rank)
        dist.ProcessGroup.__init__(self, rank, size)  # type: ignore[call-arg]  # the stubs know only (store, ...)
        self._store = store
        self._options = options
        KVVerbs.__init__(self)
        self._registering = threading.Lock()
        self._inner = dist.ProcessGroup(store, rank, size)
        cpu = torch.device("cpu")
        gloo_type = dist.ProcessGroup.BackendType.GLOO
        gloo = dist.ProcessGroupGloo(PrefixStore("gloo/", store), rank, size, _gloo_options(timeout))
        gloo._set_sequence_number_for_group()
        # Registered on this group too, because c10d keeps a group's name, devices and shutdown in its backends.
        for group in (self._inner, self):
            group._register_backend(cpu, gloo_type, gloo)
            group._set_default_backend(gloo_type)
        if torch.cuda.is_available() and dist.is_nccl_available():
            nccl_type = dist.ProcessGroup.BackendType.NCCL
            nccl_options = dist.ProcessGroupNCCL.Options()
            nccl_options._timeout = timeout
            nccl = dist.ProcessGroupNCCL(PrefixStore("nccl/", store), rank, size, nccl_options)
            nccl._set_sequence_number_for_group()
            for group in (self._inner, self):
                group._register_backend(torch.device("cuda"), nccl_type, nccl)

    # ------------------------------------------------------------------ registration

    def register(self, cache: KVCache | None, instance: str | None = None) -> None:
        """Publishes this rank's cache to the group. Collective, once per group, before any verb.

        cache: this rank's pages; None joins the group without a cache.
        instance: name of the serving instance that this rank belongs to. Ranks of one instance succeed or fail together
        in each request. None stands for an instance of this rank alone, named ``rank<r>``.

        Runs one full garbage collection, so that Python does not start it amid the first requests. From the first
        request on that the resident loop cannot serve, until the group is destroyed, ``sys.setswitchinterval`` is
        lowered to 0.5 ms, so that the progress thread gets the GIL while callers run Python code.

        Raises on all ranks if any rank fails: ``LayoutMismatch`` (names both ranks, the field and both values),
        ``TransportUnavailable``, ``ProtocolError``.
        """
        self._refuse_fork("register", f"rank {self.rank()}")
        with self._registering:
            if self._verbs is not None:
                raise ProtocolError("register: this group has a cache already; one cache per rank and group")
            name = f"rank{self.rank()}" if instance is None else instance
            running = bring_up(
                Exchange(self, rank=self.rank(), size=self.size()),
                cache,
                instance=name,
                options=self._options,
                secret=lambda: None if secret_file_from_env() is None else shared_secret(),
                name=self.group_name,
                check=lambda _: self._check_register(cache, name),
                join_heap=lambda transport: self._join_heap(transport, cache_device(cache)),
            )
            self._attach(running, cache, name=self.group_name)

    def _check_register(self, cache: KVCache | None, instance: str) -> None:
        check_instance("register", cache, instance)
        if name_of_other_rank(instance, self.rank()):
            raise ProtocolError(
                f"register: instance={instance!r} is the name that rank gets by default; choose another"
            )

    def _join_heap(self, transport: type[Transport], device: torch.device) -> None:
        reserve = self._options.staging_send + self._options.staging_recv + PROBE_BYTES[device.type]
        transport.join(rank=self.rank(), size=self.size(), store=self._store, device=device, reserve=reserve)

    def _unregistered(self, verb: str) -> NoReturn:
        self._refuse_fork(verb, f"rank {self.rank()}")
        raise ProtocolError(f"{verb}: no cache is registered; call register(cache) on every rank of the group first")

    # ------------------------------------------------------------------ memory

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Memory of the kind that this group's transport prefers: uint8, 1-D, at least ``nbytes``.

        For ``KVCache.empty(group=)``. Collective if the transport allocates from a symmetric heap: every rank then gets
        the largest ``nbytes`` of all ranks. Raises ``TransportUnavailable``.
        """
        transport = choose_transport(self._options.transport)
        if not transport.capabilities.collective_memory or device.type != "cuda":
            return allocate(nbytes, device)
        self._join_heap(transport, device)
        asked = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size())]
        dist.all_gather(asked, torch.tensor([nbytes]), group=self)
        most = max(int(each) for each in asked)
        note = f"this cache needs {nbytes} B of the symmetric heap and takes {most} B, as the largest rank does"
        log.info("rank %d: %s", self.rank(), note)
        self._notes.append(note)
        return transport.allocate_shared(most, device)

    # ------------------------------------------------------------------ c10d

    def shutdown(self) -> None:
        """Stops the group's thread and fails pending requests. Called by ``dist.destroy_process_group``."""
        self._stop()
        self._inner.shutdown()

    def abort(self) -> None:
        """As `shutdown`, without waiting for collectives under way."""
        self._stop()
        self._inner.abort()

    def get_group_store(self) -> Store:
        return self._store

    def getBackendName(self) -> str:
        return "torchkv"

    def split_group(self, *_args: Any, **_kwargs: Any) -> None:
        """Not supported, because in some torch releases it crashes on a group made in Python."""
        raise ProtocolError("split_group is not supported by torchkv groups; use dist.new_group(ranks)")


def cache_device(cache: KVCache | None) -> torch.device:
    """The device of a rank's cache, or the current GPU for a rank without one."""
    return torch.device("cuda", torch.cuda.current_device()) if cache is None else cache.device


def name_of_other_rank(instance: str, rank: int) -> bool:
    """Whether ``instance`` is the default name of another rank. The two ranks would become one instance."""
    number = instance.removeprefix("rank")
    return instance != number and number.isdecimal() and number != str(rank)


def _forward(name: str) -> Callable[..., Any]:
    def method(self: KVProcessGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._inner, name)(*args, **kwargs)

    method.__name__ = name
    method.__doc__ = f"c10d's ``{name}``: by gloo for host tensors, by NCCL for CUDA tensors."
    return method


for _name in _FORWARDED:
    if hasattr(dist.ProcessGroup, _name):
        setattr(KVProcessGroup, _name, _forward(_name))


def current_group(group: dist.ProcessGroup | None) -> KVProcessGroup:
    """``group``, or the default group if that is None. Raises ``ProtocolError`` for a group of another backend."""
    kv = current(group)
    if not isinstance(kv, KVProcessGroup):
        raise ProtocolError(f'{kv!r} is no process group; make one with dist.new_group(backend="torchkv")')
    return kv


def _gloo_options(timeout: timedelta) -> Any:
    """With a port on the job's interface only: gloo's own choice is whatever the host's name stands for.

    ``GLOO_SOCKET_IFNAME`` is the user's choice, and stays; and where nothing says on which hosts the ranks are, gloo
    chooses, for collectives may work all the same. An interface that is wrong is reported by `register`, on all ranks;
    an error here would leave the others waiting.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs do not know it
    options._timeout = timeout
    known = interface_from_env() is not None or "MASTER_ADDR" in os.environ
    device = None
    if known and "GLOO_SOCKET_IFNAME" not in os.environ:
        try:
            device = dist.ProcessGroupGloo.create_device(hostname=job_interface()[1])
        except (TransportUnavailable, RuntimeError) as error:
            log.warning("gloo chooses its interface by itself: %s", error)
    options._devices = [device or dist.ProcessGroupGloo.create_default_device()]
    return options


def _claim(store: Store, rank: int) -> None:
    """Raises ``ProtocolError`` if another process is, or was, this rank of the group.

    Else it would wait for ever for ranks that have met that process and do not look for another one.
    """
    mine = msgspec.json.encode(this_process()).decode()
    holder = store.compare_set(f"torchkv/process/{rank}", "", mine).decode(errors="replace")
    if holder != mine:
        raise ProtocolError(
            f"init: another process is or was rank {rank} of this group ({holder:.200}); start all ranks anew with a "
            "new store, or use torchkv.join, where instances come and go"
        )
