"""A forked child of a rank can neither speak for its parent nor wait for what the parent began."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

import torchkv
from tests.helpers.harness import Ranks, kv_group
from tests.helpers.ranks.small_cache import Never, check_transfer, random_cache
from torchkv import KVProcessGroup, ProtocolError

SENDER, RECEIVER = range(2)


def in_a_child(function: Callable[[], None]) -> None:
    """Runs ``function`` in a forked child of this process, and fails if it fails there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: this process has threads
        child = os.fork()
    if child == 0:
        code = 1
        try:
            function()
            code = 0
        except BaseException:  # noqa: BLE001 - printed; the child must end here whatever happens
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def refused(call: Callable[[], Any], match: str) -> None:
    with pytest.raises(ProtocolError, match=match):
        call()


def try_verbs(kv: KVProcessGroup, other: int) -> None:
    """Every verb that could reach the group, also by its function and when the group is gone."""
    calls: dict[str, Callable[[], Any]] = {
        "recv_pages": partial(kv.recv_pages, "x", [1], other),
        "send_pages": partial(kv.send_pages, "x", [1], other),
        "send_layer": partial(kv.send_layer, "x", 0, [1], other),
        "send_slice": partial(kv.send_slice, "x", [0], [1], other),
        "staged_put": partial(kv.staged_put, "x", [0], [1], other),
        "send_state": partial(kv.send_state, "x", 0, 0, other),
        "finish": partial(kv.finish, "x", other),
        "prefix_tokens": partial(kv.prefix_tokens, "x", other),
        "cancel": partial(kv.cancel, "r"),
        "quarantined": kv.quarantined,
        "explain": partial(kv.explain, other),
        "register": partial(kv.register, None),
    }
    for verb, call in calls.items():
        refused(call, f"{verb}: this process was forked from rank {kv.rank()}")
    refused(partial(torchkv.send_pages, "x", [1], other, group=kv), "send_pages: this process was forked")
    kv.shutdown()
    refused(partial(kv.recv_pages, "x", [1], other), "forked")


def fork_amid_requests() -> None:
    """Both ranks fork while a request is open; its works cannot be awaited there, and in the parents it goes on."""
    with kv_group() as kv:
        cache = random_cache()
        kv.register(cache)
        rank = kv.rank()
        if rank == RECEIVER:
            pending = kv.recv_pages("r", [5, 2], SENDER)
        else:
            pending = kv.send_pages("r", [3, 4], RECEIVER, layers=0, event=Never())
        check_transfer(kv, SENDER, RECEIVER, avoid=[5, 2])
        done = kv.cancel("never began")
        done.wait(30)

        def child() -> None:
            try_verbs(kv, 1 - rank)
            for wait in (pending.wait, partial(pending.wait, 5.0), pending.wait_source, pending.wait_stream):
                refused(wait, "called by the parent of this forked process")
            if rank == RECEIVER:
                refused(partial(pending.wait_layer, 0), "called by the parent")
            assert not pending.is_completed()
            assert done.wait()

        in_a_child(child)
        in_a_child(partial(in_a_child, child))
        check_transfer(kv, SENDER, RECEIVER, avoid=[5, 2])
        kv.cancel("r").wait(30)
        dist.barrier(kv)
        check_transfer(kv, RECEIVER, SENDER)


def test_a_forked_child_is_nobody() -> None:
    ranks = Ranks(2)
    try:
        ranks.run(fork_amid_requests)
    finally:
        ranks.close()
