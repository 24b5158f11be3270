"""Command line of the benchmark. Exit code 1 if a byte was wrong or a gate was missed.

``python -m torchkv.bench pipeline`` is a benchmark of its own, of layer pipelining; see its --help.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, TextIO

from torchkv.bench.cases import CASES
from torchkv.bench.local import PlanResult, plan_rate
from torchkv.bench.machine import machine
from torchkv.bench.pair import Result, run_case
from torchkv.bench.post import PostResult, post_cost
from torchkv.bench.prefix import PrefixResult, lookup_times
from torchkv.bench.request import RequestResult, request_cost
from torchkv.bench.shared_prefix import SharedPrefixResult, shared_prefix
from torchkv.bench.staged import StagedResult, staged_rates

HEADER = (
    f"{'case':22} {'lane':14} {'path':7} {'bytes':>10} {'pages':>7} {'layers':>6} {'GB/s':>7} {'p50_us':>10} "
    f"{'p99_us':>10} {'post_us':>8} {'limit':>12} {'GB/s':>7} {'ratio':>6} {'gate':>5} {'#wrong':>7}"
)


def main() -> int:
    if sys.argv[1:2] == ["pipeline"]:
        from torchkv.bench import pipeline_table

        return pipeline_table.run(sys.argv[2:])
    args = _parse()
    return _gpu(args) if args.device == "cuda" else _host(args)


def _gpu(args: argparse.Namespace) -> int:
    from torchkv.bench import gpu_table

    return gpu_table.run(only=args.only, repeats=args.repeats, report_only=args.report_only, as_json=args.json)


def _host(args: argparse.Namespace) -> int:
    out = sys.stderr if args.json else sys.stdout
    _say(
        out,
        f"# torchkv {_version()} bench: {machine('cpu')}; every run byte-checked, fresh random bytes, shuffled pages",
    )
    rows: list[dict[str, Any]] = [{"machine": machine("cpu")}]
    failed = False
    plan = plan_rate()
    _say(out, _plan_line(plan))
    rows.append({"plan": asdict(plan), "ratio": plan.ratio})
    post = post_cost()
    _say(out, _post_line(post))
    rows.append({"post": asdict(post)})
    _say(out, HEADER)
    for case in CASES:
        if args.only and args.only not in f"{case.name} {case.tls or ''}":
            continue
        result = run_case(case, nbytes=args.mib << 20, repeats=args.repeats)
        _say(out, _line(result))
        rows.append({**asdict(result), "ratio": result.ratio, "passed": result.passed})
        failed |= not result.passed
    for row in _others(args.only, args.repeats, out):
        rows.append(row)
        failed |= not row["passed"]
    if args.json:
        json.dump(rows, sys.stdout, indent=1)
        sys.stdout.write("\n")
    return int((failed and not args.report_only) or any(row.get("wrong") for row in rows))


def _others(only: str, repeats: int, out: TextIO) -> Iterator[dict[str, Any]]:
    """What is no row of the table: staging, the fixed cost of a request, what a prefix cache costs and saves."""
    if only in "staged":
        staged = staged_rates(repeats=repeats)
        _say(out, _staged_line(staged))
        ratios = {"ratio": staged.ratio, "times": staged.times}
        yield {"staged": asdict(staged), **ratios, "wrong": staged.wrong, "passed": staged.passed}
    if only in "request":
        request = request_cost()
        _say(out, _request_line(request))
        ratios = {"ratio": request.ratio, "ratio_p99": request.ratio_p99}
        yield {"request": asdict(request), **ratios, "wrong": request.wrong, "passed": request.passed}
    if only in "shared prefix":
        shared = shared_prefix()
        _say(out, _shared_prefix_line(shared))
        ratios = {"excess": shared.excess, "bytes_saved": shared.bytes_saved, "time_saved": shared.time_saved}
        yield {"shared prefix": asdict(shared), **ratios, "wrong": shared.wrong, "passed": shared.passed}
    if only in "prefix lookup":
        for lookup in lookup_times():
            _say(out, _lookup_line(lookup))
            yield {"prefix lookup": asdict(lookup), "wrong": lookup.wrong, "passed": lookup.passed}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m torchkv.bench", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the pages lie (default cpu)")
    parser.add_argument("--mib", type=int, default=256, help="payload of each run in MiB (default 256)")
    parser.add_argument("--repeats", type=int, default=9, help="timed runs of each case (default 9)")
    parser.add_argument("--only", default="", help="run only what has this in its name")
    parser.add_argument("--json", action="store_true", help="print results as JSON on stdout")
    parser.add_argument("--report-only", action="store_true", help="missed gates do not fail; wrong bytes still do")
    args = parser.parse_args()
    if args.mib < 1 or args.repeats < 1:
        parser.error("--mib and --repeats must be at least 1")
    return args


def _say(out: TextIO, line: str) -> None:
    out.write(line + "\n")
    out.flush()


def _line(r: Result) -> str:
    name = r.case.name + (f" [{r.case.tls}]" if r.case.tls else "")
    gate = "-" if r.case.gate is None else f"{r.case.gate:g}"
    return (
        f"{name:22} {r.lane:14} {r.path:7} {r.nbytes:10} {r.pages:7} {r.layers:6} {r.gbps:7.2f} {r.p50_us:10.0f} "
        f"{r.p99_us:10.0f} {r.post_us:8.1f} {r.case.limit:>12} {r.limit_gbps:7.2f} {r.ratio:6.2f} {gate:>5} {r.wrong:7}"
    )


def _plan_line(plan: PlanResult) -> str:
    return (
        f"plan: {plan.descriptors} descriptors in {plan.numpy_us:.0f} us, nested Python loops {plan.loops_us:.0f} us: "
        f"{plan.ratio:.0f}x (gate 100x)"
    )


def _post_line(post: PostResult) -> str:
    return (
        f"post: send_layer of {post.pages} pages returns in p50 {post.array_us:.1f} us (int64 array, gate 20 us), "
        f"p99 {post.array_p99_us:.1f} us; as a tensor p50 {post.tensor_us:.1f} us, as a list "
        f"{post.list_us:.1f} us"
    )


def _staged_line(staged: StagedResult) -> str:
    return (
        f"staged over TCP: {staged.nbytes} bytes in slices of 512 B at {staged.staged:.2f} GB/s, with checksums "
        f"{staged.checked:.2f}; {staged.times:.0f}x of descriptors ({staged.slices:.3f} GB/s; gate 10x), "
        f"{staged.ratio:.2f} of one contiguous put ({staged.put:.2f} GB/s; gate 0.6); #wrong {staged.wrong}"
    )


def _request_line(r: RequestResult) -> str:
    return (
        f"request: recv_pages, grant, one layer of {r.nbytes} bytes ({r.lane}), finish and verdict in "
        f"p50 {r.p50_us:.0f} us (gate 500 us), p99 {r.p99_us:.0f} us; {r.ratio:.1f}x and {r.ratio_p99:.1f}x "
        f"of a bare UCX round trip (p50 {r.ucx_p50_us:.1f} us, p99 {r.ucx_p99_us:.1f} us); #wrong {r.wrong}"
    )


def _shared_prefix_line(r: SharedPrefixResult) -> str:
    return (
        f"shared prefix: {r.prompts} prompts in {r.groups} groups, {r.moved} bytes moved, {r.excess:.4f} of those "
        f"lacking (gate 1.02); without the cache {r.bytes_saved:.2f}x the bytes and {r.time_saved:.2f}x the time "
        f"({r.full_seconds:.3f} s to {r.seconds:.3f} s, {r.cache_seconds:.3f} s of it in the cache); #wrong {r.wrong}"
    )


def _lookup_line(r: PrefixResult) -> str:
    return (
        f"prefix lookup: page size {r.page_size}, ids in {'an' if r.kind == 'array' else 'a'} {r.kind}, {r.cached} "
        f"tokens known: p50 {r.match_us:.0f} us (gate 500 us), p99 {r.match_p99_us:.0f} us; #wrong {r.wrong}"
    )


def _version() -> str:
    import torchkv

    return torchkv.__version__


if __name__ == "__main__":
    sys.exit(main())
