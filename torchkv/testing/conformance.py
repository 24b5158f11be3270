"""`TransportConformance`: the tests of the transport contract, and the fixtures that give them connected ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest

from torchkv.testing.endings import EndingTests
from torchkv.testing.ends import Ends
from torchkv.testing.lane import Lane
from torchkv.testing.puts import PutTests
from torchkv.testing.refusals import RefusalTests

__all__ = ["TransportConformance"]


class TransportConformance(PutTests, RefusalTests, EndingTests):
    """Every test of the contract, over one lane; see `torchkv.testing` for how to use it.

    lane: set by the subclass.
    """

    lane: ClassVar[Lane]
    _ends: ClassVar[Ends]

    @classmethod
    def setup_class(cls) -> None:
        cls._ends = Ends(cls.lane)  # starts nothing yet

    @classmethod
    def teardown_class(cls) -> None:
        cls._ends.stop()

    @pytest.fixture
    def ends(self) -> Iterator[Ends]:
        """The ends of the lane, with no transport open before and after the test."""
        yield self._ends
        self._ends.close_transports()

    @pytest.fixture
    def process_ends(self, ends: Ends) -> Ends:
        """`ends` that are processes, so that one can be killed."""
        if ends.lane.in_process:
            pytest.skip(f"{ends.lane}: both ends live in this process")
        return ends
