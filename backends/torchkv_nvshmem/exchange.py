"""All-gather of a few bytes over the group's store, for what ranks agree on before any of them calls NVSHMEM."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch._C._distributed_c10d import Store

from torchkv.errors import TransportUnavailable

__all__ = ["Exchange", "through_store"]

# Collective: takes this rank's bytes, returns those of all ranks in rank order. It has a deadline of its own.
Exchange = Callable[[bytes], Sequence[bytes]]

_PREFIX = "torchkv-nvshmem"


def through_store(store: Store, *, rank: int, size: int) -> Exchange:
    """An `Exchange` over a store that only this group writes to.

    It raises ``TransportUnavailable``, naming the first rank missing, when the store's own timeout has passed.
    """

    def exchange(data: bytes) -> list[bytes]:
        # Each rank takes one ticket per exchange, and its next only after all ranks have taken theirs: so the quotient
        # is the same on all ranks.
        step = (store.add(f"{_PREFIX}/tickets", 1) - 1) // size
        store.set(f"{_PREFIX}/{step}/{rank}", data)  # type: ignore[arg-type]  # the stubs forget bytes
        answers: list[bytes] = []
        for other in range(size):
            try:
                answers.append(bytes(store.get(f"{_PREFIX}/{step}/{other}")))
            except RuntimeError as error:  # torch's DistStoreError, or what older releases raise
                raise TransportUnavailable(
                    f"rank {other} of {size} did not come to an exchange that all ranks take part in ({error}); it "
                    "failed before, has ended, or did not make the call"
                ) from error
        if step:
            store.delete_key(f"{_PREFIX}/{step - 1}/{rank}")  # every rank is in this step, so all have read that one
        return answers

    return exchange
