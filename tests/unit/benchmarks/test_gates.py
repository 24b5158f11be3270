"""The pipelining benchmark's parts: gates' arithmetic, model, check of bytes, processes, cores and options."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import pipeline_table
from torchkv.bench import processes
from torchkv.bench.prefill import pipelined
from torchkv.bench.prefill.cores import first_two, pin, two_cores, waited
from torchkv.bench.prefill.decoder import Decoder, ModelSize
from torchkv.bench.prefill.gates import Gate, PipelineResult, Way, median_error
from torchkv.bench.prefill.memories import Behind, Held, Paged, Plain, Received, rows
from torchkv.cache import KVCache
from torchkv.errors import KVError

SIZE = ModelSize(layers=3, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=16, dtype=torch.float32)
HOST = torch.device("cpu")


def result(*, device: str = "cpu", tokens: int = 2048, saved: float = 0.8, **changes: object) -> PipelineResult:
    """100 ms of prefill and 10 ms of transfer; so much of the latter is saved, but in one pass of three."""
    once = Way(prefill=(0.1, 0.1, 0.1), exposed=(0.01, 0.01, 0.01), ttft=(0.112, 0.113, 0.114), waited=(0.0, 0.0, 0.0))
    ttft = (0.112 - 0.01 * saved, 0.213, 0.114 - 0.01 * saved)
    exposed = 0.01 * (1 - saved)
    fields = {
        "device": device,
        "tp": "1:1",
        "tokens": tokens,
        "layers": 8,
        "nbytes": 1 << 20,
        "path": "runs",
        "lane": "tcp/lo",
        "once": once,
        "pipelined": Way(prefill=(0.1, 0.2, 0.1), exposed=(exposed,) * 3, ttft=ttft, waited=(0.0, 0.1, 0.0)),
        "group_sizes": (1, 2, 1),
        "unlike_groups": 0,
        "transfer": 0.009,
        "group_transfer": 1e-3,
        "round_trip": 2e-4,
        "wrong": 0,
    }
    return PipelineResult(**{**fields, **changes})


def gates(result: PipelineResult) -> dict[str, Gate]:
    return {gate.name.split(" /")[0]: gate for gate in result.gates}


# ---------------------------------------------------------------------- gates


def test_on_a_cpu_half_of_what_sending_once_exposes_must_be_saved() -> None:
    good = result(saved=0.6)
    assert good.saved == pytest.approx(6e-3)  # the median of the pairs: one slow pass changes nothing
    assert good.saved_part == pytest.approx(0.6)
    assert good.ratio == pytest.approx(0.106 / 0.112, rel=1e-2)
    assert [gate.passed for gate in good.gates] == [True]
    assert good.passed
    assert not result(saved=0.4).passed
    assert result(saved=0.4, tokens=1024).gates == (), "the gate is about prompts of 2,048 tokens"
    assert result(saved=0.4, tp="2:1").gates == (), "and about a prefill that has a core for itself"
    assert not result(saved=0.6, wrong=1).passed
    assert not result(saved=0.6, wrong=1, tokens=1024).passed


def test_pairs_are_compared_and_not_the_medians_of_each_way() -> None:
    drifting = [1.0, 2.0, 3.0, 4.0, 5.0]  # the machine becomes slower all the time
    ways = {
        "once": replace(result().once, ttft=tuple(drifting)),
        "pipelined": replace(result().pipelined, ttft=tuple(t - 0.004 for t in drifting)),
    }
    assert result(**ways).saved == pytest.approx(0.004)
    assert result(**ways).noise == pytest.approx(0.0)
    noisy = replace(result().pipelined, ttft=tuple(t - s for t, s in zip(drifting, (0, 1, 2, 3, 4), strict=True)))
    assert result(**{**ways, "pipelined": noisy}).noise == pytest.approx(2.0)


def test_what_others_take_of_the_core_can_be_left_out() -> None:
    disturbed = result(saved=0.6)
    assert disturbed.disturbed == pytest.approx(0.1 / 0.7)
    assert disturbed.saved_undisturbed == pytest.approx(0.6)
    ttft = tuple(t + 0.3 for t in disturbed.pipelined.ttft)
    worse = result(pipelined=replace(disturbed.pipelined, ttft=ttft, waited=(0.3, 0.4, 0.3)))
    assert worse.saved < 0
    assert worse.saved_undisturbed == pytest.approx(0.6)


def test_on_gpus_one_group_and_two_round_trips_may_be_exposed() -> None:
    limit = 1.2 * 1e-3 + 2 * 2e-4
    for exposed, passed in ((limit * 0.99, True), (limit * 1.01, False)):
        found = result(device="cuda", pipelined=replace(result().pipelined, exposed=(exposed,) * 3))
        assert found.exposed_limit == pytest.approx(limit)
        assert gates(found)["exposed"].passed == passed
    assert "exposed" not in gates(result(device="cuda", tokens=512))


def test_on_gpus_the_transfer_must_be_hidden_where_there_is_enough_to_hide_it_behind() -> None:
    control = 2 * 2e-4
    for exposed, passed in ((0.04 * 0.009 + control, True), (0.06 * 0.009 + control, False)):
        found = result(device="cuda", pipelined=replace(result().pipelined, exposed=(exposed,) * 3))
        assert found.hidden == pytest.approx(1 - (exposed - control) / 0.009)
        assert gates(found)["part of the transfer hidden"].passed == passed
    assert result(pipelined=replace(result().pipelined, exposed=(control / 2,) * 3)).hidden == 1.0
    assert result(pipelined=replace(result().pipelined, exposed=(1.0,) * 3)).hidden == 0.0
    assert "part of the transfer hidden" not in gates(result(device="cuda", transfer=0.11))
    assert "part of the transfer hidden" in gates(result(device="cuda", tp="2:2"))


def test_on_gpus_short_prompts_must_not_become_slower() -> None:
    once = result().once
    for ratio, passed in ((1.019, True), (1.021, False)):
        slower = replace(once, ttft=tuple(ratio * t for t in once.ttft))
        found = result(device="cuda", tokens=256, pipelined=slower)
        assert found.ratio == pytest.approx(ratio)
        assert gates(found)["TTFT pipelined"].passed == passed
        assert found.passed == passed
    assert "TTFT pipelined" not in gates(result(device="cuda", tokens=1024))


def test_the_error_of_a_median_is_what_repeating_the_measurement_shows() -> None:
    rng = np.random.default_rng(1)
    for count in (20, 101, 400):
        # Long tails, as times have.
        samples = rng.standard_t(2, size=(2000, count))
        errors = [median_error(sample.tolist()) for sample in samples]
        assert np.mean(errors) == pytest.approx(np.median(samples, axis=1).std(), rel=0.2)
    assert median_error([3.0]) == 0.0
    assert 0 < median_error([5.0, 1.0]) < 2


def test_the_row_says_what_is_published_and_what_was_missed() -> None:
    row, parts, gate = pipeline_table.lines(result(saved=0.4))
    assert row.split()[:2] == ["2048", "1:1"]
    assert row.split()[-2:] == ["-", "0"]
    assert pipeline_table.lines(result(tokens=4096))[0].split()[-2:] == ["-68", "0"]
    assert "1/8" in row.split()
    assert gate.endswith("0.400 (gate >= 0.5) MISSED")
    assert "once" in pipeline_table.lines(result(tokens=300, group_sizes=(8, 8, 8)))[0].split()
    assert "another size" not in parts
    assert "had the prefill's core" in parts
    row, parts = pipeline_table.lines(result(tp="2:1", unlike_groups=2))
    assert row.split()[1] == "2:1"
    assert "another size on the other rank in 2 of them" in parts
    assert "had the prefill's core" not in parts


# ---------------------------------------------------------------------- the model


class Grown:
    """Keys and values in tensors that grow."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.num_tokens = 0

    def extend(self, layer: int, shard: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if (layer, shard) in self.held:
            old_k, old_v = self.held[layer, shard]
            k, v = torch.cat((old_k, k)), torch.cat((old_v, v))
        self.held[layer, shard] = k, v
        return k, v


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Products are computed by one thread each, as in the benchmark's processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Halves:
    """Adds up tensors of two threads in place, as two ranks do."""

    def __init__(self) -> None:
        self._met = threading.Barrier(2, timeout=30)
        self._terms: dict[int, torch.Tensor] = {}

    def __call__(self, rank: int, term: torch.Tensor) -> None:
        self._terms[rank] = term.clone()
        self._met.wait()
        term.copy_(self._terms[0] + self._terms[1])
        self._met.wait()


@pytest.mark.usefixtures("one_thread")
def test_two_shards_give_the_same_bits_on_one_rank_and_on_two() -> None:
    tokens = torch.randint(1000, (21,))
    add = Halves()
    whole = Decoder(SIZE, device=HOST, seed=3, num_shards=2)
    halves = [
        Decoder(SIZE, device=HOST, seed=3, num_shards=2, held=range(r, r + 1), reduce=partial(add, r)) for r in (0, 1)
    ]

    def logits(model: Decoder) -> tuple[torch.Tensor, torch.Tensor, Grown]:
        memory = Grown()
        first = model(tokens[:20], memory)
        memory.num_tokens = 20
        return first, model(tokens[20:], memory), memory

    with ThreadPoolExecutor(2) as threads:
        *wanted, all_heads = logits(whole)
        for rank, (*found, memory) in enumerate(threads.map(logits, halves)):
            assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))
            for layer in range(SIZE.layers):
                for one, other in zip(memory.held[layer, 0], all_heads.held[layer, rank], strict=True):
                    assert torch.equal(one, other)
    alone = Decoder(SIZE, device=HOST, seed=3, num_shards=2, held=range(1))
    assert not torch.allclose(logits(alone)[0], wanted[0]), "both shards matter"


