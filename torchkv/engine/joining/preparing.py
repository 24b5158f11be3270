"""Loads what requests between two ranks need (kernels, tables, staging memory), so that the first is not delayed."""

from __future__ import annotations

from collections.abc import Iterator

from torchkv.engine.engine import Engine
from torchkv.layout.pair_plan import PairPlan

__all__ = ["prepare_to_receive", "prepare_to_send"]


def prepare_to_send(engine: Engine, rank: int) -> None:
    """For requests to ``rank``, which may be this one."""
    for plan in _likely_plans(engine, engine.group_map.rank, engine.group_map.siblings, rank):
        engine.scheduler.prepare(plan, engine.connection(rank))


def prepare_to_receive(engine: Engine, rank: int) -> None:
    """For unpacking the stages of requests from ``rank``."""
    if engine.staging is None or engine.staging.receiving is None:
        return
    siblings, checksum = engine.group_map.siblings_of(rank), engine.group_map.info[rank].checksum
    for plan in _likely_plans(engine, rank, siblings, engine.group_map.rank):
        engine.staging.packer.prepare(plan, sending=False, checksum=checksum, scales=engine.scales)


def _likely_plans(engine: Engine, writer: int, siblings: tuple[int, ...], reader: int) -> Iterator[PairPlan]:
    """Plans of requests written by the whole instance, and by ``writer`` alone if it holds all that is needed."""
    for group_map in engine.group_map.parts.values() or (engine.group_map,):
        choices = [group_map.contributing(siblings, reader)]
        if choices[0] != (writer,) and group_map.gap((writer,), reader) is None:
            choices.append((writer,))
        for writers in choices:
            if writer in writers:  # else it has nothing of this layer group for the reader
                yield from group_map.plan(writer, writers, reader).parts
