"""The runs of the resident loop in `test_simulated_loops` that stage through a network: what happens in them.

All runs of bytes are short, so what loops put goes through standing stages.
"""

from __future__ import annotations

from functools import partial

import pytest

from tests.helpers.simulation.loop_runs import clean_run, note_staged
from torchkv.core.loop.codes import STAGED, WRITTEN
from torchkv.engine.resident.notices import Notices

clean = partial(clean_run, network=True, staged=True)


def test_the_runs_are_worth_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are staged to their end, and are taken back at either side amid pieces; else nothing is shown."""
    seen, written = note_staged(monkeypatch), Notices._on_written

    def on_written(self: Notices, source: int, words: list[int], now: float) -> None:
        kind = words[0] & 0xFF
        seen["unpacked for Python"] += kind == WRITTEN
        seen["of a failed request"] += kind == STAGED
        written(self, source, words, now)

    monkeypatch.setattr(Notices, "_on_written", on_written)
    for seed in range(100):
        clean(seed)
    assert min(seen[what] for what in ("received", "taken back with bytes", "unpacked for Python", "landing")) > 5, seen
    assert seen["of a failed request"] > 0, seen
