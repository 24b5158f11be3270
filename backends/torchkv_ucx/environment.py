"""The UCX settings torchkv needs. They are read when UCX loads, so they must stand before ``import ucxx``.

A variable the user has set always wins. The reasons, one per setting:

* ``RNDV_THRESH=inf``: with peer-failure detection on, UCX refuses shared-memory copy lanes (cma) as long as
  rendezvous is possible at all, and quietly falls back to TCP. torchkv sends no tagged messages: nothing is lost.
* ``PROTO_EMULATION_ENABLE=n``: a put that no lane can do fails at once, instead of crawling through active
  messages. TCP has a true put lane and does not need the emulation.
* ``MEMTYPE_CACHE=n``: the cache misjudges memory that was allocated before UCX hooked the allocator.
* ``ERROR_SIGNALS=``: UCX must not replace the signal handlers of the Python program it is a guest in.
* ``LOG_LEVEL=fatal``: what fails comes back as a typed error; UCX would also log one line for every put that a
  dead peer has left in the socket, by the thousand.
* ``TCP_TX_SEG_SIZE``, ``TCP_RX_SEG_SIZE``: with the default segments of 8 KiB one large put over loopback ran at 0.6 to
  0.9 GB/s, with these at 2.2 to 2.8; small ones as before. The first must not exceed the second.
* ``CM_REUSEADDR=y``: a restarted process can listen on the port of its former life.
* ``NET_DEVICES``: UCX listens on *every* interface by default, and whoever completes its handshake may write
  into registered memory. torchkv opens only the interface the job runs on, see `net_devices`.

One is left to UCX's default on purpose: ``CUDA_IPC_CACHE=y`` keeps every device memory that was put into mapped until
this process ends. Memory of a peer that has died, or has freed it, therefore comes back before that only if all went
by the direct path, through views, which is torchkv's choice on one host. With ``n`` UCX maps and unmaps around every
put, and both wait for what runs on the GPU: a put then waits for the model's kernels, and the progress thread stands
still behind a stream that waits for a transfer (``wait_stream``), perhaps for this one. Set ``n`` only where memory
matters and that does not. (See also `torchkv_ucx.gpu.doorstep`.)
"""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path

from torchkv.network import job_interface

__all__ = ["context_config", "net_devices", "prepare"]

_SETTINGS = {
    "UCX_RNDV_THRESH": "inf",
    "UCX_PROTO_EMULATION_ENABLE": "n",
    "UCX_MEMTYPE_CACHE": "n",
    "UCX_ERROR_SIGNALS": "",
    "UCX_TCP_TX_SEG_SIZE": "64k",
    "UCX_TCP_RX_SEG_SIZE": "256k",
    "UCX_CM_REUSEADDR": "y",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "UCX_LOG_LEVEL": "fatal",
    "UCX_LOG_FILE": "stderr",  # the default, stdout, is where programs print their results
}

# What ``import ucxx`` itself writes into the environment where the user has set nothing.
_SET_BY_UCXX = {"UCX_RNDV_THRESH": "8192"}

_SIOCGIFADDR = 0x8915


def prepare() -> None:
    """Writes torchkv's UCX settings into the environment, where the user has set nothing.

    Raises ``TransportUnavailable`` if ``TORCHKV_INTERFACE`` names no address or interface of this host.
    """
    context_config()
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    if "UCX_NET_DEVICES" not in os.environ:
        os.environ["UCX_NET_DEVICES"] = net_devices()


@cache
def context_config() -> dict[str, str]:
    """Settings for each context: those that somebody else's earlier ``import ucxx`` has spoiled.

    Answered once, before torchkv itself imports UCXX: until then what stands in the environment is the user's.
    """
    if "ucxx" not in sys.modules:
        return {}
    spoiled = [name for name, value in _SET_BY_UCXX.items() if os.environ.get(name) == value]
    return {name.removeprefix("UCX_"): _SETTINGS[name] for name in spoiled}


def net_devices() -> str:
    """The value for ``UCX_NET_DEVICES``: the interface the job runs on; see `torchkv.network.job_interface`.

    For a job across hosts RDMA devices are added, since UCX lists them by names of their own.
    """
    device, _ = job_interface()
    return device if device == "lo" else ",".join([device, *_rdma_ports()])


def _rdma_ports() -> list[str]:
    ports = sorted(Path("/sys/class/infiniband").glob("*/ports/*"))
    return [f"{port.parent.parent.name}:{port.name}" for port in ports]
