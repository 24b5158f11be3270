"""Engines that know each other by a host and port: each tells there where its instance of torchkv can be reached.

That port is no secret and is not trusted: it tells one line to whoever connects, and reads nothing. Only who has the
secret of torchkv can then connect to the address in it.
"""

from __future__ import annotations

import logging
import re
import socket
import socketserver
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torchkv.errors import KVError, PeerLost, ProtocolError, TransferCancelled

if TYPE_CHECKING:
    from torchkv.group.join import KVMember

__all__ = ["AddressServer", "Prefills", "ask", "instance_name"]

log = logging.getLogger(__name__)

LINE = re.compile(rb"tcp://\d{1,3}(\.\d{1,3}){3}:\d{1,5}\n")
MAX_LINE = 64  # bytes
PATIENCE = 2.0  # seconds for one question
PAUSE = 0.2  # seconds between two of them
LOOKUPS = 16  # at the same time
KNOWN = 1024  # addresses that are remembered; they come from clients


def instance_name(kind: str, group: dist.ProcessGroup | None) -> str:
    """A name for an engine's instance that no other has, the same on all ranks of ``group``."""
    generator = torch.Generator()  # not the engine's own, which has the same seed in all engines
    generator.seed()
    number = torch.randint(1 << 62, (1,), generator=generator)
    if group is not None:
        dist.broadcast(number, group=group, group_src=0)
    return f"{kind}-{int(number):016x}"


class AddressServer(socketserver.TCPServer):
    """Tells ``address`` to all who connect to a port, until `close`.

    Raises ``OSError`` if the port is taken.
    """

    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, address: str) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.line = f"{address}\n".encode()
        super().__init__((host, port), _Tell)
        self._thread = threading.Thread(target=self.serve_forever, name="torchkv-bootstrap", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("the bootstrap port could not answer %s", client_address, exc_info=True)


class _Tell(socketserver.BaseRequestHandler):
    server: AddressServer

    def handle(self) -> None:
        self.request.sendall(self.server.line)  # a new connection has room for it


def ask(bootstrap: str, *, timeout: float) -> str:
    """The address of the instance whose `AddressServer` listens at ``bootstrap``, which is host:port.

    Raises ``OSError``, and ``ProtocolError`` if what is there says something else.
    """
    host, _, port = bootstrap.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ProtocolError(f"{bootstrap!r:.80} is no bootstrap address; it should be host:port")
    deadline = time.monotonic() + timeout
    line = b""
    try:
        connecting = socket.create_connection((host.strip("[]"), int(port)), timeout)
    except UnicodeError as error:  # what is no host name; OSError is for those that do not answer
        raise ProtocolError(f"{bootstrap!r:.80} is no bootstrap address: {error}") from error
    with connecting as connection:
        while len(line) < MAX_LINE and not line.endswith(b"\n"):
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
            if not (more := connection.recv(MAX_LINE - len(line))):
                break
            line += more
    if not LINE.fullmatch(line):
        raise ProtocolError(f"at {bootstrap} there is no bootstrap server of torchkv; it says {line!r}")
    return line.decode().strip()


class Prefills:
    """The prefill engines that this rank decodes for, by the bootstrap address that clients give.

    seconds: for how long an engine that does not answer is asked again, such as one that is being started.
    """

    def __init__(self, kv: KVMember, *, seconds: float) -> None:
        self._kv = kv
        self._seconds = seconds
        self._closing = threading.Event()
        self._lookups = ThreadPoolExecutor(LOOKUPS, thread_name_prefix="torchkv-bootstrap")
        self._found: dict[str, Future[str]] = {}

    def find(self, bootstrap: str) -> Future[str]:
        """The name of the instance that is there now, connected. Never blocks. Fails with a `KVError`."""
        found = self._found.get(bootstrap)
        if found is None or (found.done() and not self._is_here(found)):
            if len(self._found) >= KNOWN:
                self._found = {key: other for key, other in self._found.items() if not other.done()}
            found = self._found[bootstrap] = self._lookups.submit(self._look_up, bootstrap)
        return found

    def close(self) -> None:
        self._closing.set()
        self._lookups.shutdown(wait=False, cancel_futures=True)

    def _is_here(self, found: Future[str]) -> bool:
        if found.cancelled() or found.exception() is not None:
            return False
        peer = self._kv.peers().get(found.result())
        return peer is not None and peer.here

    def _look_up(self, bootstrap: str) -> str:
        deadline = time.monotonic() + self._seconds
        while True:
            try:
                address = ask(bootstrap, timeout=PATIENCE)
                return self._kv.connect(address, timeout=max(deadline - time.monotonic(), PAUSE)).result()
            except KVError as error:
                if not error.retryable or time.monotonic() >= deadline:
                    raise
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise PeerLost(f"nobody answers at the bootstrap address {bootstrap}: {error}") from error
            if self._closing.wait(PAUSE):
                raise TransferCancelled(f"this engine ended while {bootstrap} was looked up")
