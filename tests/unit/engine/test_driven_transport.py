"""Who drives the transport: Python's thread, or the resident loop alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from tests.helpers.simulation.cluster import Cluster, Place
from torchkv.engine.engine import TICK, Engine
from torchkv.layout.layout import KVLayout
from torchkv.options import Options


def counted(name: str, function: Callable[[], bool], calls: Counter[str]) -> Callable[[], bool]:
    def call() -> bool:
        calls[name] += 1
        return function()

    return call


@pytest.mark.parametrize("driven", [False, True])
def test_beside_the_loop_the_transport_is_only_looked_after(driven: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = KVLayout.gqa(num_layers=1, num_kv_heads=1, head_dim=2, page_size=2, dtype=torch.int16)
    engine = Cluster([Place("p", layout)], options=Options(transport="loopback"))[0].engine
    monkeypatch.setattr(Engine, "transport_is_driven", driven)
    calls: Counter[str] = Counter()
    transport = engine._transport
    monkeypatch.setattr(transport, "look_after", counted("look_after", lambda: False, calls))
    monkeypatch.setattr(transport, "progress", counted("progress", transport.progress, calls))
    now = 10.0
    for _ in range(40):
        engine.step(now, moved=True)
        now += TICK / 8
    assert calls == ({"look_after": 5} if driven else {"progress": 40})
