"""Runs the Python blocks of a page, in every rank of a job, in order, in one namespace a rank.

Directives are Sybil's, in HTML comments, which readers do not see: ``<!--- skip: next "reason" -->`` before a block
that cannot run, ``<!--- skip: next if(not on_rank(0), reason="...") -->`` before one that is not for every rank,
``<!--- invisible-code-block: python`` for what a reader knows from elsewhere, and for assertions.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest import SkipTest

import torch.distributed as dist
from sybil import Document
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

from tests.helpers.harness import Ranks

__all__ = ["outcomes", "visible_blocks"]

RAN = ""
Outcomes = dict[int, str]  # line of a block -> why it was skipped, or RAN


def parsed(page: Path) -> Document:
    return Document.parse(str(page), PythonCodeBlockParser(), SkipParser())


def visible_blocks(page: Path) -> list[int]:
    """The lines at which the blocks begin that a reader sees."""
    document = parsed(page)
    return [each.line for each in document.examples() if document.text.startswith(("```", "~~~"), each.region.start)]


def outcomes(page: Path, ranks: int) -> Outcomes:
    """What became of each visible block; one that ran on any rank has run. Raises ``RankFailed`` if one failed."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="torchkv-test-") as home:  # where jobs that meet make their secret
        job = Ranks(ranks, world=False, env={"XDG_CONFIG_HOME": home})
        try:
            for rank in range(ranks):
                job.start(_run, str(page), ranks, rank, store.port, ranks=[rank])
            found: Sequence[Outcomes] = job.join(range(ranks))
        finally:
            job.close()
    return {line: min((each[line] for each in found), key=len) for line in visible_blocks(page)}


def _run(page: str, ranks: int, rank: int, port: int) -> Outcomes:
    """In a rank, which torchrun might have started."""
    os.environ.update(_torchrun(ranks, rank, port))
    document = parsed(Path(page))
    document.namespace.update(on_rank=lambda number: number == rank, installed=_installed)
    found: Outcomes = {}
    for example in document.examples():
        try:
            example.evaluate()
        except SkipTest as skip:
            found[example.line] = str(skip)
        else:
            found[example.line] = RAN
    return found


def _torchrun(ranks: int, rank: int, port: int) -> Mapping[str, str]:
    return {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 need not make the store
    }


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
