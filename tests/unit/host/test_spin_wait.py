"""`spin_wait.rest`, in which the progress thread waits: it ends for each of its reasons, and for no other.

Every test also shows that other threads run meanwhile: it is they that end the wait.
"""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from torchkv.host import spin_wait

LONG = 60.0  # seconds: a rest that takes so long has missed its reason to end
TOP = 1 << 32
SPINS = pytest.mark.parametrize("spin", [0.0, LONG], ids=["naps", "spins"])


class Rest:
    """A rest on a thread of its own."""

    def __init__(self, wake: Any, fds: Any = (), **operation: Any) -> None:
        self._thread = threading.Thread(
            target=lambda: spin_wait.rest(wake, fds, seconds=LONG, **operation), daemon=True
        )
        self._thread.start()

    def ends(self) -> bool:
        self._thread.join(LONG / 3)
        return not self._thread.is_alive()

    def goes_on(self) -> bool:
        self._thread.join(0.1)  # long enough for some rests to reach the stage of naps
        return self._thread.is_alive()


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    spin_wait.warm_up()


@pytest.fixture
def wake() -> Iterator[Any]:
    word = np.zeros(1, dtype=np.int64)
    yield word
    word[0] = 1  # no rest outlives its test


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


@SPINS
def test_a_store_to_the_wake_word_ends_it(spin: float, wake: Any) -> None:
    rest = Rest(wake, spin=spin)
    assert rest.goes_on()
    wake[0] = 1
    assert rest.ends()


@SPINS
def test_a_readable_file_descriptor_ends_it_whichever_it_is(spin: float, wake: Any, pipe: tuple[int, int]) -> None:
    silent = os.pipe()
    try:
        rest = Rest(wake, (silent[0], pipe[0]), spin=spin)
        assert rest.goes_on()
        os.write(pipe[1], b"x")
        assert rest.ends()
        assert Rest(wake, (silent[0], pipe[0])).ends(), "it is readable from the start"
        assert Rest(wake, (silent[0],)).goes_on()
        wake[0] = 1
    finally:
        for end in silent:
            os.close(end)


@pytest.mark.parametrize("value", [1, 5, 1 << 31, TOP - 1, 0])
def test_a_word_that_reaches_its_value_ends_it(value: int, wake: Any) -> None:
    words = np.zeros(8, dtype=np.uint32)
    words[[2, 6]] = (value - 1) % TOP
    words[3] = value  # a word that is not awaited
    rest = Rest(wake, words=words, awaited=[(2, value), (6, value)])
    assert rest.goes_on()
    words[6] = value
    assert rest.ends()


@pytest.mark.parametrize(
    ("word", "value", "reached"),
    [
        (7, 7, True),
        (8, 7, True),
        (6, 7, False),
        (0, TOP - 1, True),  # the word has wrapped around
        (TOP - 1, 0, False),
        ((1 << 31) - 1, 0, True),
        (1 << 31, 0, False),  # half the range ahead counts as behind
    ],
)
def test_words_are_compared_as_the_gpu_compares_them(word: int, value: int, reached: bool, wake: Any) -> None:
    rest = Rest(wake, words=np.array([word], dtype=np.uint32), awaited=[(0, value)])
    assert rest.ends() if reached else rest.goes_on()


def test_it_ends_when_its_time_is_up(wake: Any) -> None:
    done = threading.Event()

    def short() -> None:
        spin_wait.rest(wake, (), seconds=0.01, words=np.zeros(1, dtype=np.uint32), awaited=[(0, 1)])
        done.set()

    threading.Thread(target=short, daemon=True).start()
    assert done.wait(LONG / 3)


def test_it_tells_which_file_descriptors_are_readable(wake: Any) -> None:
    pipes = [os.pipe() for _ in range(4)]
    fds = tuple(ends[0] for ends in pipes)
    try:
        assert spin_wait.rest(wake, fds, seconds=0) == 0
        os.write(pipes[1][1], b"x")
        assert spin_wait.rest(wake, fds, seconds=LONG) == 0b0010
        os.write(pipes[3][1], b"x")
        assert spin_wait.rest(wake, fds, seconds=LONG) == 0b1010
        wake[0] = 1
        assert spin_wait.rest(wake, fds, seconds=LONG) == 0b1010, "frequent wake-ups must not hide them"
        os.close(pipes[3][1])
        os.read(pipes[1][0], 1)
        assert spin_wait.rest(wake, fds, seconds=0) == 0b1000, "so is a pipe at its end"
    finally:
        for fd in {fd for ends in pipes for fd in ends} - {pipes[3][1]}:
            os.close(fd)


def sleeps(wake: Any, spin: float) -> int:
    """How often the calling thread gave up its core voluntarily."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    spin_wait.rest(wake, (), seconds=0.05, spin=spin)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before


def test_it_sleeps_unless_it_is_to_spin(wake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spin_wait, "CROWDED", int(LONG * 1e9))
    monkeypatch.setattr(spin_wait, "SPIN", 0)
    assert sleeps(wake, 0.0) > 20
    assert sleeps(wake, LONG) < 20


def test_it_stops_spinning_where_another_thread_takes_its_core(wake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spin_wait, "CROWDED", -1)  # as if another thread took the core each time it is offered
    assert sleeps(wake, LONG) > 20


def test_naps_end_in_time() -> None:
    """Checks the timer slack that the kernel has for the thread, in nanoseconds."""
    slack: list[int] = []

    def look() -> None:
        spin_wait.wake_on_time()
        slack.append(spin_wait._libc.prctl(30, 0, 0, 0, 0))  # PR_GET_TIMERSLACK

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert slack == [spin_wait._TIMER_SLACK]
