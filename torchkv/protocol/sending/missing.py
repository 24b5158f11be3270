"""What a request owes and has not sent: `finish` names it, and so does the grant if that comes later.

Before the grant names the writers, what is owed is a guess: nothing is named that some grant does not owe.
"""

from __future__ import annotations

from torchkv.layout.group_map import GroupMap
from torchkv.layout.pair_plan import PairPlan, largest_grant, seal_matches
from torchkv.protocol.actions import ANYBODY, BoundGrant
from torchkv.protocol.coverage import LayerCoverage
from torchkv.protocol.sending.request import SenderRequest

__all__ = ["first_missing", "is_whole", "likely_plan", "state_left"]


def first_missing(
    group_map: GroupMap,
    request: str,
    dst: int,
    req: SenderRequest | None,
    grant: BoundGrant | None,
    *,
    state: bool = True,
) -> str | None:
    """Names the first thing that is owed and was not sent; None if there is none, as far as is known.

    req: the request, if it has begun. state: whether to look at the state, too.
    """
    text = _pages_missing(group_map, request, dst, req, grant)
    return _state_missing(group_map, request, dst, req, grant) if text is None and state else text


def is_whole(group_map: GroupMap, req: SenderRequest) -> bool:
    """Whether every page up to the highest one was sent of every layer: then a grant of as many pages misses none.

    And every state. Of a request that waits for its grant. Windows may allow less: then Python looks again once the
    grant is there.
    """
    plan, _ = likely_plan(group_map, req.request, req.dst)
    if plan.state is not None and not req.states.issuperset(plan.state.layers):
        return False
    if not req.num_pages:
        return not plan.layers
    if req.sent_all_of(plan.layers):
        return True
    pages = [(0, req.num_pages * plan.src_page_size)]
    return req.sent().first_gap([(plan.layers, pages)], unit=plan.src_page_size) is None


def likely_plan(group_map: GroupMap, request: str, dst: int) -> tuple[PairPlan, tuple[int, ...]]:
    """The plan towards ``dst`` before its grant names the writers, and these: as if they were all of this instance."""
    group_map = group_map.of(request)
    writers = group_map.contributing(group_map.siblings, dst)
    return group_map.plan(group_map.rank, writers, dst), writers


def state_left(group_map: GroupMap, request: str, req: SenderRequest | None) -> tuple[int, ...]:
    """Layers (global ids, ascending) whose state this rank holds and has not sent. req: if it has begun."""
    held = group_map.of(request).layout(group_map.rank).stateful_layers
    return tuple(sorted(held if req is None else held - req.states))


def _state_missing(
    group_map: GroupMap, request: str, dst: int, req: SenderRequest | None, grant: BoundGrant | None
) -> str | None:
    if dst == ANYBODY:
        return None
    state = (likely_plan(group_map, request, dst)[0] if grant is None else grant.plan).state
    assert state is not None
    if not state.layers:
        return None
    left = state_left(group_map, request, req)
    first = next((layer for layer in state.layers if layer in left), None)
    return None if first is None else f"layer {first}'s state was not sent; give state_slot, or send_state it first"


def _pages_missing(
    group_map: GroupMap, request: str, dst: int, req: SenderRequest | None, grant: BoundGrant | None
) -> str | None:
    num_pages = 0 if req is None else req.num_pages
    fits = True
    if grant is None:
        if dst == ANYBODY or num_pages == 0 or (req is not None and any(op.from_prompt for op in req.queue)):
            return None  # legal if the grant has no pages, or not those that were not sent
        plan, _ = likely_plan(group_map, request, dst)
        if group_map.parts and all(segment.stripe.window for segment in plan.segments):
            return None  # the receiver may hold, and need, less than its windows show
        limit = num_pages * plan.src_page_size
        # The largest grant that these pages may match. In layers with a sliding window it owes the fewest pages, so
        # what it owes every grant owes.
        granted = largest_grant(num_pages, plan.src_page_size, plan.dst_page_size)
    else:
        plan = grant.plan
        granted = limit = grant.num_tokens
        if num_pages == 0:
            first = LayerCoverage().first_gap(plan.owed(limit), unit=plan.src_page_size)
            if first is None:
                return None
            return f"nothing was sent, but layer {first[0]} page {first[1]} is owed; send it first"
        fits = seal_matches(num_pages, plan.src_page_size, len(grant.pages), plan.dst_page_size)
        if fits:
            limit = min(limit, num_pages * plan.src_page_size)
    if fits and req is not None and req.sent_all_of(plan.layers):
        return None
    sent = LayerCoverage() if req is None else req.sent()
    gap = sent.first_gap(plan.owed(granted, limit), unit=plan.src_page_size)
    if gap is not None:
        return f"layer {gap[0]} page {gap[1]} (counted after the prefix) was not sent{_extent(req, grant)}"
    if not fits:
        return f"every writer sends all pages after the prefix, also those another one writes{_extent(req, grant)}"
    return None


def _extent(req: SenderRequest | None, grant: BoundGrant | None) -> str:
    """The end of an error message about missing pages: how many were sent and granted, and what to do."""
    if req is None or grant is None:
        return "; send it, or cancel"
    return (
        f": {req.num_pages} pages of {grant.plan.src_page_size} tokens were sent, {len(grant.pages)} pages of "
        f"{grant.plan.dst_page_size} tokens are granted behind a prefix of {grant.prefix_tokens} tokens; send the "
        f"rest, or cancel"
    )
