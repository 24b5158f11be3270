"""Who does not know a channel's key: nothing of it is read or kept, and nobody on the wire reads what ranks say."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq

from tests.helpers.resident import resident_kib
from torchkv.control import channel
from torchkv.control.channel import ZmqControlChannel
from torchkv.control.curve import CurveKeys
from torchkv.errors import ProtocolError, TransportUnavailable
from torchkv.host.processes import this_process

PATIENCE = 20.0
SECRET = b"s" * 32
OTHER = b"o" * 32
ELSEWHERE = msgspec.structs.replace(this_process(), host="another")  # so that frames go over ZeroMQ

Make = Callable[..., ZmqControlChannel]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[ZmqControlChannel] = []

    def one(secret: bytes | None = None) -> ZmqControlChannel:
        made.append(ZmqControlChannel(heartbeat=5.0, secret=secret))
        return made[-1]

    yield one
    for each in made:
        each.close()


def arrived(control: ZmqControlChannel, count: int, seconds: float = PATIENCE) -> list[bytes]:
    frames: list[bytes] = []
    until = time.monotonic() + seconds
    while len(frames) < count and time.monotonic() < until:
        frames += control.receive()
        time.sleep(0.001)
    return frames


@pytest.mark.parametrize("secret", [None, SECRET], ids=["told", "shared"])
def test_who_knows_the_key_is_heard(make: Make, secret: bytes | None) -> None:
    here, there = make(secret), make(secret)
    assert len(there.endpoint.split(" ")) == (3 if secret is None else 2), (
        "a shared secret needs no key in the endpoint"
    )
    here.connect(1, there.endpoint, ELSEWHERE)
    here.send(1, [b"one", b"two"])
    assert arrived(there, 2) == [b"one", b"two"]
    if secret is not None:
        here.greet(there.endpoint.partition(" ")[0], b"hello")
        assert arrived(there, 1) == [b"hello"]


def test_who_has_another_secret_or_none_is_not_heard(make: Make) -> None:
    there, honest = make(SECRET), make(SECRET)
    for stranger in (make(OTHER), make(None)):
        stranger.connect(1, there.endpoint, ELSEWHERE)
        stranger.send(1, [b"let me in"])
        stranger.greet(there.endpoint, b"let me in")
    plain = zmq.Context()
    try:
        sock = plain.socket(zmq.DEALER)
        sock.connect(there.endpoint.partition(" ")[0])
        sock.send(b"let me in")
        honest.connect(1, there.endpoint, ELSEWHERE)
        honest.send(1, [b"honest"])
        assert arrived(there, 1) == [b"honest"]
        assert arrived(there, 1, seconds=0.5) == []
    finally:
        plain.destroy(linger=0)


class Wire:
    """A relay between a rank and another one's port, which keeps all that passes."""

    def __init__(self, port: int) -> None:
        self.seen = bytearray()
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        near, _ = self._listener.accept()
        with near, socket.create_connection(("127.0.0.1", self._port)) as far:
            other = {near: far, far: near}
            while True:
                for source in select.select([near, far], [], [])[0]:
                    if not (data := source.recv(1 << 16)):
                        return
                    self.seen += data
                    other[source].sendall(data)

    def close(self) -> None:
        self._thread.join(PATIENCE)
        self._listener.close()


def test_nobody_on_the_wire_reads_a_frame(make: Make) -> None:
    here, there = make(), make()
    address, *rest = there.endpoint.split(" ")
    wire = Wire(int(address.rpartition(":")[2]))
    here.connect(1, " ".join([f"tcp://127.0.0.1:{wire.port}", *rest]), ELSEWHERE)
    frame = b"page ids of request seven " * 40
    here.send(1, [frame])
    assert arrived(there, 1) == [frame]
    assert len(wire.seen) > len(frame)
    assert b"request seven" not in wire.seen
    assert all(key.encode() not in wire.seen for key in rest)
    here.close()
    wire.close()


def flood(port: int, until: float) -> None:
    """Connections that say what ZeroMQ says to anybody, and then send messages without end."""
    ready = b"\x05READY" + b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
    plain = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL" + bytes(16 + 1 + 31) + bytes([4, len(ready)]) + ready
    body = 1 << 20
    data = b"\x02" + body.to_bytes(8, "big") + os.urandom(body)
    while time.monotonic() < until:
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.settimeout(0.2)
            try:
                sock.sendall(plain)
                while time.monotonic() < until:
                    sock.sendall(data)
            except OSError:
                continue  # it was closed, as it should be


def test_a_flood_of_strangers_fills_no_memory_and_holds_up_nobody(make: Make) -> None:
    here, there = make(SECRET), make(SECRET)
    here.connect(1, there.endpoint, ELSEWHERE)
    here.send(1, [b"first"])
    assert arrived(there, 1) == [b"first"]
    port = int(there.endpoint.partition(" ")[0].rpartition(":")[2])
    before, until = resident_kib(), time.monotonic() + 2.0
    threads = [threading.Thread(target=flood, args=(port, until)) for _ in range(4)]
    for thread in threads:
        thread.start()
    count = 0
    while time.monotonic() < until:
        here.send(1, [b"honest"])
        assert arrived(there, 1) == [b"honest"]
        count += 1
    for thread in threads:
        thread.join()
    assert count >= 3
    assert resident_kib() - before < 64 << 10, "KiB; without authentication it was gigabytes"


def test_without_a_secret_other_hosts_cannot_reach_a_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "job_interface", lambda: ("eth0", "192.0.2.7"))
    with pytest.raises(TransportUnavailable, match=r"192\.0\.2\.7.*TORCHKV_SECRET_FILE"):
        ZmqControlChannel(heartbeat=5.0)


@pytest.mark.parametrize("key", ["short", "é" * 40, "x" * 41])
def test_what_is_no_key_is_refused(make: Make, key: str) -> None:
    with pytest.raises(ProtocolError, match="instead of 40"):
        make().connect(1, f"tcp://127.0.0.1:1 name {key}", ELSEWHERE)


@pytest.mark.parametrize("key", ["\x7f" * 40, '"' * 40, " " * 40])
def test_a_key_of_forty_other_characters_is_refused_too(make: Make, key: str) -> None:
    with pytest.raises(ProtocolError, match="is no key"):
        make().connect(1, f"tcp://127.0.0.1:1 name {key}", ELSEWHERE)


def test_an_endpoint_may_have_no_more_than_an_address(make: Make) -> None:
    """As peers may write it, who share the secret."""
    here, there = make(SECRET), make(SECRET)
    here.connect(1, there.endpoint.partition(" ")[0], ELSEWHERE)
    here.send(1, [b"one"])
    assert arrived(there, 1) == [b"one"]


def test_equal_secrets_make_equal_keys() -> None:
    assert CurveKeys(SECRET)._public == CurveKeys(SECRET)._public != CurveKeys(OTHER)._public
    assert CurveKeys(None).told != CurveKeys(None).told
