"""What a transport implements: `torchkv.transport.interface` is the contract, this package its public names.

A backend imports these names, `torchkv.errors`, `torchkv.host` and what ``BACKEND_MAY_IMPORT`` and
``BACKEND_MAY_IMPORT_MODULES`` of ``tests/unit/test_imports.py`` list besides.
"""

from torchkv.transport.interface import (
    Batch,
    Capabilities,
    Channel,
    Completion,
    NativeChannel,
    Region,
    RemoteView,
    Transport,
    installed_transports,
    load_transport,
    transport_names,
)

__all__ = [
    "Batch",
    "Capabilities",
    "Channel",
    "Completion",
    "NativeChannel",
    "Region",
    "RemoteView",
    "Transport",
    "installed_transports",
    "load_transport",
    "transport_names",
]
