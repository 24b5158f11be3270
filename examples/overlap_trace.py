"""The same prefill twice: its pages sent once at the end, and sent with `torchkv.pipeline` while it is computed.

    torchrun --standalone --nproc-per-node 2 examples/overlap_trace.py --device cpu --out overlap_trace

Rank 0 prefills random tokens, rank 1 receives. For each way one pass is traced, after some that are not: its Chrome
trace (chrome://tracing, or Perfetto) has a range ``layer[3]`` for each layer and ``torchkv::send_layer[3]`` for each
call that sends; both are host time, where a GPU's kernels and the transfers themselves follow later. When they do is
printed, and drawn to timeline.png if matplotlib is installed. Rank 1 compares every byte with what rank 0 computed.
The last line says PASS or FAIL, which is about those bytes and not about times, and every rank exits with 0 or 1.
Needs transformers (pip install "torchkv[demo]"), downloads nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from disagg import generation, models
from disagg.paged_cache import paged_cache
from disagg.placement import place
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import torchkv

PREFILL, DECODE = 0, 1
WAYS = ("once", "pipelined")


@dataclass(frozen=True)
class Engine:
    """One rank's model (none on the decode rank), page pool, and the pages that every request uses: int64, [n]."""

    args: argparse.Namespace
    device: torch.device
    model: nn.Module | None
    kv: torchkv.KVProcessGroup
    kv_cache: torchkv.KVCache
    pages: torch.Tensor


@dataclass(frozen=True)
class Span:
    """Seconds since the start of the pass."""

    label: str
    began: float
    ended: float


@dataclass(frozen=True)
class Timeline:
    """One pass. ``computed``: when the first token was known. ``confirmed``: when all bytes were, in seconds.

    sends: from when the last layer of each was computed until its bytes were visible to the receiver, and ``finish``.
    """

    way: str
    layers: list[Span]
    sends: list[Span]
    computed: float
    confirmed: float
    nbytes: int

    @property
    def exposed(self) -> float:
        """Seconds from the end of the prefill until all bytes are confirmed."""
        return self.confirmed - self.computed

    @property
    def transfer(self) -> float:
        """Seconds in which at least one send was under way."""
        return covered(self.sends, until=self.confirmed)

    @property
    def hidden(self) -> float:
        """The share of ``transfer`` that lies before the end of the prefill."""
        return covered(self.sends, until=self.computed) / self.transfer


