"""`KVCache.from_pointers` over memory of a GPU."""

from __future__ import annotations

import torch

from tests.helpers.ranks.gpu_pair import needs_gpus
from torchkv import KVCache, KVLayout
from torchkv.cuda import ipc

pytestmark = needs_gpus(1)

LAYOUT = KVLayout.gqa(num_layers=2, num_kv_heads=2, head_dim=8, page_size=16, dtype=torch.bfloat16)


def test_pointers_stand_for_tensors() -> None:
    pool = torch.rand(5, 2, 2, *LAYOUT.page_shape("k"), device="cuda").bfloat16()
    given = {"k": [pool[:, 0, 0], pool[:, 1, 0]], "v": [pool[:, 0, 1], pool[:, 1, 1]]}
    pointers = {name: [row.data_ptr() for row in rows] for name, rows in given.items()}
    cache = KVCache.from_pointers(LAYOUT, pointers, 5, strides=dict.fromkeys(given, pool[0].nbytes))
    for name, rows in given.items():
        for ours, theirs in zip(cache[name], rows, strict=True):
            assert ours is not None
            assert ours.data_ptr() == theirs.data_ptr()
            assert torch.equal(ours, theirs)
    assert cache.device == pool.device
    for storage in cache.storages:
        ipc.check_shareable(storage)
        assert ipc.share(storage)
