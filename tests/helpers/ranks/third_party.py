"""One rank of a job whose transport is not one of this repository's.

``torchrun --nproc-per-node 2 tests/helpers/ranks/third_party.py TRANSPORT PATH...``
"""

from __future__ import annotations

import os
import sys

import torch.distributed as dist

import torchkv
from tests.helpers.ranks.small_cache import NUM_PAGES, check_transfer, small_layout


def main() -> None:
    transport, *paths = sys.argv[1:]
    dist.init_process_group("gloo")
    for path in paths:
        check_path(transport, path)
    dist.destroy_process_group()


def check_path(transport: str, path: str) -> None:
    """A group of both ranks, a cache of each, and transfers in both directions."""
    kv = dist.new_group(backend="torchkv", pg_options=torchkv.Options(transport=transport, path=path))
    assert isinstance(kv, torchkv.KVProcessGroup)
    cache = torchkv.KVCache.empty(small_layout(), NUM_PAGES, device="cpu", group=kv)
    kv.register(cache, instance=f"engine {kv.rank()}")
    check_transfer(kv, 0, 1)
    check_transfer(kv, 1, 0)
    report = kv.explain(1 - kv.rank())
    assert (report.transport, report.path) == (transport, path), report
    assert report.lanes, report
    dist.barrier(kv)
    dist.destroy_process_group(kv)
    # In one write: both ranks print to one pipe.
    os.write(1, f"rank {os.environ['RANK']}: sent and received over {transport}, {path}\n".encode())


if __name__ == "__main__":
    main()
