"""What router and workers say to each other, as JSON over HTTP: typed and bounded."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

Role = Literal["prefill", "decode"]
Finish = Literal["stop", "length"]
Name = Annotated[str, Field(min_length=1, max_length=128)]
Token = Annotated[int, Field(ge=0, lt=1 << 31)]


class Work(BaseModel):
    """One request, for a prefill worker and for a decode worker. source: address of the prefill worker, for decode."""

    name: Name
    prompt: Annotated[list[Token], Field(min_length=1, max_length=1 << 20)]
    max_tokens: Annotated[int, Field(ge=1, le=1 << 20)] = 1
    source: Name | None = None


class Cancel(BaseModel):
    """A request that the router needs no more."""

    name: Name


class Step(BaseModel):
    """Tokens that were generated; with the last ones why they are the last, or what went wrong."""

    tokens: list[Token] = []
    finish: Finish | None = None
    error: str | None = None


class Report(BaseModel):
    """A worker, once a second. It joins with its first report.

    url, address: where its HTTP server and its torchkv listen. model: what it serves. context: tokens that one request
    may have, with those it generates. blocks, free: of its KV cache. quarantined: pages that a lost peer may still
    write to. moved: bytes of pages that it has sent or received. peers: instances that its torchkv knows -> whether
    they answer.
    """

    instance: Name
    role: Role
    url: Annotated[str, Field(max_length=256, pattern=r"^http://[^\s/]+$")]
    address: Name
    model: Name
    context: Annotated[int, Field(ge=2)]
    blocks: int
    free: int
    quarantined: int
    moved: int
    peers: dict[str, bool]
