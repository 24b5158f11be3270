"""``python -m torchkv.bench published`` in real processes, each result at a small size. No time is judged here."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from torchkv.bench.prefill.decoder import ModelSize
from torchkv.bench.prefill.memories import rows
from torchkv.bench.processes import run_two
from torchkv.bench.published import link, pipelining, planning, prefixes, staging
from torchkv.bench.published.findings import findings
from torchkv.bench.published.planners import PLANNERS
from torchkv.bench.published.tables import result_lines

SIZE = ModelSize(layers=3, hidden=32, ffn=48, heads=2, kv_heads=2, head_dim=16, dtype=torch.float32)
PLANNING = planning.Planning(model=SIZE, tokens=(32, 64), end_to_end=(32,), repeats=1)
PREFIXES = prefixes.Prefixes(model=SIZE, groups=2, size=3, prefix=64, question=32, link=None)


def check(key: str, found: list[dict[str, Any]], *, wrong: int = 0) -> None:
    assert sum(row["wrong"] for row in found) == wrong
    assert findings(key, found)
    assert len(result_lines(key, {"rows": found, "seconds": 1.0, "load": 0.0})) > len(found)
    for row in found:
        assert all(value > 0 for name, value in row.items() if name.endswith("_ms") and value is not None)


def test_planning() -> None:
    found = planning.measure(PLANNING)
    check("a", found)
    assert [(row["tokens"], row["planner"]) for row in found] == [(n, name) for n in (32, 64) for name in PLANNERS]
    assert [row["descriptors"] for row in found] == [2 * 3 * 32] * 3 + [2 * 3 * 64] * 3
    for row in found:
        measured = row["tokens"] == 32
        assert all((row[name] is not None) is measured for name in ("prefill_ms", "send_ms", "ttft_ms", "lane"))


def write_shifted(settings: planning.Planning) -> Any:
    """Rank 0, whose loops shift the source of each slice by one element in the measured turns."""
    right, calls = PLANNERS["loops"], 0

    def shifted(of: Any) -> Any:
        nonlocal calls
        calls += 1
        src, dst, length = right(of)
        return (src ^ 4, dst, length) if calls == 1 else (src, dst, length)

    PLANNERS["loops"] = shifted  # in a process of its own
    return planning._write(settings)


def test_each_planner_really_plans_and_what_it_gets_wrong_is_noticed() -> None:
    _, wrong = run_two(write_shifted, planning._read, PLANNING, path="slices")
    assert [bad > 0 for bad in wrong] == [True, False, False]


def test_staging() -> None:
    found = staging.measure(staging.Staging(layers=2, tokens=(64,), links=(None,), repeats=1))
    check("b", found)
    assert [row["way"] for row in found] == ["equal", "staged", "checked", "slices"]
    assert {row["nbytes"] for row in found} == {2 * 2 * 64 * 256}
    writes = {row["way"]: row["writes"] for row in found}
    assert writes["slices"] == 2 * 2 * 64, "one for each layer, component and token"
    assert 0 < writes["equal"] <= 2 * 2 * 4, "at most one for each page"
    assert 0 < writes["staged"] <= 2
    assert {row["way"]: row["path"] for row in found} == {
        "equal": "runs",
        "slices": "slices",
        "staged": "staged",
        "checked": "staged",
    }


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize("group_size", [None, 1], ids=["adaptive", "layer by layer"])
def test_pipelining(group_size: int | None) -> None:
    rate = None if link.unavailable() or group_size is None else 100.0
    found = pipelining.measure(
        pipelining.Pipelining(model=SIZE, tokens=(1024,), links=(rate,), group_size=group_size, repeats=1, warm_ups=1)
    )
    check("d" if group_size else "c", found)
    (row,) = found
    assert row["tokens"] == 1024
    assert row["nbytes"] == 2 * 3 * 1024 * 2 * 16 * 4
    assert row["link"] == link.link_name(rate)
    assert row["lane"].startswith("tcp")
    assert row["passes"] == 2
    assert 1 <= row["group_size"] <= 3
    if group_size:
        assert row["group_size"] == 1


def test_shared_prefixes() -> None:
    found = prefixes.measure(PREFIXES)
    check("e", found)
    whole, incremental = found
    token = 2 * 3 * 2 * 16 * 4
    assert whole["nbytes"] == whole["lacking"] == 6 * 96 * token
    assert incremental["nbytes"] == incremental["lacking"] < whole["nbytes"]
    assert all(row["prompts"] == 6 for row in found)


def read_and_flip(settings: prefixes.Prefixes) -> Any:
    """Rank 1; one bit of one received page is flipped before a prompt is checked, and back again behind."""
    count = prefixes._count_wrong

    def flipped(cache: Any, answer: Any, *others: Any) -> int:
        byte = rows(cache, "k", 2)[prefixes._slots(answer.asked.held.pages)[3]].view(torch.uint8)
        byte[1, 5] ^= 1
        found = count(cache, answer, *others)
        byte[1, 5] ^= 1
        return found

    prefixes._count_wrong = flipped
    return prefixes._read(settings)


def test_one_wrong_byte_of_a_shared_prefix_is_noticed() -> None:
    _, read = run_two(prefixes._write, read_and_flip, PREFIXES, environment={"UCX_TLS": "tcp"}, apart=True)
    assert [read[way]["wrong"] for way in prefixes.WAYS] == [6, 6], "one of each prompt"
