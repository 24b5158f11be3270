"""Fresh processes that form a torchkv group and run one function each."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from torchkv.env import Options
from torchkv.errors import KVError

__all__ = ["run_ranks", "run_two"]

DEADLINE = 300.0


def run_two(
    writer: Callable[..., Any],
    reader: Callable[..., Any],
    *args: Any,
    environment: Mapping[str, str] | None = None,
    path: str | None = None,
    deadline: float = DEADLINE,
) -> tuple[Any, Any]:
    """`run_ranks` of ``writer``, which is rank 0, and ``reader``."""
    first, second = run_ranks((writer, reader), *args, environment=environment, path=path, deadline=deadline)
    return first, second


def run_ranks(
    functions: Sequence[Callable[..., Any]],
    *args: Any,
    environment: Mapping[str, str] | None = None,
    path: str | None = None,
    deadline: float = DEADLINE,
) -> list[Any]:
    """Runs each function with ``args``, in a process of its own, in the order of ranks; returns what they return.

    deadline: seconds. Raises ``KVError`` with the traceback of the process that failed first.
    """
    context = get_context("spawn")
    ends: list[Connection] = []
    processes = []
    with tempfile.TemporaryDirectory(prefix="torchkv-bench-") as folder:
        for rank, function in enumerate(functions):
            ours, theirs = context.Pipe()
            setup = (rank, len(functions), f"file://{folder}/store", dict(environment or {}), path, deadline)
            process = context.Process(target=_entry, args=(setup, function, args, theirs))
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        try:
            return _answers(ends, deadline)
        finally:
            for process in processes:
                process.join(10)
                if process.is_alive():
                    process.kill()


def _answers(ends: Sequence[Connection], deadline: float) -> list[Any]:
    until = time.monotonic() + deadline
    answers: dict[Connection, Any] = {}
    while len(answers) < len(ends):
        ready = wait([end for end in ends if end not in answers], max(0.0, until - time.monotonic()))
        if not ready:
            raise KVError(f"a benchmark process did not answer within {deadline:g} s")
        # Whoever fails first: the others fail too, for want of it, and much later.
        answers.update((end, _answer(end)) for end in ready if isinstance(end, Connection))
    return [answers[end] for end in ends]


def _answer(end: Connection) -> Any:
    try:
        ok, value = end.recv()
    except EOFError:
        raise KVError("a benchmark process died without saying why") from None
    if not ok:
        raise KVError(f"a benchmark process failed:\n{value}")
    return value


def _entry(
    setup: tuple[int, int, str, dict[str, str], str | None, float],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    end: Connection,
) -> None:
    rank, size, store, environment, path, deadline = setup
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        import torchkv  # noqa: F401 - registers the backend in this process

        limit = timedelta(seconds=deadline)
        options = Options(path=path)
        dist.init_process_group(
            "torchkv", init_method=store, rank=rank, world_size=size, timeout=limit, pg_options=options
        )
        value = function(*args)
        dist.barrier()
        dist.destroy_process_group()
        end.send((True, value))
    except BaseException:  # noqa: BLE001 - reported to the parent, which raises it
        end.send((False, traceback.format_exc()))
