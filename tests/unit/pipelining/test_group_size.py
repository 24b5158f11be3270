"""Group sizes: the prediction against a simulation, what measuring finds out, the published formula's values."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchkv.errors import ProtocolError
from torchkv.pipelining.group_size import (
    HANDED_OVER,
    Adaptive,
    Estimator,
    Measured,
    Published,
    Timing,
    best_group_size,
    total_seconds,
)

seconds = st.floats(1e-6, 1.0)
little = st.floats(0, 1e-2)
timings = st.builds(
    Timing,
    layer=seconds,
    transfer=seconds,
    overhead=seconds,
    launch=little,
    enqueue=st.just(0.0) | seconds,
    handed_over=st.just(0.0) | little,
    drag=little,
)


def simulated(size: int, num_layers: int, timing: Timing) -> float:
    """One layer after the other, one transfer after the other."""
    clock, thread, link_free = 0.0, 0.0, 0.0
    for layer in range(num_layers):
        clock += timing.layer
        thread += timing.enqueue
        if layer and layer % size == 0:
            clock += size * timing.drag  # of the group before
        if (layer + 1) % size == 0 or layer + 1 == num_layers:
            clock += timing.launch
            thread += timing.launch + timing.handed_over if timing.enqueue else 0.0
            in_group = layer % size + 1
            link_free = max(link_free, clock, thread) + timing.overhead + in_group * timing.transfer
    return link_free


@given(size=st.integers(1, 40), num_layers=st.integers(1, 40), timing=timings)
def test_total_seconds_is_what_a_simulation_takes(size: int, num_layers: int, timing: Timing) -> None:
    size = min(size, num_layers)
    assert total_seconds(size, num_layers, timing) == pytest.approx(simulated(size, num_layers, timing))


@given(num_layers=st.integers(1, 40), timing=timings)
def test_the_best_size_never_loses_to_sending_once_and_to_no_other_by_much(num_layers: int, timing: Timing) -> None:
    best = simulated(best_group_size(num_layers, timing), num_layers, timing)
    once = simulated(num_layers, num_layers, timing)
    assert best <= once
    least = min(simulated(size, num_layers, timing) for size in range(1, num_layers + 1))
    assert best <= least + 0.35 * num_layers * (timing.overhead + timing.transfer) + 1e-9


def test_long_prompts_expose_one_small_group() -> None:
    # 40 ms to compute, 20 ms to send: nearly all of it hides.
    timing = Timing(layer=1e-3, transfer=0.5e-3)
    size = best_group_size(40, timing)
    assert total_seconds(size, 40, timing) - 40e-3 < 2e-3 + 40 * timing.launch
    assert total_seconds(40, 40, timing) - 40e-3 > 20e-3


def test_no_size_relies_on_the_last_microsecond() -> None:
    # Nine layers' transfers just fit behind the tenth: one per cent slower, and they would not.
    timing = Timing(layer=1e-3, transfer=0.9e-3 / 9, overhead=100e-6, launch=0)
    size = best_group_size(10, timing)
    assert size < 9
    assert total_seconds(9, 10, timing) <= total_seconds(size, 10, timing) + 1e-9  # the negative control


def test_a_smaller_last_group_is_worth_another_verb() -> None:
    """Figures of a prefill of 4,096 tokens on a GPU. Each layer's bytes cost the computation as much in any group."""
    timing = Timing(layer=3.3e-3, transfer=0.06e-3, overhead=300e-6, launch=30e-6, drag=0.024e-3, slowdown=6.0)
    size = best_group_size(32, timing)
    assert 32 % size == 2
    assert total_seconds(size, 32, timing) < total_seconds(28, 32, timing)


def test_short_prompts_are_sent_once() -> None:
    # Two verbs cost more than what they could hide.
    assert best_group_size(32, Timing(layer=2e-6, transfer=1e-6, overhead=100e-6, launch=20e-6)) == 32


def test_a_thread_that_holds_up_its_gpu_sends_once_and_one_that_runs_ahead_may_send_often() -> None:
    """Figures of prefills of 256 and 4,096 tokens on GPUs (docs/measurements/2026-11-22-gpu.md)."""
    short = Timing(layer=0.55e-3, transfer=5e-6, launch=1e-5, enqueue=0.55e-3, handed_over=HANDED_OVER)
    assert best_group_size(32, short) == 32
    assert best_group_size(32, replace(short, handed_over=0.0)) < 32, "the resident loop delays nobody"
    assert best_group_size(32, replace(short, enqueue=0.5e-3)) < 32, "it is for what a verb costs the thread"
    # However much the thread is held up, what saves more than it costs is done.
    assert best_group_size(32, replace(short, transfer=0.1e-3)) < 32
    long = Timing(layer=3.2e-3, transfer=24e-6, launch=1e-4, enqueue=0.55e-3, slowdown=6.0, handed_over=HANDED_OVER)
    for size in range(1, 33):
        assert total_seconds(size, 32, long) == total_seconds(size, 32, replace(long, enqueue=0.0))


