"""Every order of events in small worlds, and broken versions of the real functions, each of which one of them catches.

Larger worlds: ``make model``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.helpers.model.explorer import World, explore
from tests.helpers.model.grants import Grants, Rules
from tests.helpers.model.joins import FIRST, Joins
from tests.helpers.model.sessions import Sessions
from torchkv.control import greeting
from torchkv.control.greeting import Greeter, Greeting, Refusal
from torchkv.control.session import Session
from torchkv.engine.joining.membership import Membership
from torchkv.protocol.messages import ControlFrame, Message, Quiesced, Revoke
from torchkv.protocol.receiving.endings import ReceiveEndings
from torchkv.protocol.receiving.open_receives import OpenReceives
from torchkv.protocol.receiving.receiver import Receiver
from torchkv.protocol.receiving.request import ReceiverRequest, Writer
from torchkv.protocol.sending.endings import SendEndings
from torchkv.protocol.sending.request import SenderRequest
from torchkv.protocol.sending.sender import Sender
from torchkv.protocol.sending.unmet import Unmet

CANCELS = Rules(lives=2)
DEATHS = Rules(lives=1, deaths=1, reader_cancels=0)
DEADLINES = Rules(lives=2, reader_cancels=0, deadlines=1)


@pytest.mark.parametrize(
    ("world", "states"),
    [
        (lambda: Grants(CANCELS), 10_000),
        (lambda: Grants(DEATHS), 1_000),
        (lambda: Grants(Rules(lives=1, reader_cancels=0, writer_cancels=1)), 1_000),
        (lambda: Sessions(1, restarts=1), 1_000),
        (lambda: Joins(restarts=1), 500),
    ],
    ids=["two lives", "a writer dies", "a writer gives up", "a session and a restart", "a join and a restart"],
)
def test_nothing_goes_wrong_in_any_order(world: Callable[[], World], states: int) -> None:
    found = explore(world, limit=20 * states)
    assert not found.problem, f"{found.problem}, after {found.path}"
    assert found.ends
    assert found.states > states, "the world has become smaller: does it still say anything?"


def _pages_are_free_at_the_failure(self: ReceiverRequest) -> tuple[int, ...]:
    return ()


def _any_generation(self: OpenReceives, src: int, generation: int) -> tuple[ReceiverRequest, Writer] | None:
    req = next((req for req in self if req.live and src in req.writers), None)
    return None if req is None else (req, req.writers[src])


def _first_seal_counts(self: ReceiveEndings, req: ReceiverRequest, now: float) -> None:
    if req.complete_at is None and any(
        writer.sealed is not None and not writer.missing(None, req.num_tokens) for writer in req.writers.values()
    ):
        req.complete_at = now
        self.succeed(req)


def _seal_at_once(self: SendEndings, req: SenderRequest, now: float) -> None:
    running, req.running = req.running, {}
    _true_seal(self, req, now)
    req.running = running


_true_seal = SendEndings.seal_if_done


def _quiesced_at_once(self: Sender, src: int, message: Revoke, now: float) -> None:
    _true_revoke(self, src, message, now)
    self._endings.tell(src, Quiesced(message.generation))


_true_revoke = Sender.on_revoke


def _grant_outlives_its_revocation(self: Unmet, dst: int, generation: int, error: object, now: float) -> None:
    pass


def _everything_missing_is_fine(self: Writer, layers: object, num_tokens: int) -> None:
    return None


def _every_incarnation(self: Session, frame: ControlFrame) -> list[Message]:
    changed = {"incarnation": self._peer_incarnation, "target": self._incarnation}
    fields = {name: getattr(frame, name) for name in frame.__struct_fields__}
    return _true_receive(self, type(frame)(**{**fields, **changed}))


_true_receive = Session.receive


def _every_frame_again(self: Session, frame: ControlFrame) -> list[Message]:
    ready = _true_receive(self, frame)
    return ready or [message for message in [frame.message] if message is not None]


def _forgets_after_one_try(self: Session, now: float) -> list[ControlFrame]:
    frames = _true_poll(self, now)
    self._unacked.clear()
    self._unsent = 0
    return frames


_true_poll = Session.poll


@pytest.mark.parametrize(
    ("owner", "method", "broken", "world", "symptom"),
    [
        (ReceiverRequest, "pending_writers", _pages_are_free_at_the_failure, CANCELS, "lands in a page"),
        (ReceiverRequest, "pending_writers", _pages_are_free_at_the_failure, DEADLINES, "lands in a page"),
        (OpenReceives, "writer", _any_generation, Rules(pages=2), "has succeeded with bytes"),
        (ReceiveEndings, "complete_if_covered", _first_seal_counts, CANCELS, "has succeeded with bytes"),
        (SendEndings, "seal_if_done", _seal_at_once, CANCELS, "(lands in a page|has succeeded with bytes|never ends)"),
        (Sender, "on_revoke", _quiesced_at_once, CANCELS, "lands in a page"),
        (Unmet, "revoke", _grant_outlives_its_revocation, CANCELS, "lands in a page"),
        (Receiver, "peer_dead", lambda self, rank, now: None, DEATHS, "leased for ever"),
        (Receiver, "on_quiesced", lambda self, src, message, now: None, CANCELS, "leased for ever"),
        (Session, "receive", _every_incarnation, None, "has heard"),
        (Session, "receive", _every_frame_again, None, "has heard"),
        (Session, "poll", _forgets_after_one_try, None, "never delivered"),
    ],
    ids=[
        "a cancel frees pages",
        "timeout frees pages",
        "no generation check",
        "attest by the first writer only",
        "seal before flush",
        "quiescent while it writes",
        "late grant accepted",
        "deaths prove nothing",
        "quiescence proves nothing",
        "no incarnation check",
        "no sequence check",
        "no retransmission",
    ],
)
def test_broken_versions_are_caught(
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    method: str,
    broken: Callable[..., Any],
    world: Rules | None,
    symptom: str,
) -> None:
    monkeypatch.setattr(owner, method, broken)
    found = explore(lambda: Sessions(1, restarts=1) if world is None else Grants(world))
    assert re.search(symptom, found.problem), f"{found.problem!r} after {found.path}"


# ------------------------------------------------------------------ joining


def _one_rank_stands_for_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(greeting._Meeting, "complete", property(lambda self: bool(self.cards)))


def _lives_are_mixed(patch: pytest.MonkeyPatch) -> None:
    """Who greets is known by its name and address."""
    real = Greeter.receive

    def receive(self: Greeter[Any], message: Greeting | Refusal, now: float) -> None:
        life = FIRST if self._greeting.life != FIRST and message.contacts[0].startswith("tcp://p") else message.life
        real(self, msgspec.structs.replace(message, life=life), now)

    patch.setattr(Greeter, "receive", receive)


def _a_later_life_takes_the_name_at_once(patch: pytest.MonkeyPatch) -> None:
    real = Membership._admit

    def admit(self: Membership, life: int, cards: Any) -> None:
        instances: Any = self._engine.group_map.instances
        held = {name: instances.pop(name) for name in list(instances) if name == "p"}
        real(self, life, cards)
        for name, numbers in held.items():
            instances.setdefault(name, numbers)

    patch.setattr(Membership, "_admit", admit)


def _remembers_the_dead(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Greeter, "forget", lambda self, life, why=None: None)


@pytest.mark.parametrize(
    ("broken", "symptom"),
    [
        (_one_rank_stands_for_all, "only 1 ranks are admitted"),
        (_lives_are_mixed, "ranks of the lives|admitted while|knows the lives"),
        (_a_later_life_takes_the_name_at_once, "is admitted while ranks"),
        (_remembers_the_dead, "the dead are remembered"),
    ],
    ids=lambda value: value.__name__.strip("_").replace("_", " ") if callable(value) else "",
)
def test_broken_joins_are_caught(
    monkeypatch: pytest.MonkeyPatch, broken: Callable[[pytest.MonkeyPatch], None], symptom: str
) -> None:
    broken(monkeypatch)
    found = explore(lambda: Joins(restarts=1))
    assert re.search(symptom, found.problem), f"{found.problem!r} after {found.path}"
