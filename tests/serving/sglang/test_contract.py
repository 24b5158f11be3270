"""The backend against the SGLang that is installed: what it must implement, with which parameters; what it hooks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.serving.sglang.engines import ENVIRONMENT

pytestmark = [pytest.mark.serving, pytest.mark.timeout(300)]

# Run apart, because SGLang changes its process in many ways when it is imported.
PROGRAM = """
import inspect, json, math, sys
import sglang
from sglang.srt.disaggregation.base import conn
from sglang.srt.disaggregation.decode import DecodeTransferQueue
from sglang.srt.disaggregation.utils import KVClassType, TransferBackend
from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES
from sglang.srt.disaggregation import utils
from sglang.srt.server_args import ServerArgs
from sglang.srt.plugins import load_plugins
from types import SimpleNamespace as N
before = "numba" in sys.modules
load_plugins()
from torchkv.errors import LayoutMismatch
from torchkv.integrations import sglang as ours, sglang_requests

PAIRS = {
    "manager": (conn.BaseKVManager, ours.TorchKVManager),
    "sender": (conn.BaseKVSender, ours.TorchKVSender),
    "receiver": (conn.BaseKVReceiver, ours.TorchKVReceiver),
    "bootstrap_server": (conn.BaseKVBootstrapServer, ours.TorchKVBootstrapServer),
}

def parameters(cls):
    found = {}
    for name, value in inspect.getmembers(cls):
        function = getattr(value, "__func__", value)
        if inspect.isfunction(function) and (not name.startswith("_") or name == "__init__"):
            found[name] = [p.name for p in inspect.signature(function).parameters.values()]
    return found

def refusal(**changed):
    try:
        ours.check_supported(N(**{**ours.ONLY, **changed}))
    except LayoutMismatch as error:
        return str(error)

backend = TransferBackend("torchkv")
queue = object.__new__(DecodeTransferQueue)
queue.queue, queue.enable_deferred_kv_release, queue.deferred_kv_release_timeout = [], False, 30.0
untouched = queue.pop_transferred(), queue.deferred_kv_release_timeout
ours.keep_pages_until_safe()
hooked = queue.pop_transferred(), queue.enable_deferred_kv_release, math.isinf(queue.deferred_kv_release_timeout)
del queue.deferred_kv_release_timeout
try:
    missing = queue.pop_transferred()
except Exception as error:
    missing = type(error).__name__

print(json.dumps({
    "version": sglang.__version__,
    "abstract": {name: sorted(base.__abstractmethods__) for name, (base, _) in PAIRS.items()},
    "missing": {name: sorted(mine.__abstractmethods__) for name, (_, mine) in PAIRS.items()},
    "base": {name: parameters(base) for name, (base, _) in PAIRS.items()},
    "ours": {name: parameters(mine) for name, (_, mine) in PAIRS.items()},
    "found": {name: utils.get_kv_class(backend, KVClassType(name)).__name__ for name in PAIRS},
    "kvargs": utils.get_kv_class(backend, KVClassType.KVARGS) is conn.KVArgs,
    "others": utils.get_kv_class(TransferBackend.FAKE, KVClassType.SENDER).__name__,
    "choices": list(DISAGG_TRANSFER_BACKEND_CHOICES),
    "again": (ours.register(), TransferBackend("torchkv") is backend)[1],
    "polls": [getattr(sglang_requests, name) for name in ("FAILED", "BOOTSTRAPPING", "WAITING", "TRANSFERRING", "SUCCESS")],
    "theirs": [getattr(conn.KVPoll, name) for name in ("Failed", "Bootstrapping", "WaitingForInput", "Transferring", "Success")],
    "arguments": [name for name in ours.ONLY if name not in {f for t in ServerArgs.__mro__ for f in getattr(t, "__annotations__", ())} and not hasattr(ServerArgs, name)],
    "kv_args": [name for name in ("num_draft_entries", "kv_layout", "kv_layer_ids", "state_types", "kv_cache_dtype_str", "page_size") if name not in conn.KVArgs.__annotations__],
    "numba": "numba" in sys.modules and not before,
    "untouched": untouched, "hooked": hooked, "without": missing,
    "plain": refusal(), "pipeline": refusal(pp_size=2), "saver": refusal(enable_memory_saver=True),
}))
"""  # noqa: E501

# What this backend was written against. A method that is missing here is new in the SGLang that is installed.
ABSTRACT = {
    "manager": ["__init__", "register_to_bootstrap"],
    "sender": ["__init__", "failure_exception", "get_transfer_metric", "init", "poll", "send"],
    "receiver": ["__init__", "failure_exception", "init", "poll", "send_metadata"],
    "bootstrap_server": ["__init__"],
}
# Base methods that are left as they are: what they are for is not supported.
LEFT = {
    "manager": {"should_verify_kv_checksum", "teardown"},
    "sender": {"get_max_transfer_tokens", "mark_prefill_complete"},
    "receiver": set(),
    "bootstrap_server": set(),
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_everything_abstract_is_implemented(found: dict[str, Any]) -> None:
    assert not any(found["missing"].values()), f"SGLang {found['version']} wants more: {found['missing']}"
    assert found["abstract"] == ABSTRACT, f"SGLang {found['version']} has other abstract methods"


@pytest.mark.parametrize("kind", ABSTRACT)
def test_parameters_are_those_of_the_base_class(found: dict[str, Any], kind: str) -> None:
    base, ours = found["base"][kind], found["ours"][kind]
    unlike = {name: (ours[name], base[name]) for name in base if ours[name] != base[name]}
    assert unlike == {}, f"ours, and those of SGLang {found['version']}"
    assert LEFT[kind] <= base.keys()


def test_sglang_finds_the_backend_and_still_finds_the_others(found: dict[str, Any]) -> None:
    assert found["found"] == {
        "manager": "TorchKVManager",
        "sender": "TorchKVSender",
        "receiver": "TorchKVReceiver",
        "bootstrap_server": "TorchKVBootstrapServer",
    }
    assert found["kvargs"]
    assert found["others"] == "FakeKVSender"
    assert "torchkv" in found["choices"]
    assert found["choices"].count("torchkv") == 1
    assert found["again"]


def test_what_polls_return_is_what_sglang_means(found: dict[str, Any]) -> None:
    assert found["polls"] == found["theirs"]


def test_arguments_that_are_looked_at_exist(found: dict[str, Any]) -> None:
    assert found["arguments"] == []
    assert found["kv_args"] == []


def test_the_plug_in_loads_no_numba(found: dict[str, Any]) -> None:
    """SGLang calls it in processes that have nothing to do with torchkv."""
    assert found["numba"] is False


def test_no_deadline_gives_pages_away(found: dict[str, Any]) -> None:
    """Nor does switching off what holds them; an SGLang without either is not run with."""
    assert found["untouched"] == [[], 30.0]
    assert found["hooked"] == [[], True, True]
    assert found["without"] == "ProtocolError"


def test_what_is_not_supported_is_refused_by_name(found: dict[str, Any]) -> None:
    assert found["plain"] is None
    assert "pp_size=2" in found["pipeline"]
    assert "enable_memory_saver=True" in found["saver"]
