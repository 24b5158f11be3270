"""What router and workers share of HTTP: signed requests, a limit on bodies, clients that hang up, running a server."""

from __future__ import annotations

import asyncio
import hmac
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager
from hashlib import blake2b
from typing import TypeVar

import httpx
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from torchkv.host.secret_file import shared_secret

TIME, MAC = "x-torchkv-time", "x-torchkv-mac"
MAX_AGE = 30.0  # seconds between signing a request and receiving it, with the difference of the two clocks
MAX_BODY = 8 << 20  # bytes
HUNG_UP = 499  # as nginx numbers it; nobody reads it

T = TypeVar("T")


class Signature(httpx.Auth):
    """Signs requests with torchkv's secret (``TORCHKV_SECRET_FILE``), which is never sent; and checks that."""

    requires_request_body = True

    def __init__(self) -> None:
        self._key = blake2b(shared_secret(), digest_size=32, person=b"torchkv-server").digest()

    def auth_flow(self, request: httpx.Request) -> Iterator[httpx.Request]:
        now = repr(time.time())
        request.headers[TIME] = now
        request.headers[MAC] = self._mac(now, request.method, request.url.path, request.content)
        yield request

    async def check(self, request: Request) -> None:
        """A dependency of routes that only router and workers may call."""
        when, mac = request.headers.get(TIME, ""), request.headers.get(MAC, "")
        expected = self._mac(when, request.method, request.url.path, await request.body())
        if not hmac.compare_digest(mac.encode(), expected.encode()):
            raise HTTPException(401, "not signed with the secret of this server: see TORCHKV_SECRET_FILE")
        if abs(time.time() - float(when)) > MAX_AGE:
            raise HTTPException(401, f"signed more than {MAX_AGE:.0f} s ago; do the clocks agree?")

    def _mac(self, when: str, method: str, path: str, body: bytes) -> str:
        head = f"{when}\n{method}\n{path}\n".encode()
        return blake2b(head + body, digest_size=32, key=self._key).hexdigest()


class BodyLimit:
    """Refuses bodies of unknown or too large size before they are read."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            length = dict(scope["headers"]).get(b"content-length", b"")
            if not length.isdigit() or int(length) > MAX_BODY:
                await PlainTextResponse(f"give a Content-Length up to {MAX_BODY}", 413)(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def unless_hung_up(http: Request, work: Awaitable[T]) -> T:
    """The result of ``work``, which is cancelled if the client hangs up before."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HTTPException(HUNG_UP)
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


class _Server(uvicorn.Server):
    """Stops by a signal, but does not raise it again, as uvicorn does, before anything else could be closed."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self.handle_exit, number, None)
        yield


@asynccontextmanager
async def listening(app: FastAPI, host: str, port: int) -> AsyncIterator[tuple[uvicorn.Server, str]]:
    """Serves ``app`` until it is told to stop by a signal. Gives the server, and its URL."""
    app.add_middleware(BodyLimit)
    config = uvicorn.Config(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=30)
    with socket.create_server((host, port)) as listener:
        server = _Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield server, f"http://{host}:{listener.getsockname()[1]}"
            await serving
        finally:
            server.should_exit = True
            await serving
