"""Callers that run the resident loop in its thread's place, on hosts of few cores."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest

from tests.helpers.waiting import until
from torchkv.bench.scale.loops import Pair
from torchkv.core import steering
from torchkv.core.core import Core
from torchkv.core.loop.codes import RECEIVED, SENT
from torchkv.core.loop.mailbox import ASLEEP, ATTENDED
from torchkv.core.runner import Runner
from torchkv.core.thread import attend
from torchkv.host.atomics import load, store
from torchkv.host.jit import compiled_with_gil, warm_up

A_WHILE = 0.001  # seconds; longer than a caller runs a loop that has nothing to do


@compiled_with_gil
def at(address: int) -> int:
    return load(address)


@compiled_with_gil
def put(address: int, value: int) -> None:
    store(address, value)


@contextmanager
def running(pair: Pair) -> Iterator[Pair]:
    """Both loops sleep, as on a host of few cores."""
    warm_up()  # not while they are waited for
    fds = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2)]
    runners = [pair.writer.runner, pair.reader.runner]
    for runner, fd in zip(runners, fds, strict=True):
        runner.world["spin"] = 0
        runner.start(fd, np.zeros(1, dtype=np.int64))
    for runner in runners:
        until(partial(asleep, runner), "it sleeps")
    try:
        yield pair
    finally:
        for runner, fd in zip(runners, fds, strict=True):
            runner.stop()
            os.close(fd)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with running(Pair()) as made:
        yield made


def asleep(runner: Runner) -> bool:
    return at(runner.world["bell"]) == ASLEEP


def test_nobody_attends_where_the_loop_spins_or_enqueues_kernels(pair: Pair) -> None:
    runner = pair.reader.runner
    before = runner.world["steps"]
    for field in ("spin", "word"):
        runner.world[field] = 1
        for _ in range(50):
            assert not attend(runner.memory, pair.reader.news.count, int(A_WHILE * 1e9))
        runner.world[field] = 0
    assert runner.world["steps"] - before < 50


def steps_of(core: Core, calls: int) -> int:
    """Of callers who wait in vain. The loop's thread looks up now and then, too."""
    world = core.runner.world
    before = world["steps"]
    for _ in range(calls):
        wait(core)
        assert at(world["bell"]) in (0, ASLEEP)
    return int(world["steps"] - before)


def wait(core: Core) -> None:
    core.news.wait(core.news.count, A_WHILE)


def test_a_caller_runs_the_loop_and_leaves_it_asleep(pair: Pair) -> None:
    assert steps_of(pair.reader, 50) >= 50  # nothing comes: each leaves soon


def test_a_second_caller_leaves_it_to_the_first(pair: Pair) -> None:
    runner = pair.reader.runner
    put(runner.world["bell"], ATTENDED)
    before = runner.world["steps"]
    for _ in range(50):
        wait(pair.reader)
    assert (runner.world["steps"] - before < 50, at(runner.world["bell"])) == (True, ATTENDED)
    put(runner.world["bell"], ASLEEP)


def test_the_bell_wakes_nobody_meanwhile_and_the_thread_afterwards(pair: Pair) -> None:
    runner = pair.reader.runner
    put(runner.world["bell"], ATTENDED)
    steering.wake_loop(runner.address)
    assert at(runner.world["bell"]) == ATTENDED
    steps = runner.world["steps"]
    put(runner.world["bell"], ASLEEP)
    steering.wake_loop(runner.address)
    until(lambda: runner.world["steps"] > steps, "it steps")


def test_a_loop_that_is_told_to_stop_is_left_to_its_thread_to_end(pair: Pair) -> None:
    runner = pair.reader.runner
    calls = []

    def attend() -> None:
        while runner.running:
            wait(pair.reader)
            calls.append(runner.world["steps"])

    caller = threading.Thread(target=attend)
    caller.start()
    until(lambda: len(calls) > 2, "it attends again and again")
    runner.stop()
    caller.join(30)
    assert not caller.is_alive()


def test_whoever_wants_it_to_stand_still_gets_it(pair: Pair) -> None:
    runner, stop = pair.reader.runner, threading.Event()

    def attend() -> None:
        while not stop.is_set():
            wait(pair.reader)

    caller = threading.Thread(target=attend)
    caller.start()
    for _ in range(200):
        with runner.standing_still():
            steps = runner.world["steps"]
            time.sleep(0.0001)
            assert runner.world["steps"] == steps
    stop.set()
    caller.join(30)
    assert not caller.is_alive()


def test_a_loop_that_sleeps_is_not_woken_for_a_grant(pair: Pair) -> None:
    """The call that posts it has it told. The writer's loop, which has to bind it, is woken."""
    reader, writer = pair.reader.runner, pair.writer.runner
    send = pair.wait()
    flow = pair.receive(1)
    bound = writer.world["event_tail"]
    pair.grant(flow, [3])
    assert asleep(reader)
    until(lambda: writer.world["event_tail"] > bound, "an event")
    assert pair.writer.sends.bound(send)[3].tolist() == [3]


def test_copies_are_begun_by_the_caller_and_ended_by_the_thread() -> None:
    """The last byte comes, too."""
    layers, pages = 8, 2048  # of 256 bytes: the caller does 64 KiB
    with running(Pair(layers=layers, pages=pages, turn=1 << 18)) as pair:
        flow = pair.receive(pages)
        send = pair.send(flow, range(pages))
        until(lambda: asleep(pair.writer.runner), "the writer sleeps")
        pair.start(send, range(pages))
        until(lambda: bool((pair.src == pair.dst).all()), "the bytes are there")


def wait_for(core: Core, kind: int, index: int) -> None:
    """As a caller that waits for an event."""
    end = time.monotonic() + 60
    while True:
        seen = core.news.count
        for notice in core.events.take():
            if notice.kind == kind and index in (notice.index, *notice.words):
                return
        assert time.monotonic() < end, "it does not come"
        core.news.wait(seen, 1.0, listens=True)


def test_requests_of_callers_that_come_and_go(pair: Pair) -> None:
    """Two threads, each at its own loop, wait now and then at once, or a little later: nothing is missed."""
    requests, problems = 2000, []
    waits = threading.Semaphore(0)  # the loop's for a grant; Python would take one that comes before

    def read() -> None:
        dice = random.Random(1)
        for number in range(requests):
            flow = pair.receive(1, generation=number + 1)
            waits.acquire()
            pair.grant(flow, [number % 8], name=f"r{number}")
            pause(dice)
            wait_for(pair.reader, RECEIVED, flow)
            if not (pair.dst[:, number % 8] == pair.src[:, 7 - number % 8]).all():
                problems.append(number)
            pair.dst[:, number % 8] = 0xAB
            pair.reader.receives.close(flow)
            pair.reader.receives.free(flow)

    def write() -> None:
        dice = random.Random(2)
        for number in range(requests):
            send = pair.wait(name=f"r{number}")
            while pair.writer.has_commands:
                time.sleep(0)
            waits.release()
            pause(dice)
            pair.start(send, [7 - number % 8])
            pause(dice)
            pair.writer.sends.finish(send, 1, b"")
            wait_for(pair.writer, SENT, send)
            pair.writer.sends.end(send)

    threads = [threading.Thread(target=side) for side in (read, write)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def pause(dice: random.Random) -> None:
    if dice.random() < 0.5:
        time.sleep(dice.random() * 0.0003)
