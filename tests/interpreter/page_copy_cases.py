"""The cases of test_kernels.py that run the kernel: in Triton's interpreter, which wants a process of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import oracle
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import Pool, differences, gqa, planned, reference
from state_oracle import compare as compare_state

from torchkv import kernellaunch, kernels
from torchkv.copyreference import copy_pages_reference, gather_reference, scatter_reference
from torchkv.errors import ProtocolError
from torchkv.kernellaunch import Tile
from torchkv.layout import KVLayout, State
from torchkv.plan import PairPlan
from torchkv.slab import Rows, Window
from torchkv.slabgeometry import Geometry, Side
from torchkv.stagememory import Room

assert os.environ.get("TRITON_INTERPRET") == "1", "run test_kernels.py, which starts this in the interpreter"

# With and without the table of rows. A tile costs the interpreter 50 ms, whatever its size; small ones make several.
WORD_BY_WORD, BY_ROWS = Tile(512, 4, 0), Tile(512, 4, 512)
SMALL = {"words": Tile(128, 1, 0), "rows": Tile(128, 1, 128)}
CANARY = 64  # bytes around every pool


def kernel_send(seen: set[int], sabotage: Callable[[Geometry], Geometry], tile: Tile | None) -> Callable[..., None]:
    """`oracle._send` by the kernel, or without ``tile`` by the reference; ``seen`` collects the units."""

    def send(
        plan: PairPlan,
        source: Pool,
        pages: npt.NDArray[np.int64],
        start: int,
        target: Pool,
        dst_pages: npt.NDArray[np.int64],
        written: object,
        factored: bool,
    ) -> None:
        limit = len(dst_pages) * plan.dst_page_size
        src_ids, dst_ids = torch.from_numpy(pages.copy()), torch.from_numpy(dst_pages.copy())
        groups: dict[Geometry, list[tuple[oracle.Bytes, oracle.Bytes]]] = {}
        for slab in plan.slabs:
            for layer in slab.layers:
                src, dst = source.tensors[slab.component, layer], target.tensors[slab.component, layer]
                shape = kernels.geometry(
                    slab,
                    src_page_stride=src.shape[1],
                    dst_page_stride=dst.shape[1],
                    src_page_size=plan.src_page_size,
                    dst_page_size=plan.dst_page_size,
                    num_src_pages=len(src),
                    num_dst_pages=len(dst),
                    addresses=[src.ctypes.data, dst.ctypes.data],
                )
                groups.setdefault(shape, []).append((src, dst))
        for true_shape, jobs in groups.items():
            seen.add(true_shape.unit)
            shape = sabotage(true_shape)
            if tile is not None:
                addresses = [(src.ctypes.data, dst.ctypes.data) for src, dst in jobs]
                run_kernel(shape, addresses, src_ids, dst_ids, start, limit, staged=factored)
                continue
            sources, targets = (
                [torch.from_numpy(array.reshape(-1)) for array in side] for side in zip(*jobs, strict=True)
            )
            where = {"start": start, "limit_tokens": limit}
            assert copy_pages_reference(sources, targets, src_ids, dst_ids, shape, **where) == set()

    return send


def run_kernel(
    shape: Geometry,
    addresses: Sequence[tuple[int, int]],
    src_ids: torch.Tensor,
    dst_ids: torch.Tensor,
    start: int,
    limit: int,
    *,
    staged: bool,
    blocks: int = 3,
) -> None:
    jobs, errors = torch.tensor(addresses, dtype=torch.int64), kernels.error_slot()
    common = {"start": start, "limit_tokens": limit, "errors": errors, "blocks": blocks}
    common |= {"first_job": 0, "num_jobs": len(jobs)}
    if staged:
        pairs = len(shape.pairs(num_src_pages=len(src_ids), start=start, limit_tokens=limit))
        stage = aligned(len(jobs) * pairs * shape.pair_nbytes)
        kernels.gather(jobs, src_ids, Room.of(stage), shape, **common)
        kernels.scatter(jobs, Room.of(stage), dst_ids, shape, num_src_pages=len(src_ids), **common)
    else:
        kernels.copy_pages(jobs, src_ids, dst_ids, shape, **common)
    assert kernels.first_error(errors) is None


def aligned(nbytes: int) -> torch.Tensor:
    memory = torch.randint(0, 256, (nbytes + 64,), dtype=torch.uint8)
    skip = -memory.data_ptr() % 64
    return memory[skip : skip + nbytes]


def wrong_bytes(
    writers: Mapping[int, KVLayout],
    reader: KVLayout,
    unit: int,
    monkeypatch: pytest.MonkeyPatch,
    sabotage: Callable[[Geometry], Geometry] = lambda shape: shape,
) -> list[int]:
    """Differences after copies by the reference, by the kernel straight in two calls, and through a stage."""
    seen: set[int] = set()
    monkeypatch.setattr(oracle, "GAP", unit)  # canaries that leave the pages aligned
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
    ways = (False, None, None), (False, two_calls, BY_ROWS), (True, None, WORD_BY_WORD)
    for factored, chunk, tile in ways:
        monkeypatch.setattr(kernellaunch, "TILE", tile)
        monkeypatch.setattr(oracle, "_send", kernel_send(seen, sabotage, tile))
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
    assert wrong_bytes(writers, reader, unit, monkeypatch) == [0, 0, 0]


SABOTAGE: dict[str, Callable[[Geometry], Geometry]] = {
    "base": lambda shape: replace(shape, src=replace(shape.src, base=shape.src.base ^ 16)),
    "row stride": lambda shape: replace(shape, rows=shape.rows._replace(s1=0)),
    "window": lambda shape: replace(shape, window=Window(1, 4, 4, 4)),
    "page bound": lambda shape: replace(shape, dst=replace(shape.dst, page_stride=shape.dst.page_stride - 16)),
}


@pytest.mark.parametrize("what", SABOTAGE)
def test_a_wrong_geometry_is_noticed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above."""
    writers, reader, unit = FAMILIES["heads, many to few"]
    assert min(wrong_bytes(writers, reader, unit, monkeypatch, SABOTAGE[what])) > 0


