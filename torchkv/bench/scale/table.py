"""The command line of ``python -m torchkv.bench simulate``; docs/scale.md explains what it shows."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from torchkv.bench.machine import machine
from torchkv.bench.scale.memory import peer_memory
from torchkv.bench.scale.network import LinkModel
from torchkv.bench.scale.plot import draw
from torchkv.bench.scale.real import Measured, measure
from torchkv.bench.scale.resident import loop_cost
from torchkv.bench.scale.simulation import Outcome, Simulation
from torchkv.bench.scale.study import BUSY, LOADS, Study, calibrated, known_peers
from torchkv.bench.scale.workload import LONG, SHORT, Shape

__all__ = ["run"]

LOOPS = (2, 8, 32, 64)
WORKLOADS = (LONG, SHORT)
Say = Callable[[str], None]


def run(argv: Sequence[str]) -> int:
    """1 if a byte or message is missing, or a request costs what it must not cost; else 0."""
    args = _parse(argv)
    out = sys.stderr if args.json else sys.stdout

    def say(line: str) -> None:
        out.write(line + "\n")
        out.flush()

    where = f"{machine('cpu')}, load {os.getloadavg()[0]:.1f}"
    say(f"# torchkv bench simulate: {where}")
    cpu = calibrated() if args.cpu_us is None else args.cpu_us / 1e6
    study = Study(LinkModel(latency=args.latency_us / 1e6, bandwidth=args.gbytes * 1e9, cpu=cpu))
    say(
        f"# modelled: {args.latency_us:g} us one way, {args.gbytes:g} GB/s each way of a NIC, {1e6 * cpu:.1f} us of a "
        f"rank's thread for each frame and verb ({'measured' if args.cpu_us is None else 'given'})"
    )
    _cluster(study, args, say)
    _known(study, args, say)
    _loads(study, args, say)
    _memory(study, args, say)
    if not args.no_loops:
        _loops(study, args, say)
    _measured(study, args, say)
    for problem in study.problems:
        say(f"WRONG: {problem}")
    if args.json:
        json.dump({"machine": where, **dataclasses.asdict(study)}, sys.stdout, indent=1)
        sys.stdout.write("\n")
    if args.plot is not None:
        draw(study, args.plot, where)
    return int(bool(study.problems))


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m torchkv.bench simulate", description=__doc__)
    powers = tuple(1 << i for i in range(1, 13))
    parser.add_argument("--ranks", type=_sizes, default=powers, help="sizes of the cluster (default 2,4,...,4096)")
    parser.add_argument("--requests", type=int, default=2, help="requests for each rank, 400 at least (default 2)")
    parser.add_argument("--least", type=int, default=400, help="requests of each run, at least (default 400)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--latency-us", type=float, default=5.0, help="of the network, one way (default 5)")
    parser.add_argument("--gbytes", type=float, default=50.0, help="GB/s of each NIC, each way (default 50)")
    parser.add_argument("--cpu-us", type=float, help="of a rank's thread for a frame or verb (default: measured)")
    parser.add_argument("--at", type=int, default=64, help="ranks of the runs with more and more load (default 64)")
    parser.add_argument("--real", type=_sizes, default=(2, 4, 8, 16), help="real ranks to measure (default 2,4,8,16)")
    parser.add_argument("--no-real", action="store_true", help="measure no real ranks")
    parser.add_argument("--no-loops", action="store_true", help="leave out the resident loop")
    parser.add_argument("--json", action="store_true", help="print results as JSON on stdout")
    parser.add_argument("--plot", type=Path, help="draw the results (SVG or PNG)")
    args = parser.parse_args(argv)
    if min(args.requests, args.least, args.latency_us, args.gbytes) <= 0 or (args.cpu_us or 1) <= 0:
        parser.error("numbers must be above 0")
    return args


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(Shape(int(part)).ranks for part in text.split(","))


def _requests(args: argparse.Namespace, ranks: int) -> int:
    return int(max(args.least, ranks * args.requests))


HEADER = (
    f"{'ranks':>6} {'TP':>6} {'workload':8} {'requests':>8} {'offered/s':>9} {'served/s':>9} {'p50 us':>8} "
    f"{'p99 us':>8} {'messages':>8} {'frames':>7} {'bytes':>7} {'CPU us':>7} {'NIC':>5} {'thread':>6}"
)


def _line(r: Outcome) -> str:
    return (
        f"{r.ranks:6} {f'{r.prefill_tp}>{r.decode_tp}':>6} {r.workload:8} {r.requests:8} {r.offered:9.0f} "
        f"{r.served:9.0f} {1e6 * r.p50:8.0f} {1e6 * r.p99:8.0f} {r.messages_per_request:8.2f} "
        f"{r.frames_per_request:7.2f} {r.frame_nbytes / r.requests:7.0f} {1e6 * r.cpu_per_request:7.0f} {r.nic:5.2f} "
        f"{r.thread:6.2f}"
    )


def _cluster(study: Study, args: argparse.Namespace, say: Say) -> None:
    say("\n# A cluster: all ranks are busy. messages, frames, bytes of frames, CPU: of one request, on all its ranks")
    say("# NIC, thread: the part of the time in which the busiest is busy. Modelled: times, rates. Measured: CPU")
    say(HEADER)
    for workload in WORKLOADS:
        for ranks in args.ranks:
            requests = _requests(args, ranks)
            made = Simulation(Shape(ranks), workload, requests=requests, seed=args.seed, model=study.model)
            study.cluster.append(made.run())
            say(_line(study.cluster[-1]))


def _known(study: Study, args: argparse.Namespace, say: Say) -> None:
    peers = [ranks for ranks in args.ranks if ranks >= BUSY]
    if not peers:
        return
    say(f"\n# The same requests among {BUSY} ranks that know more and more; calls: of torchkv's functions, a request")
    say("# new pairs: calls where all ranks are used, and nearly each request is the first between its two instances")
    say(f"{'known':>6} {'calls':>8} {'CPU us':>7} {'new pairs':>9}")
    study.known += known_peers(peers, LONG, study.model, requests=args.least, seed=args.seed)
    for known in study.known:
        say(f"{known.peers:6} {known.calls:8.1f} {1e6 * known.cpu:7.0f} {known.strangers:9.0f}")


def _loads(study: Study, args: argparse.Namespace, say: Say) -> None:
    say(f"\n# Where it bends: {args.at} ranks, more and more requests")
    say(HEADER)
    for workload in WORKLOADS:
        for load in LOADS[workload.name]:
            requests = 4 * _requests(args, args.at)
            made = Simulation(Shape(args.at), workload, requests=requests, seed=args.seed, model=study.model, load=load)
            study.loads.append(made.run())
            say(_line(study.loads[-1]))


def _memory(study: Study, args: argparse.Namespace, say: Say) -> None:
    say("\n# Bytes that a rank keeps for each peer: known, and more once it has sent a request (tracemalloc)")
    say(f"{'peers':>6} {'known':>7} {'served':>7} {'all MB':>7}")
    for peers in args.ranks:
        found = peer_memory(peers, LONG)
        study.memory.append(found)
        say(f"{peers:6} {found.known:7.0f} {found.served:7.0f} {peers * (found.known + found.served) / 1e6:7.2f}")


def _loops(study: Study, args: argparse.Namespace, say: Say) -> None:
    say("\n# The resident loop, in one process: a turn with nothing to do, and both loops for one request of 32 layers")
    say(f"{'loops':>6} {'turn ns':>8} {'request us':>10} {'turns':>6}")
    loop_cost(2, requests=3)
    for loops in LOOPS:
        cost = loop_cost(loops, requests=args.least)
        study.loops.append(cost)
        say(f"{loops:6} {1e9 * cost.turn:8.0f} {1e6 * cost.request:10.1f} {cost.turns:6.1f}")


def _measured(study: Study, args: argparse.Namespace, say: Say) -> None:
    if args.no_real:
        return
    say("\n# Real processes of this machine, requests as `short`, every byte checked. CPU of one: whole processes,")
    say("# and of that the functions that simulated ranks run, too")
    say(
        f"{'ranks':>6} {'served by':12} {'requests':>8} {'served/s':>9} {'messages':>8} {'CPU us':>7} {'of that':>7} "
        f"{'wrong':>5}"
    )
    for apart in (False, True):
        for ranks in args.real:
            found = measure(Shape(ranks), SHORT, requests=args.least, apart=apart)
            study.measured.append(found)
            say(_measured_line(found))


def _measured_line(m: Measured) -> str:
    return (
        f"{m.ranks:6} {'messages' if m.apart else 'loops':12} {m.requests:8} {m.throughput:9.0f} "
        f"{m.messages_per_request:8.2f} {1e6 * m.cpu_per_request:7.0f} {1e6 * m.protocol_per_request:7.0f} {m.wrong:5}"
    )