def covered(spans: Sequence[Span], *, until: float) -> float:
    """Seconds before ``until`` that lie in at least one of ``spans``."""
    total, end = 0.0, 0.0
    for span in sorted(spans, key=lambda span: span.began):
        began, ended = max(span.began, end), min(span.ended, until)
        total += max(ended - began, 0.0)
        end = max(end, ended)
    return total


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; exits with 2 and a reason if it makes no sense."""
    parser = argparse.ArgumentParser(
        description="Trace a prefill whose pages are sent at its end, and one whose pages are sent on the way.",
        usage="torchrun --standalone --nproc-per-node 2 %(prog)s [options]",
    )
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: a GPU a rank, or shared (default cpu)")
    add("--prompt-tokens", type=int, default=1024, help="tokens to prefill (default 1024)")
    add("--page-size", type=int, default=16, help="tokens per page (default 16)")
    add("--layers", type=int, default=8, help="layers of the model (default 8)")
    add("--hidden", type=int, default=256, help="width of the model, a multiple of 64 (default 256)")
    add("--group-size", type=int, default=1, help="layers to send at a time; 0: what is measured decides (default 1)")
    add("--warmups", type=int, default=2, help="passes before the traced one (default 2)")
    add("--seed", type=int, default=0, help="seed of weights, prompts and page ids")
    add("--out", type=Path, default=Path("overlap_trace"), help="folder for the traces (default overlap_trace)")
    add("--corrupt", action="store_true", help="then flip one received value and expect that to be noticed")
    args = parser.parse_args(argv)
    if min(args.prompt_tokens, args.page_size, args.layers) < 1 or min(args.group_size, args.warmups) < 0:
        parser.error("--prompt-tokens, --page-size and --layers must be at least 1, --group-size and --warmups 0")
    if args.hidden < 64 or args.hidden % 64:
        parser.error(f"--hidden must be a multiple of 64, not {args.hidden}")
    if os.environ.get("WORLD_SIZE") != "2":
        parser.error("start this program on 2 ranks: torchrun --standalone --nproc-per-node 2 ...")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no GPU here; use --device cpu")
    return args


def build_engine(args: argparse.Namespace, device: torch.device) -> Engine:
    """The page pool of this rank, registered with torchkv, and on the prefill rank the model. Collective."""
    rank = dist.get_rank()
    config = models.make_config("llama", layers=args.layers, hidden=args.hidden)
    layout = models.kv_layout(config, page_size=args.page_size, order="NHD", tp_rank=0, tp_size=1)
    needed = -(-args.prompt_tokens // args.page_size)
    shuffle = torch.Generator().manual_seed(2 * args.seed + rank)
    pages = torch.randperm(2 * needed, generator=shuffle)[:needed].to(device)
    kv = dist.group.WORLD
    kv_cache = torchkv.KVCache.empty(layout, 2 * needed, device=device, group=kv)
    kv.register(kv_cache, instance="prefill" if rank == PREFILL else "decode")
    model = models.build(config, seed=args.seed, device=device) if rank == PREFILL else None
    return Engine(args, device, model, kv, kv_cache, pages)


def poison(engine: Engine) -> None:
    """What is not computed or not received afterwards is NaN, and so is what is not written."""
    for tensor in [*engine.kv_cache.k, *engine.kv_cache.v]:
        tensor.fill_(float("nan"))
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)  # pages may be granted only when nothing of our own will write to them


# ---------------------------------------------------------------------- the prefill rank


class LayerClock:
    """While entered, times every layer and gives it a range in the trace.

    Entered before a pipeline, so that its hooks run first: a send belongs to no layer's range, and begins when the
    layer has ended.
    """

    def __init__(self, layers: nn.ModuleList, device: torch.device) -> None:
        self._layers = layers
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = []  # CUDA events around each layer, in order; on the host seconds
        self._called: list[float] = []  # when each layer's call returned: host seconds

    def __enter__(self) -> LayerClock:
        self._handles = []
        for number, layer in enumerate(self._layers):
            scope = record_function(f"layer[{number}]")
            self._handles.append(layer.register_forward_pre_hook(lambda *_, scope=scope: self._enter(scope)))
            self._handles.append(layer.register_forward_hook(lambda *_, scope=scope: self._leave(scope)))
        if self._on_gpu:
            torch.cuda.synchronize()
        self._start, self._start_mark = time.perf_counter(), self._mark()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def now(self) -> float:
        """Seconds since the start, on the host."""
        return time.perf_counter() - self._start

    def called(self, layer: int) -> float:
        """When the call of ``layer`` returned. On a GPU it has hardly been computed then."""
        return self._called[layer]

    def computed(self) -> list[Span]:
        """When each layer was computed. On a GPU, call it when the GPU is done."""
        seconds = [self._seconds(mark) for mark in self._marks]
        pairs = zip(seconds[::2], seconds[1::2], strict=True)
        return [Span(str(number), began, ended) for number, (began, ended) in enumerate(pairs)]

    def _enter(self, scope: record_function) -> None:
        scope.__enter__()
        self._marks.append(self._mark())

    def _leave(self, scope: record_function) -> None:
        self._marks.append(self._mark())
        scope.__exit__(None, None, None)
        self._called.append(self.now())

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, mark: Any) -> float:
        return float(self._start_mark.elapsed_time(mark) / 1e3 if self._on_gpu else mark - self._start_mark)


def prefill(engine: Engine, way: str, number: int) -> Timeline:
    """One prefill of new tokens, sent in this ``way``."""
    args, kv, request = engine.args, engine.kv, f"{way} {number}"
    assert engine.model is not None
    draw = torch.Generator().manual_seed(1000 * args.seed + 10 * number + WAYS.index(way))
    prompt = torch.randint(models.BOS, (1, args.prompt_tokens), generator=draw).to(engine.device)
    cache = paged_cache(engine.kv_cache, engine.pages)
    everything = tuple(range(args.layers))
    with LayerClock(engine.model.model.layers, engine.device) as clock:
        if way == "pipelined":
            size = args.group_size or None
            with torchkv.pipeline(engine.model, kv, request, engine.pages, "decode", group_size=size) as sending:
                first = generation.first_token(engine.model, prompt, cache)
                computed = clock.now()
            works, groups = sending.works, sending.groups
            assert not sending.swept, "every layer of this model runs, so every group is sent by its hook"
            called = [clock.called(group[-1]) for group in groups]
        else:
            first = generation.first_token(engine.model, prompt, cache)
            computed = clock.now()
            with record_function(f"torchkv::send_layer[0..{args.layers - 1}]"):
                works, groups, called = [kv.send_pages(request, engine.pages, "decode")], [everything], [computed]
        sealed = clock.now()
        finish = kv.finish(request, "decode", aux=first.to_bytes(4, "little"))
        finish.wait()
        confirmed = clock.now()
        layers = clock.computed()
    sends = [
        Span(span_of(group), max(began, layers[group[-1]].ended), began + work.seconds)
        for work, group, began in zip(works, groups, called, strict=True)
    ]
    sends.append(Span("finish", sealed, confirmed))
    return Timeline(way, layers, sends, computed, confirmed, sum(work.bytes for work in works))


def span_of(group: Sequence[int]) -> str:
    """Layers as text: "3" or "0..7"."""
    return str(group[0]) if len(group) == 1 else f"{group[0]}..{group[-1]}"


def traced_prefill(engine: Engine, way: str, number: int) -> Timeline:
    """The same under a profiler; the trace goes to WAY.json."""
    activities = [ProfilerActivity.CPU]
    if engine.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as trace:
        timeline = prefill(engine, way, number)
    path = engine.args.out / f"{way}.json"
    trace.export_chrome_trace(str(path))
    print(f"trace of the pass sent {way}: {path}", flush=True)
    return timeline


# ---------------------------------------------------------------------- what is shown


def report(args: argparse.Namespace, timelines: Sequence[Timeline]) -> None:
    """Print what was measured, and draw it if matplotlib is there."""
    print(f"{args.prompt_tokens} tokens, {args.layers} layers, on {args.device}, under the profiler", flush=True)
    print("sent       sends      MB  prefill ms  exposed ms  transfer ms  hidden", flush=True)
    for line in timelines:
        print(
            f"{line.way:9} {len(line.sends) - 1:6} {line.nbytes / 1e6:7.2f} {1e3 * line.computed:11.2f} "
            f"{1e3 * line.exposed:11.2f} {1e3 * line.transfer:12.2f} {line.hidden:7.1%}",
            flush=True,
        )
    print("exposed: from the end of the prefill until all bytes are confirmed; transfer: at least one send under way,")
    print("its layers computed; hidden: the share of that before the end of the prefill. One pass each.", flush=True)
    try:
        draw(timelines, args.out / "timeline.png")
    except ImportError as error:
        print(f'no timeline.png: {error} (it comes with pip install "torchkv[demo]")', flush=True)


def draw(timelines: Sequence[Timeline], path: Path) -> None:
    """The passes one above the other, on one axis of time. Raises ``ImportError`` without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 2.2 * len(timelines) + 0.6), layout="constrained")
    rows = figure.subplots(len(timelines), sharex=True)
    for axes, line in zip(rows, timelines, strict=True):
        for height, spans, colours in ((1, line.layers, ("C0", "C9")), (0, line.sends, ("C1", "C3"))):
            for number, span in enumerate(spans):
                width = 1e3 * (span.ended - span.began)
                axes.barh(height, width, left=1e3 * span.began, color=colours[number % 2], alpha=0.7)
        axes.axvline(1e3 * line.computed, color="black", linestyle="--", label="prefill ends")
        axes.axvline(1e3 * line.confirmed, color="black", linestyle=":", label="all bytes confirmed")
        axes.set_yticks([0, 1], ["sends", "layers"])
        axes.set_title(
            f"sent {line.way}: {1e3 * line.exposed:.2f} ms exposed, {line.hidden:.0%} of {1e3 * line.transfer:.2f} ms "
            "transfer hidden",
            fontsize=10,
        )
    rows[0].legend(loc="upper left", fontsize=8)
    rows[-1].set_xlabel("ms since the start of the pass")
    figure.savefig(path, dpi=120)
    print(f"timeline: {path}", flush=True)


