"""What others have published, and what our rows say about it. Arithmetic only: rows go in, findings come out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["PUBLISHED_LENGTHS", "RESULTS", "Finding", "Result", "Row", "findings"]

Row = dict[str, Any]

# Change of the time to the first token by layer-pipelined sending, by tokens of the prompt: SGLang, pull request
# 23515.
PUBLISHED_LENGTHS = {256: 0.18, 1024: -0.61, 4096: -0.68, 8192: -0.48, 16384: -0.14}
PARITY = 1.25  # times as long as between ranks with equal heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A published result. source: its address. setting: where it was measured. modelled: what ours models."""

    title: str
    source: str
    setting: str
    modelled: str


SGLANG = "https://github.com/sgl-project/sglang/pull"
RESULTS = {
    "a": Result(
        title="planning head slices",
        source=f"{SGLANG}/18163",
        setting="SGLang, unlike TP sizes, 1,000 requests of 2,000 tokens, 64 at once; figures also in 18158",
        modelled="a small decoder, one request at a time",
    ),
    "b": Result(
        title="staging head slices",
        source=f"{SGLANG}/19890",
        setting="SGLang, a model of 397e9 parameters in FP8, TP 4 to DP attention 4, GB200 with MNNVL, 1,000 tokens",
        modelled="random bytes instead of a model's; TCP instead of NVLink; one pair of ranks",
    ),
    "c": Result(
        title="pipelined prefill by length of prompt",
        source=f"{SGLANG}/23515",
        setting="SGLang, Qwen2.5-72B, TP 4, 16 H20 on two hosts, 4 x 400 Gbit/s, 32 requests at once",
        modelled="a small decoder, one request at a time; the link's rate is set, so that transfers weigh as much",
    ),
    "d": Result(
        title="layer by layer over TCP",
        source=f"{SGLANG}/19931",
        setting="SGLang, Qwen3.5-397B in FP8, TP 8, Mooncake over TCP, one request at a time",
        modelled="a small decoder; the first link's rate is set, so that transfers weigh as much",
    ),
    "e": Result(
        title="incremental transfer with shared prefixes",
        source=f"{SGLANG}/22234",
        setting="SGLang, MiniMax-M2.5, TP 4, 8 H20, groups of prompts that share 7,000 tokens",
        modelled="a small decoder, 24 prompts of 2 clients; the link's rate is set; prefixes are computed beforehand",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One claim: as published, what we measured, what would be the best possible, and whether ours agrees."""

    claim: str
    published: str
    ours: str
    limit: str
    holds: bool


def findings(key: str, rows: Sequence[Row]) -> list[Finding]:
    """What ``rows`` say about the result ``key``, a letter of `RESULTS`."""
    judges: dict[str, Callable[[Sequence[Row]], list[Finding]]] = {
        "a": _planning,
        "b": _staging,
        "c": _lengths,
        "d": _layer_by_layer,
        "e": _prefixes,
    }
    return judges[key](rows)


def _percent(change: float) -> str:
    return f"{100 * change:+.0f}%"


def _planning(rows: Sequence[Row]) -> list[Finding]:
    whole = [row for row in rows if row["ttft_ms"] is not None]
    tokens = max(row["tokens"] for row in whole)
    at = {row["planner"]: row for row in whole if row["tokens"] == tokens}
    loops, outer, ours = (at[name] for name in ("loops", "numpy", "torchkv"))
    per_request = f"a request of {tokens} tokens, {loops['descriptors']} slices"
    first = {name: row["ttft_ms"] for name, row in at.items()}
    return [
        Finding(
            claim="numpy lists slices faster than Python loops do",
            published="yes",
            ours=f"{loops['plan_ms']:.1f} -> {outer['plan_ms']:.2f} ms, {per_request}",
            limit="0",
            holds=outer["plan_ms"] < loops["plan_ms"],
        ),
        Finding(
            claim="the first token comes earlier for it",
            published=f"899 -> 719 ms ({_percent(719 / 899 - 1)})",
            ours=f"{first['loops']:.0f} -> {first['numpy']:.0f} ms ({_percent(first['numpy'] / first['loops'] - 1)})",
            limit=f"{first['loops'] - loops['plan_ms']:.0f} ms, with all else unchanged",
            holds=first["numpy"] < first["loops"],
        ),
        Finding(
            claim="torchkv's planner is faster still",
            published="-",
            ours=f"{1e3 * ours['plan_ms']:.0f} us; first token after {first['torchkv']:.0f} ms "
            f"({_percent(first['torchkv'] / first['loops'] - 1)})",
            limit="0",
            holds=ours["plan_ms"] < outer["plan_ms"] and first["torchkv"] < first["loops"],
        ),
    ]


def _staging(rows: Sequence[Row]) -> list[Finding]:
    found: list[Finding] = []
    tokens = _nearest({row["tokens"] for row in rows}, 1024)
    links = dict.fromkeys(row["link"] for row in rows)
    for name in links:
        at = {row["way"]: row for row in rows if row["link"] == name and row["tokens"] == tokens}
        equal, staged, slices = (at[way] for way in ("equal", "staged", "slices"))
        if not found:
            fewer = slices["writes"] / staged["writes"]
            found.append(
                Finding(
                    claim=f"staging needs far fewer writes, {tokens} tokens",
                    published="about 30,000 -> 30 (1,000 x)",
                    ours=f"{slices['writes']} -> {staged['writes']} ({fewer:,.0f} x)",
                    limit="1 write",
                    holds=fewer >= 100,
                )
            )
        limit = "" if staged["limit_ms"] is None else f"; the link {staged['limit_ms']:.1f} ms"
        ratio = staged["ms"] / equal["ms"]
        found.append(
            Finding(
                claim=f"staged is as fast as equal TP, {name}",
                published="parity",
                ours=f"{staged['ms']:.1f} ms, {ratio:.2f} x; slices {slices['ms']:.1f} ms",
                limit=f"equal TP {equal['ms']:.1f} ms{limit}",
                holds=ratio <= PARITY and staged["ms"] < slices["ms"],
            )
        )
    return found


def _lengths(rows: Sequence[Row]) -> list[Finding]:
    found: list[Finding] = []
    for row in rows:
        published = PUBLISHED_LENGTHS.get(row["tokens"])
        found.append(
            Finding(
                claim=f"first token, {row['tokens']} tokens",
                published="-" if published is None else _percent(published),
                ours=f"{_percent(row['delta'])} ({row['ttft_once_ms']:.0f} -> {row['ttft_pipelined_ms']:.0f} ms)",
                limit=_percent(row["limit_ms"] / row["ttft_once_ms"] - 1),
                holds=published is None or (published < 0) == (row["delta"] < 0),
            )
        )
    best = min(rows, key=lambda row: row["delta"])
    last = max(rows, key=lambda row: row["tokens"])
    from_here = _crossing(rows)
    found.append(
        Finding(
            claim="it pays from some length on",
            published="between 256 and 1024 tokens",
            ours="never" if from_here is None else f"from {from_here} tokens on",
            limit="-",
            holds=from_here is not None and from_here <= 1024,
        )
    )
    found.append(
        Finding(
            claim="and less again for the longest prompts",
            published="-68% at 4096, -14% at 16384",
            ours=f"{_percent(best['delta'])} at {best['tokens']}, {_percent(last['delta'])} at {last['tokens']}",
            limit="-",
            holds=last["tokens"] > best["tokens"],
        )
    )
    return found


def _crossing(rows: Sequence[Row]) -> int | None:
    """The shortest prompt from which on all are faster."""
    found = None
    for row in sorted(rows, key=lambda row: -row["tokens"]):
        if row["delta"] >= 0:
            break
        found = int(row["tokens"])
    return found


def _layer_by_layer(rows: Sequence[Row]) -> list[Finding]:
    found = []
    for row in rows:
        tail, published = row["exposed_once_ms"] / row["ttft_once_ms"], row["link"] != "loopback" or len(rows) == 1
        found.append(
            Finding(
                claim=f"first token, {row['tokens']} tokens, {row['link']}",
                published="-14.6% at 3500, -15.0% at 16000 tokens" if published else "-",
                ours=f"{_percent(row['delta'])} ({row['ttft_once_ms']:.0f} -> {row['ttft_pipelined_ms']:.0f} ms); "
                f"of the transfer's {row['exposed_once_ms']:.0f} ms, {100 * tail:.0f}% of the time before, "
                f"{row['exposed_pipelined_ms']:.0f} are left",
                limit=_percent(row["limit_ms"] / row["ttft_once_ms"] - 1),
                holds=row["delta"] < 0,
            )
        )
    return found


def _prefixes(rows: Sequence[Row]) -> list[Finding]:
    at = {row["way"]: row for row in rows}
    whole, ours = at["whole"], at["incremental"]
    earlier = whole["ttft_ms"] / ours["ttft_ms"]
    return [
        Finding(
            claim="mean time to the first token",
            published=f"19.8 -> 4.6 s ({19.8 / 4.6:.1f} x)",
            ours=f"{whole['ttft_ms'] / 1e3:.2f} -> {ours['ttft_ms'] / 1e3:.2f} s ({earlier:.1f} x)",
            limit=f"{ours['limit_ms'] / 1e3:.2f} s ({whole['ttft_ms'] / ours['limit_ms']:.1f} x)",
            holds=earlier > 1,
        ),
        Finding(
            claim="only what is lacking moves",
            published="yes",
            ours=f"{whole['nbytes'] / 1e6:.0f} -> {ours['nbytes'] / 1e6:.0f} MB",
            limit=f"{ours['lacking'] / 1e6:.0f} MB lacking",
            holds=ours["nbytes"] <= 1.02 * ours["lacking"],
        ),
    ]


def _nearest(values: set[int], wanted: int) -> int:
    return min(values, key=lambda value: abs(value - wanted))
