"""Loops that take what is only enqueued on a GPU for done, and what uses their memory for ended."""

from __future__ import annotations

from typing import Any

from tests.helpers.simulation.broken.lanes import unpacks_for_failed_requests
from tests.helpers.simulation.broken.swapping import Break, swap
from torchkv.core.loop import launching, loop, receiving, sending, staging, unpacking
from torchkv.core.loop.limits import UNPACKINGS
from torchkv.core.receives import Receives
from torchkv.core.sends import Sends

__all__ = ["GPUS_STAGED_BREAKS", "GPU_BREAKS"]


def _announces_what_is_only_enqueued() -> None:
    real = launching.landed

    def landed(world: Any, send: Any, op: Any) -> bool:
        if real(world, send, op):
            return True
        if op["posted"] == 0:
            return False
        op["posted"], op["at"] = 0, op["until"]
        send["flying"] -= 1
        world["flying"] -= 1
        return True

    swap(sending, landed=landed)


def _forgets_what_is_under_way() -> None:
    swap(Sends, flying=lambda self, index: 0)


def _expects_seals_for_ever() -> None:
    swap(loop, withdraw_hint=lambda world, send: None)


def _reuses_page_ids_at_once() -> None:
    real = launching.place_ids

    def place(world: Any, send: Any, op: Any) -> bool:
        send["ids_posted"] = 0
        return bool(real(world, send, op))

    swap(launching, place_ids=place)


def _seals_before_its_pieces_are_unpacked() -> None:
    swap(loop, follow=receiving.on_record)


def _counts_what_is_only_launched() -> None:
    real = unpacking.land

    def land(world: Any) -> bool:
        for number in range(world["unpack_head"], world["unpack_tail"]):
            world["unpackings"][number & (UNPACKINGS - 1)]["launched"] = 0
        return bool(real(world))

    swap(loop, land=land)


def _ends_requests_that_kernels_still_write_to() -> None:
    real = Receives.stop_unpacking

    def stop_unpacking(self: Receives, flow: int) -> bool:
        real(self, flow)
        self._memory[0]["receives"][flow]["unpacking"] = self._memory[0]["receives"][flow]["stopped"] = 0
        return False

    swap(Receives, stop_unpacking=stop_unpacking)


def _puts_what_is_not_packed() -> None:
    real = staging._launch
    swap(staging, _launch=lambda *arguments: min(1, real(*arguments)))


GPU_BREAKS: dict[str, Break] = {
    "announces what is only enqueued": (_announces_what_is_only_enqueued, True),
    "expects seals for ever": (_expects_seals_for_ever, False),
    "forgets what is under way": (_forgets_what_is_under_way, False),
    "reuses page ids at once": (_reuses_page_ids_at_once, False),
}


GPUS_STAGED_BREAKS: dict[str, Break] = {
    "counts what is only launched": (_counts_what_is_only_launched, True),
    "ends requests that kernels still write to": (_ends_requests_that_kernels_still_write_to, False),
    "puts what is not packed": (_puts_what_is_not_packed, True),
    "seals before its pieces are unpacked": (_seals_before_its_pieces_are_unpacked, True),
    "unpacks for failed requests": (unpacks_for_failed_requests, False),
}
