"""One rank of the NVSHMEM tests on GPUs, in a process of its own.

``python -m tests.helpers.ranks.nvshmem_rank CASE RANK SIZE PORT``

NVSHMEM is started once a process and ends with it, so every case has fresh ones. The parent hosts the store.
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torchkv_nvshmem import NVSHMEMTransport
from torchkv_nvshmem.exchange import through_store

from torchkv.cuda import ipc
from torchkv.errors import PeerLost, ProtocolError, TransferCancelled, TransportUnavailable
from torchkv.transport import Batch, Completion

POISON, CANARY = 0xDD, 0xC5
KIB, MIB = 1 << 10, 1 << 20
SECONDS = 100.0  # of one case: beside others NVSHMEM takes most of a minute to start


@triton.jit
def _store(source, target, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - Triton reads annotations as types
    """Words of ``source`` through a plain address, as torchkv's kernels do."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(source + at, mask=at < count)
    tl.store(target.to(tl.pointer_type(tl.int32)) + at, words, mask=at < count)


class Rank:
    """What a case needs: the group, a joined transport, and channels to the others."""

    def __init__(self, rank: int, size: int, port: int) -> None:
        self.rank = rank
        self.size = size
        self.device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(self.device)
        self.store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=SECONDS))
        self.gather = through_store(dist.PrefixStore("test/", self.store), rank=rank, size=size)

    def join(self, *, name: str = "group", rank: int | None = None, size: int | None = None) -> None:
        store = dist.PrefixStore(f"{name}/", self.store)
        rank = self.rank if rank is None else rank
        NVSHMEMTransport.join(rank=rank, size=size or self.size, store=store, device=self.device, reserve=64 * MIB)

    def open(self) -> None:
        self.transport = NVSHMEMTransport()

    def connect(self, *tensors: torch.Tensor) -> list[Any]:
        """Registers ``tensors`` and connects to every rank, itself too; channels by rank."""
        regions = [self.transport.register(tensor) for tensor in tensors]
        published = self.gather(b"".join(_sized(r) for r in (self.transport.address(), *_descriptors(regions))))
        channels = []
        for data in published:
            address, *descriptors = _parts(data)
            channels.append(self.transport.connect(address, descriptors))
        return channels

    def wait(self, *operations: Completion) -> list[Any]:
        self.until(lambda: all(operation.done for operation in operations))
        return [operation.error for operation in operations]

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, "waited 20 s"
            self.transport.progress()

    def meet(self) -> None:
        self.gather(b"")


def _descriptors(regions: Sequence[Any]) -> list[bytes]:
    return [region.descriptor() for region in regions]


