"""A model under the continuous batching of transformers, whose pages come from or go to other processes by torchkv."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import torchkv
from examples.server.messages import Finish, Role, Step
from torchkv.integrations import transformers as adapter

BATCH_TOKENS = 256  # a longer prompt is prefilled in several steps


class Engine:
    """The requests of one worker. To be made and used in an event loop.

    blocks, page_size: of the KV cache; a block holds so many tokens of all layers.
    """

    def __init__(self, role: Role, instance: str, model: Any, *, blocks: int, page_size: int) -> None:
        self._sources: dict[str, str] = {}  # request -> address of who prefills it
        self._open: dict[str, asyncio.Queue[Any]] = {}  # request -> outputs of transformers; None: the engine has ended
        self._loop = asyncio.get_running_loop()
        self._page_size, self._reserved, self._room = page_size, 0, asyncio.Condition()
        self.ended = asyncio.Event()
        self.endpoint = adapter.prefill(instance) if role == "prefill" else adapter.decode(instance, self._source)
        ends = model.generation_config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=list(self._ends) or -1),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=page_size,
                num_blocks=blocks,
                max_batch_tokens=BATCH_TOKENS,
                scheduler_type=self.endpoint.scheduler,
                use_async_batching=False,
                allow_block_sharing=False,
            ),
        )
        self._manager.start()
        threading.Thread(target=self._read_outputs, daemon=True).start()

    async def start(self) -> None:
        """Returns once others can reach it. Raises what torchkv or transformers raised."""
        joined, ended = asyncio.wrap_future(self.endpoint.address), asyncio.ensure_future(self.ended.wait())
        await asyncio.wait({joined, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not joined.done():
            raise RuntimeError("the engine has not started") from self._manager.background_thread_status.fatal_error
        joined.result()
        while self._manager.batch_processor is None:  # it appears just behind the scheduler, which joins
            await asyncio.sleep(0.01)
        self.blocks: int = self._cache.num_blocks
        self.context = min(self.blocks * self._page_size, self._manager.model.config.max_position_embeddings)

    @property
    def running(self) -> int:
        return len(self._open)

    def free_blocks(self) -> int:
        return round(self._cache.compute_free_capacity() * self.blocks)

    async def generate(self, name: str, prompt: list[int], limit: int, source: str | None) -> AsyncIterator[Step]:
        """At most ``limit`` tokens, greedily. source: address of who prefills the prompt; None: nobody else does.

        It waits while the cache may not hold it all. Closing the generator cancels the request.
        """
        blocks = -(-(len(prompt) + limit) // self._page_size)
        if blocks > self.blocks:
            yield Step(error=f"{blocks} blocks are more than the {self.blocks} of this worker")
            return
        async with self._room:
            await self._room.wait_for(lambda: self._reserved + blocks <= self.blocks)
            self._reserved += blocks
        outputs = self._open[name] = asyncio.Queue()
        if source is not None:
            self._sources[name] = source
        finished = False
        try:
            if self._manager.add_request(prompt, request_id=name, max_new_tokens=limit, streaming=True) is None:
                outputs.put_nowait(None)
            sent = 0
            while not finished:
                output = await outputs.get()
                if output is None or output.error is not None:
                    yield Step(error="the engine has stopped" if output is None else output.error)
                    return
                tokens, sent = output.generated_tokens[sent:], len(output.generated_tokens)
                finished = output.is_finished()
                yield Step(tokens=tokens, finish=self._why(tokens) if finished else None)
        finally:
            del self._open[name]
            self._sources.pop(name, None)
            if not finished:
                self._manager.cancel_request(name)
            self._release(blocks)

    def cancel(self, name: str) -> None:
        """For a request that was prefilled, and that nobody will decode."""
        self._manager.cancel_request(name)

    def close(self) -> None:
        """Returns when what was prefilled has been sent, or after half a minute."""
        self._manager.stop(block=True, timeout=30)
        self.endpoint.close()

    # ------------------------------------------------------------------ inside

    @property
    def _cache(self) -> Any:
        return self._manager.batch_processor.cache

    def _why(self, last: list[int]) -> Finish:
        return "stop" if self._ends.intersection(last) else "length"

    def _source(self, name: str) -> str:
        """Called on the thread that generates."""
        if (found := self._sources.get(name)) is None:
            raise torchkv.PeerLost(f"request {name}: no prefill worker has it")
        return found

    def _release(self, blocks: int) -> None:
        self._reserved -= blocks
        self._tell = asyncio.ensure_future(self._notify())

    async def _notify(self) -> None:
        async with self._room:
            self._room.notify_all()

    def _read_outputs(self) -> None:
        for output in self._manager:
            self._loop.call_soon_threadsafe(self._deliver, output)
        self._loop.call_soon_threadsafe(self._end)

    def _deliver(self, output: Any) -> None:
        if (outputs := self._open.get(output.request_id)) is not None:
            outputs.put_nowait(output)

    def _end(self) -> None:
        self.ended.set()
        for outputs in self._open.values():
            outputs.put_nowait(None)