def test_shards_are_parts_of_one_model() -> None:
    parts = Decoder(SIZE, device=HOST, seed=3, num_shards=2)
    whole = Decoder(SIZE, device=HOST, seed=4)
    whole.embedding.copy_(parts.embedding)
    for joined, layer in zip(whole.layers, parts.layers, strict=True):
        (shard,), (a, b) = joined._shards, layer._shards
        for name, split in (("qkv", a._heads), ("gate_up", [1, 1])):
            rows = [getattr(part, name).unflatten(0, (sum(split), -1)).split(split) for part in (a, b)]
            getattr(shard, name).copy_(torch.cat([torch.cat(both) for both in zip(*rows, strict=True)]).flatten(0, 1))
        for name in ("out", "down"):
            getattr(shard, name).copy_(torch.cat((getattr(a, name), getattr(b, name)), dim=1))
    tokens = torch.randint(1000, (21,))
    torch.testing.assert_close(parts(tokens, Grown()), whole(tokens, Grown()), rtol=1e-4, atol=1e-4)


def test_a_decoded_token_is_what_the_whole_sequence_would_have_given() -> None:
    model = Decoder(SIZE, device=HOST, seed=3)
    tokens = torch.randint(1000, (21,))
    memory = Grown()
    model(tokens[:20], memory)
    memory.num_tokens = 20
    torch.testing.assert_close(model(tokens[20:], memory), model(tokens, Grown()), rtol=1e-4, atol=1e-4)
    other = tokens.clone()
    other[0] = (other[0] + 1) % 1000
    assert not torch.allclose(model(tokens, Grown()), model(other, Grown())), "attention sees the first token"
    assert not torch.allclose(model(tokens, Grown()), model(tokens.flip(0), Grown())), "and where it stands"


