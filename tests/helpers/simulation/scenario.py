"""One random run of a small cluster, from a seed: requests, cancels, faults, and the properties that must hold."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.references.memory import Shadow, snapshot
from tests.helpers.simulation.cluster import Cluster, Rank, random_faults, random_places
from tests.helpers.simulation.flows import Flow, Gate, Receiving, Sending, flows_left, short_runs
from tests.helpers.simulation.neglect import Neglect
from tests.helpers.simulation.staging_rings import RingShadow
from tests.helpers.simulation.state_flows import StateFlows, random_states
from torchkv.arrays import Int64Array
from torchkv.engine.work import KVWork
from torchkv.errors import ChecksumMismatch, KVError, LayoutMismatch, PeerLost
from torchkv.layout.layer_groups import PAGES, SLOTS
from torchkv.layout.layout import State
from torchkv.options import Options
from torchkv.protocol.receiving.staging_credits import Owner

RECV_PAGES = 10  # pages [0, RECV_PAGES) of a pool receive, the rest sends
BUSY_SECONDS = 4.0  # virtual seconds in which requests begin and faults happen
BRIEF = 0.25  # a brief run takes this part of all times
END_SECONDS = 60.0  # virtual seconds after that, in which every request must come to an end
# Bytes of staging rings. One page of a layer takes up to 512, so not every page fits into the smallest ring.
RINGS = (768, 1024, 1536, 4096)
SMALL_RINGS = (256, 512, *RINGS, *RINGS)
STAGED_RINGS = (1 << 12, 1 << 13, 1 << 14)  # of which an eighth stands for each writer
DTYPES = [  # of two instances
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.float8_e4m3fn, torch.float16),
    (torch.float16, torch.bfloat16),
]
VERBS = (("staged",), ("staged", "slice"), ("layer", "slice", "pages", "staged"))  # the verbs that one flow uses


class Scenario:
    """`run` it, then look at ``problems`` (empty if every property held) and ``trace`` (equal for equal seeds)."""

    def __init__(
        self,
        seed: int,
        *,
        benign: bool = False,
        sees_death: bool | None = None,
        verbs: tuple[str, ...] = (),
        views: bool = False,
        loop: bool = False,
        gpu: bool = False,
        network: bool = False,
        system_calls: bool = False,
        staged: bool = False,
        states: Sequence[State] | None = None,
        brief: bool = False,
        anybody: float = 0.3,
        readers: int = 0,
        converts: bool = False,
    ) -> None:
        """benign: the only fault is a bad network. sees_death: see `Cluster`; None: by chance. verbs: those of every
        flow; empty: by chance. views: whether ranks have each other's memory mapped. loop: whether resident loops serve
        what they can, which takes views or ``network``. gpu: whether they have kernels copy. network, system_calls: see
        `Cluster`. staged: whether loops stage what they put, since all runs are short. states: of all layouts; None: by
        chance. brief: a quarter as long, with few requests, and a fault for certain. anybody: how many senders do not
        know the receiver, and how many not the prefix. readers: see `random_places`; then there are more
        requests, and fewer faults. converts: whether instances have unlike dtypes.
        """
        self.seed = seed
        self.verbs = verbs
        self.benign = benign
        self.brief = brief
        self.readers = readers
        self.staged = staged
        self.busy = BUSY_SECONDS * (BRIEF if brief else 1.0)
        self.anybody = anybody
        self.dice = random.Random(f"scenario {seed}")
        self.numbers = np.random.default_rng(seed)
        dice = self.dice
        self.sees_death = dice.random() < 0.7 if sees_death is None else sees_death
        faults = random_faults(dice, slowest=self._time(2e-1))
        # In a benign run nothing may fail, so there the timeouts must be longer than what lost messages cost.
        rings = RINGS if benign else SMALL_RINGS
        rings = STAGED_RINGS if staged else rings
        checksum = not verbs and dice.random() < 0.2
        # With a forced path, every verb but staged_put writes to pages; without one, costs decide.
        path = "slices" if verbs or (not checksum and dice.random() < 0.5) else None
        views |= loop and not network
        path = None if loop else path
        staging = {"staging_send": dice.choice(rings), "staging_recv": dice.choice(rings)}
        if views:
            staging["staging_send"] = 0  # pieces are gathered straight into the receivers' mapped rings
        limits = {"timeout": 30.0, "grant_timeout": 60.0}
        if not benign:
            limits = {"timeout": 3.0, "grant_timeout": random.Random(f"grants {seed}").choice([0.5, 8.0, 8.0])}
        if brief:
            limits = {name: BRIEF * limit for name, limit in limits.items()}
        limits["heartbeat"] = self._time(0.2)
        options = Options(transport="loopback", path=path, checksum=checksum, **limits, **staging)
        state_dice = random.Random(f"state {seed}")
        dtypes = random.Random(f"dtypes {seed}").choice(DTYPES) if converts else None
        states = random_states(state_dice) if states is None else states
        places = random_places(dice, states, readers=readers, dtypes=dtypes)
        lag = dice.random() < 0.7
        self.cluster = Cluster(
            places,
            seed=seed,
            faults=faults,
            options=options,
            sees_death=self.sees_death,
            views=views,
            lag=lag,
            sleeps=readers > 0,
            run_by_callers=True,
            gpu=gpu,
            network=network,
            system_calls=system_calls,
            apart=network and random.Random(f"apart {seed}").random() < 0.7,
        )
        self.world = self.cluster.world
        self.shadows = {rank.rank: Shadow(rank, self.numbers, numbers=converts) for rank in self.cluster.ranks}
        self.rings = {rank.rank: RingShadow(rank.engine, self.numbers) for rank in self.cluster.ranks}
        self.sources = {rank.rank: snapshot(rank) for rank in self.cluster.ranks}
        self.neglect = {rank.rank: Neglect(rank) for rank in self.cluster.ranks}
        self.unused = {rank.rank: list(range(RECV_PAGES, 64)) for rank in self.cluster.ranks}
        self.state = StateFlows(self, state_dice)
        self.prefixes = seed % 2 == 0 or not (network or readers)  # loops bind no grant behind one
        self.unknown = random.Random(f"unknown {seed}")  # what senders do not know: no other choice depends on it
        self.arrays = random.Random(f"arrays {seed}")  # whether page ids come as one: then later verbs may be short
        self.asks = random.Random(f"asks {seed}")  # which senders ask for the prefix before they send
        self.sendings: list[Sending] = []
        self.receivings: list[Receiving] = []
        self.cancels: list[tuple[Rank, KVWork]] = []
        self.expected_receives = 0
        self.severed: set[tuple[int, int]] = set()
        self.frozen: set[int] = set()  # ranks that stay paused until the very end
        self.problems: list[str] = []
        self.trace: list[tuple[object, ...]] = []
        self.cluster.observers.append(self.observe)

    def injected(self) -> Counter[str]:
        """Faults, and cancels that were planned, by kind."""
        cancels = sum(operation[0] == "cancel" and at < self.busy for at, *operation in self.trace)
        return self.world.injected + Counter(cancels=cancels)

    def _time(self, seconds: float) -> float:
        return seconds * BRIEF if self.brief else seconds

    def run(self) -> list[str]:
        """Performs the whole run. Returns the problems found."""
        with nullcontext() if self.staged else short_runs():
            self._run()
        if self.cluster.network is not None:
            self.problems += self.cluster.network.problems
        watched: list[Any] = [*self.shadows.values(), *self.rings.values(), *self.neglect.values()]
        return self.problems + [problem for shadow in watched for problem in shadow.problems]

    def _run(self) -> None:
        self._plan()
        self.cluster.run(limit=self.busy)
        for link in [(a, b) for a in self.sources for b in self.sources if a != b]:
            self.cluster.heal(*link)
        for rank in self.sources:
            self._unpause(rank)
        # Planned calls of paused applications, and their cancels, still happen; then everything must come to an end.
        self.cluster.run(lambda: self.brief and not self.cluster.planned, limit=self.busy)
        self._cancel_all()
        self.cluster.run(self._all_ended, limit=END_SECONDS)
        self._check_end(justified=True)
        for rank in sorted(self.frozen):
            self.cluster.resume(rank)
        self._cancel_all()
        self.cluster.run(lambda: self._all_ended() and not self._leftovers(), limit=END_SECONDS)
        self.cluster.run(limit=self._time(1.0))
        self._check_end(justified=False)

    def _cancel_all(self) -> None:
        if self.benign:
            return  # in a benign run everything ends by itself
        for name in sorted({sending.flow.name for sending in self.sendings}):
            for rank in self.cluster.ranks:
                self.cancel(rank, name)

    # ------------------------------------------------------------------ the plan

    def _plan(self) -> None:
        dice = self.dice
        flows: list[Flow] = []
        for i in range(dice.randint(*((1, 3) if self.brief else (6, 12) if self.readers else (2, 5)))):
            earlier = dice.choice(flows) if flows and not self.benign and dice.random() < 0.4 else None
            if earlier is not None and any(flow.after is earlier for flow in flows):
                earlier = None
            source, target = ("p", "d") if dice.random() < 0.75 else ("d", "p")
            flow = Flow(
                name=f"r{i}" if earlier is None else earlier.name,
                source=source if earlier is None else earlier.source,
                target=target if earlier is None else earlier.target,
                tokens=dice.choice([0, 1, 3, 4, 7, 8, 12]),
                prefix=4 * dice.randint(0, 2) * self.prefixes,
                begins=dice.uniform(0.0, self.busy / 2),
                aux=dice.choice([b"", b"first token"]),
                verbs=self.verbs or dice.choice(VERBS),
                after=earlier,
                before=[other for other in flows if other.target == target],
            )
            flows.append(flow)
            self._plan_flow(flow)
        if not self.benign:
            for _ in range(dice.randint(*((1, 2) if self.brief else (0, 1) if self.readers else (0, 3)))):
                self._plan_fault()
            if self.cluster.gpus and dice.random() < 0.2:
                rank = dice.choice(sorted(self.cluster.gpus))
                self.cluster.at(dice.uniform(0.0, self.busy), lambda: self.cluster.break_gpu(rank))

    def _plan_flow(self, flow: Flow) -> None:
        dice = self.dice
        start = flow.begins if flow.after is None else self.busy / 2 + flow.begins
        retry = flow.after if dice.random() < 0.5 else None
        for rank in self._instance(flow.target):
            if retry is not None:
                at = retry.begins + self._time(dice.uniform(0.2, 1.2))
                self.cluster.at(at, lambda rank=rank: self._post_again(flow, rank))
            else:
                at = start - dice.uniform(-1e-4, 5e-4) if self.readers else start + self._time(dice.uniform(0.0, 1.0))
                self.cluster.at(at, lambda rank=rank: self._post(flow, rank))
            self.expected_receives += 1
        for index, rank in enumerate(self._instance(flow.source)):
            # At once, if nothing wakes progress threads, so that grants and first verbs pass each other.
            at = start if self.readers else start + self._time(dice.uniform(0.0, 1.0))
            self._plan_sending(flow, rank, at, flow.aux if index == 0 else b"")
        if not self.benign and dice.random() < 0.5:
            rank = dice.choice(self.cluster.ranks)
            self.cluster.at(start + self._time(dice.uniform(0.0, 1.5)), lambda: self.cancel(rank, flow.name))

    def _plan_sending(self, flow: Flow, rank: Rank, start: float, aux: bytes) -> None:
        dice = self.dice
        page_size = rank.cache.layout.page_size
        count = -(-flow.tokens // page_size)
        pages = [self.unused[rank.rank].pop() for _ in range(count)]
        anybody, from_prompt = (self.unknown.random() < self.anybody for _ in range(2))
        steady = self.arrays.random() < 0.4
        sending = Sending(flow, rank, pages, self.state.source_slot(rank), anybody, from_prompt, steady)
        self.sendings.append(sending)
        layers = list(rank.cache.layout.layers)
        chunks: list[tuple[int, int, list[int] | None]] = []
        for first in range(0, count, width := dice.choice([1, 2, 8])):
            last = min(first + width, count)
            whole = dice.random() < 0.5
            chunks += [(first, last, None)] if whole else [(first, last, [layer]) for layer in layers]
        dice.shuffle(chunks)
        if steady:
            chunks.sort(key=lambda chunk: chunk[:2])
        if chunks and dice.random() < 0.3:
            chunks.append(dice.choice(chunks))  # the same bytes twice
        for _ in range(self.asks.choice([0, 0, 0, 1, 2])):
            early = self.asks.choice([0.0, 1e-4, self._time(self.asks.uniform(0.0, 0.5))])
            self.cluster.at(max(0.0, start - early), lambda: self._ask(sending))
        at = start
        for first, last, some in chunks:
            self.cluster.at(at, lambda a=(first, last, some): self._send(sending, *a))
            at += self._time(dice.choice([0.0, 0.01, 0.3]))
        self.state.plan(sending, start, at)
        self.cluster.at(at, lambda: self._finish(sending, aux))
        self.cluster.at(at + self._time(dice.uniform(0.5, 3.0)), lambda: self._tidy(sending))

    def _plan_fault(self) -> None:
        dice, cluster = self.dice, self.cluster
        at = dice.uniform(0.0, self.busy)
        rank, other = dice.sample(range(len(cluster.ranks)), 2)
        kind = dice.choice(["kill", "pause", "pause", "partition", "partition", "sever"])
        if kind == "kill":
            cluster.at(at, lambda: self._do("kill", rank, lambda: cluster.kill(rank)))
        elif kind == "pause":
            cluster.at(at, lambda: self._do("pause", rank, lambda: cluster.pause(rank)))
            if dice.random() < 0.3:
                self.frozen.add(rank)
            else:
                cluster.at(at + self._time(dice.choice([0.1, 1.0, 4.0])), lambda: self._unpause(rank))
        elif kind == "sever":
            cluster.at(at, lambda: self._do("sever", rank, lambda: self._sever(rank, other)))
        else:
            both = dice.random() < 0.5
            ways = [(rank, other), (other, rank)] if both else [(rank, other)]
            for way in ways:
                cluster.at(at, lambda way=way: cluster.partition(*way))
                cluster.at(at + self._time(dice.choice([0.2, 1.0, 3.0])), lambda way=way: cluster.heal(*way))

    def _sever(self, writer: int, reader: int) -> None:
        """Breaks the data channel for good: from then on the writer cannot prove that it is quiescent."""
        self.severed.add((writer, reader))
        self.cluster.sever(writer, reader)

    def _do(self, operation: str, rank: int, action: Callable[[], None]) -> None:
        if self.world.alive(self.cluster[rank].node):
            self.note(operation, rank)
            action()

    def _unpause(self, rank: int) -> None:
        if rank not in self.frozen:
            self.cluster.resume(rank)

    def _instance(self, name: str) -> list[Rank]:
        return [self.cluster[rank] for rank in self.cluster[0].engine.group_map.instances[name]]

    # ------------------------------------------------------------------ what applications do

    def _post(self, flow: Flow, rank: Rank) -> None:
        if not self.world.alive(rank.node):
            return
        count = -(-flow.tokens // rank.cache.layout.page_size)
        free = [page for page in self.shadows[rank.rank].free() if page < RECV_PAGES]
        earlier = flow.after is None or any(r.flow is flow.after and r.rank is rank for r in self.receivings)
        slots = self.state.free(rank)
        # Two ranks that wait for pages in unlike order may wait for each other for ever, and then requests do fail.
        turn = not self.benign or all(any(r.flow is f and r.rank is rank for r in self.receivings) for f in flow.before)
        if not rank.running or len(free) < count or not slots or not earlier or not turn:
            if self.benign or self.world.now < self.busy:
                self.cluster.at(self.world.now + self._time(0.2), lambda: self._post(flow, rank))
            return
        pages = self.dice.sample(free, count)
        slot = self.state.dice.choice(slots)
        before = snapshot(rank)
        total = self.dice.choice([None, None, None, 1.0, 4.0]) if not self.benign else None
        try:
            work = rank.recv_pages(
                flow.name, pages, flow.source, prefix_tokens=flow.prefix, state_slot=slot, timeout=total
            )
        except KVError as error:
            self.note("not posted", rank.rank, flow.name, type(error).__name__)
            return
        req = rank.engine.receiver.requests.live[flow.name]
        self.note("posted", rank.rank, flow.name, req.generation, tuple(pages))
        self.receivings.append(Receiving(flow, rank, req, work, before, pages, slot))
        self.observe(rank)  # loops that go on amid verbs may end this lease before the rank's next step

    def _post_again(self, flow: Flow, rank: Rank) -> None:
        """The receiver cancels one request and posts the next at once, while messages of the former still arrive."""
        if rank.running:
            self.cancel(rank, flow.name)
            self._post(flow, rank)

    def _send(self, sending: Sending, first: int, last: int, layers: list[int] | None) -> None:
        rank = sending.rank
        if not self._may_go_on(sending):
            return
        pages = sending.pages[first:last]
        event = (
            Gate(rank.clock, self.world.now + self._time(self.dice.uniform(0.0, 0.5)))
            if self.dice.random() < 0.3
            else None
        )
        self._call(sending, lambda: self._any_verb(sending, pages, layers, first, event))

    def call(self, sending: Sending, verb: Callable[[], KVWork]) -> None:
        """Calls ``verb`` for the application of ``sending``, unless that has given up."""
        if self._may_go_on(sending):
            self._call(sending, verb)

    def _call(self, sending: Sending, verb: Callable[[], KVWork]) -> None:
        try:
            work = verb()
        except KVError as error:
            self._stop(sending, error)
            return
        sending.works.append(work)
        self._adopt(sending)

    def _ask(self, sending: Sending) -> None:
        """The application asks whether its request has been granted, and behind which prefix."""
        if not self._may_go_on(sending):
            return
        try:
            told = sending.rank.granted(sending.flow.name, sending.dst)
        except KVError as error:
            self._stop(sending, error)
            return
        self._adopt(sending)
        if told is not None:
            sending.told = told
            # Of another request of the name than it meant, whose pages are not those that it has.
            sending.failed |= told != sending.flow.prefix

    def _may_go_on(self, sending: Sending) -> bool:
        """False once it was paused or cancelled, or if an earlier request of the name has not ended when it begins."""
        name, rank = sending.flow.name, sending.rank
        earlier_life = not sending.reqs and any(request == name for request, _ in rank.engine.sender.requests.by_key)
        sending.failed |= earlier_life or not rank.running
        return not sending.failed

    def _any_verb(
        self, sending: Sending, pages: list[int] | Int64Array, layers: list[int] | None, start: int, event: Gate | None
    ) -> KVWork:
        name, rank, dst = sending.flow.name, sending.rank, sending.dst
        verb = self.dice.choice(sending.flow.verbs)
        sending.verb = verb = sending.verb if sending.steady and sending.verb else verb
        more: dict[str, Any] = {"start": start, "event": event}
        if sending.from_prompt:
            held = sending.flow.prefix // rank.cache.layout.page_size
            more |= {"start": start + held, "origin": "prompt"}
            if start == 0 and held:  # a page that the receiver holds: whatever it is, it should not arrive
                if sending.held is None:
                    sending.held = self.unknown.randrange(64)
                pages, more["start"] = [sending.held, *pages], held - 1
        if self.arrays.random() < 0.7:
            pages = np.array(pages, dtype=np.int64)
        if verb == "staged":
            return rank.staged_put(name, layers, pages, dst, **more)
        if verb == "layer" and layers is not None:
            page_for_page = rank.engine.group_map.page_for_page
            if all(page_for_page(peer.rank) for peer in self._instance(sending.flow.target)):
                return rank.send_layer(name, layers[0], pages, dst, **more)
            if dst is not None:
                with pytest.raises(LayoutMismatch):
                    rank.send_layer(name, layers[0], pages, dst, **more)
            verb = "slice"
        named = layers[0] if layers is not None and len(layers) == 1 else layers
        if verb == "slice":
            return rank.send_slice(name, named, pages, dst, **more)
        return rank.send_pages(name, pages, dst, layers=named, **more)

    def _finish(self, sending: Sending, aux: bytes) -> None:
        name, dst = sending.flow.name, sending.dst
        self.call(sending, lambda: sending.rank.finish(name, dst, aux=aux, state_slot=self.state.left(sending)))

    def _adopt(self, sending: Sending) -> None:
        """Records which of the engine's sender requests are this flow's, so that grants can be traced to it."""
        known = {id(req) for other in self.sendings for req in other.reqs.values() if other is not sending}
        for (name, dst), req in sending.rank.engine.sender.requests.by_key.items():
            if name == sending.flow.name and id(req) not in known:
                sending.reqs.setdefault(dst, req)

    def _stop(self, sending: Sending, error: KVError) -> None:
        sending.failed = True
        self.note("stopped", sending.rank.rank, sending.flow.name, type(error).__name__)

    def _tidy(self, sending: Sending) -> None:
        """The application finds that its request has failed, and cancels so that the name is free again."""
        if sending.failed or any(work.exception() is not None for work in sending.works):
            self.cancel(sending.rank, sending.flow.name)

    def cancel(self, rank: Rank, name: str) -> None:
        if rank.running:
            self.note("cancel", rank.rank, name)
            for sending in self.sendings:
                sending.failed |= sending.rank is rank and sending.flow.name == name and bool(sending.reqs)
            self.cancels.append((rank, rank.cancel(name)))
            self.observe(rank)

    # ------------------------------------------------------------------ watching

    def note(self, *operation: object) -> None:
        self.trace.append((round(self.world.now, 9), *operation))

    def observe(self, rank: Rank) -> None:
        """Checks pages whose lease has just ended, then overwrites them, as their next owner would."""
        for sending in self.sendings:
            if sending.rank is rank and sending.handed_on:
                self._adopt(sending)
        self.rings[rank.rank].observe()
        self.neglect[rank.rank].observe(self.world.now)
        self.state.check_layers(rank)
        shadow = self.shadows[rank.rank]
        for generation, released in shadow.released().items():
            found = next(r for r in self.receivings if r.rank is rank and r.req.generation == generation)
            succeeded = found.req.error is None
            self.note("released", rank.rank, found.flow.name, generation, succeeded)
            if succeeded:
                self._check_success(found)
            shadow.reuse(*released)

    def _check_success(self, found: Receiving) -> None:
        src_pages: dict[int, list[int]] = {}
        for writer in found.req.writers:
            engine = self.cluster[writer].engine
            with engine.lock:
                engine.catch_up()  # its loop may have bound the grant, and nobody have asked yet
            sending = next(
                (
                    s
                    for s in self.sendings
                    if s.rank.rank == writer and s.bound_to(found.rank.rank, found.req.generation)
                ),
                None,
            )
            if sending is None:
                self.problems.append(f"{found.flow.name}: succeeded though writer {writer} sealed nothing for it")
                return
            if sending.told not in (None, found.flow.prefix):
                self.problems.append(
                    f"{found.flow.name}: writer {writer} was told of a prefix of {sending.told} tokens"
                )
            pages = sending.pages_behind(found.flow.prefix)
            if pages is None:
                self.problems.append(f"{found.flow.name}: succeeded though writer {writer} has not sent its first page")
                return
            src_pages[writer] = pages
        sources = {writer: self.sources[writer] for writer in src_pages}
        shadow = self.shadows[found.rank.rank]
        operation = f"request {found.flow.name}"
        shadow.check_received(operation, found.before, found.pages, sources, src_pages)
        self.state.check(found, operation, found.rank.cache.layout.layers)

    # ------------------------------------------------------------------ the end

    def _all_ended(self) -> bool:
        posted = not self.benign or len(self.receivings) == self.expected_receives
        return posted and not self._pending_calls() and not self._landing()

    def _landing(self) -> bool:
        return any(self.world.in_flight.values()) or any(gpu.pending for gpu in self.cluster.gpus.values())

    def _pending_calls(self) -> list[str]:
        """Calls on running ranks that have not come to an end."""
        calls = [(s.rank, f"send of {s.flow.name}", work) for s in self.sendings for work in s.works]
        calls += [(r.rank, f"receive of {r.flow.name}", r.work) for r in self.receivings]
        calls += [(rank, "cancel", work) for rank, work in self.cancels if not self._quarantine_is_justified(rank)]
        return [
            f"{operation} on rank {rank.rank}"
            for rank, operation, work in calls
            if rank.running and not work.is_completed()
        ]

    def _quarantine_is_justified(self, rank: Rank) -> bool:
        """Whether every writer that this rank still waits for is one whose quiescence cannot be proved."""
        failed = [req for req in rank.engine.receiver.requests if req.error is not None]
        held = {writer for req in failed for writer in req.pending_writers()}
        return bool(held) and all(self._unknown(writer, rank) for writer in held)

    def _unknown(self, writer: int, reader: Rank) -> bool:
        node = self.cluster[writer].node
        dead_and_unseen = not self.world.alive(node) and not self.sees_death
        return self.world.paused(node) or dead_and_unseen or (writer, reader.rank) in self.severed

    def _check_end(self, *, justified: bool) -> None:
        when = "while some are frozen" if justified else "at the end"
        self.problems += [f"{when}: {call} never ended" for call in self._pending_calls()]
        if self._landing():
            self.problems.append(f"{when}: pieces of puts are still in flight")
        for rank in (rank for rank in self.cluster.ranks if rank.running):
            self.observe(rank)
            self.shadows[rank.rank].check_free(when)
            self.rings[rank.rank].check()
            leases = rank.engine.receiver.leases
            pages, slots = np.flatnonzero(leases.marks(PAGES)).tolist(), np.flatnonzero(leases.marks(SLOTS)).tolist()
            if (pages or slots) and not self._quarantine_is_justified(rank):
                self.problems.append(f"{when}: rank {rank.rank} still leases pages {pages}, slots {slots}")
        if not justified:
            self.problems += self._leftovers()
        self._check_instances()
        self.problems += [
            f"{r.flow.name}: {r.work.exception()}"
            for r in self.receivings
            if isinstance(r.work.exception(), ChecksumMismatch)
        ]
        if self.benign:
            self.problems += [
                f"{r.flow.name} failed without a fault: {r.work.exception()}"
                for r in self.receivings
                if r.work.exception() is not None
            ]
            if len(self.receivings) != self.expected_receives:
                self.problems.append(f"{len(self.receivings)} receives were posted, not {self.expected_receives}")

    def _leftovers(self) -> list[str]:
        """What running ranks still keep of requests that have ended."""
        problems = []
        for rank in (rank for rank in self.cluster.ranks if rank.running):
            engine = rank.engine
            left = {
                "lives": list(engine.sender.requests.by_key),
                "queued pages": engine.sender.requests.queued_pages,
                "transfers": engine.scheduler.pending,
                "live receives": list(engine.receiver.requests.live),
                "stages of its own": [s for s in engine.staging.sending.ring.stages if not _stands(s.owner)],
                "asks for stages": list(engine._machines.requester._queues),
                "flows": flows_left(rank.engine),
                "stages of others": [owner for owner in self._stage_owners(rank) if not self._unknown(owner.src, rank)],
            }
            problems += [
                f"rank {rank.rank} ended with {operation}: {value}" for operation, value in left.items() if value
            ]
        return problems

    def _stage_owners(self, rank: Rank) -> list[Owner]:
        return [queue.owner for queues in rank.engine.credits._queues.values() for queue in queues.values()]

    def _check_instances(self) -> None:
        """If one rank of an instance succeeded, none of the others failed, unless it had lost the leader."""
        for one in (r for r in self.receivings if r.work.is_success()):
            for other in (r for r in self.receivings if r.flow is one.flow and r.rank.running):
                doubt = isinstance(other.req.error, PeerLost) and other.req.complete_at is not None  # a lost leader
                if other.req.error is not None and not doubt:
                    self.problems.append(
                        f"{one.flow.name} succeeded on rank {one.rank.rank}, failed on rank {other.rank.rank}: "
                        f"{other.req.error}"
                    )


def _stands(owner: object) -> bool:
    """Whether it owns a standing stage, which outlives requests."""
    return isinstance(owner, tuple) and owner[0] == "standing"
