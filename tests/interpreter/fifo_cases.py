"""Runs what passes chunks through a FIFO, in Triton's interpreter: in a process that test_fifo.py starts.

The interpreter runs one block after the other. So the two sides of a FIFO are launched alternately, and each does what
it can until it gives up.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.packing import Transfer, transfers
from tests.helpers.references import page_transfer
from tests.helpers.references.page_copy import copy_pages_reference, gather_reference, scatter_reference
from tests.helpers.references.page_transfer import differences, gqa
from tests.interpreter.pack_cases import CUT, TALL, uneven
from tests.interpreter.page_copy_cases import BF16, CANARY, FAMILIES, FEW, Case, Pools, aligned, cases, plain
from torchkv.errors import ProtocolError
from torchkv.kernels import copies
from torchkv.kernels import launch as kernel_launch
from torchkv.kernels.launch import FifoArgs, Tile
from torchkv.layout import kernel_geometry, stage_format
from torchkv.layout.kernel_geometry import BadPage
from torchkv.layout.pieces import Piece, PieceLayout, piece_layout
from torchkv.layout.stage_format import ChunkFifo, MemorySpan
from torchkv.staging import cuda_pack

assert os.environ.get("TRITON_INTERPRET") == "1", "not in the interpreter: run test_fifo.py, which starts it"

FIFO_TILES = {"words": Tile(32, 1, 0), "rows": Tile(32, 1, 32)}
CHUNK_UNIT = 512  # bytes: a tile of the widest words
BASE = 1 << 40


class Ring:
    """A FIFO's memory: random bytes in the slots with canaries around, stale words below ``BASE``, both states."""

    def __init__(self, channels: int, chunk: int, *, max_polls: int = 1) -> None:
        slots = stage_format.SLOTS * channels * chunk
        self._memory = aligned(slots + 2 * CANARY)
        self._canaries = self._canary()
        self.slots = self._memory[CANARY:-CANARY]
        self.words = torch.randint(0, BASE, (2, stage_format.MAX_CHANNELS))
        self._words = self.words.clone()
        self.states = [torch.zeros(stage_format.MAX_CHANNELS, dtype=torch.int64) for _ in range(2)]
        self.sides = [
            FifoArgs(self.words.data_ptr(), BASE, ChunkFifo(chunk, channels), state.data_ptr(), max_polls)
            for state in self.states
        ]
        self.channels, self.chunk = channels, chunk

    @property
    def span(self) -> MemorySpan:
        return MemorySpan.of(self.slots)

    def _canary(self) -> torch.Tensor:
        return torch.cat([self._memory[:CANARY], self._memory[-CANARY:]])

    def slot(self, channel: int, turn: int) -> torch.Tensor:
        at = (turn % stage_format.SLOTS * self.channels + channel) * self.chunk
        return self.slots[at : at + self.chunk]

    def raised(self, word: int) -> list[int]:
        """Chunks of each channel according to its progress words. word: 0: packed; 1: unpacked."""
        told, before = self.words[word, : self.channels], self._words[word, : self.channels]
        return [int(now) - BASE if now != was else 0 for now, was in zip(told, before, strict=True)]

    def check(self) -> None:
        assert torch.equal(self._canary(), self._canaries), "written outside of the slots"
        assert torch.equal(self.words[:, self.channels :], self._words[:, self.channels :])
        for state in self.states:
            assert not state[self.channels :].any()
        for word, state in enumerate(self.states):
            assert self.raised(word) == state[: self.channels].tolist()

    def run(self, launch: Sequence[Callable[[torch.Tensor], None]], order: Sequence[int] = (0, 1)) -> set[BadPage]:
        """Launches gather and scatter alternately until both are finished. Returns the bad pages that they reported."""
        slots = [copies.error_words(), copies.error_words()]
        for _ in range(200):
            for side in order:
                slots[side][1] = 0
                launch[side](slots[side])
                self.check()
            if not any(map(copies.unfinished, slots)):
                return {bad for errors in slots if (bad := copies.first_error(errors)) is not None}
        raise AssertionError(f"no end: {self.raised(0)}, {self.raised(1)}")


