"""Fixtures of the contract suite: every test runs on every lane of every installed transport."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points

import pytest
from contract_world import World, worlds_of

from torchkv.transport import ENTRY_POINT_GROUP

# By name and not through installed_transports(): a backend that does not load must fail tests, not collection.
_NAMES = sorted(entry.name for entry in entry_points(group=ENTRY_POINT_GROUP))
_WORLDS = [world for name in _NAMES for world in worlds_of(name)]


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