@pytest.mark.parametrize("held", [False, True], ids=["plain", "in pages"])
def test_a_question_behind_a_prefix_is_what_the_whole_prompt_would_have_given(held: bool) -> None:
    model = Decoder(SIZE, device=HOST, seed=3)
    tokens = torch.randint(1000, (33,))
    prefix, whole = Plain(), Plain()
    model(tokens[:16], prefix)
    prefix.num_tokens = 16
    question = Behind(prefix)
    found, wanted = model(tokens[16:32], question), model(tokens[:32], whole)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    for key, (k, v) in question.layers.items():
        for one, other in zip((k, v), whole.layers[key], strict=True):
            torch.testing.assert_close(one, other[16:], rtol=1e-4, atol=1e-4)
    assert all(len(k) == 16 for k, _ in prefix.layers.values()), "the prefix is only read"
    whole.num_tokens = 32
    memory: Plain | Held = whole
    if held:
        cache = KVCache.empty(SIZE.layout(16), 3, device="cpu")
        slots = torch.arange(16, 48)
        for (layer, _), (k, v) in whole.layers.items():
            rows(cache, "k", layer)[slots], rows(cache, "v", layer)[slots] = k, v
        memory = Held(cache, slots)
    torch.testing.assert_close(model(tokens[32:], memory), model(tokens, Grown()), rtol=1e-4, atol=1e-4)


