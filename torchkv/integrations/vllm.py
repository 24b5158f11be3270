"""`TorchKVConnector`: vLLM's KV connector over torchkv, for engines that prefill and engines that decode.

vLLM finds it with ``--kv-transfer-config '{"kv_connector": "TorchKVConnector", "kv_connector_module_path":
"torchkv.integrations.vllm", "kv_role": "kv_producer", "kv_connector_extra_config": {...}}'``. See docs/integrations.md.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base

import torchkv
from torchkv.errors import LayoutMismatch, ProtocolError
from torchkv.integrations.layer_groups import cache_of
from torchkv.integrations.steps import Step
from torchkv.integrations.vllm_scheduler import SchedulerSide
from torchkv.integrations.vllm_specs import Shapes, groups_of
from torchkv.integrations.worker import Results, WorkerSide
from torchkv.options import Options

if TYPE_CHECKING:
    import torch

__all__ = ["TorchKVConnector"]

SEND = ("layer", "request")


@dataclass(frozen=True)
class Metadata(base.KVConnectorMetadata):
    """A step, as vLLM carries it to the workers."""

    step: Step


@dataclass(frozen=True)
class Handshake(base.KVConnectorHandshakeMetadata):
    """Where the workers of this engine can be reached."""

    address: str


class TorchKVConnector(base.KVConnectorBase_V1, base.SupportsHMA):
    """One of the two parts of a connector, which share nothing: the scheduler's, or that of one worker.

    Models may have a list of blocks for each group of layers: full attention, sliding windows, states. Others are
    refused: ``LayoutMismatch``.
    """

    def __init__(self, vllm_config: Any, role: base.KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = _settings(self._kv_transfer_config.kv_connector_extra_config)
        self._send = settings.pop("send")
        self._instance = settings.pop("instance") or self._kv_transfer_config.engine_id
        self._options = settings
        _check_parallel(vllm_config.parallel_config)
        self._tp_size: int = vllm_config.parallel_config.tensor_parallel_size
        from vllm.model_executor.models.utils import extract_layer_index  # which loads much of vLLM

        self._layer_of = extract_layer_index
        self._groups = groups_of(
            kv_cache_config.kv_cache_groups,
            self._layer_of,
            tp_size=self._tp_size,
            whole=lambda: _whole_states(vllm_config),
        )
        if self._groups.hybrid and not hasattr(base.KVConnectorBase_V1, "bind_kv_cache_manager"):
            raise LayoutMismatch("this vLLM does not tell connectors a request's block lists; use 0.30 for this model")
        self._worker: WorkerSide | None = None
        self._failed_blocks: set[int] = set()
        self._scheduler: SchedulerSide | None = None
        if role == base.KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(self._groups, instance=self._instance, tp_size=self._tp_size)

    # ------------------------------------------------------------------ what vLLM asks of the class

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Heads outside tokens, so that unlike TP sizes move long runs. By the name that all versions know."""
        return "HND"

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """In a full graph no layer says that it is computed."""
        return bool(extra_config.get("send", "layer") == "layer")

    # ------------------------------------------------------------------ worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tp_group

        layers = {name: self._layer_of(name) for name in kv_caches}
        if len(set(layers.values())) < len(layers):
            raise LayoutMismatch(f"several KV caches for one layer are not supported yet: {sorted(layers)}")
        model = self._vllm_config.model_config
        tensors = {layer: kv_caches[name] for name, layer in layers.items()}
        cache = cache_of(
            tensors,
            self._groups.all,
            page_size=self._groups.page_size,
            num_layers=model.get_total_num_hidden_layers(),
            total_heads=model.get_total_num_kv_heads(),
            tp_rank=get_tensor_model_parallel_rank(),
            tp_size=self._tp_size,
        )
        group = get_tp_group().cpu_group if self._tp_size > 1 else None
        kv = torchkv.join(cache, self._instance, group=group, options=Options(**self._options))
        by_layer = self._send == "layer" and not self._groups.hybrid
        self._worker = WorkerSide(kv, cache.layout, layers=layers, by_layer=by_layer)

    def get_handshake_metadata(self) -> base.KVConnectorHandshakeMetadata | None:
        return None if self._worker is None else Handshake(self._worker.kv.address)

    def handle_preemptions(self, kv_connector_metadata: base.KVConnectorMetadata) -> None:
        assert self._worker is not None
        self._worker.before_blocks_change(_step(kv_connector_metadata))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self._worker is not None
        self._worker.load(_step(self._get_connector_metadata()))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request is scheduled once all of it was received."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        assert self._worker is not None
        self._worker.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """For older vLLM, such as 0.26, which asks for the blocks of failed receives apart."""
        results = self._results(finished_req_ids)
        for pages in results.failed.values():
            self._failed_blocks.update(pages)
        return results.sent or None, results.received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = self._results(finished_req_ids)
        return base.KVConnectorTransferResults(
            finished_sending=results.sent, finished_recving=results.received, failed_recving=set(results.failed)
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def _results(self, finished: set[str]) -> Results:
        assert self._worker is not None
        return self._worker.results(finished)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.kv.close()
            self._worker = None

    # ------------------------------------------------------------------ scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, base.KVConnectorHandshakeMetadata]) -> None:
        first = metadata[0]
        assert isinstance(first, Handshake)
        host, _, port = first.address.removeprefix("tcp://").rpartition(":")
        self._side.endpoint = host, int(port)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._side.blocks_of = kv_cache_manager.get_block_ids

    def on_new_request(self, request: Any) -> None:
        self._side.shorten(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._side.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._side.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> base.KVConnectorMetadata:
        return Metadata(self._side.build(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        self._side.received(connector_output.finished_recving or ())

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._side.finished(request)

    def has_pending_push_work(self) -> bool:
        return self._side.busy

    @property
    def _side(self) -> SchedulerSide:
        assert self._scheduler is not None
        return self._scheduler


def _step(metadata: base.KVConnectorMetadata) -> Step:
    assert isinstance(metadata, Metadata)
    return metadata.step


def _settings(extra: Mapping[str, Any]) -> dict[str, Any]:
    """``kv_connector_extra_config``, with defaults. Raises ``ProtocolError`` for what is not known."""
    known = {"instance", "send", *(field.name for field in fields(Options))} - {"min_gbps"}
    if unknown := sorted(set(extra) - known):
        raise ProtocolError(f"kv_connector_extra_config has {unknown}; torchkv knows {sorted(known)}")
    settings = {"instance": None, "send": "layer", **extra}
    if settings["send"] not in SEND:
        raise ProtocolError(f"kv_connector_extra_config: send={settings['send']!r} is not one of {SEND}")
    return settings


def _whole_states(vllm_config: Any) -> Shapes:
    """The shapes of a layer's states if this engine had one rank."""
    from vllm.model_executor.models import ModelRegistry

    model, single = vllm_config.model_config, copy.copy(vllm_config)
    single.parallel_config = copy.copy(vllm_config.parallel_config)
    single.parallel_config.tensor_parallel_size = 1
    found, _ = ModelRegistry.resolve_model_cls(model.architecture, model_config=model)
    shapes: Shapes = found.get_mamba_state_shape_from_config(single)
    return shapes


def _check_parallel(parallel: Any) -> None:
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise LayoutMismatch(f"torchkv's vLLM connector does not support {name}={getattr(parallel, name)} yet")
