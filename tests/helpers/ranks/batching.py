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
OPTIONS = {"timeout": 5.0, "grant_timeout": 60.0, "staging_recv": 1 << 22, "staging_send": 1 << 22}


class Batching:
    """What runs in this process. sources: request id -> address, for a process that decodes."""

    manager: Any
    model: LlamaForCausalLM
    endpoint: adapter.Endpoint | None
    sources: dict[str, str]
    computed: Counter[str]  # tokens that went through the model


def begin(role: str, instance: str, num_kv_heads: int = 4, timeout: float = 60.0) -> str:
    """Starts a manager. role: prefill, decode, or alone. The address of this instance."""
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
    Batching.model = LlamaForCausalLM(config).eval()
    Batching.computed, Batching.sources, Batching.endpoint = Counter(), {}, None
    Batching.model.model.register_forward_pre_hook(_count, with_kwargs=True)
    options = torchkv.Options(**{**OPTIONS, "grant_timeout": timeout})
    if role == "prefill":
        Batching.endpoint = adapter.prefill(instance, options=options)
    elif role == "decode":
        Batching.endpoint = adapter.decode(instance, lambda request: Batching.sources[request], options=options)
    Batching.manager = Batching.model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=64,
            max_batch_tokens=64,
            scheduler_type="fifo" if Batching.endpoint is None else Batching.endpoint.scheduler,
            use_async_batching=False,
            allow_block_sharing=False,
        ),
    )
    Batching.manager.start()
    return "" if Batching.endpoint is None else Batching.endpoint.address.result(30)


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


def await_free(share: float = 1.0) -> None:
    """Waits until this share of the cache is free."""
    cache = Batching.manager.batch_processor.cache
    until = time.monotonic() + 60
    while cache.compute_free_capacity() < share or (share < 1.0 and cache.compute_free_capacity() > share):
        assert time.monotonic() < until, cache.compute_free_capacity()
        time.sleep(0.01)


def end() -> None:
    Batching.manager.stop(block=True, timeout=30)
    if Batching.endpoint is not None:
        Batching.endpoint.close()
