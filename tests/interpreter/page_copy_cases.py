"""Runs what copies pages, in Triton's interpreter: in a process that test_page_copy.py starts."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.references import page_transfer
from tests.helpers.references.page_copy import copy_pages_reference, gather_reference, scatter_reference
from tests.helpers.references.page_transfer import Pool, differences, gqa, planned, reference
from tests.helpers.references.state import compare as compare_state
from tests.helpers.tiles import ONE_STEP, STEPS, use_tiles
from torchkv.arrays import Int64Array
from torchkv.errors import ProtocolError
from torchkv.kernels import copies
from torchkv.kernels import launch as kernel_launch
from torchkv.kernels.compiled import CompiledKernel
from torchkv.kernels.launch import Tile
from torchkv.layout import kernel_geometry
from torchkv.layout.kernel_geometry import Geometry, PageAddressing
from torchkv.layout.layout import KVLayout, State
from torchkv.layout.pair_plan import PairPlan
from torchkv.layout.plan_segment import StridedRuns, Stripe, Window
from torchkv.layout.stage_format import MemorySpan

assert os.environ.get("TRITON_INTERPRET") == "1", "not in the interpreter: run test_page_copy.py, which starts it"

# A tile costs the interpreter 50 ms, whatever its size. Small: to use several.
LARGE, SMALL = Tile(512, 4), Tile(128, 1)
WAYS = {"one step": ONE_STEP, "steps": STEPS}
CANARY = 64  # bytes around every pool


def kernel_send(seen: set[int], sabotage: Callable[[Geometry], Geometry], by_kernel: bool) -> Callable[..., None]:
    """Replaces `page_transfer._send` by the kernel, or by the reference. seen: collects widths."""

    def send(
        plan: PairPlan,
        source: Pool,
        pages: Int64Array,
        start: int,
        target: Pool,
        dst_pages: Int64Array,
        written: object,
        factored: bool,
    ) -> None:
        limit = len(dst_pages) * plan.dst_page_size
        src_ids, dst_ids = torch.from_numpy(pages.copy()), torch.from_numpy(dst_pages.copy())
        groups: dict[Geometry, list[tuple[page_transfer.Bytes, page_transfer.Bytes]]] = {}
        for segment in plan.segments:
            for layer in segment.layers:
                src, dst = source.tensors[segment.component, layer], target.tensors[segment.component, layer]
                geometry = kernel_geometry.geometry(
                    segment,
                    src_page_stride=src.shape[1],
                    dst_page_stride=dst.shape[1],
                    src_page_size=plan.src_page_size,
                    dst_page_size=plan.dst_page_size,
                    num_src_pages=len(src),
                    num_dst_pages=len(dst),
                    addresses=[src.ctypes.data, dst.ctypes.data],
                )
                groups.setdefault(geometry, []).append((src, dst))
        for true_geometry, jobs in groups.items():
            seen.add(true_geometry.unit)
            geometry = sabotage(true_geometry)
            if by_kernel:
                addresses = [(src.ctypes.data, dst.ctypes.data) for src, dst in jobs]
                run_kernel(geometry, addresses, src_ids, dst_ids, start, limit, staged=factored)
                continue
            sources, targets = (
                [torch.from_numpy(array.reshape(-1)) for array in side] for side in zip(*jobs, strict=True)
            )
            where = {"start": start, "limit_tokens": limit}
            assert copy_pages_reference(sources, targets, src_ids, dst_ids, geometry, **where) == set()

    return send


def run_kernel(
    geometry: Geometry,
    addresses: Sequence[tuple[int, int]],
    src_ids: torch.Tensor,
    dst_ids: torch.Tensor,
    start: int,
    limit: int,
    *,
    staged: bool,
    blocks: int = 3,
) -> None:
    errors = copies.error_words()
    jobs = copies.CopyJobs(
        table=torch.tensor(addresses, dtype=torch.int64),
        geometry=geometry,
        first_job=0,
        num_jobs=len(addresses),
        start=start,
        limit_tokens=limit,
        errors=errors,
        blocks=blocks,
    )
    if staged:
        pairs = len(geometry.ordinals(num_src_pages=len(src_ids), start=start, limit_tokens=limit))
        stage = aligned(len(addresses) * pairs * geometry.pair_nbytes)
        copies.gather(jobs, src_ids, MemorySpan.of(stage))
        copies.scatter(jobs, MemorySpan.of(stage), dst_ids, num_src_pages=len(src_ids))
    else:
        copies.copy_pages(jobs, src_ids, dst_ids)
    assert copies.first_error(errors) is None


def aligned(nbytes: int) -> torch.Tensor:
    memory = torch.randint(0, 256, (nbytes + 64,), dtype=torch.uint8)
    skip = -memory.data_ptr() % 64
    return memory[skip : skip + nbytes]


def wrong_bytes(
    writers: Mapping[int, KVLayout],
    reader: KVLayout,
    unit: int,
    monkeypatch: pytest.MonkeyPatch,
    sabotage: Callable[[Geometry], Geometry] = lambda geometry: geometry,
) -> list[int]:
    """The numbers of wrong bytes after copies by the reference, by direct kernels in two calls, and through a stage."""
    seen: set[int] = set()
    monkeypatch.setattr(page_transfer, "GAP", unit)  # canaries that leave the pages aligned
    rng = np.random.default_rng()

    def pick(layout: KVLayout) -> tuple[Pool, list[int]]:
        need = -(-11 // layout.page_size)
        return Pool.random(layout, need + 2, rng), [int(page) for page in rng.permutation(need + 2)[:need]]

    chosen = {rank: pick(layout) for rank, layout in writers.items()}
    sources, pages = {r: pool for r, (pool, _) in chosen.items()}, {r: ids for r, (_, ids) in chosen.items()}
    target, dst_pages = pick(reader)
    expected = reference(sources, pages, target, dst_pages)
    assert differences(target, expected) > 0, "the poison is not what is expected"
    found = []
    two_calls = max(1, 8 // next(iter(writers.values())).page_size)  # pages of the first
    ways = (False, None, None), (False, two_calls, STEPS), (True, None, STEPS), (True, two_calls, ONE_STEP)
    for factored, chunk, side_by_side in ways:
        use_tiles(monkeypatch, copy=LARGE, side_by_side=side_by_side or ONE_STEP)
        monkeypatch.setattr(page_transfer, "_send", kernel_send(seen, sabotage, by_kernel=side_by_side is not None))
        got, _ = planned(sources, pages, target, dst_pages, factored=factored, chunk=chunk)
        found.append(differences(got, expected))
    assert seen == {unit}
    return found


BF16 = {"num_layers": 1, "head_dim": 8, "dtype": torch.bfloat16}
LOCAL = {**BF16, "num_layers": 2, "windows": {1: 1}}  # of 11 tokens, the last page or two


def mla(**given: object) -> KVLayout:
    fields = {"num_layers": 1, "latent_dim": 64, "rope_dim": 8, "page_size": 4, "dtype": torch.bfloat16}
    return KVLayout.mla(**{**fields, **given})


FAMILIES: dict[str, tuple[dict[int, KVLayout], KVLayout, int]] = {
    "equal": ({0: gqa(**BF16)}, gqa(**BF16), 16),
    "heads, few to many": ({i: gqa(i, 2, **BF16) for i in range(2)}, gqa(**BF16), 16),
    "heads, many to few": ({0: gqa(**BF16)}, gqa(1, 2, **BF16), 16),
    "HND to NHD": ({0: gqa(order="HND", **BF16)}, gqa(**BF16), 16),
    "NHD slices to HND": ({1: gqa(1, 2, **BF16)}, gqa(order="HND", **BF16), 16),
    "striped": ({i: gqa(i, 4, num_kv_heads=2, **BF16) for i in range(4)}, gqa(num_kv_heads=2, **BF16), 16),
    "pages of 8 to 2": ({0: gqa(page_size=8, **BF16)}, gqa(page_size=2, **BF16), 16),
    "pages of 2 to 8, HND": (
        {1: gqa(1, 2, page_size=2, **BF16)},
        gqa(page_size=8, order="HND", **BF16),
        16,
    ),
    "MLA, striped": ({0: mla(), 1: mla()}, mla(), 16),
    "MLA, rows not a power of two": ({0: mla()}, mla(page_size=2), 16),
    "fp8": (
        {0: gqa(num_layers=1, head_dim=16, dtype=torch.float8_e4m3fn)},
        gqa(1, 2, num_layers=1, head_dim=16, dtype=torch.float8_e4m3fn),
        16,
    ),
    "unit 8": ({0: gqa(num_layers=1, head_dim=4)}, gqa(1, 4, num_layers=1, head_dim=4), 8),
    "unit 4": ({0: gqa(num_layers=1)}, gqa(1, 4, num_layers=1), 4),
    "unit 2": ({0: gqa(num_layers=1, head_dim=3)}, gqa(1, 4, num_layers=1, head_dim=3), 2),
    "window": ({0: gqa(**LOCAL)}, gqa(**LOCAL), 16),
    "window, striped, 2 to 4": (
        {i: gqa(i, 4, num_kv_heads=2, page_size=2, **LOCAL) for i in range(4)},
        gqa(num_kv_heads=2, order="HND", **LOCAL),
        16,
    ),
    "window, pages of 4 to 2": ({1: gqa(1, 2, **LOCAL)}, gqa(page_size=2, **LOCAL), 16),
    "unit 1": (
        {0: gqa(num_layers=1, head_dim=3, dtype=torch.int8, page_size=3)},
        gqa(1, 2, num_layers=1, head_dim=3, dtype=torch.int8, page_size=3),
        1,
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_byte_of_every_family(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writers, reader, unit = FAMILIES[family]
    assert wrong_bytes(writers, reader, unit, monkeypatch) == [0, 0, 0, 0]


SABOTAGE: dict[str, Callable[[Geometry], Geometry]] = {
    "base": lambda geometry: replace(geometry, src=replace(geometry.src, base=geometry.src.base ^ 16)),
    "row stride": lambda geometry: replace(geometry, rows=geometry.rows._replace(s1=0)),
    "window": lambda geometry: replace(geometry, stripe=geometry.stripe._replace(window=Window(1, 4, 4, 4))),
    "page bound": lambda geometry: replace(
        geometry, dst=replace(geometry.dst, page_stride=geometry.dst.page_stride - 16)
    ),
}


@pytest.mark.parametrize("operation", SABOTAGE)
def test_a_wrong_geometry_is_noticed(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above."""
    writers, reader, unit = FAMILIES["heads, many to few"]
    assert min(wrong_bytes(writers, reader, unit, monkeypatch, SABOTAGE[operation])) > 0


