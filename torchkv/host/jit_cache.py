"""Where numba keeps machine code: a folder for each state of the source, so that loaded code is what the source says.

numba compares a cached function with the file that the function stands in, and with no other: when a compiled function
or a constant that it takes from another module has changed, numba goes on using the old machine code.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import numba
from numba.misc.appdirs import AppDirs

__all__ = ["cached_by_source", "compiled_once", "sources"]

log = logging.getLogger(__name__)

_DIGEST_NBYTES = 8
_NAME = re.compile(rf"[0-9a-f]{{{2 * _DIGEST_NBYTES}}}(\.done)?")
_KEPT_SECONDS = 30 * 86400.0  # after its last use


@contextmanager
def cached_by_source(file: Path) -> Iterator[None]:
    """While this lasts, numba sets up caches for functions of ``file``, in a folder of their source if possible."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = _folder(file)
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before


# Asked for each function of a module: its folder is made once in a process.
@cache
def _folder(file: Path) -> str:
    """The folder of a file's source, which is in use now; "" where none can be made: numba looks for one itself."""
    folder = _base(_top(file)) / _digest(sources(file))
    try:
        if not folder.exists():
            folder.mkdir(parents=True, exist_ok=True)
            _delete_old(folder.parent)
    except OSError:
        return ""
    _note_use(folder)
    return str(folder)


# Asked for each function of a module, and at each `register`: files are read once in a process.
@cache
def sources(file: Path) -> frozenset[Path]:
    """``file``, and what it imports from its own top-level package or from torchkv, and so on."""
    found: set[Path] = set()
    pending = [file.resolve()]
    while pending:
        path = pending.pop()
        if path not in found:
            found.add(path)
            pending += _imports(path)
    return frozenset(found)


@cache
def _imports(file: Path) -> tuple[Path, ...]:
    roots = {root.name: root for root in (_top(file), Path(__file__).resolve().parents[1])}
    found: list[Path] = []
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]  # a module, or something in one
        else:
            continue
        for name in names:
            top, *rest = name.split(".")
            if top in roots:
                found += _module(roots[top], rest)
    return tuple(found)


def _module(root: Path, names: list[str]) -> list[Path]:
    """The file of the module ``names`` below the package ``root``, or of the module that its last name stands in."""
    for parts in (names, names[:-1]):
        for path in (root.joinpath(*parts).with_suffix(".py"), root.joinpath(*parts, "__init__.py")):
            if parts and path.is_file():
                return [path]
    return []  # the package's own __init__, which defines nothing that is compiled


def _top(file: Path) -> Path:
    """The folder of the top-level package that ``file`` belongs to."""
    folder = file.resolve().parent
    while (folder.parent / "__init__.py").exists():
        folder = folder.parent
    return folder


@cache
def _base(top: Path) -> Path:
    """``NUMBA_CACHE_DIR``, or else the package's own cache folder, or the user's where that cannot be written."""
    if numba.config.CACHE_DIR:
        return Path(numba.config.CACHE_DIR)
    mine = top / "__pycache__" / "numba"
    try:
        mine.mkdir(parents=True, exist_ok=True)
        writable = os.access(mine, os.W_OK)
    except OSError:
        writable = False
    return mine if writable else Path(AppDirs("torchkv", False).user_cache_dir) / "numba" / top.name


@cache
def _digest(files: frozenset[Path]) -> str:
    """Of the files' text, of where they lie (numba's own index names them so) and of who compiles them."""
    compiler = numba.__version__, sys.version, numba.config.BOUNDSCHECK
    digest = hashlib.blake2b(repr(compiler).encode(), digest_size=_DIGEST_NBYTES)
    for path in sorted(files):
        text = path.read_bytes()
        digest.update(repr((str(path), len(text))).encode())
        digest.update(text)
    return digest.hexdigest()


@contextmanager
def compiled_once(files: frozenset[Path]) -> Iterator[None]:
    """Around what compiles the functions of ``files`` or loads them: one process of a machine compiles, others wait.

    Where no folder can be written nobody waits: each process compiles for itself.
    """
    done = _base(Path(__file__).resolve().parents[1]) / f"{_digest(files)}.done"
    try:
        lock = None if done.exists() else done.with_name("lock").open("w")
    except OSError:
        lock = None
    if lock is None:
        _note_use(done)
        yield
        return
    with lock:  # closing the file gives the lock back, also when the process is killed
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            log.info("compiling %d modules; this takes up to a minute, once on a machine", len(files))
        yield
        done.touch()


def _note_use(path: Path) -> None:
    """Keeps `_delete_old` from it."""
    with suppress(OSError):  # it is another user's, who notes the uses of his own
        os.utime(path)


def _delete_old(folder: Path) -> None:
    """Deletes what was compiled from sources that nobody has run for a month: earlier versions. Others' files stay."""
    for path in folder.iterdir():
        with suppress(OSError):  # another process deletes, too, or it is another user's
            if _NAME.fullmatch(path.name) and time.time() - path.stat().st_mtime > _KEPT_SECONDS:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
