"""The connector against what each version of vLLM that is supported has, as `record_signatures` found it.

Nothing is imported: these are the sources. With the vLLM that is installed: tests/serving/vllm/test_contract.py.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from tests.serving.vllm.record_signatures import contract_of, recorded
from torchkv.integrations import vllm_scheduler

SUPPORTED = ["0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"]
ABSTRACT = [
    "build_connector_meta",
    "get_num_new_matched_tokens",
    "request_finished_all_groups",
    "save_kv_layer",
    "start_load_kv",
    "update_state_after_alloc",
    "wait_for_layer_load",
    "wait_for_save",
]
# Methods of ours that older versions do not call, and since when there are such.
SINCE = {"bind_kv_cache_manager": "0.30.0", "get_transfer_results": "0.30.0"}
# What the scheduler's side reads of vLLM's decisions.
FIELDS = {
    "SchedulerOutput": {
        "num_scheduled_tokens",
        "preempted_req_ids",
        "scheduled_cached_reqs",
        "scheduled_new_reqs",
    },
    "NewRequestData": {"block_ids", "num_computed_tokens", "req_id"},
    "CachedRequestData": {"new_block_ids", "num_computed_tokens", "req_ids", "resumed_req_ids"},
}

CONNECTOR = (Path(vllm_scheduler.__file__).parent / "vllm.py").read_text(encoding="utf-8")
OURS: dict[str, str] = contract_of(CONNECTOR, "TorchKVConnector")["parameters"]

Version = dict[str, Any]


@pytest.fixture(params=SUPPORTED)
def version(request: pytest.FixtureRequest) -> tuple[str, Version]:
    return request.param, recorded()[request.param]


def is_older(version: str, other: str) -> bool:
    return [int(part) for part in version.split(".")] < [int(part) for part in other.split(".")]


def test_all_versions_are_recorded() -> None:
    assert list(recorded()) == SUPPORTED


def test_everything_abstract_is_implemented(version: tuple[str, Version]) -> None:
    name, found = version
    assert found["abstract"] == ABSTRACT, f"vLLM {name} has other abstract methods"
    assert set(ABSTRACT) <= OURS.keys()


def test_parameters_are_those_of_the_base_class(version: tuple[str, Version]) -> None:
    name, found = version
    theirs = found["parameters"]
    missing = {method for method, since in SINCE.items() if is_older(name, since)}
    assert OURS.keys() - theirs.keys() == missing, f"vLLM {name} does not call these"
    unlike = {method: (ours, theirs[method]) for method, ours in OURS.items() if theirs.get(method, ours) != ours}
    assert unlike == {}, f"ours, and those of vLLM {name}"


def test_what_the_connector_reads_is_there(version: tuple[str, Version]) -> None:
    name, found = version
    for kind, fields in FIELDS.items():
        assert fields <= set(found["fields"][kind].split()), f"{kind} of vLLM {name} lacks some"
    # Only what `get_transfer_results` returns, which older versions do not call.
    older = is_older(name, SINCE["get_transfer_results"])
    assert [each for names in found["missing"].values() for each in names] == ["KVConnectorTransferResults"] * older


def test_the_layout_that_is_asked_for_has_a_name_in_every_version(version: tuple[str, Version]) -> None:
    name, found = version
    asked = next(
        node.value
        for method in ast.walk(ast.parse(CONNECTOR))
        if isinstance(method, ast.FunctionDef) and method.name == "get_required_kvcache_layout"
        for node in method.body
        if isinstance(node, ast.Return)
    )
    assert isinstance(asked, ast.Constant)
    assert asked.value in found["layouts"].split(), f"vLLM {name} knows {found['layouts']}"
