"""torchkv as a transfer backend of SGLang: ``--disaggregation-transfer-backend torchkv``. See docs/integrations.md.

SGLang finds `register` by the entry point group ``sglang.srt.plugins``, and calls it in each of its processes. What it
does there costs nothing unless this backend is chosen.
"""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.disaggregation import utils as sglang_utils
from sglang.srt.disaggregation.base.conn import (
    BaseKVBootstrapServer,
    BaseKVManager,
    BaseKVReceiver,
    BaseKVSender,
    KVTransferMetric,
)
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.server_args import add_disagg_transfer_backend_choices

import torchkv
from torchkv.errors import LayoutMismatch, ProtocolError
from torchkv.integrations.bootstrap import AddressServer, Prefills, instance_name
from torchkv.integrations.sglang_memory import AuxRows, cache_of, dtype_of
from torchkv.integrations.sglang_requests import Receiver, Requests, Sender
from torchkv.options import Options

__all__ = ["TorchKVBootstrapServer", "TorchKVManager", "TorchKVReceiver", "TorchKVSender", "register"]

log = logging.getLogger(__name__)

NAME = "torchkv"
# Arguments of SGLang, and the only values of them that are supported.
ONLY = {
    "pp_size": 1,
    "dp_size": 1,
    "attn_dp_size": 1,
    "attn_cp_size": 1,
    "dcp_size": 1,
    "speculative_algorithm": None,
    "enable_kv_cache_sharding": False,
    "enable_hisparse": False,
    # These move or give away the memory of pages while others may write to them.
    "enable_memory_saver": False,
    "enable_unified_memory": False,
    "enable_pd_role_switch": False,
}


def register() -> None:
    """Makes the backend known to SGLang. Idempotent."""
    if NAME in sglang_utils.TransferBackend._value2member_map_:
        return
    add_disagg_transfer_backend_choices([NAME])
    _add_backend()
    HookRegistry.register("sglang.srt.disaggregation.utils.get_kv_class", _kv_class, HookType.AROUND)


def _add_backend() -> None:
    """SGLang's list of backends is an enumeration, which nothing but this can extend."""
    kind = sglang_utils.TransferBackend
    backend = object.__new__(kind)
    backend._name_, backend._value_ = NAME.upper(), NAME
    kind._member_names_.append(NAME.upper())
    kind._member_map_[NAME.upper()] = backend
    kind._value2member_map_[NAME] = backend


def _kv_class(original: Any, transfer_backend: Any, class_type: Any) -> Any:
    """Instead of SGLang's ``get_kv_class``."""
    classes = {
        "manager": TorchKVManager,
        "sender": TorchKVSender,
        "receiver": TorchKVReceiver,
        "bootstrap_server": TorchKVBootstrapServer,
    }
    if transfer_backend.value != NAME or class_type.value not in classes:
        return original(transfer_backend, class_type)
    return classes[class_type.value]


class AnyPrefill:
    """SGLang's table of prefill engines, by bootstrap address. Receivers themselves find them, and wait for them."""

    INFO = SimpleNamespace(dp_size=1, follow_bootstrap_room=True)

    def get(self, bootstrap_addr: str) -> Any:
        return self.INFO