def test_both_processes_draw_the_same_model_and_fresh_prompts() -> None:
    one, same, other = (Decoder(SIZE, device=HOST, seed=seed) for seed in (5, 5, 6))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    setup = pipelined.Setup(device="cpu", model=SIZE, repeats=2)
    prompts = [tuple(setup.prompt(30, turn).tolist()) for turn, _ in setup.turns(30)]
    assert len(set(prompts)) == len(prompts)
    assert pipelined.Setup(device="cpu", model=SIZE, repeats=2).seed != setup.seed


def test_ways_take_turns_and_each_goes_first_as_often() -> None:
    setup = pipelined.Setup(device="cpu", model=SIZE, repeats=5)
    turns = list(setup.turns(4096))
    assert [turn for turn, _ in turns] == list(range(2 * (3 + 5)))
    pairs = [tuple(way for _, way in turns[i : i + 2]) for i in range(0, len(turns), 2)]
    assert {frozenset(pair) for pair in pairs} == {frozenset({"once", "pipelined"})}
    assert abs(sum(pair[0] == "once" for pair in pairs) - len(pairs) / 2) <= 0.5
    assert setup.first_measured == 6
    for device, more in (("cpu", 8), ("cuda", 16)):
        short = pipelined.Setup(device=device, model=SIZE, repeats=5).turns(256)
        assert len(list(short)) == 2 * (3 + more * 5)


# ---------------------------------------------------------------------- wrong bytes


@pytest.mark.parametrize("tp", [(1, 1), (1, 2)], ids=["a shard", "two shards"])
def test_every_wrong_byte_counts_in_the_pages_around_them_and_of_the_logits(tp: tuple[int, int]) -> None:
    rank = pipelined._Rank(pipelined.Setup(device="cpu", model=SIZE, repeats=1, page_size=4, tp=tp), 0)
    cache = KVCache.empty(SIZE.layout(4), 10, device=HOST)
    rank.slots = torch.from_numpy(np.random.default_rng().permutation(40)[:21])
    rank.ready(cache)
    prompt = torch.randint(1000, (21,))
    first = int(rank.model(prompt, Paged(cache, rank.slots)).argmax())
    memory = Received(cache, rank.slots, num_shards=rank.num_held)
    memory.gather(Here())
    logits = rank.model(torch.tensor([first]), memory)

    def wrong(first: int = first, logits: torch.Tensor = logits) -> int:
        return pipelined._count_wrong(rank, cache, prompt, torch.tensor([first]), logits)

    try:
        assert wrong() == 0
        assert wrong(first=first + 1) > 0
        assert wrong(logits=logits.nextafter(logits + 1)) >= len(logits)
        untouched = next(iter(set(range(40)) - set(rank.slots.tolist())))
        for name, layer, slot in (("k", 0, rank.slots[0]), ("v", 2, rank.slots[-1]), ("v", 1, untouched)):
            byte = rows(cache, name, layer).view(torch.uint8)[slot, 1]
            byte[7] ^= 1
            assert wrong() == 1
            byte[7] ^= 1
        assert wrong() == 0
    finally:
        torch.set_grad_enabled(True)


class Here:
    """A request that has come as a whole."""

    def wait_layer(self, layer: int) -> bool:
        return True


# ---------------------------------------------------------------------- processes


def test_the_answers_of_all_processes_or_the_first_failure() -> None:
    ours, theirs = zip(*(Pipe() for _ in range(3)), strict=True)
    theirs[2].send((True, "two"))
    with pytest.raises(KVError, match="did not answer within"):
        processes._answers(ours, 0.01)
    for rank, end in enumerate(theirs):
        end.send((True, rank))
    assert processes._answers(ours, 10) == [0, 1, 2]
    theirs[1].send((False, "its traceback"))
    with pytest.raises(KVError, match="its traceback"):
        processes._answers(ours, 10)  # though the others never answer
    theirs[2].close()
    with pytest.raises(KVError, match="died"):
        processes._answers(ours, 10)


# ---------------------------------------------------------------------- cores


