"""Two ranks of engines with schedulers apart: what leaves when, byte for byte, and when blocks are given back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.helpers.harness import Ranks
from tests.helpers.jobs import SECRET, new_secret_file
from tests.helpers.ranks import worker_rank
from torchkv import LayoutMismatch
from torchkv.integrations.layer_groups import Group, PackedState, cache_of
from torchkv.integrations.steps import Receive, Remote, Send, Step

P, D = range(2)
EMPTY: tuple[Any, ...] = ({}, 0, {}, set(), {})


@pytest.fixture(scope="module", params=[True, False], ids=["by layer", "by request"])
def joined(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ranks, str]]:
    secret = new_secret_file(tmp_path_factory.mktemp("secret") / "secret")
    ranks = Ranks(2, env={SECRET: str(secret)}, world=False)
    (address,) = ranks.run(worker_rank.begin, "p", request.param, False, ranks=[P])
    ranks.run(worker_rank.begin, "d", request.param, True, ranks=[D])
    yield ranks, address
    ranks.run(worker_rank.end)
    ranks.close()


@pytest.fixture
def ranks(joined: tuple[Ranks, str]) -> Iterator[Ranks]:
    yield joined[0]
    assert joined[0].run(worker_rank.tidy) == [EMPTY, EMPTY]


@pytest.fixture
def remote(joined: tuple[Ranks, str]) -> Remote:
    return Remote("x", joined[1], "p")


def sending(ranks: Ranks, *sends: Send, tag: int = 1, finished: Any = (), **more: Any) -> None:
    ranks.run(worker_rank.step, Step(sends=list(sends), **more), tag, set(finished), ranks=[P])


def receiving(
    ranks: Ranks, remote: Remote, name: str = "d", pages: tuple[int, ...] = (9, 3, 12), prefix: int = 0
) -> None:
    ranks.run(worker_rank.step, Step(receives=[Receive(name, remote, list(pages), prefix)]), ranks=[D])


def chunks(request: str = "r") -> list[Send]:
    return [Send(request, "x", 0, [5, 2], False), Send(request, "x", 2, [7], True)]


def test_blocks_are_kept_until_they_have_been_received(ranks: Ranks, remote: Remote) -> None:
    for chunk in chunks():
        sending(ranks, chunk)
    sending(ranks, finished={"r"})
    (reported,) = ranks.run(worker_rank.results, ranks=[P])
    assert reported["sent"] == []
    receiving(ranks, remote)
    ranks.run(worker_rank.await_report, "received", "d", ranks=[D])
    assert ranks.run(worker_rank.holds, 1, [9, 3, 12], ranks=[D]) == [True]
    ranks.run(worker_rank.await_report, "sent", "r", ranks=[P])


def test_a_request_that_goes_on_here_is_not_reported_before_its_end(ranks: Ranks, remote: Remote) -> None:
    receiving(ranks, remote)
    ranks.run(worker_rank.await_grant, "d", ranks=[D])
    for chunk in chunks():
        sending(ranks, chunk)
    (reported,) = ranks.run(worker_rank.await_report, "received", "d", ranks=[D])
    assert reported["failed"] == []
    assert ranks.run(worker_rank.holds, 1, [9, 3, 12], ranks=[D]) == [True]
    assert ranks.run(worker_rank.results, ranks=[P])[0]["sent"] == []
    sending(ranks, finished={"r"})
    ranks.run(worker_rank.await_report, "sent", "r", ranks=[P])


def test_what_the_receiver_holds_is_left_out(ranks: Ranks, remote: Remote) -> None:
    for chunk in chunks():
        sending(ranks, chunk)
    receiving(ranks, remote, pages=(4,), prefix=2 * worker_rank.PAGE)
    ranks.run(worker_rank.await_report, "received", "d", ranks=[D])
    assert ranks.run(worker_rank.holds, 1, [4], 2, ranks=[D]) == [True]
    sending(ranks, finished={"r"})
    ranks.run(worker_rank.await_report, "sent", "r", ranks=[P])


def test_a_second_request_of_a_name_waits_for_the_first(ranks: Ranks, remote: Remote) -> None:
    for tag, name in enumerate(("r", "s")):
        for chunk in chunks(name):
            pages = [page + 8 * tag for page in chunk.pages]
            sending(ranks, Send(name, "x", chunk.start, pages, chunk.last), tag=tag)
    for tag, name in enumerate(("d", "e")):
        receiving(ranks, remote, name)
        ranks.run(worker_rank.await_report, "received", name, ranks=[D])
        assert ranks.run(worker_rank.holds, tag, [9, 3, 12], ranks=[D]) == [True]
        sending(ranks, finished={"rs"[tag]})
        ranks.run(worker_rank.await_report, "sent", "rs"[tag], ranks=[P])


def test_what_is_withdrawn_is_sent_again_from_elsewhere(ranks: Ranks, remote: Remote) -> None:
    receiving(ranks, remote)
    ranks.run(worker_rank.await_grant, "d", ranks=[D])
    sending(ranks, chunks()[0])
    sending(ranks, withdrawals=["r"])
    ranks.run(worker_rank.overwrite, [5, 2], ranks=[P])
    sending(ranks, Send("r", "x", 0, [1, 2, 3], True), tag=4)
    ranks.run(worker_rank.await_report, "received", "d", ranks=[D])
    assert ranks.run(worker_rank.holds, 4, [9, 3, 12], ranks=[D]) == [True]
    sending(ranks, finished={"r"})
    ranks.run(worker_rank.await_report, "sent", "r", ranks=[P])


def test_blocks_that_are_taken_while_they_are_read_fail_the_request(ranks: Ranks, remote: Remote) -> None:
    """All of it was sent, and nobody has received it yet: its transfer ends, and its receiver is told."""
    for chunk in chunks():
        sending(ranks, chunk)
    sending(ranks, withdrawals=["r"])
    ranks.run(worker_rank.overwrite, [5, 2, 7], ranks=[P])
    receiving(ranks, remote)
    (reported,) = ranks.run(worker_rank.await_report, "received", "d", ranks=[D])
    assert reported["failed"] == ["d"]
    sending(ranks, finished={"r"})
    ranks.run(worker_rank.await_report, "sent", "r", ranks=[P])


def test_cancelled_by_the_sender(ranks: Ranks, remote: Remote) -> None:
    receiving(ranks, remote)
    ranks.run(worker_rank.await_grant, "d", ranks=[D])
    sending(ranks, chunks()[0])
    sending(ranks, cancels=["r"], finished={"r"})
    ranks.run(worker_rank.await_report, "sent", "r", ranks=[P])
    assert ranks.run(worker_rank.await_report, "received", "d", ranks=[D])[0]["failed"] == ["d"]


def test_cancelled_by_the_receiver(ranks: Ranks, remote: Remote) -> None:
    receiving(ranks, remote)
    ranks.run(worker_rank.await_grant, "d", ranks=[D])
    sending(ranks, chunks()[0])
    ranks.run(worker_rank.step, Step(cancels=["d"]), ranks=[D])
    assert ranks.run(worker_rank.await_report, "received", "d", ranks=[D])[0]["failed"] == ["d"]
    sending(ranks, chunks()[1], finished={"r"})
    ranks.run(worker_rank.await_report, "sent", "r", ranks=[P])


def test_never_sent_and_never_received(ranks: Ranks, remote: Remote) -> None:
    receiving(ranks, remote)
    sending(ranks, declines=["x"])
    assert ranks.run(worker_rank.await_report, "received", "d", ranks=[D])[0]["failed"] == ["d"]
    for chunk in chunks():
        sending(ranks, chunk, finished={"r"})
    ranks.run(worker_rank.step, Step(refusals=[remote]), ranks=[D])
    ranks.run(worker_rank.await_report, "sent", "r", ranks=[P])


def test_a_receive_without_a_remote_fails_with_the_reason(ranks: Ranks) -> None:
    ranks.run(worker_rank.step, Step(receives=[Receive("d", None, [1], 0, "nobody said where")]), ranks=[D])
    assert ranks.run(worker_rank.results, ranks=[D])[0] == {"sent": [], "received": ["d"], "failed": ["d"]}


def adopt(tensors: dict[int, torch.Tensor], page_size: int = 4) -> Any:
    groups = [Group(None, ())]
    return cache_of(tensors, groups, page_size=page_size, num_layers=2, total_heads=3, tp_rank=0, tp_size=1)


def test_tensors_are_adopted_as_they_lie() -> None:
    heads_first = torch.zeros(2, 8, 3, 4, 6)
    assert adopt({i: heads_first[i] for i in range(2)}).layout.order == "HND"
    tokens_first = torch.zeros(2, 8, 4, 3, 6).permute(0, 1, 3, 2, 4)
    cache = adopt({i: tokens_first[i] for i in range(2)})
    assert cache.layout.order == "NHD"
    assert cache["kv"][1].data_ptr() == tokens_first[1].data_ptr()
    blocks_first = torch.zeros(8, 2, 3, 4, 6)
    assert adopt({i: blocks_first[:, i] for i in range(2)}).layout.order == "HND"


@pytest.mark.parametrize(
    ("tensors", "page_size", "text"),
    [
        ({0: torch.zeros(2, 8, 3, 4, 6)}, 4, "shape"),
        ({0: torch.zeros(8, 3, 4, 6), 1: torch.zeros(8, 3, 4, 8)}, 4, "layer 1"),
        ({0: torch.zeros(8, 3, 4, 6)}, 16, "--block-size 4"),
        ({0: torch.zeros(3, 8, 4, 6).transpose(0, 1)}, 4, "contiguous"),
    ],
    ids=["five dimensions", "unlike layers", "split blocks", "heads outside blocks"],
)
def test_other_tensors_are_refused(tensors: dict[int, torch.Tensor], page_size: int, text: str) -> None:
    with pytest.raises(LayoutMismatch, match=text):
        adopt(tensors, page_size)


def adopt_hybrid(states: tuple[PackedState, ...], tp_size: int = 1, tp_rank: int = 0) -> Any:
    """As vLLM lays them out: one memory for all layers, in which a block belongs to whichever group it was given to."""
    memory = torch.zeros(8 * 3 * 4 * 6, dtype=torch.float32)
    paged = memory.view(8, 3, 4, 6)
    packed = memory.view(torch.int8).view(8, 1, 1, -1)[..., :100]
    groups = [Group("g0", (0,)), Group("g1", (1,), window=5), Group("g2", (2,), states=states)]
    how = {"page_size": 4, "num_layers": 3, "total_heads": 3 * tp_size, "tp_rank": tp_rank, "tp_size": tp_size}
    return cache_of({0: paged, 1: paged, 2: packed}, groups, **how), memory


def test_groups_that_share_their_memory_are_adopted_as_they_lie() -> None:
    cache, memory = adopt_hybrid((PackedState((2, 3), torch.float32), PackedState((4,), torch.float16)))
    assert cache.layout.groups == ("g0", "g1", "g2")
    assert cache.layout.window(1) == 5
    assert cache.pools["g0", False] == cache.pools["g1", False] == cache.pools["g2", True], "a block is one group's"
    first, second = cache.state("state0.g2")[2], cache.state("state1.g2")[2]
    first[3], second[3] = 1.0, 2.0
    block = memory.view(torch.uint8).view(8, -1)[3]
    assert torch.equal(block[:24].view(torch.float32), torch.ones(6))
    assert torch.equal(block[24:32].view(torch.float16), torch.full((4,), 2.0, dtype=torch.float16))
    assert not block[32:].any()


def test_states_that_do_not_fit_are_refused() -> None:
    with pytest.raises(LayoutMismatch, match="100 bytes of state in a block, but its states take 104"):
        adopt_hybrid((PackedState((26,), torch.float32),))


def test_a_state_that_ranks_share_is_part_of_the_whole_one() -> None:
    """Each part, such as q, k and v of a convolution, is split for itself."""
    packed = PackedState((2, 5), torch.float32, dim=1, parts=((1, True), (1, True), (3, True)))
    cache, _ = adopt_hybrid((packed,), tp_size=2, tp_rank=1)
    (state,) = cache.layout.states
    assert (state.shape, state.shard_dim, state.shard_groups) == ((2, 10), 1, (2, 2, 6))
    assert cache.state("state0.g2")[2].shape == (8, 2, 5)


def test_a_state_of_which_ranks_share_a_part_only_is_adopted_in_parts() -> None:
    """Such as a convolution of Mamba 2 with one group, whose B and C all ranks hold. Rows lie one behind the other."""
    packed = PackedState((2, 5), torch.float32, dim=1, parts=((3, True), (2, False)))
    behind = PackedState((3, 2), torch.float16, dim=0, parts=((3, True),))
    cache, memory = adopt_hybrid((packed, behind), tp_size=2)
    assert {state.name: (state.shape, state.shard_dim) for state in cache.layout.states} == {
        "state0.g2.0.0": ((6,), 0),
        "state0.g2.0.1": ((2,), None),
        "state0.g2.1.0": ((6,), 0),
        "state0.g2.1.1": ((2,), None),
        "state1.g2": ((6, 2), 0),
    }
    block = memory.view(8, -1)[5]
    block[:10] = torch.arange(10.0)
    found = [cache.state(f"state0.g2.{row}.{part}")[2][5].tolist() for row in range(2) for part in range(2)]
    assert found == [[0, 1, 2], [3, 4], [5, 6, 7], [8, 9]]
    cache.state("state1.g2")[2][5] = 1.0
    assert torch.equal(memory.view(torch.float16).view(8, -1)[5][20:26], torch.ones(6, dtype=torch.float16))
