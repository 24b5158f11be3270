"""A worker: an engine behind HTTP. It tells the router once a second that it is there; that is how it joins."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing

import httpx
import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.responses import StreamingResponse

from examples.server.engine import Engine
from examples.server.messages import Cancel, Report, Role, Step, Work
from examples.server.model import load_model
from examples.server.web import Signature, listening, unless_hung_up

log = logging.getLogger(__name__)

REPORT = 1.0  # seconds between two reports


async def run(
    role: Role,
    instance: str,
    *,
    router: str,
    model: str,
    device: str,
    blocks: int,
    page_size: int,
    host: str,
    port: int,
) -> None:
    """Until a signal comes, or the engine fails."""
    engine = Engine(role, instance, load_model(model, device), blocks=blocks, page_size=page_size)
    await engine.start()
    signature = Signature()
    async with listening(make_app(engine, signature), host, port) as (server, url):

        def report() -> Report:
            kv = engine.endpoint.member
            return Report(
                instance=instance,
                role=role,
                url=url,
                address=kv.address,
                model=model,
                context=engine.context,
                blocks=engine.blocks,
                free=engine.free_blocks(),
                quarantined=len(kv.quarantined()),
                moved=engine.endpoint.moved,
                peers={name: peer.here for name, peer in kv.peers().items()},
            )

        async with httpx.AsyncClient(base_url=router, auth=signature, timeout=5) as client:
            while not (server.should_exit or engine.ended.is_set()):
                await _tell(client, report(), server)
            await _leave(client, report())
    await asyncio.to_thread(engine.close)


async def _tell(client: httpx.AsyncClient, report: Report, server: uvicorn.Server) -> None:
    """Reports, and returns when it is time for the next report, or when the server ends."""
    try:
        (await client.post("/workers", json=report.model_dump())).raise_for_status()
    except httpx.HTTPError as error:
        log.warning("%s: the router does not answer: %s", report.instance, error)
    for _ in range(10):
        if not server.should_exit:
            await asyncio.sleep(REPORT / 10)


async def _leave(client: httpx.AsyncClient, report: Report) -> None:
    try:
        await client.post("/workers/leave", json=report.model_dump())
    except httpx.HTTPError as error:
        log.info("%s: the router has not heard that this worker leaves: %s", report.instance, error)


def make_app(engine: Engine, signature: Signature) -> FastAPI:
    app = FastAPI(dependencies=[Depends(signature.check)], openapi_url=None)

    @app.post("/prefill")
    async def prefill(work: Work, http: Request) -> Step:
        """Answers when the prompt is computed. Its pages wait for whoever decodes it."""
        async with aclosing(engine.generate(work.name, work.prompt, 1, None)) as steps:
            return await unless_hung_up(http, anext(steps))

    @app.post("/decode")
    async def decode(work: Work) -> StreamingResponse:
        """Lines of `Step`. Whoever closes the connection cancels the request."""
        return StreamingResponse(_lines(engine, work), media_type="application/x-ndjson")

    @app.post("/cancel")
    async def cancel(request: Cancel) -> None:
        engine.cancel(request.name)

    return app


async def _lines(engine: Engine, work: Work) -> AsyncIterator[str]:
    async with aclosing(engine.generate(work.name, work.prompt, work.max_tokens, work.source)) as steps:
        async for step in steps:
            yield step.model_dump_json() + "\n"
