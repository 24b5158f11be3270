"""Prefill a prompt on some ranks, decode it on others, and check the result against one process that does both.

    torchrun --standalone --nproc-per-node 3 examples/disaggregated_generate.py --model llama --prefill 2 --decode 1

Ranks 0..P-1 prefill with tensor parallelism P, ranks P..P+D-1 decode with tensor parallelism D. Each layer's pages
leave with torchkv the moment the layer has computed them; nothing but pages and the first token crosses over. The
decode ranks begin with that token at once, and each of their layers waits for its own pages only.
With --device cuda everything lives on GPUs, one a rank where there are enough, and no layer waits for the host.
The first decode rank then runs the whole model on its own and compares tokens and logits. The last line says PASS
or FAIL, and every rank exits with 0 or 1. Needs transformers (pip install "torchkv[demo]"), downloads nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from disagg import generation, models
from disagg.command_line import parse_args, read_prompt
from disagg.early_start import Announcement, announced, confirm
from disagg.paged_cache import paged_cache
from disagg.placement import Placement, place
from disagg.progress import Progress
from disagg.tensor_parallel import shard
from torch import nn
from transformers import PreTrainedConfig

import torchkv

REQUEST = "demo-0"
AGAIN = 12  # requests by which two ways to begin decoding are compared


@dataclass(frozen=True)
class Role:
    """What this rank does: ``name`` is "prefill" or "decode", and also the name of the torchkv instance."""

    name: str
    tp_rank: int
    tp_size: int
    tp_group: dist.ProcessGroup
    page_size: int
    order: str


@dataclass(frozen=True)
class Engine:
    """One rank's model, its pages, and the process group that moves them. ``pages``: ids, int64 [n] on the device,
    with room for the prompt and, on the decode side, for the new tokens."""

    args: argparse.Namespace
    role: Role
    config: PreTrainedConfig
    model: nn.Module
    prompt: torch.Tensor
    kv: torchkv.KVProcessGroup
    kv_cache: torchkv.KVCache
    pages: torch.Tensor
    progress: Progress


@dataclass(frozen=True)
class Decoded:
    """What a decode rank has to show: its receive (``nbytes``: of all decode ranks), what it generated from the pages,
    and with --corrupt what it generated after one page was flipped."""

    received: torchkv.KVWork
    nbytes: int
    generated: generation.Generation
    corrupted: generation.Generation | None


def assign_role(args: argparse.Namespace, collectives: str) -> Role:
    """This rank's role. Collective: every rank takes part in making both tensor-parallel groups."""
    rank = dist.get_rank()
    world = range(args.prefill + args.decode)
    groups = {
        "prefill": dist.new_group(world[: args.prefill], backend=collectives),
        "decode": dist.new_group(world[args.prefill :], backend=collectives),
    }
    if rank < args.prefill:
        return Role("prefill", rank, args.prefill, groups["prefill"], args.page_size, "NHD")
    return Role("decode", rank - args.prefill, args.decode, groups["decode"], args.decode_page_size, args.order)


