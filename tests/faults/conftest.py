"""The tests of this folder share harness and helpers with those of ``tests/group``."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "group")]
