"""The progress thread: one per registered group. Owns the group's transport and sockets, and drives its engine.

Each turn runs the calls that other threads queued, then one `Engine.step`. If there is nothing more to do, the thread
*rests* for a while after it has served a request (see `torchkv.host.spin_wait`), and *sleeps* in a system call
otherwise. What the resident loop serves needs no thread that lies in wait.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import numpy as np

from torchkv.control.channel import ControlChannel
from torchkv.engine.engine import Engine
from torchkv.engine.work import drivers
from torchkv.errors import KVError, ProtocolError, TransferCancelled
from torchkv.host import spin_wait
from torchkv.host.switch_interval import ShortTurns
from torchkv.transport.interface import Transport

__all__ = ["ProgressThread", "Waker"]

log = logging.getLogger(__name__)

T = TypeVar("T")

ATTENTIVE = 0.1  # seconds after it has served a request for which the thread rests instead of sleeping
REST = 0.005  # longest rest in seconds: then the engine is stepped even if nothing has arrived
DRAIN = 1.0  # seconds for which a closing group waits until its transfers have stopped, and writers said so of theirs
FAREWELL = 0.5  # seconds for which it waits until its peers have heard that it leaves
ANSWER = 0.005  # longest sleep in seconds while it waits for writers
# Bit i says whether file descriptor i may be readable: 0 is the transport's, the others are the control channel's.
_TRANSPORT, _EVERYTHING = 1, -1

# PyDLL keeps the GIL during the call. os.eventfd_write would release it, and the woken thread would take it and run
# while the caller waits: 20 us and more on the caller's thread, instead of the 1 us of the system call.
_libc = ctypes.PyDLL(None)
_libc.eventfd_write.argtypes = (ctypes.c_int, ctypes.c_uint64)


class Waker:
    """Wakes the progress thread: by one store while it rests, by a system call while it sleeps. See `spin_wait`."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.asleep = False
        self.word = np.zeros(1, dtype=np.int64)  # not 0: `wake` was called since `answer`
        self._word = self.word.data  # the same memory; Python stores faster into a memoryview than into an array

    def wake(self) -> None:
        """Any thread. Part of every verb's cost."""
        self._word[0] = 1
        if self.asleep:
            self.asleep = False
            _libc.eventfd_write(self.fd, 1)

    def answer(self) -> None:
        """Takes the calls of `wake` until now as heard. To be called before looking for work, else one gets lost."""
        self._word[0] = 0

    def clear(self) -> None:
        """To be called by the thread when it has slept."""
        self.asleep = False
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return  # something else ended the sleep

    def close(self) -> None:
        # A late `wake` must not write to the file that gets this descriptor's number next.
        self.asleep = False
        fd, self.fd = self.fd, -1
        os.close(fd)


class _Call(Generic[T]):
    """A function to run on the progress thread, and its result."""

    def __init__(self, function: Callable[[], T]) -> None:
        self.future: Future[T] = Future()
        self._function = function

    def run(self) -> None:
        try:
            self.future.set_result(self._function())
        except Exception as error:  # noqa: BLE001 - any error is raised again in the calling thread
            self.future.set_exception(error)


