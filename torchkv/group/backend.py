"""Registers the c10d backend ``"torchkv"``. Light: the process group itself is imported when one is made."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from torchkv.errors import ProtocolError
from torchkv.options import Options, warn_about_unknown_variables

if TYPE_CHECKING:
    from torch._C._distributed_c10d import _DistributedBackendOptions

    from torchkv.group.process_group import KVProcessGroup

__all__ = ["register_backend"]

BACKEND = "torchkv"


def register_backend() -> None:
    """Idempotent."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(backend_options: _DistributedBackendOptions, options: object) -> KVProcessGroup:
    from torchkv.group.process_group import KVProcessGroup

    if options is None:
        options = Options()
    if not isinstance(options, Options):
        raise ProtocolError(f"pg_options is a {type(options).__name__}; give a torchkv.Options")
    warn_about_unknown_variables()
    timeout = backend_options.timeout
    if timeout <= timedelta(0):
        timeout = dist.constants.default_pg_timeout
    return KVProcessGroup(
        backend_options.store, backend_options.group_rank, backend_options.group_size, timeout, options
    )
