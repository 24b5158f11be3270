"""Layer pipelining between real processes: the bytes that arrive, and who is told when a forward fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchkv
from tests.helpers.harness import Ranks, kv_group
from tests.helpers.ranks.lane_transfer import random_fill, views
from tests.helpers.ranks.small_cache import Gate, check_transfer, meet, page_bytes, random_cache, small_layout
from torchkv import KVCache, ProtocolError, TransferCancelled
from torchkv.pipelining.group_size import Published


class Layer(nn.Module):
    """Fills the pages of one layer with fresh bytes when it runs."""

    def __init__(self, cache: KVCache, layer: int) -> None:
        super().__init__()
        self.arrays = [array for (_, held), array in views(cache).items() if held == layer]

    def forward(self, pages: list[int]) -> list[int]:
        for array in self.arrays:
            array[pages] = np.random.default_rng().integers(256, size=(len(pages), *array.shape[1:]), dtype=np.uint8)
        return pages


class Model(nn.Module):
    """One forward fills ``pages`` layer by layer, in ``order``; ``between(n)`` runs behind the n-th."""

    def __init__(self, cache: KVCache, *, between: Callable[[int], None] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(cache, layer) for layer in cache.layout.layers)
        self.order = list(range(len(self.layers)))
        self.between = between

    def forward(self, pages: list[int]) -> None:
        for number, layer in enumerate(self.order):
            self.layers[layer](pages)
            if self.between is not None:
                self.between(number)


def expect(kv: torchkv.KVProcessGroup, pages: list[int]) -> None:
    """This rank's ``pages`` hold what rank 0 sends with `show`; other pages of this rank do not."""
    cache = kv._verbs.cache
    assert cache is not None
    expected = torch.empty_like(page_bytes(cache, pages))
    dist.recv(expected, 0, group=kv)
    assert torch.equal(page_bytes(cache, pages), expected)
    assert not torch.equal(page_bytes(cache, pages[::-1]), expected)


def show(kv: torchkv.KVProcessGroup, pages: list[int], *readers: int) -> None:
    """What the readers' pages must hold now."""
    cache = kv._verbs.cache
    assert cache is not None
    for reader in readers:
        dist.send(page_bytes(cache, pages), reader, group=kv)


# ---------------------------------------------------------------------- the receiver need not wait for the end


def overlapped(num_layers: int) -> None:
    """The first group is complete on the receiver before the last layer runs: the layer waits for that."""
    with kv_group() as kv:
        cache = random_cache(num_layers=num_layers)
        kv.register(cache)
        source, target = [9, 2, 11], [1, 14, 3]
        if kv.rank() == 0:
            model = Model(cache, between=lambda number: meet(kv) if number == num_layers - 2 else None)
            with torchkv.pipeline(model, kv, "r", source, 1, group_size=2) as sending:
                model(source)
            assert [layer for group in sending.groups for layer in group] == list(range(num_layers))
            assert sending.wait(30)
            assert sum(work.bytes for work in sending.works) == len(page_bytes(cache, source))
            kv.finish("r", 1, aux=b"token").wait(30)
            show(kv, source, 1)
        elif kv.rank() == 1:
            canaries = page_bytes(cache, [0, 2])
            rx = kv.recv_pages("r", target, 0)
            rx.wait_layer(0, 30)
            rx.wait_layer(1, 30)
            with pytest.raises(torchkv.TransferTimeout):
                rx.wait_layer(num_layers - 1, 0.05)  # negative control
            meet(kv)
            rx.wait(30)
            assert rx.aux == b"token"
            expect(kv, target)
            assert torch.equal(page_bytes(cache, [0, 2]), canaries)
        else:
            meet(kv)


def test_layers_arrive_while_later_ones_are_computed(four: Ranks) -> None:
    four.run(overlapped, 5)


# ---------------------------------------------------------------------- chunks, sweeps, several at once


