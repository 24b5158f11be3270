"""torchkv: a torch.distributed backend that moves the KV cache between prefill and decode.

Importing it registers the c10d backend ``"torchkv"``; that is the one side effect.
"""

from torchkv.cache import KVCache
from torchkv.component import Component, State
from torchkv.env import Options
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
from torchkv.functional import (
    cancel,
    explain,
    finish,
    prefix_tokens,
    quarantined,
    recv_pages,
    register,
    send_layer,
    send_pages,
    send_slice,
    send_state,
    staged_put,
)
from torchkv.gate import GraphGate
from torchkv.layout import KVLayout
from torchkv.pipeline import pipeline
from torchkv.prefixcache import PrefixCache
from torchkv.process_group import KVProcessGroup, register_backend
from torchkv.work import KVWork

__version__ = "0.1.0"

__all__ = [
    "AuthError",
    "ChecksumMismatch",
    "Component",
    "GraphGate",
    "KVCache",
    "KVError",
    "KVLayout",
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
    "pipeline",
    "prefix_tokens",
    "quarantined",
    "recv_pages",
    "register",
    "send_layer",
    "send_pages",
    "send_slice",
    "send_state",
    "staged_put",
]

register_backend()
