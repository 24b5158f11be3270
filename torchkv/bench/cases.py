"""The host cases of the benchmark: pairs of layouts, the path between them, and the gate of each."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchkv.layout.layout import KVLayout

__all__ = ["CASES", "Case"]

LAYERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One writer and one reader; `LAYERS` layers of shuffled pages move from one to the other.

    page_size: tokens of a page. head_dim: elements of a head, bfloat16. heads_read: kv heads (of 8) that the reader
    holds. path: the forced path, or None if the cost model chooses. tls: ``UCX_TLS`` of both processes, or None for
    UCX's default. limit: what the rate is compared with, "memcpy" or "python puts" (see `limits`). gate: the least
    acceptable ratio to the limit, or None if the ratio is only reported.
    """

    name: str
    page_size: int
    head_dim: int
    heads_read: int = 8
    path: str | None = None
    tls: str | None = None
    limit: str = "memcpy"
    gate: float | None = None

    def layouts(self, nbytes: int) -> tuple[KVLayout, KVLayout, int]:
        """The writer's layout, the reader's, and how many pages make about ``nbytes`` of payload."""
        writer, reader = self._layout(1), self._layout(8 // self.heads_read)
        return writer, reader, max(1, nbytes // (2 * LAYERS * reader.page_nbytes("k")))

    def _layout(self, tp_size: int) -> KVLayout:
        return KVLayout.gqa(
            num_layers=LAYERS,
            num_kv_heads=8,
            head_dim=self.head_dim,
            page_size=self.page_size,
            dtype=torch.bfloat16,
            tp_size=tp_size,
        )


CASES = (
    Case(name="pages 64 KiB, view", page_size=16, head_dim=256, gate=0.8),
    Case(name="pages 4 KiB, view", page_size=1, head_dim=256, gate=0.5),
    Case(name="slices 512 B, view", page_size=16, head_dim=128, heads_read=2, gate=0.3),
    Case(name="pages 64 KiB, put", page_size=16, head_dim=256, path="runs"),
    Case(name="pages 4 KiB, put", page_size=1, head_dim=256, path="runs"),
    Case(
        name="slices 512 B, put", page_size=16, head_dim=128, heads_read=2, path="slices", limit="python puts", gate=5.0
    ),
    Case(name="pages 64 KiB, put", page_size=16, head_dim=256, path="runs", tls="tcp"),
    Case(
        name="slices 512 B, put",
        page_size=16,
        head_dim=128,
        heads_read=2,
        path="slices",
        tls="tcp",
        limit="python puts",
    ),
)
