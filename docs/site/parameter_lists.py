"""For mkdocstrings: torchkv's docstrings as Markdown.

In them "name: what it is." describes a parameter or a field, one after the other, until the paragraph ends or a
sentence begins with "Raises". Markdown would run them together, so they become a list.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import griffe


def as_list(text: str, names: Collection[str]) -> str:
    """``text`` with every description of one of ``names`` as an item of a list."""
    if not names:
        return text
    name = "|".join(sorted(names, key=len, reverse=True))
    # At the beginning of a line, or of a sentence.
    begin = re.compile(rf"(?:^|(?<=[.;)] ))(?P<names>(?:{name})(?:, (?:{name}))*): ", re.MULTILINE)
    return "\n\n".join(_paragraph(each, begin) for each in text.split("\n\n"))


def _paragraph(text: str, begin: re.Pattern[str]) -> str:
    starts = [found.start() for found in begin.finditer(text)]
    first = next((start for start in starts if start == 0 or text[start - 1] == "\n"), None)
    if first is None or text.startswith("    "):
        return text
    before, described = text[:first], text[first:]
    described, raises, errors = _partition(described, re.compile(r"(?:^|(?<=[.;)] ))Raises ", re.MULTILINE))
    found = list(begin.finditer(described))
    ends = [*(each.start() for each in found[1:]), len(described)]
    items = [
        f"- {_code(each['names'])}: {' '.join(described[each.end() : end].split())}"
        for each, end in zip(found, ends, strict=True)
    ]
    return "\n\n".join(filter(None, (before.strip(), "\n".join(items), raises + errors)))


def _partition(text: str, pattern: re.Pattern[str]) -> tuple[str, str, str]:
    found = pattern.search(text)
    return (text, "", "") if found is None else (text[: found.start()], found[0], text[found.end() :])


def _code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))


class ParameterLists(griffe.Extension):
    """Rewrites the docstrings of functions and classes."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        if func.docstring is not None:
            func.docstring.value = as_list(func.docstring.value, {each.name for each in func.parameters})

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        if cls.docstring is not None:
            init = cls.members.get("__init__")
            names = {each.name for each in init.parameters} if isinstance(init, griffe.Function) else set()
            cls.docstring.value = as_list(cls.docstring.value, names | set(cls.members))
