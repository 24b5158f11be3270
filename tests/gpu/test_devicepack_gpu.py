"""Page packers on one GPU: what tests/unit/pack_cases.py does in the interpreter, and sizes that it cannot."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.helpers.packing import Transfer, locate_byte, stage_for, transfers
from tests.helpers.ranks.gpu_pair import needs_gpus
from tests.helpers.references.page_transfer import differences, gqa
from tests.helpers.tiles import ONE_STEP, STEPS, use_steps
from torchkv.kernels import copies, launch
from torchkv.kernels.launch import tickets_of
from torchkv.layout.layout import KVLayout

GUARD = 256  # bytes around a stage


def mla(**given: object) -> KVLayout:
    fields = {"num_layers": 2, "latent_dim": 64, "rope_dim": 8, "page_size": 4, "dtype": torch.bfloat16}
    return KVLayout.mla(**{**fields, **given})


BF16 = {"head_dim": 8, "dtype": torch.bfloat16}
ODD = {"head_dim": 3, "dtype": torch.int8, "page_size": 3}

FAMILIES: dict[str, tuple[dict[int, KVLayout], KVLayout, int]] = {
    "equal": ({0: gqa(**BF16)}, gqa(**BF16), 16),
    "heads, few to many": ({i: gqa(i, 2, **BF16) for i in range(2)}, gqa(**BF16), 16),
    "heads, many to few": ({0: gqa(**BF16)}, gqa(1, 2, **BF16), 16),
    "HND to NHD": ({0: gqa(order="HND", **BF16)}, gqa(**BF16), 16),
    "NHD slices to HND": ({i: gqa(i, 2, **BF16) for i in range(2)}, gqa(order="HND", **BF16), 16),
    "striped": ({i: gqa(i, 4, num_kv_heads=2, **BF16) for i in range(4)}, gqa(num_kv_heads=2, **BF16), 16),
    "pages of 8 to 2": ({0: gqa(page_size=8, **BF16)}, gqa(page_size=2, **BF16), 16),
    "pages of 2 to 8": ({0: gqa(page_size=2, **BF16)}, gqa(page_size=8, **BF16), 16),
    "MLA, striped": ({0: mla(), 1: mla()}, mla(), 16),
    "rows not a power of two": ({0: mla()}, mla(page_size=2), 16),
    "unit 8": ({0: gqa(head_dim=4)}, gqa(1, 4, head_dim=4), 8),
    "unit 4": ({0: gqa()}, gqa(1, 4), 4),
    "unit 2": ({0: gqa(head_dim=3)}, gqa(1, 4, head_dim=3), 2),
    "unit 1": ({0: gqa(**ODD)}, gqa(1, 2, **ODD), 1),
    "pairs of 64 KiB": ({0: gqa(head_dim=512, page_size=32)}, gqa(1, 2, head_dim=512, page_size=32), 16),
}


def guarded(nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random memory on the GPU, and the stage in the middle of it."""
    memory = stage_for(nbytes + 2 * GUARD).cuda()
    return memory, memory[GUARD:-GUARD]


def check_pieces(transfer: Transfer, parts: int) -> None:
    for piece, layout in transfer.pieces(parts):
        memory, stage = guarded(layout.nbytes)
        want = memory.cpu()
        want[GUARD:-GUARD] = transfer.staged(piece, layout, stage)
        transfer.fill(piece, layout, stage)
        torch.cuda.synchronize()
        assert torch.equal(memory.cpu(), want)
        transfer.empty(piece, layout, stage)
        torch.cuda.synchronize()
        assert transfer.first_mismatch(piece) is None
        assert copies.first_error(transfer.errors) is None


