"""What the verbs of a rank with layer groups take: page lists and state slots by group, and names for their parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.errors import PageOutOfRange, ProtocolError
from torchkv.group import arguments
from torchkv.group.arguments import PageIds, Pages, StateSlot
from torchkv.host.page_id_check import copy_present
from torchkv.layout.layer_groups import SEPARATOR, absent_allowed, part_name
from torchkv.layout.layout import KVLayout
from torchkv.protocol.messages import MAX_REQUEST_BYTES

__all__ = ["ABSENT", "GroupArguments", "LayerGroup"]

ABSENT = -1  # in place of a page id


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """A layer group. layout: this rank's part of it. paged, stateful: the layers held here with pages, with state.

    windows: those of the layers with pages; None: one attends to all tokens.
    """

    name: str
    layout: KVLayout
    paged: frozenset[int]
    stateful: frozenset[int]
    windows: frozenset[int | None]


class GroupArguments:
    """Checks of arguments against a layout with layer groups. num_pages: of the cache.

    groups: by name, in the layout's order. paged, with_state: those that have components, or state.
    """

    def __init__(self, layout: KVLayout, num_pages: int) -> None:
        self.groups = {name: _group(name, layout.of_group(name)) for name in layout.groups}
        self.paged = tuple(name for name, group in self.groups.items() if group.layout.components)
        self.with_state = tuple(name for name, group in self.groups.items() if group.layout.states)
        self._num_pages = num_pages

    def names(self, request: str) -> dict[str, str]:
        """Layer group -> the name of its part. Raises ``ProtocolError`` for a name that parts cannot be named after."""
        request = arguments.as_request(request)
        if SEPARATOR in request:
            raise ProtocolError(
                f"request {request!r}: names must not contain {SEPARATOR!r}, which tells layer groups apart; name the "
                "request as it was named in recv_pages or the first verb, without its layer group"
            )
        names = {group: part_name(request, group) for group in self.groups}
        if (longest := max(len(name.encode()) for name in names.values())) > MAX_REQUEST_BYTES:
            raise ProtocolError(
                f"request name of {len(request.encode())} bytes in UTF-8: with a layer group {longest}, the limit is "
                f"{MAX_REQUEST_BYTES}; use a shorter one"
            )
        return names

    def lists(self, pages: Pages, operation: str, *, layers: Sequence[int] | None = None) -> dict[str, PageIds]:
        """The page lists, by layer group. layers: those of a verb, whose groups are needed; None: all are.

        Raises ``ProtocolError`` for groups that are missing or unknown.
        """
        if layers is None:
            needed = self.paged
        else:
            needed = tuple(group for group in self.paged if self.groups[group].paged.intersection(layers))
        if not isinstance(pages, Mapping):
            if len(needed) > 1:
                raise ProtocolError(
                    f"{operation}: one page list for layer groups {', '.join(needed)}; give {{group: page ids}}, or "
                    "send the layers of each group with a verb of its own"
                )
            return dict.fromkeys(needed, pages)
        if unknown := [group for group in pages if group not in self.paged]:
            raise ProtocolError(
                f"{operation}: pages of {unknown[0]!r:.80}, which is no layer group with pages; this layout has "
                f"{', '.join(self.paged) or 'none'}"
            )
        if missing := [group for group in needed if group not in pages]:
            raise ProtocolError(
                f"{operation}: no pages for layer group {missing[0]!r}; give the page list of each group"
            )
        lists = {group: pages[group] for group in needed}
        lengths = {group: _length(ids) for group, ids in lists.items()}
        if len(set(lengths.values())) > 1:
            raise ProtocolError(
                f"{operation}: page lists of unlike length: {lengths}; they name the same tokens: give -1 for absent "
                "pages"
            )
        return lists

    def host_list(self, pages: PageIds, operation: str) -> tuple[Int64Array, int]:
        """Page ids without the absent ones at the beginning, and how many those are."""
        if (copyable := arguments.copyable_pages(pages)) is not None:
            given, ids = copyable
            if (absent := copy_present(given, ids, self._num_pages)) >= 0:
                return ids[: len(given) - absent], absent
        array = arguments.as_int64(pages, operation)
        present = np.flatnonzero(array != ABSENT)
        absent = int(present[0]) if len(present) else len(array)
        if (array[absent:] == ABSENT).any():
            raise PageOutOfRange(
                f"{operation}: an absent page (-1) behind page {array[absent]}; only pages before every window, at the "
                "beginning of the list, may be absent"
            )
        return arguments.as_pages(array[absent:], num_pages=self._num_pages, operation=operation), absent

    def check_absent(self, group: str, num_pages: int, absent: int, operation: str) -> None:
        """Raises ``PageOutOfRange`` if the beginning of a receiver's list must not be absent."""
        layout = self.groups[group].layout
        allowed = absent_allowed(num_pages, layout.page_size, self.groups[group].windows)
        if absent > allowed:
            raise PageOutOfRange(
                f"{operation}: page {allowed} of layer group {group!r} is absent (-1), but a layer of it attends to "
                f"it; only the first {allowed} of these {num_pages} pages lie before every window"
            )

    def slots(self, state_slot: StateSlot, operation: str) -> dict[str, int]:
        """State slots by layer group, not looked at. Raises ``ProtocolError`` for groups without state."""
        given: dict[str, int]
        if state_slot is None:
            given = {}
        elif isinstance(state_slot, Mapping):
            given = dict(state_slot)
        elif len(self.with_state) == 1:
            given = {self.with_state[0]: state_slot}
        else:
            known = ", ".join(self.with_state) or "none"
            raise ProtocolError(
                f"{operation}: state_slot={state_slot!r} for layer groups with state: {known}; give {{group: slot}}"
            )
        if unknown := [group for group in given if group not in self.with_state]:
            raise ProtocolError(f"{operation}: state_slot of {unknown[0]!r:.80}, which is no layer group with state")
        return given


def _group(name: str, layout: KVLayout) -> LayerGroup:
    paged = frozenset(layer for c in layout.components for layer in layout.component_layers(c.name))
    return LayerGroup(name, layout, paged, layout.stateful_layers, frozenset(map(layout.window, paged)))


def _length(pages: PageIds) -> int:
    """How many pages a list names; what is no list is refused later."""
    try:
        return len(pages)
    except TypeError:
        return 0
