"""The scheduler's side of the vLLM connector: which blocks are sent and received when. Moves no bytes, needs no vLLM.

A request with ``do_remote_decode`` is prefilled here for somebody else; its blocks are sent as chunks of the prompt are
computed, and are kept until the workers report that they may be overwritten. A request with ``do_remote_prefill`` is
prefilled elsewhere; all of its prompt that is not in the prefix cache is received into newly allocated blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torchkv.errors import ProtocolError
from torchkv.integrations.departures import transfer_name
from torchkv.integrations.layer_groups import BlockLists, Groups
from torchkv.integrations.steps import Receive, Remote, Send, Step
from torchkv.integrations.vllm_params import TransferParams, remote_of

__all__ = ["SchedulerSide"]

log = logging.getLogger(__name__)

# Statuses, by name, of requests whose KV cache is complete.
COMPLETE = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")


@dataclass(slots=True)
class _Production:
    """A request that is prefilled here for another engine. blocks: its ids so far. sent: pages handed to workers."""

    name: str
    tokens: int
    blocks: list[int] = field(default_factory=list)
    sent: int = 0
    begun: bool = False  # whether the workers have heard of it
    last: bool = False  # whether all of it was handed to them


class SchedulerSide:
    """Turns what vLLM's scheduler decides into one `Step` for the workers at a time.

    groups: of the model's layers. If there are several block lists, those of a request are sent with its last chunk:
    until then vLLM may take blocks away that a window has slid past. instance, tp_size: of this engine. endpoint: host
    and port of its workers' instance. blocks_of: the block lists of a request now.
    """

    def __init__(self, groups: Groups, *, instance: str, tp_size: int) -> None:
        self._instance = instance
        self._tp_size = tp_size
        self._groups = groups
        self.blocks_of: Callable[[str], BlockLists] | None = None
        self.endpoint: tuple[str, int] | None = None
        self._productions: dict[str, _Production] = {}
        self._loading: set[str] = set()
        self._step = Step()

    def matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        """How many tokens of the prompt behind ``computed`` come from elsewhere, and whether while others run."""
        if not _wants_prefill(request):
            return 0, False
        missing = self._groups.moved(request.num_prompt_tokens) - computed
        return (missing, True) if missing > 0 else (0, False)

    def allocated(self, request: Any, block_lists: BlockLists, external: int) -> None:
        """vLLM has blocks for the request. external: how many of its tokens come from elsewhere."""
        if _wants_prefill(request):
            remote, problem = _remote(request)
            if external:
                tokens = self._groups.moved(request.num_prompt_tokens)
                prefix = tokens - external
                pages = self._groups.pages(block_lists, prefix=prefix, tokens=tokens)
                slots = self._groups.slots(block_lists)
                self._step.receives.append(Receive(request.request_id, remote, pages, prefix, problem, slots))
                self._loading.add(request.request_id)
            elif remote is not None:
                self._step.refusals.append(remote)
            # vLLM asks again after a failed load or a preemption: then the prompt is prefilled here.
            request.kv_transfer_params["do_remote_prefill"] = False
        elif (params := _params(request)) is not None and params.do_remote_decode:
            name = params.transfer_id or transfer_name(request.request_id)
            self._productions.setdefault(request.request_id, _Production(name, request.num_prompt_tokens))

    def shorten(self, request: Any) -> None:
        """A new request. If it is prefilled here for somebody else, with groups, its last token is left to that one."""
        if not self._groups.hybrid or request.num_prompt_tokens < 2:
            return
        params = _params(request)
        if params is None or not params.do_remote_decode:
            return
        if request.prompt_token_ids is None:
            log.warning("request %s has a prompt of embeddings, which is not sent", request.request_id)
            request.kv_transfer_params = None
            self._step.declines.append(params.transfer_id or transfer_name(request.request_id))
            return
        del request.prompt_token_ids[-1:]
        del request._all_token_ids[-1:]
        request.num_prompt_tokens -= 1
        request.max_tokens = 1  # its states must not go on while they are read

    def build(self, output: Any) -> Step:
        """What the workers do in the step that ``output``, vLLM's SchedulerOutput, describes."""
        step, self._step = self._step, Step()
        for request in output.preempted_req_ids or ():
            if (production := self._productions.get(request)) is not None and production.begun:
                step.withdrawals.append(request)
                if not production.last:
                    production.sent = 0
        for request, computed in self._scheduled(output):
            production = self._productions[request]
            if not production.last:
                self._hand_over(request, production, computed + output.num_scheduled_tokens[request], step)
        return step

    def received(self, requests: Iterable[str]) -> None:
        """The workers have ended these receives, successfully or not."""
        self._loading.difference_update(requests)

    def finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """Whether the request's blocks must be kept, and what the engine that decodes it has to know."""
        production = self._productions.pop(request.request_id, None)
        if production is not None:
            if production.last and request.status.name in COMPLETE:
                return True, self._handed_on(request, production)
            if production.begun:
                self._step.cancels.append(request.request_id)
                return True, None  # its blocks may still be read
            self._step.declines.append(production.name)
            return False, None
        if request.request_id in self._loading:
            self._loading.discard(request.request_id)
            self._step.cancels.append(request.request_id)  # vLLM keeps the blocks until the receive has ended
            return False, None
        params = _params(request)
        if params is not None and params.do_remote_prefill:
            if (remote := _remote(request)[0]) is not None:
                self._step.refusals.append(remote)
        elif params is not None and params.do_remote_decode and params.transfer_id is not None:
            self._step.declines.append(params.transfer_id)
        return False, None

    @property
    def busy(self) -> bool:
        """Whether the workers must be told something, though no request needs a step."""
        step = self._step
        return bool(step.cancels or step.declines or step.refusals)

    # ------------------------------------------------------------------ inside

    def _scheduled(self, output: Any) -> list[tuple[str, int]]:
        """Productions of this step, with the tokens computed before it. Keeps their blocks."""
        found = []
        for new in output.scheduled_new_reqs:
            if (production := self._productions.get(new.req_id)) is not None:
                production.blocks = list(new.block_ids[0])
                found.append((new.req_id, new.num_computed_tokens))
        cached = output.scheduled_cached_reqs
        for request, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if (production := self._productions.get(request)) is not None:
                if request in cached.resumed_req_ids:
                    production.blocks = []
                production.blocks += blocks[0] if blocks is not None else ()
                found.append((request, computed))
        return found

    def _hand_over(self, request: str, production: _Production, computed: int, step: Step) -> None:
        """The pages that are complete once ``computed`` tokens are."""
        last = computed >= production.tokens
        if self._groups.hybrid:
            if not last:
                return
            assert self.blocks_of is not None
            lists = self.blocks_of(request)
            pages = self._groups.pages(lists, prefix=0, tokens=production.tokens)
            step.sends.append(Send(request, production.name, 0, pages, last, self._groups.slots(lists)))
        else:
            start, upto = production.sent, computed // self._groups.page_size
            if last:
                upto = self._groups.count(production.tokens)
            elif upto <= start:
                return
            step.sends.append(Send(request, production.name, start, production.blocks[start:upto], last))
            production.sent = upto
        production.begun, production.last = True, last

    def _handed_on(self, request: Any, production: _Production) -> dict[str, Any]:
        assert self.endpoint is not None
        host, port = self.endpoint
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": production.name,
            "remote_engine_id": self._instance,
            "remote_request_id": request.request_id,
            "remote_host": host,
            "remote_port": port,
            "remote_num_tokens": production.tokens,
            "tp_size": self._tp_size,
        }


def _wants_prefill(request: Any) -> bool:
    return bool((request.kv_transfer_params or {}).get("do_remote_prefill"))


def _params(request: Any) -> TransferParams | None:
    """None if they make no sense; then no bytes move."""
    try:
        return TransferParams.of(request.kv_transfer_params)
    except ProtocolError as error:
        log.warning("request %s: %s", request.request_id, error)
        return None


def _remote(request: Any) -> tuple[Remote | None, str]:
    """Who prefills the request; or None, and why that is not known."""
    try:
        return remote_of(TransferParams.of(request.kv_transfer_params)), ""
    except ProtocolError as error:
        return None, str(error)
