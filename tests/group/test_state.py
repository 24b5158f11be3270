"""State between real ranks: one slot a request, resharded, layer by layer or all at once, and never missing."""

from __future__ import annotations

import functools
import secrets
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchkv
from tests.helpers.harness import Ranks, ask, kv_group, say
from tests.helpers.ranks.small_cache import Gate, check_transfer, meet, random_cache
from tests.helpers.ranks.state_transfer import (
    PAGE_SIZE,
    PATIENCE,
    STATES,
    SUBSET,
    WAYS,
    Setting,
    Truth,
    check,
    contents,
    full,
    hybrid,
    own_cache,
    randomise,
    requests,
    tp,
)
from tests.helpers.refusals import Bad, refuse
from torchkv import (
    ChecksumMismatch,
    KVCache,
    KVLayout,
    KVProcessGroup,
    LayoutMismatch,
    PageOutOfRange,
    ProtocolError,
    State,
    TransferCancelled,
    TransferTimeout,
)
from torchkv.protocol.actions import Scatter
from torchkv.protocol.sending import missing
from torchkv.staging.host_packer import HostPacker

# ---------------------------------------------------------------------- every layout over every lane

PLAIN = Setting("1to1", tp((0,)), tp((2,)))
SETTINGS = [
    PLAIN,
    Setting("2to1", tp((0, 1)), tp((2,), order="HND")),
    Setting("1to2", tp((0,)), tp((2, 3))),
    Setting("2to2", tp((0, 1)), tp((2, 3))),
    # Layer 0 has no state, and layer 2 nothing else: one stage needs no slot, the other no pages.
    Setting("pp-2to1", {0: hybrid(layers=[0, 1]), 1: hybrid(layers=[2])}, tp((2,))),
    Setting("pp-1to2", tp((0,)), {2: hybrid(layers=[0]), 3: hybrid(layers=[1, 2])}),
    Setting(
        "pp-2to2", {0: hybrid(layers=[0]), 1: hybrid(layers=[1, 2])}, {2: hybrid(layers=[0, 1]), 3: hybrid(layers=[2])}
    ),
]


