"""The smallest program: rank 0 sends three pages of every layer to rank 1.

torchrun --standalone --nproc-per-node 2 examples/quickstart.py
"""

import sys

import torch
import torch.distributed as dist

import torchkv

LAYERS = 32


def main() -> int:
    dist.init_process_group("torchkv")
    kv = dist.group.WORLD
    layout = torchkv.KVLayout.gqa(num_layers=LAYERS, num_kv_heads=8, head_dim=128, page_size=16, dtype=torch.bfloat16)
    cache = torchkv.KVCache.empty(layout, num_pages=128, device="cpu")
    kv.register(cache, instance="prefill" if kv.rank() == 0 else "decode")
    sent = torch.zeros(LAYERS, dtype=torch.float64)
    if kv.rank() == 0:
        for layer in range(LAYERS):
            cache.k[layer].normal_()
            cache.v[layer].normal_()
            sent[layer] = cache.k[layer][[17, 3, 90]].double().sum()
            kv.send_layer("request-1", layer, [17, 3, 90], "decode")
        work = kv.finish("request-1", "decode", aux=b"first token")
        work.wait()
    else:
        rx = kv.recv_pages("request-1", [5, 6, 41], "prefill")
        rx.wait()
    dist.broadcast(sent, 0)  # any collective works on the same group
    same = True
    if kv.rank() == 1:
        got = torch.stack([cache.k[layer][[5, 6, 41]].double().sum() for layer in range(LAYERS)])
        same = bool(torch.equal(got, sent))
        word, sums = ("PASS", "equal") if same else ("FAIL", "DIFFERENT")
        print(f"{word} {rx.bytes} bytes over path {rx.path}, aux {rx.aux!r}, {sums}")
    dist.barrier()
    dist.destroy_process_group()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
