"""The process of one real SGLang engine: does what it is told over a pipe while the engine runs."""

from __future__ import annotations

import asyncio
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["ARGUMENTS", "CHUNK", "PAGE", "Finished", "Setup", "main"]

PAGE = 16  # tokens
CHUNK = 64  # tokens of a prompt in one step

ARGUMENTS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "mem_fraction_static": 0.2,
    "max_total_tokens": 4096,
    "max_running_requests": 16,
    "page_size": PAGE,
    "chunked_prefill_size": CHUNK,
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "sleep_on_idle": True,  # engines share few cores
    "log_level": "warning",
}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How an engine is started. mode: null, prefill or decode. port: of its bootstrap server. extra: more arguments."""

    model: str
    mode: str
    port: int
    tp_size: int = 1
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Finished:
    """A request that has ended: its tokens and why it ended, or what was raised."""

    tokens: list[int]
    reason: str
    message: str = ""

    @property
    def failed(self) -> bool:
        return self.reason in ("abort", "raised")


class Host:
    def __init__(self, setup: Setup) -> None:
        import sglang

        more: dict[str, Any] = {}
        if setup.mode != "null":
            more = {
                "disaggregation_mode": setup.mode,
                "disaggregation_transfer_backend": "torchkv",
                "disaggregation_bootstrap_port": setup.port,
            }
        if setup.mode == "decode":
            more["disaggregation_decode_retraction_backup"] = "cpu_tensor"
        self.engine = sglang.Engine(
            model_path=setup.model,
            skip_server_warmup=True,
            tp_size=setup.tp_size,
            **{**ARGUMENTS, **more, **setup.extra},
        )
        self.finished: dict[str, Finished] = {}
        self.tasks: set[asyncio.Task[None]] = set()

    async def serve(self, pipe: Connection) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                name, args = await loop.run_in_executor(None, pipe.recv)
            except EOFError:
                return
            pipe.send(await getattr(self, name)(*args))

    # ------------------------------------------------------------------ commands

    async def add(self, request: str, prompt: list[int], max_tokens: int, where: dict[str, Any]) -> None:
        """where: ``bootstrap_host``, ``bootstrap_port`` and ``bootstrap_room``, or nothing."""

        async def generate() -> None:
            sampling = {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
            try:
                said = await self.engine.async_generate(
                    input_ids=prompt, sampling_params=sampling, rid=request, **where
                )
            except Exception as error:  # noqa: BLE001  # whatever a client would see
                self.finished[request] = Finished([], "raised", f"{type(error).__name__}: {error}")
                return
            reason = said["meta_info"]["finish_reason"]
            self.finished[request] = Finished(list(said["output_ids"]), reason["type"], str(reason.get("message", "")))

        task = asyncio.ensure_future(generate())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        await asyncio.sleep(0)

    async def abort(self, request: str) -> None:
        self.engine.tokenizer_manager.abort_request(request)

    async def take(self) -> dict[str, Finished]:
        found, self.finished = self.finished, {}
        return found

    async def state(self) -> dict[str, Any]:
        return dict((await self.engine.tokenizer_manager.get_internal_state())[0]["probe"])

    async def shared_memory(self) -> str:
        """A file that SGLang leaves behind."""
        from sglang.srt.managers.load_snapshot import shm_path_for

        return str(shm_path_for(self.engine.port_args.instance_id))

    async def flush(self) -> bool:
        """Forgets cached prefixes. False if the engine is not idle."""
        return bool((await self.engine.tokenizer_manager.flush_cache()).success)


def main(socket: int) -> None:
    pipe = Connection(socket)
    setup = pipe.recv()
    try:
        host = Host(setup)
    except BaseException:
        traceback.print_exc()
        pipe.send(traceback.format_exc())
        raise
    pipe.send(None)
    host.engine.loop.run_until_complete(host.serve(pipe))
    host.engine.shutdown()
