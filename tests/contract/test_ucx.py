"""What is particular to the UCX transport: its settings, its bytes, and its refusals."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchkv_ucx import environment, wire
from torchkv_ucx.spans import LocalRegions, RemoteRegions, resolve

from torchkv.errors import ProtocolError, TransportUnavailable
from torchkv.host.network import job_interface
from torchkv.testing import Lane
from torchkv.testing.ends import Ends
from torchkv.testing.pair import columns, connected
from torchkv.testing.processes import SERVER
from torchkv.transport import Batch


@dataclass(frozen=True)
class Done:
    """How a program ended, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


def run_python(code: str, **variables: str) -> Done:
    """Runs ``code`` in a process that has not loaded UCX, which reads its variables once per process."""
    with tempfile.TemporaryDirectory(prefix="torchkv-test-") as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = SERVER.Process(target=_execute, args=(code, variables, out, err), daemon=True)
        process.start()
        process.join(60)
        process.kill()
        process.join()
        assert process.exitcode is not None
        return Done(process.exitcode, out.read_text(encoding="utf-8"), err.read_text(encoding="utf-8"))


def _execute(code: str, variables: dict[str, str], out: Path, err: Path) -> None:
    # The descriptors and not sys.stdout, because UCX writes too.
    for fd, path in ((1, out), (2, err)):
        with path.open("wb") as file:
            os.dup2(file.fileno(), fd)
    for name in os.environ:
        if name.startswith(("UCX_", "TORCHKV_", "MASTER_")):
            del os.environ[name]
    os.environ.update(variables)
    assert not {"ucxx", "libucxx"} & set(sys.modules), "the server has loaded UCX already: this would show nothing"
    exec(compile(code, "<test>", "exec"), {"__name__": "test"})


# -- settings ---------------------------------------------------------------------------------------------------


