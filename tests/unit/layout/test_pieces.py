"""Pieces: for stages of any size, every owed page pair has exactly one place in exactly one stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.helpers.layouts import group, mla
from tests.helpers.plans import Verb, verbs
from tests.helpers.references.page_transfer import gqa
from torchkv.errors import ProtocolError
from torchkv.layout.pair_plan import compile_plan
from torchkv.layout.pieces import Cutter, Piece, check_piece, pair_ordinals, piece_layout
from torchkv.layout.stage_format import ALIGNMENT

RELAXED = settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])


def cut(verb: Verb, stage_size: Callable[[int], int]) -> list[tuple[Piece, int]]:
    """Cuts the whole verb into (piece, bytes of its stage). stage_size: chooses the latter, given `Cutter.least`."""
    cutter, pieces = verb.cutter(), []
    while not cutter.done:
        assert cutter.nbytes >= cutter.least > 0
        max_nbytes = stage_size(cutter.least)
        pieces.append((cutter.cut(max_nbytes), max_nbytes))
    assert cutter.nbytes == cutter.least == 0
    return pieces


def problems(verb: Verb, pieces: Sequence[tuple[Piece, int]]) -> list[str]:
    """What is wrong with these (piece, bytes of its stage), as the pieces of a whole verb; empty if nothing is."""
    wrong = []
    seen: list[tuple[int, int, int]] = []
    for piece, max_nbytes in pieces:
        check_piece(verb.plan, piece, limit_tokens=verb.limit_tokens)
        owed = verb.owed(piece)
        if not owed:
            wrong.append(f"{piece} owes nothing")
        seen += owed
        layout = piece_layout(verb.plan, piece, limit_tokens=verb.limit_tokens, checksum=verb.checksum)
        if layout.nbytes > max_nbytes:
            wrong.append(f"{piece} takes {layout.nbytes} of {max_nbytes} bytes")
        spans = []
        for section in layout.sections:
            assert section.pairs == len(verb.listed(section.segment, piece.start, piece.num_pages))
            assert section.nbytes == len(section.layers) * section.pairs * section.segment.pair_nbytes
            for number in range(len(section.layers)):
                at = section.offset + number * section.layer_stride
                spans.append((at, at + section.layer_nbytes))
                if verb.checksum:
                    at = section.sums + number * section.sums_stride
                    spans.append((at, at + 8 * section.pairs))
            if verb.checksum:
                assert section.sums % 8 == 0
            else:
                assert section.sums == 0
        at = 0
        while at < len(layout.sections):
            assert layout.sections[at].offset % ALIGNMENT == 0
            at += layout.sections[at].group
        assert at == len(layout.sections)
        if sum(len(s.layers) * s.pairs for s in layout.sections) != len(owed):
            wrong.append(f"{piece}: not all pairs have a place")
        ends = [0, *(end for _, end in sorted(spans))]
        if any(start < end for (start, _), end in zip(sorted(spans), ends, strict=False)):
            wrong.append(f"{piece}: spans overlap: {sorted(spans)}")
        assert ends[-1] == layout.nbytes
        assert layout.payload == sum(verb.plan.segments[number].pair_nbytes for number, _, _ in owed)
    whole = verb.owed(Piece(verb.layers, verb.start, verb.num_pages))
    if sorted(seen) != sorted(whole):
        wrong.append(f"{len(whole)} pairs owed, {len(seen)} in pieces, {len(set(seen))} of them different")
    return wrong


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
    for piece, max_nbytes in cut(verb, lambda least: least + data.draw(st.integers(0, 4 * least))):
        assert list(piece.layers) == layers[: len(piece.layers)]
        assert piece.start == page
        page += piece.num_pages
        if page < end:  # a part of a layer: neither the whole layer nor one more page would have fitted
            assert len(piece.layers) == 1
            assert size(piece.layers, piece.start, piece.num_pages + 1) > max_nbytes
            assert size(piece.layers, piece.start, end - piece.start) > max_nbytes
            continue
        if piece.start == verb.start and len(layers) > len(piece.layers):
            assert size(layers[: len(piece.layers) + 1], verb.start, verb.num_pages) > max_nbytes
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
    assert used == nbytes or used < nbytes == verb.cutter().least  # a page that is partly outside the grant takes less


@RELAXED
@given(verb=verbs())
def test_ordinals_are_counted_as_pairs_are_listed(verb: Verb) -> None:
    for segment in verb.plan.segments:
        ordinals = pair_ordinals(verb.plan, segment, verb.start, verb.num_pages, verb.limit_tokens)
        listed = verb.listed(segment, verb.start, verb.num_pages)
        assert len(ordinals) == len(listed)
        # Ordinals count from the end of the prefix, also where a window begins later.
        unwindowed = replace(segment, stripe=segment.stripe._replace(window=None))
        if listed:
            before = [token for token in verb.listed(unwindowed, 0, verb.start + verb.num_pages) if token < listed[0]]
            assert ordinals.start == len(before)
        if segment.stripe.window is None:
            assert ordinals.start == pair_ordinals(verb.plan, segment, 0, verb.start, verb.limit_tokens).stop


def striped() -> Verb:
    """One of four writers of a replicated latent: it owes a quarter of the pages and nothing of the others."""
    plan = compile_plan(2, {rank: mla(tp_rank=rank, tp_size=4) for rank in range(4)}, mla())
    return Verb(plan, (0, 1), 3, 20, 24 * 4, True)


def test_pieces_of_a_stripe_skip_what_others_write() -> None:
    verb = striped()
    assert {len(verb.listed(verb.plan.segments[0], page, 1)) for page in range(3, 23)} == {0, 1}
    pieces = cut(verb, lambda least: least)
    assert problems(verb, pieces) == []
    assert len(pieces) == 2 * 5


def test_negative_control_wrong_pieces_are_noticed() -> None:
    verb = striped()
    pieces = cut(verb, lambda least: 3 * least)
    assert len(pieces) > 2
    (layers, start, num_pages), max_nbytes = pieces[1]
    for wrong in (
        pieces[1:],
        [*pieces, pieces[-1]],
        [pieces[0], (Piece(layers, start, num_pages), 40), *pieces[2:]],
        [pieces[0], (Piece(layers, start - 4, num_pages), max_nbytes), *pieces[2:]],
    ):
        assert problems(verb, wrong)
    with pytest.raises(ProtocolError, match="owes nothing"):
        problems(verb, [(Piece((0,), 3, 3), max_nbytes)])


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


def test_the_example_of_the_module_s_docstring() -> None:
    layout = gqa(num_layers=2, num_kv_heads=1, head_dim=16, page_size=16)
    plan = compile_plan(0, {0: layout}, layout)
    made = piece_layout(plan, Piece((0, 1), 0, 3), limit_tokens=48, checksum=True)
    keys, values = made.sections
    assert (keys.segment.component, keys.segment.pair_nbytes) == ("k", 512)
    assert (keys.offset, keys.pairs, keys.sums, keys.group) == (0, 3, 6144, 2)
    assert (keys.layer_stride, keys.sums_stride) == (3072, 48)
    assert values == replace(keys, segment=plan.segments[1], offset=1536, sums=6168)
    assert made.nbytes == 6240


def test_whole_layers_first_then_pages_of_one() -> None:
    plan = compile_plan(3, group(gqa, 2, num_layers=4), gqa(num_layers=4))
    pair = plan.segments[0].pair_nbytes
    assert {segment.pair_nbytes for segment in plan.segments} == {pair} == {32}
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
    assert [section.pairs for section in layout.sections] == [5, 5]
