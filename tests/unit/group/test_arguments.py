"""What callers pass, in every form that Python offers: read exactly, or refused with the right error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchkv import KVLayout, PageOutOfRange, ProtocolError
from torchkv.group.arguments import as_aux, as_count, as_event, as_layers, as_pages, as_request
from torchkv.host.page_id_check import copy_ids

IDS = [3, 0, 7, 2]


def forms_of(ids: list[int]) -> list[Any]:
    wide = np.zeros(2 * len(ids), dtype=np.int64)
    wide[::2] = ids
    frozen = np.array(ids)
    frozen.setflags(write=False)
    return [
        ids,
        tuple(ids),
        [np.int32(i) for i in ids],
        np.array(ids),
        *(np.array(ids, dtype=kind) for kind in ("u1", "i2", "u4", "<i8", ">i8", "u8")),
        wide[::2],
        np.array(ids[::-1])[::-1],
        frozen,
        torch.tensor(ids),
        torch.tensor(ids, dtype=torch.int32),
        torch.tensor(wide)[::2],
    ]


@pytest.mark.parametrize("pages", forms_of(IDS), ids=lambda pages: f"{type(pages).__name__}")
def test_every_form_of_page_ids_reads_the_same(pages: Any) -> None:
    ids = as_pages(pages, num_pages=8, operation="test")
    assert ids.dtype == np.int64
    assert ids.flags.c_contiguous
    assert ids.tolist() == IDS


@pytest.mark.parametrize(
    "pages",
    [
        [],
        (),
        np.zeros(0, dtype=np.int64),
        torch.zeros(0, dtype=torch.int64),
        range(0),
        torch.zeros(0, dtype=torch.bfloat16),
    ],
)
def test_no_pages_are_pages(pages: Any) -> None:
    ids = as_pages(pages, num_pages=8, operation="test")
    assert (ids.dtype, len(ids)) == (np.int64, 0)


def test_a_range_is_a_sequence_of_pages() -> None:
    assert as_pages(range(2, 8, 2), num_pages=8, operation="test").tolist() == [2, 4, 6]


@pytest.mark.parametrize("make", [lambda ids: np.array(ids), lambda ids: torch.tensor(ids), lambda ids: list(ids)])
def test_page_ids_are_copied(make: Any) -> None:
    given_pages = make(IDS)
    ids = as_pages(given_pages, num_pages=8, operation="test")
    given_pages[0] = 5
    assert ids.tolist() == IDS


def test_no_form_of_page_ids_makes_the_caller_wait_for_a_compiler() -> None:
    for pages in forms_of(IDS):
        as_pages(pages, num_pages=8, operation="test")
    assert len(copy_ids.signatures) == 1  # type: ignore[attr-defined]  # numba's


@pytest.mark.parametrize("position", [0, 1, 511, 998, 999])
@pytest.mark.parametrize("make", [np.array, torch.tensor, list])
def test_one_bad_id_among_a_thousand_is_found(make: Any, position: int) -> None:
    ids = np.random.default_rng().permutation(1000)
    assert as_pages(make(ids.tolist()), num_pages=1000, operation="test").tolist() == ids.tolist()
    for bad in (-1, 1000, 2**40):
        ids[position] = bad
        with pytest.raises(PageOutOfRange, match=f"page {bad} "):
            as_pages(make(ids.tolist()), num_pages=1000, operation="test")


@given(st.lists(st.integers(-(2**64), 2**64), max_size=20), st.integers(1, 50))
def test_any_integers_are_read_exactly_or_refused(values: list[int], num_pages: int) -> None:
    if all(0 <= value < num_pages for value in values):
        assert as_pages(values, num_pages=num_pages, operation="test").tolist() == values
    else:
        # Beyond 64 bits numpy has no integer type left, so the type is what is wrong.
        with pytest.raises((PageOutOfRange, ProtocolError), match="test"):
            as_pages(values, num_pages=num_pages, operation="test")


@pytest.mark.parametrize(
    ("pages", "kind", "words"),
    [
        ([8], PageOutOfRange, r"page 8 .*\[0, 8\)"),
        ([0, -1], PageOutOfRange, "page -1 "),
        ([7, 9, 0, -2], PageOutOfRange, "page 9 "),
        (np.array([0, -(2**63)]), PageOutOfRange, f"page {-(2**63)} "),
        (torch.tensor([2**63 - 1, 0]), PageOutOfRange, f"page {2**63 - 1} "),
        (np.array([2**63], dtype=np.uint64), PageOutOfRange, f"page {2**63} "),
        (torch.tensor([9]), PageOutOfRange, "page 9 "),
        ([1.0], ProtocolError, "float64"),
        ([True], ProtocolError, "bool"),
        (["1"], ProtocolError, "integers"),
        ([None], ProtocolError, "integers"),
        ([[1], [2]], ProtocolError, "one dimension"),
        ([[1], [2, 3]], ProtocolError, "integers"),
        (np.int64(3), ProtocolError, "int64"),
        (np.array(3), ProtocolError, "one dimension"),
        ({1, 2}, ProtocolError, "set"),
        (b"12", ProtocolError, "bytes"),
        ({"full": [1]}, ProtocolError, "pages is a mapping, where one page list is meant"),
        (iter([1]), ProtocolError, "iterator"),
        (torch.tensor([1.0]), ProtocolError, "float32"),
        (torch.tensor([1]).bfloat16(), ProtocolError, "bfloat16"),
        (torch.tensor([True]), ProtocolError, "bool"),
        (torch.tensor(1), ProtocolError, "one dimension"),
        (torch.tensor([1]).to_sparse(), ProtocolError, "sparse"),
    ],
)
def test_what_are_no_page_ids_is_refused(pages: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        as_pages(pages, num_pages=8, operation="send_pages('r')")
    assert "send_pages('r')" in str(caught.value)


def test_too_many_pages_for_one_message_are_refused() -> None:
    with pytest.raises(ProtocolError, match="in chunks"):
        as_pages(np.zeros((1 << 20) + 1, dtype=np.int64), num_pages=8, operation="test")


LAYOUT = KVLayout.gqa(
    num_layers=40, num_kv_heads=1, head_dim=1, page_size=1, dtype=torch.uint8, layers=[3, 4, 5, 30, 31, 32, 33]
)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (None, LAYOUT.layers),
        (4, (4,)),
        (np.int64(30), (30,)),
        ([5, 3], (3, 5)),
        ((5, 5), (5,)),
        (range(30, 34), (30, 31, 32, 33)),
        (np.array([33, 3]), (3, 33)),
        ([], ()),
    ],
)
def test_layers(layers: Any, expected: tuple[int, ...]) -> None:
    found = as_layers(layers, LAYOUT, operation="test")
    assert found == expected
    assert all(type(layer) is int for layer in found)


@pytest.mark.parametrize(
    "layers", [0, -1, 34, True, 3.0, "3", [3, 6], [None], [[3]], [3.0], {3: 4}, object(), range(3, 1 << 50)]
)
def test_layers_that_are_not_held(layers: Any) -> None:
    with pytest.raises(ProtocolError, match=r"test: .*layers \[3, 4, 5, 30, 31, 32, 33\]"):
        as_layers(layers, LAYOUT, operation="test")


@pytest.mark.parametrize("request_name", ["r", "x" * 1024, "\xe9" * 512, "a b\n\0", "\U0001f600" * 256])
def test_requests(request_name: str) -> None:
    assert as_request(request_name) == request_name


@pytest.mark.parametrize(
    "request_name", ["", "x" * 1025, "\xe9" * 513, "\U0001f600" * 257, "\ud800", None, 5, b"r", ["r"]]
)
def test_bad_requests(request_name: Any) -> None:
    with pytest.raises(ProtocolError, match="request"):
        as_request(request_name)


@pytest.mark.parametrize("value", [0, 5, np.int32(5), (1 << 40) - 1])
def test_counts(value: Any) -> None:
    assert as_count(value, operation="test", name="start") == value


@pytest.mark.parametrize("value", [-1, 1 << 40, 1.0, True, None, "1"])
def test_bad_counts(value: Any) -> None:
    with pytest.raises(ProtocolError, match=r"start.*at least 0 and less than 2\*\*40"):
        as_count(value, operation="test", name="start")


def test_aux() -> None:
    for kind in (bytes, bytearray, memoryview):
        assert as_aux(kind(b"abc"), operation="test") == b"abc"
    assert len(as_aux(bytes(65536), operation="test")) == 65536
    for bad in (bytes(65537), "text", 5, None, [1]):
        with pytest.raises(ProtocolError, match="test"):
            as_aux(bad, operation="test")


def test_events() -> None:
    class Ready:
        def query(self) -> bool:
            return True

    ready = Ready()
    assert as_event(None, operation="test") is None
    assert as_event(ready, operation="test") is ready
    for bad in (object(), 5, "ready"):
        with pytest.raises(ProtocolError, match=r"query\(\)"):
            as_event(bad, operation="test")


def test_ids_of_no_memory_are_refused() -> None:
    with pytest.raises(ProtocolError, match="pages is on meta"):
        as_pages(torch.zeros(3, dtype=torch.int64, device="meta"), num_pages=8, operation="test")
