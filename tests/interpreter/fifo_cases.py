"""The cases of test_streamcopies.py that run kernels: in Triton's interpreter, which wants a process of its own.

The interpreter runs block after block, so here each side of a stream does what it can, by turns.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import BF16, CANARY, FAMILIES, FEW, Case, Pools, aligned, cases, plain
from oracle import differences, gqa
from pack_cases import CUT, TALL, uneven
from pack_kit import Transfer, transfers

from torchkv import devicepack, kernellaunch, kernels, staging
from torchkv.copyreference import BadPage, copy_pages_reference, gather_reference, scatter_reference
from torchkv.errors import ProtocolError
from torchkv.kernellaunch import Flow, Tile
from torchkv.pieces import Piece, PieceLayout, piece_layout
from torchkv.stagememory import Room
from torchkv.staging import Stream

assert os.environ.get("TRITON_INTERPRET") == "1", "run test_streamcopies.py, which starts this in the interpreter"

STREAM_TILES = {"words": Tile(32, 1, 0), "rows": Tile(32, 1, 32)}
CHUNK_UNIT = 512  # bytes: a tile of the widest words
BASE = 1 << 40


class Ring:
    """A stream's memory: random slots with canaries around, stale words below ``BASE``, both sides' progress."""

    def __init__(self, channels: int, chunk: int, *, patience: int = 1) -> None:
        slots = kernellaunch.SLOTS * channels * chunk
        self._memory = aligned(slots + 2 * CANARY)
        self._canaries = self._canary()
        self.slots = self._memory[CANARY:-CANARY]
        self.words = torch.randint(0, BASE, (2, kernellaunch.MAX_CHANNELS))
        self._words = self.words.clone()
        self.states = [torch.zeros(kernellaunch.MAX_CHANNELS, dtype=torch.int64) for _ in range(2)]
        self.sides = [
            Flow(self.words.data_ptr(), BASE, Stream(chunk, channels), state.data_ptr(), patience)
            for state in self.states
        ]
        self.channels, self.chunk = channels, chunk

    @property
    def room(self) -> Room:
        return Room.of(self.slots)

    def _canary(self) -> torch.Tensor:
        return torch.cat([self._memory[:CANARY], self._memory[-CANARY:]])

    def slot(self, channel: int, turn: int) -> torch.Tensor:
        at = (turn % kernellaunch.SLOTS * self.channels + channel) * self.chunk
        return self.slots[at : at + self.chunk]

    def raised(self, word: int) -> list[int]:
        """Chunks that each channel's word tells of: 0: packed. 1: unpacked."""
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
        """Launches gather and scatter by turns until both are finished. Returns the bad pages that they told of."""
        slots = [kernels.error_slot(), kernels.error_slot()]
        for _ in range(200):
            for side in order:
                slots[side][1] = 0
                launch[side](slots[side])
                self.check()
            if not any(map(kernels.unfinished, slots)):
                return {bad for errors in slots if (bad := kernels.first_error(errors)) is not None}
        raise AssertionError(f"no end: {self.raised(0)}, {self.raised(1)}")


@pytest.fixture(params=STREAM_TILES)
def _stream_tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernellaunch, "TILE", STREAM_TILES[request.param])
    monkeypatch.setattr(kernels, "CHUNK_UNIT", CHUNK_UNIT)


def streaming(
    case: Case, pools: Pools, ring: Ring, cut: int = 0, behind: Callable[[], object] = int
) -> list[Callable[[torch.Tensor], None]]:
    """Launches of the gather and of the scatter of all jobs; with ``cut`` in two, the first of so many jobs.

    behind: called behind each.
    """
    src, dst = torch.tensor(case.src_ids), torch.tensor(case.dst_ids)
    where = {"start": case.start, "limit_tokens": case.limit, "blocks": 1}
    pairs = len(case.shape.pairs(num_src_pages=len(src), start=case.start, limit_tokens=case.limit))
    per_job = ring.sides[0].shape.chunks(pairs * case.shape.pair_nbytes)
    runs = [(0, case.num_jobs)] if not cut else [(0, cut), (cut, case.num_jobs - cut)]
    jobs = pools.addresses

    def gather(errors: torch.Tensor) -> None:
        for first, count in runs:
            more = {"first_job": first, "num_jobs": count, "first_chunk": first * per_job, "stream": ring.sides[0]}
            kernels.gather(jobs, src, ring.room, case.shape, **where, **more, errors=errors)
            behind()

    def scatter(errors: torch.Tensor) -> None:
        for first, count in runs:
            more = {"first_job": first, "num_jobs": count, "first_chunk": first * per_job, "stream": ring.sides[1]}
            kernels.scatter(jobs, ring.room, dst, case.shape, num_src_pages=len(src), **where, **more, errors=errors)
            behind()

    return [gather, scatter]


