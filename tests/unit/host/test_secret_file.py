"""The secret of jobs that are launched apart: made once, the same for all, and never taken from a file others read."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from torchkv.errors import AuthError, TransportUnavailable
from torchkv.host.secret_file import shared_secret

HEX = b"0123456789abcdef" * 4


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TORCHKV_SECRET_FILE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def secret_file(path: Path, data: bytes = HEX, mode: int = 0o600) -> Path:
    path.write_bytes(data)
    path.chmod(mode)
    return path


def test_without_the_variable_a_user_has_one_secret(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        secrets = {future.result() for future in [pool.submit(shared_secret) for _ in range(32)]}
    assert len(secrets) == 1
    assert len(secrets.pop()) == 32
    (made,) = (tmp_path / "config" / "torchkv").iterdir()  # and nothing left beside it
    assert made.stat().st_mode & 0o777 == 0o600
    assert made.parent.stat().st_mode & 0o777 == 0o700


def test_the_named_file_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHKV_SECRET_FILE", str(secret_file(tmp_path / "one")))
    one = shared_secret()
    monkeypatch.setenv("TORCHKV_SECRET_FILE", str(secret_file(tmp_path / "same", HEX + b"\n")))
    assert shared_secret() == one, "a newline at the end is no part of the secret"
    monkeypatch.setenv("TORCHKV_SECRET_FILE", str(secret_file(tmp_path / "other", HEX[:-1] + b"0")))
    assert shared_secret() != one
    assert not (tmp_path / "config").exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666, 0o620])
def test_a_file_that_others_may_touch_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: int) -> None:
    monkeypatch.setenv("TORCHKV_SECRET_FILE", str(secret_file(tmp_path / "open", mode=mode)))
    with pytest.raises(AuthError, match="0600"):
        shared_secret()


@pytest.mark.parametrize("data", [b"", b"short", b" \n" * 40, b"x" * 5000])
def test_a_file_with_too_little_or_too_much_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data: bytes
) -> None:
    monkeypatch.setenv("TORCHKV_SECRET_FILE", str(secret_file(tmp_path / "odd", data)))
    with pytest.raises(AuthError, match="16 to 4096"):
        shared_secret()


def test_a_missing_file_is_not_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHKV_SECRET_FILE", str(tmp_path / "none"))
    with pytest.raises(TransportUnavailable, match="TORCHKV_SECRET_FILE"):
        shared_secret()
    assert not (tmp_path / "none").exists()
    monkeypatch.setenv("TORCHKV_SECRET_FILE", os.devnull)
    with pytest.raises(AuthError):
        shared_secret()
