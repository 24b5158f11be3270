"""Everything that a caller may get wrong: a typed error that says what, where and what to do; the group lives on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import torchkv
from tests.helpers.harness import Ranks, kv_group
from tests.helpers.ranks.small_cache import Never, check_transfer, random_cache, small_layout
from tests.helpers.refusals import Bad, refuse
from torchkv import KVProcessGroup, LayoutMismatch, PageOutOfRange, ProtocolError

# What to call, the error, and words that its message must hold: what, where, and what to do.

SENDS: list[Bad] = [
    ("page-beyond", lambda kv: kv.send_pages("r", [1, 16], 1), PageOutOfRange, ("'r'", "page 16", r"\[0, 16\)")),
    ("page-negative", lambda kv: kv.send_layer("r", 0, [-1], 1), PageOutOfRange, ("'r'", "page -1", r"\[0, 16\)")),
    (
        "page-uint64",
        lambda kv: kv.send_slice("r", 0, np.array([2**63 + 1], dtype=np.uint64), 1),
        PageOutOfRange,
        ("'r'", str(2**63 + 1)),
    ),
    ("pages-float", lambda kv: kv.send_pages("r", [1.0], 1), ProtocolError, ("'r'", "float64", "integers")),
    ("pages-bool", lambda kv: kv.send_pages("r", [True], 1), ProtocolError, ("'r'", "bool", "integers")),
    ("pages-bf16", lambda kv: kv.send_pages("r", torch.ones(2).bfloat16(), 1), ProtocolError, ("bfloat16", "integers")),
    ("pages-2d", lambda kv: kv.send_pages("r", np.ones((2, 2), dtype=int), 1), ProtocolError, (r"\(2, 2\)", "one dim")),
    ("pages-ragged", lambda kv: kv.send_pages("r", [[1], [1, 2]], 1), ProtocolError, ("'r'", "integers")),
    ("pages-str", lambda kv: kv.send_pages("r", "12", 1), ProtocolError, ("'r'", "str", "sequence")),
    ("pages-none", lambda kv: kv.send_pages("r", None, 1), ProtocolError, ("'r'", "NoneType", "sequence")),
    ("pages-int", lambda kv: kv.send_pages("r", 3, 1), ProtocolError, ("'r'", "int", "sequence")),
    ("layer-not-held", lambda kv: kv.send_layer("r", 2, [1], 1), ProtocolError, ("'r'", "layer 2", "layers 0 to 1")),
    ("layers-float", lambda kv: kv.send_pages("r", [1], 1, layers=1.5), ProtocolError, ("'r'", "1.5", "layers 0 to 1")),
    ("layers-str", lambda kv: kv.send_slice("r", "0", [1], 1), ProtocolError, ("'r'", "'0'", "layers 0 to 1")),
    ("rank-outside", lambda kv: kv.send_pages("r", [1], 9), ProtocolError, ("'r'", "9", "size 3")),
    ("rank-negative", lambda kv: kv.finish("r", -1), ProtocolError, ("'r'", "-1", "size 3")),
    ("rank-twice", lambda kv: kv.send_pages("r", [1], [1, 1]), ProtocolError, ("'r'", "twice")),
    ("origin", lambda kv: kv.send_pages("r", [1], None, origin="end"), ProtocolError, ("'r'", "origin", "'prompt'")),
    ("rank-float", lambda kv: kv.send_pages("r", [1], 1.0), ProtocolError, ("'r'", "dst", r"1\.0")),
    ("rank-empty", lambda kv: kv.send_pages("r", [1], []), ProtocolError, ("'r'", "empty", "at least one rank")),
    ("no-such-instance", lambda kv: kv.send_pages("r", [1], "x"), ProtocolError, ("'x'", "'r'", "rank1")),
    ("request-empty", lambda kv: kv.send_pages("", [1], 1), ProtocolError, ("0 bytes", "1 to 1024")),
    ("request-long", lambda kv: kv.finish("\xe9" * 513, 1), ProtocolError, ("1026 bytes", "1 to 1024")),
    ("request-bytes", lambda kv: kv.cancel(b"r"), ProtocolError, ("bytes", "str")),
    ("request-surrogate", lambda kv: kv.send_pages("\ud800", [1], 1), ProtocolError, ("surrogate", "str")),
    ("start-negative", lambda kv: kv.send_pages("r", [1], 1, start=-1), ProtocolError, ("'r'", "start", "-1")),
    ("start-float", lambda kv: kv.send_pages("r", [1], 1, start=1.0), ProtocolError, ("'r'", "start", r"1\.0")),
    ("event", lambda kv: kv.send_pages("r", [1], 1, event=object()), ProtocolError, ("'r'", "event", r"query\(\)")),
    ("aux-long", lambda kv: kv.finish("r", 1, aux=bytes(65537)), ProtocolError, ("'r'", "65537", "65536")),
    ("aux-str", lambda kv: kv.finish("r", 1, aux="x"), ProtocolError, ("'r'", "str", "bytes")),
    ("state-slot", lambda kv: kv.finish("r", 1, state_slot=0), ProtocolError, ("'r'", "state_slot", "no state")),
    ("send-state", lambda kv: kv.send_state("r", 0, 0, 1), ProtocolError, ("'r'", "state_slot", "no state")),
]

RECEIVES: list[Bad] = [
    ("page-beyond", lambda kv: kv.recv_pages("r", [3, 16], 0), PageOutOfRange, ("'r'", "page 16", r"\[0, 16\)")),
    ("page-repeated", lambda kv: kv.recv_pages("r", [3, 4, 3], 0), PageOutOfRange, ("'r'", "page 3", "twice")),
    ("page-leased", lambda kv: kv.recv_pages("r", [5, 1], 0), PageOutOfRange, ("page 1", "'live'", "cancel")),
    ("already-live", lambda kv: kv.recv_pages("live", [5], 0), ProtocolError, ("'live'", "rank 1", "cancel")),
    ("pages-dtype", lambda kv: kv.recv_pages("r", torch.ones(2), 0), ProtocolError, ("'r'", "float32", "integers")),
    ("rank-outside", lambda kv: kv.recv_pages("r", [5], 3), ProtocolError, ("'r'", "src", "3", "size 3")),
    ("rank-none", lambda kv: kv.recv_pages("r", [5], None), ProtocolError, ("'r'", "src", "None")),
    ("nobody-holds-it", lambda kv: kv.recv_pages("r", [5], 2), LayoutMismatch, ("'r'", "name every rank")),
    ("prefix-negative", lambda kv: kv.recv_pages("r", [5], 0, prefix_tokens=-16), ProtocolError, ("'r'", "-16")),
    (
        "prefix-odd",
        lambda kv: kv.recv_pages("r", [5], 0, prefix_tokens=8),
        ProtocolError,
        ("'r'", "prefix_tokens=8", "16"),
    ),
    ("timeout-zero", lambda kv: kv.recv_pages("r", [5], 0, timeout=0), ProtocolError, ("'r'", "timeout", "positive")),
    ("timeout-str", lambda kv: kv.recv_pages("r", [5], 0, timeout="1 s"), ProtocolError, ("'r'", "timeout", "1 s")),
    ("state-slot", lambda kv: kv.recv_pages("r", [5], 0, state_slot=1), ProtocolError, ("'r'", "no state")),
    ("explain-rank", lambda kv: kv.explain(7), ProtocolError, ("explain", "7", "size 3")),
]


def bad_calls() -> None:
    with kv_group([0, 1, 2]) as kv:
        if not isinstance(kv, KVProcessGroup):
            return
        kv.register(random_cache() if kv.rank() < 2 else None)
        if kv.rank() == 0:
            refuse(kv, SENDS)
            dist.barrier(kv)
            # Nothing was sent: the name is still unused, and no byte has moved.
            assert kv.explain(1).lanes == {}
        elif kv.rank() == 1:
            live = kv.recv_pages("live", [1, 2], 0)
            refuse(kv, RECEIVES)
            dist.barrier(kv)
            assert not live.is_completed()
            kv.cancel("live").wait(30)
        else:
            with pytest.raises(ProtocolError, match="registered no cache"):
                kv.send_pages("r", [1], 0)
            dist.barrier(kv)
        if kv.rank() < 2:
            check_transfer(kv, 0, 1, request="r")  # the very name that was refused
            check_transfer(kv, 1, 0)


def test_bad_arguments_are_refused_and_the_group_stays_usable(four: Ranks) -> None:
    four.run(bad_calls)


# ---------------------------------------------------------------------- what only the grant can tell


def counts() -> None:
    """Page counts that do not match the grant, on both sides of it in time."""
    with kv_group([0, 1]) as kv:
        if not isinstance(kv, KVProcessGroup):
            return
        kv.register(random_cache())
        if kv.rank() == 0:
            assert kv.prefix_tokens("granted", 1) == 32
            with pytest.raises(PageOutOfRange, match=r"'granted'.*rank 1.*page 2 .*grant of 2 pages") as caught:
                kv.send_pages("granted", [1, 2, 3], 1)
            assert "send only pages after the prefix" in str(caught.value)
            assert kv.explain(1).lanes == {}  # nothing of that call has moved
            with pytest.raises(PageOutOfRange, match="page 2 "):
                kv.send_layer("granted", 0, [1], 1, start=2)
            kv.send_layer("granted", 1, [1], 1, start=1)
            with pytest.raises(ProtocolError, match=r"'granted'.*layer 0 page 0.*send (it|the rest)"):
                kv.finish("granted", 1)
            kv.send_layer("granted", 0, [1, 2], 1)
            with pytest.raises(ProtocolError, match=r"layer 1 page 0 .*send (it|the rest)"):
                kv.finish("granted", 1)
            kv.send_layer("granted", 1, [1], 1)
            kv.finish("granted", 1).wait(30)  # the request stayed open
            # Before the grant nothing is known: the work fails, and the request with it, on both sides.
            early = kv.send_pages("early", [1, 2, 3], 1)
            done = kv.finish("early", 1)
            dist.barrier(kv)
            for work in (early, done):
                with pytest.raises(PageOutOfRange, match=r"'early'.*page 2 "):
                    work.wait(30)
            kv.cancel("early").wait(30)
            # One page too few: a sender that sealed before the grant is caught by the seal.
            few = kv.send_pages("few", [1], 1)
            done = kv.finish("few", 1)
            dist.barrier(kv)
            for work in (few, done):
                with pytest.raises(ProtocolError, match="'few'"):
                    work.wait(30)
            kv.cancel("few").wait(30)
        else:
            kv.recv_pages("granted", [3, 4], 0, prefix_tokens=32).wait(30)
            dist.barrier(kv)
            with pytest.raises(PageOutOfRange, match=r"'early'"):
                kv.recv_pages("early", [3, 4], 0).wait(30)
            kv.cancel("early").wait(30)
            dist.barrier(kv)
            with pytest.raises(ProtocolError, match=r"'few'"):
                kv.recv_pages("few", [3, 4], 0).wait(30)
            kv.cancel("few").wait(30)
            assert kv.quarantined() == {}
        check_transfer(kv, 0, 1)


def test_page_counts_that_do_not_match_the_grant(four: Ranks) -> None:
    four.run(counts)


def page_for_page() -> None:
    with kv_group([0, 1, 2]) as kv:
        if not isinstance(kv, KVProcessGroup):
            return
        changes: dict[str, Any] = [{}, {"order": "HND"}, {"page_size": 32}][kv.rank()]
        kv.register(random_cache(**changes))
        for other in {0, 1, 2} - {kv.rank()}:
            with pytest.raises(LayoutMismatch, match=rf"'r'.*rank {other}") as caught:
                kv.send_layer("r", 0, [1], other)
            assert "use send_slice or send_pages" in str(caught.value)
        dist.barrier(kv)


def test_send_layer_is_for_pairs_that_match_page_for_page(four: Ranks) -> None:
    four.run(page_for_page)


def flood(kv: KVProcessGroup) -> None:
    for _ in range(20_000):
        kv.send_layer("flood", 0, [1], 1)


def too_much_before_the_grant() -> None:
    with kv_group([0, 1]) as kv:
        if not isinstance(kv, KVProcessGroup):
            return
        kv.register(random_cache())
        if kv.rank() == 0:
            with pytest.raises(ProtocolError, match=r"'flood'.*rank 1.*try again") as caught:
                flood(kv)
            assert caught.value.retryable
            kv.cancel("flood").wait(30)
        dist.barrier(kv)
        check_transfer(kv, 0, 1)


def test_the_queue_before_the_grant_is_bounded(four: Ranks) -> None:
    four.run(too_much_before_the_grant)


# ---------------------------------------------------------------------- before register


def before_register() -> None:
    with kv_group([0, 1]) as kv:
        if not isinstance(kv, KVProcessGroup):
            return
        calls: list[Callable[[], Any]] = [
            lambda: kv.recv_pages("r", [1], 0),
            lambda: kv.send_layer("r", 0, [1], 1),
            lambda: kv.send_slice("r", 0, [1], 1),
            lambda: kv.send_pages("r", [1], 1),
            lambda: kv.send_state("r", 0, 0, 1),
            lambda: kv.finish("r", 1),
            lambda: kv.prefix_tokens("r", 1),
            lambda: kv.cancel("r"),
            lambda: kv.quarantined(),
            lambda: kv.explain(1),
        ]
        for call in calls:
            with pytest.raises(ProtocolError, match=r"register\(cache\)"):
                call()
        kv.register(random_cache())
        check_transfer(kv, 0, 1)
        with pytest.raises(ProtocolError, match="one cache per rank and group"):
            kv.register(random_cache())
        check_transfer(kv, 1, 0)


def test_verbs_before_register(four: Ranks) -> None:
    four.run(before_register)


def raising_event() -> None:
    class Broken:
        def query(self) -> bool:
            raise RuntimeError("the device is on fire")

    with kv_group([0, 1]) as kv:
        if not isinstance(kv, KVProcessGroup):
            return
        kv.register(random_cache())
        if kv.rank() == 0:
            work = kv.send_pages("r", [1], 1, event=Broken())
            with pytest.raises(ProtocolError, match=r"'r'.*on fire"):
                work.wait(30)
            with pytest.raises(ProtocolError, match=r"'r'.*on fire"):
                kv.send_pages("r", [1], 1, event=Never())  # a tombstone repeats its error
            kv.cancel("r").wait(30)
        else:
            with pytest.raises(ProtocolError, match=r"'r'.*on fire"):
                kv.recv_pages("r", [1], 0).wait(30)
            kv.cancel("r").wait(30)
        check_transfer(kv, 0, 1)


def test_an_event_that_raises_fails_its_request_only(four: Ranks) -> None:
    four.run(raising_event)


def test_layout_of_the_tests_is_what_the_messages_say() -> None:
    assert small_layout().page_size == 16
    assert random_cache().num_pages == 16
    assert torchkv.__version__
