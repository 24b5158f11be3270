"""Transfers are ordered after what computes their pages, and what reads them after their arrival; nobody waits on the
host for either. Streams are stopped by a long kernel, or by the host where the test must decide for how long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.helpers.harness import Ranks
from tests.helpers.ranks.gpu_pair import (
    PATHS,
    READER,
    WRITER,
    check_both_ways,
    gpu_group,
    held,
    needs_gpus,
    registered_cache,
)
from tests.helpers.ranks.lane_transfer import random_fill
from tests.helpers.ranks.small_cache import meet, page_bytes
from tests.helpers.waiting import until
from torchkv import KVCache, KVProcessGroup, KVWork, ProtocolError, TransferCancelled
from torchkv.cuda.graph_gate import GraphGate

SOURCE, TARGET = [9, 2, 11, 4], [1, 14, 3, 8]
LONG = 2_000_000_000  # cycles: about a second
LAYERS = 3
GATED = 1  # the layer that the long kernel precedes

pytestmark = needs_gpus(1)


class Always:
    """An event that takes the gating away."""

    def query(self) -> bool:
        return True


def fresh_bytes(cache: KVCache) -> list[dict[str, torch.Tensor]]:
    """For each layer new contents of the pages `SOURCE`, ready on the GPU."""
    shape = (len(SOURCE), *cache.layout.page_shape("k"))
    fresh = [{name: torch.randn(shape, device=cache.device).bfloat16() for name in "kv"} for _ in range(LAYERS)]
    torch.cuda.synchronize()
    return fresh


def write(cache: KVCache, layer: int, ids: torch.Tensor, fresh: list[dict[str, torch.Tensor]]) -> None:
    """Enqueues what a model's layer does: new contents of its pages."""
    for name, contents in fresh[layer].items():
        cache[name][layer].index_copy_(0, ids, contents)


def transfer_once(
    kv: KVProcessGroup, cache: KVCache, request: str, *, source: list[int] = SOURCE, target: list[int] = TARGET
) -> None:
    """An ungated transfer of all layers, one by one."""
    if kv.rank() == WRITER:
        for layer in cache.layout.layers:
            kv.send_layer(request, layer, source, READER)
        kv.finish(request, READER).wait(30)
    else:
        kv.recv_pages(request, target, WRITER).wait(30)


def warm_up(kv: KVProcessGroup, cache: KVCache, pages: list[int] = SOURCE) -> None:
    """Loads every kernel that the test will launch, and poisons the reader's pages again."""
    transfer_once(kv, cache, "warm-up", source=pages, target=pages)
    if kv.rank() == READER:
        random_fill(cache, np.random.default_rng())


def exchanged(kv: KVProcessGroup, mine: torch.Tensor) -> torch.Tensor:
    """On the reader: what the writer passes. ``mine``: uint8, of one size on both."""
    theirs = torch.empty_like(mine)
    if kv.rank() == WRITER:
        dist.send(mine, READER, group=kv)
    else:
        dist.recv(theirs, WRITER, group=kv)
    return theirs


# ---------------------------------------------------------------------- senders


def send_behind_a_long_kernel(cache: KVCache, kv: KVProcessGroup, event: Always | None) -> None:
    ids, fresh = torch.tensor(SOURCE, device=cache.device), fresh_bytes(cache)
    slept = torch.cuda.Event()
    works: list[KVWork] = []
    for layer in range(LAYERS):
        if layer == GATED:
            torch.cuda._sleep(LONG)
            slept.record()
        write(cache, layer, ids, fresh)
        works.append(kv.send_layer("r", layer, SOURCE, READER, event=event))
    done = kv.finish("r", READER)
    if event is None:
        assert not works[GATED].is_completed()
    assert not slept.query(), "a call has waited for the stream"
    done.wait(30)
    assert all(work.wait(30) for work in works)


def gating(gated: bool, options: dict[str, Any]) -> None:
    """With gating removed, the layer behind the long kernel arrives as it was before."""
    with gpu_group(**options) as kv:
        cache = registered_cache(kv, num_layers=LAYERS)
        warm_up(kv, cache)
        old = exchanged(kv, page_bytes(cache, SOURCE))
        if kv.rank() == WRITER:
            send_behind_a_long_kernel(cache, kv, None if gated else Always())
            torch.cuda.synchronize()
            exchanged(kv, page_bytes(cache, SOURCE))
            return
        canaries = page_bytes(cache, [0, 2, 4])
        rx = kv.recv_pages("r", TARGET, WRITER)
        rx.wait(30)
        got = page_bytes(cache, TARGET)
        final = exchanged(kv, got)
        assert not torch.equal(old, final)
        if gated:
            assert torch.equal(got, final)
        else:
            got, old, final = (whole.view(2, LAYERS, -1)[:, GATED] for whole in (got, old, final))
            assert not torch.equal(got, final), "the test does not notice that gating is gone"
            assert torch.equal(got, old)
        assert torch.equal(page_bytes(cache, [0, 2, 4]), canaries)