# State: slots are pages of one token

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
    sabotage: Callable[[Geometry], Geometry] = lambda shape: shape,
) -> int:
    """Differences, straight and through a stage, as ``src`` ranks send to the last of ``dst``."""
    seen: set[int] = set()
    monkeypatch.setattr(oracle, "GAP", 16)
    monkeypatch.setattr(kernellaunch, "TILE", BY_ROWS)
    monkeypatch.setattr(oracle, "_send", kernel_send(seen, sabotage, BY_ROWS))
    writers = {rank: recurrent(rank, src, state) for rank in range(src)}
    wrong, _ = compare_state(writers, recurrent(dst - 1, dst, state), rng=np.random.default_rng())
    assert seen
    return wrong


@pytest.mark.parametrize(("state", "src", "dst"), [(SSM, 2, 3), (CONV, 1, 2), (FLAT, 2, 1)])
def test_every_byte_of_state(state: State, src: int, dst: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrong_state(state, src, dst, monkeypatch) == 0


def test_a_wrong_geometry_of_state_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrong_state(SSM, 2, 1, monkeypatch, SABOTAGE["base"]) > 0


# Against the loops of copyreference.py, whatever the strides


@dataclass
class Pools:
    """Fresh random bytes for both sides of every job, canaries around; ``want`` is what the target should become."""

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
    """shape and the arguments of one call, with some page ids perhaps out of range."""

    shape: Geometry
    src_ids: list[int]
    dst_ids: list[int]
    start: int
    limit: int
    num_jobs: int

    def pools(self) -> Pools:
        sides = self.shape.src, self.shape.dst
        return Pools(self.num_jobs, *(side.num_pages * side.page_stride for side in sides))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    unit = draw(st.sampled_from([1, 2, 4, 8, 16]))
    small, gaps = st.integers(1, 2), st.integers(0, 2)
    n0, n1, tokens = draw(small), draw(small), draw(small)
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
            Side(page_stride=page_stride, base=base, token_stride=token_stride, per_page=parts, num_pages=num_pages)
        )
    (s0, s1), (d0, d1) = strides
    holders = draw(st.integers(1, 2))
    sizes = [parts * tokens for parts in per_page]
    window = draw(st.none() | st.builds(Window, st.integers(1, 4), *map(st.just, [*sizes, max(sizes)])))
    shape = Geometry(
        tokens=tokens,
        holders=holders,
        index=draw(st.integers(0, holders - 1)),
        per_unit=max(per_page),
        rows=Rows(n0, s0, d0, n1, s1, d1, run),
        src=sides[0],
        dst=sides[1],
        alignment=16,
        window=window,
    )
    dst_ids = draw(st.permutations(range(num_pages)))[: draw(st.integers(3, num_pages))]
    start = draw(st.integers(0, 1))
    src_ids = draw(st.lists(st.integers(0, num_pages - 1), min_size=2, max_size=4))
    for ids in (src_ids, dst_ids):
        if draw(st.integers(0, 4)) == 0:
            ids[draw(st.integers(0, len(ids) - 1))] = draw(st.sampled_from([num_pages, -1, 1 << 40, -(1 << 63)]))
    limit = len(dst_ids) * per_page[1] * tokens
    return Case(shape, src_ids, dst_ids, start, limit, draw(small))


