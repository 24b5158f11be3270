"""What a newcomer costs: it meets 64 instances, two of which exchange pages all the while.

python -m benchmarks.join [instances]

Prints how long the newcomer takes, how long requests of the two take before, meanwhile, and while others come and go,
and what an idle peer costs: resident memory and file descriptors. All run on this machine; the idle ones share two
processes.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torchkv

LAYOUT = torchkv.KVLayout.gqa(num_layers=32, num_kv_heads=8, head_dim=64, page_size=16, dtype=torch.bfloat16)
PAGES = list(range(1, 3))  # 2.1 MB
CYCLES = 5  # newcomers, one after the other, that meet all and leave
OPTIONS = torchkv.Options(staging_send=0, staging_recv=1 << 20)


def member(name: str, *, num_pages: int = 4) -> torchkv.KVMember:
    cache = torchkv.KVCache.empty(LAYOUT, num_pages, "cpu")
    return torchkv.join(cache, name, options=OPTIONS)


def idle(pipe: Connection, first: int, count: int) -> None:
    """Hosts some instances that do nothing."""
    members = [member(f"idle-{first + number}", num_pages=1) for number in range(count)]
    pipe.send([each.address for each in members])
    pipe.recv()
    for each in members:
        each.close()


def send(pipe: Connection) -> None:
    kv = member("sender")
    pipe.send(kv.address)
    kv.connect(pipe.recv()).result()
    number = 0
    while not pipe.poll():
        kv.send_pages(f"r{number}", PAGES, "receiver")
        try:
            kv.finish(f"r{number}", "receiver").wait()
        except torchkv.PeerLost:
            if not pipe.poll(5):  # the receiver left before this process was told of the end
                raise
        number += 1
    kv.close()


def receive(pipe: Connection) -> None:
    """Sends (when it ended, how long it took) of every request."""
    kv = member("receiver")
    pipe.send(kv.address)
    kv.connect(pipe.recv()).result()
    number, times = 0, []
    while not pipe.poll():
        began = time.monotonic()
        kv.recv_pages(f"r{number}", PAGES, "sender").wait()
        times.append((time.monotonic(), time.monotonic() - began))
        number += 1
        time.sleep(0.0005)
    pipe.recv()
    pipe.send(times)
    kv.close()


def footprint() -> tuple[int, int]:
    """Resident memory, without what the allocator keeps for later, and file descriptors."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    resident = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(resident.split()[1]) * 1024, len(os.listdir("/proc/self/fd"))


def main() -> None:
    instances = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    context = multiprocessing.get_context("spawn")
    children: list[tuple[Any, Connection]] = []

    def start(target: Callable[..., None], *args: Any) -> Connection:
        here, there = context.Pipe()
        child = context.Process(target=target, args=(there, *args))
        child.start()
        children.append((child, here))
        return here

    half = (instances - 2) // 2
    hosts = [start(idle, 0, half), start(idle, half, instances - 2 - half)]
    sender, receiver = start(send), start(receive)
    addresses = [address for host in hosts for address in host.recv()]
    pair = [sender.recv(), receiver.recv()]
    sender.send(pair[1])
    receiver.send(pair[0])
    time.sleep(3.0)
    began = time.monotonic()
    kv = member("newcomer")
    joined = time.monotonic()
    for call in [kv.connect(address) for address in pair]:
        call.result()
    before = footprint()
    met = time.monotonic()
    for call in [kv.connect(address) for address in addresses]:
        call.result()
    ended = time.monotonic()
    time.sleep(2.0)  # sockets of greetings linger for a second
    after = footprint()
    cycles = time.monotonic()
    for number in range(CYCLES):
        with member(f"again-{number}") as again:
            for call in [again.connect(address) for address in (*pair, *addresses)]:
                call.result()
    cycled = time.monotonic()
    time.sleep(1.0)
    receiver.send("enough")
    times = receiver.recv()
    sender.send("enough")
    print(f"join alone {joined - began:.3f} s; the two that transfer met in {met - joined:.3f} s; ", end="")
    print(f"{len(addresses)} more in {ended - met:.3f} s")
    phases = ("before", 0.0, began), ("meanwhile", began, ended), (f"while {CYCLES} come and go", cycles, cycled)
    for name, lo, hi in phases:
        took = np.array([seconds for at, seconds in times if lo <= at < hi]) * 1e6
        p50, p99, most = np.percentile(took, [50, 99, 100])
        print(f"2.1 MB {name}: {len(took)} requests, p50 {p50:.0f} us, p99 {p99:.0f} us, longest {most:.0f} us")
    memory, files = ((b - a) / len(addresses) for a, b in zip(before, after, strict=True))
    print(f"an idle peer costs {memory / 1024:.0f} KiB of resident memory and {files:.1f} file descriptors")
    for host in hosts:
        host.send("end")
    kv.close()
    for child, _ in children:
        child.join(60)


if __name__ == "__main__":
    main()
