"""A GPU for the resident loop, in host memory: its driver is called by compiled code, its stream runs when told to."""

from __future__ import annotations

import ctypes
import inspect
import itertools
import struct
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from torchkv.core.device import NO_GATE, NUM_IDS, Gate, LoopDevice
from torchkv.host.convert_loops import KINDS
from torchkv.kernels import page_convert, page_copy
from torchkv.kernels.compiled import CompiledKernel, LoadedKernel
from torchkv.layout.conversion import Scales, convert
from torchkv.layout.pair_plan import PairPlan
from torchkv.staging.cuda_pack import CudaPackLauncher
from torchkv.staging.pack_table import PackTable
from torchkv.transfer.copy_tables import BaseAddressTable
from torchkv.transfer.launch_table import LaunchTable
from torchkv.transfer.peer_connection import LocalPages, PeerConnection

__all__ = [
    "BAD_ADDRESS",
    "NOT_READY",
    "TICKETS",
    "FakeEvent",
    "FakeKernels",
    "LoopGpu",
    "end_kernel",
    "fake_kernels",
    "launched",
    "run_kernel",
]

NOT_READY, BAD_ADDRESS = 600, 700
STREAM, TICKETS = 0x5150, 0x71C0
_FORMATS = {"tl.int32": "i", "tl.int64": "q"}


def _parameters(kernel: Any, count: int) -> tuple[list[str], struct.Struct]:
    """The names of a kernel's parameters, and how they lie in its block."""
    params = list(inspect.signature(kernel.fn).parameters.values())[:count]
    formats = "".join(_FORMATS[param.annotation] for param in params)
    return [param.name for param in params], struct.Struct(formats + "0q16x")


_COPY, PARAMS = _parameters(page_copy.copy, page_copy.NUM_INTEGERS)
_CONVERT, _CONVERT_PARAMS = _parameters(page_convert.convert, page_convert.NUM_INTEGERS)
_functions: list[CompiledKernel] = []  # one's number is its place, and 1

_KINDS = {number: dtypes for dtypes, number in KINDS.items()}
_INT = ctypes.c_int
_WORD = ctypes.c_int64


class FakeEvent:
    """An event of a `LoopGpu`, recorded on ``stream``; it happens when ``happened`` is set."""

    def __init__(self, gpu: LoopGpu, stream: int = -1) -> None:
        self.gate = gpu.gate(stream)
        self._gpu = gpu

    def happen(self) -> None:
        self._gpu.events[self.gate.event] = 0

    def query(self) -> bool:
        return self._gpu.events[self.gate.event] == 0


class LoopGpu:
    """The driver's functions over a stream of which `run` executes operations, as many as it is told to.

    events: what a query of each event returns, or the event that is asked. broken: what every function returns from
    now on. log: operations.
    """

    def __init__(self) -> None:
        self.pending: deque[Callable[[], None]] = deque()
        self.events: dict[int, Any] = {}
        self.broken = 0
        self.log: list[str] = []
        self.bad_ids: list[int] = []
        self._callbacks = (
            ctypes.CFUNCTYPE(_INT, _WORD)(self._query),
            ctypes.CFUNCTYPE(_INT, _WORD, _WORD, _WORD, _WORD)(self._upload),
            ctypes.CFUNCTYPE(_INT, *[_WORD] * 11)(self._launch),
        )
        self.word = np.zeros(1, dtype=np.int64)
        ids, there = (np.zeros(NUM_IDS, dtype=np.int64) for _ in range(2))
        self._keep = there
        self.device = LoopDevice(
            functions=np.array([ctypes.cast(each, ctypes.c_void_p).value for each in self._callbacks], dtype=np.int64),
            stream=STREAM,
            word=self.word,
            word_device=self.word.ctypes.data,
            ids=ids,
            ids_device=there.ctypes.data,
            errors=0,
            activate=lambda: None,
            keep=self,
        )

    def gate(self, stream: int = -1, event: Any = NOT_READY) -> Gate:
        """The gate of a new event that has not happened, or of an object that says whether it has."""
        number = len(self.events) + 1
        self.events[number] = event
        return Gate(number, stream, number)

    def run(self, count: int | None = None) -> None:
        """Executes the next ``count`` operations of the stream; None: all."""
        while self.pending and (count is None or count > 0):
            self.pending.popleft()()
            count = None if count is None else count - 1

    def _query(self, event: int) -> int:
        self.log.append("query")
        found = self.events[event]
        if not isinstance(found, int):
            found = 0 if found.query() else NOT_READY
        return self.broken or found

    def _upload(self, to: int, source: int, nbytes: int, stream: int) -> int:
        assert stream == STREAM
        if not self.broken:
            self.log.append("upload")
            self.pending.append(lambda: ctypes.memmove(to, source, nbytes) and None)
        return self.broken

    def _launch(self, function: int, x: int, y: int, z: int, *rest: int) -> int:
        a, b, c, shared, stream, params, extra = rest
        assert (y, z, b, c, shared, stream, params) == (1, 1, 1, 1, 512, STREAM, 0)
        assert x > 0
        assert a % 32 == 0
        words = (_WORD * 5).from_address(extra)
        assert (words[0], words[2], words[4]) == (1, 2, 0)
        size = (_CONVERT_PARAMS if _converts(_functions[function - 1]) else PARAMS).size
        assert _WORD.from_address(words[3]).value == size
        block = ctypes.string_at(words[1], size)  # during the call, as the driver does
        if not self.broken:
            self.log.append("launch")
            self.pending.append(lambda: run_kernel(block, function, x, self.bad_ids))
            self.pending.append(lambda: end_kernel(block, function, self.word.ctypes.data))
        return self.broken


