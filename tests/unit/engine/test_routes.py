"""The resident loop expects writers for no longer than their connections and their processes last."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from torchkv import KVLayout
from torchkv.engine.resident.routes import Routes
from torchkv.layout.pair_plan import compile_plan

LAYOUT = KVLayout.gqa(num_layers=2, num_kv_heads=2, head_dim=8, page_size=4, dtype=torch.float16)
PLAN = compile_plan(1, {1: LAYOUT}, LAYOUT)


def connection(*, direct: bool = True) -> Any:
    return SimpleNamespace(channel=object(), tags=None, closed=False, direct=direct)


def routes(connections: dict[int, Any], reached: set[int]) -> Routes:
    core: Any = SimpleNamespace(peers=SimpleNamespace(reaches=lambda rank: rank in reached))
    local: Any = None
    return Routes(
        core,
        local=local,
        connections=connections,
        kernels=None,
        puts=False,
        sends_to=lambda rank: False,
        size=lambda rank: (0, 0),
    )


def test_a_writer_is_expected_as_long_as_its_connection_lasts() -> None:
    first = connection()
    connections = {1: first}
    known = routes(connections, {1})
    assert known.takes({1: PLAN})
    assert known.takes({1: PLAN})
    first.closed = True
    assert not known.takes({1: PLAN})
    connections[1] = connection()
    assert known.takes({1: PLAN})
    connections[1] = connection(direct=False)
    assert not known.takes({1: PLAN})
    del connections[1]
    assert not known.takes({1: PLAN})


def test_who_has_gone_is_expected_no_more() -> None:
    """And who then comes under the same number is reached when its loop says so."""
    reached = {1}
    known = routes({1: connection()}, reached)
    assert known.takes({1: PLAN})
    reached.clear()
    known.forget(1)
    assert not known.takes({1: PLAN})
    reached.add(1)
    assert known.takes({1: PLAN})


def test_all_writers_of_a_request_must_be_expected() -> None:
    known = routes({1: connection(), 2: connection(direct=False)}, {1, 2})
    assert known.takes({1: PLAN})
    assert not known.takes({1: PLAN, 2: PLAN})
