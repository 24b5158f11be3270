"""The conformance suite of `torchkv.testing` over the transports of this repository."""

from __future__ import annotations

from torchkv.testing import Lane, TransportConformance


class TestLoopback(TransportConformance):
    lane = Lane("loopback", in_process=True)


class TestUcxLocal(TransportConformance):
    """Without UCX itself, where there are no GPUs; see `torchkv_ucx.local_channel`."""

    lane = Lane("ucx", link="cma")


class TestUcx(TransportConformance):
    lane = Lane("ucx", environment={"UCX_TLS": "all"}, link="cma")


class TestUcxTcp(TransportConformance):
    lane = Lane("ucx", environment={"UCX_TLS": "tcp"}, link="tcp")
