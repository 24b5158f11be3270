"""How decode engines find prefill engines: a port that tells one line, and who asks there."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from torchkv.errors import LayoutMismatch, PeerLost, ProtocolError, TransferCancelled
from torchkv.integrations.bootstrap import KNOWN, AddressServer, Prefills, ask

ADDRESS = "tcp://10.0.0.1:4000"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def server() -> Iterator[AddressServer]:
    made = AddressServer("127.0.0.1", 0, ADDRESS)
    yield made
    made.close()


def where(server: Any) -> str:
    return f"127.0.0.1:{server.server_address[1]}"


@contextmanager
def stranger(say: bytes, *, ends: bool = True) -> Iterator[str]:
    """Somebody else's server, which says something and then closes, or not."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        kept: list[socket.socket] = []

        def serve() -> None:
            caller, _ = listening.accept()
            caller.sendall(say)
            if ends:
                caller.close()
            else:
                kept.append(caller)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        thread.join()
        for caller in kept:
            caller.close()


def test_whoever_connects_is_told_the_address(server: AddressServer) -> None:
    for _ in range(3):
        assert ask(where(server), timeout=5) == ADDRESS
    silent = [socket.create_connection(server.server_address[:2]) for _ in range(20)]  # who asks nothing blocks nobody
    assert ask(where(server), timeout=5) == ADDRESS
    for each in silent:
        each.close()


def test_a_port_that_is_taken_raises(server: AddressServer) -> None:
    with pytest.raises(OSError, match="in use"):
        AddressServer("127.0.0.1", server.server_address[1], ADDRESS)


def test_the_port_is_free_again_after_the_end() -> None:
    first = AddressServer("127.0.0.1", 0, ADDRESS)
    port = first.server_address[1]
    assert ask(f"127.0.0.1:{port}", timeout=5) == ADDRESS
    first.close()
    second = AddressServer("127.0.0.1", port, "tcp://10.0.0.2:1")
    assert ask(f"127.0.0.1:{port}", timeout=5) == "tcp://10.0.0.2:1"
    second.close()


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"tcp://10.0.0.1:4000",
        b"tcp://example.com:4000\n",
        b"tcp://10.0.0.1:4000\ntcp://10.0.0.1:4000\n",
        b"x" * 10_000,
        b"\xff\xfe\n",
    ],
)
def test_whatever_a_stranger_says_is_no_address(said: bytes) -> None:
    with stranger(said) as address, pytest.raises(ProtocolError, match="no bootstrap server of torchkv"):
        ask(address, timeout=5)


def test_a_stranger_that_says_nothing_is_not_waited_for() -> None:
    with stranger(b"tcp", ends=False) as address, pytest.raises(TimeoutError):
        ask(address, timeout=0.2)


@pytest.mark.parametrize("bootstrap", ["", "host", ":80", "host:", "host:x", "host:0", "host:65536", "host:-1"])
def test_what_is_no_bootstrap_address_is_refused(bootstrap: str) -> None:
    with pytest.raises(ProtocolError, match="host:port"):
        ask(bootstrap, timeout=1)


@pytest.mark.parametrize("host", ["x" * 300, "a..b", "\udc80"])
def test_what_can_be_no_host_is_refused(host: str) -> None:
    with pytest.raises(ProtocolError, match="no bootstrap address"):
        ask(f"{host}:80", timeout=1)


class KV:
    """A member that connects to whatever it is told, as ``connect`` says."""

    def __init__(self, connect: Callable[[str], str]) -> None:
        self.known: dict[str, Any] = {}
        self.connected: list[str] = []
        self._connect = connect

    def peers(self) -> dict[str, Any]:
        return self.known

    def connect(self, address: str, *, timeout: float) -> Future[str]:
        assert timeout > 0
        self.connected.append(address)
        future: Future[str] = Future()
        try:
            name = self._connect(address)
        except Exception as error:  # noqa: BLE001  # is the future's
            future.set_exception(error)
        else:
            self.known[name] = SimpleNamespace(here=True, address=address)
            future.set_result(name)
        return future


@contextmanager
def finding(connect: Callable[[str], str] = lambda _: "p", seconds: float = 20.0) -> Iterator[tuple[KV, Prefills]]:
    kv = KV(connect)
    prefills = Prefills(kv, seconds=seconds)
    yield kv, prefills
    prefills.close()


def test_an_address_is_asked_once_while_its_engine_is_here(server: AddressServer) -> None:
    with finding() as (kv, prefills):
        assert prefills.find(where(server)).result(20) == "p"
        assert prefills.find(where(server)) is prefills.find(where(server))
        assert kv.connected == [ADDRESS]
        assert prefills.find(f"localhost:{server.server_address[1]}").result(20) == "p"


def test_the_successor_of_one_that_has_gone_is_found(server: AddressServer) -> None:
    names = iter(["p", "q"])
    with finding(lambda _: next(names)) as (kv, prefills):
        assert prefills.find(where(server)).result(20) == "p"
        kv.known["p"].here = False
        server.line = b"tcp://10.0.0.2:4000\n"
        assert prefills.find(where(server)).result(20) == "q"
        assert kv.connected == [ADDRESS, "tcp://10.0.0.2:4000"]


def test_one_that_is_being_started_is_waited_for() -> None:
    port = free_port()
    with finding() as (_, prefills):
        found = prefills.find(f"127.0.0.1:{port}")
        with pytest.raises(TimeoutError):
            found.result(0.5)
        server = AddressServer("127.0.0.1", port, ADDRESS)
        assert found.result(20) == "p"
        server.close()


def test_one_that_never_comes_is_not_found_and_is_asked_again_later() -> None:
    with finding(seconds=0.3) as (_, prefills):
        bootstrap = f"127.0.0.1:{free_port()}"
        found = prefills.find(bootstrap)
        with pytest.raises(PeerLost, match="nobody answers"):
            found.result(20)
        assert prefills.find(bootstrap) is not found


def test_a_failure_that_can_pass_is_tried_again(server: AddressServer) -> None:
    outcomes = iter([PeerLost("gone"), None])

    def connect(_: str) -> str:
        if (error := next(outcomes)) is not None:
            raise error
        return "p"

    with finding(connect) as (kv, prefills):
        assert prefills.find(where(server)).result(20) == "p"
        assert len(kv.connected) == 2


def test_a_failure_that_cannot_pass_is_told_at_once(server: AddressServer) -> None:
    def connect(_: str) -> str:
        raise LayoutMismatch("another model")

    with finding(connect) as (kv, prefills):
        with pytest.raises(LayoutMismatch):
            prefills.find(where(server)).result(20)
        assert len(kv.connected) == 1


def test_addresses_of_clients_fill_no_memory() -> None:
    with finding() as (_, prefills):
        for number in range(2 * KNOWN):
            done = prefills.find(f"no address {number}")
            with pytest.raises(ProtocolError):
                done.result(20)
        assert len(prefills._found) <= KNOWN + 1


def test_the_end_ends_lookups() -> None:
    with finding() as (_, prefills):
        found = prefills.find(f"127.0.0.1:{free_port()}")
        with pytest.raises(TimeoutError):
            found.result(0.3)
    with pytest.raises(TransferCancelled):
        found.result(20)
