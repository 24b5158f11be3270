"""A dialogue between a user and a model that prefills on one rank and decodes on another, over a prefix cache.

    torchrun --standalone --nproc-per-node 2 examples/multi_turn.py

Every turn's prompt is the whole dialogue so far. The decode rank keeps the pages of earlier prompts in a
`torchkv.PrefixCache`, so only the pages behind them are sent; the prefill rank keeps its own, so it computes only what
is new. The dialogue is then held once more with nothing kept on the decode rank, and a third time in one process
without torchkv. All three must give the same logits, bit by bit. The last line says PASS or FAIL, and every rank exits
with 0 or 1. Needs transformers (pip install "torchkv[demo]"), downloads nothing.
"""

from __future__ import annotations

import argparse
import functools
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from disagg import generation, models
from disagg.command_line import PROMPT_FILE
from disagg.paged_cache import paged_cache
from disagg.progress import Progress
from torch import nn
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache

import torchkv

PREFILL, DECODE = 0, 1
HOST = torch.device("cpu")


@dataclass(frozen=True)
class Engine:
    """One rank's model and pages, and the process group that moves them."""

    args: argparse.Namespace
    model: nn.Module
    kv: torchkv.KVProcessGroup
    kv_cache: torchkv.KVCache
    progress: Progress

    def prefixes(self) -> torchkv.PrefixCache:
        """An empty prefix cache over this rank's pages, with none of them in use."""
        return torchkv.PrefixCache(self.kv_cache.num_pages, self.args.page_size)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.args.page_size)


