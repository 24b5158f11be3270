"""SGLang's memory, which it tells by addresses: its KV pages, and the rows of metadata that go with each request."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

import torchkv
from torchkv.errors import LayoutMismatch, ProtocolError

__all__ = ["AuxRows", "cache_of", "dtype_of"]

DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def dtype_of(name: str, model: torch.dtype) -> torch.dtype:
    """Of SGLang's ``kv_cache_dtype``. model: the model's own, for "auto". Raises ``LayoutMismatch``."""
    if name != "auto" and name not in DTYPES:
        raise LayoutMismatch(f"kv cache dtype {name!r} is not supported yet; torchkv knows auto, {', '.join(DTYPES)}")
    return DTYPES.get(name, model)


def cache_of(
    args: Any,
    *,
    dtype: torch.dtype,
    total_heads: int | None,
    tp_rank: int,
    tp_size: int,
    device: str | torch.device,
) -> torchkv.KVCache:
    """The pages of SGLang's ``KVArgs``, without copying them.

    Of each layer SGLang tells K, then of each layer V, as ``[pages, tokens, heads, dim]``. total_heads: of all ranks;
    None: one latent a layer, of which every rank holds all, as with MLA. Raises ``LayoutMismatch``.
    """
    names = ("latent",) if total_heads is None else ("k", "v")
    _check(args, len(names))
    layers = len(args.kv_data_ptrs) // len(names)
    heads = 1 if total_heads is None else total_heads // tp_size
    if total_heads is not None and (total_heads % tp_size or not heads):
        raise LayoutMismatch(
            f"{total_heads} kv heads on {tp_size} ranks: torchkv needs a tensor-parallel size that divides them"
        )
    components, pointers = [], {}
    for at, name in enumerate(names):
        mine = slice(at * layers, (at + 1) * layers)
        items = set(args.kv_item_lens[mine])
        dim, rest = divmod(min(items), args.page_size * heads * dtype.itemsize)
        if len(items) > 1 or rest or not dim:
            raise LayoutMismatch(
                f"pages of {sorted(items)} bytes for {name!r}: not the same in all layers, or not "
                f"{args.page_size} tokens of {heads} heads of {dtype}"
            )
        components.append(torchkv.Component(name, total_heads or 1, dim, dtype, sharded=total_heads is not None))
        pointers[name] = list(args.kv_data_ptrs[mine])
    counts = {nbytes // item for nbytes, item in zip(args.kv_data_lens, args.kv_item_lens, strict=True)}
    if len(counts) > 1:
        raise LayoutMismatch(f"the layers have unlike numbers of pages: {sorted(counts)}")
    layout = torchkv.KVLayout(
        components, num_layers=layers, page_size=args.page_size, order="NHD", tp_rank=tp_rank, tp_size=tp_size
    )
    return torchkv.KVCache.from_pointers(layout, pointers, counts.pop(), device)


def _check(args: Any, kinds: int) -> None:
    if args.state_types:
        kept = ", ".join(str(getattr(kind, "value", kind)) for kind in args.state_types)
        raise LayoutMismatch(
            f"this model keeps {kept} beside its KV cache, which torchkv's SGLang backend does not move"
        )
    if args.num_draft_entries:
        raise LayoutMismatch("the layers of a draft model are not supported yet: no speculative decoding")
    if args.kv_layout is not None:
        raise LayoutMismatch(f"KV layout {args.kv_layout!r} is not supported yet")
    count = len(args.kv_data_ptrs)
    if not count or count % kinds:
        raise LayoutMismatch(f"SGLang tells {count} KV buffers, which is no multiple of {kinds}")
    own = list(range(count // kinds)) * kinds
    if args.kv_layer_ids and list(args.kv_layer_ids) != own:
        raise LayoutMismatch(f"the KV buffers are those of layers {list(args.kv_layer_ids)}; only all layers in order")


class AuxRows:
    """What SGLang tells the decode engine of a request beside its pages, such as its first token: one row each.

    pointers, lens, item_lens: of each of SGLang's metadata buffers in host memory, which must stay where they are.
    """

    def __init__(self, pointers: Sequence[int], lens: Sequence[int], item_lens: Sequence[int]) -> None:
        self._buffers = [
            memoryview((ctypes.c_ubyte * nbytes).from_address(pointer)).cast("B")
            for pointer, nbytes in zip(pointers, lens, strict=True)
        ]
        self._items = list(item_lens)

    def row(self, index: int) -> bytes:
        return b"".join(view[index * n : (index + 1) * n] for view, n in zip(self._buffers, self._items, strict=True))

    def put(self, index: int, data: bytes) -> None:
        """Raises ``ProtocolError`` for a row of another size, which an unlike version of SGLang makes."""
        if len(data) != sum(self._items):
            raise ProtocolError(
                f"the prefill engine's metadata has {len(data)} bytes, this engine's {sum(self._items)}; both must be "
                "the same version of SGLang, with the same settings"
            )
        for view, n in zip(self._buffers, self._items, strict=True):
            view[index * n : (index + 1) * n], data = data[:n], data[n:]