@pytest.mark.usefixtures("_stream_tile")
@settings(FEW, max_examples=15)
@given(
    case=cases(),
    slots=st.sampled_from([1, 2, 4]),
    channels=st.integers(1, 3),
    factor=st.integers(1, 2),
    patience=st.integers(1, 2),
    cut=st.booleans(),
    order=st.permutations([0, 1]),
)
def test_streams_are_the_reference(
    case: Case,
    slots: int,
    channels: int,
    factor: int,
    patience: int,
    cut: bool,
    order: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (kernellaunch, staging):
        monkeypatch.setattr(module, "SLOTS", slots)
    monkeypatch.setattr(kernels, "CHUNK_UNIT", CHUNK_UNIT // 2)
    monkeypatch.setattr(kernellaunch, "TILE", kernellaunch.TILE._replace(words=16))
    pools = case.pools()
    where = {"start": case.start, "limit_tokens": case.limit}
    bad = copy_pages_reference(
        pools.sources, pools.want, *map(torch.tensor, (case.src_ids, case.dst_ids)), case.shape, **where
    )
    ring = Ring(channels, factor * kernels.CHUNK_UNIT, patience=patience)
    told = ring.run(streaming(case, pools, ring, cut=int(cut and case.num_jobs > 1)), order)
    assert {page.side for page in told} == {page.side for page in bad}
    assert told <= bad
    if "source" not in {page.side for page in bad}:  # else the slot's last bytes go there
        pools.check()


def long(*, num_jobs: int = 2) -> Case:
    """Jobs of 9 KiB and a half: 19 chunks each, the last of which is 3/4 full; runs of 48 bytes cross chunks."""
    case = plain(num_pages=200)
    return replace(case, num_jobs=num_jobs)


def stream_reference(case: Case, pools: Pools, ring: Ring) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The chunks of all jobs, and the packed stage."""
    nbytes = len(case.src_ids) * case.shape.pair_nbytes
    stage = torch.zeros(case.num_jobs * nbytes, dtype=torch.uint8)
    where = {"start": case.start, "limit_tokens": case.limit}
    assert not gather_reference(pools.sources, torch.tensor(case.src_ids), stage, case.shape, **where)
    return [chunk for job in stage.split(nbytes) for chunk in job.split(ring.chunk)], stage


@pytest.mark.usefixtures("_stream_tile")
@pytest.mark.parametrize("channels", [2, 3, 40])
def test_slots_are_used_again(channels: int) -> None:
    case = long()
    pools, ring = case.pools(), Ring(channels, CHUNK_UNIT)
    chunks, stage = stream_reference(case, pools, ring)
    assert len(chunks) == 38
    assert len(chunks[18]) == 384
    assert not scatter_reference(
        stage, pools.want, torch.tensor(case.dst_ids), case.shape, num_src_pages=200, start=0, limit_tokens=200
    )
    assert ring.run(streaming(case, pools, ring, cut=1)) == set()
    pools.check()
    shares = [len(range(channel, 38, channels)) for channel in range(channels)]
    assert ring.raised(0) == ring.raised(1) == shares


@pytest.mark.usefixtures("_stream_tile")
def test_a_gather_waits_for_credit_and_goes_on_chunk_by_chunk() -> None:
    """Here the words are raised by hand: of one channel by one chunk, or by several."""
    case, channels = long(), 3
    pools, ring = case.pools(), Ring(channels, CHUNK_UNIT)
    chunks, _ = stream_reference(case, pools, ring)
    gather, _ = streaming(case, pools, ring, cut=1)
    shares = [len(range(channel, len(chunks), channels)) for channel in range(channels)]
    credit, rng = [0] * channels, np.random.default_rng()
    want = ring.slots.clone()
    done = [0] * channels
    while True:
        errors, before = kernels.error_slot(), list(done)
        gather(errors)
        for channel in range(channels):
            # What an earlier run has left unfinished holds up the same block of the later run.
            while done[channel] < min(shares[channel], credit[channel] + kernellaunch.SLOTS):
                number = channel + done[channel] * channels
                at = ring.slot(channel, done[channel]).data_ptr() - ring.slots.data_ptr()
                want[at : at + len(chunks[number])] = chunks[number]
                done[channel] += 1
        assert ring.raised(0) == ring.states[0][:channels].tolist() == done
        assert torch.equal(ring.slots, want)
        assert kernels.unfinished(errors) == (done != shares)
        assert kernels.moved(errors) == (done != before)
        assert kernels.first_error(errors) is None
        if done == shares:
            break
        channel = int(rng.integers(channels))
        credit[channel] = min(done[channel], credit[channel] + int(rng.integers(1, 4)))
        if credit[channel]:
            ring.words[1, channel] = BASE + credit[channel]


@pytest.mark.usefixtures("_stream_tile")
def test_a_scatter_waits_for_data_and_goes_on_chunk_by_chunk() -> None:
    case, channels = long(), 3
    pools, ring = case.pools(), Ring(channels, CHUNK_UNIT)
    chunks, _ = stream_reference(case, pools, ring)
    _, scatter = streaming(case, pools, ring, cut=1)
    before = [target.clone() for target in pools.targets]
    shares = [len(range(channel, len(chunks), channels)) for channel in range(channels)]
    errors, rng = kernels.error_slot(), np.random.default_rng()
    scatter(errors)
    assert kernels.unfinished(errors)
    assert not kernels.moved(errors)
    assert kernels.first_error(errors) is None
    assert ring.raised(1) == [0] * channels
    assert all(map(torch.equal, pools.targets, before)), "written before anything was there"
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
        scatter(errors := kernels.error_slot())
        assert ring.raised(0) == ring.raised(1) == ring.states[1][:channels].tolist()
        assert kernels.unfinished(errors) == (ring.raised(1) != shares)
        assert kernels.moved(errors) == (ring.raised(1) != done)
        stage = torch.cat(chunks)
        now = [target.clone() for target in before]
        masks = [torch.zeros_like(target) for target in before]
        more = {"num_src_pages": 200, "start": 0, "limit_tokens": 200}
        dst = torch.tensor(case.dst_ids)
        scatter_reference(stage, now, dst, case.shape, **more)
        scatter_reference(arrived, masks, dst, case.shape, **more)
        for got, was, full, mask in zip(pools.targets, before, now, masks, strict=True):
            assert torch.equal(got, torch.where(mask == 1, full, was)), "other chunks than those that had arrived"


@pytest.mark.usefixtures("_stream_tile")
@pytest.mark.parametrize("side", [0, 1])
def test_a_later_run_waits_for_an_earlier_one(side: int) -> None:
    """What the first run waited for in vain comes when it has ended: the second must not go on in its place."""
    case = long()
    pools, ring = case.pools(), Ring(2, CHUNK_UNIT)
    seen: list[list[int]] = []

    def behind() -> None:
        seen.append(ring.raised(side))
        ring.words[1 - side, :2] = BASE + 1000

    launches = streaming(case, pools, ring, cut=1, behind=behind)
    launches[side](errors := kernels.error_slot())
    assert seen == [[kernellaunch.SLOTS * (1 - side)] * 2] * 2
    assert kernels.unfinished(errors)
    launches[side](errors := kernels.error_slot())
    assert seen[2:] == [[10, 9], [19, 19]]
    assert not kernels.unfinished(errors)


@pytest.mark.usefixtures("_stream_tile")
@pytest.mark.parametrize(("side", "page"), [("source", 200), ("destination", -1)])
def test_a_bad_page_in_a_stream_is_named_however_often_it_stops(side: str, page: int) -> None:
    case = long()
    (case.src_ids if side == "source" else case.dst_ids)[7] = page
    pools, ring = case.pools(), Ring(2, CHUNK_UNIT)
    assert ring.run(streaming(case, pools, ring)) == {(side, 7, page)}


def test_wrong_streams_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = plain()
    pools, unit = case.pools(), kernels.CHUNK_UNIT
    ring = Ring(2, unit)
    launches = streaming(case, pools, ring)
    good, most = ring.sides[0], kernellaunch.MAX_CHANNELS
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
        ({"patience": 0}, "patience"),
    ]
    for change, words in wrong:
        shape = good.shape._replace(**{key: value for key, value in change.items() if key != "patience"})
        ring.sides = [good._replace(shape=shape, patience=change.get("patience", good.patience))] * 2
        for launch in launches:
            with pytest.raises(ProtocolError, match=words):
                launch(kernels.error_slot())
    ring.sides = [good] * 2
    for launch in launches:
        with pytest.raises(ProtocolError, match="two int64"):
            launch(torch.zeros(1, dtype=torch.int64))
    assert torch.equal(ring.slots, before)
    pools.check()
    monkeypatch.setattr(kernels, "MAX_CHANNELS", 1)
    with pytest.raises(ProtocolError, match="2 channels"):
        launches[0](kernels.error_slot())


# Page packers


@pytest.fixture
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernellaunch, "TILE", Tile(32, 1, 0))
    monkeypatch.setattr(kernels, "CHUNK_UNIT", 512)


def stream(transfer: Transfer, piece: Piece, layout: PieceLayout, ring: Ring) -> None:
    """All of the piece, and that no more than that and no less is told of."""
    common = {"limit_tokens": transfer.limit, "blocks": 1}
    src, dst = transfer.ids(piece), torch.tensor(transfer.dst_pages)

    def gather(errors: torch.Tensor) -> None:
        transfer.sender.gather(layout, piece, src, ring.room, **common, errors=errors, stream=ring.sides[0])

    def scatter(errors: torch.Tensor) -> None:
        transfer.receiver.scatter(layout, piece, dst, ring.room, **common, errors=errors, stream=ring.sides[1])

    assert ring.run([gather, scatter]) == set()
    chunks = sum(len(part.layers) * -(-part.layer_nbytes // ring.chunk) for part in layout.segments)
    assert ring.raised(0) == ring.raised(1) == [len(range(b, chunks, ring.channels)) for b in range(ring.channels)]


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_byte_of_every_family_in_a_stream(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two sides' words may differ: each has its own geometry."""
    writers, reader, gap = FAMILIES[family]
    made, expected = transfers(writers, reader, gap, monkeypatch)
    for transfer in made:
        for piece, layout in transfer.pieces(2 if family in CUT else 1):
            stream(transfer, piece, layout, Ring(1, 512))
    assert differences(made[0].target.now(), expected) == 0


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize("channels", [1, 3])
def test_several_runs_and_groups_in_a_stream(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values are groups of their own, and jobs of a group aligned unlike: other runs here than there."""
    monkeypatch.setattr(devicepack, "geometry", lambda *given, **more: uneven(kernels.geometry(*given, **more)))
    layout = gqa(**TALL, v_head_dim=16)
    (transfer,), expected = transfers({0: layout}, layout, 16, monkeypatch, num_tokens=24)
    piece, places = transfer.everything()
    runs = [
        [(run.first_job, run.num_jobs) for run in packer._runs(places)]
        for packer in (transfer.sender, transfer.receiver)
    ]
    assert {segment.group for segment in places.segments} == {1}
    assert min(map(len, runs)) > 2
    ring = Ring(channels, 512)
    stream(transfer, piece, places, ring)
    assert max(ring.raised(0)) > (2 if channels == 1 else 1) * kernellaunch.SLOTS
    assert differences(transfer.target.now(), expected) == 0


@pytest.mark.usefixtures("_small_chunks")
def test_some_layers_in_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    (transfer,), _ = transfers({0: gqa(**TALL)}, gqa(**TALL), 16, monkeypatch)
    piece = Piece((0, 2), 0, len(transfer.src_pages))
    layout = piece_layout(transfer.plan, piece, limit_tokens=transfer.limit, checksum=False)
    before = transfer.target.now().copy()
    stream(transfer, piece, layout, Ring(2, 512))
    after = transfer.target.now()
    for component in ("k", "v"):
        assert np.array_equal(after.tensors[component, 1], before.tensors[component, 1])
        for layer in (0, 2):
            sent = transfer.source.tensors[component, layer][transfer.src_pages, : -oracle.GAP]
            assert np.array_equal(after.tensors[component, layer][transfer.dst_pages, : -oracle.GAP], sent)


def test_a_stream_of_no_chunks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    (transfer,), _ = transfers({0: gqa(**BF16)}, gqa(**BF16), 16, monkeypatch)
    ring = Ring(1, 1 << 15)
    ring.sides = [side._replace(shape=side.shape._replace(chunk=0)) for side in ring.sides]
    with pytest.raises(ProtocolError, match="chunks of 0 bytes"):
        stream(transfer, *transfer.everything(), ring)
