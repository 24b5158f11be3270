"""The measured points beside the simulated ones: real ranks take the messages that the simulation says."""

from __future__ import annotations

from typing import Any

import pytest

from torchkv.bench.processes import run_ranks
from torchkv.bench.scale import real
from torchkv.bench.scale.real import measure
from torchkv.bench.scale.workload import SHORT, Shape


@pytest.mark.parametrize("ranks", [2, 4])
def test_real_ranks_send_the_messages_of_their_shape(ranks: int) -> None:
    found = measure(Shape(ranks), SHORT, requests=8, apart=True)
    assert found.wrong == 0
    expected = {kind: count * found.requests for kind, count in Shape(ranks).messages(SHORT.verbs).items()}
    # Alive: of requests that take long. Staging: whatever path was chosen.
    beside = {"Alive", "StageAsk", "StageGrant", "Staged", "Withdraw", "Withdrawn"}
    told = {kind: count for kind, count in found.messages.items() if kind not in beside}
    if found.messages.keys() & {"Staged"}:  # which takes the place of attestations
        told["Attest"] = expected["Attest"]
    assert told == expected
    assert 0 < found.protocol < found.cpu


def test_on_one_host_resident_loops_serve_them() -> None:
    found = measure(Shape(2), SHORT, requests=8, apart=False)
    assert found.wrong == 0
    assert not found.messages.keys() - {"Alive"}


def corrupting_prefill(*given: Any) -> object:
    """Rank 0, whose source has one wrong element."""
    right = real._Side.content

    def content(side: Any, prefill: int) -> Any:
        for number, (words, expected) in enumerate(right(side, prefill)):
            if number == 3:
                expected = expected.clone()
                expected[0, 0, 0, 0] += 1
            yield words, expected

    real._Side.content = content  # in a process of its own
    return real._prefill(*given)


def test_one_wrong_element_is_noticed() -> None:
    found = run_ranks([corrupting_prefill, real._decode], Shape(2), SHORT, 1)
    assert sum(wrong for _, _, wrong, *_ in found) == 2 * real.FLIGHT
