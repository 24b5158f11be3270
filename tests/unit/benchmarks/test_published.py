"""``python -m torchkv.bench published``: findings, tables and plots of given rows, planners, and checks of bytes."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchkv.bench.prefill.decoder import Decoder, ModelSize
from torchkv.bench.prefill.gates import PipelineResult, Way
from torchkv.bench.prefill.memories import Behind, Plain, rows
from torchkv.bench.published import command, link, pipelining, planning, plots, prefixes, staging, tables
from torchkv.bench.published.findings import RESULTS, Finding, Row, findings
from torchkv.bench.published.planners import PLANNERS
from torchkv.cache import KVCache
from torchkv.errors import KVError, TransportUnavailable
from torchkv.prefix.cache import PrefixCache

bench = importlib.import_module("torchkv.bench.__main__")

SIZE = ModelSize(layers=2, hidden=32, ffn=48, heads=2, kv_heads=2, head_dim=16, dtype=torch.float32)


def planned(tokens: int, planner: str, plan_ms: float, ttft_ms: float | None) -> Row:
    whole = {"prefill_ms": 100.0, "send_ms": 50.0, "lane": "cma/memory"}
    nothing = dict.fromkeys(whole)
    row = {"tokens": tokens, "planner": planner, "plan_ms": plan_ms, "descriptors": 64 * tokens, "wrong": 0}
    return {**row, "ttft_ms": ttft_ms, **(nothing if ttft_ms is None else whole)}


def staged(name: str, way: str, ms: float, writes: int) -> Row:
    limit = None if name == "loopback" else 5.0
    row = {"link": name, "tokens": 1024, "way": way, "nbytes": 1 << 20, "path": "runs", "wrong": 0}
    return {**row, "ms": ms, "writes": writes, "limit_ms": limit}


def pipelined(tokens: int, delta: float, name: str = "50 MB/s") -> Row:
    times = {"prefill_ms": 80.0, "prefill_pipelined_ms": 81.0, "transfer_ms": 19.0}
    exposed = {"exposed_once_ms": 20.0, "exposed_pipelined_ms": 2.0}
    return {
        **times,
        **exposed,
        "link": name,
        "tokens": tokens,
        "layers": 8,
        "nbytes": 1 << 20,
        "lane": "tcp/lo",
        "path": "runs",
        "ttft_once_ms": 100.0,
        "ttft_pipelined_ms": 100.0 * (1 + delta),
        "limit_ms": 75.0,
        "delta": delta,
        "delta_disturbed": delta + 0.01,
        "group_size": 1,
        "passes": 3,
        "noise": 0.04,
        "disturbed": 0.01,
        "wrong": 0,
    }


def shared(way: str, ttft_ms: float, nbytes: int) -> Row:
    counts = {"prompts": 24, "clients": 2, "nbytes": nbytes, "lacking": nbytes, "wrong": 0}
    times = {"compute_ms": 250.0, "ttft_ms": ttft_ms, "median_ms": ttft_ms, "limit_ms": 500.0}
    return {"way": way, "link": "25 MB/s", **counts, **times}


def rows_of() -> dict[str, list[Row]]:
    """Of each result: rows that agree with everything published."""
    equal = [staged(name, "equal", 10.0, 1920) for name in ("loopback", "200 MB/s")]
    ours = [staged(name, "staged", 11.0, 5) for name in ("loopback", "200 MB/s")]
    checked = [staged(name, "checked", 13.0, 5) for name in ("loopback", "200 MB/s")]
    slices = [staged(name, "slices", 60.0, 30720) for name in ("loopback", "200 MB/s")]
    return {
        "a": [
            *(planned(2048, *row) for row in (("loops", 16.0, 500.0), ("numpy", 0.5, 485.0), ("torchkv", 0.01, 484.0))),
            *(planned(8192, *row) for row in (("loops", 60.0, None), ("numpy", 1.0, None), ("torchkv", 0.01, None))),
        ],
        "b": [*equal, *ours, *checked, *slices],
        "c": [pipelined(*row) for row in ((256, 0.05), (1024, -0.2), (4096, -0.3), (8192, -0.25), (16384, -0.1))],
        "d": [pipelined(3500, -0.15, "200 MB/s"), pipelined(3500, -0.02, "loopback")],
        "e": [shared("whole", 2600.0, 800_000_000), shared("incremental", 780.0, 180_000_000)],
    }


def document() -> dict[str, Any]:
    results = {key: {"rows": found, "seconds": 61.2, "load": 0.4} for key, found in rows_of().items()}
    return {"torchkv": "9.9", "machine": "2 cores", "no_links": "", "results": results}


# ---------------------------------------------------------------------- findings


def by_claim(key: str, rows: list[Row]) -> dict[str, Finding]:
    return {finding.claim.split(",")[0]: finding for finding in findings(key, rows)}


@pytest.mark.parametrize("key", list(RESULTS))
def test_rows_as_published_agree_with_every_claim(key: str) -> None:
    found = findings(key, rows_of()[key])
    assert found
    assert [finding.claim for finding in found if not finding.holds] == []


def changed(key: str, field: str, value: object, **where: object) -> list[Row]:
    """The rows of a result, with one field changed in those rows that are as ``where`` says."""
    found = [{**row} for row in rows_of()[key]]
    chosen = [row for row in found if all(row[name] == wanted for name, wanted in where.items())]
    assert chosen
    for row in chosen:
        row[field] = value
    return found


@pytest.mark.parametrize(
    ("key", "rows", "claim"),
    [
        ("a", changed("a", "plan_ms", 20.0, planner="numpy"), "numpy lists slices faster than Python loops do"),
        ("a", changed("a", "ttft_ms", 501.0, planner="numpy", tokens=2048), "the first token comes earlier for it"),
        ("a", changed("a", "plan_ms", 0.7, planner="torchkv"), "torchkv's planner is faster still"),
        ("b", changed("b", "writes", 400, way="staged"), "staging needs far fewer writes"),
        ("b", changed("b", "ms", 12.6, way="staged"), "staged is as fast as equal TP"),
        ("b", changed("b", "ms", 10.9, way="slices"), "staged is as fast as equal TP"),
        ("c", changed("c", "delta", -0.01, tokens=256), "first token"),
        ("c", changed("c", "delta", 0.01, tokens=4096), "it pays from some length on"),
        ("c", changed("c", "delta", -0.4, tokens=16384), "and less again for the longest prompts"),
        ("d", changed("d", "delta", 0.01, link="200 MB/s"), "first token"),
        ("e", changed("e", "ttft_ms", 2601.0, way="incremental"), "mean time to the first token"),
        ("e", changed("e", "lacking", 170_000_000, way="incremental"), "only what is lacking moves"),
    ],
)
def test_each_claim_can_fail(key: str, rows: list[Row], claim: str) -> None:
    missed = [finding.claim.split(",")[0] for finding in findings(key, rows) if not finding.holds]
    assert claim in missed


def test_figures_stand_beside_the_published_ones() -> None:
    first = by_claim("a", rows_of()["a"])["the first token comes earlier for it"]
    assert (first.published, first.ours) == ("899 -> 719 ms (-20%)", "500 -> 485 ms (-3%)")
    assert first.limit == "484 ms, with all else unchanged"
    writes = by_claim("b", rows_of()["b"])["staging needs far fewer writes"]
    assert writes.ours == "30720 -> 5 (6,144 x)"
    lengths = findings("c", rows_of()["c"])
    assert [finding.published for finding in lengths[:5]] == ["+18%", "-61%", "-68%", "-48%", "-14%"]
    assert lengths[1].limit == "-25%"
    assert by_claim("c", rows_of()["c"])["it pays from some length on"].ours == "from 1024 tokens on"
    mean = by_claim("e", rows_of()["e"])["mean time to the first token"]
    assert (mean.published, mean.ours) == ("19.8 -> 4.6 s (4.3 x)", "2.60 -> 0.78 s (3.3 x)")


def test_lengths_without_a_published_figure_are_not_judged() -> None:
    found = findings("c", [pipelined(64, 0.4), *rows_of()["c"]])
    assert (found[0].published, found[0].holds) == ("-", True)
    never = findings("c", [pipelined(256, -0.1), pipelined(1024, 0.1)])
    assert [(f.ours, f.holds) for f in never if f.claim.startswith("it pays")] == [("never", False)]


@pytest.mark.parametrize(
    ("prefill", "transfer", "least"),
    [
        (8.0, 4.0, 0.5),  # the last of eight layers
        (4.0, 8.0, 4.5),  # the link is slower: all bytes, behind the first layer
        (4.0, 4.0, 0.5),
    ],
)
def test_what_cannot_be_hidden(prefill: float, transfer: float, least: float) -> None:
    assert pipelining.least_exposed(prefill, transfer, 8) == pytest.approx(least)


def test_what_other_programs_take_of_the_core_does_not_count() -> None:
    once = Way(prefill=(0.1, 0.1), exposed=(0.02, 0.02), ttft=(0.12, 0.12), waited=(0.0, 0.0))
    pipelined = Way(prefill=(0.13, 0.1), exposed=(0.002, 0.002), ttft=(0.132, 0.102), waited=(0.03, 0.0))
    result = PipelineResult(
        device="cpu",
        tp="1:1",
        tokens=256,
        layers=8,
        nbytes=1,
        path="runs",
        lane="tcp/lo",
        once=once,
        pipelined=pipelined,
        group_sizes=(1, 1),
        unlike_groups=0,
        transfer=0.02,
        group_transfer=0.003,
        round_trip=1e-4,
        wrong=0,
    )
    row = pipelining._row(result, None)
    assert row["delta"] == pytest.approx(0.102 / 0.12 - 1)
    assert row["delta_disturbed"] == pytest.approx((0.132 + 0.102) / 2 / 0.12 - 1)
    assert row["noise"] == pytest.approx(0)
    assert row["ttft_pipelined_ms"] == pytest.approx(102)
    assert row["prefill_pipelined_ms"] == pytest.approx(100)
    assert row["disturbed"] == pytest.approx(0.03 / 0.43)
    assert row["limit_ms"] == pytest.approx(102.5)


# ---------------------------------------------------------------------- tables, plots, the command


def test_tables_are_markdown_with_every_row() -> None:
    lines = tables.lines(document())
    assert lines[0] == "torchkv 9.9; 2 cores"
    for key, found in rows_of().items():
        printed = tables.result_lines(key, {"rows": found, "seconds": 61.2, "load": 0.4})
        assert printed[0] == f"## {key}: {RESULTS[key].title}"
        assert RESULTS[key].source in printed[2]
        table = [line for line in printed if line.startswith("|")]
        assert len(table) == 2 + len(findings(key, found)) + 2 + len(found)
        for first in (0, 2 + len(findings(key, found))):  # headings, rule, rows: all as wide
            assert table[first].count("|") == table[first + 1].count("|") == table[first + 2].count("|")
        assert all(line in lines for line in printed)
    assert "| NO |" not in "\n".join(lines)
    without = tables.lines({**document(), "no_links": "needs root"})
    assert "needs root" in without[1]


def test_a_claim_that_does_not_hold_is_marked() -> None:
    rows = changed("e", "ttft_ms", 2601.0, way="incremental")
    lines = tables.result_lines("e", {"rows": rows, "seconds": 1.0, "load": 0.0})
    assert [line.startswith("| mean time") for line in lines if line.endswith("| NO |")] == [True]


def test_every_result_has_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = plots.draw(document(), tmp_path / "made")
    assert [path.name for path in written] == [f"{key}.svg" for key in RESULTS]
    for path, key in zip(written, RESULTS, strict=True):
        text = path.read_text()
        assert text.startswith("<?xml")
        assert RESULTS[key].title in text
    again = plots.draw(document(), tmp_path / "again")
    assert [path.read_text() for path in again] == [path.read_text() for path in written]


def test_without_matplotlib_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(TransportUnavailable, match=r"pip install 'torchkv\[bench\]'"):
        plots.draw(document(), tmp_path)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Row]]:
    """What each result pretends to measure."""
    found = rows_of()

    def pretend(key: str) -> Callable[[bool], list[Row]]:
        return lambda slow_links: found[key]

    monkeypatch.setattr(command, "MEASURE", {key: pretend(key) for key in found})
    monkeypatch.setattr(link, "unavailable", lambda: "")
    return found


def test_the_command_measures_what_is_asked_for(
    measured: dict[str, list[Row]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert bench.main(["published", "--only", "e,a", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert list(found["results"]) == ["e", "a"]
    assert found["results"]["a"]["rows"] == measured["a"]
    assert [line for line in err.splitlines() if line.startswith("## ")] == [
        f"## {key}: {RESULTS[key].title}" for key in ("e", "a")
    ]
    saved = tmp_path / "saved.json"
    saved.write_text(out)
    assert bench.main(["published", "--read", str(saved), "--only", "e"]) == 0
    printed = capsys.readouterr().out
    assert f"## e: {RESULTS['e'].title}" in printed
    assert "## a" not in printed


def test_a_wrong_byte_fails_and_a_missed_claim_does_not(measured: dict[str, list[Row]]) -> None:
    measured["d"] = changed("d", "delta", 0.3, link="loopback")
    assert bench.main(["published", "--only", "d"]) == 0
    measured["d"] = changed("d", "wrong", 1, link="loopback")
    assert bench.main(["published", "--only", "d"]) == 1


def test_results_that_do_not_exist_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench.main(["published", "--only", "a,f"])
    assert stopped.value.code == 2
    assert "there is no result 'f'; there are a, b, c, d, e" in capsys.readouterr().err


def test_without_slow_links_all_is_measured_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    for module in (staging, pipelining, prefixes):
        monkeypatch.setattr(module, "measure", lambda settings: asked.append(settings) or [])
    for slow_links in (False, True):
        for key in "bcde":
            command.MEASURE[key](slow_links)
    found = [settings.link if hasattr(settings, "link") else settings.links for settings in asked]
    assert found[:4] == [(None,), (None,), (None,), None]
    assert all(found[4:]), "and otherwise over links with a rate"


# ---------------------------------------------------------------------- links


def test_links_have_names() -> None:
    assert [link.link_name(rate) for rate in (None, 200.0, 12.5)] == ["loopback", "200 MB/s", "12.5 MB/s"]


def test_a_machine_without_tc_has_no_slow_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else f"/bin/{tool}")
    assert link.unavailable.__wrapped__() == "needs tc (iproute2)"


@pytest.mark.skipif(bool(link.unavailable()), reason=f"slow links: {link.unavailable()}")
def test_a_link_has_its_rate_and_the_network_comes_back() -> None:
    outside = Path("/proc/thread-self/ns/net").readlink()
    with link.link(12.5):
        assert Path("/proc/thread-self/ns/net").readlink() != outside
        shown = subprocess.run(["tc", "qdisc", "show", "dev", "lo"], capture_output=True, text=True, check=True).stdout
    assert "tbf" in shown
    assert "rate 100Mbit" in shown
    assert Path("/proc/thread-self/ns/net").readlink() == outside
    with pytest.raises(ZeroDivisionError), link.link(12.5):
        raise ZeroDivisionError
    assert Path("/proc/thread-self/ns/net").readlink() == outside


# ---------------------------------------------------------------------- planners


@pytest.mark.parametrize("heads", [2, 4])
def test_planners_agree_with_each_other_and_with_copies_by_hand(heads: int) -> None:
    settings = planning.Planning(model=replace(SIZE, heads=heads, kv_heads=heads), tokens=(64,))
    of = planning._slices(settings, 64)
    found = {name: planner(of) for name, planner in PLANNERS.items()}
    for src, dst, length in found.values():
        for one, other in zip((src, dst, length), found["loops"], strict=True):
            assert np.array_equal(one, other)
    writer, reader = settings.model.layout(16), settings.model.layout(16, tp_rank=1, tp_size=heads)
    rng = np.random.default_rng()
    pages = rng.integers(0, 256, (4, writer.page_nbytes("k")), dtype=np.uint8)
    got = np.zeros((4, reader.page_nbytes("k")), dtype=np.uint8)
    for src, dst, length in zip(*found["loops"], strict=True):
        got.reshape(-1)[dst : dst + length] = pages.reshape(-1)[src : src + length]
    head = pages.reshape(4, 16, heads, -1)[:, :, 1]  # the head of rank 1
    want = np.zeros_like(head)
    want[of.dst_pages] = head[of.src_pages]
    assert np.array_equal(got.reshape(want.shape), want)


def test_planners_that_disagree_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(of: Any) -> Any:
        src, dst, length = PLANNERS["loops"](of)
        return src + 1, dst, length

    monkeypatch.setattr(planning, "PLANNERS", {**PLANNERS, "numpy": shifted})
    with pytest.raises(KVError, match="numpy lists other descriptors"):
        planning._plan(planning.Planning(model=SIZE, repeats=1), 32)


def test_turns_let_each_planner_go_first() -> None:
    settings = planning.Planning(end_to_end=(16, 32), repeats=2)
    turns = list(planning._turns(settings))
    assert len(turns) == 2 * 3 * 3
    assert [name for tokens, _, name in turns if tokens == 16][::3] == list(PLANNERS)


# ---------------------------------------------------------------------- checks of bytes


def flips(cache: KVCache, row: int) -> Callable[[], None]:
    def flip() -> None:
        rows(cache, "v", 1)[row].view(torch.uint8)[0, 3] ^= 1

    return flip


def test_planning_counts_every_wrong_byte() -> None:
    torch.set_grad_enabled(False)
    settings = planning.Planning(model=SIZE)
    model = Decoder(SIZE, device=torch.device("cpu"), seed=1)
    plain = Plain()
    model(settings.prompt(0, 32), plain)
    cache = KVCache.empty(SIZE.layout(16, tp_size=2), 4, device="cpu")
    for storage in cache.storages:
        storage.fill_(planning.POISON)
    slots = torch.cat((torch.arange(48, 64), torch.arange(16)))
    for (layer, _), (k, v) in plain.layers.items():
        rows(cache, "k", layer)[slots], rows(cache, "v", layer)[slots] = k[:, :1], v[:, :1]
    assert planning._count_wrong(cache, slots, plain) == 0
    for wrong, row in enumerate((50, 20), start=1):  # received, and beside it
        flips(cache, row)()
        assert planning._count_wrong(cache, slots, plain) == wrong


def test_shared_prefixes_count_every_wrong_byte_and_what_is_lacking() -> None:
    torch.set_grad_enabled(False)
    settings = prefixes.Prefixes(model=SIZE, groups=2, size=2, prefix=32, question=16)
    model = Decoder(SIZE, device=torch.device("cpu"), seed=settings.seed)
    prefix = prefixes._prefixes(settings, model)
    question, first = prefixes._expected(settings, model, prefix, 3)
    whole = prefixes._joined(prefix[1], question)
    cache, index = KVCache.empty(SIZE.layout(16), 5, device="cpu"), PrefixCache(5, 16)
    held = index.match([])
    index.allocate(held, 3)
    slots = prefixes._slots(held.pages)
    for (layer, _), (k, v) in whole.layers.items():
        rows(cache, "k", layer)[slots], rows(cache, "v", layer)[slots] = k, v
    logits = model(torch.tensor([first]), whole)
    answer = prefixes._Answer(prefixes._Asked(3, 0.0, 0, held, None), first, logits, 1.0)
    assert prefixes._count_wrong(cache, answer, whole, model) == 0
    flips(cache, int(slots[40]))()
    assert prefixes._count_wrong(cache, answer, whole, model) == 1
    logits[7] += 1.0
    assert prefixes._count_wrong(cache, answer, whole, model) > 1


def test_lacking_is_what_no_answered_prompt_has_brought() -> None:
    settings = prefixes.Prefixes(groups=2, size=2, prefix=32, question=16)
    answers = [
        prefixes._Answer(prefixes._Asked(prompt, 0.0, done, None, None), 0, torch.zeros(1), 1.0)
        for done, prompt in zip((0, 0, 1, 4), settings.order, strict=True)
    ]
    known = settings.order[2] // 2 == settings.order[0] // 2  # by then only the first is answered
    assert prefixes._lacking(settings, "whole", answers) == 4 * 48
    assert prefixes._lacking(settings, "incremental", answers) == 48 + 48 + (16 if known else 48) + 16


def test_prompts_of_a_group_share_their_prefix_only() -> None:
    settings = prefixes.Prefixes(groups=2, size=2, prefix=32, question=16)
    one, other, third = (settings.tokens(prompt) for prompt in (0, 1, 2))
    assert sorted(settings.order) == [0, 1, 2, 3]
    assert torch.equal(one[:32], other[:32])
    assert not torch.equal(one[32:], other[32:])
    assert not torch.equal(one[:32], third[:32])
    assert isinstance(Behind(Plain()).layers, dict)
