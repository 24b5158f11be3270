"""The progress thread: one per registered group, owner of its transport, its sockets and its engine."""

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

from torchkv import idle
from torchkv.control import Control
from torchkv.engine import Engine
from torchkv.errors import KVError, TransferCancelled
from torchkv.transport import Transport

__all__ = ["ProgressThread", "Waker"]

log = logging.getLogger(__name__)

T = TypeVar("T")

ATTENTIVE = 0.1  # seconds after a call during which the next one finds the thread awake
REST = 0.005  # seconds between two looks at everything else while it rests
DRAIN = 1.0  # seconds that a closing group gives its transfers to stop
_TRANSPORT, _EVERYTHING = 1, -1  # a bit for each file descriptor with news: first the transport's, then control's

# PyDLL keeps the GIL during the call. os.eventfd_write would release it, and the thread just woken would take it
# and run while the caller waits: 20 us and more on the caller's thread, for a system call of one.
_libc = ctypes.PyDLL(None)
_libc.eventfd_write.argtypes = (ctypes.c_int, ctypes.c_uint64)


class Waker:
    """Wakes the progress thread: one store while it rests, a system call when it sleeps; see `idle`."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.asleep = False
        self.word = np.zeros(1, dtype=np.int64)  # not 0: somebody has called
        self._word = self.word.data  # the same, to which Python has a shorter way

    def wake(self) -> None:
        self._word[0] = 1
        if self.asleep:
            self.asleep = False
            _libc.eventfd_write(self.fd, 1)

    def answer(self) -> bool:
        """Whether somebody has called since the last time. To be asked before looking for what they want."""
        called = self._word[0] != 0
        self._word[0] = 0
        return called

    def clear(self) -> None:
        """The thread has slept, and is awake."""
        self.asleep = False
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return  # something else ended the sleep

    def close(self) -> None:
        # A late `wake` must not write to whoever is given this number next.
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
        except Exception as error:  # noqa: BLE001 - whatever it raised belongs to the caller who waits for it
            self.future.set_exception(error)


class ProgressThread:
    """Runs an engine's steps, and sleeps when there are none to run.

    The transport and the control channel are made on this thread, by ``make``, because both belong to the thread
    that makes them. ``call`` runs a function there; the engine is added once the group knows its members.
    """

    def __init__(self, name: str, make: Callable[[], tuple[Transport, Control]]) -> None:
        self.waker = Waker()
        self.engine: Engine | None = None
        self._make = make
        self._calls: deque[_Call[Any]] = deque()
        self._stopping = False
        self._news = _EVERYTHING  # since the last turn
        self._rest_until = 0.0  # callers were here lately: rest lightly
        self._ready: Future[tuple[Transport, Control]] = Future()
        self._crash: BaseException | None = None
        # A daemon, so that a program that never destroys its group can still exit.
        self._thread = threading.Thread(target=self._run, name=f"torchkv-{name}", daemon=True)
        self._thread.start()
        try:
            self.transport, self.control = self._ready.result()
        except BaseException:
            self._thread.join()
            self.waker.close()
            raise

    def call(self, function: Callable[[], T]) -> T:
        """Runs ``function`` on the progress thread and returns or raises what it does."""
        call = _Call(function)
        self._calls.append(call)
        self.waker.wake()
        return call.future.result()

    def stop(self) -> None:
        """Fails what is pending, closes transport and sockets, ends the thread. Idempotent."""
        if self._thread.is_alive():
            self._stopping = True
            self.waker.wake()
            self._thread.join()
            self.waker.close()

    def _run(self) -> None:
        try:
            idle.begin()
            transport, control = self._make()
        except BaseException as error:  # noqa: BLE001 - handed to the constructor, which raises it
            self._ready.set_exception(error)
            return
        self._ready.set_result((transport, control))
        try:
            while not self._stopping:
                self._turn(transport, control)
        except Exception as error:
            log.exception("the progress thread failed; every pending request fails")
            self._crash = error
        finally:
            self._close(transport, control)

    def _turn(self, transport: Transport, control: Control) -> None:
        now = time.monotonic()
        if self.waker.answer():
            self._rest_until = now + ATTENTIVE
        while self._calls:
            self._calls.popleft().run()
            self._news = _EVERYTHING
        engine = self.engine
        news, self._news = self._news, _EVERYTHING
        if engine is None:
            busy = again = transport.progress()
            wait = 1.0
        else:
            busy = engine.step(now, heard=-1 if control.unread else news >> 1, moved=news & _TRANSPORT != 0)
            again = busy and engine.moving
            wait = engine.next_wake(time.monotonic())
        if again or wait <= 0 or control.unread:
            return
        fd = transport.arm()
        if fd is None:
            return
        device = None if engine is None else engine.device
        spin = 0.0 if engine is None else engine.eager_until - now
        if device is not None and device.in_flight:
            awaited = [(flag.index, flag.value) for flag in device.in_flight]
            spin = REST if device.soon else spin
            self._rest((fd, *control.fds), words=device.flags.words, awaited=awaited, seconds=REST, spin=spin)
        elif wait < REST or now < self._rest_until or spin > 0:
            self._rest((fd, *control.fds), seconds=min(wait, REST), spin=spin)
        else:
            self._sleep(control, fd, wait)

    def _rest(self, fds: tuple[int, ...], **what: Any) -> None:
        self._news = idle.rest(self.waker.word, fds, **what)

    def _sleep(self, control: Control, fd: int, wait: float) -> None:
        self.waker.asleep = True
        # Whoever called before `asleep` was set did not write to the file descriptor: look once more.
        if not self.waker.word[0]:
            control.sleep(wait, (self.waker.fd, fd))
        self.waker.clear()

    def _close(self, transport: Transport, control: Control) -> None:
        engine, self.engine = self.engine, None
        self._stopping = True
        reason = "the group was destroyed" if self._crash is None else f"the progress thread failed: {self._crash!r}"
        if engine is not None:
            gone = TransferCancelled(reason)
            engine.abandon(gone, time.monotonic())
            deadline = time.monotonic() + DRAIN
            while self._crash is None and engine.moving and time.monotonic() < deadline:
                engine.step(time.monotonic())
            engine.farewell(gone, time.monotonic())
            if engine.device is not None:
                engine.device.close()
        while self._calls:
            self._calls.popleft().future.set_exception(TransferCancelled(reason))
        for close in (
            *((engine.let_go, *(route.close for route in engine.routes.values())) if engine else ()),
            transport.close,
            control.close,
        ):
            try:
                close()
            except (KVError, OSError) as error:
                log.warning("while closing: %s", error)
