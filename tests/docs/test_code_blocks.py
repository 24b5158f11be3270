"""Every Python block of the pages that users read: it runs, or its page says why it cannot."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.helpers.code_blocks import RAN, outcomes, visible_blocks
from tests.helpers.harness import RankFailed

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Page:
    """How many ranks run it; how many of its blocks run; how many do not, by the reason that the page gives."""

    ranks: int
    run: int
    skipped: Mapping[str, int] = field(default_factory=dict)


PAGES = {
    "README.md": Page(2, 2),
    "docs/prefix.md": Page(2, 3),
    "docs/quickstart.md": Page(2, 5),
    "docs/concepts.md": Page(2, 4),
    "docs/conversion.md": Page(2, 3),
    "docs/integrations.md": Page(
        2, 0, {"needs two vLLM engines": 1, "needs two SGLang engines": 1, "needs transformers": 1}
    ),
    "docs/layer-groups.md": Page(2, 3),
    "docs/pipeline.md": Page(2, 1),
    "docs/porting-mooncake.md": Page(2, 4, {"needs Mooncake": 4}),
    "docs/porting-nixl.md": Page(2, 4, {"needs NIXL": 4}),
    "docs/transports.md": Page(1, 1),
    "docs/tuning.md": Page(2, 3),
    "examples/template_backend/README.md": Page(1, 0, {"needs this package, installed": 1}),
}
# Reasons that hold only where a module is missing.
MISSING = {"needs NIXL": "nixl_cu13", "needs Mooncake": "mooncake", "needs transformers": "transformers"}


LANGUAGES = {"", "python", "sh"}  # of blocks; no other name of Python's would be seen


def pages() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])


def expected(page: Page) -> tuple[int, Mapping[str, int]]:
    """With what is installed here."""
    here = [reason for reason, module in MISSING.items() if importlib.util.find_spec(module) is not None]
    run = page.run + sum(page.skipped.get(reason, 0) for reason in here)
    return run, {reason: count for reason, count in page.skipped.items() if reason not in here}


def test_every_page_with_a_python_block_is_run() -> None:
    assert [str(page.relative_to(ROOT)) for page in pages() if visible_blocks(page)] == sorted(PAGES)


def test_blocks_name_no_other_languages() -> None:
    for page in pages():
        fences = re.findall(r"^ *(?:```|~~~)(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert {fence.strip() for fence in fences} <= LANGUAGES, page


@pytest.mark.parametrize("name", PAGES)
def test_its_blocks_run(name: str) -> None:
    found = outcomes(ROOT / name, PAGES[name].ranks)
    skipped = Counter(reason for reason in found.values() if reason != RAN)
    assert (len(found) - skipped.total(), dict(skipped)) == expected(PAGES[name])
    assert len(found) == PAGES[name].run + sum(PAGES[name].skipped.values())


GOOD = "```python\nassert on_rank(0) or on_rank(1)\n```\n"


@pytest.mark.parametrize(
    ("block", "error"),
    [
        ("```python\nundefined_name\n```\n", "NameError"),
        ("```python\nassert on_rank(0)\n```\n", "AssertionError"),
        ("<!--- invisible-code-block: python\nassert on_rank(1)\n-->\n", "AssertionError"),
        ("```python\nthis is no Python\n```\n", "SyntaxError"),
    ],
)
def test_a_broken_block_is_seen(block: str, error: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{GOOD}\n{block}\n{GOOD}")
    with pytest.raises(RankFailed, match=rf"page\.md(.|\n)*{error}"):
        outcomes(page, 2)


def test_a_skipped_block_is_counted_with_its_reason(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    never = '<!--- skip: next "needs a GPU" -->\n\n```python\nundefined_name\n```\n'
    first = '<!--- skip: next if(not on_rank(0), reason="of rank 0") -->\n\n```python\nassert on_rank(0)\n```\n'
    page.write_text(f"{GOOD}\n{never}\n{first}\n```\nno Python\n```\n")
    assert list(outcomes(page, 2).values()) == [RAN, "needs a GPU", RAN]
