"""Layer pipelining without processes: when which group is sent, and that hooks come and go."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

import torchkv
from tests.helpers.fakes.model import INPUT, Fixed, Group, Model, Work, hooks, layout
from torchkv import PeerLost, ProtocolError, TransferCancelled
from torchkv.pipelining.group_size import HANDED_OVER, Estimator
from torchkv.pipelining.pass_timer import busy_spans


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def kv() -> Group:
    return Group(layout())


# ---------------------------------------------------------------------- when which group is sent


def test_state_leaves_behind_the_pages_of_its_group() -> None:
    state = torchkv.State("ssm", (4, 2), torch.float32, layers=(1, 2, 4))
    kv = Group(layout(states=[state]))
    model = Model(order=[0, 1, 2, 3])
    with torchkv.pipeline(model, kv, "r", [1], 1, group_size=2, state_slot=3) as sending:
        model(INPUT)
        assert [entry[2] for entry in kv.log if entry[0] == "state"] == [(0, 1), (2, 3)]
    assert [(entry[0], entry[2]) for entry in kv.log[-2:]] == [("send", (4,)), ("state", (4,))]  # what no hook covered
    assert {entry[3:] for entry in kv.log if entry[0] == "state"} == {(3, 1, None)}
    assert len(sending.works) == 6

    kv.log.clear()
    with torchkv.pipeline(model, kv, "r", [1], 1, group_size=2):
        model(INPUT)
    assert not [entry for entry in kv.log if entry[0] == "state"]  # it is left to finish
    with pytest.raises(torchkv.PageOutOfRange, match="state_slot=9"):
        torchkv.pipeline(model, kv, "r", [1], 1, state_slot=9)


def test_layers_without_state_cost_no_verb() -> None:
    kv = Group(layout(states=[torchkv.State("ssm", (4, 2), torch.float32, layers=(0,))]))
    model = Model()
    with torchkv.pipeline(model, kv, "r", [1], 1, group_size=2, state_slot=0):
        model(INPUT)
    assert [entry[2] for entry in kv.log if entry[0] == "state"] == [(0, 1)]


@pytest.mark.parametrize(
    ("size", "groups"),
    [
        (1, [(0,), (1,), (2,), (3,), (4,)]),
        (2, [(0, 1), (2, 3), (4,)]),
        (4, [(0, 1, 2, 3), (4,)]),
    ],
)
def test_a_group_leaves_when_its_last_layer_has_run(kv: Group, size: int, groups: list[tuple[int, ...]]) -> None:
    model = Model()
    for number, layer in enumerate(model.layers):  # before the pipeline's hooks, and behind the layer
        layer.register_forward_hook(lambda *_, number=number: kv.log.append(("ran", number)))
    with torchkv.pipeline(model, kv, "r", [7, 3], "decode", group_size=size) as sending:
        model(INPUT)
    expected: list[tuple[Any, ...]] = []
    for number in range(5):
        expected.append(("ran", number))
        expected += [("send", "r", group, [7, 3], "decode", 0, None) for group in groups if group[-1] == number]
    assert kv.log == expected
    assert sending.groups == groups
    assert len(sending.works) == len(groups)
    assert sending.swept == ()
    assert sending.wait()


def test_groups_may_be_complete_out_of_order(kv: Group) -> None:
    model = Model(order=[4, 2, 3, 0, 1])
    with torchkv.pipeline(model, kv, "r", [1], 1, group_size=2) as sending:
        model(INPUT)
    assert kv.sent() == [(4,), (2, 3), (0, 1)]
    assert sending.swept == ()


def test_what_no_hook_covers_is_sent_at_the_end() -> None:
    kv = Group(layout(layers=[0, 1, 2, 3, 4, 7]))  # 7: a draft layer
    model = Model(order=[0, 1, 3, 4])
    with torchkv.pipeline(model, kv, "r", [1], 1, group_size=2) as sending:
        model(INPUT)
        assert kv.sent() == [(0, 1), (4,)]
    assert kv.sent() == [(0, 1), (4,), (2, 3, 7)]
    assert sending.swept == (2, 3, 7)


def test_a_pass_whose_layers_are_not_called_is_sent_whole_and_said(kv: Group, caplog: pytest.LogCaptureFixture) -> None:
    with torchkv.pipeline(Model(), kv, "r", [1], 1, group_size=1), caplog.at_level(logging.WARNING):
        pass
    assert kv.sent() == [(0, 1, 2, 3, 4)]
    assert "'r'" in caplog.text
    assert "no layer was called" in caplog.text


def test_a_second_chunk_goes_where_it_belongs(kv: Group) -> None:
    model = Model()
    for start, pages in [(0, [1, 2]), (2, [9])]:
        with torchkv.pipeline(model, kv, "r", pages, 1, start=start, group_size=3):
            model(INPUT)
    assert [entry[3:6] for entry in kv.log] == [([1, 2], 1, 0)] * 2 + [([9], 1, 2)] * 2


def test_a_chunk_without_pages_asks_no_policy_and_ends_like_any_other(kv: Group) -> None:
    class Broken:
        learns = True

        def group_size(self, **_: Any) -> int:
            raise ZeroDivisionError

    model = Model()
    with torchkv.pipeline(model, kv, "r", [], 1, start=4, policy=Broken()) as sending:
        model(INPUT)
    assert kv.log == [("send", "r", (0, 1, 2, 3, 4), [], 1, 4, None)]
    assert sending.wait()


def test_page_ids_are_those_of_the_call(kv: Group) -> None:
    model, pages, dst = Model(), np.array([5, 6]), [1, 2]
    with torchkv.pipeline(model, kv, "r", pages, dst, group_size=2):
        pages[:] = 0
        dst.append(3)
        model(INPUT)
    assert [entry[3:5] for entry in kv.log] == [([5, 6], (1, 2))] * 3


def test_a_layer_that_runs_twice_is_refused_before_its_group_could_leave_half_done(kv: Group) -> None:
    model = Model()
    with (
        pytest.raises(ProtocolError, match=r"'r'.*layer 0 has run twice.*each chunk"),
        torchkv.pipeline(model, kv, "r", [1], 1, group_size=4),
    ):
        model(model(INPUT))
    assert kv.log[-1] == ("cancel", "r")
    assert hooks(model) == 0


def test_another_thread_s_forward_is_not_this_request_s(kv: Group) -> None:
    model = Model()
    with torchkv.pipeline(model, kv, "mine", [1], 1, group_size=4):

        def other() -> None:
            with torchkv.pipeline(model, kv, "theirs", [2], 1, group_size=4):
                model(INPUT)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert kv.sent("theirs") == [(0, 1, 2, 3), (4,)]
        assert kv.sent("mine") == []
        model(INPUT)
        assert kv.sent("mine") == [(0, 1, 2, 3), (4,)]
    assert len(kv.log) == 4


@pytest.mark.parametrize("size", [5, 9])
def test_layers_that_go_together_go_at_the_end_and_need_no_hooks(kv: Group, size: int) -> None:
    model = Model(order=[1, 0, 2, 3, 4])
    with torchkv.pipeline(model, kv, "r", [1], 1, group_size=size) as sending:
        assert hooks(model) == 0
        model(model(INPUT))  # both before anything is sent
        assert kv.sent("r") == []
    assert kv.sent("r") == sending.groups == [sending.swept] == [(0, 1, 2, 3, 4)]


def test_a_policy_that_sends_once_still_learns_from_the_first_and_the_last_layer(kv: Group) -> None:
    model, policy = Model(), Fixed(5)
    with torchkv.pipeline(model, kv, "r", [1], 1, policy=policy):
        assert [bool(layer._forward_hooks) for layer in model.layers] == [True, False, False, False, True]
        model(INPUT)
        assert kv.sent("r") == []
    (measure,) = policy.measures
    measured = measure()
    assert measured is not None
    assert measured.verbs == 0
    assert measured.layer > 0
    assert hooks(model) == 0


# ---------------------------------------------------------------------- several requests, failures


def test_several_requests_in_one_forward(kv: Group) -> None:
    model = Model()
    with ExitStack() as stack:
        for number in range(3):
            stack.enter_context(torchkv.pipeline(model, kv, f"r{number}", [number], number, group_size=number + 2))
        model(INPUT)
    assert kv.sent("r0") == [(0, 1), (2, 3), (4,)]
    assert kv.sent("r1") == [(0, 1, 2), (3, 4)]
    assert kv.sent("r2") == [(0, 1, 2, 3), (4,)]
    assert hooks(model) == 0


def test_two_destinations_have_two_fates(kv: Group, caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    lost = PeerLost("rank 1 is gone")
    model.layers[1].register_forward_hook(lambda *_: kv.fails.update(a=lost))
    with (
        torchkv.pipeline(model, kv, "a", [1], 1, group_size=2) as first,
        torchkv.pipeline(model, kv, "b", [1], 2, group_size=2) as second,
        caplog.at_level(logging.WARNING),
    ):
        model(INPUT)
    assert kv.sent("a") == []
    assert kv.sent("b") == [(0, 1), (2, 3), (4,)]
    assert ("cancel", "b") not in kv.log
    assert second.wait()
    assert second.exception() is None
    assert first.exception() is lost
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        first.wait()
    assert caplog.text.count("were not sent") == 1
    assert hooks(model) == 1  # the test's own


def test_nothing_is_sent_after_a_failure(kv: Group) -> None:
    model = Model()

    def fail_once(*_: Any) -> None:
        kv.fails["r"] = TransferCancelled("the receiver cancelled")

    first = model.layers[1].register_forward_hook(fail_once)
    second = model.layers[2].register_forward_hook(lambda *_: kv.fails.clear())
    with torchkv.pipeline(model, kv, "r", [1], 1, group_size=1) as sending:
        model(INPUT)
    assert kv.sent() == [(0,)]  # layer 1 failed; the sends of 2 to 4 would have succeeded
    assert sending.swept == ()
    assert isinstance(sending.exception(), TransferCancelled)
    first.remove()
    second.remove()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_forward_that_raises_cancels_the_request(kv: Group, error: type[BaseException]) -> None:
    model = Model()

    def broken(*_: Any) -> None:
        raise error("half-way")

    handle = model.layers[3].register_forward_hook(broken)
    sending = torchkv.pipeline(model, kv, "r", [1], 1, group_size=1)
    with pytest.raises(error, match="half-way"), sending:
        model(INPUT)
    assert kv.sent() == [(0,), (1,), (2,)]
    assert kv.log[-1] == ("cancel", "r")
    assert sending.cancelled is not None
    assert hooks(model) == 1  # the test's own
    handle.remove()
    model(INPUT)
    assert kv.log[-1] == ("cancel", "r")


def test_other_hooks_run_and_stay(kv: Group) -> None:
    model, ran = Model(), []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda *_: ran.append("before"))
        layer.register_forward_hook(lambda *_: ran.append("after"))
    with torchkv.pipeline(model, kv, "r", [1], 1):
        model(INPUT)
    assert ran == ["before", "after"] * 5
    assert hooks(model) == 5


def test_the_output_is_the_model_s(kv: Group) -> None:
    model = Model()
    expected = model(INPUT)
    with torchkv.pipeline(model, kv, "r", [1], 1, group_size=1):
        assert torch.equal(model(INPUT), expected)


def test_nothing_is_held_afterwards(kv: Group) -> None:
    model = Model()
    pages = torch.tensor([1, 2])
    with torchkv.pipeline(model, kv, "r", pages, 1) as sending:
        model(INPUT)
    kv.log.clear()
    references = [weakref.ref(model), weakref.ref(pages)]
    threads = threading.active_count()
    del model, pages
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    assert sending.wait()
    assert threading.active_count() == threads


def test_a_context_is_entered_once(kv: Group) -> None:
    sending = torchkv.pipeline(Model(), kv, "r", [1], 1)
    with sending:
        pass
    with pytest.raises(ProtocolError, match="entered twice"), sending:
        pass


def test_what_can_be_checked_is_checked_before_the_forward(kv: Group) -> None:
    model = Model()
    kv.tombstones["dead"] = TransferCancelled("cancelled by the receiver")
    for error, match, arguments in [
        (TransferCancelled, "by the receiver", ("dead", [1], 1, {})),
        (torchkv.PageOutOfRange, r"'r'.*page 100", ("r", [100], 1, {})),
        (ProtocolError, "name", ("", [1], 1, {})),
        (ProtocolError, "start", ("r", [1], 1, {"start": -1})),
        (ProtocolError, "tokens", ("r", [1], 1, {"tokens": -1})),
        (ProtocolError, "group_size 0", ("r", [1], 1, {"group_size": 0})),
        (ProtocolError, "group_size True", ("r", [1], 1, {"group_size": True})),
        (ProtocolError, "says group size 0", ("r", [1], 1, {"policy": Fixed(0)})),
    ]:
        request, pages, dst, options = arguments
        with pytest.raises(error, match=match):
            torchkv.pipeline(model, kv, request, pages, dst, **options)
    with pytest.raises(ProtocolError, match=r"NoneType.*events="):
        torchkv.pipeline(None, kv, "r", [1], 1)
    assert kv.log == []
    assert hooks(model) == 0


# ---------------------------------------------------------------------- policies


def test_a_policy_is_asked_about_the_pass_and_told_how_it_went(kv: Group) -> None:
    policy, model = Fixed(2), Model()
    with torchkv.pipeline(model, kv, "r", [1, 2, 3], 1, policy=policy):
        model(INPUT)
    layer_nbytes = 3 * 2 * 16 * 2 * 8 * 2  # pages, k and v, tokens, heads, dim, bytes
    assert policy.asked == [{"tokens": 48, "num_layers": 5, "layer_nbytes": layer_nbytes}]
    (measure,) = policy.measures
    measured = measure()
    assert measured is not None
    assert measured.tokens == 48
    assert measured.layer > 0
    assert measured.enqueue == 0, "this thread computes"
    assert measured.launch > 0
    assert measured.verbs == 2  # the last one comes later
    assert sum(count for count, _, _ in measured.transfers) == 3
    assert sum(nbytes for _, nbytes, _ in measured.transfers) == 5 * layer_nbytes
    with torchkv.pipeline(model, kv, "r", [1], 1, policy=policy, tokens=1000):
        model(INPUT)
    assert policy.asked[-1]["tokens"] == 1000


def test_the_wait_for_a_grant_is_not_taken_for_a_slow_link(kv: Group) -> None:
    policy, model = Fixed(1), Model()
    kv._engine.sender.prefix_tokens = lambda request, rank: None
    with torchkv.pipeline(model, kv, "r", [1], 1, policy=policy):
        model(INPUT)
    measured = policy.measures[0]()
    assert measured is not None
    assert measured.transfers == ()


def test_an_explicit_size_wins(kv: Group) -> None:
    policy, model = Fixed(2), Model()
    with torchkv.pipeline(model, kv, "r", [1], 1, policy=policy, group_size=3):
        model(INPUT)
    assert kv.sent() == [(0, 1, 2), (3, 4)]
    assert policy.asked == []


def test_the_default_policy_sends_the_first_pass_once_and_learns(kv: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    now = iter(range(1000))
    # Every look at the clock comes one second after the last: layers take seconds, transfers a millisecond.
    monkeypatch.setattr("torchkv.pipelining.pass_timer.time.perf_counter", lambda: float(next(now)))
    monkeypatch.setattr("torchkv.pipelining.group_size.ASSUMED_LAUNCH", 0.0)
    monkeypatch.setattr(Work, "seconds", 3.0)
    for _ in range(2):
        with torchkv.pipeline(model, kv, "r", [1], 1):
            model(INPUT)
    assert kv.sent()[0] == (0, 1, 2, 3, 4)
    assert len(kv.sent()) > 2
    # What was learned is of this group, and goes with it.
    assert Group(layout()) not in torchkv_learned()
    assert kv in torchkv_learned()


@pytest.mark.parametrize(("flows", "handed_over"), [(None, HANDED_OVER), (object(), 0.0)])
def test_only_python_that_serves_requests_delays_who_enqueues_layers(
    kv: Group, monkeypatch: pytest.MonkeyPatch, flows: object, handed_over: float
) -> None:
    kv._engine.flows = flows
    made = []

    def making(**given: float) -> Estimator:
        made.append(given)
        return Estimator(**given)

    monkeypatch.setattr("torchkv.pipelining.context.Estimator", making)
    for _ in range(2):
        with torchkv.pipeline(model := Model(), kv, "r", [1], 1):
            model(INPUT)
    assert made == [{"handed_over": handed_over}]


def torchkv_learned() -> Any:
    import sys

    return sys.modules["torchkv.pipelining.context"]._learned


def test_spans_in_which_the_link_was_busy() -> None:
    transfers: Iterator[tuple[float, float, int]] = iter([(0.0, 2.0, 10), (1.0, 1.5, 20), (2.0, 3.0, 5), (4.0, 5.0, 7)])
    assert list(busy_spans(transfers)) == [(3, 35, 3.0), (1, 7, 1.0)]
    assert list(busy_spans(iter([]))) == []


# ---------------------------------------------------------------------- traces


def test_sends_have_names_in_a_trace(kv: Group) -> None:
    model = Model()
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu]) as profile, torchkv.pipeline(model, kv, "r", [1], 1, group_size=2):
        model(INPUT)
    names = [event.name for event in profile.events() if event.name.startswith("torchkv::")]
    assert names == ["torchkv::send_layer[0..1]", "torchkv::send_layer[2..3]", "torchkv::send_layer[4]"]