# ---------------------------------------------------------------------- both ranks


def all_bytes_equal(engine: Engine) -> bool:
    """Compare with what the prefill rank has in its pages; that comes by a collective. True on the prefill rank."""
    equal = True
    for tensor in [*engine.kv_cache.k, *engine.kv_cache.v]:
        mine = tensor[engine.pages].cpu().contiguous()
        computed = mine.clone()
        dist.broadcast(computed, PREFILL)
        if dist.get_rank() == PREFILL:
            continue
        other = torch.ones(len(tensor), dtype=torch.bool, device=engine.device)
        other[engine.pages] = False
        equal = equal and bool(
            # As integers, since NaN, in the slots behind the prompt, is not equal to NaN.
            torch.equal(mine.view(torch.int32), computed.view(torch.int32))
            and computed.flatten(0, 1)[: engine.args.prompt_tokens].isfinite().all()
            and tensor[other].isnan().all()
        )
    return equal


def run_pass(engine: Engine, way: str, number: int) -> Timeline | None:
    """One request; what was measured, on the prefill rank."""
    poison(engine)
    if dist.get_rank() == PREFILL:
        dist.barrier()  # the receiver is ready
        last = number == engine.args.warmups
        return traced_prefill(engine, way, number) if last else prefill(engine, way, number)
    received = engine.kv.recv_pages(f"{way} {number}", engine.pages, "prefill")
    dist.barrier()
    received.wait()
    return None


