"""``register``: collective, all or none, and repeatable after a failure."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchkv
from tests.helpers.harness import Ranks, kv_group
from tests.helpers.ranks.small_cache import check_transfer, random_cache
from torchkv import Component, KVCache, KVError, KVLayout, LayoutMismatch, ProtocolError, State, TransportUnavailable
from torchkv.engine.engine import Engine
from torchkv.engine.joining.connector import Connector
from torchkv.engine.joining.registration import Registration
from torchkv.engine.progress import ProgressThread
from torchkv.group import bring_up

# How rank 1's layout differs from rank 0's; the field's name and both values, as the message must show them.
MISMATCHES: list[tuple[dict[str, Any], tuple[str, str, str]]] = [
    ({"num_layers": 3}, ("num_layers", "2", "3")),
    ({"num_kv_heads": 4}, ("'k': heads", "2", "4")),
    ({"head_dim": 16}, ("'k': dim", "8", "16")),
    ({"v_head_dim": 4}, ("'v': dim", "8", "4")),
    ({"dtype": torch.float16}, ("'k': dtype", "torch.bfloat16", "torch.float16")),
    ({"page_size": 24}, ("page_size", "16", "24")),
]


def mismatch(changes: dict[str, Any]) -> str:
    with kv_group() as kv:
        cache = random_cache(**(changes if kv.rank() == 1 else {}))
        with pytest.raises(LayoutMismatch) as caught:
            kv.register(cache)
        # Nobody is registered now, so everybody may try again.
        with pytest.raises(ProtocolError, match="register"):
            kv.send_pages("r", [1], 0)
        kv.register(random_cache() if kv.rank() < 3 else None)
        check_transfer(kv, 0, 1)
        return str(caught.value)


@pytest.mark.parametrize(("changes", "words"), MISMATCHES, ids=lambda value: "-".join(map(str, value)))
def test_mismatch_is_raised_on_all_ranks_with_field_and_values(
    changes: dict[str, Any], words: tuple[str, str, str], four: Ranks
) -> None:
    field, ours, theirs = words
    for message in four.run(mismatch, changes):
        assert field in message
        assert f"{ours} on rank 0" in message
        assert f"{theirs} on rank 1" in message
        assert "separate groups" in message


def names_differ() -> str:
    with kv_group() as kv:
        width = Component("scale" if kv.rank() == 2 else "k", 1, 8, torch.float32, sharded=False)
        layout = KVLayout([width], num_layers=1, page_size=16)
        with pytest.raises(LayoutMismatch) as caught:
            kv.register(KVCache.empty(layout, 4, device="cpu"))
        return str(caught.value)


def test_mismatch_of_component_names(four: Ranks) -> None:
    for message in four.run(names_differ):
        assert "component names" in message
        assert "['k'] on rank 0" in message
        assert "['scale'] on rank 2" in message


# ---------------------------------------------------------------------- one rank cannot take part


def wrong_on_rank_1(arguments: Callable[[], tuple[Any, ...]], kind: type[KVError]) -> str:
    with kv_group() as kv:
        give = arguments() if kv.rank() == 1 else (random_cache(), "x")
        with pytest.raises(kind) as caught:
            kv.register(*give)
        kv.register(random_cache())
        check_transfer(kv, 0, 1)
        check_transfer(kv, 1, 2)
        return str(caught.value)


def no_cache() -> tuple[Any, ...]:
    return ("not a cache",)


def empty_name() -> tuple[Any, ...]:
    return random_cache(), ""


def long_name() -> tuple[Any, ...]:
    return random_cache(), "x" * 400


def number_as_name() -> tuple[Any, ...]:
    return random_cache(), 5


def surrogate_as_name() -> tuple[Any, ...]:
    return random_cache(), "\ud800"


def state_without_slots() -> tuple[Any, ...]:
    layout = KVLayout.gqa(
        num_layers=2,
        num_kv_heads=2,
        head_dim=8,
        page_size=16,
        dtype=torch.bfloat16,
        states=[State("ssm", (4, 4), torch.float32)],
    )
    return (KVCache.empty(layout, 4, device="cpu"),)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (no_cache, ProtocolError, ("KVCache", "str")),
        (empty_name, ProtocolError, ("instance=''", "1 to 128")),
        (long_name, ProtocolError, ("instance", "1 to 128")),
        (number_as_name, ProtocolError, ("instance=5", "1 to 128")),
        (surrogate_as_name, ProtocolError, ("instance", "1 to 128")),
        (state_without_slots, LayoutMismatch, ("ssm", "num_slots")),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_one_wrong_rank_fails_all_and_all_may_try_again(
    arguments: Callable[[], tuple[Any, ...]], kind: type[KVError], words: tuple[str, ...], four: Ranks
) -> None:
    messages = four.run(wrong_on_rank_1, arguments, kind)
    for rank, message in enumerate(messages):
        for word in words:
            assert word in message
        assert rank == 1 or "rank 1 could not register" in message


def bad_interface() -> str:
    """An address that this host does not have, on one rank only: no socket can be opened there."""
    import os

    with kv_group() as kv:
        if kv.rank() == 1:
            os.environ["TORCHKV_INTERFACE"] = "192.0.2.1"
        with pytest.raises(KVError) as caught:
            kv.register(random_cache())
        os.environ.pop("TORCHKV_INTERFACE", None)
        kv.register(random_cache())
        check_transfer(kv, 0, 1)
        return str(caught.value)


def test_a_rank_that_cannot_open_its_socket_fails_all(four: Ranks) -> None:
    messages = four.run(bad_interface)
    assert all("192.0.2.1" in message for message in messages), messages


def transports_differ() -> str:
    with kv_group(transport="no-such-transport" if dist.get_rank() == 2 else "auto") as kv:
        with pytest.raises(TransportUnavailable) as caught:
            kv.register(random_cache())
        return str(caught.value)


def test_an_unknown_transport_fails_all_and_names_what_is_installed(four: Ranks) -> None:
    for rank, message in enumerate(four.run(transports_differ)):
        assert "no-such-transport" in message
        assert "ucx" in message
        assert rank == 2 or "rank 2 could not register" in message


# ---------------------------------------------------------------------- joining without a cache, instances, options


def joins_without() -> None:
    with kv_group() as kv:
        kv.register(None if kv.rank() == 2 else random_cache(), instance=None)
        if kv.rank() == 2:
            with pytest.raises(ProtocolError, match="registered no cache"):
                kv.recv_pages("r", [1], 0)
            kv.cancel("unknown").wait(30)
            assert kv.quarantined() == {}
            with pytest.raises(ProtocolError, match="one cache per rank and group"):
                kv.register(random_cache())
        else:
            work = kv.send_pages("r", [1], 2)  # nothing is owed to a rank without a cache
            work.wait(30)
            assert (work.bytes, work.path) == (0, "none")
            with pytest.raises(ProtocolError, match="rank0, rank1, rank2, rank3"):
                kv.send_pages("r", [1], "decode")
        check_transfer(kv, 0, 1)
        check_transfer(kv, 3, 0)


def test_register_none_joins_without_a_cache(four: Ranks) -> None:
    four.run(joins_without)


def everybody_joins_without() -> None:
    with kv_group() as kv:
        kv.register(None)


def test_register_none_on_every_rank(four: Ranks) -> None:
    four.run(everybody_joins_without)


def requires(path: str, adopted: bool) -> str:
    from tests.helpers.ranks.lane_transfer import adopted_cache
    from tests.helpers.ranks.small_cache import small_layout

    with kv_group(require=path) as kv:
        cache = adopted_cache(small_layout(), 8) if adopted else random_cache()
        if not adopted:
            kv.register(cache)
            check_transfer(kv, 0, 1)
            return ""
        with pytest.raises(TransportUnavailable) as caught:
            kv.register(cache)
        return str(caught.value)


def test_a_required_path_is_checked_when_registering(four: Ranks) -> None:
    assert four.run(requires, "direct", False) == [""] * 4
    for message in four.run(requires, "direct", True):
        assert "'direct'" in message


def too_slow(limit: float) -> str:
    with kv_group(min_gbps=limit) as kv:
        if limit < 1:
            kv.register(random_cache())
            check_transfer(kv, 0, 1)
            return ""
        with pytest.raises(TransportUnavailable) as caught:
            kv.register(random_cache())
        return str(caught.value)


def test_a_required_rate_is_measured_when_registering(four: Ranks) -> None:
    assert four.run(too_slow, 1e-6) == [""] * 4
    for message in four.run(too_slow, 1e9):
        assert "GB/s" in message
        assert "min_gbps" in message


def late_to_connect() -> tuple[float, float]:
    """When this rank had connected to its peers, and when it began to put."""
    moments: list[float] = []

    class Late(Registration):
        def warm(self, engine: Engine, ranks: Sequence[int] | None = None) -> None:
            time.sleep(0.3 * (self.rank == 1))
            super().warm(engine, ranks)
            moments.append(time.monotonic())

    def measure_all(self: Connector, thread: ProgressThread, engine: Engine) -> None:
        moments.append(time.monotonic())
        real(self, thread, engine)

    real = Connector.measure_all
    with kv_group() as kv, pytest.MonkeyPatch.context() as patch:
        patch.setattr(bring_up, "Registration", Late)
        patch.setattr(Connector, "measure_all", measure_all)
        kv.register(random_cache())
        connections = kv._verbs.engine.connections
        for rank in range(kv.size()):
            assert rank == kv.rank() or rank in connections, "not connected to a rank that sends to this one"
    connected, began = moments
    return connected, began


def test_nobody_puts_before_everybody_has_connected(four: Ranks) -> None:
    """Else UCX may crash: it loses the header of a put that it reads while it connects to the peer over TCP."""
    moments = four.run(late_to_connect)
    assert max(connected for connected, _ in moments) <= min(began for _, began in moments)


def two_groups_one_cache() -> None:
    cache = random_cache()
    with kv_group() as first, kv_group() as second:
        first.register(cache)
        second.register(cache, f"other{second.rank()}")
        check_transfer(first, 0, 1)
        check_transfer(second, 1, 0)
        assert first.rank() > 1 or torchkv.quarantined(group=second) == {}


def test_one_cache_in_two_groups(four: Ranks) -> None:
    four.run(two_groups_one_cache)


# ---------------------------------------------------------------------- a rank that comes again


def init(store: str, rank: int) -> str:
    """Joins a group of two; the error's text, or ""."""
    try:
        dist.init_process_group(
            "torchkv", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=60)
        )
        dist.group.WORLD.register(random_cache())
    except ProtocolError as error:
        return str(error)
    return ""


def test_a_new_process_in_the_place_of_a_dead_rank_is_refused(tmp_path: Path) -> None:
    """It used to wait for ever: its peers have registered, and nobody tells them of another one."""
    ranks = Ranks(3, world=False)
    try:
        store = str(tmp_path / "store")
        begun = ranks.start(init, store, 0, ranks=[0]) + ranks.start(init, store, 1, ranks=[1])
        assert ranks.join(begun) == ["", ""]
        ranks.kill(1)
        began = time.monotonic()
        (text,) = ranks.run(init, store, 1, ranks=[2])
        assert "another process is or was rank 1" in text
        assert "torchkv.join" in text
        assert time.monotonic() - began < 30, "the limit of the store is 60 s"
    finally:
        ranks.close()
