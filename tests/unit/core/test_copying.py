"""Copies in which other threads help the resident loop: every byte, every chunk once, and nobody goes on too early."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.converting import same
from tests.helpers.notices import kinds
from torchkv import KVLayout, convert
from torchkv.bench.scale.loops import PAGE, Pair
from torchkv.core.core import Core
from torchkv.core.loop import copying, stripes
from torchkv.core.loop.codes import OP_DONE, RECEIVED, SENT
from torchkv.core.loop.limits import MAX_COPIERS
from torchkv.core.loop.state.copying import Copier, Job
from torchkv.host.convert_loops import KINDS
from torchkv.layout.conversion import Scales
from torchkv.layout.pair_plan import compile_plan
from torchkv.transfer.loop_geometry import geometry


def memory(*, pairs: int, nbytes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Random bytes, poisoned ones, and where each pair lies in them, with a canary behind each."""
    dice = np.random.default_rng(seed)
    source = dice.integers(0, 256, pairs * (nbytes + 8), dtype=np.uint8)
    src, dst = (dice.permutation(pairs) * (nbytes + 8) for _ in range(2))
    return source, np.full_like(source, 0xDD), src, dst


def expected(source: np.ndarray, src: np.ndarray, dst: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    copied = np.full_like(source, 0xDD)
    for at, to, nbytes in zip(src, dst, lengths, strict=True):
        copied[to : to + nbytes] = source[at : at + nbytes]
    return copied


def place(core: Core, src: np.ndarray, dst: np.ndarray) -> None:
    world = core.runner.memory[0]
    world["src"][: len(src)], world["dst"][: len(dst)] = src, dst


def job(core: Core) -> Job:
    return cast(Job, core.runner.memory[0]["job"][0])


def copier(core: Core, number: int = 0) -> Copier:
    return cast(Copier, core.runner.memory[0]["copier"][number])


@given(
    count=st.integers(1, 40),
    rows=st.integers(1, 4),
    run=st.integers(1, 200),
    chunk=st.integers(1, 600),
    copiers=st.sampled_from([0, 1, 3]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_pairs_in_chunks(count: int, rows: int, run: int, chunk: int, copiers: int, seed: int) -> None:
    core = Core(0, copiers=copiers, chunk=chunk)
    source, copied, src, dst = memory(pairs=count, nbytes=rows * run, seed=seed)
    place(core, src, dst)
    copying.copy_pairs(core.world, source.ctypes.data, copied.ctypes.data, count, 1, 0, 0, rows, run, run, run)
    assert (copied == expected(source, src, dst, np.full(count, rows * run))).all()


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=40),
    chunk=st.integers(1, 600),
    copiers=st.sampled_from([0, 1, 3]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_spans_in_chunks(lengths: list[int], chunk: int, copiers: int, seed: int) -> None:
    core, count = Core(0, copiers=copiers, chunk=chunk), len(lengths)
    source, copied, src, dst = memory(pairs=count, nbytes=300, seed=seed)
    place(core, src, dst)
    core.runner.memory[0]["length"][:count] = lengths
    copying.copy_spans(core.world, source.ctypes.data, copied.ctypes.data, count, sum(lengths))
    assert (copied == expected(source, src, dst, np.array(lengths))).all()


@given(
    pages=st.integers(1, 20),
    heads=st.sampled_from([1, 3]),
    chunk=st.integers(1, 600),
    copiers=st.sampled_from([0, 1, 3]),
    dtypes=st.sampled_from(sorted(KINDS, key=str)),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_conversions_in_chunks(
    pages: int, heads: int, chunk: int, copiers: int, dtypes: tuple[torch.dtype, torch.dtype], seed: int
) -> None:
    """Pages of one tensor, with a scale for each head, to other ids of another one."""
    core, dice = Core(0, copiers=copiers, chunk=chunk), np.random.default_rng(seed)
    shape: dict[str, Any] = {"num_layers": 1, "num_kv_heads": heads, "head_dim": 2, "page_size": 2}
    src, dst = (
        KVLayout.gqa(**shape, dtype=dtype, accept=accept)
        for dtype, accept in zip(dtypes, ((), dtypes[:1]), strict=True)
    )
    scales = dice.uniform(0.5, 2, (1, heads)).astype(np.float32)
    source = torch.from_numpy(dice.uniform(-3, 3, (pages, 2, heads, 2))).to(dtypes[0])
    target = torch.zeros((pages, 2, heads, 2), dtype=dtypes[1])
    plan = compile_plan(0, {0: src}, dst)
    words = geometry(
        plan,
        lambda *_: (source.data_ptr(), source[0].nbytes, 0),
        lambda *_: (target.data_ptr(), target[0].nbytes, 0),
        Scales(dst, {"k": scales, "v": scales}),
    )
    seg, _ = stripes.segments(words.ctypes.data, 0)
    ids = dice.permutation(pages)
    place(core, np.arange(pages) * source[0].nbytes, ids * target[0].nbytes)
    copying.convert_pairs(core.world, seg, pages, *plan.segments[0].rows)
    assert same(target[ids], convert(source, dtypes[1], torch.from_numpy(scales[0])[:, None]))


@pytest.mark.parametrize("taken", range(6))
def test_each_chunk_is_claimed_once(taken: int) -> None:
    """A copier takes some chunks, the loop the rest, and then none is left, before the next job and in it."""
    core = Core(0, copiers=2, chunk=64)
    source, copied, src, dst = memory(pairs=5, nbytes=64)
    place(core, src, dst)
    for _ in range(3):
        copied[:] = 0xDD
        runs = (1, 0, 0, 1, 0, 0, 64, 0)
        copying.begin_job(core.world, source.ctypes.data, copied.ctypes.data, 5, 64, *runs)
        before = copier(core)["copied"]
        for _ in range(taken):
            if copying.claim_chunk(core.world):
                copier(core)["copied"] += 1
        assert copier(core)["copied"] - before == min(taken, 5)
        assert (copied != 0xDD).sum() > 0 or taken == 0
        copying.end_job(core.world)
        assert not copying.claim_chunk(core.world)
        assert (copied == expected(source, src, dst, np.full(5, 64))).all()


def test_the_loop_waits_for_a_chunk_that_a_copier_has_claimed() -> None:
    core = Core(0, copiers=1, chunk=64)
    source, copied, src, dst = memory(pairs=4, nbytes=64)
    place(core, src, dst)
    copying.begin_job(core.world, source.ctypes.data, copied.ctypes.data, 4, 64, 1, 0, 0, 1, 0, 0, 64, 0)
    job(core)["claim"] += 1  # a copier has claimed the first chunk, and is slow
    loop = threading.Thread(target=copying.end_job, args=(core.world,))
    loop.start()
    while job(core)["claim"] & 0xFFFF < 4:
        time.sleep(0.001)
    time.sleep(0.05)  # one that does not wait has ended by now
    assert loop.is_alive()
    copier(core)["copied"] += 1
    loop.join(30)
    assert not loop.is_alive()


def test_requests_with_many_copiers() -> None:
    """Threads, small chunks, fresh bytes: whatever the loop announces is there."""
    pages = 96
    pair = Pair(layers=2, pages=pages, copiers=5, chunk=PAGE, turn=7 * PAGE)
    pair.writer.runner.start(-1, np.zeros(1, dtype=np.int64))
    dice = np.random.default_rng()
    for generation in range(1, 151):
        pair.src[:] = dice.integers(0, 256, pair.src.shape, dtype=np.uint8)
        pair.dst[:] = 0xAB
        ours, theirs = (dice.permutation(pages)[: pages - 5].tolist() for _ in range(2))
        flow = pair.receive(pages - 5, generation=generation)
        send = pair.send(flow, theirs, generation=generation)
        op = pair.start(send, ours)
        pair.writer.sends.finish(send, pages - 5, b"")
        heard: list[int] = []
        while RECEIVED not in heard:
            pair.reader.runner.step()
            heard += kinds(pair.reader.events.take())
        wanted = np.full_like(pair.dst, 0xAB)
        wanted[:, theirs] = pair.src[:, ours]
        assert (pair.dst == wanted).all()
        told: list[int] = []
        while SENT not in told:
            pair.reader.runner.step()
            told += kinds(pair.writer.events.take())
        assert told == [OP_DONE, SENT]
        pair.writer.sends.op_results([op])
        pair.writer.sends.end(send)
        pair.reader.receives.close(flow)
        pair.reader.receives.free(flow)
    pair.writer.runner.stop()
    assert not [each for each in threading.enumerate() if each.name.startswith("torchkv-copier")]


def test_copiers_sleep_and_end() -> None:
    """A copier says that it sleeps, is woken by a job, and ends when the loop has."""
    core = Core(0, copiers=MAX_COPIERS, chunk=64)
    core.runner.start(-1, np.zeros(1, dtype=np.int64))
    threads = [each for each in threading.enumerate() if each.name.startswith("torchkv-copier")]
    assert len(threads) == MAX_COPIERS
    while not all(copier(core, number)["asleep"] for number in range(MAX_COPIERS)):
        time.sleep(0.001)
    source, copied, src, dst = memory(pairs=100, nbytes=64)
    with core.runner.standing_still():
        place(core, src, dst)
        copying.copy_pairs(core.world, source.ctypes.data, copied.ctypes.data, 100, 1, 0, 0, 1, 0, 0, 64)
    core.runner.stop()
    assert not any(each.is_alive() for each in threads)
    assert (copied == expected(source, src, dst, np.full(100, 64))).all()
