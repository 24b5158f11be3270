"""Whether a grant is well-formed, whether a verb fits it, and what of the verb's pages lies behind the prefix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from torchkv.arrays import Int64Array
from torchkv.errors import LayoutMismatch, PageOutOfRange, ProtocolError
from torchkv.layout.group_map import GroupMap
from torchkv.layout.pair_plan import first_page_outside
from torchkv.protocol.actions import BoundGrant, SendOp
from torchkv.protocol.messages import MAX_COUNT, MAX_REQUEST_BYTES, Grant, check_inside, unpack_pages

__all__ = [
    "behind",
    "bound_grant",
    "check_grant",
    "check_prefix",
    "check_prefixes",
    "check_range",
    "drop_held",
    "loop_grant",
]

Naming: TypeAlias = Callable[[int], str]  # a rank -> what messages call it, see `GroupMap.name`


def bound_grant(group_map: GroupMap, src: int, message: Grant) -> BoundGrant:
    """A grant of rank ``src`` as its writer keeps it. Raises ``ProtocolError`` if it is malformed."""
    writers, peer = tuple(message.writers), group_map.info[src]
    _check_writers(group_map, src, writers)
    if message.absent_tokens > message.prefix_tokens:
        raise ProtocolError(f"grant of {group_map.name(src)} names {message.absent_tokens} absent tokens of its prefix")
    grant = BoundGrant(
        dst=src,
        generation=message.generation,
        request=message.request,
        prefix_tokens=message.prefix_tokens,
        pages=unpack_pages(message.pages, peer.num_pages),
        plan=group_map.of(message.request).plan(group_map.rank, writers, src),
        state_slot=message.state_slot,
        flow=message.flow,
        absent_tokens=message.absent_tokens,
    )
    _check_slot(group_map, src, grant)
    return grant


def loop_grant(
    group_map: GroupMap,
    src: int,
    *,
    name: bytes,
    generation: int,
    prefix_tokens: int,
    pages: Int64Array,
    writers: tuple[int, ...],
    state_slot: int | None,
    flow: int,
) -> BoundGrant:
    """As `bound_grant`, of a grant that the resident loop was told of: as words, which may be any.

    flow, and the lengths of name and pages, are known to be in range. On a verb's critical path.
    """
    try:
        request = name.decode()
    except UnicodeDecodeError as error:
        raise ProtocolError(f"grant of {group_map.name(src)} does not decode: {error}") from error
    if not 1 <= len(name) <= MAX_REQUEST_BYTES or not (0 <= generation < MAX_COUNT and 0 <= prefix_tokens < MAX_COUNT):
        raise ProtocolError(
            f"grant of {group_map.name(src)} has a name of {len(name)} bytes, generation {generation} and a prefix of "
            f"{prefix_tokens} tokens, of which one is out of range"
        )
    _check_writers(group_map, src, writers)
    check_inside(pages, group_map.info[src].num_pages)
    grant = BoundGrant(
        dst=src,
        generation=generation,
        request=request,
        prefix_tokens=prefix_tokens,
        pages=pages,
        plan=group_map.of(request).plan(group_map.rank, writers, src),
        state_slot=state_slot,
        flow=flow,
    )
    _check_slot(group_map, src, grant)
    return grant


def _check_slot(group_map: GroupMap, src: int, grant: BoundGrant) -> None:
    slot, num_slots = grant.state_slot, group_map.info[src].num_slots
    if grant.plan.owes_state if slot is None else not 0 <= slot < num_slots:
        raise ProtocolError(f"grant of {group_map.name(src)} names state slot {slot}, it has {num_slots} slots")


def _check_writers(group_map: GroupMap, src: int, writers: tuple[int, ...]) -> None:
    if list(writers) != sorted(set(writers)) or group_map.rank not in writers:
        raise ProtocolError(
            f"grant of {group_map.name(src)} names writers {list(writers)}, unsorted or without this rank"
        )
    for rank in writers:
        if rank not in group_map.info:
            raise ProtocolError(f"grant of {group_map.name(src)} names rank {rank}, which is not in this group")


def check_grant(op: SendOp, grant: BoundGrant, name: Naming) -> None:
    """Checks an op against the grant of its receiver.

    Raises ``PageOutOfRange`` for pages outside the grant, ``ProtocolError`` if another receiver of the same verb has
    another prefix, ``LayoutMismatch`` if the pages of the two sides should match and do not.
    """
    if op.whole and not grant.plan.page_for_page:
        raise LayoutMismatch(
            f"request {op.request!r} to {name(op.dst)}: the pages of the two ranks differ in heads, page size or "
            f"order, so whole pages cannot be sent; use send_slice or send_pages"
        )
    if not op.state:
        check_range(grant, op.start, op.num_pages, name)
        check_prefix(op, grant)


def check_prefix(op: SendOp, grant: BoundGrant) -> None:
    """Records the prefix of the op's receiver. Raises ``ProtocolError`` if another receiver of the verb has another."""
    op.prefixes[grant.dst] = grant.held_tokens
    if len(op.prefixes) > 1:
        check_prefixes(op.request, op.prefixes)


def check_prefixes(request: str, prefixes: Mapping[int, int]) -> None:
    """Raises ``ProtocolError`` unless all ``prefixes`` (rank -> tokens) are equal.

    One verb sends the same pages to all its receivers, and pages count from the end of the prefix.
    """
    if len(set(prefixes.values())) > 1:
        raise ProtocolError(
            f"request {request!r}: its receivers hold unequal prefixes (rank -> tokens: {prefixes}); "
            f"use one call a receiver, each with the pages after its own prefix"
        )


def drop_held(op: SendOp, grant: BoundGrant) -> None:
    """Leaves of an op what lies behind the prefix, and counts it from there.

    Of an op that counts from the prompt, or under a grant that counts absent pages as its prefix.
    """
    if not (op.from_prompt or grant.absent_tokens) or op.state:
        return
    op.start, op.num_pages, held = behind(grant, op.start, op.num_pages, from_prompt=op.from_prompt)
    op.from_prompt = False
    if held:
        op.source_pages = op.source_pages.behind(held)


def behind(grant: BoundGrant, start: int, num_pages: int, *, from_prompt: bool) -> tuple[int, int, int]:
    """Pages behind the grant's prefix: the first, counted from there, how many, and how many are held.

    from_prompt: whether ``start`` counts from the beginning of the prompt, not from the end of what the receiver holds.
    """
    prefix = (grant.prefix_tokens if from_prompt else grant.absent_tokens) // grant.plan.src_page_size
    held = min(max(prefix - start, 0), num_pages)
    return max(start - prefix, 0), num_pages - held, held


def check_range(grant: BoundGrant, start: int, num_pages: int, name: Naming) -> None:
    """Raises ``PageOutOfRange`` if one of the sender's pages [start, start + num_pages) lies outside the grant."""
    plan = grant.plan
    if (start + num_pages - 1) * plan.src_page_size < len(grant.pages) * plan.dst_page_size:
        return  # the last page begins inside the grant: the common case, on a verb's critical path
    outside = first_page_outside(start, num_pages, plan.src_page_size, grant.num_tokens)
    if outside is not None:
        raise PageOutOfRange(
            f"request {grant.request!r} to {name(grant.dst)}: page {outside} (counted after the prefix, "
            f"{grant.plan.src_page_size} tokens each) lies outside the grant of {len(grant.pages)} pages of "
            f"{grant.plan.dst_page_size} tokens behind a prefix of {grant.prefix_tokens} tokens; "
            f"send only pages after the prefix"
        )
