"""The UCX settings that torchkv needs. UCX reads them when it loads, so they must be set before ``import ucxx``.

A variable that the user has set is left alone. The reasons, one per setting:

* ``RNDV_THRESH=inf``: with peer-failure detection on, UCX does not use shared-memory copy lanes (cma) while
  rendezvous is possible at all, and falls back to TCP without a warning. torchkv's tagged messages are records of 64
  bytes, so it needs no rendezvous.
* ``PROTO_EMULATION_ENABLE=n``: a put that no lane supports fails at once, instead of being emulated slowly with active
  messages. TCP has a put lane and does not need the emulation.
* ``MEMTYPE_CACHE=n``: the cache misjudges memory that was allocated before UCX hooked the allocator.
* ``ERROR_SIGNALS=``: UCX must not replace the signal handlers of the Python program that loads it.
* ``LOG_LEVEL=fatal``: failures come back as typed errors. UCX would also log a line for each of the thousands of puts
  that a dead peer has left in the socket.
* ``TCP_TX_SEG_SIZE``, ``TCP_RX_SEG_SIZE``: with the default segments of 8 KiB one large put over loopback ran at 0.6 to
  0.9 GB/s, with these at 2.2 to 2.8; small puts as before. The first must not exceed the second.
* ``TCP_CONN_NB=y``: else `connect` blocks the progress thread while a peer's host does not answer. And UCX 1.21 then
  crashes later if a peer that had connected here ends before this rank connects to it: it takes over the peer's
  connection, finds it broken, tries a new one, and if that is refused at once, it frees an endpoint that it goes on
  using (``uct_tcp_ep_connect``, ``uct_tcp_ep_set_failed``).
* ``CM_REUSEADDR=y``: a restarted process can listen on the port that the process before it used.
* ``NET_DEVICES``: UCX listens on *every* interface by default, and a process that completes its handshake may write
  into registered memory. torchkv opens only the interface that the job runs on, see `net_devices`.

``CUDA_IPC_CACHE`` is left at UCX's default, ``y``: device memory of a peer that was put into stays mapped until this
process ends. So memory of a peer that has died, or that the peer has freed, is given back earlier only if all
transfers went through views (the direct path, which torchkv chooses on one host). With ``n`` UCX maps and unmaps around
every put, and both calls wait for the work on the GPU: a put then waits for the model's kernels, and the progress
thread blocks behind a stream that waits for a transfer (``wait_stream``), which may be the one it should drive. Set
``n`` only where memory matters more. (See also `torchkv_ucx.gpu.probe_memory`.)
"""

from __future__ import annotations

import logging
import os
import sys
from functools import cache
from pathlib import Path

from torchkv.host.network import job_interface

__all__ = ["chosen_by_user", "context_config", "net_devices", "prepare", "put_seconds"]

log = logging.getLogger(__name__)

_SETTINGS = {
    "UCX_RNDV_THRESH": "inf",
    "UCX_PROTO_EMULATION_ENABLE": "n",
    "UCX_MEMTYPE_CACHE": "n",
    "UCX_ERROR_SIGNALS": "",
    "UCX_TCP_TX_SEG_SIZE": "64k",
    "UCX_TCP_RX_SEG_SIZE": "256k",
    "UCX_TCP_CONN_NB": "y",
    "UCX_CM_REUSEADDR": "y",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "UCX_LOG_LEVEL": "fatal",
    "UCX_LOG_FILE": "stderr",  # the default is stdout, where programs print their results
}

# What ``import ucxx`` writes into the environment where the user has set nothing.
_SET_BY_UCXX = {"UCX_RNDV_THRESH": "8192"}

# Seconds. Over TCP 3 to 5 us were measured (two cores, loopback): system calls on both sides. An RDMA device reads the
# descriptor by itself; so little is a guess.
_TCP_PUT, _RDMA_PUT = 3e-6, 0.2e-6


def prepare() -> None:
    """Writes torchkv's UCX settings into the environment, where the user has set nothing.

    Raises ``TransportUnavailable`` if ``TORCHKV_INTERFACE`` names no address or interface of this host.
    """
    context_config()
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    devices = os.environ.setdefault("UCX_NET_DEVICES", net_devices())
    if devices != net_devices():
        _warn_about_devices(devices)


@cache
def _warn_about_devices(devices: str) -> None:
    log.warning(
        "UCX_NET_DEVICES=%s was set beforehand: UCX listens there, and whoever reaches its port may write into KV "
        "cache pages; torchkv would choose %s. Unset it, or set TORCHKV_INTERFACE",
        devices,
        net_devices(),
    )


def chosen_by_user() -> str:
    """The variable by which the user has chosen UCX's lanes; "" if there is none. To be asked before UCX is loaded."""
    if "UCX_TLS" in os.environ:
        return "UCX_TLS"
    # What a parent process has written there on torchkv's behalf is no choice.
    return "UCX_NET_DEVICES" if os.environ.get("UCX_NET_DEVICES", net_devices()) != net_devices() else ""


@cache
def context_config() -> dict[str, str]:
    """Settings for each UCX context: those that an ``import ucxx`` before torchkv's own has overwritten.

    Computed once, before torchkv itself imports UCXX; variables set until then are the user's or that import's.
    """
    if "ucxx" not in sys.modules:
        return {}
    spoiled = [name for name, value in _SET_BY_UCXX.items() if os.environ.get(name) == value]
    return {name.removeprefix("UCX_"): _SETTINGS[name] for name in spoiled}


def net_devices() -> str:
    """The value for ``UCX_NET_DEVICES``: the interface that the job runs on, see `torchkv.host.network.job_interface`.

    RDMA devices are added for a job across hosts, because UCX names them separately from network interfaces.
    """
    device, _ = job_interface()
    return device if device == "lo" else ",".join([device, *_rdma_ports()])


def put_seconds() -> float:
    """About what a put to another host costs beside its bytes."""
    has_rdma = ":" in os.environ.get("UCX_NET_DEVICES", net_devices())  # as in mlx5_0:1
    return _RDMA_PUT if has_rdma else _TCP_PUT


def _rdma_ports() -> list[str]:
    ports = sorted(Path("/sys/class/infiniband").glob("*/ports/*"))
    return [f"{port.parent.parent.name}:{port.name}" for port in ports]
