"""The public API: names, parameters and docstrings."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchkv
from torchkv import (
    Component,
    GraphGate,
    KVCache,
    KVError,
    KVLayout,
    KVProcessGroup,
    KVWork,
    Options,
    PrefixCache,
    State,
)

EMPTY = inspect.Parameter.empty
POSITIONAL, KEYWORD = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY

Expected = tuple[list[tuple[str, Any]], list[tuple[str, Any]]]  # positional, keyword-only: (name, default)

VERBS: dict[str, Expected] = {
    "recv_pages": (
        [("request", EMPTY), ("pages", EMPTY), ("src", EMPTY)],
        [("prefix_tokens", 0), ("state_slot", None), ("timeout", None)],
    ),
    "send_layer": (
        [("request", EMPTY), ("layer", EMPTY), ("pages", EMPTY), ("dst", EMPTY)],
        [("start", 0), ("event", None), ("origin", "prefix")],
    ),
    "send_slice": (
        [("request", EMPTY), ("layers", EMPTY), ("pages", EMPTY), ("dst", EMPTY)],
        [("start", 0), ("event", None), ("origin", "prefix")],
    ),
    "staged_put": (
        [("request", EMPTY), ("layers", EMPTY), ("pages", EMPTY), ("dst", EMPTY)],
        [("start", 0), ("event", None), ("origin", "prefix")],
    ),
    "send_pages": (
        [("request", EMPTY), ("pages", EMPTY), ("dst", EMPTY)],
        [("layers", None), ("start", 0), ("event", None), ("origin", "prefix")],
    ),
    "send_state": (
        [("request", EMPTY), ("layer", EMPTY), ("state_slot", EMPTY), ("dst", EMPTY)],
        [("event", None)],
    ),
    "finish": ([("request", EMPTY), ("dst", EMPTY)], [("aux", b""), ("state_slot", None)]),
    "prefix_tokens": ([("request", EMPTY), ("dst", EMPTY)], []),
    "granted": ([("request", EMPTY), ("dst", EMPTY)], []),
    "refuse": ([("request", EMPTY), ("src", EMPTY)], []),
    "withdraw": ([("request", EMPTY)], []),
    "cancel": ([("request", EMPTY)], [("decline", False)]),
    "explain": ([("peer", EMPTY)], []),
    "quarantined": ([], [("slots", False), ("layer_group", None)]),
    "stats": ([], []),
    "dump": ([("folder", None)], []),
    "register": ([("cache", EMPTY), ("instance", None)], []),
}

ERRORS = {
    "LayoutMismatch": ValueError,
    "PageOutOfRange": ValueError,
    "PeerLost": ConnectionError,
    "TransferTimeout": TimeoutError,
    "TransferCancelled": KVError,
    "RingExhausted": KVError,
    "ChecksumMismatch": KVError,
    "AuthError": KVError,
    "ProtocolError": ValueError,
    "TransportUnavailable": KVError,
}

OPTIONS = {
    "transport": "auto",
    "path": None,
    "timeout": 30.0,
    "grant_timeout": 300.0,
    "heartbeat": 1.0,
    "staging_send": 128 << 20,
    "staging_recv": 256 << 20,
    "sm_budget": 16,
    "copy_threads": None,
    "checksum": False,
    "require": None,
    "min_gbps": None,
    "flight_recorder": None,
    "dump_dir": None,
    "metrics_port": None,
    "nvtx": False,
}


def parameters(function: Callable[..., Any], kind: Any) -> list[tuple[str, Any]]:
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.default) for p in found if p.kind is kind and p.name not in {"self", "cls"}]


def test_all_is_sorted_complete_and_documented() -> None:
    assert torchkv.__all__ == sorted(torchkv.__all__)
    assert len(set(torchkv.__all__)) == len(torchkv.__all__)
    for name in torchkv.__all__:
        thing = getattr(torchkv, name)
        assert inspect.getdoc(thing), f"torchkv.{name} has no docstring"
        assert thing.__module__.startswith("torchkv."), name


def test_nothing_else_is_public() -> None:
    public = {name for name in vars(torchkv) if not name.startswith("_")}
    modules = {name for name in public if inspect.ismodule(getattr(torchkv, name))}
    assert public - modules - set(torchkv.__all__) <= {"register_backend", "Any", "TYPE_CHECKING"}


def test_importing_costs_little_and_loads_no_compiler() -> None:
    code = (
        "import sys, torch.distributed; before = set(sys.modules); import torchkv\n"
        "torchkv.KVLayout, torchkv.Options, torchkv.Component\n"
        "print(sorted({name.partition('.')[0] for name in set(sys.modules) - before}))\n"
        "torchkv.join; print('numba' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded, later = done.stdout.splitlines()
    assert not {"numba", "llvmlite", "zmq", "triton", "ucxx"} & set(ast.literal_eval(loaded)), loaded
    assert later == "True"


def test_what_is_imported_on_first_use_is_what_type_checkers_see() -> None:
    tree = ast.parse(Path(torchkv.__file__).read_text(encoding="utf-8"))
    (guarded,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in guarded.body if isinstance(node, ast.ImportFrom)]
    assert {alias.name: node.module for node in imports for alias in node.names} == torchkv._HOMES
    assert set(torchkv._HOMES) <= set(dir(torchkv))
    for name in torchkv.__all__:
        assert getattr(torchkv, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = torchkv.nothing


@pytest.mark.parametrize("verb", VERBS)
def test_verbs_are_methods_and_functions_with_the_contract_s_parameters(verb: str) -> None:
    positional, keyword = VERBS[verb]
    method, function = getattr(KVProcessGroup, verb), getattr(torchkv, verb)
    assert parameters(method, POSITIONAL) == positional
    assert parameters(method, KEYWORD) == keyword
    assert parameters(function, POSITIONAL) == positional
    assert parameters(function, KEYWORD) == [*keyword, ("group", None)]
    assert inspect.getdoc(method)


def test_join_has_the_contract_s_parameters() -> None:
    assert parameters(torchkv.join, POSITIONAL) == [("cache", EMPTY), ("instance", EMPTY)]
    assert parameters(torchkv.join, KEYWORD) == [("group", None), ("options", None), ("store", None)]
    for verb in VERBS:
        assert verb == "register" or hasattr(torchkv.KVMember, verb)


@pytest.mark.parametrize(("name", "mixed_in"), ERRORS.items())
def test_errors_are_kv_errors(name: str, mixed_in: type) -> None:
    cls = getattr(torchkv, name)
    assert issubclass(cls, KVError)
    assert issubclass(cls, mixed_in)
    assert issubclass(cls, dist.DistBackendError)
    error = cls("what")
    assert str(error) == "what"
    assert isinstance(error.retryable, bool)
    assert error.pages_safe is True


def test_pages_safe_is_evaluated_when_read() -> None:
    safe = [False]
    error = torchkv.PeerLost("gone", pages_safe=lambda: safe[0])
    assert error.pages_safe is False
    safe[0] = True
    assert error.pages_safe is True


def test_options_have_the_contract_s_fields_and_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OPTIONS:
        monkeypatch.delenv(f"TORCHKV_{name.upper()}", raising=False)
    made = Options()
    assert {f.name: getattr(made, f.name) for f in dataclasses.fields(made)} == OPTIONS
    assert all(p.kind is KEYWORD for p in inspect.signature(Options).parameters.values())


def test_layouts_take_the_contract_s_parameters() -> None:
    shared = ["order", "tp_rank", "tp_size", "layers", "states", "windows"]
    assert set(inspect.signature(KVLayout.gqa).parameters) == {
        *("num_layers", "num_kv_heads", "head_dim", "page_size", "dtype", "v_head_dim", "groups", "accept"),
        *shared,
    }
    assert set(inspect.signature(KVLayout.mla).parameters) == {
        *("num_layers", "latent_dim", "rope_dim", "page_size", "dtype", "groups", "accept"),
        *shared,
    }
    assert set(inspect.signature(KVLayout).parameters) == {"components", "num_layers", "page_size", *shared}
    assert list(inspect.signature(Component).parameters) == [
        "name",
        "heads",
        "dim",
        "dtype",
        "sharded",
        "layers",
        "group",
        "accept",
    ]
    state = ["name", "shape", "dtype", "shard_dim", "shard_groups", "layers", "group"]
    assert list(inspect.signature(State).parameters) == state
    layout = KVLayout.gqa(num_layers=2, num_kv_heads=8, head_dim=4, page_size=16, dtype=torch.float16, tp_size=2)
    assert layout.heads == range(4)
    assert layout.page_shape("k") == (16, 4, 4)
    assert layout.page_nbytes("k") == 16 * 4 * 4 * 2


def test_caches_take_the_contract_s_parameters() -> None:
    assert [name for name, _ in parameters(KVCache.__init__, POSITIONAL)] == ["layout", "tensors"]
    assert parameters(KVCache.__init__, KEYWORD) == [("states", None), ("num_pages", None), ("scales", None)]
    found = inspect.signature(KVCache.empty).parameters
    assert list(found) == ["layout", "num_pages", "device", "num_slots", "group", "scales"]
    assert [p.default for p in found.values()] == [EMPTY, EMPTY, "cuda", 0, None, None]


def test_prefix_caches_take_these_parameters() -> None:
    assert parameters(PrefixCache.__init__, POSITIONAL) == [("num_pages", EMPTY), ("page_size", EMPTY)]
    assert parameters(PrefixCache.__init__, KEYWORD) == [("align", None), ("window", None)]
    for name, expected in {
        "match": [("tokens", EMPTY)],
        "allocate": [("held", EMPTY), ("num_pages", EMPTY)],
        "insert": [("held", EMPTY), ("tokens", EMPTY)],
        "release": [("held", EMPTY), ("error", None)],
    }.items():
        assert parameters(getattr(PrefixCache, name), POSITIONAL) == expected
        assert inspect.getdoc(getattr(PrefixCache, name))


def test_pipeline_takes_these_parameters() -> None:
    names = ["model", "kv", "request", "pages", "dst"]
    assert parameters(torchkv.pipeline, POSITIONAL) == [(name, EMPTY) for name in names]
    assert parameters(torchkv.pipeline, KEYWORD) == [
        *[
            ("layers", None),
            ("start", 0),
            ("origin", "prefix"),
            ("state_slot", None),
            ("group_size", None),
            ("policy", None),
        ],
        *[("tokens", None), ("events", None)],
    ]


def test_work_has_c10d_s_methods_and_ours() -> None:
    assert issubclass(KVWork, dist.Work)
    for name in ("wait", "is_completed", "exception", "get_future", "wait_source", "wait_stream", "wait_layer", "path"):
        assert name in vars(KVWork), f"KVWork.{name} is inherited or missing"
    work = KVWork("test")
    assert (work.bytes, work.path, work.aux) == (0, "none", b"")
    assert work.seconds >= 0
    assert parameters(KVWork.wait_stream, POSITIONAL) == [("stream", None)]
    assert parameters(KVWork.wait_stream, KEYWORD) == [("layer", None)]


def test_graph_gates_take_the_contract_s_parameters() -> None:
    assert parameters(GraphGate.__init__, POSITIONAL) == [("num_layers", EMPTY), ("device", None)]
    assert parameters(GraphGate.mark, POSITIONAL) == [("layer", EMPTY)]
    assert parameters(GraphGate.arm, POSITIONAL) == []
    with pytest.raises(torchkv.ProtocolError):
        GraphGate(0)


def test_the_group_is_a_process_group_and_overrides_what_crashes() -> None:
    assert issubclass(KVProcessGroup, dist.ProcessGroup)
    assert "new_group" not in vars(KVProcessGroup)
    assert "split_group" in vars(KVProcessGroup)
    # Inherited collectives hang, as the pybind trampoline keeps the GIL. So each must be forwarded in Python.
    for name in ("allreduce", "broadcast", "send", "recv", "barrier", "allgather", "alltoall_base", "reduce_scatter"):
        assert name in vars(KVProcessGroup), name


def test_importing_registers_the_backend_once_and_loads_no_transport() -> None:
    program = (
        "import sys, importlib, torchkv, torch.distributed as dist;"
        "assert dist.Backend.TORCHKV == 'torchkv';"
        "from torchkv.group.backend import register_backend; register_backend();"
        "loaded = [m for m in sys.modules if m.split('.')[0] in ('ucxx', 'libucx', 'torchkv_ucx', 'torchkv_loopback')];"
        "assert loaded == [], loaded"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=100)
