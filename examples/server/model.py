"""The model that workers run, and its tokenizer: a checkpoint, or a tiny one with seeded random weights."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.decoders import DecodeStream
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

TINY = ("llama", "qwen3")  # of examples/disagg/models.py; a token is a byte
BEGIN = "<begin>"


def load_tokenizer(name: str) -> Tokenizer:
    """name: of a tiny model, or a directory or repository with a checkpoint."""
    if name in TINY:
        tokenizer = Tokenizer(BPE({char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
        tokenizer.add_special_tokens([BEGIN])
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.post_processor = TemplateProcessing(single=f"{BEGIN} $0", special_tokens=[(BEGIN, 256)])
        return tokenizer
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name).backend_tokenizer


def load_model(name: str, device: str) -> Any:
    """A causal language model of transformers, with full attention in all layers."""
    import torch

    if name in TINY:
        from examples.disagg import models

        config = models.make_config(name, layers=4, hidden=128)
        return models.build(config, seed=0, device=torch.device(device))
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(name, dtype="auto").to(device).eval()


class Detokenizer:
    """Text as tokens come: what is no whole character yet comes with a later token, or at the end."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._given = 0

    def step(self, tokens: list[int], *, last: bool = False) -> str:
        self._ids += tokens
        text = "".join(self._stream.step(self._tokenizer, token) or "" for token in tokens)
        self._given += len(text)
        if last:
            text += self._tokenizer.decode(self._ids)[self._given :]
        return text
