"""What is asked of a cluster: instances that prefill and instances that decode, and requests from ones to others."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from torchkv.layout.layout import KVLayout

__all__ = ["LONG", "SHORT", "Shape", "Workload"]

MAX_TP = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One request: a prompt of ``tokens``, whose layers are sent in ``verbs`` groups as the prefill computes them.

    prefill: seconds from the first group to the last. requests_per_second: which arrive at one prefill instance, as a
    Poisson process. Each goes to an instance that decodes, at random.
    """

    name: str
    tokens: int
    head_dim: int
    prefill: float
    requests_per_second: float
    num_layers: int = 32
    num_kv_heads: int = 8
    page_size: int = 16
    verbs: int = 4

    @property
    def pages(self) -> int:
        return self.tokens // self.page_size

    @property
    def nbytes(self) -> int:
        """Bytes of one request."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * 2 * self.tokens

    def layout(self, tp_rank: int, tp_size: int) -> KVLayout:
        return KVLayout.gqa(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=self.page_size,
            dtype=torch.bfloat16,
            order="HND",
            tp_rank=tp_rank,
            tp_size=tp_size,
        )

    def layer_groups(self) -> list[tuple[int, ...]]:
        """The layers of each verb."""
        cuts = [self.num_layers * i // self.verbs for i in range(self.verbs + 1)]
        return [tuple(range(lo, hi)) for lo, hi in itertools.pairwise(cuts)]


# A prompt of 2,048 tokens moves 268 MB; what it costs is its bytes. One of a page moves 0.26 MB; that costs messages.
LONG = Workload(name="long", tokens=2048, head_dim=128, prefill=0.1, requests_per_second=100.0)
SHORT = Workload(name="short", tokens=16, head_dim=16, prefill=0.001, requests_per_second=100.0)


@dataclass(frozen=True, slots=True)
class Shape:
    """A cluster of ``ranks``: half of them prefill with some tensor parallelism, half decode with half of that.

    2 ranks: TP 1 and TP 1. 4: one instance of TP 2, two of TP 1. 8 and more: TP 4, and twice as many of TP 2.
    """

    ranks: int

    def __post_init__(self) -> None:
        if self.ranks < 2 or self.ranks & (self.ranks - 1):
            raise ValueError(f"{self.ranks} ranks: the number must be a power of two, 2 at least")

    @property
    def prefill_tp(self) -> int:
        return min(MAX_TP, self.ranks // 2)

    @property
    def decode_tp(self) -> int:
        return max(1, self.prefill_tp // 2)

    @property
    def prefills(self) -> list[tuple[int, ...]]:
        """The ranks of each instance that prefills."""
        return _cut(range(self.ranks // 2), self.prefill_tp)

    @property
    def decodes(self) -> list[tuple[int, ...]]:
        return _cut(range(self.ranks // 2, self.ranks), self.decode_tp)

    def messages(self, verbs: int) -> dict[str, int]:
        """Control messages of one request, by kind, if nothing goes wrong and nothing is slow; none within a rank.

        Every rank that decodes has as many writers as its heads are cut into by those that prefill.
        """
        pairs = max(self.prefill_tp, self.decode_tp)
        others = self.decode_tp - 1  # ranks that decode, without their leader
        counts = {"Grant": pairs, "Attest": pairs * verbs, "Seal": pairs, "Verdict": pairs}
        within = {"Post": others, "Outcome": others, "InstanceVerdict": others}
        return counts | {kind: count for kind, count in within.items() if count}


def _cut(ranks: range, size: int) -> list[tuple[int, ...]]:
    return [tuple(ranks[at : at + size]) for at in range(0, len(ranks), size)]
