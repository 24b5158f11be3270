"""Choices by cost, on both sides of the break-even point: puts or staging."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchkv import KVLayout
from torchkv.layout.descriptors import expand, page_pairs, pair_offsets
from torchkv.layout.pair_plan import compile_plan
from torchkv.transfer import path_cost
from torchkv.transfer.peer_connection import Costs

MIB = 1 << 20


@pytest.mark.parametrize(
    ("pages", "runs"),
    [([7], 1), ([4, 5, 6], 1), ([4, 5, 7], 2), ([6, 5, 4], 3), ([4, 4], 2), ([0, 1, 9, 10, 3], 3)],
)
def test_runs(pages: list[int], runs: int) -> None:
    assert path_cost.count_runs(np.array(pages, dtype=np.int64)) == runs


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40))
def test_runs_against_a_loop(pages: list[int]) -> None:
    runs = 0
    previous = None
    for page in pages:
        if previous is None or page != previous + 1:
            runs += 1
        previous = page
    assert path_cost.count_runs(np.array(pages, dtype=np.int64)) == runs


# ---------------------------------------------------------------------- puts or staged

TCP = Costs(descriptor=8e-6, byte=1 / 3e9, pack=1 / 6e9)
MEMORY = Costs(descriptor=0.35e-6, byte=1 / 8e9, pack=1 / 6e9)
RING = 128 * MIB


def load(count: int, nbytes: int) -> path_cost.Load:
    """``count`` descriptors of ``nbytes`` bytes each."""
    return path_cost.Load(descriptors=count, nbytes=count * nbytes)


def path(count: int, nbytes: int, costs: Costs, *, page_for_page: bool = False, ring: int = RING) -> str:
    return path_cost.cheapest(load(count, nbytes), costs, page_for_page=page_for_page, ring=ring).path


def test_puts_cost_by_descriptor_and_by_byte() -> None:
    costs = Costs(descriptor=2e-6, byte=1e-9, pack=1.0)
    assert path_cost.put_seconds(load(1000, 500), costs) == pytest.approx(1000 * 2e-6 + 500_000e-9)


def test_staging_costs_its_beginning_its_bytes_and_the_last_scatter() -> None:
    costs = Costs(descriptor=1.0, byte=1e-9, pack=3e-9)
    nbytes = 100 * MIB
    expected = path_cost.STAGING_SECONDS + nbytes * 4e-9 + path_cost.LARGEST_PIECE * 3e-9
    assert path_cost.staged_seconds(nbytes, costs, ring=RING, mapped=False) == pytest.approx(expected)
    least = path_cost.staged_seconds(512, costs, ring=RING, mapped=False)
    assert least == pytest.approx(path_cost.STAGING_SECONDS + 512 * 7e-9, rel=0.1)


@pytest.mark.parametrize(("byte", "pack"), [(1e-9, 3e-9), (3e-9, 1e-9)])
def test_a_piece_gathered_straight_into_a_mapped_ring_costs_no_put(byte: float, pack: float) -> None:
    nbytes = 100 * MIB
    expected = path_cost.STAGING_SECONDS + nbytes * 3e-9 + path_cost.LARGEST_PIECE * pack
    costs = Costs(descriptor=1.0, byte=byte, pack=pack)
    assert path_cost.staged_seconds(nbytes, costs, ring=RING, mapped=True) == pytest.approx(expected)


def test_a_small_ring_costs_time_for_each_piece() -> None:
    """16 pieces, as in the measurement that the constants come from."""
    costs = Costs(descriptor=1.0, byte=1e-12, pack=1e-12)
    small = path_cost.staged_seconds(MIB, costs, ring=256 << 10, mapped=False)
    assert small == pytest.approx(path_cost.STAGING_SECONDS + 16 * path_cost.PIECE_SECONDS, rel=0.01)
    assert path_cost.staged_seconds(MIB, costs, ring=RING, mapped=False) < small / 5


@pytest.mark.parametrize(
    ("costs", "nbytes", "few", "many"),
    [
        # Slices of 512 bytes: so many tokens of one component and layer.
        pytest.param(TCP, 512, 140, 170, id="tcp, slices"),
        pytest.param(TCP, 4096, 150, 240, id="tcp, slices of 4 KiB"),
        pytest.param(MEMORY, 512, 6000, 8000, id="shared memory, slices"),
    ],
)
@pytest.mark.parametrize("page_for_page", [True, False], ids=["runs", "slices"])
def test_both_sides_of_puts_or_staged(costs: Costs, nbytes: int, few: int, many: int, page_for_page: bool) -> None:
    puts = "runs" if page_for_page else "slices"
    assert path(few, nbytes, costs, page_for_page=page_for_page) == puts
    assert path(many, nbytes, costs, page_for_page=page_for_page) == "staged"


def test_large_pages_never_pay_for_packing() -> None:
    """By length of a descriptor: packing costs 2.7 us for 16 KiB over a put of 8 us, and 43 us for 256 KiB."""
    for count in (1, 10, 100, 10_000):
        assert path(count, 256 << 10, TCP, page_for_page=True) == "runs"
    assert path(10_000, 16 << 10, TCP, page_for_page=True) == "staged"


@pytest.mark.parametrize(
    ("heads_read", "page_size", "costs", "packed"),
    [
        (8, 16, TCP, True),  # runs of 8 KiB
        (8, 128, TCP, False),  # of 64 KiB
        (1, 64, TCP, True),  # of 64 bytes
        (1, 16, Costs(descriptor=0.2e-6, byte=1 / 25e9, pack=1 / 5e9), True),
        (8, 16, Costs(descriptor=0.2e-6, byte=1 / 25e9, pack=1 / 5e9), False),
    ],
)
def test_the_loop_packs_where_that_costs_less_than_the_puts(
    heads_read: int, page_size: int, costs: Costs, packed: bool
) -> None:
    held, wanted = (
        KVLayout.gqa(
            num_layers=2, num_kv_heads=8, head_dim=32, page_size=page_size, dtype=torch.bfloat16, tp_size=8 // heads
        )
        for heads in (8, heads_read)
    )
    assert path_cost.is_cheaper_packed(compile_plan(0, {0: held}, wanted), costs) == packed


def test_nothing_is_staged_without_a_ring() -> None:
    choice = path_cost.cheapest(load(100_000, 512), TCP, page_for_page=False, ring=0)
    assert (choice.path, choice.staged) == ("slices", None)
    assert choice.put == path_cost.put_seconds(choice.load, TCP)
    assert path(100_000, 512, TCP) == "staged"


def test_nothing_to_move_is_not_staged() -> None:
    assert path(0, 512, TCP) == "slices"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_assumed_costs_stage_many_slices_and_put_few_pages(device: str) -> None:
    assert path(30_000, 512, path_cost.ASSUMED[device]) == "staged"
    assert path(64, 128 << 10, path_cost.ASSUMED[device], page_for_page=True) == "runs"


# ---------------------------------------------------------------------- how much a verb is


def gqa(**changes: object) -> KVLayout:
    fields = {"num_layers": 2, "num_kv_heads": 4, "head_dim": 8, "page_size": 16, "dtype": torch.bfloat16}
    return KVLayout.gqa(**{**fields, **changes})  # whatever a case changes


PAIRS = {
    "equal": ({0: gqa()}, gqa()),
    "fewer heads": ({0: gqa()}, gqa(tp_size=2)),
    "more heads": ({0: gqa(tp_size=2), 1: gqa(tp_size=2, tp_rank=1)}, gqa()),
    "16 to 64": ({0: gqa()}, gqa(page_size=64)),
    "64 to 16": ({0: gqa(page_size=64)}, gqa()),
    "NHD to HND": ({0: gqa()}, gqa(order="HND")),
    "striped": ({0: gqa(num_kv_heads=1), 1: gqa(num_kv_heads=1)}, gqa(num_kv_heads=1)),
    "window": ({0: gqa(windows={1: 50})}, gqa(windows={1: 50})),
    "window, striped 16 to 64": (
        {rank: gqa(num_kv_heads=1, windows={0: 9, 1: 70}) for rank in range(2)},
        gqa(num_kv_heads=1, page_size=64, windows={0: 9, 1: 70}),
    ),
    "striped 16 to 64": ({0: gqa(num_kv_heads=1), 1: gqa(num_kv_heads=1)}, gqa(num_kv_heads=1, page_size=64)),
}


def page_list(runs: int, pages: int, rng: np.random.Generator) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Ids of ``pages`` pages, in at most ``runs`` runs."""
    ids = np.arange(pages, dtype=np.int64)
    parts = np.split(ids, np.sort(rng.choice(np.arange(1, pages), min(runs, pages) - 1, replace=False)))
    rng.shuffle(parts)
    return np.concatenate(parts)