class ProgressThread:
    """Runs an engine's steps on a thread of its own.

    make: makes the transport and the control channel. Runs on this thread, because both belong to the thread that makes
    them. ``engine`` is set during registration, once the metadata of all ranks is known.
    """

    def __init__(self, name: str, make: Callable[[], tuple[Transport, ControlChannel]]) -> None:
        self.waker = Waker()
        self.short_turns = ShortTurns()  # once Python has served a request, or callbacks wait for this thread
        self.engine: Engine | None = None
        self._make = make
        self._calls: deque[_Call[Any]] = deque()
        self._stopping = False
        self._readable = _EVERYTHING  # file descriptors that may be readable; see _TRANSPORT
        self._rest_until = 0.0  # until then rest instead of sleeping, because it has served a request lately
        self._ready: Future[tuple[Transport, ControlChannel]] = Future()
        self._crash: BaseException | None = None
        # A daemon thread, so that a program that never destroys its group can exit.
        self._thread = threading.Thread(target=self._run, name=f"torchkv-{name}", daemon=True)
        self._thread.start()
        try:
            self.transport, self.control = self._ready.result()
        except BaseException:
            self._thread.join()
            self.waker.close()
            raise

    def call(self, function: Callable[[], T]) -> T:
        """Runs ``function`` on the progress thread. Returns its result, or raises its error."""
        call = _Call(function)
        self._calls.append(call)
        self.waker.wake()
        return call.future.result()

    def serve(self) -> None:
        """Python serves a request: more of it will come to this thread, which should get the GIL soon. Any thread."""
        self.short_turns.begin()
        self._rest_until = time.monotonic() + ATTENTIVE

    def stop(self) -> None:
        """Fails pending calls, closes the transport and the sockets, and ends the thread. Idempotent.

        Raises ``ProtocolError`` on the progress thread itself, which runs callbacks of futures: it cannot await itself.
        """
        if threading.current_thread() is self._thread:
            raise ProtocolError("a callback of a work's future cannot destroy its group; do that on another thread")
        if self._thread.is_alive():
            self._stopping = True
            self.waker.wake()
            self._thread.join()
            self.waker.close()

    def _run(self) -> None:
        try:
            spin_wait.wake_on_time()
            transport, control = self._make()
        except BaseException as error:  # noqa: BLE001 - handed to the constructor, which raises it
            self._ready.set_exception(error)
            return
        self._ready.set_result((transport, control))
        drivers.add(threading.get_ident())
        try:
            while not self._stopping:
                self._turn(transport, control)
        except Exception as error:
            log.exception("the progress thread failed; every pending request fails")
            self._crash = error
        finally:
            self._close(transport, control)
            self.short_turns.end()
            drivers.discard(threading.get_ident())

    def _turn(self, transport: Transport, control: ControlChannel) -> None:
        now = time.monotonic()
        self.waker.answer()
        while self._calls:
            self._calls.popleft().run()
            self._readable = _EVERYTHING
        engine = self.engine
        readable, self._readable = self._readable, _EVERYTHING
        if engine is None:
            busy = again = transport.progress()
            wait = 1.0
        else:
            busy = engine.step(now, heard=-1 if control.unread else readable >> 1, moved=readable & _TRANSPORT != 0)
            again = busy and engine.moving
            wait = engine.next_wake(time.monotonic())
        if again or wait <= 0 or control.unread:
            return
        # Where the loop drives the transport, this thread need not wake for what it has done already.
        driven = engine is not None and engine.transport_is_driven
        fd = self.waker.fd if driven else transport.arm()
        if fd is None:
            return
        gpu = None if engine is None else engine.gpu
        spin = 0.0 if engine is None else engine.exchange.spin_until - now
        if gpu is not None and gpu.completions:
            awaited = [(completion.index, completion.value) for completion in gpu.completions]
            spin = REST if gpu.copy_completions else spin
            self._rest((fd, *control.fds), words=gpu.sync_words.words, awaited=awaited, seconds=REST, spin=spin)
        elif wait < REST or now < self._rest_until or spin > 0:
            self._rest((fd, *control.fds), seconds=min(wait, REST), spin=spin)
        else:
            self._sleep(control, fd, wait)

    def _rest(self, fds: tuple[int, ...], **operation: Any) -> None:
        self._readable = spin_wait.rest(self.waker.word, fds, **operation)

    def _sleep(self, control: ControlChannel, fd: int, wait: float) -> None:
        self.waker.asleep = True
        # A `wake` before `asleep` was set did not write to the file descriptor, but it set the word.
        if not self.waker.word[0]:
            control.sleep(wait, {self.waker.fd, fd})  # the same one where the loop drives the transport
        self.waker.clear()

    def _close(self, transport: Transport, control: ControlChannel) -> None:
        engine, self.engine = self.engine, None
        self._stopping = True
        reason = "the group was destroyed" if self._crash is None else f"the progress thread failed: {self._crash!r}"
        closed = False
        try:
            if engine is not None:
                self._end(engine, control, TransferCancelled(reason))
            while self._calls:
                self._calls.popleft().future.set_exception(TransferCancelled(reason))
            closed = self._close_all(engine, transport, control)
        finally:
            if engine is not None and engine.group_leases is not None:
                # Last: of what writers have sent nothing can land any more unless they write to memory themselves.
                unseen = _unseen(engine, transport) if closed else frozenset(engine.group_map.info)
                engine.group_leases.leave(unseen=unseen)

    def _end(self, engine: Engine, control: ControlChannel, gone: TransferCancelled) -> None:
        """Fails what is pending, stops what moves, and hears which writers are quiescent, as far as `DRAIN` allows."""
        engine.fail_all(gone, time.monotonic())
        deadline = time.monotonic() + DRAIN
        while self._crash is None and (engine.moving or engine.awaits_writers) and time.monotonic() < deadline:
            engine.step(time.monotonic())
            if not engine.moving:
                control.sleep(ANSWER, ())
        engine.end_all(gone, time.monotonic())
        if engine.gpu is not None:
            engine.gpu.close()
        engine.leave(time.monotonic())
        deadline = time.monotonic() + FAREWELL
        while not engine.is_heard(now := time.monotonic()) and now < deadline:
            control.sleep(ANSWER, ())

    def _close_all(self, engine: Engine | None, transport: Transport, control: ControlChannel) -> bool:
        """Whether the transport was closed."""
        closed = True
        for close in (
            *(
                (engine.peers.run_deferred_frees, *(connection.close for connection in engine.connections.values()))
                if engine
                else ()
            ),
            transport.close,
            control.close,
        ):
            try:
                close()
            except (KVError, OSError) as error:
                log.warning("while closing: %s", error)
                closed = closed and close != transport.close
        return closed


def _unseen(engine: Engine, transport: Transport) -> frozenset[int]:
    """Ranks whose end does not prove that nothing of them can land, even on this host with the transport closed.

    A heap of all ranks stays registered with the network, so packets may be on their way, unless its writer stores.
    """
    if not transport.capabilities.collective_memory:
        return frozenset()
    stores = {rank for rank, connection in engine.connections.items() if connection.direct}
    return frozenset(engine.group_map.info.keys() - stores)
