"""The connector against the vLLM that is installed: its base class, and what the connector refuses.

All versions that are supported: tests/unit/integrations/test_vllm_versions.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.serving.vllm.record_signatures import CLASSES, contract_of, recorded

pytestmark = [pytest.mark.serving, pytest.mark.timeout(300)]

# Run apart, because vLLM changes its process in many ways when it is imported.
PROGRAM = """
import inspect, json, sys
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base
before = "numba" in sys.modules
from torchkv.integrations.vllm import TorchKVConnector
from torchkv.errors import LayoutMismatch, ProtocolError
from torchkv.integrations import vllm as ours
from torchkv.integrations.vllm_specs import groups_of
from types import SimpleNamespace as N

def refusal(call):
    try:
        call()
    except (LayoutMismatch, ProtocolError) as error:
        return f"{type(error).__name__}: {error}"

def group(name, **fields):
    return N(kv_cache_spec=type(name, (), {"block_size": 16, **fields})(), layer_names=["layers.0"])

def groups(*found, tp_size=1):
    made = groups_of(found, lambda name: int(name.rpartition(".")[2]), tp_size=tp_size, whole=list)
    return [each.name for each in made.all]

FULL, MAMBA = group("FullAttentionSpec"), group("MambaSpec", mamba_type="mamba1", shapes=(), dtypes=())

connector = object.__new__(TorchKVConnector)
connector._failed_blocks = set()
connector._worker = N(results=lambda finished: ours.Results({"a"}, {"b", "c"}, {"c": [4, 5]}))
old = [[sorted(part) for part in connector.get_finished(set())]]
old += [sorted(connector.get_block_ids_with_load_errors()) for _ in range(2)]
new = connector.get_transfer_results(set())
new = [sorted(part) for part in (new.finished_sending, new.finished_recving, new.failed_recving)]
new += [sorted(connector.get_block_ids_with_load_errors())]

print(json.dumps({
    "old": old,
    "new": new,
    "version": vllm.__version__,
    "missing": sorted(TorchKVConnector.__abstractmethods__),
    "source": inspect.getsource(base),
    "numba": "numba" in sys.modules and not before,
    "full": groups(FULL),
    "hybrid": groups(FULL, group("SlidingWindowSpec", sliding_window=64), MAMBA),
    "unknown": refusal(lambda: groups(FULL, group("CircularBufferSpec"))),
    "unlike": refusal(lambda: groups(FULL, group("FullAttentionSpec", block_size=32))),
    "states": refusal(lambda: groups(MAMBA)),
    "shared": refusal(lambda: groups(FULL, MAMBA, tp_size=2)),
    "drafts": refusal(lambda: groups(FULL, group("MambaSpec", num_speculative_blocks=1))),
    "parallel": refusal(lambda: ours._check_parallel(N(pipeline_parallel_size=2))),
    "setting": refusal(lambda: ours._settings({"sendd": "layer"})),
    "send": refusal(lambda: ours._settings({"send": "page"})),
}))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_everything_abstract_is_implemented(found: dict[str, Any]) -> None:
    assert found["missing"] == [], f"vLLM {found['version']} wants more of a connector"


def test_the_base_class_is_as_it_was_recorded(found: dict[str, Any]) -> None:
    here, known = contract_of(found["source"], *CLASSES), recorded()[found["version"]]
    assert here == {name: known[name] for name in here}


def test_importing_the_connector_loads_no_numba(found: dict[str, Any]) -> None:
    """vLLM's CPU worker fails to start in a process that has loaded it."""
    assert found["numba"] is False


def test_failures_are_told_as_this_and_as_older_versions_want_it(found: dict[str, Any]) -> None:
    """By request; or, in vLLM 0.26, by block, once."""
    assert found["new"] == [["a"], ["b", "c"], ["c"], []]
    assert found["old"] == [[["a"], ["b", "c"]], [4, 5], []]


def test_what_is_not_supported_is_refused_by_name(found: dict[str, Any]) -> None:
    assert found["full"] == [None]
    assert found["hybrid"] == ["g0", "g1", "g2"]
    assert "FullAttentionSpec, CircularBufferSpec" in found["unknown"]
    assert "[16, 32] tokens" in found["unlike"]
    assert "MambaSpec" in found["states"]
    assert "'mamba1'; use tensor_parallel_size=1, not 2" in found["shared"]
    assert "speculative" in found["drafts"]
    assert "pipeline_parallel_size=2" in found["parallel"]
    assert "'sendd'" in found["setting"]
    assert "send='page'" in found["send"]
