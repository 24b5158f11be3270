"""Measuring what puts cost: over a channel whose costs are known, on a clock that it moves."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchkv.engine.joining import probe
from torchkv.errors import KVError, PeerLost
from torchkv.transfer.path_cost import GPU_PACK_SECONDS
from torchkv.transport import Batch

MIB = 1 << 20
TICK = 20e-6  # of a look at the transport


class Operation:
    def __init__(self, until: float, clock: Clock, error: KVError | None) -> None:
        self.until = until
        self.clock = clock
        self.error = error
        self.cancelled = False

    @property
    def done(self) -> bool:
        return self.clock.now >= self.until

    def cancel(self) -> None:
        self.cancelled = True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


class FakeChannel:
    """Takes ``latency`` for each flush, ``descriptor`` for each put and ``byte`` for each byte, in seconds."""

    def __init__(self, clock: Clock, *, descriptor: float, byte: float, latency: float) -> None:
        self.clock = clock
        self.costs = descriptor, byte
        self.latency = latency
        self.error: KVError | None = None
        self.hiccups: list[float] = []  # that come on top, of one put each
        self.batches: list[Batch] = []
        self.puts: list[Operation] = []

    def put(self, batch: Batch) -> Operation:
        self.batches.append(batch)
        descriptor, byte = self.costs
        took = len(batch) * descriptor + batch.nbytes * byte + (self.hiccups.pop(0) if self.hiccups else 0.0)
        self.puts.append(Operation(self.clock.now + took, self.clock, self.error))
        return self.puts[-1]

    def flush(self) -> Operation:
        return Operation(self.puts[-1].until + self.latency, self.clock, None)

    def progress(self) -> bool:
        self.clock.now += TICK
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(probe, "time", made)
    monkeypatch.setattr(probe, "_host_pack_seconds", lambda: 7e-11)
    return made


def run(channel: FakeChannel, device: str = "cpu") -> tuple[Any, list[float]]:
    """The route afterwards, and how long each step took."""
    connection: Any = SimpleNamespace(rank=1, name="rank 1", channel=channel, costs=None)
    source: Any = SimpleNamespace(index=3, nbytes=4 * MIB, device=torch.device(device))
    steps: Iterator[None] = probe.calibration(connection, source, 5, channel.progress)
    took = []
    ended = False
    while not ended:
        began = channel.clock.now
        ended = next(steps, channel) is channel
        took.append(channel.clock.now - began)
        channel.clock.now += 50e-6  # the thread's other work
    return connection, took


# In the order of TCP, shared memory, CUDA IPC.
@pytest.mark.parametrize(("descriptor", "byte"), [(8e-6, 1 / 3e9), (0.33e-6, 1 / 8e9), (4.1e-6, 1 / 390e9)])
def test_costs_are_told_apart(descriptor: float, byte: float, clock: Clock) -> None:
    channel = FakeChannel(clock, descriptor=descriptor, byte=byte, latency=150e-6)
    channel.hiccups = [0.0, 0.004, 0.002, 0.005]  # the best of several rounds counts
    connection, _ = run(channel)
    assert connection.costs.descriptor == pytest.approx(descriptor, rel=0.15, abs=2 * TICK / probe.MANY)
    assert connection.costs.byte == pytest.approx(byte, rel=0.15, abs=2 * TICK / (4 * MIB))
    assert connection.costs.pack == 7e-11


def test_what_is_put_stays_inside_the_scratch_memory_and_apart(clock: Clock) -> None:
    channel = FakeChannel(clock, descriptor=1e-6, byte=1 / 3e9, latency=1e-4)
    run(channel)
    assert {len(batch) for batch in channel.batches} == {1, probe.MANY}
    assert {batch.nbytes for batch in channel.batches} == {512, 512 * probe.MANY, 4 * MIB}
    for batch in channel.batches:
        assert set(batch.local_region) == {3}
        assert set(batch.remote_region) == {5}
        for offset in (batch.local_offset, batch.remote_offset):
            assert int((offset + batch.length).max()) <= 4 * MIB
            assert all(offset[1:] > offset[:-1] + batch.length[:-1])


def test_no_step_is_long(clock: Clock) -> None:
    """A slow link: the whole scratch memory takes 0.4 s, and there are two rounds."""
    channel = FakeChannel(clock, descriptor=1e-6, byte=1e-7, latency=1e-4)
    connection, took = run(channel)
    assert max(took) <= 2 * (probe.SPIN + 3 * TICK)  # the end of one put, and the next
    assert len(channel.batches) == 1 + 2 * 3
    assert connection.costs.byte == pytest.approx(1e-7, rel=0.05)


def test_one_bad_round_does_not_count(clock: Clock) -> None:
    """It is longer than what all rounds together should take."""
    channel = FakeChannel(clock, descriptor=8e-6, byte=1 / 3e9, latency=1e-4)
    channel.hiccups = [0.0, 0.03, 0.05, 0.04]
    connection, _ = run(channel)
    assert connection.costs.descriptor == pytest.approx(8e-6, rel=0.15)
    assert connection.costs.byte == pytest.approx(1 / 3e9, rel=0.15)


def test_a_link_that_stands_still_in_the_first_round_is_not_taken_for_a_slow_one(clock: Clock) -> None:
    """TCP may do so until the peer's kernel acknowledges: for longer than a slow link is given."""
    channel = FakeChannel(clock, descriptor=3e-6, byte=1 / 3e9, latency=1e-4)
    channel.hiccups = [0.0, 0.0, 0.0, probe.PATIENCE]
    connection, _ = run(channel)
    assert connection.costs.descriptor == pytest.approx(3e-6, rel=0.15)
    assert connection.costs.byte == pytest.approx(1 / 3e9, rel=0.15)


def test_a_disturbed_measurement_never_makes_costs_of_nothing(clock: Clock) -> None:
    channel = FakeChannel(clock, descriptor=0.0, byte=0.0, latency=1e-4)
    channel.hiccups = [0.0] + [0.01, 0.0, 0.0] * probe.ROUNDS
    connection, _ = run(channel)
    assert connection.costs.descriptor == probe.LEAST_PUT
    assert connection.costs.byte == probe.LEAST_BYTE


def test_gpus_pack_as_fast_as_was_measured_once(clock: Clock) -> None:
    connection, _ = run(FakeChannel(clock, descriptor=1e-6, byte=1e-10, latency=1e-4), device="cuda")
    assert connection.costs.pack == GPU_PACK_SECONDS


def test_a_broken_channel_leaves_costs_to_be_assumed(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    channel = FakeChannel(clock, descriptor=1e-6, byte=1e-9, latency=1e-4)
    channel.error = PeerLost("the peer has reset the connection")
    with caplog.at_level(logging.WARNING):
        connection, _ = run(channel)
    assert connection.costs is None
    assert "rank 1" in caplog.text
    assert "reset" in caplog.text


def test_a_peer_that_takes_nothing_is_not_waited_for(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    channel = FakeChannel(clock, descriptor=1e6, byte=0.0, latency=0.0)
    began = clock.now
    with caplog.at_level(logging.WARNING):
        connection, _ = run(channel)
    assert connection.costs is None
    assert clock.now - began < probe.GIVE_UP + 0.01
    assert [put.cancelled for put in channel.puts] == [True]
    assert "more than 2 s" in caplog.text


def test_gathering_on_this_host_costs_something() -> None:
    assert 1e-12 < probe._host_pack_seconds() < 1e-6
