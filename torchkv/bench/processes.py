"""Starts processes that form one torchkv group, runs a function in each, and collects what they return."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Self

import torch
import torch.distributed as dist

from torchkv.errors import KVError
from torchkv.host import shared_memory
from torchkv.options import Options

__all__ = ["Processes", "run_ranks", "run_two", "serving_ranks"]

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
    start = _Start(environment=dict(environment or {}), path=path, apart=apart, deadline=deadline)
    with Processes(functions, args, start) as processes:
        return processes.answers()


def serving_ranks(
    functions: Sequence[Callable[..., Callable[[Any], Any]]],
    *args: Any,
    environment: Mapping[str, str] | None = None,
    backend: str = "torchkv",
    apart: bool = False,
    deadline: float = DEADLINE,
) -> Processes:
    """As `run_ranks`, but what ``functions[rank](*args)`` returns is a function, which its process stays to call.

    Returns a context, on entering which all have started. backend: of the process group, "torchkv" or "gloo". deadline:
    seconds, for the start and for each `Processes.ask`. The context raises ``KVError`` as `run_ranks` does.
    """
    environment = dict(environment or {})
    start = _Start(environment=environment, backend=backend, apart=apart, deadline=deadline, serve=True)
    return Processes(functions, args, start)


class Processes:
    """The processes of one group. A context: they run until it is left."""

    def __init__(self, functions: Sequence[Callable[..., Any]], args: tuple[Any, ...], start: _Start) -> None:
        self._functions, self._args, self._start = functions, args, start
        self._ends: list[Connection] = []
        self._processes: list[SpawnProcess] = []

    def __enter__(self) -> Self:
        context = get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="torchkv-bench-")
        with ExitStack() as stack:
            stack.callback(self._end)
            for rank, function in enumerate(self._functions):
                ours, theirs = context.Pipe()
                store = f"file://{self._folder.name}/store"
                mine = replace(self._start, rank=rank, size=len(self._functions), store=store)
                process = context.Process(target=_entry, args=(mine, function, self._args, theirs))
                process.start()
                theirs.close()
                self._ends.append(ours)
                self._processes.append(process)
            if self._start.serve:
                self.answers()
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def answers(self) -> list[Any]:
        """What each process says next, in order of ranks. Raises ``KVError`` if one fails or takes too long."""
        return _answers(self._ends, self._start.deadline)

    def ask(self, message: Any) -> list[Any]:
        """Calls each process's function with ``message``: what they return. Raises ``KVError`` as `answers` does."""
        for end in self._ends:
            with suppress(OSError):  # of a process that has died: its answer tells
                end.send(message)
        return self.answers()

    def _end(self) -> None:
        if self._start.serve:  # closing ends a process that waits for a message
            for end in self._ends:
                end.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


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
    """What a process needs to join the group; see `run_ranks` and `serving_ranks`."""

    environment: Mapping[str, str]
    apart: bool
    deadline: float
    path: str | None = None
    backend: str = "torchkv"
    serve: bool = False
    rank: int = 0
    size: int = 0
    store: str = ""


def _entry(start: _Start, function: Callable[..., Any], args: tuple[Any, ...], end: Connection) -> None:
    os.environ.update(start.environment)
    os.dup2(sys.stderr.fileno(), 1)  # UCX prints warnings on stdout, which is the parent's, for its table or its JSON
    torch.set_num_threads(1)
    if start.apart:
        shared_memory.host_identity = functools.cache(lambda: start.rank.to_bytes(32, "big"))
    try:
        import torchkv  # noqa: F401 - registers the backend in this process

        dist.init_process_group(
            start.backend,
            init_method=start.store,
            rank=start.rank,
            world_size=start.size,
            timeout=timedelta(seconds=start.deadline),
            pg_options=Options(path=start.path) if start.backend == "torchkv" else None,
        )
        value = function(*args)
        if start.serve:
            _serve(value, end)
        dist.barrier()
        dist.destroy_process_group()
        if not start.serve:
            end.send((True, value))
    except BaseException:  # noqa: BLE001 - the parent raises it
        with suppress(OSError):  # the parent no longer listens
            end.send((False, traceback.format_exc()))


def _serve(function: Callable[[Any], Any], end: Connection) -> None:
    """Answers the parent's messages until it closes its end."""
    end.send((True, None))
    while True:
        try:
            message = end.recv()
        except EOFError:
            return
        end.send((True, function(message)))