# State: a slot is a page of one token

SSM = State("ssm", (12, 5, 2), torch.float32, shard_dim=0)
CONV = State("conv", (3, 72), torch.bfloat16, shard_dim=1, shard_groups=(24, 24, 24))
FLAT = State("flat", (7,), torch.uint8)


def recurrent(tp_rank: int, tp_size: int, state: State) -> KVLayout:
    return KVLayout([], num_layers=2, page_size=4, tp_rank=tp_rank, tp_size=tp_size, states=[state])


def wrong_state(
    state: State,
    src: int,
    dst: int,
    monkeypatch: pytest.MonkeyPatch,
    sabotage: Callable[[Geometry], Geometry] = lambda geometry: geometry,
) -> int:
    """The numbers of wrong bytes, direct and through a stage, where ``src`` ranks send to the last of ``dst`` ranks."""
    seen: set[int] = set()
    monkeypatch.setattr(page_transfer, "GAP", 16)
    use_tiles(monkeypatch, copy=LARGE)
    monkeypatch.setattr(page_transfer, "_send", kernel_send(seen, sabotage, by_kernel=True))
    writers = {rank: recurrent(rank, src, state) for rank in range(src)}
    wrong, _ = compare_state(writers, recurrent(dst - 1, dst, state), rng=np.random.default_rng())
    assert seen
    return wrong


