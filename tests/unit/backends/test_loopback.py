"""Loopback worlds do not reach each other, also if they were made from one seed, as in two processes."""

from __future__ import annotations

import pytest
from torchkv_loopback import LoopbackTransport
from torchkv_loopback.world import World

from torchkv.errors import TransportUnavailable


def test_worlds_of_one_seed_do_not_reach_each_other() -> None:
    here, there = LoopbackTransport(world=World(7)), LoopbackTransport(world=World(7))
    with pytest.raises(TransportUnavailable):
        here.connect(there.address(), [])
    same = LoopbackTransport(world=here._world)  # the control: within one world they do
    here.connect(same.address(), []).close()
