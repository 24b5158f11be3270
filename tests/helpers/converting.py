"""Pages of unlike dtypes in tests: random layouts and pools, and every way in one process from pages to pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from tests.helpers.layouts import instances
from tests.helpers.references.page_transfer import Pool, held_heads, held_layers
from torchkv.cache import Placement
from torchkv.layout.component import CONVERSIONS, Component
from torchkv.layout.conversion import Scales, check_scales
from torchkv.layout.layout import KVLayout
from torchkv.layout.pair_plan import PairPlan, compile_plan
from torchkv.layout.pieces import Cutter, Piece, PieceLayout, piece_layout
from torchkv.protocol.actions import BoundGrant, SendOp
from torchkv.staging import host_packer
from torchkv.staging.host_packer import Side
from torchkv.transfer.base import TransferContext
from torchkv.transfer.host_copy import HostCopyTransfer
from torchkv.transfer.peer_connection import LocalPages, PeerConnection
from torchkv.transport.interface import RemoteView

__all__ = [
    "PAIRS",
    "SCALES",
    "Pair",
    "close_calls",
    "numbers",
    "same",
    "converting_instances",
    "direct",
    "pairs",
    "pool",
    "random_scales",
    "retyped",
    "staged",
    "stage_memory",
]

PAIRS = sorted(CONVERSIONS, key=str)
CPU = torch.device("cpu")
SCALES = [1.0, 0.3, 7.0, 1e-3, 448.0, 0.0123, 2.0**-20, 1e-30, 3e38, 1e-45]
Numbers = Mapping[str, npt.NDArray[np.float32]]


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """Every number of ``dtype``, NaN included."""
    bits = 8 * dtype.itemsize
    return torch.arange(1 << bits, dtype=torch.int32).to(torch.uint8 if bits == 8 else torch.int16).view(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, but for the sign and payload of NaN."""
    nan = b.float().isnan()
    kind = torch.uint8 if a.dtype.itemsize == 1 else torch.int16
    return torch.equal(a.float().isnan(), nan) and torch.equal(a.view(kind)[~nan], b.view(kind)[~nan])


def close_calls(src: torch.dtype, count: int) -> list[float]:
    """Scales over which some number of ``src`` lies next to the middle of two numbers of fp8, or on it."""
    rng, fp8 = np.random.default_rng(), numbers(torch.float8_e4m3fn).float()[:0x7E].numpy()
    middles = (fp8[:-1] + fp8[1:]) / 2
    some = numbers(src).float()
    some = some[some.isfinite() & (some > 0)].numpy()
    with np.errstate(over="ignore"):
        found = np.float32(rng.choice(some, count)) / np.float32(rng.choice(middles, count))
    near = (found.view(np.int32) + rng.integers(-2, 3, count, dtype=np.int32)).view(np.float32)
    return [float(scale) for scale in near if np.isfinite(scale) and scale > 0]


def retyped(layout: KVLayout, dtypes: Mapping[str, torch.dtype], accept: Mapping[str, torch.dtype]) -> KVLayout:
    """``layout`` with other dtypes of some components, which accept others. accept: by component."""

    def other(component: Component) -> Component:
        takes = (accept[component.name],) if component.name in accept else ()
        return replace(component, dtype=dtypes.get(component.name, component.dtype), accept=takes)

    components = [other(component) for component in layout.components]
    kept = {
        name: getattr(layout, name) for name in ("num_layers", "page_size", "order", "tp_rank", "tp_size", "layers")
    }
    return KVLayout(components, windows=dict(layout.windows), **kept)


@st.composite
def converting_instances(draw: st.DrawFn) -> tuple[dict[int, KVLayout], KVLayout]:
    """As `instances`, and some components are converted, the first one always."""
    writers, reader = draw(instances())
    names = [component.name for component in reader.components]
    chosen = {name: draw(st.sampled_from(PAIRS)) for name in names if name == "k" or draw(st.booleans())}
    src, dst = ({name: pair[side] for name, pair in chosen.items()} for side in (0, 1))
    return {rank: retyped(layout, src, {}) for rank, layout in writers.items()}, retyped(reader, dst, src)


def pool(layout: KVLayout, num_pages: int, rng: np.random.Generator) -> Pool:
    """Random bytes without NaN, whose bits a conversion need not keep."""
    made = Pool.random(layout, num_pages, rng)
    for (name, _), rows in made.tensors.items():
        dtype = layout.component(name).dtype
        if not dtype.is_floating_point:
            continue
        nbytes = layout.page_size * len(held_heads(layout, name)) * layout.component(name).dim * dtype.itemsize
        for row in rows:
            values = torch.from_numpy(row[:nbytes].copy()).view(dtype)
            size = dtype.itemsize
            row[:nbytes].reshape(-1, size)[values.float().isnan().numpy()] = 0
    return made


def random_scales(layout: KVLayout, rng: np.random.Generator) -> Numbers:
    found = {}
    for component in layout.components:
        if component.accept and torch.float8_e4m3fn in (component.dtype, *component.accept):
            shape = len(held_layers(layout, component.name)), len(held_heads(layout, component.name))
            found[component.name] = rng.uniform(0.01, 3, shape).astype(np.float32)
    return found


def _local(held: Pool, scales: Scales) -> LocalPages:
    tensors = list(held.tensors.items())
    return LocalPages(
        layout=held.layout,
        device=CPU,
        num_pages=len(tensors[0][1]),
        placements={key: Placement(i, 0, rows.shape[1], len(rows)) for i, (key, rows) in enumerate(tensors)},
        storage_ptrs=[rows.ctypes.data for _, rows in tensors],
        regions=range(len(tensors)),
        scales=scales,
    )


