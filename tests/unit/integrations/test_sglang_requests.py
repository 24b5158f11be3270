"""What SGLang's scheduler is told of each request, given what torchkv says. Real engines: tests/serving/sglang."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from torchkv.errors import LayoutMismatch, PeerLost, ProtocolError, TransferCancelled
from torchkv.integrations.sglang_requests import (
    BOOTSTRAPPING,
    FAILED,
    SUCCESS,
    TRANSFERRING,
    WAITING,
    Receiver,
    Requests,
    Sender,
)

PAGE = 4
ROOM = 7
NAME = "sglang-7"


class Work:
    """A work that the test completes. safe: whether the pages of a failed one may be reused."""

    bytes, seconds, aux = 10, 0.5, b""

    def __init__(self) -> None:
        self.done, self.error, self.safe = False, None, True

    def end(self, error: Any = None, *, safe: bool = True) -> None:
        self.done, self.error, self.safe = True, error, safe
        if error is not None:
            error._pages_safe = lambda: self.safe

    def is_completed(self) -> bool:
        return self.done

    def is_success(self) -> bool:
        return self.done and self.error is None

    def exception(self) -> Any:
        return self.error if self.done else None


class KV:
    """A member that notes its calls. prefix: what the receiver holds, once it has granted, or the error instead."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.prefix: Any = None
        self.fails: Any = None  # raised by the next verb
        self.works: dict[str, Work] = {}

    def _verb(self, verb: str, *details: Any) -> Work:
        self.calls.append((verb, *details))
        if self.fails is not None:
            raise self.fails
        self.works[verb] = Work()
        return self.works[verb]

    def granted(self, name: str, dst: None) -> Any:
        assert (name, dst) == (NAME, None)
        if isinstance(self.prefix, Exception):
            raise self.prefix
        return self.prefix

    def send_pages(
        self, name: str, pages: Any, dst: None, *, layers: None, start: int, event: Any, origin: str
    ) -> Work:
        assert (pages.dtype, origin) == (np.int64, "prefix")
        return self._verb("send", pages.tolist(), start, event)

    def finish(self, name: str, dst: None, *, aux: bytes, state_slot: None) -> Work:
        return self._verb("finish", aux)

    def recv_pages(self, name: str, pages: Any, src: str, *, prefix_tokens: int, state_slot: None) -> Work:
        assert pages.dtype == np.int64
        return self._verb("recv", pages.tolist(), src, prefix_tokens)

    def cancel(self, name: str, *, decline: bool = False) -> Work:
        self.calls.append(("cancel", decline))
        self.works["cancel"] = Work()
        return self.works["cancel"]

    def refuse(self, name: str, src: str) -> None:
        self.calls.append(("refuse", src))


class Aux:
    """Rows of metadata."""

    def __init__(self) -> None:
        self.rows: dict[int, bytes] = {}

    def row(self, index: int) -> bytes:
        return f"row {index}".encode()

    def put(self, index: int, data: bytes) -> None:
        if data == b"bad":
            raise ProtocolError("a row of another size")
        self.rows[index] = data


class Side:
    """One rank. finding: the prefill engine that its receivers look for."""

    def __init__(self) -> None:
        self.kv, self.aux = KV(), Aux()
        self.finding: Future[str] = Future()
        prefills = SimpleNamespace(find=lambda bootstrap: self.finding)
        self.requests = Requests(self.kv, self.aux, PAGE, prefills)

    def sender(self) -> Sender:
        return Sender(self, "host:1", ROOM)

    def receiver(self, room: int | None = ROOM) -> Receiver:
        return Receiver(self, "host:1", room)

    def granting(self) -> Receiver:
        """A receiver whose pages are granted."""
        receiver = self.receiver()
        receiver.init(0)
        self.finding.set_result("p")
        receiver.send_metadata(np.array([5, 2], dtype=np.int32), 3, [], 8)
        return receiver

    def sending(self) -> Sender:
        """A sender that has sent everything."""
        sender = self.sender()
        self.kv.prefix = 0
        assert sender.poll() == WAITING
        sender.init(1, 2)
        sender.send(np.array([9], dtype=np.int32))
        return sender


@pytest.fixture
def side() -> Side:
    return Side()


# ---------------------------------------------------------------------- prefill


