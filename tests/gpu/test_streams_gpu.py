"""Side streams on a real GPU, with the queues that CUDA has by default: kernels run beside all that may wait."""

from __future__ import annotations

import torch

from tests.helpers.harness import Ranks
from tests.helpers.ranks.gpu_pair import needs_gpus
from tests.helpers.sync_words import has_passed
from tests.helpers.waiting import until
from torchkv.cuda.driver import num_queues
from torchkv.cuda.side_streams import RESERVED_QUEUES, enough_queues, num_waiting_streams
from torchkv.kernels.gpu_context import GpuContext

GPU = torch.device("cuda", 0)

pytestmark = needs_gpus(1)


def waiting_and_running() -> None:
    """All that may wait do so, and some streams of a model; those that never wait go on."""
    device = GpuContext(GPU, blocks=132)
    assert enough_queues()
    ones = torch.ones(1 << 20, device=GPU)
    ones += 1  # loads the kernel: not while a stream is held
    torch.cuda.synchronize()
    held = [torch.cuda.Stream(GPU) for _ in range(RESERVED_QUEUES - 2)]
    held += [
        claim.stream for number in range(num_waiting_streams()) if (claim := device.claim((), f"{number}")) is not None
    ]
    assert len(set(held)) == num_queues() - 2 == 6
    holds = [device.sync_words.hold(stream) for stream in held]
    sync_words = []
    for stream in (device.outgoing, device.incoming):
        with torch.cuda.stream(stream):
            ones += 1
        sync_words.append(device.sync_words.signal(stream))
    until(lambda: all(completion.done for completion in sync_words), "kernels run beside streams that wait")
    assert not any(has_passed(hold) for hold in holds)
    for hold in holds:
        hold.open()
    torch.cuda.synchronize()
    assert all(has_passed(hold) for hold in holds)
    device.close()


def test_what_waits_holds_up_nothing_else() -> None:
    ranks = Ranks(1)  # a process of its own, without the variable that other tests set
    try:
        ranks.run(waiting_and_running)
    finally:
        ranks.close()