@pytest.fixture(params=FIFO_TILES)
def _fifo_tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_launch, "TILE", FIFO_TILES[request.param])
    monkeypatch.setattr(copies, "CHUNK_UNIT", CHUNK_UNIT)


def fifo_launches(
    case: Case, pools: Pools, ring: Ring, cut: int = 0, behind: Callable[[], object] = int
) -> list[Callable[[torch.Tensor], None]]:
    """Functions that launch the gather and the scatter of all jobs.

    cut: if not 0, two launches each, the first of them with so many jobs. behind: called after each launch.
    """
    src, dst = torch.tensor(case.src_ids), torch.tensor(case.dst_ids)
    pairs = len(case.geometry.ordinals(num_src_pages=len(src), start=case.start, limit_tokens=case.limit))
    per_job = ring.sides[0].fifo.chunks(pairs * case.geometry.pair_nbytes)
    runs = [(0, case.num_jobs)] if not cut else [(0, cut), (cut, case.num_jobs - cut)]

    def gather(errors: torch.Tensor) -> None:
        for first, count in runs:
            jobs = case.jobs(pools, errors, blocks=1, first=first, count=count)
            copies.gather(jobs, src, ring.span, fifo_args=ring.sides[0], first_chunk=first * per_job)
            behind()

    def scatter(errors: torch.Tensor) -> None:
        for first, count in runs:
            jobs = case.jobs(pools, errors, blocks=1, first=first, count=count)
            through = {"fifo_args": ring.sides[1], "first_chunk": first * per_job}
            copies.scatter(jobs, ring.span, dst, num_src_pages=len(src), **through)
            behind()

    return [gather, scatter]


