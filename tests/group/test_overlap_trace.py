"""The example that shows the overlap: one run as a user starts it, with torchrun, at a small size."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.helpers.torchrun import EXAMPLES, run_with_torchrun

pytest.importorskip("transformers", reason="the example's model comes from transformers (extra 'demo')")

EXAMPLE = EXAMPLES / "overlap_trace.py"
# The last page is not full, and the last group is not either.
SMALL = ("--prompt-tokens", "150", "--layers", "3", "--group-size", "2", "--hidden", "64", "--warmups", "1")


def ranges(trace: Path) -> list[str]:
    """Names of the example's and the pipeline's ranges, in order of time."""
    events = json.loads(trace.read_text())["traceEvents"]
    named = [event for event in events if event.get("cat") == "user_annotation"]
    named = [event for event in named if re.match(r"layer\[|torchkv::send_layer\[", event["name"])]
    return [event["name"] for event in sorted(named, key=lambda event: event["ts"])]


def test_both_ways_are_traced_and_every_byte_is_right(tmp_path: Path) -> None:
    code, lines = run_with_torchrun(EXAMPLE, 2, *SMALL, "--corrupt", "--out", str(tmp_path / "out"))
    output = "\n".join(lines)
    assert code == 0, output
    (verdict,) = [line for line in lines if line.startswith(("PASS ", "FAIL "))]
    assert re.fullmatch(r"PASS \d+ bytes equal after each of 4 passes; the flipped value was noticed", verdict), output
    rows = {row[0]: row[1:] for row in map(str.split, lines) if row and row[0] in ("once", "pipelined")}
    assert {way: row[0] for way, row in rows.items()} == {"once": "1", "pipelined": "2"}, output
    assert rows["once"][-1] == "0.0%"  # what begins when the prefill has ended hides behind nothing of it
    layers = [f"layer[{n}]" for n in range(3)]
    assert ranges(tmp_path / "out" / "once.json") == [*layers, "torchkv::send_layer[0..2]"]
    assert ranges(tmp_path / "out" / "pipelined.json") == [
        *layers[:2],
        "torchkv::send_layer[0..1]",
        layers[2],
        "torchkv::send_layer[2]",
    ]
    drawn = (tmp_path / "out" / "timeline.png").exists()
    assert drawn != any(line.startswith("no timeline.png: ") for line in lines), output
