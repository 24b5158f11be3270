"""Jobs of `broken_loops`, each in a process of its own, in plain Python.

numba reads what makes its functions plain ones when it is imported, and imports take three seconds. So one process per
pytest worker imports everything, and forks itself for each job: ``python -m tests.helpers.simulation.plain_python``.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

__all__ = ["plain"]

ROOT = Path(__file__).parents[3]


def plain(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `broken_loops.main` with these arguments."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]
        server.stdin.write(json.dumps([*map(str, outputs), *arguments]) + "\n")
        server.stdin.flush()
        try:
            status = server.stdout.readline()
        except BaseException:  # the test's time is over: what comes now would be taken for the next job's
            os.killpg(server.pid, signal.SIGKILL)
            _server.cache_clear()
            raise
        assert status, f"the process that runs jobs has ended: {server.wait()}"
        return subprocess.CompletedProcess(arguments, int(status), *(path.read_text() for path in outputs))


@cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.simulation.plain_python"],
        cwd=ROOT,
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that it can be killed with its job
    )
    atexit.register(_stop, server)
    return server


def _stop(server: subprocess.Popen[str]) -> None:
    assert server.stdin is not None
    server.stdin.close()
    server.wait()


def _serve() -> None:
    from tests.helpers.simulation import broken_loops

    gc.freeze()  # jobs need not look through what was imported, nor copy the memory that this would touch
    for line in sys.stdin:
        stdout, stderr, *arguments = json.loads(line)
        if (child := os.fork()) == 0:
            for stream, path in ((sys.stdout, stdout), (sys.stderr, stderr)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream.fileno())
            broken_loops.main(*arguments)  # what it raises ends this process as it would any other
            sys.stdout.flush()
            os._exit(0)  # at once: to leave the interpreter takes half a second
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    _serve()
