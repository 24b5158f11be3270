"""All rivals, by name."""

from __future__ import annotations

from collections.abc import Mapping

from torchkv.bench.rivals.copies import MEMCPY, PEER_COPY
from torchkv.bench.rivals.messages import GLOO, NCCL
from torchkv.bench.rivals.mooncake import MOONCAKE
from torchkv.bench.rivals.nixl import NIXL
from torchkv.bench.rivals.ours import TORCHKV
from torchkv.bench.rivals.side import Rival

__all__ = ["RIVALS"]

RIVALS: Mapping[str, Rival] = {rival.name: rival for rival in (TORCHKV, NIXL, MOONCAKE, GLOO, NCCL, MEMCPY, PEER_COPY)}
