"""Continuous batching of transformers in a process of its own, over a tiny model; see tests/serving."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import torchkv
from torchkv.integrations import transformers as adapter

PAGE = 16
BLOCKS = 64
OPTIONS = {"timeout": 5.0, "grant_timeout": 60.0, "staging_recv": 1 << 22, "staging_send": 1 << 22}


class Batching:
    """What runs in this process. sources: request id -> address, for a process that decodes."""

    manager: Any
    model: LlamaForCausalLM
    endpoint: adapter.Endpoint | None
    sources: dict[str, str]
    computed: Counter[str]  # tokens that went through the model


def begin(
    role: str,
    instance: str,
    num_kv_heads: int = 4,
    timeout: float = 60.0,
    *,
    device: str = "cpu",
    path: str | None = None,
    share_blocks: bool = False,
) -> str:
    """Starts a manager. role: prefill, decode, or alone. share_blocks: prompts share those of a prefix that they have
    in common. The address of this instance.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=num_kv_heads,
        head_dim=16,
        max_position_embeddings=1024,
    )
    Batching.model = LlamaForCausalLM(config).eval().to(device)
    Batching.computed, Batching.sources, Batching.endpoint = Counter(), {}, None
    Batching.model.model.register_forward_pre_hook(_count, with_kwargs=True)
    options = torchkv.Options(**{**OPTIONS, "grant_timeout": timeout, "path": path})
    if role == "prefill":
        Batching.endpoint = adapter.prefill(instance, options=options)
    elif role == "decode":
        Batching.endpoint = adapter.decode(instance, _source, options=options)
    Batching.manager = Batching.model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=BLOCKS,
            max_batch_tokens=64,
            scheduler_type="fifo" if Batching.endpoint is None else Batching.endpoint.scheduler,
            use_async_batching=False,
            allow_block_sharing=share_blocks,
        ),
    )
    Batching.manager.start()
    until = time.monotonic() + 120  # on a GPU kernels are compiled
    while Batching.manager.batch_processor is None:  # it appears just behind the scheduler, which joins
        assert Batching.manager.is_running(), "the manager has ended"
        assert time.monotonic() < until, "the manager has not started"
        time.sleep(0.01)
    return "" if Batching.endpoint is None else Batching.endpoint.address.result(0)


def _source(request: str) -> str:
    if not Batching.sources[request]:
        raise torchkv.ProtocolError(f"nobody prefills {request}")
    return Batching.sources[request]


def _count(_module: Any, _arguments: Any, named: dict[str, Any]) -> None:
    Batching.computed["tokens"] += named["input_ids"].shape[-1]


def add(request: str, prompt: list[int], tokens: int, source: str = "") -> None:
    Batching.sources[request] = source
    Batching.manager.add_request(prompt, request_id=request, max_new_tokens=tokens)


def result(request: str) -> list[int]:
    until = time.monotonic() + 60
    while (found := Batching.manager.get_result(request, timeout=0.2)) is None:
        assert time.monotonic() < until, f"{request} has not ended"
    assert found.error is None, found.error
    return list(found.generated_tokens)


def generate(prompts: dict[str, list[int]], tokens: int, source: str = "") -> dict[str, list[int]]:
    for request, prompt in prompts.items():
        add(request, prompt, tokens, source)
    return {request: result(request) for request in prompts}


def cancel(request: str) -> None:
    Batching.manager.cancel_request(request)


def take_computed() -> int:
    return Batching.computed.pop("tokens", 0)


def place() -> str:
    """The device of the cache."""
    return str(Batching.manager.batch_processor.cache.cache_tensor.device)


def free_blocks() -> int:
    """Blocks of the pool that no request holds. Those that are kept in case a prompt begins like theirs count too."""
    cache = Batching.manager.batch_processor.cache
    (allocator,) = cache.cache_allocators.values()
    free: int = cache.compute_free_capacity(relative=False) // allocator.bytes_per_block
    return free + len(allocator.ledger.cached_blocks)


def await_free(blocks: int = BLOCKS) -> None:
    """Waits until so many blocks are free."""
    until = time.monotonic() + 60
    while free_blocks() != blocks:
        assert time.monotonic() < until, free_blocks()
        time.sleep(0.01)


def paths(peer: str) -> dict[str, int]:
    """Path -> bytes that were sent to the only rank of instance ``peer``."""
    assert Batching.endpoint is not None
    return dict(Batching.endpoint.member.stats().sent[f"{peer}:0"])


def quarantined() -> dict[int, tuple[int, ...]]:
    assert Batching.endpoint is not None
    return Batching.endpoint.member.quarantined()


def end() -> None:
    Batching.manager.stop(block=True, timeout=30)
    if Batching.endpoint is not None:
        Batching.endpoint.close()