@dataclass(frozen=True)
class Lane:
    name: str
    prefixes: tuple[str, ...]  # of the lane's name in explain
    adopt: bool
    env: tuple[tuple[str, str], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()


TCP = (("UCX_TLS", "tcp"),)
MEMORY = ("cma/", "posix/", "sysv/")
# Into these rings not even the state of all layers fits; checksums too.
SMALL_RINGS = (("path", "staged"), ("staging_recv", 2560), ("checksum", True))
LANES = [
    Lane("view", ("view",), adopt=False),
    Lane("put-memory", MEMORY, adopt=True, options=(("path", "slices"),)),
    Lane("staged-view", ("view",), adopt=True, options=(("staging_send", 0), *SMALL_RINGS)),
    Lane("put-tcp", ("tcp/",), adopt=True, env=TCP, options=(("path", "slices"),)),
    Lane("staged-tcp", ("tcp/",), adopt=False, env=TCP, options=(("staging_send", 1280), *SMALL_RINGS)),
]


# The lane varies slowest, so that each set of ranks is made once.
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
@pytest.mark.parametrize("lane", LANES, ids=lambda lane: lane.name)
def test_state_of_layout_over_lane(setting: Setting, lane: Lane, shared_ranks: Callable[..., Ranks]) -> None:
    ranks = shared_ranks("hosts" if lane.env else "four", 4, env=dict(lane.env), apart=bool(lane.env))
    seed = secrets.randbits(60)
    print(f"seed {seed}")  # shown when the test fails
    ways = list(WAYS) if lane.name in ("view", "staged-tcp") else SUBSET
    function = functools.partial(requests, adopt=lane.adopt, ways=ways, **dict(lane.options))
    found = ranks.run(function, setting, seed)
    assert all(found[writer] for writer in setting.writers)
    for lanes in found:
        assert all(name.startswith(lane.prefixes) for name in lanes), f"{lanes}, expected {lane.prefixes}"


def test_one_wrong_byte_is_noticed() -> None:
    """Negative control of `check`: the last column of a convolution state, then a byte of a slot next to it."""
    cache = own_cache(hybrid())
    before, truth = randomise(cache), Truth(hybrid(), 2, secrets.randbits(60))
    for slot, name in ((1, "conv"), (2, "conv"), (1, "ssm"), (1, "flat")):
        randomise(cache)
        for storage, old in zip(cache.storages, before, strict=True):
            storage.copy_(old)
        truth.put(cache, [5, 3], 1)
        check(cache, before, truth, [5, 3], 1)
        cache.state(name)[2].view(torch.uint8)[slot, ..., -1].view(-1)[-1] ^= 1
        with pytest.raises(AssertionError, match="1 wrong bytes"):
            check(cache, before, truth, [5, 3], 1)


# ---------------------------------------------------------------------- destinations


def alone(kv: KVProcessGroup) -> tuple[KVCache, Truth]:
    """A cache of all states, random everywhere, and a truth that all ranks share."""
    cache = own_cache(hybrid())
    randomise(cache)
    seed = torch.tensor(secrets.randbits(60))
    dist.broadcast(seed, 0, group=kv)
    return cache, Truth(cache.layout, 2, int(seed))


def state_bytes(layout: KVLayout, *layers: int) -> int:
    return sum(layout.state_nbytes(s.name) for s in layout.states for at in layers if at in layout.state_layers(s.name))


def several() -> None:
    """One verb towards two receivers; each has its own pages and its own slot."""
    with kv_group() as kv:
        cache, truth = alone(kv)
        kv.register(cache)
        if kv.rank() == 0:
            truth.put(cache, [1, 2], 3)
            one = kv.send_state("r", 1, 3, [1, 2])
            nothing = kv.send_state("r", 0, 3, [1, 2])
            kv.send_pages("r", [1, 2], [1, 2])
            rest = kv.finish("r", [1, 2], state_slot=3)
            rest.wait(PATIENCE)
            assert (one.bytes, rest.bytes) == (2 * state_bytes(cache.layout, 1), 2 * state_bytes(cache.layout, 2))
            assert (nothing.wait(PATIENCE), nothing.bytes, nothing.path) == (True, 0, "none")
        elif kv.rank() < 3:
            before = contents(cache)
            rx = kv.recv_pages("r", [kv.rank(), 5], 0, state_slot=kv.rank())
            rx.wait(PATIENCE)
            assert rx.bytes == full(cache.layout, 2)
            check(cache, before, truth, [kv.rank(), 5], kv.rank())
        meet(kv)


def test_one_verb_to_several_receivers(four: Ranks) -> None:
    four.run(several)


def to_itself() -> None:
    with kv_group() as kv:
        cache, truth = alone(kv)
        kv.register(cache)
        if kv.rank() == 0:
            truth.put(cache, [1, 2], 3)
            before = contents(cache)
            rx = kv.recv_pages("r", [5, 0], 0, state_slot=1)
            kv.send_state("r", 2, 3, 0)
            kv.send_pages("r", [1, 2], 0)
            kv.finish("r", 0, state_slot=3).wait(PATIENCE)
            rx.wait(PATIENCE)
            assert rx.bytes == full(cache.layout, 2)
            check(cache, before, truth, [5, 0], 1)
            # Pages and slots are numbered apart: slot 1 may go where page 1 may not.
            rx = kv.recv_pages("r", [], 0, state_slot=3)
            with pytest.raises(ProtocolError, match=r"'r'.*local copy.*into"):
                kv.finish("r", 0, state_slot=3).wait(PATIENCE)
            kv.cancel("r").wait(PATIENCE)
            assert rx.exception() is not None
        meet(kv)


def test_a_rank_may_send_state_to_itself(four: Ranks) -> None:
    four.run(to_itself)


def state_alone() -> None:
    """A model without keys and values, by the functional form: no pages at all, two readers of half of it each."""
    with kv_group() as kv:
        rank = kv.rank()
        size = 1 if rank == 0 else 2
        layout = KVLayout(
            [], num_layers=3, page_size=PAGE_SIZE, tp_rank=0 if rank == 0 else rank % 2, tp_size=size, states=STATES
        )
        cache = own_cache(layout)
        before = randomise(cache)
        torchkv.register(cache if rank < 3 else None, "reader" if rank in (1, 2) else None, group=kv)
        seed = torch.tensor(secrets.randbits(60))
        dist.broadcast(seed, 0, group=kv)
        truth = Truth(layout, 0, int(seed))
        if rank == 0:
            truth.put(cache, [], 0)
            work = torchkv.send_state("r", 2, 0, "reader", group=kv)
            torchkv.finish("r", "reader", aux=b"token", state_slot=0, group=kv).wait(PATIENCE)
            work.wait(PATIENCE)
        elif rank < 3:
            rx = torchkv.recv_pages("r", [], 0, state_slot=2, group=kv)
            rx.wait(PATIENCE)
            rx.wait_layer(2, PATIENCE)
            assert (rx.aux, rx.bytes) == (b"token", full(layout, 0))
            check(cache, before, truth, [], 2)
        meet(kv)


def test_a_model_of_state_alone_by_the_functional_form(four: Ranks) -> None:
    four.run(state_alone)


# ---------------------------------------------------------------------- never missing, never early


def layer_by_layer() -> None:
    """A layer is there when its pages and its state are; the order in which they came does not matter."""
    with kv_group() as kv:
        cache, truth = alone(kv)
        kv.register(cache)
        if kv.rank() == 0:
            truth.put(cache, [1, 2], 3)
            gate = Gate()
            kv.send_pages("r", [1, 2], 1)
            kv.send_state("r", 2, 3, 1).wait(PATIENCE)
            held = kv.send_state("r", 1, 3, 1, event=gate)
            done = kv.finish("r", 1)
            meet(kv)
            meet(kv)
            assert not held.is_completed()
            assert not done.is_completed(), "sealed only behind the state"
            gate.open.set()
            done.wait(PATIENCE)
        elif kv.rank() == 1:
            before = contents(cache)
            rx = kv.recv_pages("r", [4, 6], 0, state_slot=0)
            meet(kv)
            rx.wait_layer(0, PATIENCE)  # it has no state
            rx.wait_layer(2, PATIENCE)  # it has nothing else
            with pytest.raises(TransferTimeout, match="layer 1 is not complete"):
                rx.wait_layer(1, 0.2)
            assert not rx.is_completed()
            meet(kv)
            rx.wait_layer(1, PATIENCE)
            rx.wait(PATIENCE)
            check(cache, before, truth, [4, 6], 0)
        else:
            meet(kv)
            meet(kv)
        meet(kv)


def test_a_layer_is_complete_with_its_state_and_no_sooner(four: Ranks) -> None:
    four.run(layer_by_layer)


def forgetful() -> None:
    """`finish` names what is missing; a writer that seals nevertheless completes nothing."""
    with kv_group(timeout=1.5) as kv:
        cache, truth = alone(kv)
        kv.register(cache)
        if kv.rank() == 0:
            truth.put(cache, [1, 2], 3)
            kv.send_pages("r", [1, 2], 1)
            kv.send_state("r", 2, 3, 1)
            with pytest.raises(ProtocolError, match=r"finish\('r'\).*layer 1's state was not sent; give state_slot"):
                kv.finish("r", 1)
            real, missing._state_missing = missing._state_missing, lambda *args: None
            with pytest.raises(TransferTimeout, match="'r'"):
                kv.finish("r", 1).wait(PATIENCE)
            missing._state_missing = real
            kv.cancel("r").wait(PATIENCE)
            kv.send_pages("r", [1, 2], 1)
            kv.finish("r", 1, state_slot=3).wait(PATIENCE)
        elif kv.rank() == 1:
            rx = kv.recv_pages("r", [4, 6], 0, state_slot=0)
            with pytest.raises(TransferTimeout, match="layer 1's state from rank 0"):
                rx.wait(PATIENCE)
            kv.cancel("r").wait(PATIENCE)
            before = randomise(cache)
            kv.recv_pages("r", [4, 6], 0, state_slot=0).wait(PATIENCE)
            check(cache, before, truth, [4, 6], 0)
        meet(kv)


def test_state_that_does_not_arrive_fails_the_receive(four: Ranks) -> None:
    four.run(forgetful)


def flip(checksum: bool) -> None:
    """One byte of state changes in the ring, between put and scatter."""
    with kv_group(path="staged", checksum=checksum) as kv:
        cache, truth = alone(kv)
        kv.register(cache)
        if kv.rank() == 0:
            truth.put(cache, [1, 2], 3)
            for again in (False, True):
                kv.send_state("r", 2, 3, 1)
                kv.send_pages("r", [1, 2], 1)
                if checksum and not again:
                    with pytest.raises(ChecksumMismatch, match="'r'"):  # of finish itself, if the reader was quicker
                        kv.finish("r", 1, state_slot=3).wait(PATIENCE)
                    kv.cancel("r").wait(PATIENCE)
                else:
                    kv.finish("r", 1, state_slot=3).wait(PATIENCE)
        elif kv.rank() == 1:
            flip_and_receive(kv, cache, truth, checksum)
        meet(kv)


def flip_and_receive(kv: KVProcessGroup, cache: KVCache, truth: Truth, checksum: bool) -> None:
    hit: list[str] = []
    real = HostPacker.scatter

    def scatter(self: HostPacker, job: Scatter) -> Iterator[int]:
        if job.state and not hit:
            section = job.layout.sections[-1]
            hit.append(section.segment.component)
            assert self._receiving is not None
            self._receiving.tensor[job.stage.offset + section.offset + section.layer_nbytes - 1] ^= 0x10
        return real(self, job)

    before = contents(cache)
    HostPacker.scatter = scatter
    rx = kv.recv_pages("r", [4, 6], 0, state_slot=2)
    if checksum:
        with pytest.raises(ChecksumMismatch) as caught:
            rx.wait(PATIENCE)
        assert f"layer 2, state {hit[0]!r}, slot 2 does not hold what was sent" in str(caught.value)
        assert caught.value.retryable
        kv.cancel("r").wait(PATIENCE)
    else:
        rx.wait(PATIENCE)
        with pytest.raises(AssertionError, match="1 wrong bytes"):
            check(cache, before, truth, [4, 6], 2)
    HostPacker.scatter = real
    before = randomise(cache)
    kv.recv_pages("r", [4, 6], 0, state_slot=2).wait(PATIENCE)
    check(cache, before, truth, [4, 6], 2)


@pytest.mark.parametrize("checksum", [True, False], ids=["", "control"])
def test_a_byte_of_state_changed_on_the_way_is_found_and_named(checksum: bool, four: Ranks) -> None:
    four.run(flip, checksum)


# ---------------------------------------------------------------------- cancel


def stopped_writer(full_hit: bool) -> None:
    """The writer stands still between grant and put while the request is cancelled; a third rank writes meanwhile."""
    with kv_group(heartbeat=20.0, path="slices") as kv:
        cache, truth = alone(kv)
        kv.register(cache)
        pages = [] if full_hit else [4, 6]
        quarantined = dict.fromkeys(pages, (0,))
        if kv.rank() == 0:
            gate = Gate()
            works = [kv.send_state("r", layer, 3, 1, event=gate) for layer in (1, 2)]
            assert kv.prefix_tokens("r", 1) == 0
            ask()  # stopped here
            gate.open.set()
            for work in works:
                with pytest.raises(TransferCancelled):
                    work.wait(PATIENCE)
            kv.cancel("r").wait(PATIENCE)
        elif kv.rank() == 1:
            rx = kv.recv_pages("r", pages, 0, state_slot=2)
            ask()  # the writer has stopped
            cancelled = kv.cancel("r")
            with pytest.raises(TransferCancelled) as caught:
                rx.wait(PATIENCE)
            with pytest.raises(TransferTimeout):
                cancelled.wait(0.2)  # no word of the writer, no quiescence
            assert not caught.value.pages_safe
            assert (kv.quarantined(slots=True), kv.quarantined()) == ({2: (0,)}, quarantined)
            assert torchkv.quarantined(slots=True, group=kv) == {2: (0,)}
            with pytest.raises(PageOutOfRange, match=r"state slot 2 is quarantined: ranks \[0\].*'r'"):
                kv.recv_pages("next", [5], 2, state_slot=2)
            kv.recv_pages("next", [5, 1], 2, state_slot=1).wait(PATIENCE)
            say()
            cancelled.wait(PATIENCE)
            assert caught.value.pages_safe
            assert kv.quarantined(slots=True) == {}
            before = randomise(cache)  # whatever the writer had in flight has landed by now, if anywhere
            kv.recv_pages("last", [4, 6], 2, state_slot=2).wait(PATIENCE)
            check(cache, before, truth, [4, 6], 2)
        elif kv.rank() == 2:
            truth.put(cache, [1, 2], 0)
            for name in ("next", "last"):
                kv.send_pages(name, [1, 2], 1)
                kv.finish(name, 1, state_slot=0).wait(PATIENCE)
        meet(kv)


@pytest.mark.parametrize("full_hit", [False, True], ids=["", "full hit"])
def test_the_slot_of_a_cancelled_request_is_free_when_its_stopped_writer_has_answered(
    full_hit: bool, four: Ranks
) -> None:
    ranks = four.start(stopped_writer, full_hit)
    four.hear(0)
    four.hear(1)
    four.signal(0, signal.SIGSTOP)
    try:
        four.tell(1)
        four.hear(1)
    finally:
        four.signal(0, signal.SIGCONT)
    four.tell(0)
    four.join(ranks)


# ---------------------------------------------------------------------- bad input


SENDS: list[Bad] = [
    ("slot-beyond", lambda kv: kv.send_state("r", 1, 4, 1), PageOutOfRange, ("'r'", "state_slot=4", r"\[0, 4\)")),
    ("slot-negative", lambda kv: kv.send_state("r", 1, -1, 1), ProtocolError, ("'r'", "state_slot=-1", "at least 0")),
    ("slot-bool", lambda kv: kv.send_state("r", 1, True, 1), ProtocolError, ("'r'", "state_slot=True")),
    ("slot-float", lambda kv: kv.send_state("r", 1, 1.0, 1), ProtocolError, ("'r'", r"state_slot=1\.0")),
    ("slot-none", lambda kv: kv.send_state("r", 1, None, 1), ProtocolError, ("'r'", "state_slot=None", "give the")),
    ("layer-unheld", lambda kv: kv.send_state("r", 3, 0, 1), ProtocolError, ("'r'", "layer 3", "layers 0 to 2")),
    ("layer-bool", lambda kv: kv.send_state("r", True, 0, 1), ProtocolError, ("'r'", "layer=True", "one global")),
    ("layer-none", lambda kv: kv.send_state("r", None, 0, 1), ProtocolError, ("'r'", "layer=None", "one global")),
    ("layer-list", lambda kv: kv.send_state("r", [1], 0, 1), ProtocolError, ("'r'", r"layer=\[1\]", "one global")),
    ("layer-float", lambda kv: kv.send_state("r", 1.0, 0, 1), ProtocolError, ("'r'", r"layer=1\.0", "one global")),
    ("rank-outside", lambda kv: kv.send_state("r", 1, 0, 9), ProtocolError, ("'r'", "9", "size 4")),
    ("no-such-instance", lambda kv: kv.send_state("r", 1, 0, "x"), ProtocolError, ("'x'", "'r'", "rank1")),
    ("request-empty", lambda kv: kv.send_state("", 1, 0, 1), ProtocolError, ("0 bytes", "1 to 1024")),
    ("event", lambda kv: kv.send_state("r", 1, 0, 1, event=object()), ProtocolError, ("'r'", "event", r"query\(\)")),
    ("finish-without", lambda kv: kv.finish("r", 1), ProtocolError, ("'r'", "layer 1's state", "give state_slot")),
    ("finish-beyond", lambda kv: kv.finish("r", 1, state_slot=4), PageOutOfRange, ("'r'", "=4", r"\[0, 4\)")),
    ("finish-bool", lambda kv: kv.finish("r", 1, state_slot=False), ProtocolError, ("'r'", "state_slot=False")),
    ("finish-str", lambda kv: kv.finish("r", 1, state_slot="0"), ProtocolError, ("'r'", "state_slot='0'")),
]

RECEIVES: list[Bad] = [
    ("no-slot", lambda kv: kv.recv_pages("r", [5], 0), ProtocolError, ("'r'", "has state", "give state_slot")),
    ("beyond", lambda kv: kv.recv_pages("r", [5], 0, state_slot=4), PageOutOfRange, ("'r'", "=4", r"\[0, 4\)")),
    ("negative", lambda kv: kv.recv_pages("r", [5], 0, state_slot=-1), ProtocolError, ("'r'", "state_slot=-1")),
    ("bool", lambda kv: kv.recv_pages("r", [5], 0, state_slot=True), ProtocolError, ("'r'", "state_slot=True")),
    ("leased", lambda kv: kv.recv_pages("r", [5], 0, state_slot=1), PageOutOfRange, ("slot 1", "'live'", "cancel")),
    ("partly-held", lambda kv: kv.recv_pages("r", [5], 2, state_slot=0), LayoutMismatch, ("'k', layer 0", "src")),
]


def bad_calls() -> None:
    with kv_group() as kv:
        cache, truth = alone(kv)
        if kv.rank() == 2:
            cache = own_cache(hybrid(layers=[2]))
        kv.register(cache)
        if kv.rank() == 0:
            refuse(kv, SENDS)
            meet(kv)
            assert kv.explain(1).lanes == {}  # nothing was sent, and the name is still unused
            truth.put(cache, [1, 2], 3)
            kv.send_pages("r", [1, 2], 1)
            kv.finish("r", 1, state_slot=3).wait(PATIENCE)
        elif kv.rank() == 1:
            live = kv.recv_pages("live", [1, 2], 0, state_slot=1)
            refuse(kv, RECEIVES)
            meet(kv)
            assert not live.is_completed()
            kv.cancel("live").wait(PATIENCE)
            before = contents(cache)
            kv.recv_pages("r", [5, 6], 0, state_slot=1).wait(PATIENCE)
            check(cache, before, truth, [5, 6], 1)
        else:
            meet(kv)
        meet(kv)


def test_bad_slots_and_layers_are_refused_and_the_group_stays_usable(four: Ranks) -> None:
    four.run(bad_calls)


def half_the_state() -> None:
    """Every writer holds all keys, and one half of the state: whoever is left out of src is missed."""
    with kv_group() as kv:
        rank = kv.rank()
        keys = torchkv.Component("k", 1, 4, torch.uint8, sharded=False)
        state = State("ssm", (8, 3), torch.float32, shard_dim=0, layers=(1,))
        size = 1 if rank == 2 else 2
        layout = KVLayout([keys], num_layers=2, page_size=4, tp_rank=rank % size, tp_size=size, states=[state])
        kv.register(own_cache(layout) if rank < 3 else None)
        if rank == 2:
            with pytest.raises(LayoutMismatch, match=r"'r'.*\[0\] holds state 'ssm', layer 1, shard elements 4 to 7"):
                kv.recv_pages("r", [1], 0, state_slot=1)
            rx = kv.recv_pages("r", [1], [0, 1], state_slot=1)
            kv.cancel("r").wait(PATIENCE)
            with pytest.raises(TransferCancelled):
                rx.wait(PATIENCE)
        meet(kv)


def test_writers_that_lack_a_part_of_the_state_are_refused(four: Ranks) -> None:
    four.run(half_the_state)


def no_slots(how: str) -> str:
    """One rank's layout has state, and its cache no room for it."""
    with kv_group() as kv:
        layout = replaced(kv.rank())
        cache = KVCache.empty(layout, 4, device="cpu", num_slots=0 if kv.rank() == 1 and how == "empty" else 2)
        if kv.rank() == 1 and how == "adopted":
            cache = KVCache(layout, {"k": cache.k, "v": cache.v})
        with pytest.raises(LayoutMismatch) as caught:
            kv.register(cache)
        kv.register(random_cache())
        check_transfer(kv, 0, 1)
        return str(caught.value)


def replaced(rank: int) -> KVLayout:
    """A stage without recurrent layers on rank 0: it needs no slot."""
    return hybrid(layers=[0] if rank == 0 else [0, 1])


@pytest.mark.parametrize("how", ["empty", "adopted"])
def test_a_layout_with_state_needs_slots(how: str, four: Ranks) -> None:
    for rank, message in enumerate(four.run(no_slots, how)):
        assert "(ssm, conv, flat)" in message
        assert "num_slots" in message
        assert rank == 1 or "rank 1 could not register" in message
