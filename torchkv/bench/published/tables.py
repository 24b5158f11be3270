"""The tables of the published results, in Markdown: what is claimed, and the rows behind it. JSON in, lines out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchkv.bench.published.findings import RESULTS, Finding, Row, findings

__all__ = ["lines", "result_lines"]

# Column -> heading, for the rows of each result; those of a, b, ... in this order.
COLUMNS = {
    "a": {
        "tokens": "tokens",
        "planner": "planner",
        "descriptors": "slices",
        "plan_ms": "planning, ms",
        "prefill_ms": "prefill, ms",
        "send_ms": "plan, send, verdict, ms",
        "ttft_ms": "first token, ms",
        "lane": "lane",
        "wrong": "#wrong",
    },
    "b": {
        "link": "link",
        "tokens": "tokens",
        "way": "way",
        "nbytes": "bytes",
        "writes": "writes",
        "ms": "ms",
        "limit_ms": "link, ms",
        "wrong": "#wrong",
    },
    "c": {
        "link": "link",
        "tokens": "tokens",
        "prefill_ms": "prefill, ms",
        "prefill_pipelined_ms": "pipelined, ms",
        "transfer_ms": "transfer, ms",
        "group_size": "layers a group",
        "exposed_once_ms": "exposed at the end, ms",
        "exposed_pipelined_ms": "exposed pipelined, ms",
        "ttft_once_ms": "first token at the end, ms",
        "ttft_pipelined_ms": "pipelined, ms",
        "limit_ms": "limit, ms",
        "delta": "change",
        "delta_disturbed": "with what others took",
        "noise": "between quartiles",
        "disturbed": "core taken by others",
        "passes": "passes",
        "wrong": "#wrong",
    },
    "e": {
        "way": "way",
        "link": "link",
        "prompts": "prompts",
        "clients": "clients",
        "nbytes": "bytes",
        "lacking": "lacking",
        "compute_ms": "question, ms",
        "ttft_ms": "first token, mean ms",
        "median_ms": "median ms",
        "limit_ms": "limit, ms",
        "wrong": "#wrong",
    },
}
COLUMNS["d"] = COLUMNS["c"]


def lines(document: dict[str, Any]) -> list[str]:
    """All of ``document``, which `command.measure` made, or a JSON file that it wrote."""
    found = [f"torchkv {document['torchkv']}; {document['machine']}"]
    if document["no_links"]:
        found.append(f"Links are plain loopback, since their rate cannot be set: {document['no_links']}")
    for key, result in document["results"].items():
        found += ["", *result_lines(key, result)]
    return found


def result_lines(key: str, result: dict[str, Any]) -> list[str]:
    """The title, the findings and the rows of one result."""
    about, rows = RESULTS[key], result["rows"]
    claims = findings(key, rows)
    return [
        f"## {key}: {about.title}",
        "",
        f"Published: {about.source} ({about.setting}). Modelled here: {about.modelled}. "
        f"Took {result['seconds']:.0f} s; load average before it {result['load']:.1f}.",
        "",
        *_table(("claim", "published", "ours", "limit", "agrees"), [_cells(one) for one in claims]),
        "",
        *_table(tuple(COLUMNS[key].values()), [[_text(name, row) for name in COLUMNS[key]] for row in rows]),
    ]


def _cells(one: Finding) -> list[str]:
    return [one.claim, one.published, one.ours, one.limit, "yes" if one.holds else "NO"]


def _text(name: str, row: Row) -> str:
    value = row[name]
    if value is None:
        return "-"
    if name in ("delta", "delta_disturbed", "noise", "disturbed"):
        return f"{100 * value:.0f}%"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 1 else f"{value:.1f}"
    return str(value)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    table = [headings, ["---"] * len(headings), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in table]
