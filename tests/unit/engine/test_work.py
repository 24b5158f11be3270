"""KVWork by itself: waiting, errors, and what a wait that runs out says about the pages."""

from __future__ import annotations

import copy
import pickle
import threading
from datetime import timedelta

import pytest

from torchkv.engine.work import KVWork, settle_copied
from torchkv.errors import KVError, TransferCancelled, TransferTimeout
from torchkv.observe.recorder import FlightRecorder


def test_pages_of_a_request_that_goes_on_are_not_safe() -> None:
    work = KVWork("test")
    work._expect(1)
    with pytest.raises(TransferTimeout) as caught:
        work.wait(0.01)
    assert not caught.value.pages_safe
    work._settle(None)
    assert work.wait()
    assert caught.value.pages_safe  # evaluated when it is read


def test_waiting_again_raises_the_same_error_without_growing_it() -> None:
    work = KVWork("test")
    work._expect(1)
    work._settle(TransferCancelled("gone"))
    depths = []
    for _ in range(3):
        with pytest.raises(TransferCancelled, match="gone") as caught:
            work.wait()
        trace, depth = caught.value.__traceback__, 0
        while trace is not None:
            trace, depth = trace.tb_next, depth + 1
        depths.append(depth)
    assert len(set(depths)) == 1


@pytest.mark.parametrize("safe", [True, False])
def test_errors_survive_copying_and_pickling(safe: bool) -> None:
    error = TransferTimeout("late", pages_safe=lambda: safe)
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(other) is TransferTimeout
        assert isinstance(other, KVError)
        assert (str(other), other.retryable, other.pages_safe) == ("late", True, safe)


def test_a_work_without_a_deadline_of_its_own_has_a_limit() -> None:
    """A cancel ends with its writers, and one of them may hang."""
    work = KVWork("cancel('r')")
    work._expect(1)
    work._limit = 0.01
    with pytest.raises(TransferTimeout, match=r"cancel\('r'\).*goes on"):
        work.wait()
    work._settle(None)
    assert work.wait()


@pytest.mark.parametrize("passed", [-1.0, -1e-9, timedelta(seconds=-2), float("nan")], ids=str)
def test_a_deadline_that_has_passed_ends_a_wait_at_once(passed: float | timedelta) -> None:
    """What is left until a deadline may be less than nothing, and is not the same as no limit."""
    work = KVWork("recv_pages('r')", None, None, 1)
    for wait in (work.wait, work.wait_source):
        with pytest.raises(TransferTimeout, match="recv_pages"):
            wait(passed)
    work._settle(None)
    assert work.wait(passed)
    assert work.wait_source(passed)


def test_works_that_are_settled_together_end_as_each_by_itself_would() -> None:
    """Of two parts, of one whose other part has failed, without a byte, waited for, recorded, with a future."""
    together, alone = _works(), _works()
    recorder = FlightRecorder(8)
    for works in (together, alone):
        works[4]._recorder, works[4]._number = recorder, recorder.begin("send_layer", "r", 1, 0, 1, works[4]._began)
    future, waited = together[5].get_future(), threading.Thread(target=together[3].wait)
    waited.start()
    nbytes = [8, 16, 0, 24, 32, 40]
    completed = settle_copied(together, nbytes, "direct")
    for work, moved in zip(alone, nbytes, strict=True):
        if moved:
            work._account(moved, "direct")
        work._settle(None)
    waited.join()
    assert completed == [work for work in together if work.is_completed()] == together[1:]
    seen = [
        [(w.is_completed(), w.exception(), w.bytes, w.path, w._parts) for w in works] for works in (together, alone)
    ]
    assert [row[2:] for row in seen[0]] == [row[2:] for row in seen[1]]
    assert [str(row[1]) for row in seen[0]] == [str(row[1]) for row in seen[1]]
    first, second = recorder.entries()
    assert (
        (first.state, first.nbytes, first.path)
        == (second.state, second.nbytes, second.path)
        == ("completed", 32, "direct")
    )
    assert not future.done()  # its callbacks run where no lock is held
    together[5]._announce()
    assert future.done()


def _works() -> list[KVWork]:
    works = [KVWork(f"send_layer({number})") for number in range(6)]
    for work, parts in zip(works, (2, 2, 1, 1, 1, 1), strict=True):
        work._expect(parts)
    works[1]._account(4, "staged")
    works[1]._settle(TransferCancelled("gone"))
    return works
