"""`make docs`: the site is built, and what is wrong with a page fails it."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("mkdocs", reason="the site needs MkDocs (extra 'docs')")

ROOT = Path(__file__).parents[2]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of all that the site is made of."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for page in (*ROOT.glob("*.md"), ROOT / "mkdocs.yml"):
        shutil.copy(page, tmp_path / page.relative_to(ROOT))
    for folder in ("torchkv", "backends"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    return tmp_path


def build(folder: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "mkdocs", "build"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    return done.returncode, done.stdout + done.stderr


def test_it_is_built_with_the_pages_outside_docs(copy: Path) -> None:
    code, output = build(copy)
    assert code == 0, output
    site = copy / "build" / "site"
    for page in ("index", "quickstart", "security", "contributing", "changelog", "examples", "api/verbs"):
        assert (site / f"{page}.html").exists(), page
    home = (site / "index.html").read_text(encoding="utf-8")
    assert 'href="design.html"' in home
    assert 'href="security.html"' in home
    assert 'src="engine-loop.svg"' in home
    assert (site / "examples" / "quickstart.py").read_bytes() == (ROOT / "examples" / "quickstart.py").read_bytes()
    verbs = (site / "api" / "verbs.html").read_text(encoding="utf-8")
    assert "<li><code>prefix_tokens</code>: tokens of the prompt that this rank already holds" in verbs


@pytest.mark.parametrize(
    ("page", "text", "message"),
    [
        ("docs/concepts.md", "[x](nowhere.md)", "nowhere.md"),
        ("README.md", "[x](docs/nowhere.md)", "nowhere.md"),
        ("docs/design.md", "[x](concepts.md#nowhere)", "#nowhere"),
        ("docs/server.md", "![x](pictures/nowhere.svg)", "nowhere.svg"),
        ("docs/api/verbs.md", "::: torchkv.nowhere", "torchkv.nowhere"),
        ("docs/new.md", "# In no menu", "new.md"),
    ],
)
def test_a_broken_page_fails_the_build(page: str, text: str, message: str, copy: Path) -> None:
    with (copy / page).open("a", encoding="utf-8") as file:
        file.write(f"\n{text}\n")
    code, output = build(copy)
    assert code != 0
    assert message in output


def parameter_lists() -> ModuleType:
    spec = importlib.util.spec_from_file_location("parameter_lists", ROOT / "docs" / "site" / "parameter_lists.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (
            "What it does.\n\npages: ids.\ndst: a rank,\nor None.\nRaises ``E``.",
            "- `pages`: ids.\n- `dst`: a rank, or None.",
        ),
        ("pages: ids. dst, src: ranks. Raises ``E``.", "- `pages`: ids.\n- `dst`, `src`: ranks."),
        ("It says pages: those.\nother: no parameter.", "It says pages: those.\nother: no parameter."),
    ],
)
def test_descriptions_of_parameters_become_lists(text: str, want: str) -> None:
    done = parameter_lists().as_list(text, {"pages", "dst", "src"})
    assert done.removeprefix("What it does.\n\n").removesuffix("\n\nRaises ``E``.") == want