def chunked() -> None:
    """Two chunks behind a prefix, a layer that is not called, a draft layer, an empty last chunk."""
    with kv_group() as kv:
        cache = random_cache(num_layers=3, layers=[0, 1, 2, 5])
        kv.register(cache)
        source, target = [9, 2, 11, 4, 7], [1, 14, 3, 8, 6]
        if kv.rank() == 0:
            assert kv.prefix_tokens("r", 1) == 32
            model = Model(cache)
            layers = list(model.layers)[:3]  # the draft layer is not the model's
            sends = []
            for first, last in [(0, 2), (2, 5), (5, 5)]:
                chunk = source[first:last]
                model.order = [2, 0, 3] if first else [1, 0, 3, 2]  # the second time layer 1 is filled before
                if first:
                    model.layers[1].forward(chunk)
                with torchkv.pipeline(model, kv, "r", chunk, 1, layers=layers, start=first, group_size=2) as sending:
                    model(chunk)
                sends.append(sending)
            assert [sending.groups for sending in sends] == [[(0, 1), (2,), (5,)]] + [[(2,), (0, 1, 5)]] * 2
            kv.finish("r", 1).wait(30)
            show(kv, source, 1)
        elif kv.rank() == 1:
            kv.recv_pages("r", target, 0, prefix_tokens=32).wait(30)
            expect(kv, target)


def test_chunks_and_sweeps(four: Ranks) -> None:
    four.run(chunked)


def several() -> None:
    """Two requests to rank 1 and the first of them to rank 2 as well, in one forward; out of order groups."""
    with kv_group() as kv:
        cache = random_cache(num_layers=4)
        kv.register(cache)
        first, second = [9, 2], [11, 4, 7]
        if kv.rank() == 0:
            model = Model(cache)
            model.order = [3, 1, 0, 2]  # the last group first
            with ExitStack() as stack:
                for request, pages, dst, size in [("a", first, 1, 1), ("b", second, 1, 2), ("a", first, 2, 2)]:
                    stack.enter_context(torchkv.pipeline(model, kv, request, pages, dst, group_size=size))
                model(first + second)
            done = [kv.finish("a", [1, 2]), kv.finish("b", 1)]
            for work in done:
                work.wait(30)
            show(kv, first, 1, 2)
            show(kv, second, 1)
        elif kv.rank() == 1:
            works = [kv.recv_pages("a", [0, 1], 0), kv.recv_pages("b", [2, 3, 4], 0)]
            for work in works:
                work.wait(30)
            expect(kv, [0, 1])
            expect(kv, [2, 3, 4])
        elif kv.rank() == 2:
            kv.recv_pages("a", [5, 6], 0).wait(30)
            expect(kv, [5, 6])


def test_several_requests_and_destinations_in_one_forward(four: Ranks) -> None:
    four.run(several)


def unlike() -> None:
    """From a rank with all heads to two with half of them, other page sizes and order, with the default policy."""
    with kv_group() as kv:
        rank = kv.rank()
        changes = {} if rank == 0 else {"tp_rank": rank - 1, "tp_size": 2, "page_size": 8, "order": "HND"}
        cache = random_cache(num_layers=6, **changes) if rank < 3 else None
        kv.register(cache, instance="prefill" if rank == 0 else "decode" if rank < 3 else None)
        for again in range(3):
            if rank == 0:
                assert cache is not None
                model = Model(cache)
                policy = Published(min_tokens=1, max_iters=3, min_iters=3) if again == 2 else None
                with torchkv.pipeline(model, kv, "r", [9, 2], "decode", policy=policy) as sending:
                    model([9, 2])
                if again != 1:  # what it learns depends on the machine
                    assert len(sending.works) == (3 if again else 1)
                kv.finish("r", "decode").wait(30)
                for reader, heads in [(1, slice(0, 1)), (2, slice(1, 2))]:
                    parts = [array[[9, 2]][:, :, heads].ravel() for array in views(cache).values()]
                    dist.send(torch.from_numpy(np.concatenate(parts)), reader, group=kv)
            elif cache is not None:
                random_fill(cache, np.random.default_rng())
                kv.recv_pages("r", [3, 0, 5, 6], "prefill").wait(30)
                got = np.concatenate([array[[3, 0, 5, 6]].ravel() for array in views(cache).values()])
                expected = torch.empty(len(got), dtype=torch.uint8)
                dist.recv(expected, 0, group=kv)
                assert np.array_equal(got, expected.numpy())