@dataclass(frozen=True)
class Turn:
    """What the decode rank has to show for one turn. ``known``: tokens of the prompt that it held already."""

    prompt_tokens: int
    known: int
    nbytes: int
    generated: generation.Generation


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="A dialogue over a prefix cache.",
        usage="torchrun --standalone --nproc-per-node 2 %(prog)s [options]",
    )
    parser.add_argument("--turns", type=int, default=10, help="questions and answers (default 10)")
    parser.add_argument("--question-tokens", type=int, default=150, help="tokens of each question (default 150)")
    parser.add_argument("--new-tokens", type=int, default=16, help="tokens of each answer (default 16)")
    parser.add_argument("--page-size", type=int, default=16, help="tokens per page (default 16)")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model (default 4)")
    parser.add_argument("--hidden", type=int, default=128, help="width of the model, a multiple of 64 (default 128)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    parser.add_argument("--corrupt", action="store_true", help="flip a kept page before the last turn; must be noticed")
    args = parser.parse_args()
    if min(args.turns, args.question_tokens, args.page_size, args.layers) < 1 or args.new_tokens < 2:
        parser.error("--turns, --question-tokens, --page-size and --layers must be at least 1, --new-tokens at least 2")
    if args.corrupt and args.turns < 2:
        parser.error("--corrupt needs --turns 2: in the first turn no page is kept")
    return args


def ask(args: argparse.Namespace, history: list[int], turn: int) -> list[int]:
    """The prompt of this turn: everything said so far and the next question."""
    text = models.encode(PROMPT_FILE.read_bytes(), device=HOST)[0].tolist()
    first = turn * args.question_tokens
    return history + [text[at % len(text)] for at in range(first, first + args.question_tokens)]


def build_engine(args: argparse.Namespace) -> Engine:
    """The model and the page pool of this rank, registered with torchkv. Collective."""
    name = "prefill" if dist.get_rank() == PREFILL else "decode"
    config = model_config(args)
    layout = models.kv_layout(config, page_size=args.page_size, order="NHD", tp_rank=0, tp_size=1)
    num_pages = -(-args.turns * (args.question_tokens + args.new_tokens) // args.page_size) + 1
    kv = dist.group.WORLD
    kv_cache = torchkv.KVCache.empty(layout, num_pages, device=HOST, group=kv)
    poison(kv_cache)
    kv.register(kv_cache, instance=name)
    return Engine(args, models.build(config, seed=args.seed, device=HOST), kv, kv_cache, Progress(name, quiet=False))


def model_config(args: argparse.Namespace) -> PreTrainedConfig:
    return models.make_config("llama", layers=args.layers, hidden=args.hidden)


def poison(kv_cache: torchkv.KVCache) -> None:
    """What is used without having been computed or received spoils every logit."""
    for tensor in [*kv_cache.k, *kv_cache.v]:
        tensor.fill_(float("nan"))


# ---------------------------------------------------------------------- the prefill rank


def prefill_dialogue(engine: Engine, label: str) -> None:
    """Compute and send, turn by turn."""
    poison(engine.kv_cache)
    prefixes, history = engine.prefixes(), []
    for turn in range(engine.args.turns):
        prompt = ask(engine.args, history, turn)
        prefill_turn(engine, prefixes, f"{label} {turn}", prompt)
        answer = torch.empty(engine.args.new_tokens, dtype=torch.int64)
        dist.broadcast(answer, DECODE)
        history = prompt + answer.tolist()


def prefill_turn(engine: Engine, prefixes: torchkv.PrefixCache, request: str, prompt: list[int]) -> None:
    """Compute what is not computed yet, and send what the decode rank lacks, each layer as soon as it is there."""
    kv = engine.kv
    held = prefixes.match(prompt)
    prefixes.allocate(held, engine.pages_for(len(prompt)) - len(held.pages))
    lacking = held.pages[kv.prefix_tokens(request, "decode") // engine.args.page_size :]

    def send(layer: int) -> None:
        kv.send_layer(request, layer, lacking, "decode")

    cache = paged_cache(engine.kv_cache, torch.from_numpy(held.pages), length=held.num_tokens, on_layer=send)
    first = generation.first_token(engine.model, torch.tensor([prompt[held.num_tokens :]]), cache)
    kv.finish(request, "decode", aux=first.to_bytes(4, "little")).wait()
    prefixes.insert(held, prompt)
    prefixes.release(held)


# ---------------------------------------------------------------------- the decode rank


def decode_dialogue(engine: Engine, label: str, *, keep: bool, corrupt: bool = False) -> list[Turn]:
    """Receive and answer, turn by turn. ``keep``: whether earlier prompts stay known."""
    poison(engine.kv_cache)
    prefixes, history = engine.prefixes(), []
    turns: list[Turn] = []
    for number in range(engine.args.turns):
        prompt = ask(engine.args, history, number)
        if corrupt and number == engine.args.turns - 1:
            flip_one_page(engine, prefixes, prompt)
        turn = decode_turn(engine, prefixes if keep else engine.prefixes(), f"{label} {number}", prompt)
        engine.progress.step(f"{label}: turns answered:", number + 1, engine.args.turns)
        dist.broadcast(torch.tensor(turn.generated.tokens), DECODE)
        history = prompt + turn.generated.tokens
        turns.append(turn)
    return turns


def decode_turn(engine: Engine, prefixes: torchkv.PrefixCache, request: str, prompt: list[int]) -> Turn:
    """Receive the pages behind the known prefix, and generate from all of them."""
    new_tokens = engine.args.new_tokens
    held = prefixes.match(prompt)
    try:
        prefixes.allocate(held, engine.pages_for(len(prompt) + new_tokens) - len(held.pages))
        lacking = held.pages[held.num_tokens // engine.args.page_size : engine.pages_for(len(prompt))]
        received = engine.kv.recv_pages(request, lacking, "prefill", prefix_tokens=held.num_tokens)
        received.wait()
    except torchkv.KVError as error:
        prefixes.release(held, error)  # its pages come back when nothing can be written to them any more
        raise
    # Only the prompt becomes known, not the answer: the prefill rank will compute the answer as part of the next
    # prompt, all at once. That adds up in another order than one token after the other, and bits are compared here.
    prefixes.insert(held, prompt)
    generated = generation.continue_from(
        engine.model,
        paged_cache(engine.kv_cache, torch.from_numpy(held.pages), length=len(prompt)),
        int.from_bytes(received.aux, "little"),
        prompt_tokens=len(prompt),
        new_tokens=new_tokens,
    )
    prefixes.release(held)
    return Turn(len(prompt), held.num_tokens, received.bytes, generated)


def flip_one_page(engine: Engine, prefixes: torchkv.PrefixCache, prompt: list[int]) -> None:
    """The negative control: flip the signs in one page, of one layer, that is known and so will not be sent again."""
    held = prefixes.match(prompt)
    page = int(held.pages[len(held.pages) // 2])
    engine.kv_cache.k[engine.args.layers // 2][page].neg_()
    engine.progress.say(f"--corrupt: flipped the signs of K in page {page}, layer {engine.args.layers // 2}")
    prefixes.release(held)


def single_process_dialogue(engine: Engine) -> list[generation.Generation]:
    """The reference: one process, Hugging Face's own cache, nothing of torchkv."""
    args, history, answers = engine.args, [], []
    cache, known = DynamicCache(config=engine.model.config), 0
    for turn in range(args.turns):
        prompt = ask(args, history, turn)
        if known:
            cache.crop(known - cache.get_seq_length())  # keeps what the prefill rank does: whole pages of its prompt
        first = generation.first_token(engine.model, torch.tensor([prompt[known:]]), cache)
        answer = generation.continue_from(
            engine.model, cache, first, prompt_tokens=len(prompt), new_tokens=args.new_tokens
        )
        answers.append(answer)
        history, known = prompt + answer.tokens, len(prompt) // args.page_size * args.page_size
        if not known:
            cache = DynamicCache(config=engine.model.config)
    return answers


# ---------------------------------------------------------------------- the verdict


def same_bits(answers: list[generation.Generation], reference: list[generation.Generation]) -> list[bool]:
    """For each turn, whether tokens and logits are the very same."""
    compare = functools.partial(generation.compare, allowed=0.0)
    results = [compare(answer, other) for answer, other in zip(answers, reference, strict=True)]
    return [result.tokens_equal and result.logits_equal for result in results]


def check(engine: Engine, kept: list[Turn], anew: list[Turn]) -> tuple[bool, str]:
    """Print the table; whether all is well, and the verdict in a line."""
    reference = single_process_dialogue(engine)
    equal = [
        a and b
        for a, b in zip(
            same_bits([turn.generated for turn in kept], reference),
            same_bits([turn.generated for turn in anew], reference),
            strict=True,
        )
    ]
    print("turn  prompt  known  bytes with the cache  without  logits", flush=True)
    for number, (with_, without, same) in enumerate(zip(kept, anew, equal, strict=True), start=1):
        print(
            f"{number:4} {with_.prompt_tokens:7} {with_.known:6} {with_.nbytes:21} {without.nbytes:8}  "
            f"{'equal, bit by bit' if same else 'DIFFER'}",
            flush=True,
        )
    page_nbytes = engine.args.layers * sum(engine.kv_cache.layout.page_nbytes(name) for name in ("k", "v"))
    lacked = [(engine.pages_for(t.prompt_tokens) - t.known // engine.args.page_size) * page_nbytes for t in kept]
    exact = [turn.nbytes for turn in kept] == lacked
    expected = [*equal[:-1], not equal[-1]] if engine.args.corrupt else equal
    sent, all_of_it = sum(turn.nbytes for turn in kept), sum(turn.nbytes for turn in anew)
    verdict = (
        f"{len(kept)} turns: {sent} bytes sent with the prefix cache, {all_of_it} without ({all_of_it / sent:.1f} "
        f"times as many), {'only' if exact else 'NOT only'} what the decode rank lacked; "
    )
    if engine.args.corrupt:
        verdict += f"the flipped page was {'NOT noticed' if equal[-1] else 'noticed'}"
    else:
        verdict += f"logits {'equal, bit by bit' if all(equal) else 'DIFFER'}"
    return exact and all(expected), verdict


def run(args: argparse.Namespace) -> tuple[bool, str]:
    """This rank's part. Both ranks learn whether all went well; only the decode rank has the verdict."""
    engine = build_engine(args)
    ok, verdict = False, ""
    if dist.get_rank() == PREFILL:
        prefill_dialogue(engine, "kept")
        prefill_dialogue(engine, "anew")
    else:
        kept = decode_dialogue(engine, "kept", keep=True, corrupt=args.corrupt)
        anew = decode_dialogue(engine, "anew", keep=False)
        ok, verdict = check(engine, kept, anew)
        if not ok:
            print(f"FAIL {verdict}", flush=True)  # before a rank can exit with 1, upon which torchrun ends the other
    shared = torch.tensor([ok], dtype=torch.int64)
    dist.broadcast(shared, DECODE)
    return bool(shared.item()), verdict


def main() -> int:
    """Run and report; the exit code."""
    args = parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    dist.init_process_group("torchkv")
    if dist.get_world_size() != 2:
        print(f"FAIL start this program on 2 ranks, not {dist.get_world_size()}", flush=True)
        return 2
    try:
        ok, verdict = run(args)
    except torchkv.KVError as error:
        print(f"FAIL rank {dist.get_rank()}: {error}", flush=True)
        raise
    dist.destroy_process_group()
    if ok and verdict:
        print(f"PASS {verdict}", flush=True)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