def test_pages_go_when_they_are_granted_behind_what_the_receiver_holds(side: Side) -> None:
    sender = side.sender()
    assert sender.poll() == BOOTSTRAPPING
    side.kv.prefix = 8
    assert sender.poll() == WAITING
    assert sender.pop_decode_prefix_len() == 8
    sender.init(3, 2)
    sender._early_send_wait_event = "event"
    sender.send(np.array([5, 1], dtype=np.int32))
    assert sender.poll() == WAITING
    sender.send(np.array([4], dtype=np.int32), None, 3)
    assert side.kv.calls == [("send", [5, 1], 0, "event"), ("send", [4], 2, None), ("finish", b"row 2")]
    assert sender.poll() == TRANSFERRING
    side.kv.works["finish"].end()
    assert [sender.poll(), sender.poll()] == [SUCCESS, SUCCESS]
    assert (sender.nbytes, sender.seconds) == (20, 0.5)
    sender.abort()
    assert sender.poll() == SUCCESS
    assert len(side.requests.departures) == 0


def test_a_prompt_that_the_receiver_holds_needs_no_page(side: Side) -> None:
    sender = side.sender()
    side.kv.prefix = 8
    sender.poll()
    sender.init(0, 2)
    assert sender.should_send_kv_chunk(0, True)
    assert not sender.should_send_kv_chunk(0, False)
    sender.send(np.array([], dtype=np.int32))
    assert side.kv.calls == [("finish", b"row 2")]


def test_a_rank_that_holds_nothing_for_the_receiver_sends_and_ends_with_the_others(side: Side) -> None:
    sender = side.sender()
    side.kv.prefix = LayoutMismatch("nothing")
    assert sender.poll() == WAITING
    assert sender.pop_decode_prefix_len() == 0


@pytest.mark.parametrize("moment", ["waits", "computes", "sends", "has sent"])
def test_what_fails_is_cancelled_once_and_ends(side: Side, moment: str) -> None:
    lost = PeerLost("gone")
    sender = side.sender()
    if moment == "waits":
        side.kv.prefix = lost
    else:
        side.kv.prefix = 0
        sender.poll()
        sender.init(1, 2)
        if moment == "computes":
            side.kv.prefix = lost
        else:
            side.kv.fails = lost if moment == "sends" else None
            sender.send(np.array([9], dtype=np.int32))
            if moment == "has sent":
                side.kv.works["finish"].end(lost)
    assert [sender.poll(), sender.poll()] == [FAILED, FAILED]
    with pytest.raises(PeerLost):
        sender.failure_exception()
    sender.abort()
    sender.send(np.array([9], dtype=np.int32))
    assert side.kv.calls[-1] == ("cancel", False)
    assert [call[0] for call in side.kv.calls].count("cancel") == 1


def test_an_abort_before_anything_is_a_refusal(side: Side) -> None:
    sender = side.sender()
    sender.abort()
    assert sender.poll() == FAILED
    assert side.kv.calls == [("cancel", True)]


def test_what_fails_on_another_rank_is_not_sent_on_here(side: Side) -> None:
    """SGLang gives its pages to others next: nothing that is read from them may count any more."""
    sender = side.sending()
    assert sender.poll() == TRANSFERRING
    with pytest.raises(TransferCancelled) as caught:
        sender.failure_exception()
    assert vars(caught.value)["is_from_another_rank"]
    assert side.kv.calls[-1] == ("cancel", False)
    assert sender.poll() == FAILED


def test_a_prefix_that_is_no_whole_pages_here_fails(side: Side) -> None:
    sender = side.sender()
    side.kv.prefix = PAGE + 1
    sender.poll()
    sender.pop_decode_prefix_len()
    assert sender.poll() == FAILED
    assert "--page-size" in str(sender.error)


def test_a_prefix_that_is_longer_than_the_prompt_fails(side: Side) -> None:
    sender = side.sender()
    side.kv.prefix = 400
    sender.poll()
    sender.init(-98, 2)
    assert sender.poll() == FAILED


def test_a_room_is_one_requests_at_a_time(side: Side) -> None:
    first = side.sending()
    second = side.sender()
    assert second.poll() == BOOTSTRAPPING
    first.abort()
    assert second.poll() == BOOTSTRAPPING  # nothing else may have the name until the cancel is done
    side.kv.works["cancel"].end()
    assert second.poll() == WAITING
    third = side.sender()
    third.poll()
    calls = len(side.kv.calls)
    third.abort()  # which must not end the second
    assert third.poll() == FAILED
    assert len(side.kv.calls) == calls
    assert second.poll() == WAITING


# ---------------------------------------------------------------------- decode


def test_pages_are_granted_once_prefill_is_known(side: Side) -> None:
    receiver = side.receiver()
    assert receiver.poll() == BOOTSTRAPPING
    receiver.init(0)
    assert receiver.poll() == BOOTSTRAPPING
    side.finding.set_result("p")
    assert receiver.poll() == WAITING
    receiver.send_metadata(np.array([5, 2], dtype=np.int32), 3, [], 8)
    assert side.kv.calls == [("recv", [5, 2], "p", 8)]
    assert receiver.poll() == TRANSFERRING
    side.kv.works["recv"].aux = b"row"
    side.kv.works["recv"].end()
    assert [receiver.poll(), receiver.poll()] == [SUCCESS, SUCCESS]
    assert side.aux.rows == {3: b"row"}
    receiver.clear()
    assert side.requests.receivers == {}


