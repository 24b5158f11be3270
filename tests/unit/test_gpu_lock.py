"""The lock by which GPU tests of several pytest workers keep out of each other's way."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path

from tests.helpers.gpu_lock import gpus


def test_many_share_one_is_alone_and_is_not_overtaken(tmp_path: Path) -> None:
    log: list[str] = []
    first = ExitStack()
    first.enter_context(gpus(alone=False, folder=tmp_path))
    with gpus(alone=False, folder=tmp_path):
        log.append("two at once")

    def run(name: str, *, alone: bool) -> threading.Thread:
        def body() -> None:
            with gpus(alone=alone, folder=tmp_path):
                log.append(name)

        thread = threading.Thread(target=body)
        thread.start()
        return thread

    alone = run("alone", alone=True)
    alone.join(0.2)
    later = run("later", alone=False)
    later.join(0.2)
    assert log == ["two at once"], "the one that came later has overtaken the one that waits to be alone"
    first.close()
    alone.join(10)
    later.join(10)
    assert log == ["two at once", "alone", "later"]
