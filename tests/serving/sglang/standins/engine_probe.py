"""A plug-in of SGLang for tests: what its scheduler holds, and a way to stop it in the middle of a prompt."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    inside = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"
    HookRegistry.register(f"{inside}.get_internal_state", _tell, HookType.AFTER)
    queue = "sglang.srt.disaggregation.decode.DecodeTransferQueue"
    HookRegistry.register(f"{queue}._commit_transfer_to_req", _note, HookType.BEFORE)
    if "ENGINE_PROBE" in os.environ:
        sends = "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin"
        HookRegistry.register(f"{sends}.send_kv_chunk", _stop, HookType.AFTER)


class Received:
    """KV bytes of the last request that was received."""

    nbytes = 0


def _note(queue: Any, decode_req: Any) -> None:
    arrival = getattr(decode_req.kv_receiver, "_arrival", None)  # None: SGLang's own, to warm up
    if arrival is not None and arrival.work is not None:
        Received.nbytes = arrival.work.bytes


def _stop(result: Any, scheduler: Any, req: Any, last_chunk: bool = False, end_idx: int | None = None) -> None:
    """While there is a file "hold", a prompt's first chunk is the last thing that the scheduler does."""
    folder = Path(os.environ["ENGINE_PROBE"])
    if last_chunk or not (folder / "hold").exists():
        return
    (folder / "held").touch()
    while (folder / "hold").exists():
        time.sleep(0.01)


def _tell(output: Any, state: Any, recv_req: Any) -> None:
    scheduler = state.scheduler
    found: dict[str, Any] = {
        "pid": os.getpid(),
        "free_tokens": int(scheduler.token_to_kv_pool_allocator.available_size()),
        "free_rows": int(scheduler.req_to_token_pool.available_size()),
    }
    queue = scheduler.disagg_decode_prealloc_queue or scheduler.disagg_prefill_bootstrap_queue
    if queue is not None:
        manager = queue.kv_manager
        found["free_metadata"] = int(scheduler.req_to_metadata_buffer_idx_allocator.available_size())
        found["requests"] = len(manager.requests.departures) + len(manager.requests.receivers)
        found["quarantined"] = len(manager.kv.quarantined())
    if scheduler.disagg_decode_transfer_queue is not None:
        transfer = scheduler.disagg_decode_transfer_queue
        found["transferring"] = len(transfer.queue)
        found["deferred"] = transfer.num_pending_deferred_releases()
        found["received_bytes"] = Received.nbytes
        found["waiting"] = len(scheduler.disagg_decode_prealloc_queue.queue)
    output.internal_state["probe"] = found