def test_an_aborted_request_keeps_its_pages_until_they_are_safe(side: Side) -> None:
    receiver = side.granting()
    receiver.abort()
    assert side.kv.calls[-1] == ("cancel", False)
    assert receiver.poll() == FAILED, "the client need not wait"
    assert receiver.abort_notified, "SGLang then asks before it releases anything"
    assert not side.requests.is_released(ROOM)
    with pytest.raises(RuntimeError, match="may be written to"):
        receiver.clear()
    side.kv.works["recv"].end(TransferCancelled("cancelled"), safe=False)
    assert not side.requests.is_released(ROOM)
    assert not receiver.is_abort_release_safe()
    with pytest.raises(RuntimeError, match="may be written to"):
        receiver.clear()
    side.kv.works["recv"].safe = True
    assert side.requests.is_released(ROOM)
    receiver.clear()
    assert side.requests.is_released(ROOM)
    assert side.requests.receivers == {}


def test_a_lost_writers_pages_are_kept_too(side: Side) -> None:
    receiver = side.granting()
    side.kv.works["recv"].end(PeerLost("stopped"), safe=False)
    assert receiver.poll() == FAILED
    receiver.ensure_abort_notified(force_arm=True)
    assert receiver.abort_notified
    assert not side.requests.is_released(ROOM)
    side.kv.works["recv"].safe = True
    assert side.requests.is_released(ROOM)


def test_what_fails_on_another_rank_is_cancelled_here(side: Side) -> None:
    receiver = side.granting()
    with pytest.raises(TransferCancelled) as caught:
        receiver.failure_exception()
    assert vars(caught.value)["is_from_another_rank"]
    receiver.ensure_abort_notified(force_arm=True)
    assert side.kv.calls[-1] == ("cancel", False)
    assert [call[0] for call in side.kv.calls].count("cancel") == 1
    assert receiver.abort_notified
    assert not side.requests.is_released(ROOM)


def test_an_abort_after_a_success_fails_with_pages_that_are_safe(side: Side) -> None:
    """Its other ranks may have heard of the abort first."""
    receiver = side.granting()
    side.kv.works["recv"].end()
    assert receiver.poll() == SUCCESS
    receiver.abort()
    assert receiver.poll() == FAILED
    assert side.requests.is_released(ROOM)


@pytest.mark.parametrize("known", [True, False])
def test_what_is_aborted_before_it_grants_is_refused_once_prefill_is_known(side: Side, known: bool) -> None:
    receiver = side.receiver()
    receiver.init(0)
    if known:
        side.finding.set_result("p")
    receiver.abort()
    assert receiver.poll() == FAILED
    assert not receiver.abort_notified
    if not known:
        assert side.kv.calls == []
        side.finding.set_result("p")
    assert side.kv.calls == [("refuse", "p")]
    receiver.clear()


def test_a_prefill_engine_that_is_not_found_fails_the_request(side: Side) -> None:
    receiver = side.receiver()
    receiver.init(0)
    side.finding.set_exception(PeerLost("nobody"))
    assert receiver.poll() == FAILED
    with pytest.raises(PeerLost):
        receiver.failure_exception()
    assert side.kv.calls == []


def test_a_grant_that_is_refused_fails_with_nothing_to_keep(side: Side) -> None:
    side.kv.fails = PeerLost("gone")
    receiver = side.granting()
    assert receiver.poll() == FAILED
    receiver.ensure_abort_notified(force_arm=True)
    assert not receiver.abort_notified
    assert side.requests.is_released(ROOM)


def test_metadata_of_another_size_fails(side: Side) -> None:
    receiver = side.granting()
    side.kv.works["recv"].aux = b"bad"
    side.kv.works["recv"].end()
    assert receiver.poll() == FAILED
    assert isinstance(receiver.error, ProtocolError)


@pytest.mark.parametrize("room", [ROOM, None])
def test_the_room_of_another_request_is_refused_and_that_one_goes_on(side: Side, room: int | None) -> None:
    first = side.granting()
    second = side.receiver(room)
    assert second.poll() == FAILED
    second.init(0)
    second.abort()
    second.clear()
    assert [call[0] for call in side.kv.calls] == ["recv"]
    assert first.poll() == TRANSFERRING
    assert not side.requests.is_released(ROOM)


def test_another_data_parallel_rank_is_refused(side: Side) -> None:
    receiver = side.receiver()
    receiver.init(1)
    assert receiver.poll() == FAILED