def test_layouts_that_differ_and_the_default_policy(four: Ranks) -> None:
    four.run(unlike)


# ---------------------------------------------------------------------- failures


def failing() -> None:
    """The forward raises half-way: both sides hear of it, nothing lands afterwards, the name can be used again."""
    with kv_group() as kv:
        cache = random_cache(num_layers=4)
        kv.register(cache)
        source, target = [9, 2], [1, 14]
        if kv.rank() == 0:

            def between(number: int) -> None:
                if number == 2:
                    raise ArithmeticError("layer 3 cannot be computed")

            model = Model(cache, between=between)
            sending = torchkv.pipeline(model, kv, "r", source, 1, group_size=1)
            with pytest.raises(ArithmeticError), sending:
                model(source)
            assert sending.cancelled is not None
            assert sending.cancelled.wait(30)
            assert len(sending.works) == 3
            meet(kv)
            for array in views(cache).values():
                array[source] ^= 0xFF  # would be seen if anything were still sent
            model.between = None
            model(source)  # without a context: nothing is sent
            meet(kv)
        elif kv.rank() == 1:
            rx = kv.recv_pages("r", target, 0)
            with pytest.raises(TransferCancelled, match=r"'r'"):
                rx.wait(30)
            error = rx.exception()
            assert error is not None
            kv.cancel("r").wait(30)
            assert error.pages_safe
            meet(kv)
            poison = page_bytes(cache, target)
            meet(kv)
            assert torch.equal(page_bytes(cache, target), poison)
        else:
            meet(kv)
            meet(kv)
        check_transfer(kv, 0, 1, request="r")


def test_a_forward_that_raises_tells_the_receiver(four: Ranks) -> None:
    four.run(failing)


def one_leaves() -> None:
    """A receiver cancels while the forward runs; the other one gets everything."""
    with kv_group() as kv:
        cache = random_cache(num_layers=4)
        kv.register(cache)
        source = [9, 2]
        if kv.rank() == 0:
            blocked = Gate()

            def between(number: int) -> None:
                if number == 1:
                    meet(kv)  # both have granted, and rank 1 cancels
                    with pytest.raises(TransferCancelled):
                        late.wait(30)

            model = Model(cache, between=between)
            late = kv.send_pages("a", source, 1, layers=3, event=blocked)
            with (
                torchkv.pipeline(model, kv, "a", source, 1, group_size=1) as gone,
                torchkv.pipeline(model, kv, "b", source, 2, group_size=1) as stays,
            ):
                model(source)
            assert len(gone.works) == 2
            with pytest.raises(TransferCancelled):
                gone.wait(30)
            assert isinstance(gone.exception(), TransferCancelled)
            with pytest.raises(TransferCancelled):
                kv.finish("a", 1)
            with pytest.raises(TransferCancelled):
                torchkv.pipeline(model, kv, "a", source, 1)
            assert stays.wait(30)
            kv.finish("b", 2).wait(30)
            show(kv, source, 2)
            kv.cancel("a").wait(30)
        elif kv.rank() == 1:
            rx = kv.recv_pages("a", [1, 14], 0)
            rx.wait_layer(0, 30)
            rx.wait_layer(1, 30)
            meet(kv)
            kv.cancel("a").wait(30)
        elif kv.rank() == 2:
            rx = kv.recv_pages("b", [1, 14], 0)
            meet(kv)
            rx.wait(30)
            expect(kv, [1, 14])
        else:
            meet(kv)


def test_a_receiver_that_cancels_stops_only_its_own_request(four: Ranks) -> None:
    four.run(one_leaves)


