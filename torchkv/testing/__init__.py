"""The conformance suite of transports, for packages outside torchkv to run against their own.

A transport keeps the contract of `torchkv.transport.interface` if these tests pass. To run them:

1. Name the transport in your package's entry points, as an installed package would (``pip install -e .``)::

       [project.entry-points."torchkv.backends"]
       mine = "my_package:MyTransport"

2. Write one test class for each lane: a name, and whatever environment makes the transport take another way::

       # tests/test_conformance.py
       from torchkv.testing import Lane, TransportConformance

       class TestMine(TransportConformance):
           lane = Lane("mine")

       class TestMineOverTcp(TransportConformance):
           lane = Lane("mine", environment={"MINE_NETWORK": "tcp"}, link="tcp")

3. Run ``pytest tests/test_conformance.py``. It takes about a minute for each lane.

What the tests do: they start two or more processes, open a transport in each, and drive them through pipes. Sources
are fresh random bytes, destinations are poisoned, memory around regions holds canaries, and every result is compared
byte by byte with a slow reference. Batches with spans outside a region, damaged addresses and descriptors must be
refused with typed errors and without a byte written. Puts are cancelled midway, regions deregistered, channels and
transports closed, peers killed with SIGKILL.

What `Lane` can say of a transport that is not like most: it cannot reach memory that it did not allocate
(``foreign_memory=False``), it reaches no other process (``in_process=True``), it moves device memory
(``devices=("cuda:0", "cuda:1")``). There is no switch for any other test: the rest of the contract has no optional
parts. A transport whose ranks must all `join` before it is made (``Capabilities.collective_memory``) is not covered.

A transport that cannot work on the machine fails the tests with the reason that `available` gives. To skip them there::

    @pytest.mark.skipif(MyTransport.available() is not None, reason="no such network here")
    class TestMine(TransportConformance): ...

Tests of your own can use the same ends: the fixtures ``ends`` and ``process_ends``, and `torchkv.testing.pair`.
The suite needs pytest, and nothing else that torchkv does not need itself.
"""

from __future__ import annotations

import pytest

# Before they are imported: pytest rewrites their assertions, so that failures show the values compared.
pytest.register_assert_rewrite(
    *(f"torchkv.testing.{name}" for name in ("conformance", "endings", "ends", "pair", "puts", "refusals"))
)

from torchkv.testing.conformance import TransportConformance  # noqa: E402
from torchkv.testing.lane import Lane  # noqa: E402

__all__ = ["Lane", "TransportConformance"]