def test_importing_the_backend_does_not_load_ucx() -> None:
    done = run_python(
        "import sys, torchkv_ucx; assert torchkv_ucx.UCXTransport.available() is None; print('ucxx' in sys.modules)"
    )
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def test_missing_ucxx_is_reported_with_the_line_that_mends_it() -> None:
    done = run_python(
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'ucxx' else find(name, *rest)\n"
        "from torchkv_ucx import UCXTransport\n"
        "from torchkv.errors import TransportUnavailable\n"
        "print(UCXTransport.available())\n"
        "try: UCXTransport()\n"
        "except TransportUnavailable as error: print(error)\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("pip install ucxx-cu13") == 2


_SHOW = """
import os
from torchkv_ucx import UCXTransport
transport = UCXTransport()
names = "RNDV_THRESH", "NET_DEVICES", "MEMTYPE_CACHE", "CUDA_IPC_CACHE", "ERROR_SIGNALS"
print(*(os.environ.get("UCX_" + name) for name in names), sep="|")
transport.close()
"""


def test_settings_stand_before_ucx_loads() -> None:
    done = run_python(_SHOW, UCX_TLS="all")
    assert (done.returncode, done.stdout) == (0, "inf|lo|n|None|\n"), done.stderr


def test_the_users_settings_win() -> None:
    done = run_python(
        _SHOW, UCX_RNDV_THRESH="64k", UCX_NET_DEVICES="all", UCX_CUDA_IPC_CACHE="n", UCX_ERROR_SIGNALS="SIGILL"
    )
    assert (done.returncode, done.stdout) == (0, "64k|all|n|n|SIGILL\n"), done.stderr
    assert "UCX_NET_DEVICES=all was set beforehand" in done.stderr
    assert "torchkv would choose lo" in done.stderr
    assert "UCX_NET_DEVICES" not in run_python(_SHOW, UCX_TLS="all").stderr  # the control: nothing was set


def test_an_earlier_import_of_ucxx_does_not_cost_the_fast_lane() -> None:
    """It leaves RNDV_THRESH=8192 in the environment, with which cma is silently replaced by TCP."""
    code = (
        "{before}\nimport torch\nfrom torchkv_ucx import UCXTransport\n"
        "a, b = UCXTransport(), UCXTransport()\n"
        "there, back = a.connect(b.address(), []), b.connect(a.address(), [])\n"
        "flush = there.flush()\n"
        "while not flush.done: a.progress(), b.progress()\n"
        "print(flush.error, there.link)\na.close(), b.close()"
    )
    for before in ("", "import ucxx"):
        done = run_python(code.format(before=before), UCX_TLS="all")
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith("None cma/memory\n")  # UCX loaded by others may warn on stdout first
    # The control: a user who asks for rendezvous gets it, and TCP.
    done = run_python(code.format(before=""), UCX_TLS="all", UCX_RNDV_THRESH="8192")
    assert "cma" not in done.stdout
    assert "tcp" in done.stdout, done.stderr


_LISTENING = """
import os
from torchkv_ucx import UCXTransport
transport = UCXTransport()
own = set()
for fd in os.listdir("/proc/self/fd"):
    if os.path.islink(f"/proc/self/fd/{fd}"):
        own.add(os.readlink(f"/proc/self/fd/{fd}").removeprefix("socket:[").removesuffix("]"))
rows = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}").readlines()[1:]]
print(sorted(row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in own))
transport.close()
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there are GPUs UCX is always started")
def test_nothing_listens_on_one_host() -> None:
    done = run_python(_LISTENING)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_only_loopback_listens() -> None:
    done = run_python(_LISTENING, UCX_TLS="all")
    assert (done.returncode, done.stdout) == (0, "['0100007F']\n"), done.stderr


def test_the_listening_test_would_notice() -> None:
    others = [name for _, name in socket.if_nameindex() if name != "lo"]
    if not others:
        pytest.skip("this host has no interface but lo")
    done = run_python(_LISTENING, UCX_NET_DEVICES="all")
    assert done.returncode == 0, done.stderr
    assert done.stdout != "['0100007F']\n"


def test_the_interface_follows_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "TORCHKV_INTERFACE"):
        monkeypatch.delenv(name, raising=False)
    assert environment.net_devices() == "lo"
    for master in ("127.0.0.1", "localhost", "127.0.1.1"):
        monkeypatch.setenv("MASTER_ADDR", master)
        assert environment.net_devices() == "lo"
    monkeypatch.setenv("TORCHKV_INTERFACE", "192.0.2.77")  # reserved for documentation: never ours
    with pytest.raises(TransportUnavailable, match=r"192\.0\.2\.77"):
        environment.net_devices()
    for _, name in socket.if_nameindex():
        monkeypatch.setenv("TORCHKV_INTERFACE", name)
        try:
            device, address = job_interface()
        except TransportUnavailable as error:  # it has no IPv4 address
            assert f"{name} None" in str(error)  # noqa: PT017 - which interfaces have one, only the host knows
            continue
        assert device == environment.net_devices().split(",")[0] == name
        monkeypatch.setenv("TORCHKV_INTERFACE", address)
        assert job_interface() == (name, address)


# -- bytes from the network ----------------------------------------------------------------------------------------

_REGION = wire.RegionBlob(0x7F00_0000_0000, 8192, b"key", b"")
_ADDRESS = wire.AddressBlob(b"worker", 1, 4096, bytes(16))


def test_blobs_survive_the_trip() -> None:
    assert wire.unpack_region(wire.pack(_REGION)) == _REGION
    assert wire.unpack_address(wire.pack(_ADDRESS)) == _ADDRESS


_BAD_REGIONS = {
    "negative-base": {"base": -1},
    "negative-size": {"nbytes": -1},
    "end-beyond-user-space": {"nbytes": 1 << 48},
    "base-beyond-user-space": {"base": 1 << 62},
    "long-key": {"rkey": b"x" * 1025},
    "long-share": {"share": b"x" * 1025},
}


@pytest.mark.parametrize("change", _BAD_REGIONS.values(), ids=_BAD_REGIONS.keys())
def test_every_field_is_bounded_even_under_a_right_digest(change: dict[str, Any]) -> None:
    bad = msgspec.structs.replace(_REGION, **change)
    with pytest.raises(ProtocolError):
        wire.unpack_region(wire.pack(bad))


@given(st.binary(max_size=300))
def test_any_body_under_a_right_digest_is_refused_or_well_formed(body: bytes) -> None:
    framed = wire.FRAME.wrap(body)
    for unpack in (wire.unpack_region, wire.unpack_address):
        with pytest.raises(ProtocolError):
            unpack(framed)


# -- offsets ---------------------------------------------------------------------------------------------------------


@given(
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.integers(-(1 << 63), (1 << 63) - 1),
)
def test_resolve_agrees_with_exact_arithmetic(local: int, remote: int, length: int) -> None:
    regions = LocalRegions()
    regions.add(1 << 20, 1000, 7)
    peer = RemoteRegions(np.array([1 << 30]), np.array([2000]), np.array([8]))
    batch = columns((0, local, 0, remote, length))
    inside = local >= 0 and remote >= 0 and length >= 0 and local + length <= 1000 and remote + length <= 2000
    if inside:
        spans = resolve(Batch(*batch), regions, peer, "peer")
        assert (int(spans.source[0]), int(spans.target[0])) == ((1 << 20) + local, (1 << 30) + remote)
    else:
        with pytest.raises(ProtocolError):
            resolve(Batch(*batch), regions, peer, "peer")


# -- lanes ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def shared_memory_only(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """Lanes that reach only memory that UCX itself allocates; parametrised with further settings."""
    ends = Ends(Lane("ucx", environment={"UCX_TLS": "posix,self", **request.param}))
    yield ends
    ends.close_transports()
    ends.stop()


@pytest.mark.parametrize("shared_memory_only", [{}], indirect=True)
def test_a_peer_that_no_lane_reaches_is_refused(shared_memory_only: Ends) -> None:
    with pytest.raises(TransportUnavailable, match="UCX_TLS"):
        connected(shared_memory_only)


@pytest.mark.parametrize("shared_memory_only", [{"UCX_MM_ERROR_HANDLING": "y"}], indirect=True)
def test_a_put_that_needs_emulation_is_refused_not_slow(shared_memory_only: Ends) -> None:
    pair = connected(shared_memory_only)
    assert pair.a.call("wait", pair.a.call("flush", pair.channel)) == [None]
    assert "emulated" in pair.a.call("link", pair.channel)
    (error,) = pair.a.call("wait", pair.a.call("put", pair.channel, *columns((0, 0, 0, 0, 4096))))
    assert error is not None
    assert error[0] == "TransportUnavailable"
    assert pair.received() == pair.target


# -- progress ---------------------------------------------------------------------------------------------------

MANY_CHANNELS = """
import collections
import torch
import torchkv_ucx
from torchkv.transport import Batch
from torchkv_ucx.queue_channel import QueueChannel

stepped = collections.Counter()
step = QueueChannel.step

def counted(channel, budget):
    stepped[channel] += 1
    return step(channel, budget)

QueueChannel.step = counted
a, b = torchkv_ucx.UCXTransport(), torchkv_ucx.UCXTransport()
regions = [each.register(torch.zeros(64, dtype=torch.uint8)) for each in (a, b)]
address, descriptor = b.address(), regions[1].descriptor()
channels = [a.connect(address, [descriptor]) for _ in range(20)]

def rounds(until):
    for _ in range(100_000):
        a.progress(), b.progress()
        if until():
            return
    raise AssertionError("not yet")

rounds(lambda: all(channel.idle for channel in channels))
rounds(lambda: not a._working)
stepped.clear()
a.progress()
assert not stepped, "no channel has anything to do"
put = channels[3].put(Batch.one(local_region=0, local_offset=0, remote_region=0, remote_offset=0, length=64))
a.progress()
assert set(stepped) == {channels[3]}
flush = channels[3].flush()
rounds(lambda: put.done and flush.done)
assert (put.error, flush.error) == (None, None)
a.close(), b.close()
print("done")
"""


@pytest.mark.parametrize("tls", ["all", "tcp"])
def test_a_round_of_progress_steps_the_channels_that_have_work(tls: str) -> None:
    """However many peers there are with whom nothing is under way."""
    done = run_python(MANY_CHANNELS, UCX_TLS=tls)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
