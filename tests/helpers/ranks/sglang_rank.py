"""One rank of an SGLang engine in a process of its own, without SGLang: memory that is told by addresses, and polls."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import torchkv
from tests.helpers.waiting import until
from torchkv.integrations.bootstrap import AddressServer, Prefills
from torchkv.integrations.sglang_memory import AuxRows, cache_of
from torchkv.integrations.sglang_requests import FAILED, SUCCESS, WAITING, Receiver, Requests, Sender

LAYERS, PAGES, HEADS, DIM, PAGE = 2, 16, 2, 6, 4
ROW = 24  # bytes of metadata
PATIENCE = 30.0


class Rank:
    """What this process has joined with. now: its request."""

    requests: Requests
    tensors: list[torch.Tensor]  # K of each layer, then V: [pages * tokens, heads, dim]
    rows: torch.Tensor
    server: AddressServer | None = None
    now: Any = None


def begin(instance: str, is_prefill: bool) -> str | None:
    """Joins. The bootstrap address of an instance that prefills."""
    Rank.tensors = [torch.full((PAGES * PAGE, HEADS, DIM), -1, dtype=torch.int32) for _ in range(2 * LAYERS)]
    Rank.rows = torch.zeros((4, ROW), dtype=torch.uint8)
    args = SimpleNamespace(
        kv_data_ptrs=[tensor.data_ptr() for tensor in Rank.tensors],
        kv_data_lens=[tensor.nbytes for tensor in Rank.tensors],
        kv_item_lens=[tensor[:PAGE].nbytes for tensor in Rank.tensors],
        kv_layer_ids=[],
        kv_layout=None,
        page_size=PAGE,
        state_types=[],
        num_draft_entries=0,
    )
    cache = cache_of(args, dtype=torch.int32, total_heads=HEADS, tp_rank=0, tp_size=1, device="cpu")
    options = torchkv.Options(timeout=10, grant_timeout=20, staging_recv=1 << 20, staging_send=1 << 20)
    kv = torchkv.join(cache, instance, options=options)
    aux = AuxRows([Rank.rows.data_ptr()], [Rank.rows.nbytes], [ROW])
    Rank.requests = Requests(kv, aux, PAGE, None if is_prefill else Prefills(kv, seconds=10))
    if not is_prefill:
        return None
    Rank.server = AddressServer("127.0.0.1", 0, kv.address)
    return f"127.0.0.1:{Rank.server.server_address[1]}"


def content(tag: int, buffer: int, position: int) -> torch.Tensor:
    """What a page of a request holds: [tokens, heads, dim]."""
    generator = torch.Generator().manual_seed(tag * 10_000 + buffer * 100 + position)
    return torch.randint(0, 1 << 30, (PAGE, HEADS, DIM), dtype=torch.int32, generator=generator)


def page(buffer: int, number: int) -> torch.Tensor:
    return Rank.tensors[buffer][number * PAGE : (number + 1) * PAGE]


def poll_until(*states: int) -> int:
    end = time.monotonic() + PATIENCE
    while (state := Rank.now.poll()) not in states:
        assert time.monotonic() < end, (state, states)
        time.sleep(0.002)
    return int(state)


# ---------------------------------------------------------------------- prefill


def prefill(room: int) -> None:
    Rank.now = Sender(SimpleNamespace(requests=Rank.requests), "", room)


def await_grant(pages: int) -> int:
    """The tokens that the receiver holds, once it has granted. pages: of the whole prompt."""
    poll_until(WAITING)
    prefix = int(Rank.now.pop_decode_prefix_len())
    Rank.rows[1] = torch.arange(ROW)
    Rank.now.init(pages - prefix // PAGE, 1)
    return prefix


def send(tag: int, pages: list[int], position: int) -> None:
    """Computes pages of a prompt, from a position on, and sends them."""
    for buffer in range(2 * LAYERS):
        for i, number in enumerate(pages):
            page(buffer, number).copy_(content(tag, buffer, position + i))
    Rank.now.send(np.array(pages, dtype=np.int32))


# ---------------------------------------------------------------------- decode


def decode(bootstrap: str, room: int, pages: list[int], prefix: int = 0) -> None:
    """Grants pages to whoever is there."""
    Rank.now = Receiver(SimpleNamespace(requests=Rank.requests), bootstrap, room)
    Rank.now.init(0)
    poll_until(WAITING)
    Rank.now.send_metadata(np.array(pages, dtype=np.int32), 2, [], prefix)


def is_released(room: int) -> bool:
    """Whether SGLang may give the pages of a room to others."""
    return Rank.requests.is_released(room)


def await_release(room: int) -> None:
    until(lambda: is_released(room), f"room {room} is released")


def written(pages: list[int]) -> bool:
    return any(bool((page(buffer, number) >= 0).any()) for buffer in range(2 * LAYERS) for number in pages)


def overwrite() -> None:
    for tensor in Rank.tensors:
        tensor.fill_(-2)


def holds(tag: int, pages: list[int], position: int = 0) -> bool:
    """Whether pages hold what was computed for a request, and no other page holds anything."""
    equal = all(
        torch.equal(page(buffer, number), content(tag, buffer, position + i))
        for buffer in range(2 * LAYERS)
        for i, number in enumerate(pages)
    )
    return equal and not written([number for number in range(PAGES) if number not in pages])


def row() -> list[int]:
    return list(Rank.rows[2].tolist())


# ---------------------------------------------------------------------- both


def abort() -> None:
    Rank.now.abort()
    assert Rank.now.poll() == FAILED


def await_failure() -> None:
    """As SGLang does, which then asks for the pages."""
    poll_until(FAILED)
    Rank.now.ensure_abort_notified(force_arm=True)


def finish() -> bool:
    """Whether the request has succeeded, once it has ended."""
    succeeded = poll_until(SUCCESS, FAILED) == SUCCESS
    Rank.now.clear()
    return succeeded


def tidy() -> Any:
    """What is left of all requests, which should be nothing."""
    overwrite()
    until(lambda: not len(Rank.requests.departures), "nothing departs any more")
    return Rank.requests.receivers, Rank.requests.kv.quarantined()


def end() -> None:
    if Rank.server is not None:
        Rank.server.close()
    if Rank.requests.prefills is not None:
        Rank.requests.prefills.close()
    Rank.requests.kv.close()
