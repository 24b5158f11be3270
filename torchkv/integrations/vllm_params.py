"""What clients and routers say to vLLM about a request: who prefills it, and under which name. Needs no vLLM."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from torchkv.errors import ProtocolError
from torchkv.integrations.departures import MAX_NAME, transfer_name
from torchkv.integrations.steps import Remote

__all__ = ["TransferParams", "remote_of"]

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]

ADDRESS = re.compile(r"(?:[a-z]+://)?([A-Za-z0-9._-]{1,253}:\d{1,5})/?")  # a host name or an IPv4 address, and a port


class TransferParams(msgspec.Struct, frozen=True):
    """The ``kv_transfer_params`` of a request, as far as torchkv reads them. They come from clients.

    The names are those of vLLM's NIXL connector, so that its routers hand them on. transfer_id: under which the two
    engines know the request; None: the prefill engine's own name of it.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    transfer_id: Name | None = None
    remote_engine_id: Name | None = None
    remote_host: Name | None = None
    remote_port: Port | None = None
    remote_bootstrap_addr: Name | None = None

    @classmethod
    def of(cls, params: Mapping[str, Any] | None) -> TransferParams:
        """Raises ``ProtocolError`` for params of other types or sizes."""
        try:
            found = msgspec.convert(params or {}, cls)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"kv_transfer_params: {error}") from error
        if found.transfer_id is not None and transfer_name(found.transfer_id) != found.transfer_id:
            raise ProtocolError(f"kv_transfer_params: transfer_id must be 1 to {MAX_NAME} bytes in UTF-8")
        return found


def remote_of(params: TransferParams) -> Remote:
    """Who prefills a request with ``do_remote_prefill``. Raises ``ProtocolError`` if the params do not tell."""
    if params.transfer_id is None:
        raise ProtocolError("kv_transfer_params: do_remote_prefill without transfer_id; hand on what prefill returned")
    if params.remote_host is not None and params.remote_port is not None:
        where: str | None = f"{params.remote_host}:{params.remote_port}"
    else:
        where = params.remote_bootstrap_addr
    if where is None or (found := ADDRESS.fullmatch(where)) is None:
        raise ProtocolError(
            "kv_transfer_params: do_remote_prefill needs remote_host, a host name or an IPv4 address, and remote_port, "
            f"not {where!r:.80}; hand on what prefill returned"
        )
    return Remote(params.transfer_id, f"tcp://{found[1]}", params.remote_engine_id)