@dataclass
class Pair:
    """What one writer sends to the reader's pool."""

    plan: PairPlan
    source: Pool
    target: Pool
    src_pages: list[int]
    dst_pages: list[int]
    scales: Scales

    def __post_init__(self) -> None:
        self.local, self.remote = _local(self.source, Scales(None, {})), _local(self.target, self.scales)
        self.limit = len(self.dst_pages) * self.plan.dst_page_size
        views = [RemoteView(rows.ctypes.data, rows.nbytes, CPU) for rows in self.target.tensors.values()]
        channel: Any = object()
        self.connection = PeerConnection(
            rank=1,
            layout=self.target.layout,
            placements=self.remote.placements,
            channel=channel,
            views=views,
            scales=self.scales,
        )

    def pieces(self, parts: int, *, checksum: bool) -> list[tuple[Piece, PieceLayout]]:
        cutter = Cutter(self.plan, self.plan.layers, 0, len(self.src_pages), limit_tokens=self.limit, checksum=checksum)
        most, found = max(cutter.least, -(-cutter.nbytes // parts)), []
        while not cutter.done:
            piece = cutter.cut(most)
            found.append((piece, piece_layout(self.plan, piece, limit_tokens=self.limit, checksum=checksum)))
        return found


def pairs(
    writers: Mapping[int, KVLayout], reader: KVLayout, rng: np.random.Generator, *, num_tokens: int = 19
) -> tuple[list[Pair], dict[str, Any]]:
    """A `Pair` for each writer into one pool, and the arguments of the slow reference for the same."""

    def pick(layout: KVLayout) -> tuple[Pool, list[int]]:
        need = -(-num_tokens // layout.page_size)
        return pool(layout, need + 2, rng), [int(page) for page in rng.permutation(need + 2)[:need]]

    chosen = {rank: pick(layout) for rank, layout in writers.items()}
    target, dst_pages = pick(reader)
    numbers = random_scales(reader, rng)
    scales = check_scales(reader, {name: rows.tolist() for name, rows in numbers.items()})
    made = [
        Pair(plan, source, target, pages, dst_pages, scales)
        for rank, (source, pages) in chosen.items()
        if (plan := compile_plan(rank, writers, reader)).segments
    ]
    given = {
        "sources": {rank: source for rank, (source, _) in chosen.items()},
        "src_pages": {rank: pages for rank, (_, pages) in chosen.items()},
        "target": target.copy(),
        "dst_pages": dst_pages,
        "scales": numbers,
    }
    return made, given


def direct(pair: Pair) -> int:
    """By `HostCopyTransfer`. Returns the bytes that it has reported."""
    pages: Any = np.array(pair.src_pages, np.int64)
    work: Any = object()
    op = SendOp("r", 1, {}, pair.plan.layers, 0, len(pages), work, None)
    grant = BoundGrant(
        dst=1,
        generation=1,
        request="r",
        prefix_tokens=0,
        pages=np.array(pair.dst_pages, np.int64),
        plan=pair.plan,
    )
    reported: list[int] = []
    context = TransferContext(
        op=op,
        grant=grant,
        pages=pages,
        local=pair.local,
        connection=pair.connection,
        report=lambda _layers, nbytes, _path: reported.append(nbytes),
    )
    transfer = HostCopyTransfer(context)
    while not transfer.finished:
        transfer.advance()
    assert transfer.error is None
    return sum(reported)


def stage_memory(nbytes: int, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Random bytes at a multiple of 256, as the stages of a ring."""
    memory = rng.integers(0, 256, nbytes + 256, dtype=np.uint8)
    skip = -memory.ctypes.data % 256
    return memory[skip : skip + nbytes]


def staged(pair: Pair, rng: np.random.Generator, *, parts: int, checksum: bool, spoils: bool = False) -> int:
    """By host packers on both sides, piece by piece. Returns the bytes of the receiver's pages in all pieces.

    spoils: changes a bit of each stage on the way. Its sign bit, which no conversion drops.
    """
    src_pages, dst_pages = np.array(pair.src_pages, np.int64), np.array(pair.dst_pages, np.int64)
    filled = 0
    for piece, layout in pair.pieces(parts, checksum=checksum):
        stage = stage_memory(layout.nbytes, rng)
        at = stage.ctypes.data
        mine = src_pages[piece.start : piece.start + piece.num_pages]
        sides = {
            sending: Side(sending, piece, pair.plan, ids, local.ptr, local.page_stride, pair.limit, pair.scales)
            for sending, ids, local in ((True, mine, pair.local), (False, dst_pages, pair.remote))
        }
        for _ in host_packer.copy(layout, sides[True], at):
            pass
        if checksum:
            for _ in host_packer.write_sums(layout, sides[True], at):
                pass
        if spoils:
            section = layout.sections[int(rng.integers(len(layout.sections)))]
            conversion = section.segment.conversion
            assert conversion is not None
            size = conversion.wire.itemsize
            stage[section.offset + int(rng.integers(section.layer_nbytes // size)) * size + size - 1] ^= 0x80
        for _ in host_packer.copy(layout, sides[False], at):
            pass
        if checksum:
            steps = host_packer.find_bad(layout, sides[False], at)
            bad = None
            try:
                while True:
                    next(steps)
            except StopIteration as end:
                bad = end.value
            assert bad is None, bad
        filled += layout.payload
    return filled
