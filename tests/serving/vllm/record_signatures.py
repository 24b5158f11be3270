"""Writes `connector_signatures.json`: what the connector finds in each version of vLLM that torchkv supports.

``python -m tests.serving.vllm.record_signatures 0.33.0`` downloads that version's wheel (300 MB), reads some files of
it without running them, and adds what they say. Nothing but pip and a package index is needed.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

__all__ = ["CLASSES", "contract_of", "recorded"]

RECORDED = Path(__file__).with_name("connector_signatures.json")
BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
CLASSES = ("KVConnectorBase_V1", "SupportsHMA")
OUTPUT = "vllm/v1/core/sched/output.py"
ENVS = "vllm/envs.py"
OUTPUTS = ("SchedulerOutput", "NewRequestData", "CachedRequestData")
# File -> functions and classes of it that the connector needs.
NAMES = {
    BASE: ("KVConnectorMetadata", "KVConnectorHandshakeMetadata", "KVConnectorRole", "KVConnectorTransferResults"),
    "vllm/model_executor/models/utils.py": ("extract_layer_index",),
    "vllm/distributed/parallel_state.py": ("get_tensor_model_parallel_rank", "get_tp_group"),
}
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(17, 40)] + ["manylinux2014_x86_64", "manylinux1_x86_64"]


def recorded() -> dict[str, dict[str, Any]]:
    """Version -> what `contract_of` found in it."""
    found: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return found


def contract_of(source: str, *classes: str) -> dict[str, Any]:
    """Of the public methods of some classes of a file: the abstract ones, and the parameters of each as one text."""
    methods = [
        each
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name in classes
        for each in node.body
        if isinstance(each, ast.FunctionDef) and (not each.name.startswith("_") or each.name == "__init__")
    ]
    return {
        "abstract": sorted(each.name for each in methods if "abstractmethod" in map(_name, each.decorator_list)),
        "parameters": {each.name: _parameters(each.args) for each in methods},
    }


def fields_of(source: str) -> dict[str, list[str]]:
    """The annotated fields of the classes of a file."""
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return {node.name: [each.target.id for each in node.body if isinstance(each, ast.AnnAssign)] for node in classes}


def names_of(source: str) -> set[str]:
    """What a file defines or imports on its top level."""
    found = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found |= {each.asname or each.name for each in node.names}
    return found


def layouts_of(source: str) -> list[str]:
    """The names of layouts that a KV cache may have: those of VLLM_KV_CACHE_LAYOUT in ``envs.py``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "VLLM_KV_CACHE_LAYOUT":
            names = [each.value for each in ast.walk(node.annotation) if isinstance(each, ast.Constant)]
            return sorted(name for name in names if isinstance(name, str))
    return []


def _name(decorator: ast.expr) -> str:
    return ast.unparse(decorator).rpartition(".")[2]


def _parameters(given: ast.arguments) -> str:
    names = [each.arg for each in (*given.posonlyargs, *given.args)]
    if given.vararg is not None or given.kwonlyargs:
        names.append("*" + (given.vararg.arg if given.vararg is not None else ""))
    names += [each.arg for each in given.kwonlyargs]
    if given.kwarg is not None:
        names.append("**" + given.kwarg.arg)
    return ", ".join(names)


def _read(version: str) -> dict[str, Any]:
    """What is recorded of a version."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += [part for platform in PLATFORMS for part in ("--platform", platform)]
        subprocess.run([*command, "--python-version", "3.12", "-d", folder, f"vllm=={version}"], check=True)
        (wheel,) = Path(folder).glob("vllm-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            texts = {name: archive.read(name).decode() for name in (*NAMES, OUTPUT, ENVS)}
    missing = {name: sorted(set(names) - names_of(texts[name])) for name, names in NAMES.items()}
    return {
        **contract_of(texts[BASE], *CLASSES),
        "fields": {name: " ".join(fields) for name, fields in fields_of(texts[OUTPUT]).items() if name in OUTPUTS},
        "layouts": " ".join(layouts_of(texts[ENVS])),
        "missing": {name: names for name, names in missing.items() if names},
    }


def main(versions: list[str]) -> None:
    found = recorded() if RECORDED.exists() else {}
    for version in versions:
        found[version] = _read(version)
        ordered = {key: found[key] for key in sorted(found, key=lambda text: [int(part) for part in text.split(".")])}
        RECORDED.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