def build_engine(args: argparse.Namespace, role: Role, device: torch.device) -> Engine:
    """The model shard and the page pool of this rank, registered with torchkv. Collective."""
    kv = dist.group.WORLD
    config = models.make_config(args.model, layers=args.layers, hidden=args.hidden)
    prompt = read_prompt(args, device)
    layout = models.kv_layout(
        config, page_size=role.page_size, order=role.order, tp_rank=role.tp_rank, tp_size=role.tp_size
    )
    model = models.build(config, seed=args.seed, device=device)
    shard(model, config, layout.heads, rank=role.tp_rank, size=role.tp_size, group=role.tp_group)

    new_tokens = args.new_tokens if role.name == "decode" else 0
    pages_needed = -(-(prompt.shape[1] + new_tokens) // role.page_size)
    # A pool in use: the request gets scattered pages, others on each side.
    pool_size = 2 * pages_needed
    shuffle = torch.Generator().manual_seed(2 * args.seed + (role.name == "decode"))
    pages = torch.randperm(pool_size, generator=shuffle)[:pages_needed].to(device)
    kv_cache = torchkv.KVCache.empty(layout, pool_size, device=device, group=kv)
    for component in layout.components:
        for tensor in kv_cache[component.name]:
            tensor.fill_(float("nan"))  # what is used without having been computed or received spoils every logit
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # pages may be granted only when nothing of our own will write to them any more
    kv.register(kv_cache, instance=role.name)
    label = f"{role.name} (TP {role.tp_size})"
    progress = Progress(label, quiet=role.tp_rank > 0)
    progress.say(
        f"{args.model}, {args.layers} layers, width {args.hidden}; prompt of {prompt.shape[1]} tokens in "
        f"{pages_needed} of {pool_size} pages ({role.page_size} tokens, {role.order})"
    )
    return Engine(args, role, config, model, prompt, kv, kv_cache, pages, progress)


def layer_sender(engine: Engine, request: str) -> Callable[[int], torchkv.KVWork]:
    """The verb that suits this pair of layouts: whole pages if both sides cut the cache alike, else slices."""
    args, kv, pages = engine.args, engine.kv, engine.pages
    if args.path != "auto":
        return lambda layer: kv.send_pages(request, pages, "decode", layers=layer)
    alike = args.page_size == args.decode_page_size
    if args.model != "deepseek_v3":  # MLA has one latent per token: no heads to divide or to order
        alike = alike and args.prefill == args.decode and args.order == "NHD"
    if alike:
        return lambda layer: kv.send_layer(request, layer, pages, "decode")
    return lambda layer: kv.send_slice(request, layer, pages, "decode")


def prefill(engine: Engine) -> None:
    """Compute the prompt's cache, hand each layer to torchkv as soon as it is there, then seal the request."""
    progress, layers = engine.progress, engine.config.num_hidden_layers
    send = layer_sender(engine, REQUEST)
    sends: list[torchkv.KVWork] = []

    def on_layer(layer: int) -> None:
        sends.append(send(layer))
        progress.step("layers computed and on their way:", len(sends), layers)

    cache = paged_cache(engine.kv_cache, engine.pages, on_layer=on_layer)
    dist.barrier()  # only so that both sides print times from one common start
    progress.restart()
    first = generation.first_token(engine.model, engine.prompt, cache)
    computed = progress.seconds()
    seal(engine, REQUEST, first)
    exposed = progress.seconds() - computed

    nbytes = sum(work.bytes for work in sends)
    per_layer = statistics.median(work.seconds for work in sends)
    # From the call to all bytes visible on the other side. A host computes the next layer on the same cores meanwhile;
    # on a GPU the call comes before the layer has been computed, so its wait for that is in the time.
    pace = f"{1e3 * per_layer:.1f} ms a layer, from the call"
    if engine.args.device == "cpu":
        pace = f"{pace} ({nbytes / layers / per_layer / 1e9:.2f} GB/s beside the computation)"
    paths = ", ".join(sorted({work.path for work in sends}))
    progress.say(
        f"{engine.prompt.shape[1]} tokens computed in {computed:.2f} s; this rank sent {nbytes / 1e6:.2f} MB, "
        f"{len(engine.pages)} pages x {layers} layers, path {paths}: {pace}; all confirmed {1e3 * exposed:.1f} ms later"
    )
    for rank in decode_ranks(engine):
        progress.say(f"link to {engine.kv.explain(rank)}")
    send_again(engine, first)


def decode_ranks(engine: Engine) -> range:
    return range(engine.args.prefill, engine.args.prefill + engine.args.decode)


def seal(engine: Engine, request: str, first: int) -> None:
    """Nothing more will come; the decode ranks get the first token. Returns when all of them have everything."""
    announcement = Announcement(first, decode_ranks(engine) if engine.role.tp_rank == 0 else ())
    engine.kv.finish(request, "decode", aux=first.to_bytes(4, "little")).wait()
    announcement.wait()


def send_again(engine: Engine, first: int) -> None:
    """The same pages once more, all layers at once, as often as `compare_starts` wants them."""
    for number in range(AGAIN):
        request = f"again-{number}"
        send = layer_sender(engine, request)
        dist.barrier()
        for layer in engine.kv_cache.layout.layers:
            send(layer)
        seal(engine, request, first)


def decode(engine: Engine) -> Decoded:
    """Receive the cache while generating from it; with --corrupt, generate once more after flipping one page."""
    args, progress = engine.args, engine.progress
    granted = engine.pages[: -(-engine.prompt.shape[1] // engine.role.page_size)]
    received = engine.kv.recv_pages(REQUEST, granted, "prefill")
    dist.barrier()
    progress.restart()
    first = announced(0)
    generated, corrupted = generate(engine, first, args.new_tokens, received=received), None
    compare_starts(engine, granted)
    nbytes = torch.tensor([received.bytes])
    dist.all_reduce(nbytes, group=engine.role.tp_group)
    if args.corrupt:
        if engine.role.tp_rank == 0:
            corrupt_one_page(engine, granted)
        corrupted = generate(engine, first, args.new_tokens)
    return Decoded(received, int(nbytes), generated, corrupted)


def generate(
    engine: Engine, first: int, new_tokens: int, *, received: torchkv.KVWork | None = None, quiet: bool = False
) -> generation.Generation:
    """New tokens from the received cache; they overwrite what an earlier call added behind the prompt.

    ``received``: of a request that is still under way. Each layer of the first step waits for its own pages only.
    """

    def on_token(done: int) -> None:
        if received is not None and done == 2:  # prefill gave the first
            confirm(received, first)
        if not quiet:
            engine.progress.step("tokens generated:", done, new_tokens)

    prompt_tokens = engine.prompt.shape[1]
    before_layer = None if received is None else received.wait_layer
    return generation.continue_from(
        engine.model,
        paged_cache(engine.kv_cache, engine.pages, length=prompt_tokens, before_layer=before_layer),
        first,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        on_token=on_token,
    )


def compare_starts(engine: Engine, granted: torch.Tensor) -> None:
    """Print how long the first step takes if it waits for all layers first, and if each layer waits for its own.

    Both from the moment that its token is known to the moment that its result counts.
    """
    early: list[float] = []
    late: list[float] = []
    for number in range(AGAIN):
        received = engine.kv.recv_pages(f"again-{number}", granted, "prefill")
        dist.barrier()
        first = announced(0)
        began = time.perf_counter()
        if number % 2:
            received.wait()
        generate(engine, first, 2, received=received, quiet=True)
        (late if number % 2 else early).append(time.perf_counter() - began)
    gained = statistics.median(late) - statistics.median(early)
    engine.progress.say(
        f"all layers sent at once: the next token comes {1e3 * statistics.median(early):.1f} ms after the first if "
        f"each layer waits for its own pages, {1e3 * statistics.median(late):.1f} ms if all are waited for first: "
        f"{1e3 * abs(gained):.1f} ms {'earlier' if gained >= 0 else 'later'} (medians of {len(early)} requests each)"
    )


def corrupt_one_page(engine: Engine, granted: torch.Tensor) -> None:
    """The negative control: flip the signs in one received page of one layer, a mild and finite error."""
    layout = engine.kv_cache.layout
    name, layer, page = layout.components[0].name, len(layout.layers) // 2, int(granted[len(granted) // 2])
    engine.kv_cache[name][layer][page].neg_()
    engine.progress.say(f"--corrupt: flipped the signs in page {page} of component {name!r}, layer {layer}")


def check(engine: Engine, decoded: Decoded) -> tuple[bool, str]:
    """Compare with the whole model in this one process; whether all is well, and the verdict in a line."""
    args, say = engine.args, engine.progress.say
    say("computing the single-process reference")
    whole = models.build(engine.config, seed=args.seed, device=engine.prompt.device)
    reference = generation.single_process(whole, engine.prompt, new_tokens=args.new_tokens)
    # With one rank on each side both runs do the same arithmetic in the same order: the same bits.
    exact = args.prefill == args.decode == 1
    allowed = 0.0 if exact else generation.rounding_allowance(reference, engine.config)
    result = generation.compare(decoded.generated, reference, allowed=allowed)

    say(f"text: {models.render(decoded.generated.tokens)}")
    say(f"tokens equal: {'yes' if result.tokens_equal else 'NO'} ({args.new_tokens} tokens)")
    rule = "bitwise: both runs do the same maths" if exact else "float32 sums in another order"
    say(
        f"logits: largest difference {result.difference:.1e}, allowed {allowed:.1e} ({rule}); "
        f"changing a token would take {result.closest_call:.1e}"
    )
    ok = result.tokens_equal and result.logits_equal
    verdict = (
        f"{args.model}, prefill TP {args.prefill} -> decode TP {args.decode}: "
        f"tokens {'equal' if result.tokens_equal else 'DIFFER'}, "
        f"logits {'equal' if result.logits_equal else 'DIFFER'}, "
        f"{decoded.nbytes / 1e6:.2f} MB received, path {decoded.received.path}"
    )
    if decoded.corrupted is not None:
        control = generation.compare(decoded.corrupted, reference, allowed=allowed)
        noticed = not control.logits_equal
        say(
            f"with the flipped page: largest difference {control.difference:.1e}, tokens equal: "
            f"{'yes' if control.tokens_equal else 'no'}"
        )
        ok = ok and noticed
        verdict += f"; the flipped page was {'noticed' if noticed else 'NOT noticed'}"
    return ok, verdict


def run(args: argparse.Namespace, placement: Placement) -> tuple[bool, str]:
    """This rank's part. Every rank learns whether all went well; only the first decode rank has the verdict."""
    engine = build_engine(args, assign_role(args, placement.collectives), placement.device)
    ok, verdict = False, ""
    if engine.role.name == "prefill":
        prefill(engine)
    else:
        decoded = decode(engine)
        if engine.role.tp_rank == 0:
            ok, verdict = check(engine, decoded)
            if not ok:
                # Before any rank can exit with 1, upon which torchrun ends the others.
                print(f"FAIL {verdict}", flush=True)
    shared = torch.tensor([ok], dtype=torch.int64)
    dist.broadcast(shared, src=args.prefill)
    return bool(shared.item()), verdict


def main() -> int:
    """Run and report; the exit code."""
    args = parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    placement = place(args.device)
    path = None if args.path == "auto" else args.path
    dist.init_process_group("torchkv", pg_options=torchkv.Options(transport=args.transport, path=path))
    rank = dist.get_rank()
    try:
        ok, verdict = run(args, placement)
    except torchkv.KVError as error:
        print(f"FAIL rank {rank}: {error}", flush=True)
        raise
    dist.destroy_process_group()
    if ok and verdict:
        print(f"PASS {verdict}", flush=True)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
