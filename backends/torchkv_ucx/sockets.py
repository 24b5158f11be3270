"""Whether bytes are on their way in TCP connections within this host, as Linux's tables of sockets tell."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

__all__ = ["Connection", "connections", "has_unread_bytes", "is_quiet", "same_network"]

_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_MAPPED = "0000000000000000FFFF0000"  # before an IPv4 address in a socket of IPv6, whose other end may be of IPv4
_SOCKET = re.compile(r"socket:\[(\d+)\]")


class Connection(NamedTuple):
    """One end of a TCP connection. unsent: bytes that its peer's kernel has not taken. unread: that nobody has read."""

    unsent: int
    unread: int
    inode: int


# By local and remote address, as the tables spell them.
Table = Mapping[tuple[str, str], Connection]


def same_network(pid: int) -> bool:
    """Whether process ``pid`` is in this process's network namespace, so that `connections` shows its sockets, too."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net")
    except OSError:
        return False


def connections() -> Table:
    """All TCP sockets of this network namespace, whoever has them. Raises ``OSError``."""
    found: dict[tuple[str, str], Connection] = {}
    for table in _TABLES:
        if not Path(table).exists():  # no IPv6
            continue
        for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
            _, local, remote, _, queues, _, _, _, _, inode, *_ = line.split()
            unsent, _, unread = queues.partition(":")
            ends = local.removeprefix(_MAPPED), remote.removeprefix(_MAPPED)
            found[ends] = Connection(int(unsent, 16), int(unread, 16), int(inode))
    return found


def is_quiet(before: Table, after: Table, mine: Iterable[int]) -> bool:
    """Whether nothing is on its way to this process from within its host that was sent before ``before`` was read.

    before, after: tables that were read one after the other, between which this process has read nothing. mine: inodes
    of its sockets. What the other end of a connection had not sent yet is in ``before``; what had arrived by then, or
    has arrived since, is in ``after``, unless it was read.
    """
    own = set(mine)
    for (local, remote), end in after.items():
        if end.inode not in own:
            continue
        other = before.get((remote, local))
        if end.unread or (other is not None and other.unsent):
            return False
    return True


def has_unread_bytes() -> bool:
    """Whether bytes from within this host are on their way to this process, by any TCP connection, or may be.

    If not, what an ended process has sent is here: this process has read it.
    """
    try:
        return not is_quiet(connections(), connections(), _own_inodes())
    except OSError:
        return True


def _own_inodes() -> list[int]:
    inodes = []
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it was closed meanwhile
            if match := _SOCKET.match(os.readlink(f"/proc/self/fd/{entry}")):
                inodes.append(int(match[1]))
    return inodes
