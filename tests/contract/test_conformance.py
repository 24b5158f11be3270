"""The conformance suite of `torchkv.testing` over the transports of this repository."""

from __future__ import annotations

from torchkv.testing import Lane, TransportConformance


class TestLoopback(TransportConformance):
    lane = Lane("loopback", in_process=True)


class TestUcx(TransportConformance):
    lane = Lane("ucx", link="cma")


class TestUcxTcp(TransportConformance):
    lane = Lane("ucx", environment={"UCX_TLS": "tcp"}, link="tcp")
