"""``make model``: explores worlds that are too large for the tests. Ten minutes on one core."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.helpers.model.explorer import World, explore
from tests.helpers.model.grants import Grants, Rules
from tests.helpers.model.joins import Joins
from tests.helpers.model.sessions import Sessions

WORLDS: dict[str, Callable[[], World]] = {
    "two lives, one writer dies": lambda: Grants(Rules(lives=2, deaths=1)),
    "two lives, a writer gives up": lambda: Grants(Rules(lives=2, reader_cancels=0, writer_cancels=1)),
    "two lives, all deadlines pass": lambda: Grants(Rules(lives=2, reader_cancels=0, deadlines=1)),
    "two lives on pages of their own": lambda: Grants(Rules(lives=2, pages=2)),
    "an instance joins, and a later life of it": lambda: Joins(restarts=1),
    "both call each other": lambda: Joins(restarts=1, mutual=True),
    "a session of two messages": lambda: Sessions(2, restarts=0),
    "a session and a restart": lambda: Sessions(1, restarts=1),
}


def main() -> None:
    for name, world in WORLDS.items():
        began = time.monotonic()
        found = explore(world)
        print(
            f"{name}: {found.states} states, {found.ends} ends, {found.problem or 'nothing wrong'} "
            f"({time.monotonic() - began:.0f} s)",
            flush=True,
        )
        if found.problem:
            raise SystemExit("\n".join(found.path))


if __name__ == "__main__":
    main()
