"""The router's HTTP: the completions route of OpenAI, the status page, and where workers report."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from tokenizers import Tokenizer

from examples.server.messages import Report, Step, Token
from examples.server.model import Detokenizer
from examples.server.router import LEFT, Router, Unavailable
from examples.server.web import Signature, unless_hung_up

PAGE = Path(__file__).with_name("status.html")


class StreamOptions(BaseModel):
    include_usage: bool = False


class CompletionRequest(BaseModel):
    """As OpenAI has it, as far as it is served: one completion, chosen greedily. Other fields are refused.

    return_token_ids: as vLLM has it; each choice then has its ``token_ids``.
    """

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    prompt: str | list[Token]
    max_tokens: Annotated[int, Field(ge=1)] = 16
    temperature: Literal[0] | None = None
    n: Literal[1] = 1
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    seed: int | None = None
    user: str | None = None


class Answer:
    """Makes the chunks of one completion; a whole one is a single chunk."""

    def __init__(self, asked: CompletionRequest, model: str, tokenizer: Tokenizer, prompt: list[int]) -> None:
        self._head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        self._head["model"] = model
        self._asked, self._prompt_tokens, self._tokens = asked, len(prompt), 0
        self._text = Detokenizer(tokenizer)

    def chunk(self, step: Step) -> dict[str, Any]:
        self._tokens += len(step.tokens)
        text = self._text.step(step.tokens, last=step.finish is not None)
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": step.finish}
        if self._asked.return_token_ids:
            choice["token_ids"] = step.tokens
        return {**self._head, "choices": [choice]}

    def usage(self) -> dict[str, int]:
        total = self._prompt_tokens + self._tokens
        return {"prompt_tokens": self._prompt_tokens, "completion_tokens": self._tokens, "total_tokens": total}

    async def events(self, first: Step, steps: AsyncIterator[Step]) -> AsyncIterator[str]:
        try:
            async with aclosing(steps):
                yield _event(self.chunk(first))
                async for step in steps:
                    yield _event(self.chunk(step))
            if self._asked.stream_options.include_usage:
                yield _event({**self._head, "choices": [], "usage": self.usage()})
        except Unavailable as error:
            yield _event(_error(str(error), "service_unavailable"))
        yield "data: [DONE]\n\n"

    async def whole(self, steps: AsyncIterator[Step]) -> dict[str, Any]:
        async with aclosing(steps):
            parts = [step async for step in steps]
        tokens = [token for step in parts for token in step.tokens]
        return {**self.chunk(Step(tokens=tokens, finish=parts[-1].finish)), "usage": self.usage()}


def make_app(router: Router, signature: Signature, *, model: str, tokenizer: Tokenizer) -> FastAPI:
    @asynccontextmanager
    async def watched(_app: FastAPI) -> AsyncIterator[None]:
        watching = router.start(router.watch())
        yield
        watching.cancel()
        await router.close()

    app = FastAPI(title="torchkv example server", lifespan=watched)
    signed = [Depends(signature.check)]

    @app.post("/v1/completions")
    async def completions(asked: CompletionRequest, http: Request) -> Response:
        prompt = tokenizer.encode(asked.prompt).ids if isinstance(asked.prompt, str) else asked.prompt
        if (wrong := _wrong(asked, prompt, model, tokenizer, router.context)) is not None:
            return JSONResponse(_error(wrong, "invalid_request_error"), 400)
        answer = Answer(asked, model, tokenizer, prompt)
        steps = router.generate(prompt, asked.max_tokens)
        try:
            if not asked.stream:
                return JSONResponse(await unless_hung_up(http, answer.whole(steps)))
            first = await unless_hung_up(http, anext(steps))
        except Unavailable as error:
            return JSONResponse(_error(str(error), "service_unavailable"), 503, {"Retry-After": "1"})
        return StreamingResponse(answer.events(first, steps), media_type="text/event-stream")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": model, "object": "model", "created": 0, "owned_by": "torchkv"}]}

    @app.get("/")
    async def page() -> FileResponse:
        return FileResponse(PAGE, headers={"Content-Security-Policy": "default-src 'self' 'unsafe-inline'"})

    @app.get("/status")
    async def status() -> dict[str, Any]:
        now = time.monotonic()
        workers = [
            {**worker.report.model_dump(), "running": len(worker.attempts), "silent": round(now - worker.seen, 1)}
            for worker in sorted(router.workers.values(), key=lambda worker: worker.report.instance)
        ]
        totals = {"tokens": router.tokens, "moved": router.moved, "requests": router.requests}
        return {"model": model, **totals, "workers": workers, "news": list(router.news)}

    @app.post("/workers", dependencies=signed)
    async def hear(report: Report) -> Response:
        if report.model != model:
            return JSONResponse(_error(f"this router serves {model}", "invalid_request_error"), 409)
        router.hear(report)
        return Response(status_code=204)

    @app.post("/workers/leave", dependencies=signed)
    async def leave(report: Report) -> Response:
        router.drop(report.instance, LEFT)
        return Response(status_code=204)

    @app.exception_handler(RequestValidationError)
    async def invalid(_http: Request, error: RequestValidationError) -> JSONResponse:
        found = "; ".join(f"{'.'.join(str(at) for at in e['loc'][1:])}: {e['msg']}" for e in error.errors()[:3])
        return JSONResponse(_error(found, "invalid_request_error"), 400)

    return app


def _wrong(asked: CompletionRequest, prompt: list[int], model: str, tokenizer: Tokenizer, context: int) -> str | None:
    if asked.model not in (None, model):
        return f"this server has the model {model!r}, not {asked.model!r}"
    if not prompt or max(prompt) >= tokenizer.get_vocab_size():
        return f"prompt: expected at least one token, each below {tokenizer.get_vocab_size()}"
    if context and len(prompt) + asked.max_tokens > context:
        return f"{len(prompt)} tokens of the prompt and max_tokens={asked.max_tokens} are more than {context}"
    return None


def _error(message: str, kind: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "code": None}}


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"
