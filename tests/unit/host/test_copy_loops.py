"""The compiled copies against a byte-by-byte reference, in poisoned memory with canaries all around."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchkv.arrays import Int64Array
from torchkv.errors import ProtocolError
from torchkv.host import copy_loops

Bytes = npt.NDArray[np.uint8]
MARGIN = 4096  # canary bytes on both sides of the bytes that a copy may touch
SLOW = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
# Around every threshold of the kernels: a line (64), ordinary/streamed (128), a turn (256), and page sizes.
RUNS = st.one_of(st.integers(0, 600), st.sampled_from([1024, 2048, 4096, 4160, 8192 + 24]))


def fresh(nbytes: int) -> Bytes:
    return np.frombuffer(os.urandom(nbytes), np.uint8).copy()


class Arena:
    """Random source and random (poisoned) destination, each at a chosen misalignment, with margins all around."""

    def __init__(self, src_nbytes: int, dst_nbytes: int, src_skew: int = 0, dst_skew: int = 0) -> None:
        self.src = fresh(src_nbytes + 2 * MARGIN)
        self.dst = fresh(dst_nbytes + 2 * MARGIN)
        self.src_before = self.src.copy()
        self.expected = self.dst.copy()
        # Where offset 0 lies: ``skew`` bytes after a multiple of 64.
        self.src_at = MARGIN // 2 + -(self.src.ctypes.data + MARGIN // 2) % 64 + src_skew
        self.dst_at = MARGIN // 2 + -(self.dst.ctypes.data + MARGIN // 2) % 64 + dst_skew

    @property
    def src_ptr(self) -> int:
        return int(self.src.ctypes.data) + self.src_at

    @property
    def dst_ptr(self) -> int:
        return int(self.dst.ctypes.data) + self.dst_at

    def expect(self, src: int, dst: int, nbytes: int) -> None:
        for k in range(nbytes):
            self.expected[self.dst_at + dst + k] = self.src_before[self.src_at + src + k]

    def check(self) -> None:
        np.testing.assert_array_equal(self.src, self.src_before)
        np.testing.assert_array_equal(self.dst, self.expected)


def shuffled(count: int, stride: int) -> Int64Array:
    return np.random.default_rng().permutation(count).astype(np.int64) * stride


@SLOW
@given(
    pages=st.integers(0, 7),
    n0=st.integers(0, 3),
    n1=st.integers(0, 4),
    run=RUNS,
    gaps=st.tuples(*[st.sampled_from([0, 1, 8, 64, 192, 300])] * 6),
    skews=st.tuples(st.integers(0, 63), st.integers(0, 63)),
    window=st.tuples(st.integers(0, 7), st.integers(0, 7)),
)
def test_pairs_equal_the_reference(
    pages: int,
    n0: int,
    n1: int,
    run: int,
    gaps: tuple[int, ...],
    skews: tuple[int, int],
    window: tuple[int, int],
) -> None:
    s1, d1 = run + gaps[0], run + gaps[1]
    s0, d0 = n1 * s1 + gaps[2], n1 * d1 + gaps[3]
    src_page, dst_page = n0 * s0 + gaps[4], n0 * d0 + gaps[5]
    arena = Arena(pages * src_page, pages * dst_page, *skews)
    src_off, dst_off = shuffled(pages, src_page), shuffled(pages, dst_page)
    first, last = sorted(min(edge, pages) for edge in window)
    copy_loops.copy_pairs(arena.src_ptr, arena.dst_ptr, src_off, dst_off, first, last, (n0, s0, d0, n1, s1, d1, run))
    for i in range(first, last):
        for a in range(n0):
            for b in range(n1):
                arena.expect(int(src_off[i]) + a * s0 + b * s1, int(dst_off[i]) + a * d0 + b * d1, run)
    arena.check()


@SLOW
@given(
    lengths=st.lists(RUNS, max_size=7),
    gap=st.sampled_from([0, 1, 8, 64]),
    skews=st.tuples(st.integers(0, 63), st.integers(0, 63)),
    window=st.tuples(st.integers(0, 7), st.integers(0, 7)),
)
def test_spans_equal_the_reference(
    lengths: list[int], gap: int, skews: tuple[int, int], window: tuple[int, int]
) -> None:
    length = np.array(lengths, np.int64)
    room = max(lengths, default=0) + gap
    arena = Arena(len(lengths) * room, len(lengths) * room, *skews)
    src_off, dst_off = shuffled(len(lengths), room), shuffled(len(lengths), room)
    first, last = sorted(min(edge, len(lengths)) for edge in window)
    copy_loops.copy_spans(arena.src_ptr, arena.dst_ptr, src_off, dst_off, length, first, last)
    for i in range(first, last):
        arena.expect(int(src_off[i]), int(dst_off[i]), int(length[i]))
    arena.check()


@pytest.mark.parametrize("skew", range(64))
def test_every_destination_alignment(skew: int) -> None:
    run = 64 * 11 + 17
    arena = Arena(3 * run, 3 * run, src_skew=(skew * 7) % 64, dst_skew=skew)
    offsets = np.arange(3, dtype=np.int64) * run
    copy_loops.copy_pairs(arena.src_ptr, arena.dst_ptr, offsets, offsets, 0, 3, (1, 0, 0, 1, 0, 0, run))
    arena.expect(0, 0, 3 * run)
    arena.check()


def test_head_slices_transpose_between_orders() -> None:
    """Heads 2..3 of 8 from [token, head, dim] into [head, token, dim], against plain numpy indexing."""
    pages, tokens, dim = 5, 16, 256
    full = fresh(pages * tokens * 8 * dim).reshape(pages, tokens, 8, dim)
    part = fresh(pages * 2 * tokens * dim).reshape(pages, 2, tokens, dim)
    src_off = shuffled(pages, tokens * 8 * dim)
    dst_off = shuffled(pages, 2 * tokens * dim)
    rows = (2, dim, tokens * dim, tokens, 8 * dim, dim, dim)
    copy_loops.copy_pairs(full.ctypes.data + 2 * dim, part.ctypes.data, src_off, dst_off, 0, pages, rows)
    for src_page, dst_page in zip(src_off // (tokens * 8 * dim), dst_off // (2 * tokens * dim), strict=True):
        np.testing.assert_array_equal(part[dst_page], full[src_page, :, 2:4].transpose(1, 0, 2))


def test_the_check_notices_one_wrong_byte_and_one_write_too_many() -> None:
    """Negative control: the reference must fail for a copy that is off by one at either end."""
    for wrong in (-1, 1):
        arena = Arena(512, 512)
        arena.src |= 1  # an odd source over an even destination: no byte agrees by chance
        arena.dst &= 0xFE
        arena.src_before, arena.expected = arena.src.copy(), arena.dst.copy()
        at = np.zeros(1, np.int64)
        copy_loops.copy_pairs(arena.src_ptr, arena.dst_ptr, at, at, 0, 1, (1, 0, 0, 1, 0, 0, 256 + wrong))
        arena.expect(0, 0, 256)
        with pytest.raises(AssertionError):
            arena.check()


def test_read_only_offsets_do_not_compile_again() -> None:
    copy_loops.warm_up()
    kernel = copy_loops.pairs_at
    compiled = list(kernel.signatures)  # type: ignore[attr-defined]
    arena = Arena(256, 256)
    at = np.zeros(1, np.int64)
    at.flags.writeable = False
    for src_off, dst_off in ((at, at), (at, at.copy()), (at.copy(), at)):
        copy_loops.copy_pairs(arena.src_ptr, arena.dst_ptr, src_off, dst_off, 0, 1, (1, 0, 0, 1, 0, 0, 256))
    arena.expect(0, 0, 256)
    arena.check()
    assert list(kernel.signatures) == compiled  # type: ignore[attr-defined]


def test_other_python_threads_run_during_a_copy() -> None:
    """This thread must see the copy half done; if the copy held the GIL, it would see none or all of it."""
    copy_loops.warm_up()
    block, repeats = 1 << 20, 8000
    src = np.ones(block, np.uint8)
    dst = np.zeros(2 * block, np.uint8)
    src_off = np.zeros(repeats + 1, np.int64)
    dst_off = np.zeros(repeats + 1, np.int64)
    dst_off[repeats] = block  # the first block over and over, then the second
    rows = (1, 0, 0, 1, 0, 0, block)
    call = (src.ctypes.data, dst.ctypes.data, src_off, dst_off, 0, repeats + 1, rows)
    thread = threading.Thread(target=copy_loops.copy_pairs, args=call)
    thread.start()
    half_done = False
    while thread.is_alive() and not half_done:
        half_done = dst[0] == 1 and dst[-1] == 0
    thread.join()
    assert half_done
    assert dst.all()


NONE = np.zeros(0, np.int64)
THREE = np.zeros(3, np.int64)
NOTHING = (0, 0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    "call",
    [
        lambda: copy_loops.copy_pairs(0, 0, THREE, THREE, -1, 1, NOTHING),
        lambda: copy_loops.copy_pairs(0, 0, THREE, THREE, 2, 1, NOTHING),
        lambda: copy_loops.copy_pairs(0, 0, THREE, THREE, 0, 4, NOTHING),
        lambda: copy_loops.copy_pairs(0, 0, THREE, NONE, 0, 1, NOTHING),
        lambda: copy_loops.copy_pairs(0, 0, THREE, THREE, 0, 1, (1, 0, 0, 1, 0, 0, -1)),
        lambda: copy_loops.copy_pairs(0, 0, THREE, THREE, 0, 1, (-1, 0, 0, 1, 0, 0, 1)),
        lambda: copy_loops.copy_pairs(0, 0, THREE.astype(np.int32), THREE, 0, 1, NOTHING),
        lambda: copy_loops.copy_pairs(0, 0, np.zeros(6, np.int64)[::2], THREE, 0, 1, NOTHING),
        lambda: copy_loops.copy_spans(0, 0, THREE, THREE, THREE - 1, 0, 1),
        lambda: copy_loops.copy_spans(0, 0, THREE, THREE, NONE, 0, 1),
    ],
)
def test_wrong_arguments_are_refused_before_any_byte_moves(call: Callable[[], None]) -> None:
    with pytest.raises(ProtocolError):
        call()


COPY_ONCE = """
import os
import numpy as np
from torchkv.host import copy_loops
src, dst = np.frombuffer(os.urandom(300), np.uint8), np.zeros(300, np.uint8)
at = np.zeros(1, np.int64)
copy_loops.copy_spans(src.ctypes.data, dst.ctypes.data, at, at, at + 300, 0, 1)
assert (src == dst).all()
"""


@pytest.mark.parametrize("home", ["writable", "unwritable"])
def test_works_where_the_package_folder_is_read_only(tmp_path: Path, home: str) -> None:
    """Compiled functions go to the user's cache folder; without one they are compiled in each process."""
    package = tmp_path / "site" / "torchkv"
    (package / "host").mkdir(parents=True)
    (package / "__init__.py").touch()
    original = Path(copy_loops.__file__).parents[1]
    for module in (
        "arrays.py",
        "errors.py",
        "host/__init__.py",
        "host/copy_loops.py",
        "host/jit.py",
        "host/jit_cache.py",
    ):
        shutil.copy(original / module, package / module)
    # A file in the place of a folder: permission bits would not stop root.
    for folder in (package, package / "host"):
        (folder / "__pycache__").touch()
    user = tmp_path / "user"
    if home == "writable":
        user.mkdir()
    else:
        user.touch()
    env = {**os.environ, "HOME": str(user), "XDG_CACHE_HOME": str(user), "PYTHONPATH": str(package.parent)}
    env.pop("NUMBA_CACHE_DIR", None)
    subprocess.run([sys.executable, "-c", COPY_ONCE], env=env, check=True, timeout=100, cwd=tmp_path)
    assert bool(list(tmp_path.rglob("*.nbi"))) == (home == "writable")
