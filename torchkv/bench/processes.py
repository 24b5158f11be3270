"""Two fresh processes that form a torchkv group and run one function each."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from torchkv.env import Options
from torchkv.errors import KVError

__all__ = ["run_two"]

DEADLINE = 300.0


def run_two(
    writer: Callable[..., Any],
    reader: Callable[..., Any],
    *args: Any,
    environment: Mapping[str, str] | None = None,
    path: str | None = None,
    deadline: float = DEADLINE,
) -> tuple[Any, Any]:
    """Runs ``writer(*args)`` as rank 0 and ``reader(*args)`` as rank 1; returns what they return.

    deadline: seconds. Raises ``KVError`` with the traceback of the process that failed.
    """
    context = get_context("spawn")
    ends: list[Connection] = []
    processes = []
    with tempfile.TemporaryDirectory(prefix="torchkv-bench-") as folder:
        for rank, function in enumerate((writer, reader)):
            ours, theirs = context.Pipe()
            setup = (rank, f"file://{folder}/store", dict(environment or {}), path, deadline)
            process = context.Process(target=_entry, args=(setup, function, args, theirs))
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        try:
            first, second = (_answer(end, deadline) for end in ends)
        finally:
            for process in processes:
                process.join(10)
                if process.is_alive():
                    process.kill()
    return first, second


def _answer(end: Connection, deadline: float) -> Any:
    if not end.poll(deadline):
        raise KVError(f"a benchmark process did not answer within {deadline:g} s")
    ok, value = end.recv()
    if not ok:
        raise KVError(f"a benchmark process failed:\n{value}")
    return value


def _entry(
    setup: tuple[int, str, dict[str, str], str | None, float],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    end: Connection,
) -> None:
    rank, store, environment, path, deadline = setup
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        import torchkv  # noqa: F401 - registers the backend in this process

        limit = timedelta(seconds=deadline)
        options = Options(path=path)
        dist.init_process_group(
            "torchkv", init_method=store, rank=rank, world_size=2, timeout=limit, pg_options=options
        )
        value = function(*args)
        dist.barrier()
        dist.destroy_process_group()
        end.send((True, value))
    except BaseException:  # noqa: BLE001 - reported to the parent, which raises it
        end.send((False, traceback.format_exc()))
