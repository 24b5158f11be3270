"""Real processes for tests: started once, given many functions to run, watched by deadline, checked at their end.

A `Ranks` is a set of processes that share one default group of backend ``torchkv``. ``run`` executes a function of
a test module in every one of them and returns what each returned. A rank that raises, dies undeclared or overstays
the deadline fails the test with its traceback, or with the stacks of all its threads.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import shutil
import signal
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torchkv
from tests.helpers import failpoints, hosts
from torchkv.host import shared_memory
from torchkv.testing.processes import Worker, preload

__all__ = ["RankFailed", "Ranks", "ask", "kv_group", "kv_world", "say"]

DEADLINE = 60.0
# Collectives give up before the deadline of the call they are in, so that gloo gets to say whom it waited for.
COLLECTIVE_TIMEOUT = timedelta(seconds=40)
EXIT_DEADLINE = 20.0

# The server that ranks are forked from has imported everything and started nothing. UCX itself is not loaded, so its
# environment can differ from rank to rank.
preload("torchkv", "torchkv_ucx", "torch.distributed.device_mesh", "numba", "zmq", "pytest")
preload("tests.helpers.harness", "tests.helpers.preload")
# Python hands sys.path on to the server only since 3.12.8 and 3.13.1, and skips without a word what it cannot import.
ROOT = Path(__file__).parents[2]
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(ROOT), str(ROOT / "examples"), os.environ.get("PYTHONPATH")))
)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when the server imports torch


class RankFailed(AssertionError):
    """A rank raised, died or hung; the message holds its traceback or stacks."""


class Ranks:
    """``size`` processes with a default group of backend ``torchkv``; see the module's text.

    env: set in the ranks before torchkv's transport loads. world: whether to make the default group. apart: as if each
    were on a host of its own, in that no memory of one is mapped in another; that one has died is still seen. holders:
    of each rank, a process of the host of `tests.helpers.hosts` that it runs on. opening: seconds that the first `run`
    may take on top of its deadline.
    """

    def __init__(
        self,
        size: int,
        *,
        env: Mapping[str, str] | None = None,
        world: bool = True,
        apart: bool = False,
        holders: Sequence[int] = (),
        opening: float = 0.0,
    ) -> None:
        self.size = size
        self.broken = ""
        self._opening = opening
        self._expected: dict[int, int] = {}  # rank -> exit code that the test has declared
        scratch = tempfile.mkdtemp(prefix="torchkv-test-")
        # A test that fails does not get to `close`; TemporaryDirectory would fail another test with a warning of it.
        self._remove_scratch = weakref.finalize(self, shutil.rmtree, scratch, ignore_errors=True)
        store = str(Path(scratch, "store"))
        self._workers = [
            Worker(_rank_main, rank, size, store, dict(env or {}), world, apart, holder, name=f"rank{rank}")
            for rank, holder in enumerate(holders or [None] * size)
        ]
        self._pipes: list[Connection] = [worker.pipe for worker in self._workers]

    def pid(self, rank: int) -> int:
        return self._workers[rank].pid

    def run(
        self, function: Callable[..., Any], *args: Any, ranks: Iterable[int] | None = None, deadline: float = DEADLINE
    ) -> list[Any]:
        """Calls ``function(*args)`` on ``ranks`` (default: all that live); their values, in rank order."""
        opening, self._opening = self._opening, 0.0
        chosen = self.start(function, *args, ranks=ranks)
        return self.join(chosen, deadline=deadline + opening)

    def start(self, function: Callable[..., Any], *args: Any, ranks: Iterable[int] | None = None) -> list[int]:
        """Begins a call and returns the ranks it runs on; `join` ends it."""
        assert not self.broken, self.broken
        chosen = [rank for rank in range(self.size) if rank not in self._expected] if ranks is None else list(ranks)
        for rank in chosen:
            self._pipes[rank].send((function, args))
        return chosen

    def join(self, ranks: Sequence[int], *, deadline: float = DEADLINE) -> list[Any]:
        """The values of a started call. Raises `RankFailed`."""
        until = time.monotonic() + deadline
        values: dict[int, Any] = {}
        try:
            while waiting := [rank for rank in ranks if rank not in values]:
                self._await(waiting, until)
                for rank in waiting:
                    if self._pipes[rank].poll():
                        values[rank] = self._value(rank)
        except BaseException as error:
            # Also an interrupt or pytest-timeout: else the values of this call would answer the next one.
            self._kill_all(f"{type(error).__name__}: {error}")
            raise
        return [values[rank] for rank in ranks]

    def hear(self, rank: int, *, deadline: float = DEADLINE) -> Any:
        """What ``rank`` has said with `say`, in order."""
        self._await([rank], time.monotonic() + deadline)
        kind, value = self._receive(rank)
        if kind != "said":
            self._fail(f"rank {rank} ended its call ({kind}) instead of saying something:\n{value}")
        return value

    def tell(self, rank: int, value: Any = None) -> None:
        """Answers a rank that waits in `ask`."""
        self._pipes[rank].send(value)

    def kill(self, rank: int) -> None:
        """SIGKILL. Declares that this rank ends so."""
        self._expected[rank] = -signal.SIGKILL
        os.kill(self.pid(rank), signal.SIGKILL)

    def expect_exit(self, rank: int, code: int) -> None:
        """Declares that ``rank`` ends by itself, with ``code``, and waits until it has."""
        self._expected[rank] = code
        self._workers[rank].join(EXIT_DEADLINE)

    def signal(self, rank: int, number: int) -> None:
        """Sends a signal; returns from SIGSTOP when every thread of the rank has stopped."""
        os.kill(self.pid(rank), number)
        if number == signal.SIGSTOP:  # each thread stops when it next runs; until then it could answer a peer
            threads = Path(f"/proc/{self.pid(rank)}/task")
            while any(_state(thread) != "T" for thread in threads.iterdir()):
                time.sleep(0.001)

    def close(self) -> None:
        """Ends every rank and checks every exit code. Raises `RankFailed`."""
        try:
            if self.broken:
                return
            for rank in range(self.size):
                if rank not in self._expected:
                    with suppress(BrokenPipeError):  # it has died: its exit code is looked at below
                        self._pipes[rank].send(None)
            until = time.monotonic() + EXIT_DEADLINE
            codes = [worker.join(until - time.monotonic()) for worker in self._workers]
            late = [rank for rank, code in enumerate(codes) if code is None]
            if late:
                self._fail(f"ranks {late} did not exit within {EXIT_DEADLINE:g} s:\n{self._dump(late)}")
            expected = [self._expected.get(rank, 0) for rank in range(self.size)]
            if codes != expected:
                raise RankFailed(f"exit codes {codes}, expected {expected}")
        finally:
            self._end()

    # ------------------------------------------------------------------ inside

    def _await(self, ranks: Sequence[int], until: float) -> None:
        """Returns when one of ``ranks`` has written something; fails if one has died or time is up."""
        pipes = {self._pipes[rank]: rank for rank in ranks}
        sentinels = {worker.sentinel: rank for rank, worker in enumerate(self._workers) if rank not in self._expected}
        ready = multiprocessing.connection.wait([*pipes, *sentinels], max(0.0, until - time.monotonic()))
        if any(one in pipes for one in ready):
            return
        if ready:
            rank = next(sentinels[one] for one in ready if isinstance(one, int))
            self._workers[rank].join(EXIT_DEADLINE)
            self._fail(f"rank {rank} died with {self._end_of(rank)}")
        self._fail(f"ranks {list(ranks)} did not answer before the deadline:\n{self._dump(ranks)}")

    def _receive(self, rank: int) -> tuple[str, Any]:
        try:
            kind, value = self._pipes[rank].recv()
        except EOFError:
            self._workers[rank].join(EXIT_DEADLINE)
            self._fail(f"rank {rank} died with {self._end_of(rank)}")
        return kind, value

    def _value(self, rank: int) -> Any:
        kind, value = self._receive(rank)
        if kind == "raised":
            self._fail(f"rank {rank} raised:\n{value}{self._others(rank)}")
        if kind != "returned":
            self._fail(f"rank {rank} said {value!r}, and nobody listened")
        return value

    def _others(self, first: int) -> str:
        """What they raised, and what those are doing that have nothing to say: it may be why ``first`` has raised."""
        text, silent = "", []
        for rank, pipe in enumerate(self._pipes):
            if rank == first or rank in self._expected:
                continue
            if not pipe.poll(0.2):
                silent.append(rank)
                continue
            kind, value = self._receive(rank)
            text += f"\nrank {rank} {kind}:\n{value}" if kind == "raised" else ""
        return text + self._dump(silent)

    def _dump(self, ranks: Sequence[int]) -> str:
        """The stacks of all threads of ``ranks``."""
        stacks = {rank: self._workers[rank].stacks() for rank in ranks}
        return "".join(f"\nrank {rank}:\n{text}" for rank, text in stacks.items() if text)

    def _end_of(self, rank: int) -> str:
        """How ``rank`` ended, which no test has declared, and what faulthandler wrote if it crashed."""
        return f"exit code {self._workers[rank].exitcode}\n{self._workers[rank].crash_report()}"

    def _fail(self, text: str) -> None:
        self._kill_all(text)
        raise RankFailed(text)

    def _kill_all(self, why: str) -> None:
        if not self.broken:
            self.broken = f"these ranks are gone, because of an earlier failure: {why.splitlines()[0]}"
        for worker in self._workers:
            worker.signal(signal.SIGKILL)

    def _end(self) -> None:
        for worker in self._workers:
            worker.close()
        self._remove_scratch()


# ---------------------------------------------------------------------- inside a rank

_pipe: Connection | None = None


def _state(thread: Path) -> str:
    """The state letter of a thread, "T" if stopped: proc(5); it follows the name, which may hold anything."""
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]


def say(value: Any = None) -> None:
    """From within a rank: gives the test ``value``; see `Ranks.hear`."""
    assert _pipe is not None
    _pipe.send(("said", value))


def ask(value: Any = None) -> Any:
    """From within a rank: `say`, then wait for the test's answer; see `Ranks.tell`."""
    say(value)
    assert _pipe is not None
    return _pipe.recv()