def test_a_model_of_one_layer_has_one_group() -> None:
    assert best_group_size(1, Timing(layer=1.0, transfer=1.0)) == 1


def test_beside_computation_groups_are_slower_and_the_last_one_is_not() -> None:
    """Figures of a prefill of 16,384 tokens on a GPU: a group of 30 layers was still under way at its end."""
    timing = Timing(layer=16e-3, transfer=0.17e-3, overhead=100e-6, launch=100e-6)
    crowded = replace(timing, slowdown=6.0)
    assert best_group_size(32, timing) == 31
    assert best_group_size(32, crowded) == 15  # and 2 at the end, so that 15 have two layers' time
    for size in range(1, 33):
        if size == 32 or size * 6 * timing.transfer < timing.layer:
            assert total_seconds(size, 32, crowded) == total_seconds(size, 32, timing)
    assert total_seconds(31, 32, crowded) > total_seconds(31, 32, timing) + 10e-3


# ---------------------------------------------------------------------- measuring


def learned(*passes: Measured) -> Estimator:
    estimator = Estimator()
    for one in passes:
        estimator.observe(one)
    return estimator


def test_nothing_is_known_before_layers_and_link_have_been_measured() -> None:
    for known in (
        learned(),
        learned(Measured(tokens=100, layer=1e-3)),
        learned(Measured(tokens=100, transfers=((1, 1000, 1e-3),))),
        learned(Measured(tokens=0, layer=1.0, transfers=((1, 0, 1.0), (0, 5, 1.0), (1, 5, 0.0)))),
    ):
        assert known.timing(tokens=100, layer_nbytes=1000) is None
    everything = learned(Measured(tokens=100, layer=1e-3, transfers=((1, 1000, 1e-3),)))
    assert everything.timing(tokens=100, layer_nbytes=1000) is not None
    assert everything.timing(tokens=0, layer_nbytes=0) is None


def test_overhead_and_rate_are_told_apart() -> None:
    rng = random.Random()
    overhead, rate = rng.uniform(1e-5, 1e-3), rng.uniform(1e8, 1e11)
    spans = []
    for _ in range(30):
        count, nbytes = rng.randint(1, 8), rng.randint(1 << 16, 1 << 26)
        spans.append((count, nbytes, count * overhead + nbytes / rate))
    timing = learned(Measured(tokens=64, layer=2e-3, launch=30e-6, transfers=tuple(spans))).timing(
        tokens=64, layer_nbytes=1 << 20
    )
    assert timing is not None
    assert timing.overhead == pytest.approx(overhead, rel=1e-3)
    assert timing.transfer == pytest.approx((1 << 20) / rate, rel=1e-3)
    assert timing.layer == pytest.approx(2e-3)


def test_what_moving_bytes_costs_shows_in_how_long_layers_take_beside_it() -> None:
    link = ((1, 10**6, 1e-3),)
    estimator = learned(*[Measured(tokens=64, layer=1e-3, launch=50e-6, transfers=link) for _ in range(5)])

    def drag(tokens: int = 64) -> float:
        timing = estimator.timing(tokens=tokens, layer_nbytes=1)
        assert timing is not None
        assert 20e-6 < timing.launch < 50e-6  # of the calling thread, whatever the rest
        assert timing.layer <= tokens / 64 * 1e-3 + 1e-9  # verbs are not taken for layers
        return timing.drag

    assert drag() == 0
    for _ in range(30):  # 0.2 ms a layer
        estimator.observe(Measured(tokens=64, layer=1.2e-3, launch=50e-6, verbs=10))
    assert drag() == pytest.approx(200e-6, rel=0.01)
    assert drag(100) == pytest.approx(312.5e-6, rel=0.01), "there are as many more bytes"
    for _ in range(10):
        estimator.observe(Measured(tokens=64, layer=1e-3, launch=50e-6))
    assert drag() > 160e-6
    for _ in range(300):
        estimator.observe(Measured(tokens=64, layer=1e-3, launch=50e-6))
    assert drag() < 4e-6
    for _ in range(30):  # faster than ever: no verb costs less than nothing
        estimator.observe(Measured(tokens=64, layer=0.5e-3, launch=50e-6, verbs=10))
    assert drag() == 0


