"""The checksum: the compiled function against plain Python, and which changes it must detect."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.references.checksum import checksum_reference
from torchkv.errors import ProtocolError
from torchkv.host import checksum
from torchkv.host.checksum import PagePattern, keys, page_sums, seed

Bytes = npt.NDArray[np.uint8]
SLOW = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
WHOLE = (1 << 64) - 1


def fresh(nbytes: int) -> Bytes:
    return np.frombuffer(os.urandom(nbytes), np.uint8).copy()


def splitmix64(number: int) -> int:
    mixed = (number + 0x9E3779B97F4A7C15) & WHOLE
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & WHOLE
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & WHOLE
    return mixed ^ (mixed >> 31)


def by_definition(data: bytes) -> int:
    """The checksum by its definition, in Python integers; signed, as it is stored."""
    total = splitmix64(WHOLE - len(data))
    for j in range(0, len(data), 4):
        word = int.from_bytes(data[j : j + 4], "little")
        total += word * (splitmix64(j // 4) | 1)
    total &= WHOLE
    return total - (1 << 64) if total >> 63 else total


def one_sum(data: Bytes) -> int:
    sums = np.zeros(1, np.int64)
    page_sums(data.ctypes.data, np.zeros(1, np.int64), 0, 1, PagePattern(1, 0, 1, 0, len(data)), sums)
    return int(sums[0])


def test_keys_are_those_of_the_generator() -> None:
    # The generator's first three numbers from state 0, as its authors publish them.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    golden = 0x9E3779B97F4A7C15
    assert [splitmix64(state * golden & WHOLE) for state in range(3)] == published
    assert keys(1000).tolist() == [splitmix64(j) | 1 for j in range(1000)]
    assert keys(0).tolist() == []
    assert seed(8192) == splitmix64(WHOLE - 8192)
    assert not keys(5).flags.writeable


@pytest.mark.parametrize("nbytes", [*range(18), 63, 64, 65, 511, 512, 1030, 8192])
def test_reference_and_compiled_follow_the_definition(nbytes: int) -> None:
    data = fresh(nbytes)
    assert by_definition(data.tobytes()) == checksum_reference(data) == one_sum(data)


@SLOW
@given(
    pairs=st.integers(0, 5),
    n0=st.integers(0, 3),
    n1=st.integers(0, 4),
    run=st.one_of(st.integers(0, 40), st.sampled_from([64, 128, 130, 512])),
    gaps=st.tuples(*[st.sampled_from([0, 1, 8, 300])] * 3),
    skew=st.integers(0, 15),
    window=st.tuples(st.integers(0, 5), st.integers(0, 5)),
)
def test_rows_anywhere_sum_to_the_same_as_packed(
    pairs: int, n0: int, n1: int, run: int, gaps: tuple[int, ...], skew: int, window: tuple[int, int]
) -> None:
    s1 = run + gaps[0]
    s0 = n1 * s1 + gaps[1]
    page = n0 * s0 + gaps[2]
    memory = fresh(skew + pairs * page)
    before = memory.copy()
    offsets = np.random.default_rng().permutation(pairs).astype(np.int64) * page + skew
    first, last = sorted(min(edge, pairs) for edge in window)
    sums = np.full(pairs + 2, 12345, np.int64)
    page_sums(memory.ctypes.data, offsets, first, last, PagePattern(n0, s0, n1, s1, run), sums)
    expected = [12345] * (pairs + 2)
    for i in range(first, last):
        rows = [int(offsets[i]) + a * s0 + b * s1 for a in range(n0) for b in range(n1)]
        expected[i] = by_definition(b"".join(memory[row : row + run].tobytes() for row in rows))
    assert sums.tolist() == expected
    np.testing.assert_array_equal(memory, before)


@pytest.mark.parametrize("nbytes", [1, 7, 64, 301])
def test_any_changed_bit_and_byte_is_noticed(nbytes: int) -> None:
    data = fresh(nbytes)
    right = one_sum(data)
    for position in range(nbytes):
        for change in (*(1 << bit for bit in range(8)), 0xFF):
            data[position] ^= change
            assert one_sum(data) != right
            data[position] ^= change
    assert one_sum(data) == right


def test_any_change_within_a_word_is_noticed() -> None:
    data = fresh(4096)
    right = one_sum(data)
    words = data.view("<u4")
    for position in range(len(words)):
        kept = words[position]
        words[position] ^= np.uint32(1 + np.random.default_rng().integers(0, WHOLE >> 32))
        assert one_sum(data) != right
        words[position] = kept
    assert one_sum(data) == right


def test_exchanged_missing_and_stale_rows_are_noticed() -> None:
    rows = fresh(16 * 512).reshape(16, 512)
    right = one_sum(rows.reshape(-1))
    for i in range(16):
        for j in range(i):
            order = list(range(16))
            order[i], order[j] = j, i
            assert one_sum(rows[order].reshape(-1)) != right
        gone = rows.copy()
        gone[i] = 0
        assert one_sum(gone.reshape(-1)) != right
        twice = rows.copy()
        twice[i] = rows[i - 1]
        assert one_sum(twice.reshape(-1)) != right


def test_memory_never_written_does_not_look_right() -> None:
    """All zeros, sum included, do not match, nor do fewer bytes than there should be."""
    sums = [one_sum(np.zeros(nbytes, np.uint8)) for nbytes in range(1, 200)]
    assert 0 not in sums
    assert len(set(sums)) == len(sums)


def test_read_only_offsets_do_not_compile_again() -> None:
    checksum.warm_up()
    compiled = list(checksum._sums.signatures)  # type: ignore[attr-defined]
    data, sums, offsets = fresh(64), np.zeros(1, np.int64), np.zeros(1, np.int64)
    offsets.flags.writeable = False
    page_sums(data.ctypes.data, offsets, 0, 1, PagePattern(1, 0, 1, 0, 64), sums)
    assert int(sums[0]) == by_definition(data.tobytes())
    assert list(checksum._sums.signatures) == compiled  # type: ignore[attr-defined]


THREE = np.zeros(3, np.int64)
NOTHING = PagePattern(1, 0, 1, 0, 0)


@pytest.mark.parametrize(
    "call",
    [
        lambda: page_sums(0, THREE, -1, 1, NOTHING, THREE.copy()),
        lambda: page_sums(0, THREE, 2, 1, NOTHING, THREE.copy()),
        lambda: page_sums(0, THREE, 0, 4, NOTHING, np.zeros(4, np.int64)),
        lambda: page_sums(0, THREE, 0, 3, NOTHING, np.zeros(2, np.int64)),
        lambda: page_sums(0, THREE, 0, 3, NOTHING._replace(run=-1), THREE.copy()),
        lambda: page_sums(0, THREE, 0, 3, NOTHING._replace(n0=-1), THREE.copy()),
        lambda: page_sums(0, THREE.astype(np.int32), 0, 3, NOTHING, THREE.copy()),
        lambda: page_sums(0, THREE, 0, 3, NOTHING, np.zeros(6, np.int64)[::2]),
    ],
)
def test_wrong_arguments_are_refused(call: Callable[[], None]) -> None:
    with pytest.raises(ProtocolError):
        call()
