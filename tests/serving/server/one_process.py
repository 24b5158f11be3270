"""What one process says that has the model to itself."""

from __future__ import annotations

import torch

from examples.server.model import load_model, load_tokenizer


class OneProcess:
    """Generates greedily by transformers' own `generate`, with a contiguous cache."""

    def __init__(self, device: str = "cpu") -> None:
        self._model, self.tokenizer = load_model("llama", device), load_tokenizer("llama")
        self._device = device

    def __call__(self, prompt: str | list[int], tokens: int) -> list[int]:
        ids = self.tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt
        prompts = torch.tensor([ids], device=self._device)
        found = self._model.generate(prompts, max_new_tokens=tokens, do_sample=False)
        return found[0, len(ids) :].tolist()