def _sized(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


def _parts(data: bytes) -> list[bytes]:
    parts = []
    while data:
        size = int.from_bytes(data[:4], "big")
        parts.append(data[4 : 4 + size])
        data = data[4 + size :]
    return parts


def batch(*columns: Any) -> Batch:
    return Batch(*(np.ascontiguousarray(np.atleast_1d(column), dtype=np.int64) for column in columns))


def scattered(count: int, sizes: Sequence[int], nbytes: int) -> Batch:
    """Spans of random sizes at random places of regions 0, not overlapping at the destination."""
    rng, step = np.random.default_rng(), max(sizes)
    length = rng.choice(np.array(sizes), size=count)
    remote = rng.permutation(nbytes // step)[:count] * step + rng.integers(0, step - length + 1)
    zero = np.zeros(count, dtype=np.int64)
    return batch(zero, rng.integers(0, nbytes - length + 1), zero, remote, length)


def expected(target: np.ndarray, source: np.ndarray, given: Batch) -> np.ndarray:
    """The slow, obviously right put."""
    result = target.copy()
    rows = zip(given.local_offset.tolist(), given.remote_offset.tolist(), given.length.tolist(), strict=True)
    for local, remote, length in rows:
        result[remote : remote + length] = source[local : local + length]
    return result


def random_bytes(nbytes: int, device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng().integers(0, 256, nbytes, dtype=np.uint8)).to(device)


def assert_bytes(have: torch.Tensor, want: np.ndarray) -> None:
    wrong = np.flatnonzero(have.cpu().numpy() != want)
    assert not len(wrong), f"{len(wrong)} wrong bytes, the first at {wrong[0]}"


# -- cases ------------------------------------------------------------------------------------------------------


def case_puts(me: Rank) -> None:
    """Each rank puts scattered spans into the next one; guards around the memory stay as they were."""
    me.join()
    size = 2 * MIB
    guards = [NVSHMEMTransport.allocate_shared(4 * KIB, me.device)]
    mine = NVSHMEMTransport.allocate_shared(size, me.device)
    inbox = NVSHMEMTransport.allocate_shared(size, me.device)
    guards.append(NVSHMEMTransport.allocate_shared(4 * KIB, me.device))
    for guard in guards:
        guard.fill_(CANARY)
    source = random_bytes(size)
    mine.copy_(source)
    inbox.fill_(POISON)
    torch.cuda.synchronize()
    me.open()
    channels = me.connect(mine, inbox)
    there = channels[(me.rank + 1) % me.size]
    given = scattered(400, (1, 3, 8, 512, 4096, 5000), size)
    given = batch(given.local_region, given.local_offset, given.remote_region + 1, given.remote_offset, given.length)
    assert me.wait(there.put(given), there.flush()) == [None, None]
    rows = np.stack([given.local_offset, given.remote_offset, given.length]).tobytes()
    told = me.gather(source.numpy().tobytes() + rows)[(me.rank - 1) % me.size]
    sent, table = np.frombuffer(told[:size], np.uint8), np.frombuffer(told[size:], np.int64).reshape(3, -1)
    want = expected(np.full(size, POISON, np.uint8), sent, batch(table[2], table[0], table[2], table[1], table[2]))
    assert_bytes(inbox, want)
    assert_bytes(mine, source.numpy())
    for guard in guards:
        assert_bytes(guard, np.full(4 * KIB, CANARY, np.uint8))
    inbox[12_345] ^= 1  # the control
    try:
        assert_bytes(inbox, want)
    except AssertionError:
        pass
    else:
        raise AssertionError("the comparison does not notice a wrong byte")
    for bad in ((0, 0, 1, size - 1, 2), (0, size, 1, 0, 1), (0, 0, 2, 0, 1)):
        try:
            there.put(batch(*bad))
        except ProtocolError:
            continue
        raise AssertionError(f"{bad} was not refused")
    me.meet()
    me.transport.close()


def case_flushes(me: Rank) -> None:
    """Bytes are visible to the peer's GPU after a flush, a few hundred times, in both directions at once."""
    me.join()
    size, rounds = 64 * KIB, 300
    mine, inbox = (NVSHMEMTransport.allocate_shared(size, me.device) for _ in range(2))
    inbox.zero_()
    torch.cuda.synchronize()
    me.open()
    channels = me.connect(mine, inbox)
    there, back = channels[1 - me.rank], 1 - me.rank
    for i in range(1, rounds + 1):
        mine.fill_((i * (me.rank + 3)) % 251)
        torch.cuda.current_stream().synchronize()
        assert me.wait(there.put(batch(0, 0, 1, 0, size)), there.flush()) == [None, None]
        me.meet()
        wrong = int((inbox != (i * (back + 3)) % 251).sum())
        assert wrong == 0, f"round {i}: {wrong} bytes were not visible after the writer's flush"
        me.meet()
    me.transport.close()


def case_views(me: Rank) -> None:
    """A kernel stores through views: of symmetric memory, and of an engine's own memory, where puts are refused."""
    me.join()
    size = MIB
    shared = NVSHMEMTransport.allocate_shared(size, me.device)
    own = ipc.allocate(size, me.device)
    for tensor in (shared, own):
        tensor.fill_(POISON)
    torch.cuda.synchronize()
    me.open()
    there = me.connect(shared, own)[(me.rank + 1) % me.size]
    data = random_bytes(size // 2, me.device)
    words = data.view(torch.int32)
    for region in (0, 1):
        view = there.view(region)
        assert view is not None, there.why_no_view(region)
        assert (view.nbytes, view.device) == (size, me.device)
        _store[(triton.cdiv(len(words), 1024),)](words, view.ptr + size // 4, len(words), BLOCK=1024)
    torch.cuda.synchronize()
    told = me.gather(data.cpu().numpy().tobytes())[(me.rank - 1) % me.size]
    want = np.full(size, POISON, np.uint8)
    want[size // 4 : size // 4 + size // 2] = np.frombuffer(told, np.uint8)
    assert_bytes(shared, want)
    assert_bytes(own, want)
    for local, remote in ((0, 1), (1, 0)):
        try:
            there.put(batch(local, 0, remote, 0, 8))
        except TransportUnavailable as error:
            assert "symmetric memory" in str(error)  # noqa: PT017 - outside pytest
            continue
        raise AssertionError("a put outside symmetric memory was not refused")
    me.meet()
    me.transport.close()


def case_cancel(me: Rank) -> None:
    """A cancelled put stops midway, and nothing of it lands once it is done."""
    me.join()
    size = 32 * MIB
    mine, inbox = (NVSHMEMTransport.allocate_shared(size, me.device) for _ in range(2))
    mine.fill_(1)
    inbox.fill_(POISON)
    torch.cuda.synchronize()
    me.open()
    there = me.connect(mine, inbox)[(me.rank + 1) % me.size]
    me.meet()
    count = size // 64
    at = np.random.default_rng().permutation(count) * 64
    zero = np.zeros(count)
    long = there.put(batch(zero, at, zero + 1, at, zero + 64))
    me.transport.progress()
    long.cancel()
    errors = me.wait(long, there.flush())
    assert isinstance(errors[0], TransferCancelled), "the put ended before it could be cancelled"
    assert errors[1] is None
    me.meet()
    before = inbox.clone()
    time.sleep(0.05)
    assert torch.equal(inbox, before), "bytes landed after the cancelled put was done"
    untouched = int((inbox.view(-1, 64) == POISON).all(dim=1).sum())
    assert 0 < untouched < count, f"{untouched} of {count} spans were not written"
    me.transport.close()


def case_memory(me: Rank) -> None:
    """Unlike sizes, memory that is used again, too much, and a second group of the same ranks."""
    me.join()
    sizes = [96 * MIB, 1 * MIB]
    first = NVSHMEMTransport.allocate_shared(sizes[me.rank % 2], me.device)
    assert len(first) == sizes[me.rank % 2]
    address = first.data_ptr()
    del first
    again = NVSHMEMTransport.allocate_shared(sizes[me.rank % 2], me.device)
    assert again.data_ptr() == address
    me.join(name="second")
    try:
        NVSHMEMTransport.allocate_shared(1 << 40, me.device)
    except TransportUnavailable as error:
        assert "bytes free" in str(error)  # noqa: PT017 - outside pytest
    else:
        raise AssertionError("a terabyte was not refused")
    after = NVSHMEMTransport.allocate_shared(700 * MIB, me.device)  # the heap was not harmed by the refusal
    after.fill_(7)
    assert int(after[-1]) == 7
    me.open()
    there = me.connect(after, again)[(me.rank + 1) % me.size]
    assert me.wait(there.put(batch(0, 0, 0, 699 * MIB, 4 * KIB)), there.flush()) == [None, None]
    me.meet()
    me.transport.close()


def case_late(me: Rank) -> None:
    """A rank that was not there at the start is refused on all ranks, and the others go on."""
    others = me.size - 1
    if me.rank < others:
        me.join(name="first", size=others)
    try:
        me.join(name="all")
    except TransportUnavailable as error:
        assert "no new members" in str(error)  # noqa: PT017 - outside pytest
    else:
        raise AssertionError("a rank that came later was not refused")
    if me.rank < others:
        me.join(name="again", size=others)
        assert len(NVSHMEMTransport.allocate_shared(MIB, me.device)) == MIB


def case_killed(me: Rank) -> None:
    """Rank 1 is killed while rank 0 writes to it: rank 0 learns it, closes and ends, all without waiting for it."""
    me.join()
    size = 64 * MIB
    mine = NVSHMEMTransport.allocate_shared(size, me.device)
    me.open()
    there = me.connect(mine)[1 - me.rank]
    assert me.wait(there.put(batch(0, 0, 0, 0, size)), there.flush()) == [None, None]
    assert not there.drained
    me.store.set(f"ready{me.rank}", "")
    if me.rank == 1:
        time.sleep(SECONDS)
        raise AssertionError("nobody killed this rank")
    deadline = time.monotonic() + 20
    lost = None
    while lost is None:
        assert time.monotonic() < deadline, "the death was not noticed"
        try:
            lost = me.wait(there.put(batch(0, 0, 0, 0, size)), there.flush())[1]
        except PeerLost as error:
            lost = error
    assert isinstance(lost, PeerLost), lost
    assert there.drained
    begin = time.monotonic()
    me.transport.close()
    assert time.monotonic() - begin < 3
    me.open()  # this process goes on
    itself = me.transport.connect(me.transport.address(), [me.transport.register(mine).descriptor()])
    assert me.wait(itself.put(batch(0, 0, 0, size // 2, KIB)), itself.flush()) == [None, None]
    me.transport.close()


def case_rates(me: Rank) -> None:
    """Prints what rank 0 moves to rank 1, each the best of ten."""
    me.join()
    size = 256 * MIB
    mine = NVSHMEMTransport.allocate_shared(size, me.device)
    me.open()
    there = me.connect(mine)[1 - me.rank]
    if me.rank == 0:
        count = 1000
        at = np.random.default_rng().permutation(size // (64 * KIB))[:count] * (64 * KIB)
        zero = np.zeros(count)
        kernels = mine.view(torch.int32)
        view = there.view(0)
        assert view is not None, there.why_no_view(0)

        def store() -> None:
            _store[(triton.cdiv(len(kernels), 4096),)](kernels, view.ptr, len(kernels), BLOCK=4096)
            torch.cuda.synchronize()

        def put(given: Batch) -> None:
            assert me.wait(there.put(given), there.flush()) == [None, None]

        _rate(f"{there.link}: one 256 MiB put", size, lambda: put(batch(0, 0, 0, 0, size)))
        _rate("1000 x 64 KiB puts", count * 64 * KIB, lambda: put(batch(zero, at, zero, at, zero + 64 * KIB)), count)
        _rate("100 x 1 MiB puts", 100 * MIB, lambda: put(batch(zero[:100], at[:100] // 16 * 16, zero[:100],
              np.arange(100) * MIB, zero[:100] + MIB)), 100)  # fmt: skip
        _rate("256 MiB stored by a kernel through the view", size, store)
        _rate("8 B put and flush", 8, lambda: put(batch(0, 0, 0, 0, 8)), 1)
    me.meet()
    me.transport.close()


def _rate(what: str, nbytes: int, call: Callable[[], None], count: int = 1) -> None:
    call()
    best = min(_seconds(call) for _ in range(10))
    print(f"  {what:48s} {nbytes / best / 1e9:8.2f} GB/s  {best / count * 1e6:9.2f} us each", flush=True)


def _seconds(call: Callable[[], None]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


CASES = {name.removeprefix("case_"): case for name, case in globals().items() if name.startswith("case_")}


# -- the parent's side -------------------------------------------------------------------------------------------


def run(case: str, size: int = 2, *, kill: int | None = None) -> str:
    """Runs a case in ``size`` processes; what they printed. Raises ``AssertionError`` unless all end as they should."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=SECONDS))
    root = Path(__file__).resolve().parents[3]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    paths = [str(root), str(root / "backends"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    commands = [
        [sys.executable, "-m", "tests.helpers.ranks.nvshmem_rank", case, str(rank), str(size), str(store.port)]
        for rank in range(size)
    ]
    ranks = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    try:
        if kill is not None:
            store.wait([f"ready{rank}" for rank in range(size)], timedelta(seconds=SECONDS))
            ranks[kill].kill()
        deadline = time.monotonic() + SECONDS + 10
        output = [rank.communicate(timeout=max(1.0, deadline - time.monotonic()))[0] for rank in ranks]
    except Exception:
        for rank in ranks:
            rank.kill()
        print(*(rank.communicate()[0] for rank in ranks), sep="\n")
        raise
    codes = [rank.returncode for rank in ranks]
    want = [-9 if rank == kill else 0 for rank in range(size)]
    assert codes == want, f"{case}: exit codes {codes}, expected {want}\n" + "\n--\n".join(output)
    return "".join(output)


def main() -> None:
    case, rank, size, port = sys.argv[1], *map(int, sys.argv[2:])
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    CASES[case](Rank(rank, size, port))
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