@pytest.mark.parametrize(("state", "src", "dst"), [(SSM, 2, 3), (CONV, 1, 2), (FLAT, 2, 1)])
def test_every_byte_of_state(state: State, src: int, dst: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrong_state(state, src, dst, monkeypatch) == 0


def test_a_wrong_geometry_of_state_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrong_state(SSM, 2, 1, monkeypatch, SABOTAGE["base"]) > 0


# Against the loops of references/page_copy.py, with any strides


@dataclass
class Pools:
    """Random bytes for both sides of every job, with canaries around. want: what the targets should become."""

    num_jobs: int
    src_nbytes: int
    dst_nbytes: int
    sources: list[torch.Tensor] = field(init=False)
    targets: list[torch.Tensor] = field(init=False)
    want: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.sources = [aligned(self.src_nbytes + CANARY)[:-CANARY] for _ in range(self.num_jobs)]
        self._memory = [aligned(self.dst_nbytes + 2 * CANARY) for _ in range(self.num_jobs)]
        self._expected = [memory.clone() for memory in self._memory]
        self.targets = [memory[CANARY:-CANARY] for memory in self._memory]
        self.want = [memory[CANARY:-CANARY] for memory in self._expected]

    @property
    def addresses(self) -> torch.Tensor:
        return torch.tensor([[s.data_ptr(), t.data_ptr()] for s, t in zip(self.sources, self.targets, strict=True)])

    def check(self) -> None:
        for job, (got, want) in enumerate(zip(self._memory, self._expected, strict=True)):
            assert torch.equal(got, want), f"job {job}: {int((got != want).sum())} wrong bytes, canaries included"


@dataclass(frozen=True)
class Case:
    """A geometry and the arguments of one call, with some page ids perhaps out of range."""

    geometry: Geometry
    src_ids: list[int]
    dst_ids: list[int]
    start: int
    limit: int
    num_jobs: int

    def jobs(
        self, pools: Pools, errors: torch.Tensor, *, blocks: int = 2, first: int = 0, count: int | None = None
    ) -> copies.CopyJobs:
        """The case's jobs from ``first`` on: all, or ``count`` of them."""
        return copies.CopyJobs(
            table=pools.addresses,
            geometry=self.geometry,
            first_job=first,
            num_jobs=self.num_jobs - first if count is None else count,
            start=self.start,
            limit_tokens=self.limit,
            errors=errors,
            blocks=blocks,
        )

    def pools(self) -> Pools:
        sides = self.geometry.src, self.geometry.dst
        return Pools(self.num_jobs, *(side.num_pages * side.page_stride for side in sides))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    unit = draw(st.sampled_from([1, 2, 4, 8, 16]))
    small, gaps = st.integers(1, 2), st.integers(0, 2)
    n0, n1, tokens = draw(small), draw(st.sampled_from([1, 2, 3, 4, 8])), draw(small)
    run = unit * draw(st.one_of(st.integers(1, 5), st.integers(20, 50)))
    strides, sides = [], []
    per_page = draw(st.sampled_from([(1, 1), (1, 3), (2, 1)]))
    num_pages = 4
    for parts in per_page:
        s1 = run + unit * draw(gaps)
        s0 = n1 * s1 + unit * draw(gaps)
        token_stride = -(-(n0 * s0) // (tokens * unit)) * unit + unit * draw(gaps)
        base = unit * draw(gaps)
        page_stride = base + parts * tokens * token_stride + unit * draw(gaps)
        strides.append((s0, s1))
        sides.append(
            PageAddressing(
                page_stride=page_stride, base=base, token_stride=token_stride, per_page=parts, num_pages=num_pages
            )
        )
    (s0, s1), (d0, d1) = strides
    holders = draw(st.integers(1, 2))
    sizes = [parts * tokens for parts in per_page]
    window = draw(st.none() | st.builds(Window, st.integers(1, 4), *map(st.just, [*sizes, max(sizes)])))
    geometry = Geometry(
        stripe=Stripe(tokens, max(per_page), holders, draw(st.integers(0, holders - 1)), window),
        rows=StridedRuns(n0, s0, d0, n1, s1, d1, run),
        src=sides[0],
        dst=sides[1],
        alignment=16,
    )
    dst_ids = draw(st.permutations(range(num_pages)))[: draw(st.integers(3, num_pages))]
    start = draw(st.integers(0, 1))
    src_ids = draw(st.lists(st.integers(0, num_pages - 1), min_size=2, max_size=4))
    for ids in (src_ids, dst_ids):
        if draw(st.integers(0, 4)) == 0:
            ids[draw(st.integers(0, len(ids) - 1))] = draw(st.sampled_from([num_pages, -1, 1 << 40, -(1 << 63)]))
    limit = len(dst_ids) * per_page[1] * tokens
    return Case(geometry, src_ids, dst_ids, start, limit, draw(small))


FEW = settings(
    max_examples=5,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.mark.parametrize("way", WAYS)
@FEW
@given(case=cases(), blocks=st.integers(1, 5))
def test_direct_copies_are_the_reference(case: Case, way: str, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiles(monkeypatch, copy=SMALL, side_by_side=WAYS[way])
    pools, errors = case.pools(), copies.error_words()
    src, dst = torch.tensor(case.src_ids), torch.tensor(case.dst_ids)
    where = {"start": case.start, "limit_tokens": case.limit}
    bad = copy_pages_reference(pools.sources, pools.want, src, dst, case.geometry, **where)
    copies.copy_pages(case.jobs(pools, errors, blocks=blocks), src, dst)
    pools.check()
    assert copies.first_error(errors) in (bad or {None})


@pytest.mark.parametrize("way", WAYS)
@FEW
@given(case=cases(), blocks=st.integers(1, 5))
def test_stages_are_the_reference(case: Case, way: str, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiles(monkeypatch, copy=SMALL, side_by_side=WAYS[way])
    pools = case.pools()
    src, dst = torch.tensor(case.src_ids), torch.tensor(case.dst_ids)
    where = {"start": case.start, "limit_tokens": case.limit}
    pairs = len(case.geometry.ordinals(num_src_pages=len(src), **where))
    stage = aligned(case.num_jobs * pairs * case.geometry.pair_nbytes + CANARY)
    want = stage.clone()
    bad = gather_reference(pools.sources, src, want, case.geometry, **where)
    errors = copies.error_words()
    copies.gather(case.jobs(pools, errors, blocks=blocks), src, MemorySpan.of(stage))
    assert torch.equal(stage, want)
    assert copies.first_error(errors) in (bad or {None})
    bad = scatter_reference(stage, pools.want, dst, case.geometry, num_src_pages=len(src), **where)
    errors = copies.error_words()
    copies.scatter(case.jobs(pools, errors, blocks=blocks), MemorySpan.of(stage), dst, num_src_pages=len(src))
    pools.check()
    assert copies.first_error(errors) in (bad or {None})


def plain(*, num_pages: int = 6, run: int = 48, alignment: int = 16) -> Case:
    """Whole pages, shuffled, one row each."""
    side = PageAddressing(page_stride=run + 16, base=0, token_stride=run, per_page=1, num_pages=num_pages)
    rows = StridedRuns(1, 0, 0, 1, 0, 0, run)
    geometry = Geometry(stripe=Stripe(1, 1), rows=rows, src=side, dst=side, alignment=alignment)
    src, dst = (torch.randperm(num_pages).tolist() for _ in range(2))
    return Case(geometry, src, dst, 0, num_pages, 2)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("side", "page"), [("source", 6), ("source", -(1 << 40)), ("destination", 1 << 40)])
def test_a_bad_page_is_left_out_and_named(side: str, page: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiles(monkeypatch, copy=SMALL, side_by_side=WAYS[way])
    case = plain()
    position = 3
    (case.src_ids if side == "source" else case.dst_ids)[position] = page
    pools, errors = case.pools(), copies.error_words()
    src, dst = torch.tensor(case.src_ids), torch.tensor(case.dst_ids)
    copy_pages_reference(pools.sources, pools.want, src, dst, case.geometry, start=0, limit_tokens=6)
    copies.copy_pages(case.jobs(pools, errors), src, dst)
    pools.check()
    clipped = min(max(page, -(1 << 31)), (1 << 31) - 1)
    assert copies.first_error(errors) == (side, position, clipped)


def test_every_kernel_leaves_tickets_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiles(monkeypatch, copy=SMALL)
    tickets = (ctypes.c_int32 * 2).from_address(kernel_launch.tickets_of(None))
    for blocks in (1, 4, 100):  # one draws all tiles, each draws several, or none
        case = plain(num_pages=64)
        pools, errors = case.pools(), copies.error_words()
        src, dst = torch.tensor(case.src_ids), torch.tensor(case.dst_ids)
        copy_pages_reference(pools.sources, pools.want, src, dst, case.geometry, start=0, limit_tokens=64)
        copies.copy_pages(case.jobs(pools, errors, blocks=blocks), src, dst)
        pools.check()
        assert list(tickets) == [0, 0]


def test_only_the_jobs_asked_for() -> None:
    case = plain()
    pools, errors = case.pools(), copies.error_words()
    src, dst = torch.tensor(case.src_ids), torch.tensor(case.dst_ids)
    copy_pages_reference(pools.sources[1:], pools.want[1:], src, dst, case.geometry, start=0, limit_tokens=6)
    copies.copy_pages(case.jobs(pools, errors, first=1), src, dst)
    pools.check()


def test_launches_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of more than `MAX_WORDS` words take several launches; here that limit is ten words."""
    monkeypatch.setattr(kernel_launch, "MAX_WORDS", 9)
    case = plain(run=48)
    pools = case.pools()
    src, dst = torch.tensor(case.src_ids), torch.tensor(case.dst_ids)
    copy_pages_reference(pools.sources, pools.want, src, dst, case.geometry, start=0, limit_tokens=6)
    run_kernel(case.geometry, pools.addresses.tolist(), src, dst, 0, 6, staged=False)
    pools.check()
    again = case.pools()
    copy_pages_reference(again.sources, again.want, src, dst, case.geometry, start=0, limit_tokens=6)
    run_kernel(case.geometry, again.addresses.tolist(), src, dst, 0, 6, staged=True)
    again.check()


def test_offsets_beyond_32_bits() -> None:
    """Pages 2 GiB apart: the pool is one page of real memory, reached through a large page id."""
    run, stride, page = 64, (1 << 31) - 16, 5
    side = PageAddressing(page_stride=stride, base=0, token_stride=run, per_page=1, num_pages=page + 1)
    near = PageAddressing(page_stride=run, base=0, token_stride=run, per_page=1, num_pages=1)
    geometry = Geometry(
        stripe=Stripe(1, 1),
        rows=StridedRuns(1, 0, 0, 1, 0, 0, run),
        src=side,
        dst=near,
        alignment=16,
    )
    source, target = aligned(run), aligned(run)
    assert not torch.equal(source, target)
    address = (source.data_ptr() - page * stride, target.data_ptr())
    run_kernel(geometry, [address], torch.tensor([page]), torch.tensor([0]), 0, 1, staged=False)
    assert torch.equal(source, target)


def test_nothing_to_do() -> None:
    case = plain()
    pools = case.pools()
    none = torch.zeros(0, dtype=torch.int64)
    run_kernel(case.geometry, pools.addresses.tolist(), none, torch.tensor(case.dst_ids), 0, 6, staged=False)
    run_kernel(case.geometry, pools.addresses.tolist(), none, torch.tensor(case.dst_ids), 0, 6, staged=True)
    pools.check()


def test_wrong_arguments_are_refused() -> None:
    case = plain()
    pools, errors = case.pools(), copies.error_words()
    table, jobs = pools.addresses, case.jobs(pools, errors)
    src, dst = torch.tensor(case.src_ids), torch.tensor(case.dst_ids)
    wrong: list[tuple[str, object, str]] = [
        ("table", table.to(torch.int32), "table of jobs must be"),
        ("table", table[:, :1], "table of jobs must be"),
        ("first_job", 1, "of a table of 2"),
        ("num_jobs", 3, "of a table of 2"),
        ("num_jobs", -1, "of a table of 2"),
        ("start", -1, "start at least 0"),
        ("blocks", 0, "blocks must be"),
        ("limit_tokens", 7, "dst_pages for 6 tokens only"),
        ("errors", torch.zeros(3, dtype=torch.int64), "errors must hold"),
    ]
    for name, value, words in wrong:
        with pytest.raises(ProtocolError, match=words):
            copies.copy_pages(replace(jobs, **{name: value}), src, dst)
    with pytest.raises(ProtocolError, match="src_pages must be"):
        copies.copy_pages(jobs, torch.zeros(3), dst)
    with pytest.raises(ProtocolError, match="dst_pages must be"):
        copies.copy_pages(jobs, src, torch.zeros((2, 2), dtype=torch.int64))
    stage = aligned(12 * 48 + 16)
    for bad in (stage[: 12 * 48 - 1], stage[1:], stage.view(torch.int16)):
        with pytest.raises(ProtocolError, match="stage"):
            copies.gather(jobs, src, MemorySpan.of(bad))
    pools.check()


@triton.jit
def move(number: tl.int32, src: tl.int64, dst: tl.int64) -> None:
    value = tl.load(src.to(tl.pointer_type(tl.int64)))
    tl.store(dst.to(tl.pointer_type(tl.int64)), value + (number << 4))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only there the kernel can be asked for a low address")
def test_addresses_below_two_gigabytes_are_addresses_and_numbers_have_their_declared_width() -> None:
    """Where the heap of some builds of Python lies. In a compiled kernel widths do not depend on values either."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    anywhere_below, anonymous = 0x40, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    low = libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, anonymous | anywhere_below, -1, 0)
    assert 0 < low < 1 << 31
    words = (ctypes.c_int64 * 2).from_address(low)
    words[:] = [7, -1]
    CompiledKernel(move, 3, (), 4).launch(1, (1 << 28, low, low + 8))
    assert list(words) == [7, 7], "the number is shifted out of its 32 bits"