@pytest.mark.parametrize("options", PATHS)
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "gating-removed"])
def test_a_layer_leaves_when_it_is_final(
    gated: bool, options: dict[str, Any], gpu_ranks: Callable[[int], Ranks]
) -> None:
    gpu_ranks(2).run(gating, gated, options)


def many_gates(options: dict[str, Any]) -> None:
    """Six requests, each behind a stopped stream of its own; they are let go out of order, one by one."""
    order = [5, 2, 0, 4, 1, 3]
    with gpu_group(**options) as kv:
        cache = registered_cache(kv)
        warm_up(kv, cache, [15])
        if kv.rank() == READER:
            works = [kv.recv_pages(f"r{number}", [number], WRITER) for number in range(len(order))]
            for number in order:
                works[number].wait(50)  # the writer's error says more
        else:
            streams = [torch.cuda.Stream() for _ in order]
            computed = torch.zeros((len(order), 8), device=cache.device)
            computed[0].add_(1)  # loads the kernel
            torch.cuda.synchronize()
            done: list[KVWork] = []
            with held(*streams) as holds:
                for number, stream in enumerate(streams):
                    with torch.cuda.stream(stream):
                        # As a model's stream: CUDA may put one that has nothing but waits behind others.
                        computed[number].add_(1)
                        for layer in cache.layout.layers:
                            kv.send_layer(f"r{number}", layer, [number], READER)
                    done.append(kv.finish(f"r{number}", READER))
                for position, number in enumerate(order):
                    assert not any(done[later].is_completed() for later in order[position:])
                    holds[number].open()
                    done[number].wait(30)
        sent = exchanged(kv, page_bytes(cache, list(range(len(order)))))
        if kv.rank() == READER:
            assert torch.equal(page_bytes(cache, list(range(len(order)))), sent)


@pytest.mark.parametrize("options", PATHS)
def test_requests_behind_different_streams_do_not_block_each_other(
    options: dict[str, Any], gpu_ranks: Callable[[int], Ranks]
) -> None:
    gpu_ranks(2).run(many_gates, options)


def gates_of_one_stream() -> None:
    """Eight requests behind one stopped stream: all wait for it at once, and no other stream does."""
    numbers = list(range(8))
    with gpu_group() as kv:
        cache = registered_cache(kv)
        warm_up(kv, cache, [15])
        if kv.rank() == READER:
            works = [kv.recv_pages(f"r{number}", [number], WRITER) for number in numbers]
            for work in works:
                work.wait(30)
        else:
            stream, engine = torch.cuda.Stream(), kv._verbs.engine
            for number in numbers:
                kv.prefix_tokens(f"r{number}", READER)  # else grants would come in any order, and transfers with them
            with held(stream) as (hold,):
                with torch.cuda.stream(stream):
                    sent_first = [kv.send_layer(f"r{number}", 0, [number], READER) for number in numbers]
                    sent = [kv.send_layer(f"r{number}", 1, [number], READER) for number in reversed(numbers)]
                done = [kv.finish(f"r{number}", READER) for number in numbers]
                flows, claims = engine.flows, engine.gpu._streams.gated._claims
                assert len(flows._ops) == 16
                for flow in flows._sends:
                    before = flows.core.sends.gated(flow)
                    until(
                        lambda flow=flow, before=before: flows.core.sends.gated(flow) > before, "its gates are queried"
                    )
                assert not any(work.is_completed() for work in sent_first + sent)
                assert not any(claims.values())
                hold.open()
                for work in done:
                    work.wait(30)
        expected = exchanged(kv, page_bytes(cache, numbers))
        if kv.rank() == READER:
            assert torch.equal(page_bytes(cache, numbers), expected)


def test_requests_of_one_stream_all_wait_for_it(gpu_ranks: Callable[[int], Ranks]) -> None:
    gpu_ranks(2).run(gates_of_one_stream)


# ---------------------------------------------------------------------- receivers