@needs_gpus(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("blocks", "parts", "num_tokens", "side_by_side"), [(1, 1, 11, STEPS), (16, 3, 75, STEPS), (132, 2, 150, ONE_STEP)]
)
def test_every_byte(
    family: str, blocks: int, parts: int, num_tokens: int, side_by_side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers, reader, gap = FAMILIES[family]
    use_steps(monkeypatch, side_by_side)
    made, expected = transfers(writers, reader, gap, monkeypatch, num_tokens=num_tokens, device="cuda:0")
    for transfer in made:
        transfer.blocks = blocks
        check_pieces(transfer, parts)
    assert differences(made[0].target.now(), expected) == 0


@needs_gpus(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_mismatch_is_named(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writers, reader, gap = FAMILIES[family]
    transfer = transfers(writers, reader, gap, monkeypatch, num_tokens=150, device="cuda:0")[0][-1]
    piece, layout = transfer.everything()
    _, stage = guarded(layout.nbytes)
    transfer.fill(piece, layout, stage)
    rng = np.random.default_rng()
    for transfer.blocks, flips in ((1, 5), (16, 1), (132, 5)):
        _, spoilt = guarded(layout.nbytes)
        spoilt.copy_(stage)
        flipped = []
        for byte in rng.choice(layout.payload, flips, replace=False):
            offset, order, name = locate_byte(transfer, piece, layout, int(byte))
            spoilt[offset] ^= 1 << int(rng.integers(8))
            flipped.append((order, name))
        transfer.mismatches.zero_()
        transfer.empty(piece, layout, spoilt)
        torch.cuda.synchronize()
        assert transfer.first_mismatch(piece) == min(flipped)[1], (flipped, transfer.blocks)
    assert copies.first_error(transfer.errors) is None


@needs_gpus(1)
@pytest.mark.parametrize("page", [1 << 20, -1, 1 << 40])
def test_a_bad_page_is_left_out_and_named(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (transfer,), expected = transfers({0: gqa(**BF16)}, gqa(**BF16), 16, monkeypatch, num_tokens=64, device="cuda:0")
    piece, layout = transfer.everything()
    _, stage = guarded(layout.nbytes)
    transfer.fill(piece, layout, stage)
    before = transfer.target.now()
    for key, tensor in expected.tensors.items():
        tensor[transfer.dst_pages[2]] = before.tensors[key][transfer.dst_pages[2]]
    transfer.dst_pages[2] = page
    transfer.empty(piece, layout, stage)
    torch.cuda.synchronize()
    assert copies.first_error(transfer.errors) == ("destination", 2, min(page, (1 << 31) - 1))
    assert transfer.first_mismatch(piece) is None
    assert differences(transfer.target.now(), expected) == 0
    transfer.errors.zero_()
    transfer.src_pages[1] = page
    transfer.sender.write_sums(transfer.args(piece, layout, transfer.ids(piece), stage, blocks=16))
    torch.cuda.synchronize()
    assert copies.first_error(transfer.errors) == ("source", 1, min(page, (1 << 31) - 1))


@needs_gpus(1)
def test_nothing_synchronises_or_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it is enqueued behind a kernel that is still running, by a thread that asks for no memory."""
    (transfer,), expected = transfers({0: gqa(**BF16)}, gqa(1, 2, **BF16), 16, monkeypatch, device="cuda:0")
    piece, layout = transfer.everything()
    _, stage = guarded(layout.nbytes)
    for packer in (transfer.sender, transfer.receiver):
        for variant in packer.kernels_for(checksum=True):
            variant.load()
    tickets_of(torch.cuda.current_stream())
    src, dst = transfer.ids(piece), torch.tensor(transfer.dst_pages, device="cuda:0")
    sent, received = (transfer.args(piece, layout, ids, stage, blocks=16) for ids in (src, dst))
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda._sleep(2_000_000_000)
    transfer.sender.gather(sent)
    transfer.sender.write_sums(sent)
    transfer.receiver.scatter(received)
    transfer.receiver.verify_sums(received, mismatches=transfer.mismatches)
    assert not torch.cuda.current_stream().query()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
    torch.cuda.synchronize()
    assert transfer.first_mismatch(piece) is None
    assert differences(transfer.target.now(), expected) == 0


@needs_gpus(1)
def test_kernels_on_two_streams_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stream has tickets of its own, which every kernel leaves for the next one."""
    writers, reader, gap = FAMILIES["pairs of 64 KiB"]
    streams = [torch.cuda.Stream() for _ in range(2)]
    made, expected = [], []
    for _ in streams:
        (transfer,), bytes_of_it = transfers(writers, reader, gap, monkeypatch, num_tokens=4096, device="cuda:0")
        made.append(transfer)
        expected.append(bytes_of_it)
    stages = []
    for transfer in made:
        ((piece, layout),) = transfer.pieces(1)
        stages.append((piece, layout, guarded(layout.nbytes)[1]))
    torch.cuda.synchronize()
    for _ in range(20):
        for transfer, stream, stage in zip(made, streams, stages, strict=True):
            with torch.cuda.stream(stream):
                transfer.fill(*stage)
                transfer.empty(*stage)
    torch.cuda.synchronize()
    assert tickets_of(streams[0]) != tickets_of(streams[1])
    assert [words.tolist() for words in launch._tickets.values()] == [[0, 0]] * len(launch._tickets)
    for transfer, bytes_of_it in zip(made, expected, strict=True):
        assert differences(transfer.target.now(), bytes_of_it) == 0
