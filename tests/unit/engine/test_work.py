"""KVWork by itself: waiting, errors, and what a wait that runs out says about the pages."""

from __future__ import annotations

import copy
import pickle

import pytest

from torchkv.engine.work import KVWork
from torchkv.errors import KVError, TransferCancelled, TransferTimeout


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
