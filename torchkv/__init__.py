"""torchkv: a torch.distributed backend that moves KV cache pages between prefill and decode ranks.

Importing it registers the c10d backend ``"torchkv"``. It has no other side effect, and takes milliseconds: what it
offers is imported when it is used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from torchkv.errors import (
    AuthError,
    ChecksumMismatch,
    KVError,
    LayoutMismatch,
    PageOutOfRange,
    PeerLost,
    ProtocolError,
    RingExhausted,
    TransferCancelled,
    TransferTimeout,
    TransportUnavailable,
)
from torchkv.group.backend import register_backend
from torchkv.options import Options

if TYPE_CHECKING:
    from torchkv.cache import KVCache
    from torchkv.cuda.graph_gate import GraphGate
    from torchkv.engine.work import KVWork
    from torchkv.group.functional import (
        cancel,
        dump,
        explain,
        finish,
        granted,
        prefix_tokens,
        quarantined,
        recv_pages,
        refuse,
        register,
        send_layer,
        send_pages,
        send_slice,
        send_state,
        staged_put,
        stats,
        withdraw,
    )
    from torchkv.group.join import KVMember, join
    from torchkv.group.process_group import KVProcessGroup
    from torchkv.layout.component import Component, State
    from torchkv.layout.conversion import convert
    from torchkv.layout.layout import KVLayout
    from torchkv.pipelining.context import pipeline
    from torchkv.prefix.cache import PrefixCache

__version__ = "0.1.0"

__all__ = [
    "AuthError",
    "ChecksumMismatch",
    "Component",
    "GraphGate",
    "KVCache",
    "KVError",
    "KVLayout",
    "KVMember",
    "KVProcessGroup",
    "KVWork",
    "LayoutMismatch",
    "Options",
    "PageOutOfRange",
    "PeerLost",
    "PrefixCache",
    "ProtocolError",
    "RingExhausted",
    "State",
    "TransferCancelled",
    "TransferTimeout",
    "TransportUnavailable",
    "cancel",
    "convert",
    "dump",
    "explain",
    "finish",
    "granted",
    "join",
    "pipeline",
    "prefix_tokens",
    "quarantined",
    "recv_pages",
    "refuse",
    "register",
    "send_layer",
    "send_pages",
    "send_slice",
    "send_state",
    "staged_put",
    "stats",
    "withdraw",
]

# Where to find what is imported on first use: numba comes with it, which takes its time, and which some programs must
# not find among the loaded modules too early.
_HOMES = {
    "KVCache": "torchkv.cache",
    "GraphGate": "torchkv.cuda.graph_gate",
    "KVWork": "torchkv.engine.work",
    "cancel": "torchkv.group.functional",
    "dump": "torchkv.group.functional",
    "explain": "torchkv.group.functional",
    "finish": "torchkv.group.functional",
    "granted": "torchkv.group.functional",
    "prefix_tokens": "torchkv.group.functional",
    "quarantined": "torchkv.group.functional",
    "recv_pages": "torchkv.group.functional",
    "refuse": "torchkv.group.functional",
    "register": "torchkv.group.functional",
    "send_layer": "torchkv.group.functional",
    "send_pages": "torchkv.group.functional",
    "send_slice": "torchkv.group.functional",
    "send_state": "torchkv.group.functional",
    "staged_put": "torchkv.group.functional",
    "stats": "torchkv.group.functional",
    "withdraw": "torchkv.group.functional",
    "KVMember": "torchkv.group.join",
    "join": "torchkv.group.join",
    "KVProcessGroup": "torchkv.group.process_group",
    "Component": "torchkv.layout.component",
    "State": "torchkv.layout.component",
    "convert": "torchkv.layout.conversion",
    "KVLayout": "torchkv.layout.layout",
    "pipeline": "torchkv.pipelining.context",
    "PrefixCache": "torchkv.prefix.cache",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_backend()
