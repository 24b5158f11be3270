"""The scheduler's side of the vLLM connector, given what vLLM's scheduler decides. Real engines: tests/serving/vllm."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchkv.errors import ProtocolError
from torchkv.integrations.layer_groups import Group, Groups, PackedState
from torchkv.integrations.vllm_params import TransferParams, remote_of
from torchkv.integrations.vllm_scheduler import SchedulerSide

PAGE = 4


def side() -> SchedulerSide:
    made = SchedulerSide(Groups((Group(None, (0, 1)),), PAGE), instance="p", tp_size=1)
    made.endpoint = "10.0.0.1", 4000
    return made


def request(name: str, tokens: int, **params: Any) -> Any:
    return SimpleNamespace(request_id=name, num_prompt_tokens=tokens, kv_transfer_params=params, status=None)


def ended(it: Any, status: str) -> Any:
    it.status = SimpleNamespace(name=status)
    return it


def step(scheduled: dict[str, int], *, new: Any = (), cached: Any = (), resumed: Any = (), preempted: Any = ()) -> Any:
    """vLLM's SchedulerOutput. new, cached: (request, block ids or None, tokens computed before)."""
    return SimpleNamespace(
        preempted_req_ids=set(preempted),
        num_scheduled_tokens=scheduled,
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=(ids,), num_computed_tokens=done) for name, ids, done in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, _, _ in cached],
            new_block_ids=[None if ids is None else (ids,) for _, ids, _ in cached],
            num_computed_tokens=[done for _, _, done in cached],
            resumed_req_ids=set(resumed),
        ),
    )


def sends(made: Any) -> list[tuple[int, list[int], bool]]:
    return [(send.start, send.pages, send.last) for send in made.sends]


def test_chunks_are_sent_in_whole_pages_until_the_last() -> None:
    scheduler = side()
    it = request("r", 11, do_remote_decode=True)
    assert scheduler.matched_tokens(it, 0) == (0, False)
    scheduler.allocated(it, [[7, 8, 9]], 0)
    assert sends(scheduler.build(step({"r": 6}, new=[("r", [7, 8], 0)]))) == [(0, [7], False)]
    assert sends(scheduler.build(step({"r": 1}, cached=[("r", None, 6)]))) == []
    assert sends(scheduler.build(step({"r": 4}, cached=[("r", [9], 7)]))) == [(1, [8, 9], True)]
    # It may go on to decode here.
    assert sends(scheduler.build(step({"r": 1}, cached=[("r", [3], 11)]))) == []
    assert scheduler.finished(ended(it, "FINISHED_LENGTH_CAPPED")) == (
        True,
        {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": "r",
            "remote_engine_id": "p",
            "remote_request_id": "r",
            "remote_host": "10.0.0.1",
            "remote_port": 4000,
            "remote_num_tokens": 11,
            "tp_size": 1,
        },
    )


@pytest.mark.parametrize("name", ["x" * 5000, "\u00e9" * 600, "\ud800"])
def test_a_request_that_a_client_named_at_any_length_has_a_name_that_torchkv_takes(name: str) -> None:
    scheduler = side()
    scheduler.allocated(request(name, 3, do_remote_decode=True), [[]], 0)
    (send,) = scheduler.build(step({name: 3}, new=[(name, [1], 0)])).sends
    assert send.request == name
    assert 0 < len(send.name.encode()) <= 1024


def test_a_prefix_that_is_cached_here_is_sent_too() -> None:
    scheduler = side()
    scheduler.allocated(request("r", 11, do_remote_decode=True), [[]], 0)
    assert sends(scheduler.build(step({"r": 3}, new=[("r", [7, 8, 9], 8)]))) == [(0, [7, 8, 9], True)]


def test_what_was_preempted_is_withdrawn_and_sent_again_from_other_blocks() -> None:
    scheduler = side()
    it = request("r", 8, do_remote_decode=True)
    scheduler.allocated(it, [[]], 0)
    scheduler.build(step({"r": 4}, new=[("r", [1], 0)]))
    assert scheduler.build(step({}, preempted=["r"])).withdrawals == ["r"]
    scheduler.allocated(it, [[5]], 0)
    made = scheduler.build(step({"r": 8}, cached=[("r", [5, 6], 0)], resumed=["r"]))
    assert sends(made) == [(0, [5, 6], True)]


