"""A small model, and a fake group that records what it is asked to send."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

import torchkv
from torchkv import KVLayout
from torchkv.pipelining.group_size import Measured

__all__ = ["INPUT", "Block", "Fixed", "Group", "Model", "Work", "hooks", "layout"]


class Block(nn.Module):
    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        if experts:
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Model(nn.Module):
    """``order``: which layers run, and when."""

    def __init__(self, num_layers: int = 5, experts: int = 0, order: list[int] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(experts) for _ in range(num_layers))
        self.order = list(range(num_layers)) if order is None else order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.order:
            x = self.layers[layer](x)
        return x


class Work:
    """A send that is over at once, or has failed."""

    seconds = 1e-3

    def __init__(self, error: torchkv.KVError | None = None) -> None:
        self.error = error

    def wait(self, timeout: float = 0.0) -> bool:
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return True

    def exception(self) -> torchkv.KVError | None:
        return self.error


class Group:
    """What a `KVProcessGroup` would be asked, in order: ("send", request, layers, ...), ("cancel", request)."""

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        self.log: list[tuple[Any, ...]] = []
        self.fails: dict[str, torchkv.KVError] = {}  # request -> what its next send raises
        self.tombstones: dict[str, torchkv.KVError] = {}
        self._engine = SimpleNamespace(
            gpu=None,
            flows=None,
            lock=threading.Lock(),
            group_map=SimpleNamespace(me=SimpleNamespace(num_pages=100), targets=lambda dst, operation: (1,)),
            catch_up=lambda: None,
            sender=SimpleNamespace(admit=self._admit, prefix_tokens=lambda request, rank: 0),
        )
        self._verbs = Verbs(self)

    def _admit(self, request: str, rank: int, start: int, num_pages: int, **_: bool) -> None:
        if request in self.tombstones:
            raise self.tombstones[request]

    def send_pages(self, request: str, pages: Any, dst: Any, *, layers: Any, start: int, event: Any, **_: str) -> Work:
        if request in self.fails:
            raise self.fails[request]
        self.log.append(("send", request, tuple(layers), np.asarray(pages).tolist(), dst, start, event))
        return Work()

    def cancel(self, request: str) -> Work:
        self.log.append(("cancel", request))
        return Work()

    def sent(self, request: str = "r") -> list[tuple[int, ...]]:
        return [entry[2] for entry in self.log if entry[:2] == ("send", request)]


class Verbs:
    """In place of `torchkv.group.verbs.Verbs`: what `pipeline` uses of it."""

    def __init__(self, group: Group) -> None:
        self.engine = group._engine
        self._group = group

    def layout(self, verb: str) -> KVLayout:
        return self._group.layout

    def check_open(self, operation: str) -> None: ...

    def check_alive(self, ranks: Any, operation: str) -> None: ...

    def checked_slot(self, operation: str, slot: int, layout: KVLayout) -> int:
        if slot >= 4:
            raise torchkv.PageOutOfRange(f"{operation}: state_slot={slot}")
        return slot

    def send_states(self, request: str, layers: Any, slot: int, dst: Any, event: Any) -> Work:
        self._group.log.append(("state", request, tuple(layers), slot, dst, event))
        return Work()


def layout(num_layers: int = 5, **changes: Any) -> KVLayout:
    return KVLayout.gqa(num_layers=num_layers, num_kv_heads=2, head_dim=8, page_size=16, dtype=torch.float16, **changes)


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


INPUT = torch.ones(2, 4)


class Fixed:
    learns = True

    def __init__(self, size: int) -> None:
        self.size = size
        self.asked: list[dict[str, int]] = []
        self.measures: list[Callable[[], Measured | None]] = []

    def group_size(self, **asked: int) -> int:
        self.asked.append(asked)
        return self.size

    def learn(self, measure: Callable[[], Measured | None]) -> None:
        self.measures.append(measure)
