"""Who waits for a work is not woken for what only others wait for."""

from __future__ import annotations

import threading
import time
from typing import cast

from torchkv.core.news import News
from torchkv.engine.callers import Callers


class Counted:
    """News of a loop that never has any but those that are added."""

    def __init__(self) -> None:
        self.count = 0
        self.listened = threading.Event()

    def add(self) -> None:
        self.count += 1

    def wait(self, seen: int, seconds: float, *, listens: bool) -> None:
        assert listens
        self.listened.set()
        until = time.monotonic() + seconds
        while self.count == seen and time.monotonic() < until:
            time.sleep(0.001)


def test_a_grant_or_a_layer_is_no_news_unless_somebody_waits_for_one() -> None:
    lock, news = threading.Lock(), Counted()
    callers = Callers(lock, cast(News, news))
    with lock:
        callers.notify()
    assert news.count == 0

    def wait() -> None:
        with lock:
            assert callers.wait_change(0, 60)

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert news.listened.wait(60)
    with lock:
        callers.notify()
    waiter.join(60)
    assert not waiter.is_alive()
    assert news.count == 1
    with lock:
        callers.notify()
    assert news.count == 1
