"""Layers with a sliding window: which of their pages are owed, and that all code that counts pages agrees on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.helpers.layouts import group, mla
from tests.helpers.plans import Verb, check, owed_of, verbs
from tests.helpers.protocol import Acts, finish, grant, group_map, moved, pair, post, receiver, sender, verb
from tests.helpers.references import page_copy as page_copy_reference
from tests.helpers.references.page_transfer import compare, gqa, needed_from
from torchkv.cache import Placement
from torchkv.errors import LayoutMismatch, ProtocolError
from torchkv.layout import kernel_geometry
from torchkv.layout.descriptors import page_pairs
from torchkv.layout.layout import KVLayout
from torchkv.layout.pair_plan import PairPlan, compile_plan, largest_grant, seal_matches
from torchkv.layout.pieces import Cutter, Piece, check_piece, pair_ordinals, piece_layout
from torchkv.layout.plan_segment import PlanSegment, Window, first_owed
from torchkv.protocol.actions import BoundGrant, SendOp
from torchkv.protocol.messages import Attest, Seal, Verdict
from torchkv.transfer.offsets import PairOffsets
from torchkv.transfer.path_cost import load_of

# Where a window begins


@settings(max_examples=examples(500))
@given(
    tokens=st.integers(1, 300),
    sizes=st.sampled_from([(1, 1), (4, 4), (16, 16), (1, 16), (16, 1), (4, 16), (16, 4), (3, 6), (6, 3)]),
    larger=st.sampled_from([1, 2, 4]),
    count=st.integers(0, 60),
)
def test_nothing_that_any_prompt_needs_is_left_out(
    tokens: int, sizes: tuple[int, int], larger: int, count: int
) -> None:
    """And at most one unit more than the shortest prompt needs. The reference tries every length of a prompt."""
    granted, unit = count * sizes[1], max(sizes) * larger
    first = first_owed(granted, Window(tokens, *sizes, unit))
    assert first == needed_from(tokens, *sizes, granted) // unit * unit
    for num_pages in range(1, granted // sizes[0] + 3):
        if seal_matches(num_pages, sizes[0], count, sizes[1]):
            shortest = (num_pages - 1) * sizes[0] + 1
            assert first <= max(0, shortest - tokens), "the next token attends to positions > length - tokens"


@pytest.mark.parametrize(
    ("window", "granted", "first"),
    [
        (Window(128, 16, 16, 16), 1024, 880),  # at least 1009 tokens: 1008 attends to 881; 880 is the margin
        (Window(128, 16, 16, 64), 1024, 832),
        (Window(128, 16, 16, 16), 144, 0),
        (Window(128, 16, 16, 16), 160, 16),
        (Window(1, 16, 16, 16), 160, 128),
        (Window(128, 64, 16, 64), 1040, 832),  # 17 or 16 pages of 64: at least 961 tokens
        (Window(128, 16, 64, 64), 1024, 832),  # 61 to 64 pages of 16: at least 961 tokens
        (Window((1 << 31) - 1, 16, 16, 16), 1 << 20, 0),
        (Window(1, 16, 16, 16), 0, 0),
        (None, 1024, 0),
    ],
)
def test_examples(window: Window | None, granted: int, first: int) -> None:
    assert first_owed(granted, window) == first


@given(sizes=st.sampled_from([(1, 1), (4, 4), (1, 16), (16, 1), (3, 6)]), num_pages=st.integers(0, 60))
def test_the_largest_grant_that_a_seal_matches(sizes: tuple[int, int], num_pages: int) -> None:
    matching = [count for count in range(1200) if seal_matches(num_pages, sizes[0], count, sizes[1])]
    assert largest_grant(num_pages, *sizes) == matching[-1] * sizes[1]


def test_a_window_depends_on_the_grant_and_not_on_what_was_sealed() -> None:
    layout = gqa(windows={1: 4})
    plan = compile_plan(0, {0: layout}, layout)
    assert owed_of(plan, 0, 40) == [(0, 40)]
    assert owed_of(plan, 1, 40) == [(32, 40)]
    assert owed_of(plan, 1, 40, 36) == [(32, 36)]
    assert owed_of(plan, 1, 40, 32) == []
    assert owed_of(plan, 1, 36) == [(28, 36)]
    page = 2 * 4 * 4 * 4  # K and V x tokens x heads x bytes of a head
    assert plan.nbytes(40) == (10 + 2) * page
    assert [plan.nbytes(40, [layer]) for layer in range(3)] == [10 * page, 2 * page, 0]


def test_stripes_of_a_window() -> None:
    writers = {rank: mla(tp_rank=rank, tp_size=3, windows={0: 9}) for rank in range(3)}
    owed = [owed_of(compile_plan(rank, writers, mla(windows={0: 9})), 0, 40) for rank in range(3)]
    assert owed == [[(24, 28), (36, 40)], [(28, 32)], [(32, 36)]]


# Plans


MIXED = {0: 2, 2: 9}  # of three layers
PAIRS: dict[str, tuple[Mapping[int, KVLayout], KVLayout]] = {
    "equal": ({0: gqa(num_layers=3, windows=MIXED)}, gqa(num_layers=3, windows=MIXED)),
    "all layers": ({0: gqa(windows={0: 5, 1: 5})}, gqa(windows={0: 5, 1: 5})),
    "2 to 1": (group(gqa, 2, windows={1: 5}), gqa(windows={1: 5})),
    "1 to 4, HND": ({0: gqa(windows={1: 5})}, gqa(1, 4, order="HND", windows={1: 5})),
    "4 to 16": (group(gqa, 2, windows={1: 5}), gqa(page_size=16, windows={1: 5})),
    "16 to 4": (group(gqa, 2, page_size=16, windows={1: 5}), gqa(windows={1: 5})),
    "striped": (group(gqa, 8, windows={1: 5}), gqa(windows={1: 5})),
    "striped 4 to 16": (group(mla, 3, windows={1: 5}), mla(page_size=16, windows={1: 5})),
    "writers of unlike page sizes": (
        {0: mla(page_size=4, tp_size=2, windows={1: 3}), 1: mla(page_size=8, tp_rank=1, tp_size=2, windows={1: 3})},
        mla(page_size=2, windows={1: 3}),
    ),
    "stages": (
        {0: gqa(num_layers=3, layers=[0, 1], windows=MIXED), 1: gqa(num_layers=3, layers=[2], windows=MIXED)},
        gqa(num_layers=3, windows=MIXED),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("tokens", [1, 19, 64, 75])
def test_every_byte(name: str, tokens: int) -> None:
    writers, reader = PAIRS[name]
    check(writers, reader, num_tokens=tokens)
    check(writers, reader, num_tokens=tokens, chunk=1)


def with_windows(change: Callable[[Window], Window | None]) -> Callable[..., PairPlan]:
    """`compile_plan`, with each window replaced by ``change(window)``."""

    def made(writer: int, writers: Mapping[int, KVLayout], reader: KVLayout) -> PairPlan:
        plan = compile_plan(writer, writers, reader)
        segments = [
            replace(segment, stripe=segment.stripe._replace(window=change(window)))
            if (window := segment.stripe.window) is not None
            else segment
            for segment in plan.segments
        ]
        return replace(plan, segments=tuple(segments))

    return made


@pytest.mark.parametrize("name", PAIRS)
def test_negative_control_another_window_is_noticed(name: str) -> None:
    writers, reader = PAIRS[name]
    given = {"rng": np.random.default_rng(), "num_tokens": 75}
    wrong: list[Callable[[Window], Window | None]] = [
        lambda window: None,
        # By 3 units, the most holders of any of these cases, so that each of them writes too much, or too little.
        lambda window: window._replace(tokens=window.tokens + 3 * window.unit),
        lambda window: window._replace(tokens=window.tokens - 3 * window.unit),
    ]
    for change in wrong:
        assert compare(writers, reader, plan_for=with_windows(change), **given) != (0, 0)


def test_segments_that_owe_the_same_stay_neighbours() -> None:
    """So keys and values of the windowed layers are packed together, and so are those of the other layers."""
    layout = gqa(num_layers=4, windows={1: 5, 3: 5})
    plan = compile_plan(0, {0: layout}, layout)
    groups = [[(segment.component, segment.layers) for segment in group] for group in plan.groups]
    assert groups == [[("k", (0, 2)), ("v", (0, 2))], [("k", (1, 3)), ("v", (1, 3))]]
    assert plan.layers == (0, 1, 2, 3)
    unlike = gqa(num_layers=4, windows={1: 5, 3: 6})
    assert len(compile_plan(0, {0: unlike}, unlike).groups) == 3


def test_layouts_with_other_windows_are_refused() -> None:
    with pytest.raises(
        LayoutMismatch, match=r"rank 7 cannot write .* window of layer 1 is 5 on rank 7 and None on the"
    ):
        compile_plan(7, {7: gqa(windows={1: 5})}, gqa())


# All code that lists or counts the pairs of a verb agrees


def geometry_of(plan: PairPlan, segment: PlanSegment) -> kernel_geometry.Geometry:
    return kernel_geometry.geometry(
        segment,
        src_page_stride=1 << 12,
        dst_page_stride=1 << 12,
        src_page_size=plan.src_page_size,
        dst_page_size=plan.dst_page_size,
        num_src_pages=64,
        num_dst_pages=64,
        addresses=[0],
    )


def numbered(segment: PlanSegment, ordinals: range) -> list[int]:
    """First tokens of the pairs with these ordinals, by the definition of a stripe."""
    _, per_unit, holders, holder, _ = segment.stripe
    stripe = (pair for pair in range(1 << 20) if pair // per_unit % holders == holder)
    return [
        pair * segment.tokens
        for ordinal, pair in zip(range(ordinals.stop), stripe, strict=False)
        if ordinal in ordinals
    ]


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(verb=verbs())
def test_all_paths_move_the_same_pairs(verb: Verb) -> None:
    plan, start, num_pages, limit = verb.plan, verb.start, verb.num_pages, verb.limit_tokens
    chunk = range(start * plan.src_page_size, (start + num_pages) * plan.src_page_size)
    nbytes = 0
    for segment in plan.segments:
        where = {"start": start, "limit_tokens": limit}
        pairs = page_pairs(
            segment,
            num_src_pages=num_pages,
            src_page_size=plan.src_page_size,
            dst_page_size=plan.dst_page_size,
            **where,
        )
        listed = (pairs.dst_index * plan.dst_page_size + pairs.dst_token).tolist()
        assert listed == ((pairs.src_index + start) * plan.src_page_size + pairs.src_token).tolist()
        owed = [token for lo, hi in segment.stripe.owed(limit) for token in range(lo, hi, segment.tokens)]
        owed = [token for token in owed if token in chunk]
        assert listed == owed
        assert listed == numbered(segment, pair_ordinals(plan, segment, start, num_pages, limit))
        shape = geometry_of(plan, segment)
        assert listed == numbered(segment, shape.ordinals(num_src_pages=num_pages, **where))
        assert listed == [pair * segment.tokens for pair in page_copy_reference._pairs(shape, num_pages, start, limit)]
        nbytes += len(listed) * segment.pair_nbytes * len(segment.layers)
    load = load_of(
        plan,
        plan.layers,
        start=start,
        num_pages=num_pages,
        limit_tokens=limit,
        runs=None,
        seamless=lambda segment: False,
    )
    assert load.nbytes == nbytes
    piece = Piece(plan.layers, start, num_pages)
    assert piece_layout(plan, piece, limit_tokens=limit, checksum=False).payload == nbytes
    if chunk.start == 0 and chunk.stop >= limit:
        assert plan.nbytes(limit) == nbytes


def test_layers_share_offsets_only_if_they_owe_the_same() -> None:
    layout = gqa(num_layers=3, windows={1: 4})
    plan = compile_plan(0, {0: layout}, layout)
    places = {(name, layer): Placement(0, 0, 64, num_pages=16) for name in "kv" for layer in range(3)}
    side: Any = SimpleNamespace(placements=places)
    bound = BoundGrant(
        dst=1, generation=1, request="r", prefix_tokens=0, pages=np.arange(10, dtype=np.int64), plan=plan
    )
    offsets = PairOffsets(SendOp("r", 1, {}, (0, 1, 2), 0, 10, None), bound, np.arange(10) + 3, side, side)
    found = {
        (segment.component, layer): offsets.pairs(segment, layer)
        for segment in plan.segments
        for layer in segment.layers
    }
    assert found["k", 0] is found["k", 2]
    for layer, first in ((0, 0), (1, 8), (2, 0)):
        src, dst = found["k", layer]
        assert dst.tolist() == [64 * page for page in range(first, 10)]
        assert src.tolist() == [64 * (page + 3) for page in range(first, 10)]


def test_pieces_leave_out_what_lies_before_the_window() -> None:
    layout = gqa(num_layers=3, windows={1: 4})
    plan = compile_plan(0, {0: layout}, layout)
    assert Cutter(plan, (1,), 0, 8, limit_tokens=40, checksum=True).done
    cutter = Cutter(plan, (0, 1, 2), 0, 10, limit_tokens=40, checksum=False)
    assert cutter.nbytes == 2 * (2 * 10 + 2) * 64
    assert cutter.cut(1 << 20) == Piece((0, 1, 2), 0, 10)
    check_piece(plan, Piece((1,), 0, 9), limit_tokens=40)
    with pytest.raises(ProtocolError, match="owes nothing"):
        check_piece(plan, Piece((1,), 0, 8), limit_tokens=40)


# The protocol, with pages of 4 tokens. In a grant of 40 tokens the window begins at page 8.


LOCAL = gqa(windows={1: 4})
ONLY = gqa(windows={0: 4, 1: 4})
TEN = tuple(range(10))


def test_finish_asks_for_no_page_before_the_window() -> None:
    machine = sender(pair(0, writer=LOCAL, reader=LOCAL))
    machine.on_grant(1, grant(*TEN), 0.0)
    works = [verb(machine, 10, layers=(0,)), verb(machine, 1, start=9, layers=(1,))]
    with pytest.raises(ProtocolError, match=r"layer 1 page 8 \(counted after the prefix\) was not sent"):
        finish(machine)
    works.append(verb(machine, 1, start=8, layers=(1,)))
    finish(machine)
    for work in works:
        moved(machine, work)
    assert [message for _, message in Acts(machine).tells(Seal)] == [Seal(1, 10, b"")]


def test_a_sender_may_give_the_windows_pages_only() -> None:
    machine = sender(pair(0, writer=ONLY, reader=ONLY))
    machine.on_grant(1, grant(*TEN), 0.0)
    with pytest.raises(ProtocolError, match="nothing was sent, but layer 0 page 8 is owed"):
        finish(machine)
    work = verb(machine, 2, start=8)
    finish(machine)
    moved(machine, work)
    assert [message for _, message in Acts(machine).tells(Seal)] == [Seal(1, 10, b"")]


@pytest.mark.parametrize(("granted", "fine"), [(15, True), (12, True), (9, False)])
def test_before_the_grant_finish_asks_for_what_any_grant_would(granted: int, fine: bool) -> None:
    """3 pages of 16 tokens match 9 to 15 pages of 4. With fewer than 12 of these, the window reaches the first page."""
    layouts = {"writer": gqa(page_size=16, windows={0: 8, 1: 8}), "reader": gqa(windows={0: 8, 1: 8})}
    machine = sender(pair(0, **layouts))
    work = verb(machine, 1, start=2)
    with pytest.raises(ProtocolError, match="layer 0 page 1"):
        finish(machine)
    first = verb(machine, 1, start=1, work="first")
    finish(machine)
    machine.on_grant(1, grant(*range(granted)), 0.0)
    acts = Acts(machine)
    if not fine:
        assert "layer 0 page 0" in str(acts.error("finish"))
        assert acts.started == []
        return
    assert acts.started == [work, first]
    for each in acts.started:
        moved(machine, each)
    assert [message for _, message in Acts(machine).tells(Seal)] == [Seal(1, 3, b"")]


def attest(lo: int, hi: int, *layers: int) -> Attest:
    return Attest(1, list(layers), lo, hi, 10, "runs")


def test_a_receive_waits_for_the_window_and_no_longer() -> None:
    machine = receiver(pair(1, writer=LOCAL, reader=LOCAL))
    req = post(machine, *TEN)
    machine.on_attest(0, attest(0, 40, 0), 0.0)
    machine.on_attest(0, attest(0, 32, 1), 0.0)
    assert machine.layer_done(req, 0)
    assert not machine.layer_done(req, 1)
    machine.on_seal(0, Seal(1, 10, b""), 0.0)
    machine.on_attest(0, attest(36, 40, 1), 0.0)
    assert not machine.layer_done(req, 1)
    assert Acts(machine).settled == {}
    machine.on_attest(0, attest(32, 36, 1), 0.0)
    acts = Acts(machine)
    assert acts.settled == {"rx": None}
    assert acts.told == [(0, Verdict(1))]


def test_a_seal_of_fewer_tokens_does_not_move_the_window() -> None:
    """15 pages of 4 tokens are granted: the window begins at token 16, for a seal of 3 pages of 16 as for one of 4."""
    machine = receiver(pair(1, writer=gqa(page_size=16, windows={0: 8, 1: 8}), reader=gqa(windows={0: 8, 1: 8})))
    post(machine, *range(15))
    machine.on_seal(0, Seal(1, 3, b""), 0.0)
    machine.on_attest(0, attest(32, 48, 0, 1), 0.0)
    assert Acts(machine).settled == {}
    machine.on_attest(0, attest(16, 32, 0, 1), 0.0)
    assert Acts(machine).settled == {"rx": None}


def test_every_holder_of_a_stripe_sends_its_part_of_the_window() -> None:
    layouts = [mla(tp_rank=rank, tp_size=2, windows={0: 4, 1: 4}) for rank in range(2)]
    machine = receiver(group_map(2, ("p", layouts[0]), ("p", layouts[1]), ("d", mla(windows={0: 4, 1: 4}))))
    post(machine, *TEN, src=(0, 1))
    for rank, (lo, hi) in enumerate([(32, 36), (36, 40)]):
        assert Acts(machine).settled == {}
        machine.on_attest(rank, attest(lo, hi, 0, 1), 0.0)
        machine.on_seal(rank, Seal(1, 10, b""), 0.0)
    assert Acts(machine).settled == {"rx": None}
