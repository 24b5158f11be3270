"""python -m examples.server: a router, prefill and decode workers on this machine; or one of them (docs/server.md)."""

from __future__ import annotations

import argparse
import asyncio
import logging
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import cycle, repeat

ROLES = ("local", "router", "prefill", "decode")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.server", description=__doc__)
    add = parser.add_argument
    add("role", nargs="?", choices=ROLES, default="local", help="local (default): all of them, in processes")
    add("--model", default="llama", help="llama, qwen3: tiny, with random weights; or a checkpoint (default llama)")
    add(
        "--device",
        default="cpu",
        help="of workers: cpu, cuda (each worker of `local` on the next GPU), cuda:1 (default cpu)",
    )
    add("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    add("--port", type=int, help="of the router (default 8000); of a worker (default: any)")
    add("--router", default="http://127.0.0.1:8000", metavar="URL", help="where workers find the router")
    add("--patience", type=float, default=5.0, help="seconds a request waits for a decode worker (default 5)")
    add("--instance", metavar="NAME", help="of a worker, which no other one that runs has (default: a new one)")
    add("--prefill", type=int, default=1, metavar="N", help="prefill workers of `local` (default 1)")
    add("--decode", type=int, default=1, metavar="N", help="decode workers of `local` (default 1)")
    add("--blocks", type=int, default=256, help="of a worker's KV cache (default 256)")
    add("--page-size", type=int, default=16, help="tokens in a block (default 16)")
    return parser.parse_args(argv)


async def route(args: argparse.Namespace) -> None:
    from examples.server.api import make_app
    from examples.server.model import load_tokenizer
    from examples.server.router import Router
    from examples.server.web import Signature, listening

    signature = Signature()
    router, tokenizer = Router(signature, patience=args.patience), load_tokenizer(args.model)
    app = make_app(router, signature, model=args.model, tokenizer=tokenizer)
    async with listening(app, args.host, 8000 if args.port is None else args.port) as (_, url):
        print(f"status page and OpenAI API: {url}", flush=True)


async def work(args: argparse.Namespace) -> None:
    from examples.server.worker import run

    await run(
        args.role,
        args.instance or f"{args.role}-{secrets.token_hex(3)}",
        router=args.router,
        model=args.model,
        device=args.device,
        blocks=args.blocks,
        page_size=args.page_size,
        host=args.host,
        port=args.port or 0,
    )


def run_all(args: argparse.Namespace) -> int:
    """Starts all processes, and ends them when it is told to, or when the router ends. Workers may come and go."""
    common = ["--model", args.model, "--host", args.host]
    worker = [*common, "--blocks", str(args.blocks), "--page-size", str(args.page_size)]
    port = str(8000 if args.port is None else args.port)
    router = _start("router", *common, "--port", port, "--patience", str(args.patience), stdout=True)
    workers: list[subprocess.Popen[str]] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        assert router.stdout is not None
        first = router.stdout.readline()
        if not first:  # it has not started, and said why
            return router.wait()
        print(first, end="", flush=True)
        where = ["--router", first.rpartition(" ")[2].strip()]
        roles = ["prefill"] * args.prefill + ["decode"] * args.decode
        for role, device in zip(roles, _devices(args.device), strict=False):
            workers.append(_start(role, *worker, *where, "--device", device))
        return router.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        for process in (*workers, router):
            process.terminate()
        for process in (*workers, router):
            process.wait()


def _devices(name: str) -> Iterator[str]:
    """The device of each worker, for ever."""
    if name != "cuda":
        return repeat(name)
    import torch

    return cycle([f"cuda:{index}" for index in range(torch.cuda.device_count())] or [name])


def _start(role: str, *arguments: str, stdout: bool = False) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "examples.server", role, *arguments]
    # A session of their own: they end when this process says so, not all at once by Ctrl-C.
    return subprocess.Popen(command, text=True, start_new_session=True, stdout=subprocess.PIPE if stdout else None)


def main() -> int:
    args = parse_args()
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s", level=logging.WARNING)
    logging.getLogger("examples.server").setLevel(logging.INFO)
    if args.role == "local":
        return run_all(args)
    asyncio.run(route(args) if args.role == "router" else work(args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
