"""How many examples a property test tries: all under ``make test``, a part under ``make unit``, which is quick."""

from __future__ import annotations

import os

__all__ = ["examples"]

QUICK = 5  # under `make unit`, so many times fewer


def examples(number: int) -> int:
    """For hypothesis's ``max_examples``, in tests that take longer than a second with ``number`` examples."""
    return number // QUICK if os.environ.get("QUICK_TESTS") else number