@pytest.fixture
def everywhere() -> Iterator[None]:
    """All threads run where they did before."""
    before = {int(task.name): os.sched_getaffinity(int(task.name)) for task in Path("/proc/self/task").iterdir()}
    yield
    for thread in (int(task.name) for task in Path("/proc/self/task").iterdir()):
        with suppress(ProcessLookupError):  # a thread that has just ended
            os.sched_setaffinity(thread, before.get(thread, before[os.getpid()]))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("is_computing", [True, False])
def test_the_computing_thread_has_a_core_of_its_own(is_computing: bool) -> None:
    cores = first_two()
    running, end = threading.Event(), threading.Event()
    found: list[int] = []

    def other() -> None:
        found.append(threading.get_native_id())
        running.set()
        end.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        assert running.wait(10)
        pin(cores, is_computing=is_computing)
        main = threading.main_thread().native_id
        assert main is not None
        assert os.sched_getaffinity(main) == {cores[0] if is_computing else cores[1]}
        assert os.sched_getaffinity(found[0]) == {cores[1]}
        with pytest.raises(KVError, match="needs two cores"):
            first_two()
    finally:
        end.set()
        thread.join()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_cores_are_given_back() -> None:
    before = os.sched_getaffinity(0)
    with two_cores(None):
        assert os.sched_getaffinity(0) == before
    with two_cores(first_two()):
        assert os.sched_getaffinity(0) == set(first_two())
    assert os.sched_getaffinity(0) == before
    with pytest.raises(KeyError, match="inside"), two_cores(first_two()):
        raise KeyError("inside")
    assert os.sched_getaffinity(0) == before


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="the kernel does not count waiting")
@pytest.mark.usefixtures("everywhere")
def test_waiting_for_a_core_that_another_program_has_is_counted() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    before = waited()
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
    ) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            until = time.thread_time() + 0.1
            while time.thread_time() < until:
                pass
        finally:
            other.kill()
    assert waited() > before


# ---------------------------------------------------------------------- options


@pytest.mark.parametrize(
    "wrong",
    [
        ["--tokens", "0"],
        ["--tokens", "1,x"],
        ["--repeats", "0"],
        ["--device", "tpu"],
        ["--kv-heads", "-1"],
        ["--tp", "2"],
        ["--tp", "3:1"],
        ["--tp", "1:0"],
        ["--tp", "2:1:1"],
        ["--tp", "2:1", "--kv-heads", "3", "--heads", "6"],
        ["--tp", "1:2", "--ffn", "33"],
        ["--crossed", "--device", "cpu"],
    ],
)
def test_options_without_meaning_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        pipeline_table.run(wrong)
    assert stopped.value.code == 2
    assert wrong[0] in capsys.readouterr().err


def test_ranks_that_decode_lie_across_from_those_whose_heads_they_have(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gpus(tp: tuple[int, int], *, crossed: bool = True) -> list[int]:
        setup = pipelined.Setup(device="cuda", model=pipelined.MODELS["cuda"], repeats=1, tp=tp, crossed=crossed)
        return [setup.gpu(rank) for ranks in setup.instances.values() for rank in ranks]

    assert gpus((2, 2)) == [0, 1, 1, 0]
    assert gpus((2, 1)) == [0, 1, 1]
    assert gpus((1, 2)) == [0, 1, 0]
    assert gpus((2, 2), crossed=False) == [0, 1, 2, 3]
    for found, accepted in ((1, False), (2, True)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda found=found: found)
        if accepted:
            assert pipeline_table._parse(["--device", "cuda", "--tp", "2:2", "--crossed"]).crossed
            continue
        with pytest.raises(SystemExit):
            pipeline_table._parse(["--device", "cuda", "--tp", "2:2", "--crossed"])
        assert "two GPUs are needed, and PyTorch finds 1" in capsys.readouterr().err


@pytest.mark.parametrize(("tp", "gpus", "message"), [("1:1", 0, "2 ranks.*none"), ("2:2", 3, "4 ranks.*finds 3")])
def test_each_rank_needs_a_gpu_of_its_own(
    tp: str, gpus: int, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(SystemExit) as stopped:
        pipeline_table.run(["--device", "cuda", "--tp", tp])
    assert stopped.value.code == 2
    assert re.search(message, capsys.readouterr().err)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus + 2)
    args = pipeline_table._parse(["--device", "cuda", "--tp", tp, "--layers", "5"])
    assert args.tp == (int(tp[0]), int(tp[2]))
    assert (args.model.hidden, args.model.layers) == (4096 if tp == "1:1" else 8192, 5)
