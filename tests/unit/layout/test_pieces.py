"""Pieces: every owed page pair in exactly one place of exactly one stage, whatever the stages' sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import gqa
from test_plan import group, instances, mla

from torchkv.errors import ProtocolError
from torchkv.layout import KVLayout
from torchkv.pieces import ALIGNMENT, Cutter, Piece, check_piece, pair_ranks, piece_layout
from torchkv.plan import PairPlan, compile_plan, page_pairs
from torchkv.slab import Slab

RELAXED = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


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

    def listed(self, slab: Slab, start: int, num_pages: int) -> list[int]:
        """First token, after the prefix, of each pair that is owed: listed by `page_pairs`, not counted."""
        pairs = page_pairs(
            slab,
            num_src_pages=num_pages,
            start=start,
            limit_tokens=self.limit_tokens,
            src_page_size=self.plan.src_page_size,
            dst_page_size=self.plan.dst_page_size,
        )
        return (pairs.dst_index * self.plan.dst_page_size + pairs.dst_token).tolist()

    def owed(self, piece: Piece) -> list[tuple[int, int, int]]:
        """(slab, layer, token) of each pair of a piece."""
        return [
            (number, layer, token)
            for number, slab in enumerate(self.plan.slabs)
            for layer in slab.layers
            if layer in piece.layers
            for token in self.listed(slab, piece.start, piece.num_pages)
        ]


def cut(verb: Verb, rooms: Callable[[int], int]) -> list[tuple[Piece, int]]:
    """(piece, room it was cut for); ``rooms`` chooses a room, given the least."""
    cutter, pieces = verb.cutter(), []
    while not cutter.done:
        assert cutter.nbytes >= cutter.least > 0
        room = rooms(cutter.least)
        pieces.append((cutter.cut(room), room))
    assert cutter.nbytes == cutter.least == 0
    return pieces


def problems(verb: Verb, pieces: Sequence[tuple[Piece, int]]) -> list[str]:
    """What is wrong with these pieces of a verb."""
    wrong = []
    seen: list[tuple[int, int, int]] = []
    for piece, room in pieces:
        check_piece(verb.plan, piece, limit_tokens=verb.limit_tokens)
        owed = verb.owed(piece)
        if not owed:
            wrong.append(f"{piece} owes nothing")
        seen += owed
        layout = piece_layout(verb.plan, piece, limit_tokens=verb.limit_tokens, checksum=verb.checksum)
        if layout.nbytes > room:
            wrong.append(f"{piece} takes {layout.nbytes} of {room} bytes")
        spans = []
        for segment in layout.segments:
            assert segment.pairs == len(verb.listed(segment.slab, piece.start, piece.num_pages))
            assert segment.nbytes == len(segment.layers) * segment.pairs * segment.slab.pair_nbytes
            for number in range(len(segment.layers)):
                at = segment.offset + number * segment.layer_stride
                spans.append((at, at + segment.layer_nbytes))
                if verb.checksum:
                    at = segment.sums + number * segment.sums_stride
                    spans.append((at, at + 8 * segment.pairs))
            if verb.checksum:
                assert segment.sums % 8 == 0
            else:
                assert segment.sums == 0
        at = 0
        while at < len(layout.segments):
            assert layout.segments[at].offset % ALIGNMENT == 0
            at += layout.segments[at].group
        assert at == len(layout.segments)
        if sum(len(s.layers) * s.pairs for s in layout.segments) != len(owed):
            wrong.append(f"{piece}: not all pairs have a place")
        ends = [0, *(end for _, end in sorted(spans))]
        if any(start < end for (start, _), end in zip(sorted(spans), ends, strict=False)):
            wrong.append(f"{piece}: spans overlap: {sorted(spans)}")
        assert ends[-1] == layout.nbytes
        assert layout.payload == sum(verb.plan.slabs[number].pair_nbytes for number, _, _ in owed)
    whole = verb.owed(Piece(verb.layers, verb.start, verb.num_pages))
    if sorted(seen) != sorted(whole):
        wrong.append(f"{len(whole)} pairs owed, {len(seen)} in pieces, {len(set(seen))} of them different")
    return wrong


def plans(writers: Mapping[int, KVLayout], reader: KVLayout) -> list[PairPlan]:
    return [plan for rank in writers if (plan := compile_plan(rank, writers, reader)).slabs]


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


@RELAXED
@given(verb=verbs(), data=st.data())
def test_cutting_covers_each_owed_pair_exactly_once(verb: Verb, data: st.DataObject) -> None:
    factor = st.integers(0, 40)
    pieces = cut(verb, lambda least: least + data.draw(factor) * least // 8 + data.draw(st.integers(0, 300)))
    assert problems(verb, pieces) == []


@RELAXED
@given(verb=verbs(), data=st.data())
def test_a_piece_is_the_largest_that_fits(verb: Verb, data: st.DataObject) -> None:
    def size(layers: Sequence[int], start: int, num_pages: int) -> int:
        piece = Piece(tuple(layers), start, num_pages)
        return piece_layout(verb.plan, piece, limit_tokens=verb.limit_tokens, checksum=verb.checksum).nbytes

    layers = [layer for layer in sorted(verb.layers) if size([layer], verb.start, verb.num_pages)]
    page = verb.start
    end = verb.start + verb.num_pages
    for piece, room in cut(verb, lambda least: least + data.draw(st.integers(0, 4 * least))):
        assert list(piece.layers) == layers[: len(piece.layers)]
        assert piece.start == page
        page += piece.num_pages
        if page < end:  # a part of a layer: neither all of it would have fitted, nor one page more
            assert len(piece.layers) == 1
            assert size(piece.layers, piece.start, piece.num_pages + 1) > room
            assert size(piece.layers, piece.start, end - piece.start) > room
            continue
        if piece.start == verb.start and len(layers) > len(piece.layers):
            assert size(layers[: len(piece.layers) + 1], verb.start, verb.num_pages) > room
        layers, page = layers[len(piece.layers) :], verb.start
    assert not layers


@RELAXED
@given(verb=verbs())
def test_one_stage_of_nbytes_takes_all_of_it(verb: Verb) -> None:
    cutter = verb.cutter()
    if cutter.done:
        assert verb.owed(Piece(verb.layers, verb.start, verb.num_pages)) == []
        return
    nbytes = cutter.nbytes
    piece = cutter.cut(nbytes)
    assert cutter.done
    used = piece_layout(verb.plan, piece, limit_tokens=verb.limit_tokens, checksum=verb.checksum).nbytes
    assert used == nbytes or used < nbytes == verb.cutter().least  # pages that the grant clips take less than a page


@RELAXED
@given(verb=verbs())
def test_ranks_are_counted_as_pairs_are_listed(verb: Verb) -> None:
    for slab in verb.plan.slabs:
        ranks = pair_ranks(verb.plan, slab, verb.start, verb.num_pages, verb.limit_tokens)
        listed = verb.listed(slab, verb.start, verb.num_pages)
        assert len(ranks) == len(listed)
        # A stripe's ranks begin at the prefix, whether or not a window does.
        stripe = replace(slab, window=None)
        if listed:
            before = [token for token in verb.listed(stripe, 0, verb.start + verb.num_pages) if token < listed[0]]
            assert ranks.start == len(before)
        if slab.window is None:
            assert ranks.start == pair_ranks(verb.plan, slab, 0, verb.start, verb.limit_tokens).stop


def striped() -> Verb:
    """A quarter of the pages of a replicated latent: most pages owe nothing."""
    plan = compile_plan(2, {rank: mla(tp_rank=rank, tp_size=4) for rank in range(4)}, mla())
    return Verb(plan, (0, 1), 3, 20, 24 * 4, True)


def test_pieces_of_a_stripe_skip_what_others_write() -> None:
    verb = striped()
    assert {len(verb.listed(verb.plan.slabs[0], page, 1)) for page in range(3, 23)} == {0, 1}
    pieces = cut(verb, lambda least: least)
    assert problems(verb, pieces) == []
    assert len(pieces) == 2 * 5


def test_negative_control_wrong_pieces_are_noticed() -> None:
    verb = striped()
    pieces = cut(verb, lambda least: 3 * least)
    assert len(pieces) > 2
    (layers, start, num_pages), room = pieces[1]
    for wrong in (
        pieces[1:],
        [*pieces, pieces[-1]],
        [pieces[0], (Piece(layers, start, num_pages), 40), *pieces[2:]],
        [pieces[0], (Piece(layers, start - 4, num_pages), room), *pieces[2:]],
    ):
        assert problems(verb, wrong)
    with pytest.raises(ProtocolError, match="owes nothing"):
        problems(verb, [(Piece((0,), 3, 3), room)])


def test_a_stage_too_small_for_one_page_is_refused_and_changes_nothing() -> None:
    verb = striped()
    cutter = verb.cutter()
    with pytest.raises(ProtocolError, match=rf"layer 0, page 3: {cutter.least} suffice"):
        cutter.cut(cutter.least - 1)
    assert cutter.cut(cutter.least).layers == (0,)


def test_layers_that_are_not_owed_are_ignored() -> None:
    stages = {0: gqa(num_layers=3, layers=(0, 1)), 1: gqa(num_layers=3, layers=(2,))}
    plan = compile_plan(1, stages, gqa(num_layers=3))
    assert Cutter(plan, (0, 1), 0, 2, limit_tokens=8, checksum=False).done
    assert Cutter(plan, (2, 0), 0, 2, limit_tokens=8, checksum=False).cut(1 << 20) == Piece((2,), 0, 2)


def test_whole_layers_first_then_pages_of_one() -> None:
    plan = compile_plan(3, group(gqa, 2, num_layers=4), gqa(num_layers=4))
    pair = plan.slabs[0].pair_nbytes
    assert {slab.pair_nbytes for slab in plan.slabs} == {pair} == {32}
    cutter = Cutter(plan, range(4), 0, 16, limit_tokens=64, checksum=False)
    assert cutter.nbytes == 2 * 4 * 16 * pair
    assert cutter.cut(2 * 3 * 16 * pair) == Piece((0, 1, 2), 0, 16)
    assert cutter.nbytes == 2 * 16 * pair
    assert cutter.cut(256 + 8 * pair) == Piece((3,), 0, 8)
    assert cutter.nbytes == 256 + 8 * pair
    assert cutter.cut(1 << 20) == Piece((3,), 8, 8)
    assert cutter.done


@pytest.mark.parametrize(
    ("piece", "text"),
    [
        (Piece((), 0, 1), "one at least"),
        (Piece((1, 0), 0, 1), "ascend"),
        (Piece((0, 0), 0, 1), "ascend"),
        (Piece((0, 0) * 100_000, 0, 1), r"\.\.\."),
        (Piece((0, 7), 0, 1), "layer 7"),
        (Piece((-1, 0), 0, 1), "layer -1"),
        (Piece((0,), -1, 2), "page -1"),
        (Piece((0,), 0, 0), "0 pages"),
        (Piece((0,), 0, -1), "-1 pages"),
        (Piece((0,), 0, 25), "page 24 of 4 tokens lies outside the grant of 96 tokens"),
        (Piece((0,), 24, 1), "page 24"),
        (Piece((0,), 1 << 61, 1 << 61), "outside"),
        (Piece((0,), 0, 1 << 61), "outside"),
        (Piece((0, 1), 3, 3), "owes nothing"),
    ],
)
def test_hostile_pieces_are_refused(piece: Piece, text: str) -> None:
    verb = striped()
    check_piece(verb.plan, Piece((0, 1), 0, 24), limit_tokens=96)
    with pytest.raises(ProtocolError, match=text) as caught:
        check_piece(verb.plan, piece, limit_tokens=96)
    assert len(str(caught.value)) < 300


def test_a_last_page_that_lies_partly_outside_the_grant_is_allowed() -> None:
    plan = compile_plan(0, {0: gqa(page_size=16)}, gqa(page_size=4))
    check_piece(plan, Piece((0,), 0, 2), limit_tokens=20)
    layout = piece_layout(plan, Piece((0,), 0, 2), limit_tokens=20, checksum=False)
    assert [segment.pairs for segment in layout.segments] == [5, 5]