def read_behind(cache: KVCache, ids: torch.Tensor) -> list[torch.Tensor]:
    """Enqueues a kernel a tensor that reads the pages."""
    return [cache[name][layer][ids] for name in "kv" for layer in range(LAYERS)]


def as_bytes(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors]).cpu()


def read_early(options: dict[str, Any]) -> None:
    """What is enqueued behind ``wait_stream`` before any byte was sent reads the bytes; beside it, the poison."""
    with gpu_group(**options) as kv:
        cache = registered_cache(kv, num_layers=LAYERS)
        if kv.rank() == WRITER:
            meet(kv)
            transfer_once(kv, cache, "r")
            exchanged(kv, page_bytes(cache, SOURCE))
            return
        ids, stream = torch.tensor(TARGET, device=cache.device), torch.cuda.Stream()
        poison = as_bytes(read_behind(cache, ids))  # also loads the kernels
        rx = kv.recv_pages("r", TARGET, WRITER)
        with torch.cuda.stream(stream):
            signalled = read_behind(cache, ids)
            stream.synchronize()
            rx.wait_stream()
            late = read_behind(cache, ids)
        behind = torch.cuda.Event()
        behind.record(stream)
        assert not behind.query()
        meet(kv)  # only now the writer begins
        rx.wait(30)
        behind.synchronize()
        expected = exchanged(kv, page_bytes(cache, TARGET))
        assert torch.equal(as_bytes(late), expected)
        assert torch.equal(as_bytes(signalled), poison)
        assert not torch.equal(poison, expected)
        rx.wait_stream(stream)  # of a work that is over: no wait at all
        stream.synchronize()


@pytest.mark.parametrize("options", PATHS)
def test_a_kernel_behind_wait_stream_reads_what_came_after_it_was_enqueued(
    options: dict[str, Any], gpu_ranks: Callable[[int], Ranks]
) -> None:
    gpu_ranks(2).run(read_early, options)


def read_layer_early(options: dict[str, Any]) -> None:
    """The same for one layer: what is enqueued behind it runs while the next one is still to be sent."""
    with gpu_group(**options) as kv:
        cache = registered_cache(kv, num_layers=2)
        if kv.rank() == WRITER:
            meet(kv)
            kv.send_pages("r", SOURCE, READER, layers=0).wait(30)
            meet(kv)  # layer 0 has been read there
            kv.send_pages("r", SOURCE, READER, layers=1).wait(30)
            kv.finish("r", READER).wait(30)
            exchanged(kv, page_bytes(cache, SOURCE))
            return
        ids = torch.tensor(TARGET, device=cache.device)
        streams = [torch.cuda.Stream() for _ in range(2)]
        signalled, late, behind = [], [], [torch.cuda.Event() for _ in streams]
        for layer, stream in enumerate(streams):
            with torch.cuda.stream(stream):  # before any is held: loads the kernels, and memory for each stream
                signalled.append([cache[name][layer][ids] for name in "kv"])
        torch.cuda.synchronize()
        rx = kv.recv_pages("r", TARGET, WRITER)
        for layer, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                rx.wait_stream(layer=layer)
                late.append([cache[name][layer][ids] for name in "kv"])
                behind[layer].record(stream)
        assert not behind[0].query()
        meet(kv)  # only now the writer begins
        behind[0].synchronize()
        assert not behind[1].query()
        assert not rx.is_completed()
        meet(kv)
        rx.wait(30)
        behind[1].synchronize()
        expected = exchanged(kv, page_bytes(cache, TARGET))
        for read, same in ((late, True), (signalled, False)):
            assert torch.equal(as_bytes([read[layer][k] for k in range(2) for layer in range(2)]), expected) == same


@pytest.mark.parametrize("options", PATHS)
def test_a_kernel_behind_one_layer_runs_before_the_others_have_come(
    options: dict[str, Any], gpu_ranks: Callable[[int], Ranks]
) -> None:
    gpu_ranks(2).run(read_layer_early, options)


def release() -> None:
    """A stream that waits for a request is let go when the request fails, or the group ends."""
    with gpu_group() as kv:
        cache = registered_cache(kv)
        stream, behind = torch.cuda.Stream(), torch.cuda.Event()
        if kv.rank() == READER:
            rx = kv.recv_pages("r", TARGET, WRITER)
            rx.wait_stream(stream)
            behind.record(stream)
            assert not behind.query()
            meet(kv)  # the writer cancels
            until(behind.query, "the stream of a failed request goes on")
            assert isinstance(rx.exception(), TransferCancelled)
            left = kv.recv_pages("never sent", [5], WRITER)
            left.wait_stream(stream)
            behind.record(stream)
            assert not behind.query()
        else:
            kv.send_layer("r", 0, SOURCE, READER)
            meet(kv)
            kv.cancel("r").wait(30)
    until(behind.query, "the group has ended, and its streams go on")
    del cache


