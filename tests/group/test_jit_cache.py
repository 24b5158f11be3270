"""Machine code on disk is used again by other processes, and never after what it was compiled from has changed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchkv.host import copy_loops, jit, jit_cache

CALLER = """
from torchkv.host.jit import compiled
from {package}.callee import plus
from {package}.constants import BASE

@compiled
def answer(x):
    return plus(x) + BASE
"""
CALLEE = """
from torchkv.host.jit import compiled

@compiled
def plus(x):
    return x + {number}
"""
PRINT = """
from {package}.caller import answer
print(answer(1), sum(answer.stats.cache_hits.values()))
"""


def write(folder: Path, *, number: int, base: int) -> None:
    package = folder / "made"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").touch()
    (package / "caller.py").write_text(CALLER.format(package=package.name))
    (package / "callee.py").write_text(CALLEE.format(number=number))
    (package / "constants.py").write_text(f"BASE = {base}\n")


def answer(folder: Path, **env: str) -> tuple[int, int]:
    """What a new process computes, and how many of its functions came from disk."""
    command = [sys.executable, "-B", "-c", PRINT.format(package="made")]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result, hits = map(int, done.stdout.split())
    return result, hits


def test_a_change_in_another_file_is_compiled(tmp_path: Path) -> None:
    write(tmp_path, number=10, base=0)
    assert answer(tmp_path) == (11, 0)
    assert answer(tmp_path) == (11, 1)
    write(tmp_path, number=20, base=0)
    assert answer(tmp_path) == (21, 0), "a compiled function of another file has changed"
    write(tmp_path, number=20, base=100)
    assert answer(tmp_path) == (121, 0), "a constant of another file has changed"
    write(tmp_path, number=10, base=0)
    assert answer(tmp_path) == (11, 1), "what it was at first"


def test_the_folder_of_numba_is_used_if_it_is_named(tmp_path: Path) -> None:
    write(tmp_path, number=1, base=0)
    chosen = tmp_path / "chosen"
    assert answer(tmp_path, NUMBA_CACHE_DIR=str(chosen)) == (2, 0)
    assert answer(tmp_path, NUMBA_CACHE_DIR=str(chosen)) == (2, 1)
    assert list(chosen.rglob("*.nbi"))
    assert not list((tmp_path / "made").rglob("*.nbi"))


def test_without_a_folder_to_write_each_process_compiles(tmp_path: Path) -> None:
    write(tmp_path, number=1, base=0)
    nowhere = {"NUMBA_CACHE_DIR": "/proc/nowhere", "XDG_CACHE_HOME": "/proc/nowhere", "HOME": "/proc/nowhere"}
    assert answer(tmp_path, **nowhere)[0] == 2


def test_sources_are_all_that_a_file_imports_from_torchkv() -> None:
    found = {path.name for path in jit_cache.sources(Path(copy_loops.__file__))}
    assert {"copy_loops.py", "jit.py", "arrays.py"} <= found
    assert "engine.py" not in found


def test_only_the_first_process_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit_cache, "_base", lambda top: tmp_path)
    files = frozenset({Path(jit.__file__)})
    with jit_cache.compiled_once(files):
        assert not list(tmp_path.glob("*.done")), "others must not take for compiled what is not yet"
    (done,) = tmp_path.glob("*.done")
    (tmp_path / "lock").unlink()
    with jit_cache.compiled_once(files):
        pass
    assert not (tmp_path / "lock").exists(), "who finds it compiled need not wait"
    with pytest.raises(ZeroDivisionError), jit_cache.compiled_once(frozenset()):
        _ = 1 / 0
    assert list(tmp_path.glob("*.done")) == [done]


def test_what_nobody_has_run_for_a_month_is_deleted(tmp_path: Path) -> None:
    base = tmp_path / "base"
    names = {"old": "a" * 16, "old done": "b" * 16 + ".done", "young": "c" * 16, "mine": "notes"}
    for name in (names["old"], names["young"], names["mine"]):
        (base / name).mkdir(parents=True)
        (base / name / "made").touch()
    (base / names["old done"]).touch()
    long_ago = time.time() - 40 * 86400
    for name in (names["old"], names["old done"], names["mine"]):
        os.utime(base / name, (long_ago, long_ago))
    write(tmp_path, number=1, base=0)
    assert answer(tmp_path, NUMBA_CACHE_DIR=str(base)) == (2, 0)
    made = {path.name for path in base.iterdir()} - set(names.values())
    assert {path.name for path in base.iterdir()} == {names["young"], names["mine"], *made}
    for name in made:  # whoever loads them notes that they are in use
        os.utime(base / name, (long_ago, long_ago))
    assert answer(tmp_path, NUMBA_CACHE_DIR=str(base)) == (2, 1)
    write(tmp_path, number=2, base=0)
    assert answer(tmp_path, NUMBA_CACHE_DIR=str(base)) == (3, 0)
    assert made <= {path.name for path in base.iterdir()}
