"""What the resident loop has recorded of its operations and phases: see `torchkv.core.journal`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from torchkv.core import journal, posting
from torchkv.core.journal import OPERATION_WORDS
from torchkv.core.loop.codes import FINISH, PHASES, POST, START, VERBS
from torchkv.core.loop.limits import COMMANDS
from torchkv.core.loop.state.world import word_at
from torchkv.host.jit import at_register
from torchkv.observe.histogram import Histogram

if TYPE_CHECKING:
    from torchkv.core.runner import Runner

__all__ = ["Operations", "Seen"]

_TAIL, _HEAD = word_at("command_tail") // 8, word_at("command_head") // 8


@dataclass(frozen=True, slots=True)
class Seen:
    """One operation. See `torchkv.core.journal.Operation`; ended: None while it goes on."""

    number: int
    verb: str
    serial: int
    first: int
    last: int
    layers: int
    pages: int
    began: int
    ended: int | None
    nbytes: int


class Operations:
    """Of one loop. Any thread, without a lock, also while the loop hangs, but for `hand_over`."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    @property
    def size(self) -> int:
        """How many the journal keeps."""
        return len(self._runner.operations)

    def read(self) -> list[Seen]:
        """The last ones, oldest first, but for those that are being written now."""
        found = np.empty_like(self._runner.operations)
        count = journal.read_operations(self._runner.operations.ctypes.data, self.size, found)
        seen = []
        for number, verb, serial, first, last, layers, pages, began, ended, nbytes in sorted(found[:count].tolist()):
            seen.append(Seen(number, VERBS[verb], serial, first, last, layers, pages, began, ended or None, nbytes))
        return seen

    def of_op(self, index: int) -> int:
        """The number of an op's; 0 if it is not recorded."""
        return int(self._runner.memory[0]["ops"][index]["operation"])

    def of_finish(self, flow: int) -> int:
        """The number of a send's ``finish``; 0 if it is not recorded."""
        return int(self._runner.memory[0]["sends"][flow]["operation"])

    def of_receive(self, flow: int) -> int:
        """The number of a receive's; 0 if it is not recorded."""
        return int(self._runner.memory[0]["receives"][flow]["operation"])

    def unbegun(self) -> list[tuple[int, int]]:
        """The kind and the op or flow of the verbs whose commands the loop has not taken, oldest first."""
        words, commands = self._runner.words, self._runner.memory[0]["commands"]
        taken = [int(commands[at & (COMMANDS - 1)]) for at in range(words[_HEAD], words[_TAIL])]
        return [(command & 0xFF, command >> 8) for command in taken if command & 0xFF in (START, FINISH, POST)]

    def phases(self) -> dict[str, Histogram]:
        """How long phases of requests have taken that have succeeded."""
        found = {}
        for phase, (*counts, nanoseconds) in zip(PHASES, self._runner.memory[0]["phases"].tolist(), strict=True):
            histogram = found[phase] = Histogram()
            histogram.counts, histogram.total = counts, nanoseconds / 1e9
        return found

    def hand_over(self, number: int) -> None:
        """Python records this one from now on. While the loop stands still, under the engine's lock."""
        posting.hand_over(self._runner.address, number)


@at_register
def warm_up() -> None:
    """Compiles what reads the journal, or loads it from disk."""
    found = np.zeros((1, OPERATION_WORDS), dtype=np.int64)
    journal.read_operations(found.ctypes.data, 1, found.copy())
