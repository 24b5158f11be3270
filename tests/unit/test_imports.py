"""Which module may import which: packages have floors, and imports go down only.

A room is a package of ``torchkv``, or a module beside them. The rules hold for every import, also inside functions and
under ``TYPE_CHECKING``, unless a test says otherwise.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "torchkv"
BACKENDS = ROOT / "backends"
TEMPLATE = ROOT / "examples" / "template_backend" / "torchkv_template.py"

# Lowest first. A room imports from rooms on lower floors, and from itself.
FLOORS = (
    {"arrays", "errors"},
    {"observe", "options", "transport"},
    {"host"},
    {"cuda", "layout", "prefix"},
    {"cache", "core", "kernels", "protocol"},
    {"control", "transfer"},
    {"staging"},
    {"engine"},
    {"group"},
    {"pipelining"},
    {"bench", "faultlab", "integrations", "testing", "trace"},
    {"doctor"},
    {"torchkv"},  # the package's own __init__: the public names
)

MAX_MODULES = 15  # in one folder
MAX_CHAIN = 18  # modules on the longest chain of imports, tools aside

# May not touch threads, sockets, files, clocks or processes, and import only rooms and modules that do not either.
PURE = {"arrays", "errors", "layout", "protocol"}
PURE_MODULES = {
    "torchkv.control.allowance",
    "torchkv.control.session",
    "torchkv.pipelining.group_size",
    "torchkv.prefix.tree",
    "torchkv.observe.histogram",
    "torchkv.observe.dump_format",
}
# Types and discovery; compiled code; both are free of I/O at run time.
PURE_ENOUGH = {"torchkv.transport.interface", "torchkv.host.jit"}
IMPURE_LIBRARIES = {
    *("asyncio", "ctypes", "fcntl", "mmap", "multiprocessing", "os", "pathlib", "selectors", "shutil", "signal"),
    *("socket", "subprocess", "tempfile", "threading", "time", "zmq", "ucxx", "pickle", "io", "random"),
}

BACKEND_MAY_IMPORT = {"arrays", "errors", "options", "transport", "host"}
BACKEND_MAY_IMPORT_MODULES = {"torchkv.cuda.driver", "torchkv.cuda.sync_words", "torchkv.cuda.ipc"}


def modules(root: Path) -> dict[str, Path]:
    """Dotted name -> file."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent if root == PACKAGE else root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


OURS = modules(PACKAGE)
THEIRS = {**modules(BACKENDS), "torchkv_template": TEMPLATE}


