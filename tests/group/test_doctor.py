"""``python -m torchkv.doctor``: what it finds here, and what it says of settings that are not as they should be."""

from __future__ import annotations

import json
import sys

import pytest

from torchkv import doctor
from torchkv.cuda.driver import num_queues

SETTINGS = ("TORCHKV_TIMEOUT", "TORCHKV_NO_SUCH_THING", "CUDA_DEVICE_MAX_CONNECTIONS")


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["doctor", "--quick", *arguments])
    return doctor.main(), capsys.readouterr().out


def test_it_finds_what_this_machine_has(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out = run(capsys, monkeypatch, "--json")
    found = {finding["subject"]: finding for finding in json.loads(out)}
    for subject in ("versions", "settings", "GPUs", "host memory", "liveness", "listening"):
        assert found[subject]["level"] == "ok", found[subject]
    assert "torch " in found["versions"]["text"]
    assert code == max(doctor.LEVELS.index(finding["level"]) for finding in found.values())
    _, table = run(capsys, monkeypatch)
    assert len(table.splitlines()) == len(found)


def test_settings_that_change_something_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHKV_TIMEOUT", "7")
    (settings,) = doctor._settings()
    assert settings.level == "ok"
    assert "timeout=7" in settings.text
    monkeypatch.setenv("TORCHKV_NO_SUCH_THING", "1")
    (settings,) = doctor._settings()
    assert settings.level == "warn"
    assert "TORCHKV_NO_SUCH_THING" in settings.text
    monkeypatch.setenv("TORCHKV_TIMEOUT", "soon")
    (settings,) = doctor._settings()
    assert settings.level == "FAIL"


@pytest.mark.parametrize(("said", "queues", "warns"), [("1", 1, True), ("32", 32, False), ("many", 8, False)])
def test_too_few_queues_for_streams_are_named(
    said: str, queues: int, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", said)
    assert num_queues() == queues
    found = {finding.subject: finding for finding in doctor._settings()}
    assert ("CUDA_DEVICE_MAX_CONNECTIONS" in found) is warns
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    assert num_queues() == 8
