"""The network interface of a job: every socket that listens is bound to this one only."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct

from torchkv.errors import TransportUnavailable
from torchkv.options import interface_from_env

__all__ = ["Interface", "job_interface"]

_SIOCGIFADDR = 0x8915

Interface = tuple[str, str]  # name and IPv4 address

LOOPBACK: Interface = ("lo", "127.0.0.1")


def job_interface() -> Interface:
    """The interface that listening sockets bind to.

    The one that ``TORCHKV_INTERFACE`` names, by its name or IPv4 address; without it, loopback if all ranks run on one
    host (``WORLD_SIZE`` equals ``LOCAL_WORLD_SIZE``), else the interface that routes to ``MASTER_ADDR``. Raises
    ``TransportUnavailable`` if there is no such interface, or no route.
    """
    wanted = interface_from_env()
    if wanted is None:
        world = os.environ.get("WORLD_SIZE")
        if world is not None and world == os.environ.get("LOCAL_WORLD_SIZE"):
            return LOOPBACK
        wanted = _address_towards(os.environ.get("MASTER_ADDR", "localhost"))
    names = [name for _, name in socket.if_nameindex()]
    addresses = {name: _address_of(name) for name in names}
    for name, address in addresses.items():
        if address is not None and wanted in (name, address):
            return name, address
    if _is_loopback(wanted):
        return "lo", wanted if wanted != "localhost" else LOOPBACK[1]
    raise TransportUnavailable(
        f"no network interface of this host has the name or IPv4 address {wanted!r} (it has "
        f"{', '.join(f'{n} {a}' for n, a in addresses.items())}); set TORCHKV_INTERFACE to one of them"
    )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.IPv4Address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _address_towards(host: str) -> str:
    """The local IPv4 address that packets to ``host`` are sent from."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # connecting a datagram socket looks up the route and sends nothing
        except OSError as error:
            raise TransportUnavailable(
                f"MASTER_ADDR={host!r} cannot be reached over IPv4 ({error}); set TORCHKV_INTERFACE"
            ) from error
        address: str = probe.getsockname()[0]
    return address


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:  # the interface has no IPv4 address
            return None
    return socket.inet_ntoa(reply[20:24])
