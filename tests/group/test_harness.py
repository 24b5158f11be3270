"""The harness itself: a rank that raises, hangs or dies undeclared fails the test, with what is needed to see why."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import pytest

from tests.helpers.harness import RankFailed, Ranks, ask
from torchkv.testing.processes import PRELOADED, Worker


@pytest.fixture
def bare() -> Iterator[Ranks]:
    """Two ranks without any group, which start at once."""
    ranks = Ranks(2, world=False)
    yield ranks
    ranks.close()


def square(number: int) -> int:
    return number * number


def preloaded() -> list[str]:
    return [name for name in PRELOADED if name not in sys.modules]


def wait_for_ever() -> None:
    ask("waiting")


def die(code: int) -> None:
    os._exit(code)


def raise_it() -> None:
    raise ValueError("the reason")


def test_values_come_back_in_rank_order(bare: Ranks) -> None:
    assert bare.run(square, 7) == [49, 49]
    assert bare.run(square, 3, ranks=[1]) == [9]


def test_the_server_has_imported_all_it_was_told_to(bare: Ranks) -> None:
    """It skips without a word what it does not find; then each rank would compile everything by itself."""
    assert PRELOADED[-1] == "tests.helpers.preload"  # which no test imports
    assert bare.run(preloaded) == [[], []]


def test_an_exception_comes_with_its_traceback(bare: Ranks) -> None:
    with pytest.raises(RankFailed, match=r"rank \d raised:\n(.*\n)*.*raise_it(.*\n)*ValueError: the reason"):
        bare.run(raise_it)
    with pytest.raises(AssertionError, match="earlier failure"):
        bare.run(square, 1)


def test_an_exception_comes_with_what_the_others_do(bare: Ranks) -> None:
    """What a rank waits for in vain is another's to do."""
    bare.start(wait_for_ever, ranks=[1])
    assert bare.hear(1) == "waiting"
    with pytest.raises(
        RankFailed, match=r"rank 0 raised:\n(.*\n)*ValueError: the reason(.*\n)*rank 1(.*\n)*.*wait_for_ever"
    ):
        bare.run(raise_it, ranks=[0])


def say_nothing(pipe: Connection) -> None:
    pipe.close()


def test_a_process_that_has_just_ended_takes_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel forgets a process that its parent, the server, has waited for; its exit code comes a moment later."""
    worker = Worker(say_nothing)
    while Path(f"/proc/{worker.pid}").exists():
        time.sleep(0.001)
    with monkeypatch.context() as patch:
        patch.setattr(Worker, "exitcode", None)
        assert not worker.signal(signal.SIGKILL)
        assert worker.stacks() == ""
    worker.close()


def test_a_hang_comes_with_the_stacks(bare: Ranks) -> None:
    bare.start(wait_for_ever, ranks=[1])
    assert bare.hear(1) == "waiting"
    with pytest.raises(RankFailed, match=r"ranks \[1\] did not answer(.*\n)*.*wait_for_ever"):
        bare.join([1], deadline=0.5)


def test_an_interrupt_ends_the_ranks(bare: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pytest-timeout does it: what the ranks answer later must not be taken for the value of another call."""

    class Interrupt(BaseException):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupt("time is up")

    bare.start(square, 3)
    with monkeypatch.context() as patch:
        patch.setattr(Ranks, "_await", interrupt)
        with pytest.raises(Interrupt):
            bare.join([0, 1])
    with pytest.raises(AssertionError, match="earlier failure: Interrupt: time is up"):
        bare.run(square, 4)


def test_an_undeclared_kill_fails_the_call(bare: Ranks) -> None:
    bare.start(wait_for_ever, ranks=[0])
    bare.hear(0)
    bare.signal(0, signal.SIGKILL)
    with pytest.raises(RankFailed, match=r"rank 0 died with exit code -9"):
        bare.join([0])


def test_an_exit_in_the_middle_of_a_call_fails_it(bare: Ranks) -> None:
    with pytest.raises(RankFailed, match=r"rank \d died with exit code 3"):
        bare.run(die, 3)


def crash() -> None:
    cast(Any, faulthandler)._sigsegv()


def test_a_crash_shows_where(bare: Ranks) -> None:
    with pytest.raises(RankFailed, match=r"died with exit code -11\n(.*\n)*.*Segmentation fault(.*\n)*.*in crash"):
        bare.run(crash)


def test_a_death_between_calls_is_found_at_the_end() -> None:
    ranks = Ranks(2, world=False)
    assert ranks.run(square, 2) == [4, 4]
    ranks.signal(1, signal.SIGTERM)
    with pytest.raises(RankFailed, match=r"exit codes \[0, -15\]"):
        ranks.close()


def test_a_declared_kill_is_no_failure(bare: Ranks) -> None:
    bare.kill(1)
    assert bare.run(square, 5) == [25]
