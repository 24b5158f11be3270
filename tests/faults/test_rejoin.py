"""An instance is killed and comes again, over and over: nothing of its lives is left at those that stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.harness import Ranks
from tests.helpers.jobs import SECRET, new_secret_file
from tests.helpers.ranks import member
from tests.helpers.ranks.member import await_forgotten, await_peer, connect, leave, lose, owned

STAYS, COMES = 0, 1  # tags of the instances' bytes
MEASURED = 10  # times in a test
KIB_A_LIFE = 2  # what resident memory may grow by in the later half, where nothing is used for the first time


def join(ranks: Ranks, name: str, tag: int, scratch: Path) -> str:
    (address,) = ranks.run(member.join, name, tag, 0, 1, str(scratch / name), None, 8, "cpu")
    return str(address)


def exchange(name: str, writers: Ranks, readers: Ranks, src: str, dst: str, tag: int) -> None:
    readers.start(member.receive, name, src, tag)
    writers.start(member.send, name, dst, tag, 4)
    readers.join([0])
    writers.join([0])


@pytest.mark.parametrize("lives", [20, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_nothing_is_left_of_many_lives(lives: int, tmp_path: Path) -> None:
    """File descriptors, threads and shared mappings are as many as before, and resident memory stays where it is."""
    secret = {SECRET: str(new_secret_file(tmp_path / "secret"))}
    stays = Ranks(1, env=secret, world=False)
    address = join(stays, "stays", STAYS, tmp_path)
    seen: list[tuple[int, ...]] = []
    for life in range(1, lives + 1):
        comes = Ranks(1, env=secret, world=False)
        join(comes, "comes", COMES, tmp_path)
        comes.run(connect, address)
        stays.run(await_peer, "comes")
        exchange("there", comes, stays, "comes", "stays", COMES)
        exchange("back", stays, comes, "stays", "comes", STAYS)
        stays.start(lose, ["comes"])
        stays.hear(0)
        comes.kill(0)
        stays.tell(0)
        stays.join([0])
        comes.close()
        stays.run(await_forgotten)
        if life % (lives // MEASURED) == 0:
            seen += stays.run(owned, seen[0][:3] if seen else None)
            print("after", life, "lives: descriptors, threads, shared mappings, channels, resident KiB:", seen[-1])
    assert len({channels for *_, channels, _ in seen}) == 1, seen
    half = len(seen) // 2
    growth = seen[-1][-1] - seen[half][-1]
    assert growth < KIB_A_LIFE * lives / 2 + 512, seen
    stays.run(leave)
    stays.close()
