"""Requests that an adapter sends and receives, given what torchkv says."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from torchkv.errors import LayoutMismatch, PeerLost, ProtocolError, TransferCancelled
from torchkv.integrations.arrivals import Arrival
from torchkv.integrations.departures import Departure, Departures


class Work:
    """A work that the test completes."""

    def __init__(self) -> None:
        self.done, self.error, self.waited = False, None, False

    def end(self, error: Any = None, *, safe: bool = True) -> None:
        self.done, self.error = True, error
        if error is not None:
            error._pages_safe = lambda: safe

    def is_completed(self) -> bool:
        return self.done

    def exception(self) -> Any:
        return self.error if self.done else None

    def wait(self) -> None:
        self.waited = True
        if self.error is not None:
            raise self.error


class KV:
    """A member that notes its calls. fails: raised by the verbs of that name."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.works: dict[str, Work] = {}
        self.fails: dict[str, Exception] = {}
        self.connecting: Future[str] = Future()

    def __getattr__(self, verb: str) -> Any:
        def call(name: str, *args: Any, **kwargs: Any) -> Any:
            self.calls.append((verb, name))
            if verb in self.fails:
                raise self.fails[verb]
            if verb == "cancel":
                self.calls[-1] += (f"decline={kwargs['decline']}",) if "decline" in kwargs else ()
            if verb in ("granted", "connect"):
                return {"granted": 0, "connect": self.connecting}[verb]
            self.works[verb] = Work()
            return self.works[verb]

        return call


@pytest.fixture
def kv() -> KV:
    return KV()


def sent(all_of_them: Departures, name: str = "x") -> Departure:
    departure = Departure(all_of_them, name)
    assert departure.has_name()
    departure.send([1, 2])
    departure.finish()
    return departure


def test_a_second_one_of_a_name_waits_until_nothing_reads_for_the_first(kv: KV) -> None:
    departures = Departures(kv)
    first, second = sent(departures), Departure(departures, "x")
    assert second.granted() is None
    assert kv.calls == [("send_pages", "x"), ("finish", "x")]
    kv.works["finish"].end(PeerLost("gone"))
    assert not first.advance(), "its pages may be read until the cancel is done"
    assert second.granted() is None
    assert len(departures) == 2
    kv.works["cancel"].end()
    assert second.granted() == 0
    assert (first.is_over, len(departures)) == (True, 1)


def test_one_that_waits_for_its_name_fails_without_a_word(kv: KV) -> None:
    departures = Departures(kv)
    first, second = sent(departures), Departure(departures, "x")
    second.fail(TransferCancelled("aborted"))
    assert (second.is_over, first.is_over) == (True, False)
    assert ("cancel", "x") not in [call[:2] for call in kv.calls]
    kv.works["finish"].end()
    assert first.advance()
    assert len(departures) == 0


@pytest.mark.parametrize("begun", [True, False])
def test_a_failure_is_told_once_and_a_request_of_which_nothing_was_said_is_declined(kv: KV, begun: bool) -> None:
    departure = Departure(Departures(kv), "x")
    if begun:
        assert departure.granted() == 0
    departure.fail(TransferCancelled("aborted"))
    departure.fail(TransferCancelled("again"))
    departure.send([1])
    departure.finish()
    assert kv.calls[-1] == ("cancel", "x", f"decline={not begun}")
    assert len(kv.calls) == 1 + begun
    assert str(departure.error) == "aborted"


@pytest.mark.parametrize("verb", ["granted", "send_pages", "finish"])
def test_an_error_of_a_verb_ends_it(kv: KV, verb: str) -> None:
    departure = Departure(Departures(kv), "x")
    kv.fails[verb] = PeerLost("gone")
    departure.granted()
    departure.send([1])
    departure.finish()
    assert isinstance(departure.error, PeerLost)
    assert kv.calls[-2:] == [(verb, "x"), ("cancel", "x", "decline=False")]


def test_a_rank_that_holds_nothing_for_the_receiver_may_send(kv: KV) -> None:
    kv.fails["granted"] = LayoutMismatch("nothing")
    departure = Departure(Departures(kv), "x")
    assert (departure.granted(), departure.error) == (0, None)


def test_nobody_is_declined_whose_name_another_request_has(kv: KV) -> None:
    departures = Departures(kv)
    sent(departures)
    departures.decline("x")
    departures.decline("y")
    assert kv.calls[2:] == [("cancel", "y", "decline=True")]


def test_pages_are_withdrawn_unless_all_of_it_was_sent(kv: KV) -> None:
    departures = Departures(kv)
    fresh, begun = Departure(departures, "f"), Departure(departures, "b")
    fresh.withdraw()
    assert kv.calls == []
    begun.send([1])
    begun.withdraw()
    assert kv.works["withdraw"].waited
    assert begun.error is None
    done = sent(departures)
    done.withdraw()
    assert "taken away" in str(done.error)
    assert kv.calls[-1] == ("cancel", "x", "decline=False")


def test_an_arrival_is_granted_once_its_sender_is_known(kv: KV) -> None:
    arrival = Arrival.at(kv, "x", "tcp://10.0.0.1:1", instance="p")
    assert (arrival.is_connected(), arrival.is_over, arrival.pages_safe) == (False, False, True)
    kv.connecting.set_result("p")
    assert arrival.is_connected()
    arrival.grant([1, 2])
    assert (arrival.is_connected(), arrival.is_over, arrival.pages_safe) == (False, False, False)
    kv.works["recv_pages"].end()
    assert (arrival.is_over, arrival.error) == (True, None)


@pytest.mark.parametrize("safe", [True, False])
def test_an_arrival_that_failed_is_over_when_its_pages_are_safe(kv: KV, safe: bool) -> None:
    kv.connecting.set_result("p")
    arrival = Arrival.at(kv, "x", "tcp://10.0.0.1:1")
    assert arrival.is_connected()
    arrival.grant([1, 2])
    arrival.cancel()
    assert kv.calls[-1] == ("cancel", "x")
    kv.works["recv_pages"].end(TransferCancelled("cancelled"), safe=safe)
    assert (arrival.is_over, arrival.pages_safe) == (safe, safe)
    assert isinstance(arrival.error, TransferCancelled)


@pytest.mark.parametrize("known", [True, False])
def test_an_arrival_that_is_cancelled_before_it_is_granted_is_refused(kv: KV, known: bool) -> None:
    arrival = Arrival.at(kv, "x", "tcp://10.0.0.1:1")
    if known:
        kv.connecting.set_result("p")
    arrival.cancel()
    assert arrival.is_over
    if not known:
        assert kv.calls == [("connect", "tcp://10.0.0.1:1")]
        kv.connecting.set_result("p")
    assert kv.calls[1:] == [("refuse", "x")]


@pytest.mark.parametrize("when", ["at once", "later", "at the grant"])
def test_an_arrival_that_cannot_be_had_is_over_with_the_reason(kv: KV, when: str) -> None:
    if when == "at once":
        kv.fails["connect"] = ProtocolError("closed")
    if when == "at the grant":
        kv.fails["recv_pages"] = ProtocolError("leased")
        kv.connecting.set_result("p")
    arrival = Arrival.at(kv, "x", "tcp://10.0.0.1:1")
    if when == "later":
        kv.connecting.set_exception(ProtocolError("another instance"))
    if when == "at the grant":
        assert arrival.is_connected()
        arrival.grant([1])
    assert not arrival.is_connected()
    assert arrival.is_over
    assert isinstance(arrival.error, ProtocolError)
    arrival.cancel()
    assert "refuse" not in [call[0] for call in kv.calls], "nobody is to be told"
