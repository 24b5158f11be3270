"""Staging broken in every way that the simulated world must notice: what keeps late bytes off pages and stages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "unit")]

from scenario import Scenario  # noqa: E402 - only now on the path
from staging_rings import LaggingPacker, raise_signal  # noqa: E402

from torchkv.errors import KVError  # noqa: E402
from torchkv.packer import Early  # noqa: E402
from torchkv.protocol.actions import Scatter  # noqa: E402
from torchkv.protocol.receive import Receive  # noqa: E402
from torchkv.protocol.receiver import Receiver  # noqa: E402
from torchkv.protocol.stageclient import Span, StageClient  # noqa: E402
from torchkv.protocol.stagekeeper import StageKeeper, _State  # noqa: E402
from torchkv.stagedtransfer import StagedTransfer  # noqa: E402
from torchkv.staging import Stage, StagingRing  # noqa: E402
from torchkv.transport import Batch  # noqa: E402
from torchkv.wire import Staged  # noqa: E402

SEEDS = range(1000, 1300)
SLOW = 10.0
Patch = pytest.MonkeyPatch


def _believes_everyone(patch: Patch) -> None:
    """Pages are freed although a writer that promised nothing may still write to them."""
    patch.setattr(StageKeeper, "promised", lambda self, src, generation: True)


def _never_withdraws(patch: Patch) -> None:
    """A writer that has promised to use the ring only writes to pages."""
    patch.setattr(StageClient, "go_direct", lambda self, dst, generation: True)


def _reuses_at_revoke(patch: Patch) -> None:
    """The stage of a failed request is given to the next one at once."""

    def revoke(self: StageKeeper, generation: int) -> None:
        for line in self._lines.get(generation, {}).values():
            line.revoked = True
            self._stop_waiting(line)
            for serial in [serial for serial, held in line.held.items() if held.state is _State.GRANTED]:
                self.ring.release(line.held.pop(serial).stage)
        self._serve()

    patch.setattr(StageKeeper, "revoke", revoke)


def _remembers_ended(patch: Patch) -> None:
    """Receives that have ended can still be found, so that the broken receivers below do not merely crash."""
    end = Receiver._end

    def keep(self: Receiver, receive: Receive) -> None:
        if not receive.ended:
            end(self, receive)
            vars(self).setdefault("past", {})[receive.generation] = receive

    def scattered(self: Receiver, job: Scatter, error: KVError | None, now: float) -> None:
        receive = self._receives.get(job.generation)
        if receive is not None:
            real(self, job, error, now)
        else:
            self._keeper.release(job.src, job.generation, job.serial, now)

    real = Receiver.scattered
    patch.setattr(Receiver, "_end", keep)
    patch.setattr(Receiver, "scattered", scattered)
    patch.setattr(Scatter, "stopped", property(lambda job: False, lambda job, value: None))


def _unpacks_for_the_failed(patch: Patch) -> None:
    """A stage that was written before its writer heard of the failure is unpacked as if nothing had happened."""
    _remembers_ended(patch)
    real = Receiver.on_staged

    def on_staged(self: Receiver, src: int, message: Staged, now: float) -> None:
        receive = vars(self).get("past", {}).get(message.generation)
        line = self._keeper._line(src, message.generation)
        held = None if line is None else line.held.get(message.serial)
        if receive is None or held is None or receive.error is None or not message.num_pages:
            real(self, src, message, now)
            return
        # Live again for as long as it takes to make the job.
        held.state, error = _State.GRANTED, receive.error
        self._receives[message.generation], receive.error = receive, None
        real(self, src, message, now)
        receive.error = error
        del self._receives[message.generation]

    patch.setattr(Receiver, "on_staged", on_staged)


def _does_not_wait_for_scatters_at_failure(patch: Patch) -> None:
    _remembers_ended(patch)

    def end_if_quiescent(self: Receiver, receive: Receive) -> None:
        if receive.error is not None and not receive.pending_writers():
            self._end(receive)

    patch.setattr(Receiver, "_end_if_quiescent", end_if_quiescent)


def _does_not_wait_for_scatters_at_success(patch: Patch) -> None:
    """Bytes that came twice are all there, and the second time they are still being unpacked."""
    _remembers_ended(patch)
    real = Receiver._complete_if_covered

    def complete_if_covered(self: Receiver, receive: Receive, now: float) -> None:
        scattering, receive.scattering = receive.scattering, set()
        real(self, receive, now)
        receive.scattering = scattering

    patch.setattr(Receiver, "_complete_if_covered", complete_if_covered)


def _tells_before_the_flush(patch: Patch) -> None:
    """The put is over here, as every transport says when the source may be reused, and not there yet."""

    def put(self: StagedTransfer, nbytes: int, stage: Stage, span: Span) -> Iterator[int]:
        assert self.route.channel is not None
        ours = self._stages.take().region
        batch = Batch.one(
            local_region=ours,
            local_offset=stage.offset,
            remote_region=self._target.region,
            remote_offset=span.offset,
            length=nbytes,
        )
        done = self.route.channel.put(batch)
        while not done.done:
            yield 0
        if done.error is not None:
            self.flushed = False
            raise done.error

    patch.setattr(StagedTransfer, "_put", put)


def _reuses_its_own_stage_too_early(patch: Patch) -> None:
    """A sender packs the next piece, or another destination's, into a stage that is still being put."""
    release = StagingRing.release

    def own_stage(self: StagedTransfer, nbytes: int) -> Iterator[int]:
        while self.error is None:
            stage = self._stages.ring.allocate(nbytes, "nobody")
            if stage is not None:
                release(self._stages.ring, stage)
                return stage
            yield 0
        return None

    def release_of_others(self: StagingRing, stage: Stage) -> None:
        if stage.owner != "nobody":
            release(self, stage)

    patch.setattr(StagedTransfer, "_own_stage", own_stage)
    patch.setattr(StagingRing, "release", release_of_others)