@pytest.mark.parametrize(
    ("begun", "expected"), [(True, (["r"], [], (True, None))), (False, ([], ["x"], (False, None)))]
)
def test_blocks_of_an_aborted_request_are_kept_if_they_may_be_read(begun: bool, expected: Any) -> None:
    scheduler = side()
    it = request("r", 8, do_remote_decode=True, transfer_id="x")
    scheduler.allocated(it, [[]], 0)
    if begun:
        scheduler.build(step({"r": 4}, new=[("r", [1], 0)]))
    answer = scheduler.finished(ended(it, "FINISHED_ABORTED"))
    assert scheduler.busy
    made = scheduler.build(step({}))
    assert (made.cancels, made.declines, answer) == expected
    assert not scheduler.busy


REMOTE = {"do_remote_prefill": True, "transfer_id": "x", "remote_host": "10.0.0.9", "remote_port": 5}


def test_what_is_not_cached_is_received_behind_the_prefix() -> None:
    scheduler = side()
    it = request("r", 11, **REMOTE)
    assert scheduler.matched_tokens(it, 4) == (7, True)
    scheduler.allocated(it, [[1, 2, 3, 4]], 7)  # the fourth block is for tokens to come
    (receive,) = scheduler.build(step({})).receives
    assert (receive.pages, receive.prefix_tokens) == ([2, 3], 4)
    assert receive.remote is not None
    assert (receive.remote.name, receive.remote.address) == ("x", "tcp://10.0.0.9:5")
    assert scheduler.matched_tokens(it, 0) == (0, False), "after a failure it is prefilled here"
    assert scheduler.finished(ended(it, "FINISHED_ABORTED")) == (False, None)
    assert scheduler.build(step({})).cancels == ["r"]


def test_an_abort_after_the_receive_has_ended_cancels_nothing() -> None:
    scheduler = side()
    it = request("r", 11, **REMOTE)
    scheduler.allocated(it, [[1, 2, 3]], 11)
    scheduler.build(step({}))
    scheduler.received(["r"])
    scheduler.finished(ended(it, "FINISHED_ABORTED"))
    assert not scheduler.busy


def test_an_abort_before_it_is_scheduled_refuses_what_was_prefilled() -> None:
    scheduler = side()
    scheduler.finished(ended(request("r", 11, **REMOTE), "FINISHED_ABORTED"))
    (refusal,) = scheduler.build(step({})).refusals
    assert refusal.name == "x"


def test_params_that_do_not_say_where_carry_the_reason() -> None:
    scheduler = side()
    it = request("r", 11, do_remote_prefill=True, transfer_id="x")
    assert scheduler.matched_tokens(it, 0) == (11, True)
    scheduler.allocated(it, [[1, 2, 3]], 11)
    (receive,) = scheduler.build(step({})).receives
    assert receive.remote is None
    assert "remote_host" in receive.problem


@pytest.mark.parametrize("address", ["10.0.0.9:5", "http://10.0.0.9:5/", "tcp://10.0.0.9:5"])
def test_an_address_may_come_in_one_piece(address: str) -> None:
    params = TransferParams.of({"do_remote_prefill": True, "transfer_id": "x", "remote_bootstrap_addr": address})
    assert remote_of(params).address == "tcp://10.0.0.9:5"


@pytest.mark.parametrize(
    "bad",
    [
        {"transfer_id": 5},
        {"transfer_id": ""},
        {"transfer_id": "x" * 1025},
        {"transfer_id": "\u00e9" * 600},
        {"transfer_id": "\ud800"},
        {"remote_port": 0},
        {"remote_port": "5"},
        {"remote_host": "a b"},
        {"remote_host": "::1"},
        {"remote_host": None},
        {"do_remote_prefill": 1},
        {"remote_host": None, "remote_bootstrap_addr": "10.0.0.9:99999999"},
    ],
)
def test_params_of_other_types_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        remote_of(TransferParams.of({**REMOTE, **bad}))


# ---------------------------------------------------------------------- models whose layers have lists of their own

STATE = (PackedState((2, 3), torch.float32),)
HYBRID = Groups((Group("full", (0,)), Group("near", (1,), window=5), Group("state", (2,), states=STATE)), PAGE)
LISTS = ([7, 8, 9], [0, 4, 5], [0, 0, 6])


