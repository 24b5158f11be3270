"""Side streams on a real GPU, with the queues that CUDA has by default: kernels run beside all that may wait."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from harness import Ranks
from rank_parts import needs_gpus, until

from torchkv.cudadriver import num_queues
from torchkv.device import Device
from torchkv.streams import OTHERS, may_wait

GPU = torch.device("cuda", 0)

pytestmark = needs_gpus(1)


def waiting_and_running() -> None:
    """All that may wait do so, and some streams of a model; those that never wait go on."""
    device = Device(GPU, blocks=132)
    assert device.signals
    ones = torch.ones(1 << 20, device=GPU)
    ones += 1  # loads the kernel: not while a stream is held
    torch.cuda.synchronize()
    waiting, gated = may_wait()
    with ExitStack() as stack:
        held = [torch.cuda.Stream(GPU) for _ in range(OTHERS - 2)]
        held += [claim.stream for number in range(gated) if (claim := device.claim((), f"{number}")) is not None]
        held += [stack.enter_context(device.waiting_stream(1, serial)) for serial in range(waiting)]
        assert len(set(held)) == num_queues() - 2 == 6
        holds = [device.flags.hold(stream) for stream in held]
        flags = []
        for stream in (device.outgoing, device.incoming):
            with torch.cuda.stream(stream):
                ones += 1
            flags.append(device.flags.signal(stream))
        until(lambda: all(flag.done for flag in flags), "kernels run beside streams that wait")
        assert not any(hold.passed for hold in holds)
        for hold in holds:
            hold.open()
        torch.cuda.synchronize()
        assert all(hold.passed for hold in holds)
    device.close()


def test_what_waits_holds_up_nothing_else() -> None:
    ranks = Ranks(1)  # a process of its own, without the variable that other tests set
    try:
        ranks.run(waiting_and_running)
    finally:
        ranks.close()
