"""State between caches on GPUs: kernels that store into mapped slots, puts, and the staging ring with checksums."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.harness import Ranks
from tests.helpers.ranks import state_loop
from tests.helpers.ranks.gpu_pair import needs_gpus
from tests.helpers.ranks.state_transfer import WAYS, Setting, hybrid, requests, tp

SETTINGS = [
    Setting("1to1", tp((0,)), tp((2,))),
    Setting("2to1", tp((0, 1)), tp((2,), order="HND")),
    Setting("1to2", tp((0,)), tp((2, 3))),
    Setting("pp-1to2", tp((0,)), {2: hybrid(layers=[0]), 3: hybrid(layers=[1, 2])}),
]
# Into these rings not even the state of all layers fits.
SMALL_RINGS = {"path": "staged", "checksum": True, "staging_send": 1280, "staging_recv": 2560}
LANES: dict[str, tuple[tuple[str, ...], bool, dict[str, Any]]] = {  # prefixes of the lane; adopted; options
    "view": (("view",), True, {}),
    "view-own-memory": (("view",), False, {}),
    "put": (("cuda_ipc/",), True, {"path": "slices"}),
    "staged": (("view", "cuda_ipc/"), True, SMALL_RINGS),
}


@needs_gpus(1)
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
@pytest.mark.parametrize("lane", LANES)
def test_state_of_layout_over_lane(setting: Setting, lane: str, gpu_ranks: Callable[[int], Ranks]) -> None:
    prefixes, adopt, options = LANES[lane]
    seed = secrets.randbits(60)
    print(f"seed {seed}")  # shown when the test fails
    function = functools.partial(requests, adopt=adopt, ways=list(WAYS), device="cuda", **options)
    found = gpu_ranks(4).run(function, setting, seed)
    assert all(found[writer] for writer in setting.writers)
    for lanes in found:
        assert all(name.startswith(prefixes) for name in lanes), f"{lanes}, expected {prefixes}"


@needs_gpus(1)
@pytest.mark.parametrize("setting", state_loop.SETTINGS, ids=lambda setting: setting.name)
def test_resident_loops_copy_states(setting: Setting, gpu_ranks: Callable[[int], Ranks]) -> None:
    seed = secrets.randbits(60)
    print(f"seed {seed}")  # shown when the test fails
    found = gpu_ranks(4).run(functools.partial(state_loop.requests, device="cuda"), setting, seed, {})
    assert {path for writer in setting.writers for path in found[writer]} == {"direct"}
