"""Which worker does what: `Router` sends each request to a prefill and a decode worker, and again if one is lost."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx

from examples.server.messages import Cancel, Report, Role, Step, Work

log = logging.getLogger(__name__)

SILENCE = 5.0  # seconds without a report after which a worker counts as lost
ATTEMPTS = 5  # of a request, each with other workers if there are any


class Unavailable(Exception):
    """No worker can serve the request, or all that tried have failed."""


class WorkerFailed(Exception):
    """One attempt has failed: its worker is lost, or says that it cannot."""

    def __init__(self, worker: Worker, why: str) -> None:
        super().__init__(f"{worker.report.instance}: {why}")
        self.worker = worker


@dataclass(eq=False)
class Worker:
    """A worker as it last reported. attempts: those that need it; they are told when it is lost."""

    report: Report
    seen: float
    attempts: set[asyncio.Queue[Any]] = field(default_factory=set)


class Router:
    """The workers, and the requests that they have. For one event loop.

    patience: seconds for which a request waits for a decode worker, if there is none.
    """

    def __init__(self, auth: httpx.Auth, *, patience: float) -> None:
        self._patience = patience
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx.AsyncClient(auth=auth, limits=limits, timeout=httpx.Timeout(None, connect=5))
        self._tasks: set[asyncio.Task[Any]] = set()
        self.workers: dict[str, Worker] = {}
        self.requests: Counter[str] = Counter(running=0, finished=0, cancelled=0, failed=0, retried=0)
        self.moved = 0  # bytes of pages that prefill workers have sent, also those that are gone
        self.tokens = 0
        self.news: deque[str] = deque(maxlen=12)

    # ------------------------------------------------------------------ workers

    def hear(self, report: Report) -> None:
        """A worker joins, or is still there."""
        worker = self.workers.get(report.instance)
        if worker is not None and worker.report.url != report.url:
            self.drop(report.instance, "was started again")
            worker = None
        if worker is None:
            self.workers[report.instance] = worker = Worker(report, 0.0)
            self._tell(f"{report.instance} has joined")
            before = 0
        else:
            before = worker.report.moved
        if report.role == "prefill":
            self.moved += max(0, report.moved - before)
        worker.report, worker.seen = report, time.monotonic()

    def drop(self, instance: str, why: str) -> None:
        """A worker is gone. Attempts that need it fail now, but it may finish what it streams if it only leaves."""
        if (worker := self.workers.pop(instance, None)) is None:
            return
        self._tell(f"{instance} {why}")
        if why != LEFT:
            for attempt in worker.attempts:
                attempt.put_nowait(WorkerFailed(worker, why))

    async def watch(self) -> None:
        """Drops workers that fall silent. Never returns."""
        while True:
            await asyncio.sleep(SILENCE / 10)
            for name, worker in list(self.workers.items()):
                if time.monotonic() > worker.seen + SILENCE:
                    self.drop(name, f"has not reported for {SILENCE:.0f} s")

    async def close(self) -> None:
        await self._client.aclose()

    @property
    def context(self) -> int:
        """Tokens that any worker takes for one request."""
        return min((worker.report.context for worker in self.workers.values()), default=0)

    # ------------------------------------------------------------------ requests

    async def generate(self, prompt: list[int], limit: int) -> AsyncIterator[Step]:
        """At most ``limit`` tokens after ``prompt``. Closing the generator cancels the request. Raises `Unavailable`.

        If a worker is lost, another one goes on: it gets the prompt with all tokens that were generated.
        """
        tokens: list[int] = []
        failed: list[Worker] = []
        outcome = "cancelled"
        self.requests["running"] += 1
        try:
            while True:
                try:
                    attempt = self._attempt([*prompt, *tokens], limit - len(tokens), failed)
                    async with aclosing(attempt) as steps:
                        async for step in steps:
                            tokens += step.tokens
                            self.tokens += len(step.tokens)
                            outcome = outcome if step.finish is None else "finished"
                            yield step
                    return
                except WorkerFailed as error:
                    failed.append(error.worker)
                    log.warning("attempt %d of a request failed: %s", len(failed), error)
                    if len(failed) == ATTEMPTS:
                        raise Unavailable(f"{ATTEMPTS} workers have failed, the last one {error}") from error
                    self.requests["retried"] += 1
        except Unavailable:
            outcome = "failed"
            raise
        finally:
            self.requests["running"] -= 1
            self.requests[outcome] += 1

    async def _attempt(self, prompt: list[int], limit: int, failed: list[Worker]) -> AsyncIterator[Step]:
        decode = await self._choose("decode", failed)
        prefill = self._least_busy("prefill", failed) if len(prompt) > 1 else None
        source = None if prefill is None else prefill.report.address
        work = Work(name=secrets.token_hex(12), prompt=prompt, max_tokens=limit, source=source)
        said: asyncio.Queue[Step | WorkerFailed] = asyncio.Queue()
        decoding = self.start(self._decode(decode, work, said))
        prefilling = None if prefill is None else self.start(self._prefill(prefill, work, said))
        members = [worker for worker in (decode, prefill) if worker is not None]
        received = finished = False
        for worker in members:
            worker.attempts.add(said)
        try:
            while not finished:
                step = await said.get()
                if isinstance(step, WorkerFailed):
                    if step.worker is prefill and received:
                        continue  # it is not needed any more
                    raise step
                received, finished = True, step.finish is not None
                if prefill is not None:
                    prefill.attempts.discard(said)
                yield step
        finally:  # nothing here waits: this may run while a handler is cancelled
            for worker in members:
                worker.attempts.discard(said)
            decoding.cancel()  # which closes the connection, and so cancels the request there
            if prefill is not None and prefilling is not None and not finished:
                self.start(self._give_up(prefill, prefilling, work))

    async def _decode(self, worker: Worker, work: Work, said: asyncio.Queue[Any]) -> None:
        try:
            url = f"{worker.report.url}/decode"
            async with self._client.stream("POST", url, json=work.model_dump()) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    said.put_nowait(_checked(worker, Step.model_validate_json(line)))
            said.put_nowait(WorkerFailed(worker, "ended before the request was finished"))
        except (httpx.HTTPError, ValueError) as error:
            self._failed(worker, error, said)
        except WorkerFailed as error:
            said.put_nowait(error)

    async def _prefill(self, worker: Worker, work: Work, said: asyncio.Queue[Any]) -> None:
        try:
            response = await self._client.post(f"{worker.report.url}/prefill", json=work.model_dump())
            response.raise_for_status()
            _checked(worker, Step.model_validate_json(response.content))
        except (httpx.HTTPError, ValueError) as error:
            self._failed(worker, error, said)
        except WorkerFailed as error:
            said.put_nowait(error)

    def _failed(self, worker: Worker, error: Exception, said: asyncio.Queue[Any]) -> None:
        why = f"{type(error).__name__} {error}".strip()
        if isinstance(error, httpx.TransportError):  # if it lives, its next report brings it back
            self.drop(worker.report.instance, f"is lost: {why}")
        said.put_nowait(WorkerFailed(worker, why))

    async def _give_up(self, worker: Worker, prefilling: asyncio.Task[None], work: Work) -> None:
        """Frees the pages at the prefill worker: by closing the connection, or, if it has answered, by a call."""
        prefilling.cancel()
        await asyncio.wait({prefilling})
        try:
            cancel = Cancel(name=work.name).model_dump()
            await self._client.post(f"{worker.report.url}/cancel", json=cancel, timeout=SILENCE)
        except httpx.HTTPError as error:
            log.info("%s was not told of a cancelled request: %r", worker.report.instance, error)

    # ------------------------------------------------------------------ inside

    async def _choose(self, role: Role, failed: list[Worker]) -> Worker:
        until = time.monotonic() + self._patience
        while (worker := self._least_busy(role, failed)) is None:
            if time.monotonic() > until:
                raise Unavailable(f"there is no {role} worker")
            await asyncio.sleep(0.05)
        return worker

    def _least_busy(self, role: Role, failed: list[Worker]) -> Worker | None:
        fit = (worker for worker in self.workers.values() if worker.report.role == role)
        return min(fit, key=lambda worker: (worker in failed, len(worker.attempts)), default=None)

    def start(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)  # the loop itself refers to tasks only weakly
        task.add_done_callback(self._tasks.discard)
        return task

    def _tell(self, news: str) -> None:
        log.info("%s", news)
        self.news.appendleft(f"{time.strftime('%H:%M:%S')} {news}")


LEFT = "has left"


def _checked(worker: Worker, step: Step) -> Step:
    if step.error is not None:
        raise WorkerFailed(worker, step.error)
    return step
