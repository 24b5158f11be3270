"""Greedy generation, the single-process reference, and the comparison of the two."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache

FLOAT32_EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Generation:
    """``tokens``: the generated ids, the first from the prefill. ``logits``: [len(tokens) - 1, vocab], float32,
    from which the other tokens were chosen."""

    tokens: list[int]
    logits: torch.Tensor


def first_token(model: nn.Module, prompt: torch.Tensor, cache: Cache) -> int:
    """Prefill: run ``prompt`` [1, tokens] through the model, filling ``cache``; the most likely next token."""
    output = model(input_ids=prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return int(output.logits[0, -1].argmax())


def continue_from(
    model: nn.Module,
    cache: Cache,
    first: int,
    *,
    prompt_tokens: int,
    new_tokens: int,
    on_token: Callable[[int], None] = lambda done: None,
) -> Generation:
    """Decode: generate ``new_tokens`` ids, ``first`` included, one by one from a filled cache.

    ``on_token(done)`` is called after each with the number of ids known.
    """
    tokens, logits = [first], []
    for position in range(prompt_tokens, prompt_tokens + new_tokens - 1):
        output = model(
            input_ids=torch.tensor([[tokens[-1]]]).to(model.device),
            position_ids=torch.tensor([[position]]).to(model.device),
            past_key_values=cache,
            use_cache=True,
        )
        logits.append(output.logits[0, -1])
        tokens.append(int(logits[-1].argmax()))
        on_token(len(tokens))
    return Generation(tokens, torch.stack(logits))


def single_process(model: nn.Module, prompt: torch.Tensor, *, new_tokens: int) -> Generation:
    """The reference: prefill and decode in one process, with Hugging Face's own cache and nothing of torchkv."""
    cache = DynamicCache(config=model.config)
    first = first_token(model, prompt, cache)
    return continue_from(model, cache, first, prompt_tokens=prompt.shape[1], new_tokens=new_tokens)


@dataclass(frozen=True)
class Comparison:
    """How a generation differs from the reference.

    ``allowed``: how far two logits may be apart; 0 asks for the same bits. ``closest_call``: the smallest gap
    between the reference's first and second choice, that is, how large an error must be to change a token.
    """

    tokens_equal: bool
    difference: float
    allowed: float
    closest_call: float

    @property
    def logits_equal(self) -> bool:
        """True if every logit is within ``allowed``. A NaN never is."""
        return self.difference <= self.allowed


def rounding_allowance(reference: Generation, config: PreTrainedConfig) -> float:
    """How far logits may move when tensor parallelism adds the same numbers up in another order.

    Every layer ends two sums (attention output, MLP) whose order depends on the number of ranks. Reordering a
    float32 sum of n terms moves it by about eps * sqrt(n) of its size, and the moves of the 2 * layers sums add up
    in the residual stream. Runs stay about ten times below this; one page of wrong signs in one layer moves
    logits by more than a hundred times as much (--corrupt shows by how much).
    """
    sums = 2 * config.num_hidden_layers
    terms = config.hidden_size
    scale = reference.logits.abs().max().item()
    return FLOAT32_EPS * sums * math.sqrt(terms) * scale


def compare(generated: Generation, reference: Generation, *, allowed: float) -> Comparison:
    """Compare tokens and logits; ``allowed`` is the largest difference of a logit that still counts as equal."""
    top = reference.logits.topk(2, dim=-1).values
    return Comparison(
        tokens_equal=generated.tokens == reference.tokens,
        difference=(generated.logits - reference.logits).abs().max().item(),
        allowed=allowed,
        closest_call=(top[:, 0] - top[:, 1]).min().item(),
    )
