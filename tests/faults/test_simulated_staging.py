"""Mutants of staging: each breaks one thing that keeps late bytes off pages and stages, and must be noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.helpers.simulation.scenario import Scenario
from tests.helpers.simulation.staging_rings import LaggingPacker
from torchkv.errors import KVError
from torchkv.protocol.actions import Scatter
from torchkv.protocol.messages import Staged
from torchkv.protocol.receiving.endings import ReceiveEndings
from torchkv.protocol.receiving.request import ReceiverRequest
from torchkv.protocol.receiving.stage_allocator import Stage, StagingRing
from torchkv.protocol.receiving.stages import Stages
from torchkv.protocol.receiving.staging_credits import StagingCredits, _StageState
from torchkv.protocol.sending.staging_requester import Span, StagingRequester
from torchkv.staging.packer import GatherJob
from torchkv.staging.transfer import StagedTransfer
from torchkv.transport import Batch

SEEDS = range(1000, 1300)
SLOW = 10.0
Patch = pytest.MonkeyPatch


def _believes_everyone(patch: Patch) -> None:
    """Pages are freed although a writer that made no promise may still write to them."""
    patch.setattr(StagingCredits, "is_ring_only", lambda self, src, generation: True)


def _never_withdraws(patch: Patch) -> None:
    """A writer that has promised to use the ring only writes to pages."""
    patch.setattr(StagingRequester, "go_direct", lambda self, dst, generation: True)


def _stage_reused_early(patch: Patch) -> None:
    """A stage of a failed request is granted to the next one at once."""

    def revoke(self: StagingCredits, generation: int) -> None:
        for queue in self._queues.get(generation, {}).values():
            queue.revoked = True
            self._drop_pending(queue)
            for serial in [serial for serial, held in queue.stages.items() if held.state is _StageState.GRANTED]:
                self.ring.release(queue.stages.pop(serial).stage)
        self._serve()

    patch.setattr(StagingCredits, "revoke", revoke)


def _remembers_ended(patch: Patch) -> None:
    """Ended requests can still be found, so that the broken receivers below do not merely crash."""
    end = ReceiveEndings.end

    def keep(self: ReceiveEndings, req: ReceiverRequest) -> None:
        if not req.ended:
            end(self, req)
            vars(self._requests).setdefault("past", {})[req.generation] = req

    def scattered(self: Stages, job: Scatter, error: KVError | None, now: float) -> None:
        req = self._requests.by_generation.get(job.generation)
        if req is not None:
            real(self, job, error, now)
        else:
            self._credits.release(job.src, job.generation, job.serial, now)

    real = Stages.scattered
    patch.setattr(ReceiveEndings, "end", keep)
    patch.setattr(Stages, "scattered", scattered)
    patch.setattr(Scatter, "stopped", property(lambda job: False, lambda job, value: None))


def _unpacks_for_the_failed(patch: Patch) -> None:
    """A stage that was written before its writer learned of the failure is unpacked nevertheless."""
    _remembers_ended(patch)
    real = Stages.on_staged

    def on_staged(self: Stages, src: int, message: Staged, now: float) -> None:
        req = vars(self._requests).get("past", {}).get(message.generation)
        queue = self._credits._queue_of(src, message.generation)
        held = None if queue is None else queue.stages.get(message.serial)
        if req is None or held is None or req.error is None or not message.num_pages:
            real(self, src, message, now)
            return
        # The request is live again while the job is made.
        held.state, error = _StageState.GRANTED, req.error
        self._requests.by_generation[message.generation], req.error = req, None
        real(self, src, message, now)
        req.error = error
        del self._requests.by_generation[message.generation]

    patch.setattr(Stages, "on_staged", on_staged)


def _does_not_wait_for_scatters_at_failure(patch: Patch) -> None:
    _remembers_ended(patch)

    def end_if_quiescent(self: ReceiveEndings, req: ReceiverRequest) -> None:
        if req.error is not None and not req.pending_writers():
            self.end(req)

    patch.setattr(ReceiveEndings, "end_if_quiescent", end_if_quiescent)


def _does_not_wait_for_scatters_at_success(patch: Patch) -> None:
    """Success does not wait for bytes that were sent twice and are being unpacked the second time."""
    _remembers_ended(patch)
    real = ReceiveEndings.complete_if_covered

    def complete_if_covered(self: ReceiveEndings, req: ReceiverRequest, now: float) -> None:
        scattering, req.scattering = req.scattering, set()
        real(self, req, now)
        req.scattering = scattering

    patch.setattr(ReceiveEndings, "complete_if_covered", complete_if_covered)


def _tells_before_the_flush(patch: Patch) -> None:
    """A stage is announced when the put is complete here, which means only that the source may be reused."""

    def put(self: StagedTransfer, nbytes: int, stage: Stage, span: Span) -> Iterator[int]:
        assert self.connection.channel is not None
        ours = self._stages.take().region
        batch = Batch.one(
            local_region=ours,
            local_offset=stage.offset,
            remote_region=self._target.region,
            remote_offset=span.offset,
            length=nbytes,
        )
        done = self.connection.channel.put(batch)
        while not done.done:
            yield 0
        if done.error is not None:
            self.flushed = False
            raise done.error

    patch.setattr(StagedTransfer, "_put", put)


def _reuses_its_own_stage_too_early(patch: Patch) -> None:
    """A sender packs another piece into a stage of its own that is still being put."""
    release = StagingRing.release

    def own_stage(self: StagedTransfer, nbytes: int) -> Iterator[int]:
        while self.error is None:
            stage = self._stages.ring.allocate(nbytes, "probe")
            if stage is not None:
                release(self._stages.ring, stage)
                return stage
            yield 0
        return None

    def release_of_others(self: StagingRing, stage: Stage) -> None:
        if stage.owner != "probe":
            release(self, stage)

    patch.setattr(StagedTransfer, "_own_stage", own_stage)
    patch.setattr(StagingRing, "release", release_of_others)


def _forgets_its_gathers(patch: Patch) -> None:
    """A failed transfer ends at once, though its gather still runs, straight into the receiver's ring."""

    def drain(self: StagedTransfer) -> Iterator[int]:
        self._release_turn()
        yield from ()

    patch.setattr(StagedTransfer, "_drain", drain)
    patch.setattr(LaggingPacker, "slowness", SLOW)


