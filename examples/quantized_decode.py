"""Prefill keeps bfloat16 pages, decode fp8 ones: torchkv converts them on their way, with the scales of the receiver.

torchrun --standalone --nproc-per-node 2 examples/quantized_decode.py
"""

import sys

import torch
import torch.distributed as dist

import torchkv

LAYERS, HEADS = 8, 8
SHAPE = {"num_layers": LAYERS, "num_kv_heads": HEADS, "head_dim": 128, "page_size": 16}
SCALES = {"k": [[0.01 * (1 + layer + head) for head in range(HEADS)] for layer in range(LAYERS)], "v": 0.05}
SENT, GRANTED = [17, 3, 90], [5, 6, 41]


def main() -> int:
    dist.init_process_group("torchkv")
    kv = dist.group.WORLD
    prefill = kv.rank() == 0
    if prefill:
        layout = torchkv.KVLayout.gqa(**SHAPE, dtype=torch.bfloat16)
        cache = torchkv.KVCache.empty(layout, num_pages=128, device="cpu")
    else:
        layout = torchkv.KVLayout.gqa(**SHAPE, dtype=torch.float8_e4m3fn, accept=(torch.bfloat16,), order="HND")
        cache = torchkv.KVCache.empty(layout, num_pages=64, device="cpu", scales=SCALES)
    kv.register(cache, instance="prefill" if prefill else "decode")
    same = True
    if prefill:
        for tensor in (*cache.k, *cache.v):
            tensor.normal_()
        kv.send_pages("request-1", SENT, "decode")
        kv.finish("request-1", "decode").wait()
    else:
        rx = kv.recv_pages("request-1", GRANTED, "prefill")
        rx.wait()
    for layer in range(LAYERS):
        for name in ("k", "v"):
            pages = cache[name][layer][SENT] if prefill else torch.empty(3, 16, HEADS, 128, dtype=torch.bfloat16)
            dist.broadcast(pages, 0)
            if not prefill:
                scale = torch.tensor(SCALES["k"][layer])[:, None] if name == "k" else SCALES["v"]  # [heads, 1]
                expected = torchkv.convert(pages, torch.float8_e4m3fn, scale).transpose(1, 2)  # to HND
                same &= torch.equal(cache[name][layer][GRANTED].view(torch.uint8), expected.view(torch.uint8))
    if not prefill:
        word, bits = ("PASS", "every bit as torchkv.convert has it") if same else ("FAIL", "DIFFERENT")
        print(f"{word} {rx.bytes} bytes of fp8 from {2 * rx.bytes} of bfloat16 over path {rx.path}: {bits}")
    dist.barrier()
    dist.destroy_process_group()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
