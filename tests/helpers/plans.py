"""Plans in tests: the check of every byte that one moves, the tokens it owes, and verbs of any plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from tests.helpers.layouts import instances
from tests.helpers.references.page_transfer import compare
from torchkv.layout.descriptors import page_pairs
from torchkv.layout.layout import KVLayout
from torchkv.layout.pair_plan import PairPlan, compile_plan, coverage_gap
from torchkv.layout.pieces import Cutter, Piece
from torchkv.layout.plan_segment import PlanSegment

__all__ = ["Verb", "check", "owed_of", "plans", "verbs"]


def check(writers: Mapping[int, KVLayout], reader: KVLayout, **given: object) -> None:
    given = {"num_tokens": 19, "rng": np.random.default_rng(), **given}
    assert coverage_gap(writers, reader) is None
    assert compare(writers, reader, **given) == (0, 0)


def owed_of(plan: PairPlan, layer: int, granted: int, limit: int | None = None) -> list[tuple[int, int]]:
    """Tokens owed in one layer."""
    found = {each: owed for layers, owed in plan.owed(granted, limit) for each in layers}
    assert dict(plan.owed(granted, limit, layers=[layer])) == ({(layer,): found[layer]} if layer in found else {})
    return found.get(layer, [])


class Verb(NamedTuple):
    """Sender pages [start, start + num_pages) of some layers, under a grant."""

    plan: PairPlan
    layers: tuple[int, ...]
    start: int
    num_pages: int
    limit_tokens: int
    checksum: bool

    def cutter(self) -> Cutter:
        return Cutter(
            self.plan, self.layers, self.start, self.num_pages, limit_tokens=self.limit_tokens, checksum=self.checksum
        )

    def listed(self, segment: PlanSegment, start: int, num_pages: int) -> list[int]:
        """First token, after the prefix, of each pair that is owed: listed by `page_pairs`, not counted."""
        pairs = page_pairs(
            segment,
            num_src_pages=num_pages,
            start=start,
            limit_tokens=self.limit_tokens,
            src_page_size=self.plan.src_page_size,
            dst_page_size=self.plan.dst_page_size,
        )
        return (pairs.dst_index * self.plan.dst_page_size + pairs.dst_token).tolist()

    def owed(self, piece: Piece) -> list[tuple[int, int, int]]:
        """(segment, layer, token) of each pair of a piece."""
        return [
            (number, layer, token)
            for number, segment in enumerate(self.plan.segments)
            for layer in segment.layers
            if layer in piece.layers
            for token in self.listed(segment, piece.start, piece.num_pages)
        ]


def plans(writers: Mapping[int, KVLayout], reader: KVLayout) -> list[PairPlan]:
    return [plan for rank in writers if (plan := compile_plan(rank, writers, reader)).segments]


@st.composite
def verbs(draw: st.DrawFn) -> Verb:
    found = plans(*draw(instances()))
    plan = draw(st.sampled_from(found))
    grant_pages = draw(st.integers(1, 12))
    limit = grant_pages * plan.dst_page_size
    most = -(-limit // plan.src_page_size)
    start = draw(st.integers(0, most - 1))
    layers = tuple(draw(st.permutations(range(4)))[: draw(st.integers(1, 4))])
    return Verb(plan, layers, start, draw(st.integers(1, most - start)), limit, draw(st.booleans()))
