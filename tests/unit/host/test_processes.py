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

from torchkv.host.processes import (
    ProcessId,
    has_ended,
    process_ended,
    process_started,
    this_process,
    watch_process,
)


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
            child.kill()
            assert select.select([mine, theirs], [], [], 10)[0] == [theirs]
            assert process_ended(theirs)
            assert has_ended(them) is True
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
    assert watch_process(msgspec.structs.replace(me, host="another", pid=(1 << 31) - 1)) is None