def _tells_before_it_has_gathered(patch: Patch) -> None:
    """A stage of a mapped ring is announced before the gather has ended: there, that is what the flush is to a put."""
    real = LaggingPacker.gather

    def gather(self: LaggingPacker, job: GatherJob) -> Iterator[int]:
        next(real(self, job))  # begins the gather, which then goes on by itself
        yield 1

    patch.setattr(LaggingPacker, "gather", gather)


PAGES, RING, BYTES = "): free, but written to", "staging ring", "wrong bytes"  # PAGES: of pages and of slots
ANY, ONLY, NEVER = (), ("staged",), ("slice",)  # the verbs of the flows that are searched


@pytest.mark.parametrize(("first", "slowness"), [(0, 1.0), (12, 1.0), (24, SLOW)])
def test_late_bytes_stay_in_their_stages_of_mapped_rings(monkeypatch: Patch, first: int, slowness: float) -> None:
    """Under all faults, with and without verbs that write to pages; no rank has memory to send from."""
    monkeypatch.setattr(LaggingPacker, "slowness", slowness)
    staged = gathers = 0
    for seed in range(first, first + 12):
        print(f"seed {seed}")
        for verbs in (ONLY, ANY):
            # With given verbs, all but staged_put is forced to write directly, and so would state be.
            scenario = Scenario(seed, verbs=verbs, views=True, states=() if verbs is ONLY else None)
            assert scenario.run() == []
            staged += sum(ring.stages_seen for ring in scenario.rings.values())
            for rank in scenario.cluster.ranks:
                if isinstance(packer := rank.engine.staging.packer, LaggingPacker):
                    gathers += packer.gathers
                assert rank.engine.staging.sending.taken == 0
                lanes = {lane for connection in rank.engine.connections.values() for lane in connection.counters}
                assert lanes <= {"view"} or verbs is ANY
    assert staged > 30, "too little was staged to show anything"
    assert gathers > 20


@pytest.mark.parametrize(
    ("mutant", "symptom", "verbs", "views"),
    [
        (_believes_everyone, PAGES, NEVER, False),
        (_never_withdraws, PAGES, ANY, False),
        (_stage_reused_early, RING, ONLY, False),
        (_stage_reused_early, RING, ONLY, True),
        (_unpacks_for_the_failed, PAGES, ONLY, False),
        (_unpacks_for_the_failed, PAGES, ONLY, True),
        (_does_not_wait_for_scatters_at_failure, PAGES, ONLY, False),
        (_does_not_wait_for_scatters_at_success, PAGES, ONLY, False),
        (_tells_before_the_flush, BYTES, ONLY, False),
        (_tells_before_it_has_gathered, BYTES, ONLY, True),
        (_reuses_its_own_stage_too_early, BYTES, ONLY, False),
        (_forgets_its_gathers, RING, ONLY, True),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "mapped" if value is True else "",
)
def test_broken_staging_is_caught(
    monkeypatch: Patch, mutant: Callable[[Patch], Any], symptom: str, verbs: tuple[str, ...], views: bool
) -> None:
    for seed in SEEDS[:3]:
        assert Scenario(seed, verbs=verbs, views=views).run() == []
    mutant(monkeypatch)
    for seed in SEEDS:
        found = [problem for problem in Scenario(seed, verbs=verbs, views=views).run() if symptom in problem]
        if found and (symptom == BYTES or any("free, but written to" in problem for problem in found)):
            return
    pytest.fail(f"{len(SEEDS)} seeds found nothing wrong with broken staging")