def outside_the_grant() -> None:
    """A chunk that the receiver has no room for is refused before it is computed."""
    with kv_group() as kv:
        cache = random_cache(num_layers=2)
        kv.register(cache)
        if kv.rank() == 0:
            assert kv.prefix_tokens("r", 1) == 0
            model = Model(cache)
            with pytest.raises(torchkv.PageOutOfRange, match=r"'r'"):
                torchkv.pipeline(model, kv, "r", [9, 2], 1, start=1)
            with torchkv.pipeline(model, kv, "r", [9, 2], 1):
                model([9, 2])
            kv.finish("r", 1).wait(30)
            with pytest.raises(ProtocolError, match="no instance"):
                torchkv.pipeline(model, kv, "r", [9], "nobody")
            show(kv, [9, 2], 1)
        elif kv.rank() == 1:
            kv.recv_pages("r", [5, 4], 0).wait(30)
            expect(kv, [5, 4])


def test_what_the_grant_does_not_allow_is_refused_before_the_forward(four: Ranks) -> None:
    four.run(outside_the_grant)


# ---------------------------------------------------------------------- events instead of hooks


def gated() -> None:
    """As with a captured step: sends are queued first, and each leaves when its event says so."""
    with kv_group() as kv:
        cache = random_cache(num_layers=4)
        kv.register(cache)
        if kv.rank() == 0:
            events = [Gate() for _ in range(4)]
            model = Model(cache, between=lambda number: events[number].open.set())
            with torchkv.pipeline(None, kv, "r", [9, 2], 1, events=events, group_size=2) as sending:
                assert len(sending.works) == 2
                meet(kv)
                model([9, 2])
            kv.finish("r", 1).wait(30)
            show(kv, [9, 2], 1)
        elif kv.rank() == 1:
            rx = kv.recv_pages("r", [5, 4], 0)
            poison = page_bytes(cache, [5, 4])
            with pytest.raises(torchkv.TransferTimeout):
                rx.wait_layer(0, 0.1)
            assert torch.equal(page_bytes(cache, [5, 4]), poison)
            meet(kv)
            rx.wait(30)
            expect(kv, [5, 4])
        else:
            meet(kv)


def test_events_instead_of_hooks(four: Ranks) -> None:
    four.run(gated)


# ---------------------------------------------------------------------- a real model


def llama() -> None:
    """A prompt in two chunks: rank 1 gets it pipelined, rank 2 gets it sent once behind the same forward."""
    with kv_group() as kv:
        layout = small_layout(num_layers=3, head_dim=16, dtype=torch.float32)
        cache = KVCache.empty(layout, 16, device="cpu")
        random_fill(cache, np.random.default_rng())
        kv.register(cache)
        source, target = [9, 2, 11], [1, 14, 3]
        if kv.rank() == 0:
            from disagg.paged_cache import paged_cache
            from transformers import LlamaConfig, LlamaForCausalLM

            sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 64, "num_hidden_layers": 3}
            config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
            model = LlamaForCausalLM(config).eval()
            past = paged_cache(cache, torch.tensor(source))
            prompt = torch.randint(64, (1, 45))
            with torch.no_grad():
                for first, last in [(0, 2), (2, 3)]:
                    with torchkv.pipeline(model, kv, "r", source[first:last], 1, start=first, group_size=1) as sending:
                        logits = model(prompt[:, 16 * first : 16 * last], past_key_values=past).logits
                    assert sending.groups == [(0,), (1,), (2,)]
                whole = model(prompt).logits[:, -1]
            assert torch.allclose(logits[:, -1], whole, atol=1e-4)
            kv.send_pages("r", source, 2)
            kv.finish("r", [1, 2]).wait(30)
            show(kv, source, 1, 2)
        elif kv.rank() < 3:
            rx = kv.recv_pages("r", target, 0)
            rx.wait(30)
            assert rx.bytes == len(page_bytes(cache, target))
            expect(kv, target)


def test_llama_s_pages_are_those_of_sending_once(four: Ranks) -> None:
    pytest.importorskip("transformers", reason="the model comes from transformers (extra 'demo')")
    four.run(llama)
