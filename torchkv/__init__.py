"""torchkv: a torch.distributed backend that moves KV cache pages between prefill and decode ranks.

Importing it registers the c10d backend ``"torchkv"``. It has no other side effect.
"""

from torchkv.cache import KVCache
from torchkv.cuda.graph_gate import GraphGate
from torchkv.engine.work import KVWork
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
from torchkv.group.functional import (
    cancel,
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
)
from torchkv.group.join import KVMember, join
from torchkv.group.process_group import KVProcessGroup, register_backend
from torchkv.layout.component import Component, State
from torchkv.layout.layout import KVLayout
from torchkv.options import Options
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
]

register_backend()