class TorchKVManager(BaseKVManager):
    """This rank of an engine, as a rank of an instance of torchkv."""

    # SGLang then keeps the pages of a failed request until `is_abort_release_safe`.
    supports_deferred_decode_kv_release = True
    enable_deferred_decode_kv_release = True
    is_dummy_cp_rank = False
    enable_all_cp_ranks_for_transfer = False

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False
    ) -> None:
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.runtime_context import get_parallel

        check_supported(server_args)
        self.kv_args = args
        self.transfer_infos: dict[int, Any] = {}
        self.prefill_info_table = AnyPrefill()
        model, parallel = ModelConfig.from_server_args(server_args), get_parallel()
        is_prefill = disaggregation_mode.value == "prefill"
        if not is_prefill:
            keep_pages_until_safe()
        group = parallel.attn_tp_group.cpu_group if parallel.attn_tp_size > 1 else None
        cache = cache_of(
            args,
            dtype=dtype_of(args.kv_cache_dtype_str, model.dtype),
            total_heads=None if is_mla_backend else model.get_total_num_kv_heads(),
            tp_rank=parallel.attn_tp_rank,
            tp_size=parallel.attn_tp_size,
            device="cpu" if server_args.device == "cpu" else torch.device("cuda", torch.cuda.current_device()),
        )
        options = Options()
        name = instance_name(f"sglang-{disaggregation_mode.value}", group)
        self.kv = torchkv.join(cache, name, group=group, options=options)
        self.requests = Requests(
            self.kv,
            AuxRows(args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens),
            args.page_size,
            None if is_prefill else Prefills(self.kv, seconds=options.timeout),
        )
        self._bootstrap: tuple[str, int] = (server_args.host, server_args.disaggregation_bootstrap_port)
        self._server: AddressServer | None = None
        if is_prefill:
            self.register_to_bootstrap()

    def register_to_bootstrap(self) -> None:
        """The first rank of a prefill engine answers on the bootstrap port."""
        if self.kv.rank() == 0:
            self._server = AddressServer(*self._bootstrap, self.kv.address)

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        return True

    def is_abort_release_safe(self, room: int, required_acks: int) -> bool:
        """Whether SGLang may give the pages of a failed request to others. No deadline ever makes it so."""
        return self.requests.is_released(room)

    def clear_deferred_abort_state(self, room: int) -> None:
        """Nothing is kept beside the receiver."""


class TorchKVSender(Sender, BaseKVSender):
    """A request of a prefill engine."""

    def get_transfer_metric(self) -> Any:
        return KVTransferMetric(transfer_latency_s=self.seconds, transfer_total_bytes=self.nbytes or None)


class TorchKVReceiver(Receiver, BaseKVReceiver):
    """A request of a decode engine."""


class TorchKVBootstrapServer(BaseKVBootstrapServer):
    """Nothing: the bootstrap port is served by who is to be found there, see `TorchKVManager.register_to_bootstrap`."""

    def __init__(self, host: str, port: int) -> None:
        log.debug("the first rank of this engine answers at %s:%d", host, port)


# ---------------------------------------------------------------------- what the manager needs


def check_supported(server_args: Any) -> None:
    """Raises ``LayoutMismatch`` for what torchkv cannot move, or cannot move safely."""
    for name, supported in ONLY.items():
        if (value := getattr(server_args, name)) != supported:
            raise LayoutMismatch(f"torchkv's SGLang backend does not support {name}={value!r} yet")


def keep_pages_until_safe() -> None:
    """Has SGLang's decode engine hold the pages of a failed request for as long as torchkv says that it must.

    By itself it gives them away after 30 s (``SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT``), whoever may
    still write to them. Raises ``ProtocolError`` if this version of SGLang cannot be told so.
    """
    from sglang.srt.disaggregation.decode import DecodeTransferQueue

    def without_deadline(queue: Any, *args: Any, **kwargs: Any) -> None:
        for name, value in (("enable_deferred_kv_release", True), ("deferred_kv_release_timeout", math.inf)):
            if not hasattr(queue, name):
                raise ProtocolError(f"this version of SGLang has no DecodeTransferQueue.{name}; torchkv needs 0.5.23")
            setattr(queue, name, value)

    untouched = DecodeTransferQueue.pop_transferred
    HookRegistry.register(
        "sglang.srt.disaggregation.decode.DecodeTransferQueue.pop_transferred", without_deadline, HookType.BEFORE
    )
    HookRegistry.apply_hooks()
    if DecodeTransferQueue.pop_transferred is untouched:
        raise ProtocolError("SGLang did not apply torchkv's hook, without which it would give pages away too early")
