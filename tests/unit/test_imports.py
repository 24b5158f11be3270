"""Which module may import which: arrows point one way, pure modules do no I/O, backends stay behind the interface."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "torchkv"
BACKENDS = ROOT / "backends"

# May not touch threads, sockets, files, clocks or processes; what they may import from torchkv is as pure.
PURE = [
    *("component", "cost", "coverage", "descriptors", "layout", "layout_codec", "plan", "ranges", "roster"),
    *("slab", "slabgeometry", "stateplan", "wire", "pieces", "groupsize"),
    *("actions", "instance", "leases", "life", "receive", "receiver", "sender", "session"),
    *("staging", "stageclient", "stagekeeper", "prefixindex"),
]
IMPURE_LIBRARIES = {
    *("asyncio", "ctypes", "fcntl", "mmap", "multiprocessing", "os", "pathlib", "selectors", "shutil", "signal"),
    *("socket", "subprocess", "tempfile", "threading", "time", "zmq", "ucxx", "pickle", "io", "random"),
}
# transport.py is the interface: types and discovery. Pure modules take its array type from it.
PURE_OR_TYPES = {*PURE, "errors", "transport", "protocol", "compiled"}

BACKEND_MAY_IMPORT = {
    f"torchkv.{name}"
    for name in (
        *("transport", "errors", "env", "network", "compiled"),
        *("hostmem", "hostcopy", "cudadriver", "devicemem", "flags", "processes", "spans", "blob"),
    )
}

# Lowest first: a module imports only from lower layers, or from its own.
LAYERS = [
    {"errors", "ranges", "slab", "coverage", "compiled", "cudadriver", "staging", "weak"},
    {"env", "component", "hostmem", "hostcopy", "layout_codec", "layout", "descriptors", "transport", "idle"},
    {"stateplan"},
    {"plan"},
    {"checksum", "pieces", "prefixindex"},
    {"prefixcache"},
    {"cost"},
    {"devicemem", "flags", "events", "gate", "slabgeometry", "copyengine", "processes", "spans", "blob", "stagememory"},
    {"pagecopy", "copyreference", "variants", "kernellaunch", "kernels", "pagesum", "sumlaunch"},
    {"wire", "cache", "roster", "work", "network", "devicepages", "uploads", "hostlane", "streams"},
    {"actions", "session", "instance", "life", "receive", "leases"},
    {"sender", "receiver", "device", "stageclient", "stagekeeper"},
    {"card", "route", "arguments", "transfer", "control", "jobs", "offsets"},
    {"copytransfer", "hostpack", "devicepack", "kerneltransfer", "puttransfer"},
    {"packer", "devicepacker", "stagedtransfer", "unstager", "talk"},
    {"mover"},
    {"engine"},
    {"probe", "registration", "progress", "endpoint", "explain"},
    {"process_group", "groupsize", "decoderlayers"},
    {"functional", "passclock", "layerevents"},
    {"pipeline"},
]


def modules(root: Path) -> dict[str, Path]:
    """Dotted name -> file."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent if root == PACKAGE else root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


OURS = modules(PACKAGE)
THEIRS = modules(BACKENDS)


def imports(path: Path, *, everywhere: bool = False) -> set[str]:
    """Modules that a file imports when it is loaded; with ``everywhere`` also inside functions and TYPE_CHECKING."""
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
    return found


def leaf(name: str) -> str:
    return name.rpartition(".")[2]


def test_the_scan_sees_what_there_is() -> None:
    assert "torchkv.layout" in imports(OURS["torchkv.plan"])
    assert "torchkv.engine" in imports(OURS["torchkv.explain"], everywhere=True)
    assert "torchkv.engine" not in imports(OURS["torchkv.explain"])
    assert "torchkv_ucx" in THEIRS
    assert len(OURS) > 20


def test_pure_modules_do_no_input_or_output() -> None:
    found = {leaf(name): path for name, path in OURS.items()}
    for name in PURE:
        for imported in imports(found[name], everywhere=True):
            assert imported.partition(".")[0] not in IMPURE_LIBRARIES, f"{name} imports {imported}"
            if imported.startswith("torchkv"):
                assert leaf(imported) in PURE_OR_TYPES, f"pure module {name} imports {imported}"


def test_nothing_in_torchkv_imports_a_backend() -> None:
    packages = {name.partition(".")[0] for name in THEIRS}
    assert packages
    for name, path in OURS.items():
        # The bench measures UCX by itself too, for comparison.
        libraries = set() if name.startswith("torchkv.bench") else {"ucxx", "libucx", "nvshmem"}
        for imported in imports(path, everywhere=True):
            assert imported.partition(".")[0] not in packages | libraries, f"{name} imports {imported}"


def test_backends_import_only_the_interface_and_what_it_names() -> None:
    for name, path in THEIRS.items():
        own = name.partition(".")[0]
        for imported in imports(path, everywhere=True):
            top = imported.partition(".")[0]
            if top == "torchkv":
                allowed = imported in BACKEND_MAY_IMPORT or (imported == "torchkv")
                assert allowed, f"{name} imports {imported}"
            else:
                assert not top.startswith("torchkv_") or top == own, f"{name} imports another backend: {imported}"


def test_arrows_point_one_way() -> None:
    level = {name: number for number, names in enumerate(LAYERS) for name in names}
    for name, path in OURS.items():
        if leaf(name) not in level:
            continue
        for imported in imports(path, everywhere=True):
            if imported.startswith("torchkv.") and leaf(imported) in level:
                # Types that only annotations name may point up; nothing that runs may.
                runs = imported in imports(path)
                above = level[leaf(imported)] > level[leaf(name)]
                assert not (above and runs), f"{name} imports {imported}, which lies above it"


@pytest.mark.parametrize("graph", [OURS, THEIRS], ids=["torchkv", "backends"])
def test_no_cycles(graph: dict[str, Path]) -> None:
    edges = {name: {i for i in imports(path) if i in graph and i != name} for name, path in graph.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"cycle: {' -> '.join([*trail[trail.index(name) :], name])}"
        if name not in done:
            for other in sorted(edges[name]):
                visit(other, (*trail, name))
            done.add(name)

    for name in sorted(graph):
        if name != "torchkv":  # the package's own __init__ names everything; importing it is not a cycle
            visit(name, ())


def test_nothing_unpickles_or_evaluates() -> None:
    for name, path in {**OURS, **THEIRS}.items():
        for imported in imports(path, everywhere=True):
            assert imported.partition(".")[0] not in {"pickle", "marshal", "shelve", "cloudpickle", "dill"}, name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "exec", "compile"}, f"{name}:{node.lineno}"
            if isinstance(node, ast.Attribute):
                assert not node.attr.endswith("_object"), f"{name}:{node.lineno} uses {node.attr}"
