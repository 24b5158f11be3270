"""Whether bytes are on their way in connections within this host, as the kernel's tables say."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
from torchkv_ucx import sockets
from torchkv_ucx.sockets import Connection, is_quiet

MINE, OTHERS = 7, 8  # inodes


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6, None], ids=["IPv4", "IPv6", "IPv4 to IPv6"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A TCP connection: one end is kept, the other one is what a peer writes to."""
    loopback = "::1" if request.param == socket.AF_INET6 else "127.0.0.1"
    try:
        if request.param is None:
            server = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            server = socket.create_server((loopback, 0), family=request.param)
    except OSError as error:
        pytest.skip(f"no {loopback}: {error}")
    with server, socket.create_connection((loopback, server.getsockname()[1])) as theirs:
        ours, _ = server.accept()
        with ours:
            yield ours, theirs


def test_bytes_are_on_their_way_until_they_are_read(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    assert not sockets.has_unread_bytes()
    theirs.sendall(b"last words")
    assert sockets.has_unread_bytes()
    assert ours.recv(4) == b"last"
    assert sockets.has_unread_bytes()
    ours.recv(100)
    assert not sockets.has_unread_bytes()


def test_what_the_other_end_could_not_send_yet_is_on_its_way(pair: tuple[socket.socket, socket.socket]) -> None:
    """Also when nobody runs who could send more: the other end is a process's that has inherited it."""
    ours, theirs = pair
    theirs.setblocking(False)
    sent = 0
    try:
        while True:
            sent += theirs.send(bytes(1 << 16))
    except BlockingIOError:
        pass
    unsent = [end.unsent for end in sockets.connections().values() if end.inode == os.fstat(theirs.fileno()).st_ino]
    assert unsent[0] > 0, "this test needs more than fits into the reader's buffer"
    while sent:
        assert sockets.has_unread_bytes()
        sent -= len(ours.recv(1 << 20))
    assert not sockets.has_unread_bytes()


def table(ours: tuple[int, int] = (0, 0), theirs: tuple[int, int] = (0, 0)) -> sockets.Table:
    """A connection between "a" here and "b", each with unsent and unread bytes, and one of others."""
    return {
        ("a", "b"): Connection(*ours, MINE),
        ("b", "a"): Connection(*theirs, OTHERS),
        ("c", "d"): Connection(9, 9, OTHERS),
        ("d", "c"): Connection(9, 9, OTHERS),
    }


def test_a_connection_is_quiet_if_all_was_sent_before_and_nothing_is_unread_now() -> None:
    assert is_quiet(table(), table(), [MINE])
    assert not is_quiet(table(theirs=(1, 0)), table(), [MINE]), "it may have arrived since, and be half read"
    assert not is_quiet(table(), table(ours=(0, 1)), [MINE]), "it had been sent, and arrived since"
    assert is_quiet(table(ours=(5, 0), theirs=(0, 5)), table(ours=(5, 0), theirs=(0, 5)), [MINE]), "what I send"
    assert is_quiet({}, {("a", "far"): Connection(0, 0, MINE)}, [MINE]), "to another host"


def test_who_cannot_look_takes_it_that_bytes_are_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> sockets.Table:
        raise PermissionError("no /proc")

    monkeypatch.setattr(sockets, "connections", refuse)
    assert sockets.has_unread_bytes()


def test_a_process_is_in_this_network_or_is_not_there() -> None:
    assert sockets.same_network(os.getpid())
    assert not sockets.same_network(1 << 30)
