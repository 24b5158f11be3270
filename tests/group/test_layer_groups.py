"""Layer groups between real ranks: a page list for each, absent pages, groups that share one block of memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchkv
from tests.helpers.harness import Ranks, kv_group
from tests.helpers.layer_groups import GROUPS, hybrid, shared_cache
from tests.helpers.ranks.grouped_transfer import (
    ABSENT,
    COUNT,
    NUM_PAGES,
    check,
    copied,
    filled,
    some_lists,
    transfer,
)
from tests.helpers.ranks.small_cache import Never, meet
from torchkv import (
    KVCache,
    KVLayout,
    KVProcessGroup,
    LayoutMismatch,
    PageOutOfRange,
    ProtocolError,
    State,
    TransferCancelled,
)


@pytest.mark.parametrize("shared", [True, False], ids=["one block", "memory of their own"])
@pytest.mark.parametrize(
    ("writers", "readers"), [((0, 1), (2,)), ((0,), (2, 3)), ((0, 1), (2, 3))], ids=["2to1", "1to2", "2to2"]
)
def test_each_group_has_its_pages(
    writers: tuple[int, ...], readers: tuple[int, ...], shared: bool, four: Ranks
) -> None:
    four.run(transfer, writers, readers, shared, None, False, False)


@pytest.mark.parametrize("path", ["direct", "slices", "staged", "runs"])
def test_by_every_path(path: str, four: Ranks) -> None:
    four.run(transfer, (0, 1), (2, 3), True, path, False, True)


def test_a_sender_that_knows_neither_receiver_nor_prefix(four: Ranks) -> None:
    four.run(transfer, (0, 1), (2, 3), True, None, True, True)


# ---------------------------------------------------------------------- stages of a pipeline


def stages() -> None:
    """Rank 3 holds nothing of two groups, and its instance succeeds as one."""
    with kv_group() as kv:
        rank = kv.rank()
        layers = {0: range(6), 2: (0, 1, 3, 4), 3: (2, 5)}.get(rank)
        cache = None if layers is None else filled(KVCache.empty, hybrid(layers=layers))
        kv.register(cache, instance="prefill" if rank == 0 else "decode" if cache is not None else None)
        lists = some_lists(ABSENT)
        before = None
        if rank in (2, 3):
            before = copied(cache)
            kv.recv_pages("r", lists, "prefill").wait(30)
        elif rank == 0:
            kv.send_pages("r", lists, "decode")
            kv.finish("r", "decode").wait(30)
        check(kv, cache, lists, before)


def test_pipeline_stages_that_hold_some_groups_only(four: Ranks) -> None:
    four.run(stages)


# ---------------------------------------------------------------------- errors, before anything is sent


def errors() -> None:
    with kv_group() as kv:
        rank = kv.rank()
        cache = filled(shared_cache, hybrid()) if rank in (0, 2) else None
        kv.register(cache)
        lists = some_lists(ABSENT)
        if rank == 0:
            for pages, message in (
                ({"full": [1], "near": [2]}, "no pages for layer group 'far'"),
                ({**lists, "other": [1]}, "'other', which is no layer group .* full, near, far"),
                ([1, 2], "one page list for layer groups full, near, far"),
                ({"full": [1, 2], "near": [3], "far": [4]}, "unlike length"),
            ):
                with pytest.raises(ProtocolError, match=message):
                    kv.send_pages("r", pages, 2)
            with pytest.raises(PageOutOfRange, match=r"'full' is absent .* layer 2 has no window"):
                kv.send_pages("r", {**lists, "full": [-1, *lists["full"][1:]]}, 2)
            with pytest.raises(PageOutOfRange, match=r"an absent page \(-1\) behind page"):
                kv.send_pages("r", [5, -1], 2, layers=0)
            with pytest.raises(PageOutOfRange, match="page 99 is outside"):
                kv.send_pages("r", {**lists, "far": [99] * COUNT}, 2)
            with pytest.raises(ProtocolError, match="must not contain"):
                kv.send_pages("r\N{SYMBOL FOR UNIT SEPARATOR}full", lists, 2)
            with pytest.raises(ProtocolError, match=r"1,?024"):
                kv.finish("r" * 1024, 2)
            with pytest.raises(ProtocolError, match="'x' is no layer group"):
                kv.quarantined(layer_group="x")
            assert not kv._verbs.engine.sender.requests.by_key
            kv.send_layer("r", 0, lists["near"], 2)  # one list is right where all layers lie in one group
            kv.send_pages("r", lists, 2, layers=[1, 2, 4])
            with pytest.raises(ProtocolError, match=r"layer 5 .* was not sent"):
                kv.finish("r", 2)
            kv.send_layer("r", 5, lists, 2)
            kv.send_pages("r", lists["near"], 2, layers=3)
            kv.finish("r", 2).wait(30)
        elif rank == 2:
            for pages, wrong, message in (
                ({"full": [1], "near": [2]}, ProtocolError, "no pages for layer group 'far'"),
                ([1, 2], ProtocolError, "one page list for layer groups"),
                ({**lists, "full": [-1, *lists["full"][1:]]}, PageOutOfRange, "page 0 of layer group 'full' is absent"),
                ({**lists, "near": [-1] * COUNT}, PageOutOfRange, "page 5 of layer group 'near' is absent"),
                ({**lists, "far": [-1] * 3 + lists["full"][:3]}, PageOutOfRange, "named twice.* share their memory"),
            ):
                with pytest.raises(wrong, match=message):
                    kv.recv_pages("r", pages, 0)
            assert not kv._verbs.engine.receiver.requests.by_generation
            kv.recv_pages("r", lists, 0).wait(30)
        meet(kv)


def test_errors_say_the_fix_before_anything_is_sent(four: Ranks) -> None:
    four.run(errors)


def unlike_groups() -> None:
    with kv_group() as kv:
        groups = {"full": (2, 5), "near": (0, 1, 3, 4)} if kv.rank() == 1 else GROUPS
        with pytest.raises(LayoutMismatch, match=r"rank [01]"):
            kv.register(filled(KVCache.empty, hybrid(groups=groups)))
        meet(kv)


def test_unlike_groups_are_refused_on_all_ranks(four: Ranks) -> None:
    four.run(unlike_groups)


# ---------------------------------------------------------------------- one outcome, and names


def send_and_wait(kv: KVProcessGroup, request: str, lists: dict[str, list[int]]) -> None:
    kv.send_pages(request, lists, 2).wait(30)


def outcomes() -> None:
    with kv_group() as kv:
        rank = kv.rank()
        cache = filled(shared_cache, hybrid()) if rank in (0, 2) else None
        kv.register(cache)
        lists = some_lists(ABSENT)
        if rank == 0:
            kv.send_pages("gone", lists, 2, layers=[2, 5]).wait(30)  # one group is complete
            kv.cancel("gone").wait(30)
            meet(kv)
            held = kv.send_pages("held", lists, 2, layers=[0, 3], event=Never())
            kv.send_pages("held", lists, 2, layers=[2, 5]).wait(30)
            kv.withdraw("held").wait(30)
            assert isinstance(held.exception(), TransferCancelled)
            kv.send_pages("held", lists, 2)
            kv.finish("held", 2).wait(30)
            with pytest.raises(TransferCancelled, match="was refused by its receiver"):
                send_and_wait(kv, "no", lists)
            kv.cancel("no").wait(30)
            kv.cancel("declined", decline=True).wait(30)
        elif rank == 2:
            rx = kv.recv_pages("gone", lists, 0)
            with pytest.raises(TransferCancelled) as caught:
                rx.wait(30)
            kv.cancel("gone").wait(30)
            assert caught.value.pages_safe
            assert kv.quarantined() == {} == kv.quarantined(layer_group="near")
            meet(kv)
            kv.recv_pages("held", lists, 0).wait(30)  # the same pages
            kv.refuse("no", 0)
            with pytest.raises(TransferCancelled):
                kv.recv_pages("declined", lists, 0).wait(30)
        else:
            meet(kv)
        meet(kv)


def test_the_groups_of_a_request_end_together(four: Ranks) -> None:
    four.run(outcomes)


# ---------------------------------------------------------------------- pipeline, state


class Layer(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + 1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(6))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def pipelined() -> None:
    with kv_group() as kv:
        rank = kv.rank()
        cache = filled(shared_cache, hybrid()) if rank in (0, 2) else None
        kv.register(cache)
        lists, before = some_lists(ABSENT), None
        if rank == 0:
            model = Model()
            with torchkv.pipeline(model, kv, "r", lists, 2, group_size=2) as sending:
                model(torch.zeros(1))
            assert sending.groups == [(0, 1), (2, 3), (4, 5)]
            kv.finish("r", 2).wait(30)
        elif rank == 2:
            before = copied(cache)
            kv.recv_pages("r", lists, 0).wait(30)
        check(kv, cache, lists, before)


def test_pipeline_takes_lists_by_group(four: Ranks) -> None:
    four.run(pipelined)


def states() -> None:
    """A group of state only: its slot is a block of the memory from which the others take pages."""
    with kv_group() as kv:
        rank, cache = kv.rank(), None
        if rank in (0, 2):
            layout = KVLayout(
                [torchkv.Component("k", 1, 4, torch.int16, layers=(0,), group="attention")],
                num_layers=2,
                page_size=4,
                states=[State("ssm", (16,), torch.int16, layers=(1,), group="mamba")],
            )
            block = torch.from_numpy(np.random.default_rng().integers(0, 99, (NUM_PAGES, 16), dtype=np.int16))
            tensors = {"k": [block.view(NUM_PAGES, 4, 1, 4), None]}
            cache = KVCache(layout, tensors, states={"ssm": [None, block]})
        kv.register(cache)
        if rank == 0:
            kv.send_pages("r", {"attention": [3, 4]}, 2)
            kv.finish("r", 2, state_slot={"mamba": 7}).wait(30)
            dist.send(block[[3, 4, 7]].clone(), 2, group=kv)
        elif rank == 2:
            with pytest.raises(PageOutOfRange, match="named twice"):
                kv.recv_pages("r", {"attention": [9, 8]}, 0, state_slot={"mamba": 8})
            with pytest.raises(ProtocolError, match="'mamba' has state; give state_slot"):
                kv.recv_pages("r", {"attention": [9, 8]}, 0)
            canaries = block[:8].clone()
            kv.recv_pages("r", {"attention": [9, 8]}, 0, state_slot=11).wait(30)
            expected = torch.empty(3, 16, dtype=torch.int16)
            dist.recv(expected, 0, group=kv)
            assert torch.equal(block[[9, 8, 11]], expected)
            assert torch.equal(block[:8], canaries)
        meet(kv)


def test_a_group_of_state_has_a_slot_of_its_own(four: Ranks) -> None:
    four.run(states)