def test_a_failed_request_releases_its_stream(gpu_ranks: Callable[[int], Ranks]) -> None:
    gpu_ranks(2).run(release)


# ---------------------------------------------------------------------- CUDA graphs


def capture() -> None:
    with gpu_group() as kv:
        cache = registered_cache(kv, num_layers=LAYERS)
        warm_up(kv, cache)
        if kv.rank() == WRITER:
            graph, counted = torch.cuda.CUDAGraph(), torch.zeros(1, device=cache.device).add_(0)
            with torch.cuda.graph(graph):
                counted.add_(1)
                with pytest.raises(ProtocolError, match="GraphGate"):
                    kv.send_layer("r", 0, SOURCE, READER)
                with pytest.raises(ProtocolError, match="GraphGate"):
                    kv.send_pages("r", torch.tensor(SOURCE), READER)
            graph.replay()
            assert int(counted) == 1, "the refusal has spoilt the capture"
        meet(kv)
        check_both_ways(kv)


def test_a_send_during_capture_is_refused(gpu_ranks: Callable[[int], Ranks]) -> None:
    gpu_ranks(2).run(capture)


class Step:
    """A model step as a CUDA graph: behind a long kernel each layer writes to pages whose ids are an input."""

    def __init__(self, cache: KVCache) -> None:
        self.ids = torch.tensor(SOURCE, device=cache.device)
        self.gate = GraphGate(LAYERS)
        self.left = torch.cuda.Event(external=True)  # what a GraphGate is there to replace
        self.contents = fresh_bytes(cache)
        self._graph = torch.cuda.CUDAGraph()
        for layer in range(LAYERS):  # kernels must be loaded before they are captured
            write(cache, layer, self.ids, self.contents)
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph):
            torch.cuda._sleep(LONG // 4)
            for layer in range(LAYERS):
                write(cache, layer, self.ids, self.contents)
                self.gate.mark(layer)
            self.left.record()

    def prepare(self, cache: KVCache, pages: list[int]) -> list[Any]:
        """Fresh contents for ``pages``, which the next replay writes; the events of its layers."""
        torch.cuda.synchronize()
        self.ids.copy_(torch.tensor(pages))
        for held_now, fresh in zip(self.contents, fresh_bytes(cache), strict=True):
            for name in "kv":
                held_now[name].copy_(fresh[name])
        torch.cuda.synchronize()
        return self.gate.arm()

    def replay(self) -> None:
        self._graph.replay()


def replays(gated: bool) -> None:
    """Two replays, a request each, each with other pages. Ungated, the second takes the first's event for its own."""
    sent, received = [[9, 2, 11, 4], [2, 7, 9, 0]], [[1, 14, 3, 8], [5, 10, 6, 12]]
    with gpu_group() as kv:
        cache = registered_cache(kv, num_layers=LAYERS)
        warm_up(kv, cache)
        step = Step(cache) if kv.rank() == WRITER else None
        for number in range(2):
            stale = exchanged(kv, page_bytes(cache, sent[number]))
            if step is not None:
                events = step.prepare(cache, sent[number])
                right = gated or number == 0
                works = [
                    kv.send_layer(
                        f"r{number}", layer, sent[number], READER, event=events[layer] if right else step.left
                    )
                    for layer in range(LAYERS)
                ]
                if right:
                    assert not any(work.is_completed() for work in works)
                else:  # the event tells of the replay before
                    assert all(work.wait(30) for work in works)
                step.replay()
                kv.finish(f"r{number}", READER).wait(30)
                torch.cuda.synchronize()
            else:
                kv.recv_pages(f"r{number}", received[number], WRITER).wait(30)
            got = page_bytes(cache, received[number])
            final = exchanged(kv, page_bytes(cache, sent[number]))
            if step is None:
                right = gated or number == 0
                assert torch.equal(got, final) is right
                assert torch.equal(got, stale) is not right


@pytest.mark.parametrize("gated", [True, False], ids=["graph-gate", "event-left-from-the-replay-before"])
def test_replays_send_their_own_bytes(gated: bool, gpu_ranks: Callable[[int], Ranks]) -> None:
    gpu_ranks(2).run(replays, gated)