@cache
def imports(path: Path, *, everywhere: bool = True) -> frozenset[str]:
    """Modules that a file imports; without ``everywhere`` only those that are imported when it is loaded."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: set[str] = set()
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            found |= {full if (full := f"{module}.{a.name}") in OURS or full in THEIRS else module for a in node.names}
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not everywhere:
            pending += node.orelse
        elif everywhere or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending += ast.iter_child_nodes(node)
    return frozenset(found)


def room(name: str) -> str:
    """``torchkv.layout.codec`` -> ``layout``."""
    return name.split(".")[1] if "." in name else name


def is_ours(name: str) -> bool:
    return name.partition(".")[0] == "torchkv"


def test_the_scan_sees_what_there_is() -> None:
    assert "torchkv.layout.layout" in imports(OURS["torchkv.layout.pair_plan"])
    assert "torchkv.engine.engine" in imports(OURS["torchkv.group.explain"])
    assert "torchkv.engine.engine" not in imports(OURS["torchkv.group.explain"], everywhere=False)
    assert "torchkv_ucx" in THEIRS
    assert len(OURS) > 20


def upward(edges: Mapping[str, set[str]]) -> Iterator[str]:
    """Imports of a room that is not below."""
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    for name, imported in edges.items():
        for other in imported:
            if room(other) != room(name) and floor[room(other)] >= floor[room(name)]:
                yield f"{name} imports {other}, which is not below it"


def test_imports_go_down_only() -> None:
    named = {name for names in FLOORS for name in names}
    assert {room(name) for name in OURS} == named, "every package and module of torchkv/ has a floor"
    edges = {name: {i for i in imports(path) if is_ours(i) and i != "torchkv"} for name, path in OURS.items()}
    assert list(upward(edges)) == []


@pytest.mark.parametrize(
    ("name", "imported"),
    [
        ("torchkv.layout.layout", "torchkv.engine.engine"),
        ("torchkv.control.channel", "torchkv.transfer.base"),  # neighbours on a floor
        ("torchkv.group.verbs", "torchkv.pipelining.context"),
    ],
)
def test_an_upward_import_is_seen(name: str, imported: str) -> None:
    assert list(upward({name: {imported}}))
    assert not list(upward({imported: {"torchkv.errors"}}))


def circle(edges: Mapping[str, set[str]]) -> list[str]:
    """The modules of one circle of imports, or none."""
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> list[str]:
        if name in trail:
            return trail[trail.index(name) :]
        if name not in done:
            for other in sorted(edges.get(name, ())):
                if found := visit(other, [*trail, name]):
                    return found
            done.add(name)
        return []

    return next((found for name in sorted(edges) if (found := visit(name, []))), [])


@pytest.mark.parametrize("graph", [OURS, THEIRS], ids=["torchkv", "backends"])
def test_no_circles(graph: dict[str, Path]) -> None:
    # The package's own __init__ names everything; importing it is no circle.
    names = graph.keys() - {"torchkv"}
    edges = {name: {i for i in imports(graph[name]) if i in names and i != name} for name in names}
    assert circle(edges) == []


def test_a_circle_is_seen() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c"]


def test_chains_of_imports_are_short() -> None:
    """Whoever follows imports from the top to the bottom passes so many files at most."""
    names = OURS.keys() - {"torchkv"}
    edges = {name: {i for i in imports(OURS[name], everywhere=False) if i in names and i != name} for name in OURS}
    height: dict[str, int] = {}

    def measure(name: str) -> int:
        if name not in height:
            height[name] = 1 + max((measure(other) for other in edges[name]), default=0)
        return height[name]

    tools = {"bench", "doctor", "faultlab", "integrations", "testing", "trace"}
    assert max(measure(name) for name in OURS if room(name) not in tools) <= MAX_CHAIN


@pytest.mark.parametrize("root", [PACKAGE, BACKENDS], ids=["torchkv", "backends"])
def test_no_folder_is_crowded(root: Path) -> None:
    for folder in {path.parent for path in root.rglob("*.py")}:
        held = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(held) <= MAX_MODULES, f"{folder.relative_to(ROOT)} has {len(held)} modules"


def test_every_package_says_what_it_is_for() -> None:
    for path in OURS.values():
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{path} has no docstring"


def test_pure_modules_do_no_input_or_output() -> None:
    pure = {name for name in OURS if room(name) in PURE} | PURE_MODULES
    for name in pure:
        for imported in imports(OURS[name]):
            assert imported.partition(".")[0] not in IMPURE_LIBRARIES, f"{name} imports {imported}"
            if is_ours(imported):
                assert imported in pure | PURE_ENOUGH, f"pure module {name} imports {imported}"


def test_nothing_in_torchkv_imports_a_backend() -> None:
    packages = {name.partition(".")[0] for name in THEIRS}
    assert packages
    for name, path in OURS.items():
        # The bench measures UCX by itself too, for comparison.
        libraries = set() if name.startswith("torchkv.bench") else {"ucxx", "libucx", "nvshmem"}
        for imported in imports(path):
            assert imported.partition(".")[0] not in packages | libraries, f"{name} imports {imported}"


def test_nothing_imports_the_integrations() -> None:
    """Each needs an engine that users of torchkv need not have; and only the module of its name needs that engine."""
    engines = {name: f"torchkv.integrations.{name}" for name in ("vllm", "sglang", "transformers")}
    for name, path in {**OURS, **THEIRS}.items():
        for imported in imports(path):
            assert room(imported) != "integrations" or room(name) == "integrations", f"{name} imports {imported}"
            top = imported.partition(".")[0]
            assert top not in engines or name == engines[top], f"{name} imports {imported}"


def test_backends_import_only_the_interface_and_what_it_names() -> None:
    for name, path in THEIRS.items():
        own = name.partition(".")[0]
        for imported in imports(path):
            top = imported.partition(".")[0]
            if top == "torchkv":
                allowed = room(imported) in BACKEND_MAY_IMPORT or imported in BACKEND_MAY_IMPORT_MODULES
                assert allowed, f"{name} imports {imported}"
            else:
                assert not top.startswith("torchkv_") or top == own, f"{name} imports another backend: {imported}"


def test_nothing_unpickles_or_evaluates() -> None:
    for name, path in {**OURS, **THEIRS}.items():
        for imported in imports(path):
            assert imported.partition(".")[0] not in {"pickle", "marshal", "shelve", "cloudpickle", "dill"}, name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "exec", "compile"}, f"{name}:{node.lineno}"
            if isinstance(node, ast.Attribute):
                assert not node.attr.endswith("_object"), f"{name}:{node.lineno} uses {node.attr}"
