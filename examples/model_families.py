"""Models that keep more than K and V pages: prefill on one rank, decode on another, the same bits as in one process.

    torchrun --standalone --nproc-per-node 2 examples/model_families.py

Hybrids of attention and recurrent state (FalconH1, Jamba, Qwen3Next), sliding windows (GptOss), and a latent with
indexer keys (DeepseekV32), each with random weights. Pages and state live in a torchkv.KVCache on both ranks, filled
with NaN beforehand, and cross over through torchkv: pages layer by layer, state with its layer or at the end. Then each
kind of tensor is corrupted in turn, in received memory, and the logits must change. One line per model says PASS or
FAIL, and every rank exits with 0 or 1. Needs transformers (pip install "torchkv[demo]"), downloads nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import transformers
from disagg import controls, families, generation, models
from disagg.command_line import PROMPT_FILE
from disagg.family_cache import family_cache
from disagg.progress import Progress
from torch import nn

import torchkv

PREFILL, DECODE = 0, 1
HOST = torch.device("cpu")
NUM_SLOTS = 4
SLOTS = (3, 1)  # of the request's state, on each rank


@dataclass(frozen=True)
class Engine:
    """One rank's model and memory, and the process group that moves it. ``pages``: int64 ids, room for the prompt and,
    on the decode rank, for the new tokens. ``slot``: of the request's state."""

    args: argparse.Namespace
    name: str
    family: families.Family
    model: nn.Module
    prompt: torch.Tensor
    kv: torchkv.KVProcessGroup
    kv_cache: torchkv.KVCache
    pages: torch.Tensor
    slot: int
    progress: Progress

    @property
    def request(self) -> str:
        return f"{self.name}-0"

    @property
    def state_slot(self) -> int | None:
        """For torchkv's verbs: None for a model without state."""
        return self.slot if self.kv_cache.layout.stateful else None

    @property
    def prompt_pages(self) -> torch.Tensor:
        return self.pages[: -(-self.prompt.shape[1] // self.args.page_size)]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Prefill and decode models of every family on two ranks.",
        usage="torchrun --standalone --nproc-per-node 2 %(prog)s [options]",
    )
    parser.add_argument("--model", nargs="+", choices=families.FAMILIES, default=list(families.FAMILIES))
    parser.add_argument("--prompt-tokens", type=int, default=150, help="tokens of the prompt (default 150)")
    parser.add_argument("--new-tokens", type=int, default=12, help="tokens to generate (default 12)")
    parser.add_argument("--page-size", type=int, default=16, help="tokens per page (default 16)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the page ids")
    args = parser.parse_args()
    if args.page_size < 1 or args.new_tokens < 2:
        parser.error("--page-size must be at least 1, --new-tokens at least 2")
    least = families.WINDOW + 3 * args.page_size
    if not least <= args.prompt_tokens <= PROMPT_FILE.stat().st_size:
        parser.error(f"--prompt-tokens must be from {least} (longer than a window) to {PROMPT_FILE.stat().st_size}")
    return args


def build_engine(args: argparse.Namespace, name: str, kv: torchkv.KVProcessGroup) -> Engine:
    """The model and the memory of this rank, registered with torchkv. Collective."""
    rank = dist.get_rank()
    role = ("prefill", "decode")[rank]
    family = families.make(name)
    prompt = models.encode(PROMPT_FILE.read_bytes(), device=HOST)[:, : args.prompt_tokens]
    num_pages = -(-(args.prompt_tokens + (args.new_tokens if rank == DECODE else 0)) // args.page_size)
    # A pool in use: the request gets scattered pages, others on each side.
    shuffle = torch.Generator().manual_seed(2 * args.seed + rank)
    pages = torch.randperm(2 * num_pages, generator=shuffle)[:num_pages]
    layout = family.layout(args.page_size)
    num_slots = NUM_SLOTS if layout.stateful else 0
    kv_cache = torchkv.KVCache.empty(layout, 2 * num_pages, device=HOST, num_slots=num_slots, group=kv)
    controls.poison(kv_cache)
    kv.register(kv_cache, instance=role)
    model = models.build(family.config, seed=args.seed, device=HOST)
    progress = Progress(role, quiet=False)
    return Engine(args, name, family, model, prompt, kv, kv_cache, pages, SLOTS[rank], progress)


# ---------------------------------------------------------------------- the prefill rank


def prefill(engine: Engine) -> None:
    """Compute the prompt's cache and send it, in the way that the family names."""
    kv, request = engine.kv, engine.request
    cache = family_cache(engine.kv_cache, engine.pages, slot=engine.slot)
    kv.prefix_tokens(request, "decode")  # returns when memory is granted, so that nothing has to queue for that
    with sending(engine):
        first = generation.first_token(engine.model, engine.prompt, cache)
    # Whatever state has not been sent yet goes now; nothing can be forgotten.
    kv.finish(request, "decode", aux=first.to_bytes(4, "little"), state_slot=engine.state_slot).wait()


@contextlib.contextmanager
def sending(engine: Engine) -> Iterator[None]:
    """While the body runs the model, each decoder layer is sent as soon as it has run."""
    kv, request, pages, slot = engine.kv, engine.request, engine.prompt_pages, engine.state_slot
    if engine.family.sending == "pipeline":
        with torchkv.pipeline(engine.model, kv, request, pages, "decode", state_slot=slot):
            yield
        return
    layout = engine.kv_cache.layout
    with_state = {layer for state in layout.states for layer in layout.state_layers(state.name)}
    if engine.family.sending == "finish":
        with_state = set()

    def layer_sender(layer: int) -> Callable[..., None]:
        def send(module: nn.Module, inputs: object, output: object) -> None:
            kv.send_pages(request, pages, "decode", layers=layer)
            if layer in with_state:
                kv.send_state(request, layer, slot, "decode")

        return send

    hooks = [
        module.register_forward_hook(layer_sender(layer)) for layer, module in enumerate(engine.model.model.layers)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# ---------------------------------------------------------------------- the decode rank


def decode(engine: Engine) -> tuple[bool, str]:
    """Receive, generate, compare; whether all is well, and the verdict in a line."""
    received = engine.kv.recv_pages(engine.request, engine.prompt_pages, "prefill", state_slot=engine.state_slot)
    received.wait()
    first = int.from_bytes(received.aux, "little")
    engine.progress.say(
        f"{engine.name} ({engine.family.operation}): {received.bytes} bytes received"
        f"{without_windows(engine)}, {sent_how(engine)}"
    )

    wrong = controls.strays(engine.kv_cache, engine.prompt_pages, engine.slot, engine.args.prompt_tokens)
    ok, verdict = judge(engine, first)
    if wrong:
        ok, verdict = False, f"{verdict}; WRONG pages or slots were written: {', '.join(wrong)}"
    return ok, f"{engine.name}: {received.bytes} bytes received, {verdict}"


def judge(engine: Engine, first: int) -> tuple[bool, str]:
    """Compare with one process, and see that a comparison notices one kind of tensor being corrupt."""
    reference = generation.single_process(engine.model, engine.prompt, new_tokens=engine.args.new_tokens)
    arrived = controls.Snapshot(engine.kv_cache)
    if not is_same(compare(engine, first, reference)):
        return False, "logits DIFFER"
    noticed, unnoticed = [], []
    for control in controls.controls(engine.kv_cache, engine.prompt_pages, engine.slot):
        arrived.restore()
        control.target.neg_()
        result = compare(engine, first, reference)
        (unnoticed if is_same(result) else noticed).append(control.operation)
        engine.progress.say(f"signs flipped in {control.operation}: logits differ by up to {result.difference:.1e}")
    arrived.restore()
    if not is_same(compare(engine, first, reference)):
        return False, "logits DIFFER the second time, so they may have with a corrupt tensor for the same reason"
    verdict = "logits equal, bit by bit"
    if noticed:
        verdict += f"; corruption of {', '.join(noticed)} noticed"
    if unnoticed:
        verdict += f"; corruption of {', '.join(unnoticed)} NOT noticed"
    return not unnoticed, verdict


def compare(engine: Engine, first: int, reference: generation.Generation) -> generation.Comparison:
    """Generate from what was received; how that differs from what one process generates."""
    prompt_tokens = engine.args.prompt_tokens
    generated = generation.continue_from(
        engine.model,
        family_cache(engine.kv_cache, engine.pages, slot=engine.slot, length=prompt_tokens),
        first,
        prompt_tokens=prompt_tokens,
        new_tokens=engine.args.new_tokens,
    )
    return generation.compare(generated, reference, allowed=0.0)


def is_same(result: generation.Comparison) -> bool:
    return result.tokens_equal and result.logits_equal


def sent_how(engine: Engine) -> str:
    """How the other rank sent it, in words."""
    if engine.state_slot is None:
        state = ""
    elif engine.family.sending == "finish":
        state = f", state at the end (slot {SLOTS[PREFILL]} to {engine.slot})"
    else:
        state = f", state with its layer (slot {SLOTS[PREFILL]} to {engine.slot})"
    return f"pages {'in groups of layers' if engine.family.sending == 'pipeline' else 'layer by layer'}{state}"


def without_windows(engine: Engine) -> str:
    """What it would have been if all pages of all layers moved, in words; nothing for a model without windows."""
    layout = engine.kv_cache.layout
    if not layout.windows:
        return ""
    page_nbytes = sum(layout.page_nbytes(c.name) * len(layout.component_layers(c.name)) for c in layout.components)
    return f" ({len(engine.prompt_pages) * page_nbytes} if windows did not matter)"


# ---------------------------------------------------------------------- both


def run(args: argparse.Namespace, name: str) -> bool:
    """One model; both ranks learn whether all went well."""
    kv = dist.new_group([PREFILL, DECODE], backend="torchkv")  # a group of its own: each has one cache
    engine = build_engine(args, name, kv)
    ok = False
    if dist.get_rank() == PREFILL:
        prefill(engine)
    else:
        ok, verdict = decode(engine)
        print(f"{'PASS' if ok else 'FAIL'} {verdict}", flush=True)
    shared = torch.tensor([ok], dtype=torch.int64)
    dist.broadcast(shared, DECODE)
    dist.destroy_process_group(kv)
    return bool(shared.item())


def main() -> int:
    """Run and report; the exit code."""
    args = parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    transformers.logging.set_verbosity_error()  # a line for each kernel that a CPU has to do without
    dist.init_process_group("gloo")
    if dist.get_world_size() != 2:
        print(f"FAIL start this program on 2 ranks, not {dist.get_world_size()}", flush=True)
        return 2
    try:
        passed = [run(args, name) for name in args.model]
    except torchkv.KVError as error:
        print(f"FAIL rank {dist.get_rank()}: {error}", flush=True)
        raise
    dist.destroy_process_group()
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
