"""A receiver that does not come to its requests, or hangs: nobody else of its sender waits, and nothing piles up.

Real processes. The sender of three instances writes to a slow one and to a quick one.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.harness import Ranks, ask
from tests.helpers.jobs import SECRET, new_secret_file
from tests.helpers.ranks import member
from tests.helpers.ranks.member import Member, await_peer, connect, leave
from tests.helpers.resident import resident_kib
from torchkv import KVError
from torchkv.protocol.sending.open_sends import MAX_QUEUED_PAGES, MAX_REQUESTS

SENDER, SLOW, QUICK = 0, 1, 2  # tags of the instances' bytes
OPEN = [f"s{number}" for number in range(4)]  # requests that the slow one has posted
ROUNDS = 20
KIB_A_REQUEST = 8  # resident memory of a request that waits, at the most
NOISE_KIB = 8 << 10


class Three:
    """The sender and its two receivers, which it has met."""

    def __init__(self, scratch: Path, env: dict[str, str]) -> None:
        self.sender, self.slow, self.quick = (Ranks(1, env=env, world=False) for _ in range(3))
        addresses = []
        for name, tag in (("sender", SENDER), ("slow", SLOW), ("quick", QUICK)):
            addresses += getattr(self, name).run(member.join, name, tag, 0, 1, str(scratch / name), None, 8, "cpu")
        for address in addresses[1:]:
            self.sender.run(connect, address)
        for receiver in (self.slow, self.quick):
            receiver.run(await_peer, "sender")
        self._rounds = 0

    def exchange(self, rounds: int) -> None:
        """Requests to the quick one, one after the other, every byte of which it checks."""
        for _ in range(rounds):
            self._rounds += 1
            self.send(f"q{self._rounds}", self.quick, "quick")

    def send(self, request: str, to: Ranks, name: str) -> None:
        to.start(member.receive, request, "sender", SENDER)
        self.sender.run(member.send, request, name, SENDER, 4)
        to.join([0])

    def close(self) -> None:
        for each in (self.sender, self.slow, self.quick):
            each.run(leave)
            each.close()


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Three]:
    made = Three(tmp_path, {SECRET: str(new_secret_file(tmp_path / "secret"))})
    yield made
    made.close()


# ------------------------------------------------------------------ what ranks do


def post() -> None:
    """As many requests as there are names in `OPEN`, of four pages each."""
    kv = Member.kv
    Member.works = [kv.recv_pages(name, list(range(1 + 4 * i, 5 + 4 * i)), "sender") for i, name in enumerate(OPEN)]


def compute_until(done: str) -> list[bool]:
    """Posts requests, and then this thread computes in Python; it asks for nothing, and never looks at them."""
    post()
    ask("computes")
    while not os.path.exists(done):
        sum(range(100_000))
    return [work.is_success() for work in Member.works]


def send_open() -> None:
    for name in OPEN:
        Member.kv.send_pages(name, [3, 4, 5, 6], "slow")
    Member.works = [Member.kv.finish(name, "slow") for name in OPEN]


def await_open() -> list[str]:
    """How each has ended: with nothing, or the name of an error."""
    found = []
    for work in Member.works:
        try:
            work.wait(30)
            found.append("")
        except KVError as error:
            found.append(type(error).__name__)
    return found


def push() -> tuple[str, bool, int, int]:
    """Sends to who grants nothing, under ever new names, until that is refused. The error, requests, and growth."""
    before = resident_kib()
    for number in range(10 * MAX_REQUESTS):
        try:
            Member.kv.send_pages(f"pushed-{number}", [1, 2], "slow")
        except KVError as error:
            return type(error).__name__, error.retryable, number, resident_kib() - before
    raise AssertionError(f"{number} requests to a process that is stopped, and none was refused")


def kept() -> dict[str, int]:
    """What the sender keeps for its peers."""
    verbs = Member.kv._verbs
    assert verbs is not None
    sender, sessions = verbs.engine.sender, verbs.engine.messenger._sessions
    return {
        "requests": len(sender.requests.by_key),
        "pages that wait": sender.requests.queued_pages,
        "messages": sum(len(session._unacked) for session in sessions.values()),
    }


def await_lost() -> None:
    await_peer("slow", False)


def cancel(names: list[str]) -> None:
    for name in names:
        Member.kv.cancel(name)


def settle() -> dict[str, int]:
    """`kept`, once that is nothing, or after a while."""
    until = time.monotonic() + 20
    while any(found := kept().values()) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(found), kept()
    return kept()


# ------------------------------------------------------------------ tests


def test_a_receiver_whose_main_thread_computes_all_the_while_holds_up_nobody(three: Three, tmp_path: Path) -> None:
    """Its requests are received, and its sender is told so, although it never asks."""
    done = tmp_path / "done"
    three.slow.start(compute_until, str(done))
    assert three.slow.hear(0) == "computes"
    three.slow.tell(0)
    three.sender.run(send_open)
    three.exchange(ROUNDS)
    assert three.sender.run(await_open) == [[""] * len(OPEN)]
    assert three.sender.run(settle) == [{"requests": 0, "pages that wait": 0, "messages": 0}]
    done.touch()
    assert three.slow.join([0]) == [[True] * len(OPEN)]


def test_a_stopped_receiver_holds_up_nobody_and_fills_no_memory_of_its_sender(three: Three) -> None:
    three.exchange(2)
    three.slow.run(post)
    os.kill(three.slow.pid(0), signal.SIGSTOP)
    try:
        three.sender.run(send_open)
        three.exchange(ROUNDS)
        ((error, retryable, pushed, growth),) = three.sender.run(push)
        assert (error == "ProtocolError" and retryable) or error == "PeerLost", error
        assert pushed <= MAX_REQUESTS
        assert growth < KIB_A_REQUEST * pushed + NOISE_KIB
        three.exchange(ROUNDS)
        (while_stopped,) = three.sender.run(kept)
        # Those of `send_open` wait as well if it was stopped before its grants had left.
        assert while_stopped["pages that wait"] <= min(2 * pushed + 4 * len(OPEN), MAX_QUEUED_PAGES)
        assert while_stopped["messages"] <= 16 * len(OPEN), "a request that waits for its grant tells nothing"
        three.sender.run(await_lost)
        assert three.sender.run(await_open) == [["PeerLost"] * len(OPEN)]
        ((error, *_),) = three.sender.run(push)
        assert error == "PeerLost", "at once"
        three.exchange(ROUNDS)
    finally:
        os.kill(three.slow.pid(0), signal.SIGCONT)
    three.sender.run(await_peer, "slow")
    three.slow.run(await_peer, "sender")
    three.sender.run(cancel, [*OPEN, *(f"pushed-{number}" for number in range(pushed + 1))])
    three.slow.run(cancel, OPEN)
    assert three.sender.run(settle) == [{"requests": 0, "pages that wait": 0, "messages": 0}]
    three.send("again", three.slow, "slow")
