"""The template of a transport, as somebody outside this repository has it: installed by pip, tested, used."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.helpers.torchrun import run_with_torchrun

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "examples" / "template_backend"
MAX_LINES = 200  # of Python: a template that is longer is not read


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the template's folder, installed into its subfolder ``site``. Nothing is downloaded."""
    folder = tmp_path_factory.mktemp("template") / "template_backend"
    shutil.copytree(TEMPLATE, folder, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    install = "install --no-index --no-deps --no-build-isolation --disable-pip-version-check --target site ."
    done = subprocess.run(
        [sys.executable, "-m", "pip", *install.split()],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def environment(package: Path) -> Mapping[str, str]:
    paths = [str(package / "site"), str(ROOT), str(ROOT / "backends"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.mark.timeout(300)
def test_it_passes_the_conformance_suite(package: Path) -> None:
    assert not (package / "site" / "tests").exists()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--timeout=100", "tests"],
        cwd=package,
        env=environment(package),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = re.search(r"(\d+) passed, 1 skipped in", done.stdout)
    assert summary, done.stdout
    assert int(summary[1]) > 60


def test_it_moves_a_cache_between_ranks(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = ("direct", "runs", "slices", "staged")
    for name, value in environment(package).items():
        monkeypatch.setenv(name, value)
    code, lines = run_with_torchrun(ROOT / "tests" / "helpers" / "ranks" / "third_party.py", 2, "template", *paths)
    assert code == 0, "\n".join(lines)
    want = {f"rank {rank}: sent and received over template, {path}" for rank in range(2) for path in paths}
    assert want <= set(lines), lines


def test_it_stays_short() -> None:
    lines = {path.name: len(path.read_text().splitlines()) for path in TEMPLATE.rglob("*.py")}
    assert sum(lines.values()) < MAX_LINES, lines
