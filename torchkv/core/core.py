"""The resident loop's face to Python."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from torchkv.core import posting, steering
from torchkv.core.device import NO_GATE, LoopDevice
from torchkv.core.events import Events
from torchkv.core.led_rounds import LedRounds
from torchkv.core.loop import copying, grants, loop, network
from torchkv.core.loop.codes import ALONE, CUT, NOBODY
from torchkv.core.loop.events import emit
from torchkv.core.loop.state.peers import Peer
from torchkv.core.loop.state.world import word_at
from torchkv.core.news import News
from torchkv.core.operations import Operations
from torchkv.core.peers import LoopPeers, NetworkLane
from torchkv.core.receives import Receives, Source
from torchkv.core.runner import Runner
from torchkv.core.sends import Sends
from torchkv.core.thread import attend, end_turn, run, take_turn
from torchkv.core.way import Way
from torchkv.host.jit import at_register

__all__ = ["Core"]

_COMMAND_TAIL, _COMMAND_HEAD, _BROKEN, _HEED, _EAGER = (
    word_at(name) // 8 for name in ("command_tail", "command_head", "broken", "heed", "eager")
)


class Core:
    """One rank's loop. What is not marked "any thread" is called under the engine's lock.

    device: the GPU that this rank's pages lie on, if they do. limits: see `Runner`. Raises
    ``TransportUnavailable`` where it cannot work. runner: its thread; before `Runner.start` there is none, and a test
    calls `Runner.step`. peers: how it reaches other loops. news: how callers wait. operations: its journal.
    events: what it tells. rounds: those that this rank leads. sends, receives: requests that this rank sends,
    and receives.
    """

    def __init__(self, rank: int, *, device: LoopDevice | None = None, **limits: int) -> None:
        self.rank = rank
        self.device = device
        self.runner = Runner(rank, device=device, **limits)
        self.peers = LoopPeers(rank, self.runner)
        self.news = News(self.runner)
        self.operations = Operations(self.runner)
        self.events = Events(self.runner, self.peers.ranks)
        self.rounds = LedRounds(self.runner, self.peers.slots)
        self.receives = Receives(self.runner, self.peers)
        self.sends = Sends(self.runner, self.peers, self.events, device)
        self.world = self.runner.world
        self._address = self.runner.address
        self._memory = self.runner.memory
        self._words = self.runner.words

    def close(self) -> None:
        """Ends the thread and unmaps the peers' mailboxes."""
        self.runner.stop()
        if self.device is not None:
            self.device.close(int(self._memory[0]["posted"]))
        self.peers.close()

    def rouse(self) -> None:
        """A command comes soon: the loop is to spin until it is there, where it ever spins. Any thread."""
        steering.rouse(self._address)

    @property
    def broken(self) -> bool:
        """Whether the GPU's driver has refused something, so that no kernel is launched any more."""
        return self.device is not None and self._words[_BROKEN] != 0

    @property
    def has_commands(self) -> bool:
        """Whether the loop has not taken all commands."""
        return bool(self._words[_COMMAND_TAIL] != self._words[_COMMAND_HEAD])

    def settle(self) -> bool:
        """Takes in all commands and all messages that have come. While the loop stands still.

        False if there are more: take `events`, and call it again.
        """
        return bool(loop.settle(self.world))

    def make_eager(self) -> None:
        """Python's thread is woken for every event from now on: somebody waits for more than a verdict. Any thread."""
        self._words[_EAGER] = 1

    def heed_grants(self, heeds: bool) -> None:
        """Whether Python's thread is woken for every grant that the loop does not bind, because requests wait there."""
        self._words[_HEED] = heeds
        if heeds and (self.events.pending or self.events.has_unclaimed):  # a grant among them did not wake it
            steering.wake_driver(self._address)

    @property
    def heeds_grants(self) -> bool:
        """See `heed_grants`."""
        return bool(self._words[_HEED])


@at_register
def warm_up() -> None:
    """Compiles the loop, or loads it from disk."""
    core = Core(0, copiers=1, recorded=1)
    flow = _send(core)
    _receive(core)
    index = core.rounds.open([(0, 1, 1, False)])
    assert index is not None
    core.sends.finish(1, -1, b"")
    with core.runner.standing_still():
        core.settle()
        loop.drop(core.world, flow)
        core.receives.untold(0)
        core.rounds.take_back(index)
        loop.drop_due_to(core.world, 0)
        lane = NetworkLane()
        peer = core._memory[0]["peers"][0]
        peer["memory"] = lane.memory.ctypes.data
        network.cut(core.world, cast(Peer, peer))
        grants.greet(core.world, 0)
        emit(core.world, CUT, 0, 0)
    core.runner.step()
    _wait(core)
    posting.hand_over(core._address, core.operations.of_op(0))
    steering.wake_copiers(core._address)
    steering.stop(core._address)
    run(cast(Any, core._memory))
    copying.run_copier(core.world, 0)


def _send(core: Core) -> int:
    """A flow."""
    sends, none = core.sends, np.zeros(2, dtype=np.int64)  # a plan without layers
    way = Way(0, core.peers.slots[0], geometry=none, src_page=1, dst_page=1, max_page=0)
    flow = sends.open(way, peer_flow=0, generation=0, pages=none)
    assert flow is not None
    sends.start_op(flow, none[:0], none, 0)
    sends.start_more(flow, none[:0], none, none.copy(), 1, 0, NO_GATE, checked=none)
    sends.remember(flow, none, none, 0, 0)
    sends.start_again(flow, none[:0], none, NO_GATE)
    verb = way, none[:0], none, none.copy(), 1, 0, NO_GATE, 0
    sends.meet(*verb, hashes=(0, 0), writers=0, serial=0, begun=0, prefixed=False)
    sends.bind(way, hashes=(0, 0), writers=0)
    sends.begin(*verb, peer_flow=0, generation=0, granted=none, slot=None, serial=0, begun=0)
    sends.wait_for_grant(way, hashes=(0, 0), writers=1)
    return flow


def _receive(core: Core) -> None:
    receives, none = core.receives, np.zeros(2, dtype=np.int64)
    receives.open(0, generation=0, num_tokens=1, page_size=1, leader=NOBODY, writers=[(0, 1, 0, 1)])
    receives.grant(0, b"", (0, 0), none, prefix_tokens=0, writers=0)
    receives.post(
        Source(slot=0, layers=1, states=0, page_size=1, writer_page=1, writers=0, network=False),
        generation=0,
        num_tokens=1,
        leader=ALONE,
        told=0,
        prefix_tokens=0,
        name=b"",
        hashes=(0, 0),
        pages=none,
        state_slot=None,
        serial=0,
    )


def _wait(core: Core) -> None:
    """All that threads do which wait for the loop, or drive it."""
    steering.wake_loop(core._address)
    steering.rouse(core._address)
    steering.wait_news(core._address, -1, 0)
    steering.spin_for_news(core._address, -1, 0)
    attend(cast(Any, core._memory), -1, 0)
    take_turn(core._address, 0)
    end_turn(core._address, 1)
    steering.wait_left(core._address)
    steering.wake_waiters(core._address)
    steering.wake_driver(core._address)
    held = np.zeros(1, dtype=np.int64)
    steering.try_hold(core._address, held.ctypes.data, 0)
    steering.let_go(core._address, held.ctypes.data)