@settings(deadline=None)  # the first example may have to compile
@pytest.mark.parametrize("name", PAIRS)
@given(runs=st.tuples(st.integers(1, 16), st.integers(1, 16)), start=st.integers(0, 3), seed=st.integers(0, 2**32))
def test_the_load_against_an_expanded_plan(name: str, runs: tuple[int, int], start: int, seed: int) -> None:
    """The bytes are exact. Descriptors are never too few, and for a writer of all pages twice too many at most.

    That is in layers without a window: how many of the runs lie in a window nobody counts.
    """
    writers, reader = PAIRS[name]
    plan = compile_plan(0, writers, reader)
    rng = np.random.default_rng(seed)
    total = 256  # tokens of the grant
    granted = page_list(runs[0], total // plan.dst_page_size, rng)
    src = page_list(runs[1], total // plan.src_page_size, rng)[start:]
    strides = {
        segment.component: tuple(shape.page_nbytes(segment.component) for shape in (writers[0], reader))
        for segment in plan.segments
    }
    descriptors = nbytes = 0
    for segment in plan.segments:
        pairs = page_pairs(
            segment,
            num_src_pages=len(src),
            start=start,
            limit_tokens=total,
            src_page_size=plan.src_page_size,
            dst_page_size=plan.dst_page_size,
        )
        _, _, length = expand(segment, *pair_offsets(segment, pairs, src, granted, *strides[segment.component]))
        descriptors += len(length) * len(segment.layers)
        nbytes += int(length.sum()) * len(segment.layers)
    estimate = path_cost.load_of(
        plan,
        plan.layers,
        start=start,
        num_pages=len(src),
        limit_tokens=total,
        runs=path_cost.runs_between(src, granted, plan, start),
        seamless=lambda segment: (
            strides[segment.component]
            == (
                plan.src_page_size // segment.tokens * segment.pair_nbytes,
                plan.dst_page_size // segment.tokens * segment.pair_nbytes,
            )
        ),
    )
    assert estimate.nbytes == nbytes
    assert descriptors <= estimate.descriptors
    if all(segment.stripe.holders == 1 and segment.stripe.window is None for segment in plan.segments):
        assert estimate.descriptors <= 2 * descriptors
