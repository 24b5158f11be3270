"""The prefix cache against a naive model, call by call, with and without hash collisions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.helpers.examples import examples
from tests.helpers.prefixes import collide, failure
from torchkv import PageOutOfRange, PrefixCache, ProtocolError
from torchkv.prefix.cache import Held

PAGE_SIZE = 2
NUM_PAGES = 9

Prefix = tuple[int, ...]


class Request:
    """One request in the model: its pages, and the indexed prefixes that it holds."""

    def __init__(self, held: Held, prefixes: list[Prefix]) -> None:
        self.held = held
        self.pages = held.pages.tolist()
        self.prefixes = prefixes


class AgainstNaive(RuleBasedStateMachine):
    """The model: for every indexed prefix, all its tokens -> the last page, and -> when it was last released."""

    colliding = False

    @initialize()
    def start(self) -> None:
        self.cache = PrefixCache(NUM_PAGES, PAGE_SIZE)
        if self.colliding:
            collide(self.cache)
        self.known: dict[Prefix, int] = {}
        self.last_released: dict[Prefix, int] = {}
        self.requests: list[Request] = []
        self.withheld: list[tuple[list[bool], list[int]]] = []
        self.free = set(range(NUM_PAGES))
        self.clock = 0

    tokens = st.lists(st.integers(0, 1), max_size=2 * PAGE_SIZE * 4)

    @rule(tokens=tokens)
    def match(self, tokens: list[int]) -> None:
        held = self.cache.match(tokens)
        prefixes = []
        for end in range(PAGE_SIZE, len(tokens) + 1, PAGE_SIZE):
            if tuple(tokens[:end]) not in self.known:
                break
            prefixes.append(tuple(tokens[:end]))
        assert held.pages.tolist() == [self.known[prefix] for prefix in prefixes]
        assert held.num_tokens == len(prefixes) * PAGE_SIZE
        self.requests.append(Request(held, prefixes))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), count=st.integers(0, 4))
    def allocate(self, data: Any, count: int) -> None:
        request = data.draw(st.sampled_from(self.requests))
        before = dict(self.known)
        victims: list[Any] = []
        while len(self.free) + len(victims) < count and (idle := self.evictable()):
            victims.append(self.known.pop(min(idle, key=lambda prefix: self.last_released[prefix])))
        if len(self.free) + len(victims) < count:
            with pytest.raises(PageOutOfRange, match=rf"allocate: {count} pages wanted") as caught:
                self.cache.allocate(request.held, count)
            assert caught.value.retryable
            self.known = before
            return
        fresh = self.cache.allocate(request.held, count).tolist()
        assert len(set(fresh)) == count
        assert set(fresh) <= self.free | set(victims)
        assert set(victims) <= set(fresh)
        self.free -= set(fresh)
        request.pages += fresh
        assert request.held.pages.tolist() == request.pages

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), more=tokens)
    def insert(self, data: Any, more: list[int]) -> None:
        request = data.draw(st.sampled_from(self.requests))
        before = list(request.prefixes[-1]) if request.prefixes else []
        tokens = (before + more)[: len(request.pages) * PAGE_SIZE + 1]
        count = max(len(tokens) // PAGE_SIZE, len(request.prefixes))
        assert self.cache.insert(request.held, tokens) == count * PAGE_SIZE
        for at in range(len(request.prefixes), count):
            prefix = tuple(tokens[: (at + 1) * PAGE_SIZE])
            self.known.setdefault(prefix, request.pages[at])
            request.prefixes.append(prefix)
        assert request.held.pages.tolist() == request.pages

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), safe=st.sampled_from([None, True, False]))
    def release(self, data: Any, safe: bool | None) -> None:
        request = data.draw(st.sampled_from(self.requests))
        error, switch = (None, [True]) if safe is None else failure(safe)
        self.cache.release(request.held, error)
        with pytest.raises(ProtocolError, match="released already"):
            self.cache.release(request.held)
        self.requests.remove(request)
        for prefix in reversed(request.prefixes):
            self.clock += 1
            self.last_released[prefix] = self.clock
        private = [page for page in request.pages if page not in self.known.values()]
        self.withheld.append((switch, private))
        self.return_pages()

    @precondition(lambda self: self.withheld)
    @rule(data=st.data())
    def become_quiescent(self, data: Any) -> None:
        data.draw(st.sampled_from(self.withheld))[0][0] = True
        self.return_pages()

    def return_pages(self) -> None:
        for _, pages in [entry for entry in self.withheld if entry[0][0]]:
            self.free |= set(pages)
        self.withheld = [entry for entry in self.withheld if not entry[0][0]]

    def unheld(self) -> set[Prefix]:
        return set(self.known) - {prefix for request in self.requests for prefix in request.prefixes}

    def evictable(self) -> set[Prefix]:
        parents = {prefix[:-PAGE_SIZE] for prefix in self.known}
        return self.unheld() - parents

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert self.cache.available == len(self.free) + len(self.unheld())
        assert self.cache.withheld == sum(len(pages) for _, pages in self.withheld)

    @invariant()
    def every_page_is_in_one_place(self) -> None:
        if not hasattr(self, "cache"):
            return
        places = [*self.free, *self.known.values(), *(page for _, pages in self.withheld for page in pages)]
        private = {page for request in self.requests for page in request.pages} - set(self.known.values())
        assert sorted([*places, *private]) == list(range(NUM_PAGES))


class AgainstNaiveWithCollisions(AgainstNaive):
    colliding = True


SETTINGS = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestAgainstNaive = AgainstNaive.TestCase
TestAgainstNaive.settings = SETTINGS
TestAgainstNaiveWithCollisions = AgainstNaiveWithCollisions.TestCase
TestAgainstNaiveWithCollisions.settings = SETTINGS
