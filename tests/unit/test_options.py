"""Options: an argument overrides the environment, which overrides the default; wrong values are refused by name."""

from __future__ import annotations

import dataclasses
import os
from datetime import timedelta
from typing import Any

import pytest

from torchkv import KVError, Options, ProtocolError
from torchkv.options import interface_from_env, seconds, warn_about_unknown_variables


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("TORCHKV_"):
            monkeypatch.delenv(name)


FROM_ENVIRONMENT = [
    ("transport", "ucx", "ucx"),
    ("path", "slices", "slices"),
    ("path", "", None),
    ("timeout", "1.5", 1.5),
    ("grant_timeout", "20", 20.0),
    ("heartbeat", "0.25", 0.25),
    ("staging_send", "1048576", 1 << 20),
    ("staging_recv", "4096", 4096),
    ("sm_budget", "8", 8),
    ("copy_threads", "3", 3),
    ("copy_threads", "", None),
    ("checksum", "off", False),
    ("require", "direct", "direct"),
    ("min_gbps", "0.5", 0.5),
    ("min_gbps", "", None),
    ("flight_recorder", "0", 0),
    ("flight_recorder", "", None),
    ("dump_dir", "/tmp/dumps", "/tmp/dumps"),
    ("dump_dir", "", None),
    ("metrics_port", "9400", 9400),
    ("metrics_port", "", None),
    ("nvtx", "on", True),
]


@pytest.mark.parametrize(("name", "text", "value"), FROM_ENVIRONMENT)
def test_every_field_reads_its_variable(name: str, text: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"TORCHKV_{name.upper()}", text)
    found = getattr(Options(), name)
    assert found == value
    assert type(found) is type(value)


def test_every_field_has_a_variable_that_is_tested() -> None:
    assert {field.name for field in dataclasses.fields(Options)} == {name for name, _, _ in FROM_ENVIRONMENT}


def test_argument_beats_environment_beats_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Options().timeout == 30.0
    monkeypatch.setenv("TORCHKV_TIMEOUT", "7")
    assert Options().timeout == 7.0
    assert Options(timeout=30.0).timeout == 30.0
    assert Options(timeout=3).timeout == 3.0
    monkeypatch.delenv("TORCHKV_TIMEOUT")
    assert Options().timeout == 30.0  # read when an Options is made, not when torchkv is imported


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("timeout", "soon"),
        ("timeout", "0"),
        ("timeout", "-1"),
        ("timeout", "nan"),
        ("timeout", ""),
        ("heartbeat", "1s"),
        ("path", "teleport"),
        ("require", "best"),
        ("staging_send", "128M"),
        ("staging_send", "-1"),
        ("sm_budget", "1.5"),
        ("copy_threads", "all"),
        ("checksum", "perhaps"),
        ("min_gbps", "fast"),
        ("min_gbps", "0"),
        ("flight_recorder", "many"),
        ("flight_recorder", "-1"),
        ("metrics_port", "65536"),
        ("metrics_port", "http"),
        ("nvtx", "perhaps"),
    ],
)
def test_wrong_variables_are_refused_by_name(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"TORCHKV_{name.upper()}", text)
    with pytest.raises(KVError, match=rf"(TORCHKV_{name.upper()}|Options\.{name})"):
        Options()


@pytest.mark.parametrize(
    "arguments",
    [
        {"timeout": 0},
        {"timeout": "5"},
        {"timeout": None},
        {"grant_timeout": float("nan")},
        {"heartbeat": -1.0},
        {"path": "teleport"},
        {"path": 5},
        {"require": "slow"},
        {"staging_recv": -1},
        {"staging_send": "1"},
        {"checksum": 1},
        {"sm_budget": 0},
        {"copy_threads": 0},
        {"copy_threads": 17},
        {"copy_threads": True},
        {"copy_threads": 2.0},
        {"min_gbps": -2.0},
        {"min_gbps": "1"},
        {"transport": 5},
        {"flight_recorder": True},
        {"flight_recorder": 1 << 21},
        {"dump_dir": 5},
        {"metrics_port": -1},
        {"metrics_port": "9400"},
        {"nvtx": 1},
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with pytest.raises(ProtocolError, match=rf"Options\.{name}"):
        Options(**arguments)


def test_checksums_take_the_staged_path() -> None:
    assert Options().forced_path is None
    assert Options(path="slices").forced_path == "slices"
    assert Options(checksum=True).forced_path == Options(checksum=True, path="staged").forced_path == "staged"
    with pytest.raises(ProtocolError, match=r"Options\.checksum.*Options\.path='direct'"):
        Options(checksum=True, path="direct")


def test_operations_are_recorded_where_something_is_made_of_them() -> None:
    assert Options().recorded == Options(flight_recorder=0, nvtx=True).recorded == 0
    assert Options(flight_recorder=7).recorded == 7
    for asked in ({"dump_dir": "dumps"}, {"metrics_port": 0}, {"nvtx": True}):
        assert Options(**asked).recorded == 4096


def test_without_a_recorder_there_is_nothing_to_dump() -> None:
    with pytest.raises(ProtocolError, match=r"Options\.dump_dir.*flight_recorder=0"):
        Options(dump_dir="/tmp/dumps", flight_recorder=0)


def test_options_are_immutable_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().timeout = 5.0
    with pytest.raises(TypeError):
        Options("ucx")


@pytest.mark.parametrize("value", [2, 2.0, timedelta(seconds=2)])
def test_seconds(value: Any) -> None:
    assert seconds(value, "limit") == 2.0


@pytest.mark.parametrize("value", [0, -1, float("nan"), timedelta(0), "2", b"2", None, [2]])
def test_values_that_are_not_seconds(value: Any) -> None:
    with pytest.raises(ProtocolError, match="limit must be a positive number"):
        seconds(value, "limit")


def test_a_misspelt_variable_is_reported_with_the_nearest_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHKV_TIMOUT", "5")
    with pytest.warns(UserWarning, match=r"TORCHKV_TIMOUT .*did you mean TORCHKV_TIMEOUT\?"):
        assert warn_about_unknown_variables() == ["TORCHKV_TIMOUT"]


def test_known_variables_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHKV_TIMEOUT", "5")
    monkeypatch.setenv("TORCHKV_INTERFACE", "lo")
    assert warn_about_unknown_variables() == []  # pytest turns warnings into errors
    assert interface_from_env() == "lo"
    monkeypatch.setenv("TORCHKV_INTERFACE", "")
    assert interface_from_env() is None


@pytest.mark.parametrize(
    ("cores", "asked", "copiers"), [(1, None, 0), (2, None, 1), (64, None, 3), (2, 1, 0), (1, 16, 15)]
)
def test_threads_that_copy(cores: int, asked: int | None, copiers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    assert Options(copy_threads=asked).copiers == copiers