@pytest.mark.usefixtures("_fifo_tile")
@settings(FEW, max_examples=15)
@given(
    case=cases(),
    slots=st.sampled_from([1, 2, 4]),
    channels=st.integers(1, 3),
    factor=st.integers(1, 2),
    max_polls=st.integers(1, 2),
    cut=st.booleans(),
    order=st.permutations([0, 1]),
)
def test_fifo_copies_are_the_reference(
    case: Case,
    slots: int,
    channels: int,
    factor: int,
    max_polls: int,
    cut: bool,
    order: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (kernel_launch, stage_format):
        monkeypatch.setattr(module, "SLOTS", slots)
    monkeypatch.setattr(copies, "CHUNK_UNIT", CHUNK_UNIT // 2)
    monkeypatch.setattr(kernel_launch, "TILE", kernel_launch.TILE._replace(words=16))
    pools = case.pools()
    where = {"start": case.start, "limit_tokens": case.limit}
    bad = copy_pages_reference(
        pools.sources, pools.want, *map(torch.tensor, (case.src_ids, case.dst_ids)), case.geometry, **where
    )
    ring = Ring(channels, factor * stage_format.CHUNK_UNIT, max_polls=max_polls)
    told = ring.run(fifo_launches(case, pools, ring, cut=int(cut and case.num_jobs > 1)), order)
    assert {page.side for page in told} == {page.side for page in bad}
    assert told <= bad
    # Where a source page is bad, stale bytes of the slot are scattered in its place.
    if "source" not in {page.side for page in bad}:
        pools.check()


def long(*, num_jobs: int = 2) -> Case:
    """Jobs of 9.5 KiB: 19 chunks each, the last one 3/4 full; runs of 48 bytes cross chunks."""
    case = plain(num_pages=200)
    return replace(case, num_jobs=num_jobs)


def fifo_reference(case: Case, pools: Pools, ring: Ring) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The chunks of all jobs, and the stage that holds them all, packed."""
    nbytes = len(case.src_ids) * case.geometry.pair_nbytes
    stage = torch.zeros(case.num_jobs * nbytes, dtype=torch.uint8)
    where = {"start": case.start, "limit_tokens": case.limit}
    assert not gather_reference(pools.sources, torch.tensor(case.src_ids), stage, case.geometry, **where)
    return [chunk for job in stage.split(nbytes) for chunk in job.split(ring.chunk)], stage


@pytest.mark.usefixtures("_fifo_tile")
@pytest.mark.parametrize("channels", [2, 3, 40])
def test_slots_are_used_again(channels: int) -> None:
    case = long()
    pools, ring = case.pools(), Ring(channels, CHUNK_UNIT)
    chunks, stage = fifo_reference(case, pools, ring)
    assert len(chunks) == 38
    assert len(chunks[18]) == 384
    assert not scatter_reference(
        stage, pools.want, torch.tensor(case.dst_ids), case.geometry, num_src_pages=200, start=0, limit_tokens=200
    )
    assert ring.run(fifo_launches(case, pools, ring, cut=1)) == set()
    pools.check()
    shares = [len(range(channel, 38, channels)) for channel in range(channels)]
    assert ring.raised(0) == ring.raised(1) == shares


@pytest.mark.usefixtures("_fifo_tile")
def test_a_gather_waits_for_credit_and_goes_on_chunk_by_chunk() -> None:
    """The test raises the unpacked words itself: those of one channel at a time, by one chunk or several."""
    case, channels = long(), 3
    pools, ring = case.pools(), Ring(channels, CHUNK_UNIT)
    chunks, _ = fifo_reference(case, pools, ring)
    gather, _ = fifo_launches(case, pools, ring, cut=1)
    shares = [len(range(channel, len(chunks), channels)) for channel in range(channels)]
    credit, rng = [0] * channels, np.random.default_rng()
    want = ring.slots.clone()
    done = [0] * channels
    while True:
        errors, before = copies.error_words(), list(done)
        gather(errors)
        for channel in range(channels):
            # Chunks that a block left undone in an earlier launch hold up the same block of the later launch.
            while done[channel] < min(shares[channel], credit[channel] + stage_format.SLOTS):
                number = channel + done[channel] * channels
                at = ring.slot(channel, done[channel]).data_ptr() - ring.slots.data_ptr()
                want[at : at + len(chunks[number])] = chunks[number]
                done[channel] += 1
        assert ring.raised(0) == ring.states[0][:channels].tolist() == done
        assert torch.equal(ring.slots, want)
        assert copies.unfinished(errors) == (done != shares)
        assert copies.moved(errors) == (done != before)
        assert copies.first_error(errors) is None
        if done == shares:
            break
        channel = int(rng.integers(channels))
        credit[channel] = min(done[channel], credit[channel] + int(rng.integers(1, 4)))
        if credit[channel]:
            ring.words[1, channel] = BASE + credit[channel]


@pytest.mark.usefixtures("_fifo_tile")
def test_a_scatter_waits_for_data_and_goes_on_chunk_by_chunk() -> None:
    case, channels = long(), 3
    pools, ring = case.pools(), Ring(channels, CHUNK_UNIT)
    chunks, _ = fifo_reference(case, pools, ring)
    _, scatter = fifo_launches(case, pools, ring, cut=1)
    before = [target.clone() for target in pools.targets]
    shares = [len(range(channel, len(chunks), channels)) for channel in range(channels)]
    errors, rng = copies.error_words(), np.random.default_rng()
    scatter(errors)
    assert copies.unfinished(errors)
    assert not copies.moved(errors)
    assert copies.first_error(errors) is None
    assert ring.raised(1) == [0] * channels
    assert all(map(torch.equal, pools.targets, before)), "pages were written before any chunk had arrived"
    arrived = torch.zeros(sum(map(len, chunks)), dtype=torch.uint8)
    ends = np.cumsum([len(chunk) for chunk in chunks])
    while True:
        done = ring.raised(1)
        if done == shares:
            break
        for channel in range(channels):
            for turn in range(done[channel], min(shares[channel], done[channel] + int(rng.integers(4)))):
                number = channel + turn * channels
                ring.slot(channel, turn)[: len(chunks[number])] = chunks[number]
                arrived[ends[number] - len(chunks[number]) : ends[number]] = 1
                ring.words[0, channel] = BASE + turn + 1
        scatter(errors := copies.error_words())
        assert ring.raised(0) == ring.raised(1) == ring.states[1][:channels].tolist()
        assert copies.unfinished(errors) == (ring.raised(1) != shares)
        assert copies.moved(errors) == (ring.raised(1) != done)
        stage = torch.cat(chunks)
        now = [target.clone() for target in before]
        masks = [torch.zeros_like(target) for target in before]
        more = {"num_src_pages": 200, "start": 0, "limit_tokens": 200}
        dst = torch.tensor(case.dst_ids)
        scatter_reference(stage, now, dst, case.geometry, **more)
        scatter_reference(arrived, masks, dst, case.geometry, **more)
        for got, was, full, mask in zip(pools.targets, before, now, masks, strict=True):
            assert torch.equal(got, torch.where(mask == 1, full, was)), "not just the chunks that had arrived"


@pytest.mark.usefixtures("_fifo_tile")
@pytest.mark.parametrize("side", [0, 1])
def test_a_later_launch_waits_for_an_earlier_one(side: int) -> None:
    """What the first launch waited for arrives after it gave up: the second launch must not overtake it."""
    case = long()
    pools, ring = case.pools(), Ring(2, CHUNK_UNIT)
    seen: list[list[int]] = []

    def behind() -> None:
        seen.append(ring.raised(side))
        ring.words[1 - side, :2] = BASE + 1000

    launches = fifo_launches(case, pools, ring, cut=1, behind=behind)
    launches[side](errors := copies.error_words())
    assert seen == [[stage_format.SLOTS * (1 - side)] * 2] * 2
    assert copies.unfinished(errors)
    launches[side](errors := copies.error_words())
    assert seen[2:] == [[10, 9], [19, 19]]
    assert not copies.unfinished(errors)


@pytest.mark.usefixtures("_fifo_tile")
@pytest.mark.parametrize(("side", "page"), [("source", 200), ("destination", -1)])
def test_a_bad_page_in_a_fifo_is_named_however_often_it_stops(side: str, page: int) -> None:
    case = long()
    (case.src_ids if side == "source" else case.dst_ids)[7] = page
    pools, ring = case.pools(), Ring(2, CHUNK_UNIT)
    assert ring.run(fifo_launches(case, pools, ring)) == {(side, 7, page)}


def test_wrong_fifos_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = plain()
    pools, unit = case.pools(), stage_format.CHUNK_UNIT
    ring = Ring(2, unit)
    launches = fifo_launches(case, pools, ring)
    good, most = ring.sides[0], stage_format.MAX_CHANNELS
    before = ring.slots.clone()
    wrong: list[tuple[dict[str, int], str]] = [
        ({"channels": 0}, "0 channels"),
        ({"channels": -1}, "-1 channels"),
        ({"channels": most + 1}, f"{most + 1} channels"),
        ({"channels": 3}, "stage of"),
        ({"chunk": 0}, "chunks of 0 bytes"),
        ({"chunk": unit // 2}, "chunks of"),
        ({"chunk": unit + 16, "channels": 1}, "chunks of"),
        ({"chunk": -unit}, "chunks of"),
        ({"max_polls": 0}, "max_polls"),
    ]
    for change, words in wrong:
        fifo = good.fifo._replace(**{key: value for key, value in change.items() if key != "max_polls"})
        ring.sides = [good._replace(fifo=fifo, max_polls=change.get("max_polls", good.max_polls))] * 2
        for launch in launches:
            with pytest.raises(ProtocolError, match=words):
                launch(copies.error_words())
    ring.sides = [good] * 2
    for launch in launches:
        with pytest.raises(ProtocolError, match="two int64"):
            launch(torch.zeros(1, dtype=torch.int64))
    assert torch.equal(ring.slots, before)
    pools.check()
    monkeypatch.setattr(copies, "MAX_CHANNELS", 1)
    with pytest.raises(ProtocolError, match="2 channels"):
        launches[0](copies.error_words())


# Page packers


@pytest.fixture
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_launch, "TILE", Tile(32, 1, 0))
    monkeypatch.setattr(copies, "CHUNK_UNIT", 512)


def through_fifo(transfer: Transfer, piece: Piece, layout: PieceLayout, ring: Ring) -> None:
    """Copies the whole piece, and checks that exactly its chunks were published."""
    args = partial(transfer.args, piece, layout, stage=ring.slots, blocks=1)
    src, dst = transfer.ids(piece), torch.tensor(transfer.dst_pages)

    def gather(errors: torch.Tensor) -> None:
        transfer.sender.gather(args(src, errors=errors), fifo_args=ring.sides[0])

    def scatter(errors: torch.Tensor) -> None:
        transfer.receiver.scatter(args(dst, errors=errors), fifo_args=ring.sides[1])

    assert ring.run([gather, scatter]) == set()
    chunks = sum(len(part.layers) * -(-part.layer_nbytes // ring.chunk) for part in layout.sections)
    assert ring.raised(0) == ring.raised(1) == [len(range(b, chunks, ring.channels)) for b in range(ring.channels)]


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_byte_of_every_family_through_a_fifo(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two sides may use words of different widths: each has its own geometry."""
    writers, reader, gap = FAMILIES[family]
    made, expected = transfers(writers, reader, gap, monkeypatch)
    for transfer in made:
        for piece, layout in transfer.pieces(2 if family in CUT else 1):
            through_fifo(transfer, piece, layout, Ring(1, 512))
    assert differences(made[0].target.now(), expected) == 0


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize("channels", [1, 3])
def test_several_runs_and_groups_through_a_fifo(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values are separate groups, and jobs of a group differ in alignment: the two sides' launches differ."""
    monkeypatch.setattr(cuda_pack, "geometry", lambda *given, **more: uneven(kernel_geometry.geometry(*given, **more)))
    layout = gqa(**TALL, v_head_dim=16)
    (transfer,), expected = transfers({0: layout}, layout, 16, monkeypatch, num_tokens=24)
    piece, places = transfer.everything()
    runs = [
        [(each.first_job, each.num_jobs) for each in packer._launches(places)]
        for packer in (transfer.sender, transfer.receiver)
    ]
    assert {section.group for section in places.sections} == {1}
    assert min(map(len, runs)) > 2
    ring = Ring(channels, 512)
    through_fifo(transfer, piece, places, ring)
    assert max(ring.raised(0)) > (2 if channels == 1 else 1) * stage_format.SLOTS
    assert differences(transfer.target.now(), expected) == 0


@pytest.mark.usefixtures("_small_chunks")
def test_some_layers_through_a_fifo(monkeypatch: pytest.MonkeyPatch) -> None:
    (transfer,), _ = transfers({0: gqa(**TALL)}, gqa(**TALL), 16, monkeypatch)
    piece = Piece((0, 2), 0, len(transfer.src_pages))
    layout = piece_layout(transfer.plan, piece, limit_tokens=transfer.limit, checksum=False)
    before = transfer.target.now().copy()
    through_fifo(transfer, piece, layout, Ring(2, 512))
    after = transfer.target.now()
    for component in ("k", "v"):
        assert np.array_equal(after.tensors[component, 1], before.tensors[component, 1])
        for layer in (0, 2):
            sent = transfer.source.tensors[component, layer][transfer.src_pages, : -page_transfer.GAP]
            assert np.array_equal(after.tensors[component, layer][transfer.dst_pages, : -page_transfer.GAP], sent)


def test_a_fifo_of_no_chunks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    (transfer,), _ = transfers({0: gqa(**BF16)}, gqa(**BF16), 16, monkeypatch)
    ring = Ring(1, 1 << 15)
    ring.sides = [side._replace(fifo=side.fifo._replace(chunk=0)) for side in ring.sides]
    with pytest.raises(ProtocolError, match="chunks of 0 bytes"):
        through_fifo(transfer, *transfer.everything(), ring)