def run(args: argparse.Namespace, device: torch.device) -> bool:
    """This rank's part. Both ranks learn whether all bytes were right; only the prefill rank has times to show."""
    engine = build_engine(args, device)
    args.out.mkdir(parents=True, exist_ok=True)
    timelines, equal = [], True
    for way in WAYS:
        for number in range(args.warmups + 1):
            timeline = run_pass(engine, way, number)
            equal = all_bytes_equal(engine) and equal
        timelines.append(timeline)
    noticed = True
    if args.corrupt:
        if dist.get_rank() == DECODE:
            engine.kv_cache.v[-1][int(engine.pages[-1]), 0, 0, 0].neg_()
        noticed = not all_bytes_equal(engine)
    shared = torch.tensor([equal, noticed], dtype=torch.int64)
    dist.broadcast(shared, DECODE)
    equal, noticed = map(bool, shared.tolist())
    measured = [timeline for timeline in timelines if timeline is not None]
    if measured:
        report(args, measured)
        control = f"; the flipped value was {'noticed' if noticed else 'NOT noticed'}" if args.corrupt else ""
        word = "PASS" if equal and noticed else "FAIL"
        sent = f"{measured[0].nbytes} bytes {'equal' if equal else 'DIFFER'}"
        print(f"{word} {sent} after each of {len(WAYS) * (args.warmups + 1)} passes{control}", flush=True)
    return equal and noticed


def main() -> int:
    """Run and report; the exit code."""
    args = parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    device = place(args.device).device
    dist.init_process_group("torchkv")
    try:
        ok = run(args, device)
    except torchkv.KVError as error:
        print(f"FAIL rank {dist.get_rank()}: {error}", flush=True)
        raise
    dist.destroy_process_group()
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
