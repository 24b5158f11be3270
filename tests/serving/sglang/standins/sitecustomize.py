"""What SGLang imports but has no build for CPUs: torchvision, and one kernel of vLLM's. Only their names are there.

Python runs this first in every process of an engine: this folder is on their PYTHONPATH, and on that of no other.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

ABSENT = ("torchvision", "vllm")


class Kind(type):
    """A class that has every attribute, such as an enumeration's members."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class Names(types.ModuleType):
    """A module, or a function in one, that has every attribute. No test calls one."""

    __path__: list[str] = []  # noqa: RUF012  # a package's

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Kind(name, (), {}) if name[:1].isupper() else Names(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else self  # as a decorator


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Names(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, Finder())
