"""`StageUnpacker`: stages of failed requests are not unpacked, and each job is reported exactly once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import pytest

from torchkv.errors import ChecksumMismatch, KVError
from torchkv.host.copy_loops import STEP_BYTES
from torchkv.protocol.actions import Scatter
from torchkv.protocol.receiving.stages import Stages
from torchkv.staging.unpacker import MAX_ACTIVE, MAX_OF_ONE_WRITER, StageUnpacker


@dataclass(eq=False)
class Job:
    """The part of a `Scatter` that the unpacker reads."""

    name: str
    src: int
    stopped: bool = False


class World:
    """The receiver and the packer of a `StageUnpacker`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.begun: list[str] = []
        self.over: list[str] = []
        self.reports: list[tuple[str, KVError | None]] = []
        self.steps: dict[str, Iterator[int]] = {}
        self.asynchronous = False  # as the packer: whether a GPU does the work
        self.told: list[int] = []  # how many reports there were when somebody was to be told
        self.unpacker = StageUnpacker(
            stages=cast(Stages, self),
            lock=self.lock,
            packer=cast(Any, self),
            send_stage_messages=self._send_stage_messages,
        )

    def _send_stage_messages(self) -> None:
        assert not self.lock.locked()
        self.told.append(len(self.reports))

    def scattered(self, job: Job, error: KVError | None, now: float) -> None:
        assert self.lock.locked()
        self.reports.append((job.name, error))

    def scatter(self, job: Job) -> Iterator[int]:
        self.begun.append(job.name)
        yield from self.steps[job.name]
        self.over.append(job.name)

    def start(self, name: str, *steps: int | KVError, src: int = 0) -> Job:
        def run() -> Iterator[int]:
            for step in steps:
                if isinstance(step, KVError):
                    raise step
                yield step

        self.steps[name] = run()
        job = Job(name, src)
        self.unpacker.start(cast(Scatter, job))
        return job

    def run(self) -> None:
        for _ in range(100):
            if not self.unpacker.busy:
                return
            self.unpacker.advance(1.0)
        pytest.fail(f"still busy with {set(self.steps) - {job for job, _ in self.reports}}")


def test_every_job_is_reported_once_and_only_when_nothing_of_it_writes_any_more() -> None:
    world = World()
    for number in range(10):
        world.start(f"job {number}", 0, 10, 0, 5)
    while world.unpacker.busy:
        assert world.unpacker.advance(1.0) in (True, False)
        assert {job for job, _ in world.reports} == set(world.over)
    assert sorted(job for job, _ in world.reports) == [f"job {number}" for number in range(10)]
    assert all(error is None for _, error in world.reports)
    assert world.unpacker.advance(1.0) is False


def test_stages_of_a_failed_request_are_reported_but_not_unpacked() -> None:
    world = World()
    for name in "abcd":
        world.start(name, 1).stopped = name in "bd"
    world.run()
    assert world.begun == ["a", "c"]
    assert sorted(world.reports) == [(name, None) for name in "abcd"]


def test_a_request_that_fails_while_its_job_waits_is_not_begun() -> None:
    world = World()
    for number in range(MAX_OF_ONE_WRITER):
        world.start(f"busy {number}", *[0] * 5)
    late = world.start("late", 1)
    world.unpacker.advance(1.0)
    assert len(world.begun) == MAX_OF_ONE_WRITER
    late.stopped = True
    world.unpacker.advance(1.0)
    assert world.reports == [("late", None)], "a stopped job does not wait for its turn"
    world.run()
    assert "late" not in world.begun


def test_a_writer_whose_stages_are_never_written_holds_up_no_other() -> None:
    world = World()
    hung = [world.start(f"hung {number}", *[0] * 90) for number in range(MAX_OF_ONE_WRITER + 3)]
    others = [world.start(f"of {src}, {number}", 0, 1, src=src) for number in range(3) for src in range(1, 9)]
    for _ in range(20):
        world.unpacker.advance(1.0)
        assert len(world.unpacker._active) <= MAX_ACTIVE
    assert world.begun[:MAX_OF_ONE_WRITER] == [job.name for job in hung[:MAX_OF_ONE_WRITER]]
    assert {name for name, _ in world.reports} == {job.name for job in others}
    firsts = [name for name in world.begun if name.startswith("of")][: MAX_ACTIVE - MAX_OF_ONE_WRITER]
    assert firsts == [job.name for job in others[: MAX_ACTIVE - MAX_OF_ONE_WRITER]], "in their order"


def test_a_job_under_way_runs_to_its_end_after_its_request_has_failed() -> None:
    world = World()
    job = world.start("a", 0, 1, 0, 1)
    world.unpacker.advance(1.0)
    assert world.begun == ["a"]
    job.stopped = True
    assert world.reports == []
    world.run()
    assert world.over == ["a"]
    assert world.reports == [("a", None)]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_with_an_asynchronous_packer_messages_about_each_stage_are_sent_at_once(asynchronous: bool) -> None:
    world = World()
    world.asynchronous = asynchronous
    for job in "abc":
        world.start(job, 0, 1)
    world.run()
    assert world.told == ([1, 2, 3] if asynchronous else [])


def test_an_error_of_one_job_does_not_affect_others() -> None:
    world = World()
    error = ChecksumMismatch("wrong")
    world.start("bad", 1, error)
    world.start("good", 1, 1)
    world.run()
    assert dict(world.reports) == {"bad": error, "good": None}


def test_a_job_that_waits_for_the_gpu_does_not_hold_up_the_others() -> None:
    world = World()
    world.start("waits", *[0] * 50)
    world.start("works", 1, 1)
    for _ in range(8):
        world.unpacker.advance(1.0)
    assert world.reports == [("works", None)]


def test_a_step_is_bounded() -> None:
    world = World()
    world.start("large", *[STEP_BYTES] * 3)
    world.start("other", *[STEP_BYTES] * 3)
    world.unpacker.advance(1.0)
    assert world.begun == ["large"]
    assert world.reports == []
