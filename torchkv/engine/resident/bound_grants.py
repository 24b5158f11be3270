"""Grants as the resident loop keeps them: a bit for each writer, and what it has bound a send to."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from torchkv.core.loop.limits import MAX_PEERS
from torchkv.protocol.actions import BoundGrant

if TYPE_CHECKING:
    from torchkv.core.core import Core
    from torchkv.layout.pair_plan import PairPlan

__all__ = ["as_bits", "as_ranks", "grant_bound_on"]


def grant_bound_on(core: Core, flow: int, request: str, dst: int, plan: PairPlan) -> BoundGrant:
    """The grant that a send is bound to which had begun without Python's knowing it. request, dst: of the send."""
    peer_flow, generation, prefix_tokens, pages, state_slot = core.sends.bound(flow)
    return BoundGrant(
        dst=dst,
        generation=generation,
        request=request,
        prefix_tokens=prefix_tokens,
        pages=pages,
        plan=plan,
        state_slot=state_slot,
        flow=peer_flow,
    )


@lru_cache(maxsize=256)
def as_bits(ranks: tuple[int, ...]) -> int:
    """A bit for each rank, as a signed word."""
    bits = sum(1 << rank for rank in ranks)
    return bits - (1 << 64) if bits >> 63 else bits


@lru_cache(maxsize=256)
def as_ranks(bits: int) -> tuple[int, ...]:
    """The ranks of which a bit is set."""
    return tuple(rank for rank in range(MAX_PEERS) if bits >> rank & 1)