@contextmanager
def kv_group(ranks: Sequence[int] | None = None, **options: Any) -> Iterator[torchkv.KVProcessGroup]:
    """A new group of ``ranks`` (default: all) with ``Options(**options)``. Every rank of the default group calls it."""
    made = torchkv.Options(**options)
    group = dist.new_group(ranks, timeout=COLLECTIVE_TIMEOUT, backend="torchkv", pg_options=made)
    yield group
    # Not in a finally: after a failure the peers' state is unknown, and the processes are ended anyway.
    if isinstance(group, torchkv.KVProcessGroup):
        dist.barrier(group)
        dist.destroy_process_group(group)


def kv_world() -> torchkv.KVProcessGroup:
    """The default group."""
    group = dist.group.WORLD
    assert isinstance(group, torchkv.KVProcessGroup)
    return group


def _rank_main(
    pipe: Connection,
    rank: int,
    size: int,
    store: str,
    env: dict[str, str],
    world: bool,
    apart: bool,
    holder: int | None,
) -> None:
    global _pipe
    if holder is not None:
        hosts.enter(holder)
    _pipe = pipe
    os.environ.update(env)
    if apart:
        # UCX_TLS=tcp alone does not do it: what maps memory is not UCX. `processes` has the true identity.
        shared_memory.host_identity = lambda: rank.to_bytes(32, "big")
    torch.set_num_threads(1)
    failpoints.from_environment(rank)
    if world:
        dist.init_process_group(
            "torchkv", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT
        )
    while (call := pipe.recv()) is not None:
        function, args = call
        try:
            pipe.send(("returned", function(*args)))
        except BaseException:  # noqa: BLE001 - the test that runs the function is told, whatever it was
            pipe.send(("raised", traceback.format_exc()))
    if dist.is_initialized():
        dist.destroy_process_group()
