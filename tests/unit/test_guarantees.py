"""`docs/guarantees.md` names tests: each of them exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.faults import outcomes

ROOT = Path(__file__).parents[2]


def test_every_guarantee_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)
    assert len(named) > 30
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in functions, f"{path} has no {name}"
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    assert all("tests/" in row for row in rows if not row.startswith(("| name", "| fault", "| campaign", "| `"))), (
        "a promise without a test"
    )


def test_the_tables_are_those_of_the_tests() -> None:
    """``python -m tests.faults.outcomes`` writes them."""
    page = outcomes.PAGE.read_text(encoding="utf-8")
    assert page == outcomes.written(page)
    stale = page.replace("| a writer cancels |", "| a writer waits |")
    assert stale != outcomes.written(stale) == page
