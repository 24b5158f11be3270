"""Starts processes that form one torchkv group, runs a function in each, and collects what they return."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from torchkv.errors import KVError
from torchkv.host import shared_memory
from torchkv.options import Options

__all__ = ["run_ranks", "run_two"]

DEADLINE = 300.0


def run_two(
    writer: Callable[..., Any],
    reader: Callable[..., Any],
    *args: Any,
    environment: Mapping[str, str] | None = None,
    path: str | None = None,
    apart: bool = False,
) -> tuple[Any, Any]:
    """`run_ranks` with ``writer`` as rank 0 and ``reader`` as rank 1."""
    first, second = run_ranks((writer, reader), *args, environment=environment, path=path, apart=apart)
    return first, second


def run_ranks(
    functions: Sequence[Callable[..., Any]],
    *args: Any,
    environment: Mapping[str, str] | None = None,
    path: str | None = None,
    apart: bool = False,
    deadline: float = DEADLINE,
) -> list[Any]:
    """Runs ``functions[rank](*args)`` in a fresh process for each rank; returns what they return, in order of ranks.

    environment: variables to set in every process. path: ``Options.path`` of the group. apart: each process takes
    itself for a host of its own, so that none maps another's memory. deadline: seconds. Raises ``KVError`` with the
    traceback of the process that failed first.
    """
    context = get_context("spawn")
    ends: list[Connection] = []
    processes = []
    with tempfile.TemporaryDirectory(prefix="torchkv-bench-") as folder:
        for rank, function in enumerate(functions):
            ours, theirs = context.Pipe()
            start = _Start(
                rank=rank,
                size=len(functions),
                store=f"file://{folder}/store",
                environment=dict(environment or {}),
                path=path,
                apart=apart,
                deadline=deadline,
            )
            process = context.Process(target=_entry, args=(start, function, args, theirs))
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
        # In the order in which they come: the first failure is the cause, the other ranks fail later because of it.
        answers.update((end, _answer(end)) for end in ready if isinstance(end, Connection))
    return [answers[end] for end in ends]


def _answer(end: Connection) -> Any:
    try:
        ok, value = end.recv()
    except EOFError:
        raise KVError("a benchmark process died without a traceback") from None
    if not ok:
        raise KVError(f"a benchmark process failed:\n{value}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """What a process needs to join the group; see `run_ranks`."""

    rank: int
    size: int
    store: str
    environment: Mapping[str, str]
    path: str | None
    apart: bool
    deadline: float


def _entry(start: _Start, function: Callable[..., Any], args: tuple[Any, ...], end: Connection) -> None:
    os.environ.update(start.environment)
    os.dup2(sys.stderr.fileno(), 1)  # UCX prints warnings on stdout, which is the parent's, for its table or its JSON
    torch.set_num_threads(1)
    if start.apart:
        shared_memory.host_identity = functools.cache(lambda: start.rank.to_bytes(32, "big"))
    try:
        import torchkv  # noqa: F401 - registers the backend in this process

        dist.init_process_group(
            "torchkv",
            init_method=start.store,
            rank=start.rank,
            world_size=start.size,
            timeout=timedelta(seconds=start.deadline),
            pg_options=Options(path=start.path),
        )
        value = function(*args)
        dist.barrier()
        dist.destroy_process_group()
        end.send((True, value))
    except BaseException:  # noqa: BLE001 - the parent raises it
        end.send((False, traceback.format_exc()))
