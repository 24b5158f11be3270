"""What the pages say of the code: names, settings, pictures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from xml.etree import ElementTree

import pytest

import torchkv
from torchkv.options import _OTHER, PREFIX, Options

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PICTURES = sorted((DOCS / "pictures").glob("*.svg"))

# Verbs as functions: the reference says once that they are the methods.
FUNCTIONS = {name for name in torchkv.__all__ if hasattr(torchkv.KVProcessGroup, name)}


def rows(page: Path) -> dict[str, str]:
    """First cell of each table's row, if it is code -> second cell."""
    return dict(re.findall(r"^\| `([^`|]+)` \| ([^|]*) \|", page.read_text(encoding="utf-8"), re.MULTILINE))


def test_every_public_name_is_in_the_reference() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    named = set(re.findall(r"^::: torchkv\.(\w+)$", text, re.MULTILINE))
    assert set(torchkv.__all__) - FUNCTIONS == named
    assert len(FUNCTIONS) == 17


@pytest.mark.parametrize("page", [DOCS / "tuning.md", ROOT / "README.md"], ids=lambda page: page.stem)
def test_every_setting_is_there_with_its_default(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = rows(page)
    for field in fields(Options):
        monkeypatch.delenv(f"TORCHKV_{field.name.upper()}", raising=False)
        assert shown(getattr(Options(), field.name)) == table[field.name].strip("`"), field.name
    assert all(f"`{PREFIX}{name}`" in page.read_text(encoding="utf-8") for name in _OTHER)


def shown(value: object) -> str:
    """As the tables show a default."""
    if value is None or value is False:
        return "none" if value is None else "off"
    if isinstance(value, float):
        return f"{value:g} s"
    return f"{value >> 20} MiB" if isinstance(value, int) and value >= 1 << 20 else str(value)


def test_every_page_begins_with_a_title_and_what_it_is_for() -> None:
    for page in [*DOCS.glob("*.md"), *DOCS.glob("api/*.md"), ROOT / "examples" / "README.md"]:
        title, empty, first, *_ = page.read_text(encoding="utf-8").splitlines()
        assert title.startswith("# "), page
        assert empty == "", page
        assert re.match(r"[\w`[*]", first), (page, first)


# ------------------------------------------------------------------ pictures


def luminance(colour: str) -> float:
    """Of ``#rrggbb``, as WCAG 2 defines it."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrasts(svg: str) -> Iterator[tuple[str, str, str, float]]:
    """Scheme, text's class, background's class, contrast: of every text with every background of a picture."""
    style = re.search(r"<style>(.*?)</style>", svg, re.DOTALL)
    assert style is not None
    light, found, dark = style[1].partition("@media (prefers-color-scheme: dark)")
    assert found, "a picture needs colours for the dark"
    for scheme, rules in (("light", light), ("dark", dark)):
        fills = dict(re.findall(r"\.?(\w+) \{[^}]*?fill: (#[0-9a-f]{6})", rules))
        for text in ("text", "small"):
            for background in sorted(fills.keys() - {"text", "small", "tip"}):
                bright, dim = sorted((luminance(fills[text]), luminance(fills[background])), reverse=True)
                yield scheme, text, background, (bright + 0.05) / (dim + 0.05)


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.stem)
def test_pictures_can_be_read_in_light_and_dark(picture: Path) -> None:
    svg = picture.read_text(encoding="utf-8")
    found = list(contrasts(svg))
    assert {scheme for scheme, *_ in found} == {"light", "dark"}
    assert [row for row in found if row[3] < 4.5] == []  # WCAG's AA
    root = ElementTree.fromstring(svg)
    paper = root.find("{*}rect")
    assert paper is not None
    assert (paper.get("class"), paper.get("width")) == ("paper", root.get("width"))
    assert root.findtext("{*}title")


def test_a_picture_that_cannot_be_read_is_seen() -> None:
    svg = PICTURES[0].read_text(encoding="utf-8").replace("#e6edf3", "#2b323b")
    assert any(scheme == "dark" and contrast < 4.5 for scheme, _, _, contrast in contrasts(svg))


def test_every_picture_is_shown() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))
    assert set(re.findall(r"\(pictures/([\w-]+)\.svg\)", text)) == {picture.stem for picture in PICTURES}
