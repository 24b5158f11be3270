"""Three jobs that are launched apart: one of two prefill ranks, two of one decode rank. One is killed and comes again.

python examples/three_jobs.py

This process is the router: it starts the jobs with torchrun, and hands out requests through a TCPStore, in which the
jobs also find each other. The last line says PASS or FAIL.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import torchkv

LAYERS, HEADS, PAGES = 8, 8, [3, 5, 8, 13]


def join(store: dist.Store, name: str) -> tuple[torchkv.KVMember, torchkv.KVCache]:
    """This process's rank of the instance ``name``, whose ranks are those of its torchrun job."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    layout = torchkv.KVLayout.gqa(
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=128,
        page_size=16,
        dtype=torch.float32,
        tp_rank=rank,
        tp_size=size,
    )
    cache = torchkv.KVCache.empty(layout, num_pages=64, device="cpu")
    return torchkv.join(cache, name, group=dist.group.WORLD, store=store), cache


def computed(number: int, heads: range) -> torch.Tensor:
    """What a prefill of request ``number`` computes, for some heads: [pages, page size, heads, dim]."""
    full = torch.randn(len(PAGES), 16, HEADS, 128, generator=torch.Generator().manual_seed(number))
    return full[:, :, list(heads)]


def prefill(store: dist.Store) -> None:
    kv, cache = join(store, "prefill")
    number = 0
    while dst := store.get(f"request/{number}").decode():
        name = f"request-{number}"
        values = computed(number, cache.layout.heads)
        try:
            for layer in range(LAYERS):
                cache.k[layer][PAGES], cache.v[layer][PAGES] = values + layer, values - layer
                kv.send_pages(name, PAGES, dst, layers=layer)
            kv.finish(name, dst).wait()
        except torchkv.KVError as error:
            kv.cancel(name)
            store.set(f"outcome/{number}", f"{type(error).__name__} ({error})")
        number += 1
    kv.close()


def decode(store: dist.Store, instance: str, number: int) -> None:
    """Takes requests from ``number`` on, as far as they are for this instance."""
    kv, cache = join(store, instance)
    pages = [page + 20 for page in PAGES]
    store.set(f"process/{instance}/{number}", str(os.getpid()))
    while name := store.get(f"request/{number}").decode():
        if name == instance:
            began = time.perf_counter()
            kv.recv_pages(f"request-{number}", pages, "prefill").wait()
            took = time.perf_counter() - began
            want = computed(number, cache.layout.heads)
            equal = all(
                torch.equal(cache.k[layer][pages], want + layer) and torch.equal(cache.v[layer][pages], want - layer)
                for layer in range(LAYERS)
            )
            store.set(f"outcome/{number}", f"{'equal' if equal else 'DIFFERENT'} after {took * 1e3:.1f} ms")
        number += 1
    kv.close()


class Router:
    """Starts and kills jobs, and hands out requests."""

    def __init__(self) -> None:
        self.store = dist.TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=60))
        self.jobs: dict[str, subprocess.Popen[bytes]] = {}
        self.processes: dict[str, int] = {}  # of decode instances
        self.number = 0

    def start(self, name: str, ranks: int) -> None:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        arguments = [__file__, name, str(self.store.port), str(self.number)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.jobs[name] = subprocess.Popen([*torchrun, *arguments], env=environment)

    def start_decode(self, name: str) -> None:
        """Returns when it takes requests."""
        self.start(name, 1)
        self.processes[name] = int(self.store.get(f"process/{name}/{self.number}"))

    def kill(self, name: str) -> None:
        """As if its host had failed: first torchrun, which would tell of the end, then the rank."""
        torchrun = self.jobs.pop(name)
        torchrun.kill()
        torchrun.wait()
        os.kill(self.processes.pop(name), signal.SIGKILL)

    def request(self, dst: str) -> str:
        self.store.set(f"request/{self.number}", dst)
        key = f"outcome/{self.number}"
        self.number += 1
        outcome = self.store.get(key).decode()
        print(f"request {self.number - 1} from prefill to {dst}: {outcome}", flush=True)
        return outcome

    def end(self) -> None:
        self.store.set(f"request/{self.number}", "")
        for name, process in self.jobs.items():
            assert process.wait(60) == 0, f"{name} failed"


def main() -> None:
    router = Router()
    router.start("prefill", 2)
    router.start_decode("decode-a")
    router.start_decode("decode-b")
    served = [router.request(dst) for dst in ("decode-a", "decode-b", "decode-a", "decode-b")]
    router.kill("decode-b")
    print("decode-b was killed")
    lost = router.request("decode-b")
    served.append(router.request("decode-a"))
    router.start_decode("decode-b")
    print("decode-b was started again")
    served += [router.request(dst) for dst in ("decode-b", "decode-a")]
    router.end()
    equal = sum(outcome.startswith("equal") for outcome in served)
    ok = equal == len(served) and lost.startswith("PeerLost")
    told = "PeerLost" if lost.startswith("PeerLost") else "NO PeerLost"
    verdict = f"{equal} of {len(served)} requests equal, {told} for 1 to an instance that was killed"
    print(f"{'PASS' if ok else 'FAIL'} {verdict}")
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        _, job, port, first = sys.argv
        rendezvous = dist.TCPStore("localhost", int(port), timeout=timedelta(seconds=60))
        if job == "prefill":
            prefill(rendezvous)
        else:
            decode(rendezvous, job, int(first))