def run_kernel(block: bytes, function: int, blocks: int, bad_ids: list[int]) -> None:
    """What `torchkv.kernels.page_copy.copy`, or `page_convert.convert`, does, by its parameters and constants alone.

    But for its end, see `end_kernel`. function: of `_loaded`. blocks: how many thread blocks.
    """
    kernel, given = launched(block, function)
    given |= dict(zip(kernel.kernel.arg_names[len(given) :], kernel.constants, strict=True))
    mode = given["MODE"]
    assert given["tickets"] == TICKETS
    assert (given["stage"] == given["stage_stride"] == 0) == (mode == page_copy.DIRECT)

    def div(number: int, magic: str, shift: str) -> int:
        return (2 * number * (given[magic] & 0xFFFFFFFF) >> 32) >> given[shift]

    read, written = mode != page_copy.SCATTER, mode != page_copy.GATHER
    for ordinal in range(given["first_rank"], given["first_rank"] + given["words"] // given["words_per_pair"]):
        pair = given["first_pair"] + ordinal + div(ordinal, "unit_magic", "unit_shift") * given["jump"]
        places = []
        for side, start, is_used in (("src", given["start"], read), ("dst", 0, written)):
            if not is_used:
                places.append((ordinal - given["first_rank"]) * given[f"{side}_page_stride"])
                continue
            index = div(pair, f"{side}_magic", f"{side}_shift")
            part = pair - index * given[f"{side}_per_page"]
            page = _WORD.from_address(given[f"{side}_ids"] + 8 * (index - start)).value
            if not 0 <= page < given[f"{side}_num_pages"]:
                bad_ids.append(page)
                break
            part_at = part * given[f"{side}_part_stride"]
            places.append(page * given[f"{side}_page_stride"] + part_at + given[f"{side}_base"])
        if len(places) < 2:
            continue
        for job in range(given["num_jobs"]):
            packed = given["stage"] + job * given["stage_stride"]
            bases = [_WORD.from_address(given["jobs"] + 16 * job + 8 * side).value for side in range(2)]
            source = places[0] + (bases[0] if read else packed)
            target = places[1] + (bases[1] if written else packed)
            _run_pair(given, job, source, target)


def end_kernel(block: bytes, function: int, completion: int) -> None:
    """What a kernel's last block does, some time after the others. completion: address of the completion word."""
    _, given = launched(block, function)
    word = _WORD.from_address(completion)
    assert (given["completion"], given["number"]) == (completion, word.value + 1)
    word.value = given["number"]


def launched(block: bytes, function: int) -> tuple[CompiledKernel, dict[str, int]]:
    """The kernel of which this is the number, and its runtime parameters by name."""
    kernel = _functions[function - 1]
    names, params = (_CONVERT, _CONVERT_PARAMS) if _converts(kernel) else (_COPY, PARAMS)
    return kernel, dict(zip(names, params.unpack(block)[: len(names)], strict=True))


def _run_pair(given: dict[str, int], job: int, source: int, target: int) -> None:
    """Copies, or converts, the rows of all steps of a pair."""
    per_row = given["words_per_row"]
    for row, step in itertools.product(range(given["words_per_pair"] // per_row), range(given["STEPS"])):
        outer, inner = divmod(row, given["n1"])
        ours = source + outer * given["s0"] + inner * given["s1"] + step * given["src_step"]
        theirs = target + outer * given["d0"] + inner * given["d1"] + step * given["dst_step"]
        if "KIND" in given:
            _convert_row(given, job, outer * given["order0"] + inner * given["order1"], ours, theirs)
        else:
            assert ours % given["UNIT"] == theirs % given["UNIT"] == 0
            ctypes.memmove(theirs, ours, per_row * given["UNIT"])


def _convert_row(given: dict[str, int], job: int, order: int, ours: int, theirs: int) -> None:
    """Converts a row of words. Word by word, for each may be of another head. order: of the first one, in a stage."""
    src, dst = _KINDS[given["KIND"]]
    unit = given["ELEMENTS"]
    assert ours % (unit * src.itemsize) == theirs % (unit * dst.itemsize) == 0
    scales = _WORD.from_address(given["scales"] + 8 * job).value
    for word in range(given["words_per_row"]):
        head = (2 * (order + word) * (given["head_magic"] & 0xFFFFFFFF) >> 32) >> given["head_shift"]
        scale = ctypes.c_float.from_address(scales + 4 * (head % given["heads"])).value
        source = (ctypes.c_uint8 * (unit * src.itemsize)).from_address(ours + word * unit * src.itemsize)
        elements = torch.frombuffer(bytearray(source), dtype=src)
        made = convert(elements, dst, scale).view(torch.uint8).numpy().tobytes()
        ctypes.memmove(theirs + word * unit * dst.itemsize, made, len(made))


def _converts(kernel: CompiledKernel) -> bool:
    return kernel.kernel is page_convert.convert


def _loaded(kernel: CompiledKernel) -> LoadedKernel:
    if kernel not in _functions:
        _functions.append(kernel)
    return LoadedKernel(1 + _functions.index(kernel), 512, _CONVERT_PARAMS if _converts(kernel) else PARAMS)


@contextmanager
def fake_kernels() -> Iterator[None]:
    """Every copy kernel counts as loaded inside, for `LaunchTable` on a machine without a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompiledKernel, "loaded", property(_loaded))
        patch.setattr(torch.cuda, "device", lambda device: nullcontext())
        yield


class FakeKernels:
    """`torchkv.transfer.loop_kernels.Kernels` over a `LoopGpu`. lacking: kernels are not loaded."""

    def __init__(self, gpu: LoopGpu, local: LocalPages) -> None:
        self._gpu = gpu
        self._local = local
        self.lacking = False

    def launches(self, plan: PairPlan, connection: PeerConnection, *, first: int = 0) -> LaunchTable | None:
        if self.lacking:
            return None
        with fake_kernels():
            table = BaseAddressTable(plan, self._local, connection)
            return LaunchTable(table, first=first, device=torch.device("cpu"), errors=0, tickets=TICKETS, blocks=16)

    def packs(self, plan: PairPlan, scales: Scales, *, sending: bool) -> PackTable | None:
        if self.lacking:
            return None
        with fake_kernels():
            launcher = CudaPackLauncher(plan, self._local, sending=sending, scales=scales)
            return PackTable(plan, launcher, device=torch.device("cpu"), errors=0, tickets=TICKETS, blocks=16)

    def gate(self, event: Any) -> Gate | None:
        if event is None:
            return NO_GATE
        if isinstance(event, FakeEvent):
            return event.gate
        # Every fourth one is of a kind that only Python can query.
        return self._gpu.gate(event=event) if len(self._gpu.events) % 4 else self._none()

    def _none(self) -> None:
        self._gpu.gate(event=0)
