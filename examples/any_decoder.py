"""A prefill that does not know who will decode: whoever grants the request gets it, and what it holds is left out.

python examples/any_decoder.py

One instance prefills; two decode, and take requests from a queue when they are free. The prefill sends every prompt as
a whole, to `None`. The instance that grants a request gets it, behind the prefix that it has kept of earlier prompts.
The last line says PASS or FAIL.
"""

from __future__ import annotations

import sys
import tempfile
from collections import deque
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import torchkv

LAYERS, HEADS, DIM, PAGE = 4, 4, 64, 16
CHATS, TURNS, TURN_TOKENS = 6, 5, 64
PROMPT_PAGES = TURNS * TURN_TOKENS // PAGE  # of the longest
AT_ONCE = 4  # requests under way at the prefill
DECODERS = ("decode-0", "decode-1")

Requests = list[tuple[str, list[int]]]  # name, tokens of the prompt


def chats() -> Requests:
    """Several dialogues in turns; the prompt of a turn begins with all of the turns before."""
    tokens = torch.randint(1, 50_000, (CHATS, TURNS * TURN_TOKENS), generator=torch.Generator().manual_seed(0)).tolist()
    return [
        (f"chat-{chat}-turn-{turn}", tokens[chat][: (turn + 1) * TURN_TOKENS])
        for turn in range(TURNS)
        for chat in range(CHATS)
    ]


def computed(tokens: list[int], layer: int) -> torch.Tensor:
    """What a model would: K of a layer, [pages, page size, heads, dim], from the tokens at and before each position."""
    so_far = torch.tensor(tokens, dtype=torch.float64).cumsum(0) * (layer + 1)
    channels = torch.arange(1, HEADS * DIM + 1, dtype=torch.float64)
    return torch.sin(so_far[:, None] * channels).float().view(-1, PAGE, HEADS, DIM)


def join(name: str, store: str, num_pages: int) -> tuple[torchkv.KVMember, torchkv.KVCache]:
    layout = torchkv.KVLayout.gqa(
        num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, page_size=PAGE, dtype=torch.float32
    )
    cache = torchkv.KVCache.empty(layout, num_pages=num_pages, device="cpu")
    return torchkv.join(cache, name, store=dist.FileStore(store)), cache


def prefill(store: str, requests: Requests) -> None:
    kv, cache = join("prefill", store, AT_ONCE * PROMPT_PAGES)
    under_way: deque[torchkv.KVWork] = deque()
    for number, (name, tokens) in enumerate(requests):
        if len(under_way) == AT_ONCE:
            under_way.popleft().wait()  # its pages may be written to again
        first = number % AT_ONCE * PROMPT_PAGES
        pages = list(range(first, first + len(tokens) // PAGE))
        for layer in range(LAYERS):
            keys = computed(tokens, layer)
            cache.k[layer][pages], cache.v[layer][pages] = keys, -keys
            kv.send_pages(name, pages, None, layers=layer, origin="prompt")
        under_way.append(kv.finish(name, None))
    while under_way:
        under_way.popleft().wait()
    kv.close()


def decode(instance: str, store: str, requests: mp.Queue, outcomes: mp.Queue) -> None:
    kv, cache = join(instance, store, CHATS * PROMPT_PAGES)
    prefixes = torchkv.PrefixCache(cache.num_pages, PAGE)
    while (request := requests.get()) is not None:
        name, tokens = request
        held = prefixes.match(tokens)
        fresh = prefixes.allocate(held, len(tokens) // PAGE - len(held.pages))
        known = held.num_tokens
        received = kv.recv_pages(name, fresh, "prefill", prefix_tokens=known)
        received.wait()
        prefixes.insert(held, tokens)
        pages = list(held.pages)
        equal = all(
            torch.equal(cache.k[layer][pages], keys) and torch.equal(cache.v[layer][pages], -keys)
            for layer, keys in ((layer, computed(tokens, layer)) for layer in range(LAYERS))
        )
        prefixes.release(held)
        outcomes.put((name, instance, len(tokens), known, received.bytes, equal))
    kv.close()


def main() -> None:
    context = mp.get_context("spawn")
    requests, outcomes = context.Queue(), context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        jobs = [context.Process(target=prefill, args=(store, chats()), daemon=True)]
        jobs += [
            context.Process(target=decode, args=(name, store, requests, outcomes), daemon=True) for name in DECODERS
        ]
        for job in jobs:
            job.start()
        for request in (*chats(), *[None] * len(DECODERS)):
            requests.put(request)
        found = [outcomes.get(timeout=60) for _ in chats()]
        for job in jobs:
            job.join()
    for name, instance, length, known, nbytes, equal in found:
        bytes_of = f"{nbytes} bytes, {'equal' if equal else 'DIFFERENT'}"
        print(f"{name}: {length} tokens, granted by {instance}, which held {known}: {bytes_of}")
    token_nbytes = 2 * LAYERS * HEADS * DIM * 4
    sent = sum(nbytes for *_, nbytes, _ in found)
    lacking = sum(length - known for _, _, length, known, _, _ in found) * token_nbytes
    ok = all(equal for *_, equal in found) and sent == lacking and all(job.exitcode == 0 for job in jobs)
    used = len({instance for _, instance, *_ in found})
    left_out = 1 - sent / (sum(length for _, _, length, *_ in found) * token_nbytes)
    print(
        f"{'PASS' if ok else 'FAIL'} {len(found)} requests granted by {used} instances, {sent} bytes sent, "
        f"{left_out:.0%} left out because the instance held them"
    )
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
