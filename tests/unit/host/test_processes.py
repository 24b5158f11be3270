"""Watching processes: which have ended, and which cannot be watched from here."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from torchkv.host import processes
from torchkv.host.processes import (
    ProcessId,
    has_ended,
    is_ending,
    open_pidfd,
    process_ended,
    process_started,
    this_process,
    unwatch,
    watch_process,
)


def test_all_who_watch_a_process_share_a_file_descriptor() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        first, second = open_pidfd(child.pid), open_pidfd(child.pid)
        assert first == second
        unwatch(second)
        assert first in processes._holders
        assert not process_ended(first), "the first still holds it"
        unwatch(first)
        assert first not in processes._holders
        assert child.pid not in processes._shared
    finally:
        child.communicate(b"")


def test_a_pid_that_is_given_again_gets_its_own() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    before = open_pidfd(ended.pid)
    select.select([before], [], [], 10)
    after = open_pidfd(ended.pid)  # still a zombie; a process that got its pid would be found in the same way
    try:
        assert before != after
    finally:
        unwatch(before)
        unwatch(after)
        ended.wait()


@contextmanager
def watched(process: ProcessId) -> Iterator[int]:
    fd = watch_process(process)
    assert fd is not None
    try:
        yield fd
    finally:
        os.close(fd)


def test_a_living_process_has_not_ended_and_a_killed_one_has_also_for_pollers() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        them = msgspec.structs.replace(this_process(), pid=child.pid, started=process_started(child.pid))
        with watched(this_process()) as mine, watched(them) as theirs:
            assert not process_ended(theirs)
            assert has_ended(them) is False
            assert not is_ending(them)
            child.kill()
            assert select.select([mine, theirs], [], [], 10)[0] == [theirs]
            assert process_ended(theirs)
            assert has_ended(them) is True
            assert is_ending(them)
            assert not process_ended(mine)
    finally:
        child.kill()
        child.communicate()
    with watched(them) as late:
        assert process_ended(late), "its pid belongs to no process any more"


@pytest.mark.parametrize("later", [1, -1])
def test_a_pid_that_went_to_another_process_has_ended(later: int) -> None:
    me = this_process()
    with watched(msgspec.structs.replace(me, started=me.started + later)) as fd:
        assert process_ended(fd)


def test_of_a_process_on_another_host_nothing_is_known() -> None:
    me = this_process()
    assert watch_process(msgspec.structs.replace(me, host="another")) is None
    assert has_ended(msgspec.structs.replace(me, host="another")) is None
    assert not is_ending(msgspec.structs.replace(me, host="another"))
    assert watch_process(msgspec.structs.replace(me, host="another", pid=(1 << 31) - 1)) is None