def hybrid(lists: Any = LISTS) -> SchedulerSide:
    made = SchedulerSide(HYBRID, instance="p", tp_size=1)
    made.endpoint = "10.0.0.1", 4000
    made.blocks_of = lambda name: lists
    return made


def long_request(tokens: int, **params: Any) -> Any:
    it = request("r", tokens, **params)
    it.prompt_token_ids, it._all_token_ids, it.max_tokens = list(range(tokens)), list(range(tokens)), 16
    return it


def test_all_lists_are_sent_with_the_last_chunk_and_the_last_token_is_left_to_decode() -> None:
    scheduler = hybrid()
    it = long_request(12, do_remote_decode=True)
    scheduler.shorten(it)
    assert (it.num_prompt_tokens, it.prompt_token_ids, it._all_token_ids) == (11, list(range(11)), list(range(11)))
    assert it.max_tokens == 1, "or its state went on while it is read"
    scheduler.allocated(it, LISTS, 0)
    assert sends(scheduler.build(step({"r": 8}, new=[("r", [7, 8], 0)]))) == []
    made = scheduler.build(step({"r": 3}, cached=[("r", [9], 8)]))
    assert sends(made) == [(0, {"full": [7, 8, 9], "near": [-1, 4, 5]}, True)]
    assert made.sends[0].slots == {"state": 6}
    assert scheduler.finished(ended(it, "FINISHED_LENGTH_CAPPED"))[0]


@pytest.mark.parametrize(
    ("tokens", "absent"),
    # The next token, at position ``tokens``, attends to the four before it; only whole pages before those are absent.
    [(3, 0), (4, 0), (7, 0), (8, 1), (9, 1), (11, 1), (12, 2)],
)
def test_pages_before_a_window_are_absent(tokens: int, absent: int) -> None:
    found = HYBRID.pages(([7, 8, 9], [4, 5, 6], [1]), prefix=0, tokens=tokens)
    assert isinstance(found, dict)
    assert found["near"] == ([-1] * absent + [4, 5, 6][absent:])[: -(-tokens // PAGE)]
    assert -1 not in found["full"]


def test_lists_are_received_behind_the_prefix() -> None:
    scheduler = hybrid()
    it = long_request(12, do_remote_prefill=True, transfer_id="x", remote_host="h", remote_port=1)
    scheduler.shorten(it)
    assert it.num_prompt_tokens == 12
    assert scheduler.matched_tokens(it, 4) == (7, True)
    scheduler.allocated(it, LISTS, 7)
    (receive,) = scheduler.build(step({})).receives
    assert (receive.pages, receive.slots) == ({"full": [8, 9], "near": [4, 5]}, {"state": 6})
    assert receive.prefix_tokens == 4
    assert sorted(receive.blocks()) == [4, 5, 6, 8, 9]


def test_a_prompt_of_one_token_is_not_shortened() -> None:
    scheduler = hybrid()
    it = long_request(1, do_remote_decode=True)
    scheduler.shorten(it)
    assert it.num_prompt_tokens == 1
    assert scheduler.matched_tokens(long_request(1, do_remote_prefill=True), 0) == (0, False)


def test_an_abort_before_the_last_chunk_leaves_nothing_to_wait_for() -> None:
    scheduler = hybrid()
    it = long_request(12, do_remote_decode=True)
    scheduler.shorten(it)
    scheduler.allocated(it, LISTS, 0)
    scheduler.build(step({"r": 8}, new=[("r", [7, 8], 0)]))
    assert scheduler.finished(ended(it, "FINISHED_ABORTED")) == (False, None)
    assert scheduler.build(step({})).declines == ["r"]


def test_a_prompt_of_embeddings_is_declined() -> None:
    scheduler = hybrid()
    it = long_request(12, do_remote_decode=True, transfer_id="x")
    it.prompt_token_ids = None
    scheduler.shorten(it)
    scheduler.allocated(it, LISTS, 0)
    made = scheduler.build(step({"r": 12}, new=[("r", [7, 8, 9], 0)]))
    assert (made.sends, made.declines) == ([], ["x"])


@pytest.mark.parametrize("params", [{}, {"do_remote_decode": "yes"}, {"do_remote_decode": True, "transfer_id": 7}])
def test_a_request_that_is_prefilled_for_nobody_keeps_its_prompt(params: dict[str, Any]) -> None:
    it = long_request(12, **params)
    hybrid().shorten(it)
    assert (it.num_prompt_tokens, it.max_tokens) == (12, 16)
