"""Negative controls of the conformance suite: every broken transport is caught, by the test that is there for it."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.contract import broken
from tests.contract.broken import Sound
from torchkv.testing import Lane, TransportConformance
from torchkv.testing.ends import Ends

ROOT = Path(__file__).parents[2]
TCP = {"UCX_TLS": "tcp"}
BAD_SPAN = (0, 0, 0, 1 << 20, 1)

# Transport -> the test that catches it, its arguments, and what it says.
CAUGHT: dict[str, tuple[str, tuple[Any, ...], str]] = {
    "IgnoresRemoteOffsets": ("scattered_puts_are_exact", ("adopt",), "wrong bytes"),
    "IgnoresLocalOffsets": ("scattered_puts_are_exact", ("adopt",), "wrong bytes"),
    "ForgetsTheLastByte": ("scattered_puts_are_exact", ("adopt",), "wrong bytes"),
    "WritesOneByteMore": ("a_put_overwrites_what_was_flushed_before", (), "wrong bytes"),
    "WritesBesideARegion": ("whole_regions", (), "beside a region of the receiver"),
    "ChangesItsSource": ("scattered_puts_are_exact", ("allocate",), "wrong bytes"),
    "WritesTwice": ("a_put_overwrites_what_was_flushed_before", (), "wrong bytes"),
    "UsesOneChannelForAll": ("many_channels", (), "region 0 of .: .* wrong bytes"),
    "MapsViewsAskew": ("views_reach_the_peers_memory", (), "read through the view: .* wrong bytes"),
    "CompletesPutsEarly": ("the_source_may_change_once_the_put_is_done", (64,), "wrong bytes"),
    "CompletesFlushesEarly": ("flushed_bytes_are_there_at_once", (256,), "not visible after a flush: .* wrong bytes"),
    "BlocksInPut": ("cancel_stops_a_put_midway", (), "ended before it could be cancelled"),
    "ReadsTheBatchLater": ("the_batch_may_change_after_put", (), "lies outside"),
    "SkipsSpansOutside": ("spans_outside_a_region_write_nothing", (BAD_SPAN,), "DID NOT RAISE"),
    "ChecksWhilePutting": ("one_bad_span_among_many_refuses_them_all", (), "wrong bytes"),
    "TakesDamagedBytes": ("damaged_bytes_do_not_connect", ("region",), "were not refused"),
    "CrashesOnDamagedBytes": ("damaged_bytes_do_not_connect", ("address",), "unpack requires"),
    "PublishesTooMuch": ("published_bytes_keep_their_limits", (), "<= "),
    "CannotWorkHere": ("the_transport_says_what_it_is", (), "network card"),
    "IgnoresCancel": ("cancel_stops_a_put_midway", (), "all of a cancelled put|landed after the cancelled"),
    "CancelsWithoutDraining": ("cancel_stops_a_put_midway", (), "neither written nor|landed after the cancelled"),
    "DeregistersUnderAPut": ("a_region_in_use_cannot_be_deregistered", (), "DID NOT RAISE"),
    "UsesIndicesAgain": ("deregistered_regions_are_refused_and_indices_are_not_used_again", (), "registered"),
    "ForgetsToCloseChannels": ("a_closed_channel_refuses", (), "assert False"),
    "WorksWhenClosed": ("a_closed_transport_refuses", (), "progress"),
}
CAUGHT_BETWEEN_PROCESSES = {
    "LosesNobody": ("a_peer_killed_in_mid_put_is_lost_and_others_are_not", (), "hit by the peer's death"),
    "IsDrainedFromTheStart": ("an_idle_channel_notices_that_the_peer_died", (), "assert not True"),
    "IsNeverDrained": ("an_idle_channel_notices_that_the_peer_died", (), "channel 0 to be drained"),
    "WritesAfterDrained": ("nothing_lands_after_drained", (), "landed after drained"),
    "LeaksADescriptor": ("nothing_is_left_behind", (), "file descriptors"),
    "SleepsThroughWork": ("a_sleep_on_arm_ends_when_there_is_work", (), r"slept [\d.]+ s on arm"),
    "WaitsForItsPeersInClose": ("close_with_a_dead_and_with_a_frozen_peer", (), "in close"),
    "CrashesInProgress": ("link_names_the_lane", (), "a bug of the backend"),
}


@contextmanager
def suite_over(name: str, **conditions: Any) -> Iterator[tuple[TransportConformance, Ends]]:
    """A suite over one class of `broken`, as pytest would set it up."""

    class Suite(TransportConformance):
        lane: ClassVar[Lane] = Lane(f"{broken.__name__}:{name}", **conditions)

    Suite.setup_class()
    try:
        yield Suite(), Suite._ends
    finally:
        Suite._ends.discard()


def test_every_broken_transport_is_here() -> None:
    classes = {name for name, cls in vars(broken).items() if isinstance(cls, type) and issubclass(cls, Sound)}
    assert classes == {"Sound", "SoundUcx", *CAUGHT, *CAUGHT_BETWEEN_PROCESSES}


@pytest.mark.parametrize("name", CAUGHT)
def test_caught(name: str) -> None:
    test, arguments, words = CAUGHT[name]
    failures = (AssertionError, pytest.fail.Exception, struct.error)
    with suite_over(name, in_process=True, timeout=20.0) as (suite, ends), pytest.raises(failures, match=words):
        getattr(suite, f"test_{test}")(ends, *arguments)


@pytest.mark.parametrize(("test", "arguments"), sorted({(test, arguments) for test, arguments, _ in CAUGHT.values()}))
def test_what_is_sound_passes(test: str, arguments: tuple[Any, ...]) -> None:
    with suite_over("Sound", in_process=True) as (suite, ends):
        getattr(suite, f"test_{test}")(ends, *arguments)


@pytest.mark.parametrize("name", CAUGHT_BETWEEN_PROCESSES)
def test_caught_between_processes(name: str) -> None:
    test, arguments, words = CAUGHT_BETWEEN_PROCESSES[name]
    with suite_over(name, environment=TCP, timeout=8.0) as (suite, ends), pytest.raises(AssertionError, match=words):
        getattr(suite, f"test_{test}")(ends, *arguments)


@pytest.mark.parametrize("test", sorted({test for test, _, _ in CAUGHT_BETWEEN_PROCESSES.values()}))
def test_what_is_sound_passes_between_processes(test: str) -> None:
    with suite_over("SoundUcx", environment=TCP) as (suite, ends):
        getattr(suite, f"test_{test}")(ends)


def test_pytest_fails_over_a_broken_transport(tmp_path: Path) -> None:
    """As a user sees it: pytest's own report, with the values that were compared."""
    tests = tmp_path / "test_mine.py"
    classes = [
        f"class Test{name}(TransportConformance):\n    lane = Lane('{broken.__name__}:{name}', in_process=True)\n"
        for name in ("Sound", "IgnoresRemoteOffsets", "PublishesTooMuch")
    ]
    tests.write_text("from torchkv.testing import Lane, TransportConformance\n\n" + "\n".join(classes))
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "several or limits", str(tests)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 failed, 4 passed" in done.stdout
    assert "TestIgnoresRemoteOffsets::test_puts_between_several_regions" in done.stdout
    assert "where 16" in done.stdout, "pytest shows no values: the assertions of the suite were not rewritten"
