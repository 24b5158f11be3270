"""Fixtures of the contract suite: every test runs on every lane of every installed transport."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from contract_world import World, device_worlds, worlds_of

from torchkv.transport import ENTRY_POINT_GROUP

# By name and not through installed_transports(): a backend that does not load must fail tests, not collection.
_NAMES = sorted(entry.name for entry in entry_points(group=ENTRY_POINT_GROUP))
_WORLDS = [pytest.param(world) for name in _NAMES for world in worlds_of(name)]
_WORLDS += [pytest.param(world, marks=pytest.mark.gpu) for world in device_worlds() if "ucx" in _NAMES]


@pytest.fixture(scope="session", params=_WORLDS, ids=lambda world: world.lane)
def lane(request: pytest.FixtureRequest) -> Iterator[World]:
    """One lane; its processes live as long as the session."""
    world: World = request.param
    yield world
    world.stop()


@pytest.fixture
def world(lane: World) -> Iterator[World]:
    """One lane, with no transport open before and after the test."""
    yield lane
    lane.close_transports()


@pytest.fixture
def processes(world: World) -> World:
    """A lane whose ends are processes, so that one can be killed."""
    if world.in_process:
        pytest.skip(f"{world.lane}: both ends live in this process, so none can be killed")
    return world