def _forgets_its_gathers(patch: Patch) -> None:
    """A transfer that failed is over at once, though something still gathers for it, straight into the ring."""

    def drain(self: StagedTransfer) -> Iterator[int]:
        self._leave()
        yield from ()

    patch.setattr(StagedTransfer, "_drain", drain)
    patch.setattr(LaggingPacker, "slowness", SLOW)


def _tells_before_it_has_gathered(patch: Patch) -> None:
    """What a missing flush is to a put."""
    real = LaggingPacker.gather

    def gather(self: LaggingPacker, *args: Any, checksum: bool, early: Early | None = None, **_: Any) -> Iterator[int]:
        next(real(self, *args, checksum=checksum))  # begins, and goes on by itself
        if early is not None:
            raise_signal(early)
        yield 1

    patch.setattr(LaggingPacker, "gather", gather)


def _does_not_wait_for_signals(patch: Patch) -> None:
    """A stage that was called written early is unpacked at once."""
    real = LaggingPacker.scatter

    def scatter(self: LaggingPacker, job: Scatter) -> Iterator[int]:
        job.signal, job.written = None, True
        return real(self, job)

    patch.setattr(LaggingPacker, "scatter", scatter)
    patch.setattr(LaggingPacker, "slowness", SLOW)


def _reuses_what_was_promised(patch: Patch) -> None:
    """A stage whose signal nobody waits for any more is given to the next one, though its gather is under way."""
    real = StageKeeper.release

    def release(self: StageKeeper, *owner: Any, written: bool = True) -> None:
        real(self, *owner)

    patch.setattr(StageKeeper, "release", release)
    patch.setattr(LaggingPacker, "slowness", SLOW)


PAGES, RING, BYTES = "): free, but written to", "staging ring", "wrong bytes"  # the first of pages and of slots
ANY, ONLY, NEVER = (), ("staged",), ("slice",)  # where to look first: the verbs of the flows


@pytest.mark.parametrize(("first", "slowness"), [(0, 1.0), (12, 1.0), (24, SLOW)])
def test_late_bytes_stay_in_their_stages_of_mapped_rings(monkeypatch: Patch, first: int, slowness: float) -> None:
    """Under all faults, and whatever else writes to pages; no rank has memory to send from."""
    monkeypatch.setattr(LaggingPacker, "slowness", slowness)
    staged = 0
    for seed in range(first, first + 12):
        print(f"seed {seed}")
        for verbs in (ONLY, ANY):
            # Where other verbs than staged_put are made to write to pages, so is state.
            scenario = Scenario(seed, verbs=verbs, views=True, states=() if verbs is ONLY else None)
            assert scenario.run() == []
            staged += sum(ring.stages_seen for ring in scenario.rings.values())
            for rank in scenario.cluster.ranks:
                assert rank.engine.staging.sending.taken == 0
                lanes = {lane for route in rank.engine.routes.values() for lane in route.counters}
                assert lanes <= {"view"} or verbs is ANY
    assert staged > 30, "too little was staged to show anything"


@pytest.mark.parametrize(
    ("mutant", "symptom", "verbs", "views"),
    [
        (_believes_everyone, PAGES, NEVER, False),
        (_never_withdraws, PAGES, ANY, False),
        (_reuses_at_revoke, RING, ONLY, False),
        (_reuses_at_revoke, RING, ONLY, True),
        (_unpacks_for_the_failed, PAGES, ONLY, False),
        (_unpacks_for_the_failed, PAGES, ONLY, True),
        (_does_not_wait_for_scatters_at_failure, PAGES, ONLY, False),
        (_does_not_wait_for_scatters_at_success, PAGES, ONLY, False),
        (_tells_before_the_flush, BYTES, ONLY, False),
        (_tells_before_it_has_gathered, BYTES, ONLY, True),
        (_reuses_its_own_stage_too_early, BYTES, ONLY, False),
        (_forgets_its_gathers, RING, ONLY, True),
        (_does_not_wait_for_signals, BYTES, ONLY, True),
        (_reuses_what_was_promised, RING, ONLY, True),
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
