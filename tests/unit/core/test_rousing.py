"""When the resident loop's thread is awake: a caller says that something comes for it soon."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from tests.helpers.waiting import until
from torchkv.bench.scale.loops import Pair
from torchkv.core import steering
from torchkv.core.loop.mailbox import ASLEEP
from torchkv.core.runner import Runner
from torchkv.host.atomics import load
from torchkv.host.jit import compiled_with_gil

LONG = 60_000_000_000  # nanoseconds


@compiled_with_gil
def at(address: int) -> int:
    return load(address)


@pytest.fixture
def runner() -> Iterator[Runner]:
    """One whose loop falls asleep at once."""
    pair, fd = Pair(), os.eventfd(0, os.EFD_NONBLOCK)
    runner = pair.writer.runner
    runner.world["spin"] = 0
    runner.start(fd, np.zeros(1, dtype=np.int64))
    until(lambda: at(runner.world["bell"]) == ASLEEP, "it sleeps")
    yield runner
    runner.stop()
    os.close(fd)


def test_a_loop_that_sleeps_is_woken_and_spins(runner: Runner) -> None:
    runner.world["spin"] = LONG
    for _ in range(2):  # the second time it is awake already
        steering.rouse(runner.address)
        until(lambda: runner.world["roused"] == 0, "it is roused")
        assert at(runner.world["bell"]) == 0


def test_where_cores_are_few_nobody_is_woken(runner: Runner) -> None:
    steering.rouse(runner.address)
    assert runner.world["roused"] == 0
    until(lambda: at(runner.world["bell"]) == ASLEEP, "it sleeps")  # it looks up now and then by itself
