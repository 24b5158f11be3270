"""What vLLM's scheduler tells its workers in each step, and what clients say about a request. Needs no vLLM."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Annotated, Any, TypeAlias

import msgspec

from torchkv.errors import ProtocolError

__all__ = [
    "Pages",
    "Receive",
    "Refuse",
    "Remote",
    "Send",
    "Step",
    "TransferParams",
    "own_name",
    "remote_of",
    "split_address",
]

# Of one request: in order of position; by layer group where layers have lists of their own, with -1 for absent ones.
Pages: TypeAlias = list[int] | dict[str, list[int]]

MAX_NAME = 1024  # bytes

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]

HOST_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}")


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
        if found.transfer_id is not None and not _fits(found.transfer_id):
            raise ProtocolError(f"kv_transfer_params: transfer_id must be 1 to {MAX_NAME} bytes in UTF-8")
        return found


def _fits(name: str) -> bool:
    try:
        return 1 <= len(name.encode()) <= MAX_NAME
    except UnicodeEncodeError:
        return False


def own_name(request: str) -> str:
    """The name of the transfer of vLLM's ``request``, which a client may have named, at any length."""
    return request if _fits(request) else blake2b(request.encode(errors="replace"), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Remote:
    """Where a request's prompt is prefilled. instance: who should be there, if that is known."""

    name: str
    address: str
    instance: str | None


def remote_of(params: TransferParams) -> Remote:
    """Who prefills a request with ``do_remote_prefill``. Raises ``ProtocolError`` if the params do not tell."""
    if params.transfer_id is None:
        raise ProtocolError("kv_transfer_params: do_remote_prefill without transfer_id; hand on what prefill returned")
    host, port = params.remote_host, params.remote_port
    if params.remote_bootstrap_addr is not None and (host is None or port is None):
        host, _, text = params.remote_bootstrap_addr.rpartition("//")[2].rstrip("/").rpartition(":")
        port = int(text) if text.isdecimal() and len(text) <= 5 else None
    if not host or port is None:
        raise ProtocolError(
            "kv_transfer_params: do_remote_prefill without remote_host and remote_port; hand on what prefill returned"
        )
    if HOST_NAME.fullmatch(host) is None:
        raise ProtocolError(f"kv_transfer_params: remote_host={host!r:.80} is neither a host name nor an IPv4 address")
    return Remote(params.transfer_id, f"tcp://{host}:{port}", params.remote_engine_id)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of a member's address, ``tcp://host:port``."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    ipaddress.IPv4Address(host)  # members listen at IPv4 addresses
    return host, int(port)


@dataclass(frozen=True, slots=True)
class Send:
    """Pages of a request that this step completes. request: vLLM's name. start: position of the first of ``pages``,
    in pages from the beginning of the prompt. last: whether they are the prompt's last ones. slots: blocks that hold
    its states, by layer group.
    """

    request: str
    name: str
    start: int
    pages: Pages
    last: bool
    slots: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Receive:
    """A request whose prompt, behind ``prefix_tokens``, comes into ``pages``. remote: None if ``problem`` says why.

    slots: blocks that its states come into, by layer group.
    """

    request: str
    remote: Remote | None
    pages: Pages
    prefix_tokens: int
    problem: str = ""
    slots: dict[str, int] = field(default_factory=dict)

    def blocks(self) -> list[int]:
        """All blocks that are written to."""
        lists = self.pages.values() if isinstance(self.pages, dict) else [self.pages]
        return [page for pages in lists for page in pages if page >= 0] + list(self.slots.values())


@dataclass(frozen=True, slots=True)
class Refuse:
    """A request that is prefilled elsewhere and will never be received here."""

    remote: Remote


@dataclass(slots=True)
class Step:
    """What the workers do in one step of the engine.

    withdrawals, cancels: vLLM's names of requests. declines: names of transfers that will never be sent.
    """

    sends: list[Send] = field(default_factory=list)
    receives: list[Receive] = field(default_factory=list)
    refusals: list[Refuse] = field(default_factory=list)
    withdrawals: list[str] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    declines: list[str] = field(default_factory=list)
