"""What all rivals move, and how many times a rival's rate torchkv's must be."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchkv.layout.layout import KVLayout

__all__ = ["CASES", "GATES", "Case", "Gate", "cases"]

HEADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One request: shuffled pages of one rank, which go to shuffled pages of another.

    page_size: tokens of a page. head_dim: elements of a head, bfloat16. heads_read: kv heads (of 8) that the reader
    holds. device: "cpu" or "cuda". tcp: whether the two ranks reach each other by TCP only.
    """

    name: str
    page_size: int
    head_dim: int
    heads_read: int = HEADS
    layers: int = 4
    device: str = "cpu"
    tcp: bool = False

    def layout(self, rank: int) -> KVLayout:
        """Of the writer, rank 0, or of the reader, rank 1."""
        return KVLayout.gqa(
            num_layers=self.layers,
            num_kv_heads=HEADS,
            head_dim=self.head_dim,
            page_size=self.page_size,
            dtype=torch.bfloat16,
            tp_size=HEADS // self.heads_read if rank else 1,
        )

    def num_pages(self, nbytes: int) -> int:
        """How many pages make about ``nbytes`` of payload."""
        return max(1, nbytes // (2 * self.layers * self.layout(1).page_nbytes("k")))

    def payload(self, nbytes: int) -> int:
        """The bytes of a request of `num_pages` pages."""
        return 2 * self.layers * self.layout(1).page_nbytes("k") * self.num_pages(nbytes)


@dataclass(frozen=True, slots=True)
class Gate:
    """In the case of this name torchkv's rate must be at least ``factor`` times the rival's."""

    case: str
    rival: str
    factor: float


CASES = (
    Case(name="pages 64 KiB", page_size=16, head_dim=256),
    Case(name="pages 4 KiB", page_size=1, head_dim=256),
    Case(name="slices 512 B", page_size=16, head_dim=128, heads_read=2),
    Case(name="pages 64 KiB, TCP", page_size=16, head_dim=256, tcp=True),
    Case(name="pages 4 KiB, TCP", page_size=1, head_dim=256, tcp=True),
    Case(name="slices 512 B, TCP", page_size=16, head_dim=128, heads_read=2, tcp=True),
    Case(name="pages 128 KiB, GPU", page_size=64, head_dim=128, layers=32, device="cuda"),
    Case(name="slices 512 B, GPU", page_size=16, head_dim=128, heads_read=2, layers=32, device="cuda"),
)

GATES = (
    Gate("pages 64 KiB", "nixl", 1.5),
    Gate("pages 4 KiB", "nixl", 5.0),
    Gate("pages 4 KiB", "mooncake", 20.0),
    Gate("slices 512 B", "nixl", 20.0),
    Gate("pages 64 KiB, TCP", "nixl", 1.0),
    Gate("slices 512 B, TCP", "nixl", 5.0),
    Gate("pages 128 KiB, GPU", "nixl", 5.0),
    Gate("slices 512 B, GPU", "nixl", 500.0),
)


def cases(device: str, only: str = "") -> list[Case]:
    """Those on ``device`` that have ``only`` in their name."""
    return [case for case in CASES if case.device == device and only in case.name]