def test_what_verbs_cost_a_thread_that_holds_up_its_gpu_is_not_taken_for_the_price_of_bytes() -> None:
    link = ((1, 10**6, 1e-3),)
    held_up = Measured(tokens=256, layer=0.6e-3, enqueue=0.55e-3, launch=1e-4, transfers=link)
    estimator = learned(*[held_up] * 2, *[replace(held_up, layer=0.65e-3, verbs=3)] * 10)
    timing = estimator.timing(tokens=16384, layer_nbytes=1)
    assert timing is not None
    assert timing.drag == 0
    assert timing.enqueue == 0.55e-3
    # A pass that filled the GPU's queue had to wait, and says nothing of what it takes to fill it.
    ahead = Measured(tokens=16384, layer=20e-3, enqueue=20e-3, transfers=link)
    for measured in [ahead] * 2 + [replace(ahead, layer=21e-3, verbs=3)] * 6:
        estimator.observe(replace(held_up, tokens=128))
        estimator.observe(measured)
    timing = estimator.timing(tokens=16384, layer_nbytes=1)
    assert timing is not None
    assert timing.enqueue == 0.55e-3
    assert timing.drag > 0.8e-3


def test_a_machine_on_which_verbs_are_dear_sends_once() -> None:
    policy = Adaptive()
    ask = {"tokens": 256, "num_layers": 12, "layer_nbytes": 10**5}
    once = Measured(tokens=256, layer=20e-3, transfers=((1, 12 * 10**5, 2.4e-3),), launch=0.2e-3)
    policy.learn(lambda: once)
    size = policy.group_size(**ask)
    assert size < 12
    for _ in range(5):  # the transfer that was hidden cost more than it saved
        policy.learn(lambda: Measured(tokens=256, layer=20.5e-3, launch=0.2e-3, verbs=1))
    assert policy.group_size(**ask) == 12


