"""What strangers and a stalled consumer do to the requests of two honest instances.

python -m benchmarks.flood [rounds]

A stranger, a process without the secret, floods every port that the two listen on: the control channel's TCP port with
connections and garbage, their Unix sockets with datagrams. Because that takes processor time, one phase has the
stranger do nothing but compute: on few cores that alone makes requests wait. Another one has it flood only while
nobody else wants a processor: what requests wait longer then is what the flood costs the two themselves, and not what
the stranger takes from them. A stalled consumer is a third instance to which the sender of the two also sends, and
which is stopped in the middle. Prints p50 and p99 of each phase, by which factor p99 has grown, and the processor time
of the ZeroMQ threads of the two. Phases take turns, because the machine may have other work.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

import torchkv
from benchmarks.join import PAGES, member

GREETING = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00CURVE" + bytes(47)  # ZeroMQ's, for CURVE
STALLED_PAGES = list(range(1, 64))
SECONDS = 3.0  # of a phase


def compute(_: list[str], until: float) -> None:
    while time.monotonic() < until:
        sum(range(10_000))


def connect(addresses: list[str], until: float) -> None:
    """Connections that say something, nothing, or the beginning of ZeroMQ's own greeting, a thousand at a time."""
    ports = [int(address.rpartition(":")[2]) for address in addresses]
    held: list[socket.socket] = []
    number = 0
    while time.monotonic() < until:
        stranger = socket.socket()
        with suppress(OSError):
            stranger.connect(("127.0.0.1", ports[number % len(ports)]))
            stranger.sendall([b"", os.urandom(4096), GREETING + os.urandom(4096)][number % 3])
        held.append(stranger)
        number += 1
        if len(held) > 1000:
            held.pop(0).close()
    for stranger in held:
        stranger.close()
    print(f"  {number} connections")


def send_datagrams(_: list[str], until: float) -> None:
    """To the socket of every torchkv process of this host: their names are public."""
    names = re.findall(r"@(torchkv-[0-9a-f]{32})$", Path("/proc/net/unix").read_text(), re.MULTILINE)
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    number = 0
    while time.monotonic() < until:
        for name in names:
            with suppress(OSError):
                stranger.sendto(bytes(32 << 10), b"\0" + name.encode())
                number += 1
    print(f"  {number} datagrams")


def connect_idly(addresses: list[str], until: float) -> None:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    try:
        connect(addresses, until)
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


FLOODS: dict[str, Callable[[list[str], float], None]] = {
    "a stranger computes": compute,
    "it floods the TCP ports": connect,
    "the same, when nobody computes": connect_idly,
    "it floods the Unix sockets": send_datagrams,
}


def stranger(pipe: Connection) -> None:
    addresses = pipe.recv()
    while (order := pipe.recv()) is not None:
        name, until = order
        FLOODS[name](addresses, until)
        pipe.send("done")


def send(pipe: Connection, pages: int) -> None:
    kv = member("sender", num_pages=pages)
    pipe.send(kv.address)
    for address in pipe.recv():
        kv.connect(address).result()
    pipe.send("connected")
    number = 0
    while not pipe.poll():
        kv.send_pages(f"r{number}", PAGES, "receiver")
        try:
            kv.finish(f"r{number}", "receiver").wait()
        except torchkv.PeerLost:  # the receiver has left first
            break
        if (number := number + 1) == 200:
            kv.send_pages("stalled", STALLED_PAGES, "stalled")  # never finished
    kv.close()


def receive(pipe: Connection) -> None:
    """Sends (when it ended, how long it took) of every request."""
    kv = member("receiver")
    pipe.send(kv.address)
    kv.connect(pipe.recv()).result()
    pipe.send("connected")
    number, times = 0, []
    while not pipe.poll():
        began = time.monotonic()
        try:
            kv.recv_pages(f"r{number}", PAGES, "sender").wait()
        except torchkv.PeerLost:  # the sender has left first
            break
        times.append((time.monotonic(), time.monotonic() - began))
        number += 1
        time.sleep(0.0005)
    pipe.recv()
    pipe.send(times)
    kv.close()


def stall(pipe: Connection) -> None:
    kv = member("stalled", num_pages=len(STALLED_PAGES) + 1)
    pipe.send(kv.address)
    kv.connect(pipe.recv()).result()
    kv.recv_pages("stalled", STALLED_PAGES, "sender")
    pipe.send("granted")
    pipe.recv()


def zmq_seconds(pids: list[int]) -> float:
    """Processor time of ZeroMQ's I/O threads of these processes so far."""
    ticks = 0
    for pid in pids:
        for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
            name, _, fields = stat.read_text().partition("(")[2].rpartition(")")
            if name.startswith("ZMQbg/IO"):
                ticks += sum(map(int, fields.split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def report(phases: list[tuple[str, float, float, float]], times: list[tuple[float, float]]) -> None:
    """phases: name, begin, end, and processor time of ZeroMQ's threads."""
    quiet = 0.0
    for name in dict.fromkeys(name for name, *_ in phases):
        spans = [(lo, hi) for phase, lo, hi, _ in phases if phase == name]
        busy = sum(seconds for phase, *_, seconds in phases if phase == name) / sum(hi - lo for lo, hi in spans)
        took = np.array([seconds for at, seconds in times if any(lo <= at < hi for lo, hi in spans)]) * 1e6
        p50, p99, most = np.percentile(took, [50, 99, 100])
        quiet = quiet or p99
        print(
            f"{name:31} {len(took):6} requests, p50 {p50:6.0f} us, p99 {p99:6.0f} us ({p99 / quiet:4.2f} x), "
            f"longest {most:6.0f} us, ZeroMQ's threads {100 * busy:3.0f}% of a core"
        )


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    context = multiprocessing.get_context("spawn")
    children: list[Any] = []

    def start(target: Callable[..., None], *args: Any) -> Connection:
        here, there = context.Pipe()
        children.append(context.Process(target=target, args=(there, *args)))
        children[-1].start()
        return here

    sender, receiver, stalled, flooder = start(send, 64), start(receive), start(stall), start(stranger)
    addresses = [pipe.recv() for pipe in (sender, receiver, stalled)]
    flooder.send(addresses[:2])
    sender.send(addresses[1:])
    receiver.send(addresses[0])
    stalled.send(addresses[0])
    for pipe in (sender, receiver, stalled):
        pipe.recv()
    time.sleep(2.0)
    phases: list[tuple[str, float, float, float]] = []
    honest = [child.pid for child in children[:2]]

    def during(name: str, act: Callable[[], object]) -> None:
        began, used = time.monotonic(), zmq_seconds(honest)
        act()
        phases.append((name, began, time.monotonic(), zmq_seconds(honest) - used))
        time.sleep(0.5)

    def flood(name: str) -> None:
        flooder.send((name, time.monotonic() + SECONDS))
        flooder.recv()

    for _ in range(rounds):
        during("quiet", lambda: time.sleep(SECONDS))
        for name in FLOODS:
            during(name, lambda name=name: flood(name))  # type: ignore[misc]  # a default argument
    os.kill(children[2].pid, signal.SIGSTOP)
    during("a consumer stalls", lambda: time.sleep(rounds * SECONDS))  # it counts as lost after five heartbeats
    receiver.send("enough")
    sender.send("enough")
    receiver.send("tell")
    report(phases, receiver.recv())
    flooder.send(None)
    children[2].kill()
    for child in children:
        child.join(60)


if __name__ == "__main__":
    main()
