"""Imports between folders, that nothing changes where they look, and that none is needed where it is not installed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("torchkv", "backends", "benchmarks", "examples", "tests")
INSTALLED = ("torchkv", "backends")
CHECKOUT_ONLY = {"benchmarks", "examples", "tests"}


def files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of the modules that code imports, with the names that it takes from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def changes_path(tree: ast.AST) -> bool:
    """Whether code touches ``sys.path``, by whatever name."""
    attributes = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return (
        "sys.path" in attributes
        or "sys.path" in set(imported(tree))
        or any(name.endswith(".syspath_prepend") for name in attributes)
    )


def borrows_from_a_test(tree: ast.AST) -> bool:
    """Whether code imports a test module. What tests share belongs in tests/helpers."""
    return any(".test_" in name for name in imported(tree) if name.startswith("tests."))


def parse(path: Path) -> ast.AST:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_nothing_changes_where_imports_look() -> None:
    assert [str(path) for path in files(*FOLDERS) if changes_path(parse(path))] == []


def test_no_test_module_is_imported() -> None:
    assert [str(path) for path in files("tests") if borrows_from_a_test(parse(path))] == []


def test_installed_packages_import_nothing_that_only_a_checkout_has() -> None:
    for path in files(*INSTALLED):
        assert {name.partition(".")[0] for name in imported(parse(path))} & CHECKOUT_ONLY == set(), path


def test_every_folder_of_tests_is_a_package() -> None:
    folders = {path.parent for path in files("tests")}
    assert len(folders) > 20
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


@pytest.mark.parametrize(
    "code", ["import sys\nsys.path.insert(0, '.')", "from sys import path", "monkeypatch.syspath_prepend('.')"]
)
def test_a_changed_path_is_seen(code: str) -> None:
    assert changes_path(ast.parse(code))
    assert not changes_path(ast.parse("import sys\nfrom pathlib import Path\nsys.argv, Path('sys.path')"))


@pytest.mark.parametrize(
    "code", ["from tests.unit.test_cache import gqa", "from tests.unit import test_cache as cache"]
)
def test_a_borrowed_test_module_is_seen(code: str) -> None:
    assert borrows_from_a_test(ast.parse(code))
    assert not borrows_from_a_test(ast.parse("from tests.helpers.harness import Ranks"))


def test_what_runs_beside_engines_is_collected_without_triton() -> None:
    """Their environments on hosts have none: see ``make test-vllm``."""
    folders = "tests/unit/core", "tests/unit/host", "tests/serving/vllm", "tests/serving/sglang"
    assert all((ROOT / folder).is_dir() for folder in folders)
    code = "import sys, pytest; sys.modules['triton'] = None; sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "--collect-only", "-q", "-p", "no:cacheprovider", *folders]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:]