def test_one_slow_pass_does_not_end_pipelining_and_neither_does_a_machine_that_has_become_slower() -> None:
    policy = Adaptive()
    ask = {"tokens": 2048, "num_layers": 8, "layer_nbytes": 10**7}

    def size_after(layer: float) -> int:
        """What comes of another pass, sent as the policy wants it."""
        size = policy.group_size(**ask)
        verbs = 0 if size == 8 else -(-8 // size) - 1
        once = ((1, 8 * 10**7, 0.16),)
        measured = Measured(tokens=2048, layer=layer, launch=1e-4, transfers=once, verbs=verbs)
        policy.learn(lambda: measured)
        return policy.group_size(**ask)

    assert size_after(0.25) < 8
    for layer in (0.25, 0.8, 0.25, 0.26, 0.7, 0.25):  # two of them beside other work
        assert size_after(layer) < 8
    sizes = [size_after(0.6) for _ in range(30)]  # and from now on, all of them
    assert sizes.count(8) <= 15, sizes
    assert all(size < 8 for size in sizes[-10:]), sizes


@pytest.mark.parametrize("nbytes", [1 << 24, 1 << 10])
def test_equal_transfers_are_explained_by_some_overhead_and_some_rate(nbytes: int) -> None:
    took = 50e-6 if nbytes == 1 << 10 else 2e-3
    known = learned(*[Measured(tokens=64, layer=1e-3, transfers=((1, nbytes, took),)) for _ in range(3)])
    timing = known.timing(tokens=64, layer_nbytes=nbytes)
    assert timing is not None
    assert timing.overhead + timing.transfer == pytest.approx(took)
    assert timing.transfer >= 0
    assert timing.overhead > 0


def test_layer_time_is_taken_from_the_nearest_length_in_proportion() -> None:
    known = learned(
        Measured(tokens=1000, layer=1e-3, transfers=((1, 1, 1.0),)),
        Measured(tokens=16000, layer=40e-3),
    )
    for tokens, layer in [(1000, 1e-3), (2000, 2e-3), (500, 0.5e-3), (16000, 40e-3), (8000, 20e-3)]:
        timing = known.timing(tokens=tokens, layer_nbytes=1)
        assert timing is not None
        assert timing.layer == pytest.approx(layer), tokens


def test_old_measurements_are_forgotten() -> None:
    fast, slow = (1, 10**9, 0.1), (1, 10**9, 10.0)
    estimator = learned(*[Measured(tokens=64, layer=1e-3, transfers=(fast,)) for _ in range(20)])
    before = estimator.timing(tokens=64, layer_nbytes=10**9)
    for _ in range(40):
        estimator.observe(Measured(tokens=64, layer=5e-3, transfers=(slow,)))
    after = estimator.timing(tokens=64, layer_nbytes=10**9)
    assert before is not None
    assert after is not None
    assert before.transfer == pytest.approx(0.1, rel=0.01)
    assert after.transfer == pytest.approx(10.0, rel=0.01)
    assert after.layer == pytest.approx(5e-3, rel=0.01)


def test_adaptive_sends_the_first_pass_once_and_learns_from_it() -> None:
    policy = Adaptive()
    ask = {"tokens": 4096, "num_layers": 40, "layer_nbytes": 1 << 22}
    assert policy.group_size(**ask) == 40
    over = False
    # 40 ms of computing, 40 ms of sending.
    measured = Measured(tokens=4096, layer=1e-3, transfers=((1, 40 << 22, 40e-3),))
    policy.learn(lambda: measured if over else None)
    assert policy.group_size(**ask) == 40
    over = True
    assert policy.group_size(**ask) < 10
    short = {"tokens": 16, "num_layers": 40, "layer_nbytes": 1 << 14}
    assert policy.group_size(**short) == 40


def test_what_another_policy_has_measured_counts_at_once() -> None:
    shared = Estimator()
    one, other = Adaptive(shared), Adaptive(shared)
    ask = {"tokens": 4096, "num_layers": 40, "layer_nbytes": 1 << 22}
    assert one.group_size(**ask) == other.group_size(**ask) == 40
    one.learn(lambda: Measured(tokens=4096, layer=1e-3, transfers=((1, 40 << 22, 40e-3),)))
    assert one.group_size(**ask) == other.group_size(**ask) < 40


def test_where_sending_once_is_clearly_best_few_passes_are_measured() -> None:
    policy = Adaptive()
    short = {"tokens": 16, "num_layers": 40, "layer_nbytes": 1 << 8}

    def measured_of(passes: int, layer: float = 1e-4, **ask: int) -> list[bool]:
        learns = []
        for _ in range(passes):
            policy.group_size(**ask)
            learns.append(policy.learns)
            if policy.learns:
                known = Measured(tokens=ask["tokens"], layer=layer, transfers=((1, 1 << 30, 0.5),))
                policy.learn(lambda known=known: known)
        return learns

    assert measured_of(5, **short) == [True] * 5
    later = measured_of(33, **short)
    assert sum(later) == 4
    assert not any(all(later[i : i + 2]) for i in range(32))
    long = {"tokens": 4096, "num_layers": 40, "layer_nbytes": 1 << 22}
    assert measured_of(9, layer=3e-2, **long) == [True] * 9
    assert policy.group_size(**long) < 40


def test_adaptive_does_not_remember_passes_that_never_end() -> None:
    policy = Adaptive()
    asked = []
    for number in range(100):
        policy.learn(lambda number=number: asked.append(number))
    policy.group_size(tokens=1, num_layers=1, layer_nbytes=1)
    assert 0 < len(asked) < 100
    assert asked[-1] == 99


# ---------------------------------------------------------------------- the published formula


@pytest.mark.parametrize(
    ("num_layers", "tokens", "size"),
    [
        *((80, 3071, 80), (80, 3072, 8), (80, 6144, 11), (80, 8192, 16), (80, 9216, 20), (80, 1 << 20, 20)),
        *((32, 3072, 3), (32, 6144, 4), (32, 8192, 6), (32, 9216, 8), (5, 9216, 1), (4, 9216, 4)),
    ],
)
def test_published_sizes(num_layers: int, tokens: int, size: int) -> None:
    assert Published().group_size(tokens=tokens, num_layers=num_layers, layer_nbytes=0) == size


@pytest.mark.parametrize("saturation", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("min_tokens", [0, 1])
@pytest.mark.parametrize("tokens", [0, 1, 10**6])
@pytest.mark.parametrize("num_layers", [0, 1, 80])
def test_published_formula_divides_by_zero_nowhere(
    saturation: float, min_tokens: int, tokens: int, num_layers: int
) -> None:
    policy = Published(min_tokens=min_tokens, saturation=saturation)
    size = policy.group_size(tokens=tokens, num_layers=num_layers, layer_nbytes=0)
    assert 1 <= size <= max(1, num_layers)


def test_published_formula_has_ever_larger_groups() -> None:
    sizes = [Published().group_size(tokens=tokens, num_layers=80, layer_nbytes=0) for tokens in range(3072, 12000, 64)]
    assert sizes == sorted(sizes)
    assert math.ceil(80 / sizes[0]) == 10
    assert math.ceil(80 / sizes[-1]) == 4


@pytest.mark.parametrize("wrong", [{"min_tokens": -1}, {"min_iters": 0}, {"min_iters": 5, "max_iters": 4}])
def test_published_formula_refuses_parameters_without_meaning(wrong: dict[str, int]) -> None:
    with pytest.raises(ProtocolError, match="min_iters"):
        Published(**wrong)