FEW = settings(
    max_examples=5,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.mark.parametrize("tile", SMALL)
@FEW
@given(case=cases(), blocks=st.integers(1, 5))
def test_direct_copies_are_the_reference(case: Case, tile: str, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernellaunch, "TILE", SMALL[tile])
    pools, errors = case.pools(), kernels.error_slot()
    src, dst = torch.tensor(case.src_ids), torch.tensor(case.dst_ids)
    where = {"start": case.start, "limit_tokens": case.limit}
    bad = copy_pages_reference(pools.sources, pools.want, src, dst, case.shape, **where)
    jobs = {"first_job": 0, "num_jobs": case.num_jobs}
    kernels.copy_pages(pools.addresses, src, dst, case.shape, **jobs, **where, errors=errors, blocks=blocks)
    pools.check()
    assert kernels.first_error(errors) in (bad or {None})


@pytest.mark.parametrize("tile", SMALL)
@FEW
@given(case=cases(), blocks=st.integers(1, 5))
def test_stages_are_the_reference(case: Case, tile: str, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernellaunch, "TILE", SMALL[tile])
    pools = case.pools()
    src, dst = torch.tensor(case.src_ids), torch.tensor(case.dst_ids)
    where = {"start": case.start, "limit_tokens": case.limit}
    more = {**where, "first_job": 0, "num_jobs": case.num_jobs, "blocks": blocks}
    pairs = len(case.shape.pairs(num_src_pages=len(src), **where))
    stage = aligned(case.num_jobs * pairs * case.shape.pair_nbytes + CANARY)
    want = stage.clone()
    bad = gather_reference(pools.sources, src, want, case.shape, **where)
    errors = kernels.error_slot()
    kernels.gather(pools.addresses, src, Room.of(stage), case.shape, **more, errors=errors)
    assert torch.equal(stage, want)
    assert kernels.first_error(errors) in (bad or {None})
    bad = scatter_reference(stage, pools.want, dst, case.shape, num_src_pages=len(src), **where)
    errors = kernels.error_slot()
    kernels.scatter(pools.addresses, Room.of(stage), dst, case.shape, num_src_pages=len(src), **more, errors=errors)
    pools.check()
    assert kernels.first_error(errors) in (bad or {None})


@pytest.mark.parametrize("stands_at", [0, 40, 43, 1 << 40])
def test_a_guarded_stage_is_unpacked_only_if_its_signal_says_so(stands_at: int) -> None:
    case = plain()
    pools, signal = case.pools(), torch.tensor([stands_at])
    src, dst = torch.tensor(case.src_ids), torch.tensor(case.dst_ids)
    stage = aligned(case.num_jobs * len(src) * case.shape.pair_nbytes + CANARY)
    gather_reference(pools.sources, src, stage, case.shape, start=0, limit_tokens=case.limit)
    more = {"start": 0, "limit_tokens": case.limit, "first_job": 0, "num_jobs": case.num_jobs, "blocks": 2}
    for value in (42, stands_at):
        errors = kernels.error_slot()
        guard = (signal.data_ptr(), value)
        room = Room.of(stage)
        kernels.scatter(pools.addresses, room, dst, case.shape, num_src_pages=6, **more, errors=errors, guard=guard)
        assert kernels.skipped(errors) == (value != stands_at)
        assert kernels.first_error(errors) is None
        if value == stands_at:
            scatter_reference(stage, pools.want, dst, case.shape, num_src_pages=6, start=0, limit_tokens=case.limit)
        pools.check()


def plain(*, num_pages: int = 6, run: int = 48, alignment: int = 16) -> Case:
    """Whole pages, shuffled, one row each."""
    side = Side(page_stride=run + 16, base=0, token_stride=run, per_page=1, num_pages=num_pages)
    rows = Rows(1, 0, 0, 1, 0, 0, run)
    shape = Geometry(tokens=1, holders=1, index=0, per_unit=1, rows=rows, src=side, dst=side, alignment=alignment)
    src, dst = (torch.randperm(num_pages).tolist() for _ in range(2))
    return Case(shape, src, dst, 0, num_pages, 2)


@pytest.mark.parametrize("tile", SMALL)
@pytest.mark.parametrize(("side", "page"), [("source", 6), ("source", -(1 << 40)), ("destination", 1 << 40)])
def test_a_bad_page_is_left_out_and_named(side: str, page: int, tile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernellaunch, "TILE", SMALL[tile])
    case = plain()
    position = 3
    (case.src_ids if side == "source" else case.dst_ids)[position] = page
    pools, errors = case.pools(), kernels.error_slot()
    src, dst = torch.tensor(case.src_ids), torch.tensor(case.dst_ids)
    copy_pages_reference(pools.sources, pools.want, src, dst, case.shape, start=0, limit_tokens=6)
    more = {"first_job": 0, "num_jobs": 2, "start": 0, "limit_tokens": 6, "blocks": 2}
    kernels.copy_pages(pools.addresses, src, dst, case.shape, **more, errors=errors)
    pools.check()
    clipped = min(max(page, -(1 << 31)), (1 << 31) - 1)
    assert kernels.first_error(errors) == (side, position, clipped)


def test_only_the_jobs_asked_for() -> None:
    case = plain()
    pools, errors = case.pools(), kernels.error_slot()
    src, dst = torch.tensor(case.src_ids), torch.tensor(case.dst_ids)
    copy_pages_reference(pools.sources[1:], pools.want[1:], src, dst, case.shape, start=0, limit_tokens=6)
    more = {"first_job": 1, "num_jobs": 1, "start": 0, "limit_tokens": 6, "blocks": 2}
    kernels.copy_pages(pools.addresses, src, dst, case.shape, **more, errors=errors)
    pools.check()


def test_launches_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """What exceeds 32 bits is done in several launches; here ten words are too many."""
    monkeypatch.setattr(kernellaunch, "MAX_WORDS", 9)
    case = plain(run=48)
    pools = case.pools()
    src, dst = torch.tensor(case.src_ids), torch.tensor(case.dst_ids)
    copy_pages_reference(pools.sources, pools.want, src, dst, case.shape, start=0, limit_tokens=6)
    run_kernel(case.shape, pools.addresses.tolist(), src, dst, 0, 6, staged=False)
    pools.check()
    again = case.pools()
    copy_pages_reference(again.sources, again.want, src, dst, case.shape, start=0, limit_tokens=6)
    run_kernel(case.shape, again.addresses.tolist(), src, dst, 0, 6, staged=True)
    again.check()


def test_offsets_beyond_32_bits() -> None:
    """Pages 2 GiB apart: the pool is one page of real memory, reached through a page id that is large."""
    run, stride, page = 64, (1 << 31) - 16, 5
    side = Side(page_stride=stride, base=0, token_stride=run, per_page=1, num_pages=page + 1)
    near = Side(page_stride=run, base=0, token_stride=run, per_page=1, num_pages=1)
    shape = Geometry(
        tokens=1, holders=1, index=0, per_unit=1, rows=Rows(1, 0, 0, 1, 0, 0, run), src=side, dst=near, alignment=16
    )
    source, target = aligned(run), aligned(run)
    assert not torch.equal(source, target)
    address = (source.data_ptr() - page * stride, target.data_ptr())
    run_kernel(shape, [address], torch.tensor([page]), torch.tensor([0]), 0, 1, staged=False)
    assert torch.equal(source, target)


def test_nothing_to_do() -> None:
    case = plain()
    pools = case.pools()
    none = torch.zeros(0, dtype=torch.int64)
    run_kernel(case.shape, pools.addresses.tolist(), none, torch.tensor(case.dst_ids), 0, 6, staged=False)
    run_kernel(case.shape, pools.addresses.tolist(), none, torch.tensor(case.dst_ids), 0, 6, staged=True)
    pools.check()


def test_wrong_arguments_are_refused() -> None:
    case = plain()
    pools = case.pools()
    before = pools.addresses
    good = {
        "jobs": before,
        "src_pages": torch.tensor(case.src_ids),
        "dst_pages": torch.tensor(case.dst_ids),
        "first_job": 0,
        "num_jobs": 2,
        "start": 0,
        "limit_tokens": 6,
        "errors": kernels.error_slot(),
        "blocks": 2,
    }
    wrong: list[tuple[str, object, str]] = [
        ("jobs", before.to(torch.int32), "jobs must be"),
        ("jobs", before[:, :1], "jobs must be"),
        ("src_pages", torch.zeros(3), "src_pages must be"),
        ("dst_pages", torch.zeros((2, 2), dtype=torch.int64), "dst_pages must be"),
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
            kernels.copy_pages(geometry=case.shape, **{**good, name: value})
    stage = aligned(12 * 48 + 16)
    rest = {key: value for key, value in good.items() if key not in ("dst_pages", "limit_tokens")}
    for bad in (stage[: 12 * 48 - 1], stage[1:], stage.view(torch.int16)):
        with pytest.raises(ProtocolError, match="stage"):
            kernels.gather(stage=Room.of(bad), geometry=case.shape, limit_tokens=6, **rest)
    pools.check()
