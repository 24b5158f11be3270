"""States that resident loops carry, mapped and through a network: every byte against the reference."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.harness import Ranks
from tests.helpers.ranks.state_loop import FLAT, SETTINGS, SSM, requests, tp
from tests.helpers.ranks.state_transfer import Setting

COARSE = [
    *SETTINGS[:2],
    Setting("2to1", tp(0, 1, states=(SSM, FLAT)), tp(2, states=(SSM, FLAT))),
    Setting("1to2", tp(0, states=(SSM, FLAT)), tp(2, 3, states=(SSM, FLAT))),
]


def run(ranks: Ranks, setting: Setting, paths: set[str], **options: Any) -> None:
    seed = secrets.randbits(60)
    print(f"seed {seed}")  # shown when the test fails
    found = ranks.run(requests, setting, seed, options)
    assert {path for writer in setting.writers for path in found[writer]} <= paths
    assert all(found[writer] for writer in setting.writers)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_into_slots_that_are_mapped(setting: Setting, shared_ranks: Callable[..., Ranks]) -> None:
    run(shared_ranks("four", 4), setting, {"direct"})


@pytest.mark.parametrize("setting", COARSE, ids=lambda setting: setting.name)
def test_through_a_network(setting: Setting, shared_ranks: Callable[..., Ranks]) -> None:
    run(shared_ranks("hosts", 4, env={"UCX_TLS": "tcp"}, apart=True), setting, {"runs", "slices"})
