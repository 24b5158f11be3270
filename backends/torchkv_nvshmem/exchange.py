"""How the ranks of a group tell each other a few bytes before any of them enters NVSHMEM: through the group's store."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch._C._distributed_c10d import Store

from torchkv.errors import TransportUnavailable

__all__ = ["Exchange", "through_store"]

# Gives every rank's bytes to every rank of the group, in rank order. Collective; has a deadline of its own.
Exchange = Callable[[bytes], Sequence[bytes]]

_PREFIX = "torchkv-nvshmem"


def through_store(store: Store, *, rank: int, size: int) -> Exchange:
    """An `Exchange` over a store that only this group writes to.

    It raises ``TransportUnavailable``, naming the first rank missing, when the store's own timeout has passed.
    """

    def exchange(data: bytes) -> list[bytes]:
        # Everyone draws one ticket an exchange, and none its next before all have drawn: so all get the same number.
        step = (store.add(f"{_PREFIX}/tickets", 1) - 1) // size
        store.set(f"{_PREFIX}/{step}/{rank}", data)  # type: ignore[arg-type]  # the stubs forget bytes
        answers: list[bytes] = []
        for other in range(size):
            try:
                answers.append(bytes(store.get(f"{_PREFIX}/{step}/{other}")))
            except RuntimeError as error:  # torch's DistStoreError, or what older releases raise
                raise TransportUnavailable(
                    f"rank {other} of {size} did not come to an exchange that all ranks take part in ({error}); it "
                    "failed before, has ended, or skipped the call"
                ) from error
        if step:
            store.delete_key(f"{_PREFIX}/{step - 1}/{rank}")  # all are here, so all have read that
        return answers

    return exchange
