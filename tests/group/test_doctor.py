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
    assert all(finding["level"] == "ok" or finding["fix"] for finding in found.values())
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


@pytest.mark.parametrize(("levels", "code"), [(["ok"], 0), (["ok", "warn"], 1), (["warn", "FAIL", "ok"], 2)])
def test_the_worst_finding_is_the_exit_code(
    levels: list[str], code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = [doctor.Finding(level, "subject", "text", "" if level == "ok" else "do this") for level in levels]
    monkeypatch.setattr(doctor, "examine", lambda *, transfers: iter(findings))
    found, out = run(capsys, monkeypatch)
    assert found == code
    assert out.count("; fix: do this") == len(levels) - levels.count("ok")
    found, out = run(capsys, monkeypatch, "--json")
    assert found == code
    assert [each["level"] for each in json.loads(out)] == levels


def test_a_problem_has_its_fix() -> None:
    with pytest.raises(AssertionError, match="without its fix"):
        doctor.Finding("warn", "subject", "text")
