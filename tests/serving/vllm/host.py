"""The process of one real vLLM engine: does what it is told over a pipe, and steps the engine in between."""

from __future__ import annotations

import os
import sys
import traceback
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

__all__ = ["BLOCK", "BLOCKS", "CHUNK", "Finished", "Setup", "main"]

BLOCK = 32  # tokens
BLOCKS = 128  # one of them is vLLM's null block
CHUNK = 64  # tokens of a prompt in one step

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that the block pool can be looked at
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How an engine is started. backend: of attention; None: vLLM chooses. extra: the ``kv_connector_extra_config``;
    None: without a connector.
    """

    model: str
    role: str
    tp_size: int = 1
    block_size: int = BLOCK
    dtype: str = "float32"
    backend: str | None = None
    prefix_caching: bool = True
    policy: str = "fail"
    extra: dict[str, Any] | None = None


@dataclass(frozen=True)
class Finished:
    """A request that has ended: its tokens, why it ended, what is handed on, how many tokens were computed for it."""

    tokens: list[int]
    reason: str | None
    params: dict[str, Any] | None
    computed: int


class Host:
    def __init__(self, setup: Setup) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        config = None
        if setup.extra is not None:
            config = KVTransferConfig(
                kv_connector="TorchKVConnector",
                kv_connector_module_path="torchkv.integrations.vllm",
                kv_role=setup.role,
                kv_load_failure_policy=setup.policy,
                kv_connector_extra_config=setup.extra,
            )
        self.llm = LLM(
            model=setup.model,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype=setup.dtype,
            attention_backend=setup.backend,
            max_model_len=1024,
            max_num_seqs=8,
            block_size=setup.block_size,
            max_num_batched_tokens=CHUNK,
            enable_chunked_prefill=True,
            num_gpu_blocks_override=BLOCKS,
            enable_prefix_caching=setup.prefix_caching,
            tensor_parallel_size=setup.tp_size,
            disable_custom_all_reduce=True,
            kv_transfer_config=config,
        )
        self.engine = self.llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.finished: dict[str, Finished] = {}
        self.computed: Counter[str] = Counter()  # tokens
        self.received: list[Any] = []  # the works of all requests that this process's worker has received
        self._watch_receives()
        self._watch_schedule()
        self.steps_left: int | None = None  # None: as many as there is work for

    def _watch_schedule(self) -> None:
        """Counts the tokens that the engine computes for each request, by the names that tests gave them."""
        schedule = self.scheduler.schedule

        def counted(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            for request, tokens in output.num_scheduled_tokens.items():
                self.computed[request.rpartition("-")[0] or request] += tokens
            return output

        self.scheduler.schedule = counted

    def turn(self) -> bool:
        """One step of the engine, if it has anything to do and may. Whether there was one."""
        if self.steps_left == 0 or not self.scheduler.has_requests():
            return False
        if self.steps_left is not None:
            self.steps_left -= 1
        outputs = self.engine.step()
        for output in outputs:
            if output.finished:
                self.finished[output.request_id] = Finished(
                    list(output.outputs[0].token_ids),
                    output.outputs[0].finish_reason,
                    output.kv_transfer_params,
                    self.computed.pop(output.request_id, 0),
                )
        return True

    def _watch_receives(self) -> None:
        """Keeps what this process's worker receives; nothing where workers have processes of their own."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        side = get_kv_transfer_group()._worker if has_kv_transfer_group() else None
        if side is None:
            return
        recv_pages = side.kv.recv_pages

        def kept(*args: Any, **kwargs: Any) -> Any:
            self.received.append(recv_pages(*args, **kwargs))
            return self.received[-1]

        side.kv.recv_pages = kept

    # ------------------------------------------------------------------ commands

    def add(self, request: str, prompt: list[int], max_tokens: int, params: dict[str, Any] | None) -> None:
        from vllm import SamplingParams, TokensPrompt

        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": params} if params is not None else None,
        )
        self.engine.add_request(request, TokensPrompt(prompt_token_ids=prompt), sampling)

    def abort(self, request: str) -> None:
        self.engine.abort_request([request])

    def steps(self, number: int | None) -> None:
        """From now on this many steps only; None: as many as there is work for."""
        self.steps_left = number

    def take(self) -> dict[str, Finished]:
        found, self.finished = self.finished, {}
        return found

    def state(self) -> tuple[int, list[str], int | None]:
        """Free blocks, requests that hold any, steps that may still be made."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return pool.get_num_free_blocks(), list(self.scheduler.requests), self.steps_left

    def reset(self) -> bool:
        """Forgets cached prefixes. False if a block is in use."""
        return bool(self.llm.reset_prefix_cache())

    def preempt(self) -> None:
        """Takes all requests' blocks away, as if they were needed for others."""
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def granted(self, request: str) -> bool:
        """Whether this engine has granted blocks to whoever prefills the request."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        receiving = get_kv_transfer_group()._worker._receiving
        return any(name.startswith(request) and each.work is not None for name, (_, each) in receiving.items())

    def address(self) -> tuple[str, int]:
        endpoint = self.scheduler.connector._scheduler.endpoint
        assert endpoint is not None
        return endpoint

    def counters(self) -> dict[str, Any]:
        """What torchkv says of this engine's only worker."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        side = get_kv_transfer_group()._worker
        return {
            "quarantined": side.kv.quarantined(),
            "peers": sorted(side.kv.peers()),
            "bytes": self.received[-1].bytes if self.received else 0,
        }


def main(setup: Setup, pipe: Connection, log: Path, environment: dict[str, str]) -> None:
    """Runs until the pipe is closed."""
    os.environ.update({**ENVIRONMENT, **environment})
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    try:
        host = Host(setup)
    except Exception as error:  # noqa: BLE001  # whatever it is, the test wants to know
        traceback.print_exc()
        pipe.send(f"{type(error).__name__}: {error}")
        sys.exit(1)
    pipe.send(None)
    while True:
        if pipe.poll(0 if host.turn() else 0.002):
            try:
                name, args = pipe.recv()
            except EOFError:
                break
            pipe.send(getattr(host, name)(*args))
    os._exit(0)  # the engines of killed peers need no orderly end
