"""What happens when: the faults, their outcomes, and the tests that hold them. ``docs/guarantees.md`` shows this table.

``python -m tests.faults.outcomes`` writes it there; a test fails where the page is stale.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tests.helpers.simulation.campaigns import CAMPAIGNS

__all__ = ["OUTCOMES", "PAGE", "Outcome", "written"]

PAGE = Path(__file__).parents[2] / "docs" / "guarantees.md"
BEGINS, ENDS = "<!-- tests/faults/outcomes.py writes this -->", "<!-- until here -->"


class Outcome(NamedTuple):
    """A row of the table. tests: those that show it."""

    fault: str
    receive: str
    pages: str
    others: str
    tests: tuple[str, ...]


OUTCOMES = (
    Outcome(
        "the receiver cancels",
        "`TransferCancelled` at once",
        "free when all writers have drained",
        "go on",
        ("tests/faults/test_simulated_races.py::test_a_failed_request_leaves_the_group_usable",),
    ),
    Outcome(
        "a writer cancels",
        "`TransferCancelled`",
        "the same",
        "go on",
        ("tests/group/test_lives.py::test_tombstones_and_reuse_of_a_name",),
    ),
    Outcome(
        "either says no before it begins",
        "`TransferCancelled`, as soon as it is posted",
        "free at once",
        "go on",
        ("tests/faults/test_refusals.py::test_what_its_sender_will_never_begin_fails_at_the_receiver",),
    ),
    Outcome(
        "a writer is killed, same host",
        "`PeerLost` within a second",
        "free when the kernel has reported its end",
        "go on",
        (
            "tests/faults/test_kill.py::test_a_writer_is_killed",
            "tests/group/test_join.py::test_a_killed_writer_is_lost_within_a_second_and_forgotten",
            "tests/faults/test_failpoints.py::test_a_writer_is_killed_at",
            "tests/faults/test_staged_pause.py::test_pages_and_stage_of_a_killed_writer_whose_loop_stages",
        ),
    ),
    Outcome(
        "the receiver is killed",
        "the senders get `PeerLost`",
        "",
        "go on",
        (
            "tests/faults/test_kill.py::test_a_receiver_is_killed",
            "tests/faults/test_failpoints.py::test_a_reader_is_killed_at",
        ),
    ),
    Outcome(
        "a rank is killed while its job registers",
        "`register` raises `PeerLost` on the others",
        "",
        "",
        ("tests/faults/test_failpoints.py::test_a_rank_is_killed_while_it_registers",),
    ),
    Outcome(
        "an instance is killed while another joins it",
        "`connect` fails with `PeerLost` or `TransferTimeout`",
        "",
        "go on",
        ("tests/faults/test_failpoints.py::test_an_instance_is_killed_while_another_joins_it",),
    ),
    Outcome(
        "an instance is killed and comes again, 200 times",
        "`PeerLost` each time",
        "free when the kernel has reported its end",
        "go on",
        (
            "tests/faults/test_rejoin.py::test_nothing_is_left_of_many_lives",
            "tests/gpu/test_join_gpu.py::test_nothing_is_left_of_many_lives",
        ),
    ),
    Outcome(
        "a writer hangs (SIGSTOP)",
        "`PeerLost` after five heartbeats",
        "quarantined until it wakes up and answers; free at once if all of it was staged",
        "go on",
        (
            "tests/faults/test_pause.py::test_a_silent_peer_is_lost_and_found_again",
            "tests/faults/test_staged_pause.py::test_pages_of_a_stopped_staged_writer_are_free_at_once",
            "tests/faults/test_staged_pause.py::test_pages_of_a_stopped_writer_whose_loop_stages_are_free_at_once",
        ),
    ),
    Outcome(
        "a receiver hangs (SIGSTOP)",
        "its senders get `PeerLost` after five heartbeats, and keep 16,384 requests to it at most",
        "",
        "go on, at its senders too",
        (
            "tests/faults/test_slow_consumer.py"
            "::test_a_stopped_receiver_holds_up_nobody_and_fills_no_memory_of_its_sender",
        ),
    ),
    Outcome(
        "a receiver computes in Python, and never asks",
        "succeeds, and its senders are told so",
        "free at once",
        "go on",
        (
            "tests/faults/test_slow_consumer.py"
            "::test_a_receiver_whose_main_thread_computes_all_the_while_holds_up_nobody",
        ),
    ),
    Outcome(
        "a writer computes in Python, and holds the GIL",
        "nothing: it is alive",
        "",
        "go on",
        ("tests/faults/test_pause.py::test_a_busy_gil_is_not_taken_for_death",),
    ),
    Outcome(
        "a connection between two hosts breaks, and both live",
        "succeeds; but what was being put or staged just then is `PeerLost` at once",
        "free; where pages were being put, quarantined until the writer ends",
        "go on, over a new connection",
        (
            "tests/group/test_two_hosts.py::test_connections_that_break_fail_what_is_being_put_and_nothing_else",
            "tests/faults/test_loop_grants.py::"
            "test_what_a_writer_has_told_over_a_connection_that_then_broke_is_told_by_messages",
            "tests/faults/test_loop_grants.py::test_what_was_staged_is_not_told_again",
        ),
    ),
    Outcome(
        "the link between two hosts breaks for a moment",
        "nothing: it is later",
        "",
        "go on",
        ("tests/group/test_two_hosts.py::test_a_link_that_is_cut_for_a_moment_fails_nothing",),
    ),
    Outcome(
        "it stays broken, either way or both",
        "`PeerLost` after five heartbeats",
        "quarantined until it is healed",
        "go on",
        (
            "tests/group/test_two_hosts.py::test_a_link_that_stays_cut_fails_requests_and_frees_no_page_until_it_is_healed",
        ),
    ),
    Outcome(
        "another host vanishes for good",
        "`PeerLost`",
        "quarantined until this process ends: nobody can know what still travels",
        "go on",
        ("tests/group/test_two_hosts.py::test_a_peer_that_vanishes_without_a_word_leaves_its_pages_in_quarantine",),
    ),
    Outcome(
        "another host vanishes with nothing under way",
        "",
        "none were leased to it",
        "go on; it is forgotten after ten minutes, and told so if it comes back",
        (
            "tests/group/test_two_hosts.py::test_a_peer_that_vanishes_when_all_is_done_is_forgotten",
            "tests/faults/test_simulated_vanishing.py::"
            "test_one_that_comes_back_is_told_that_it_was_forgotten_and_must_join_again",
        ),
    ),
    Outcome(
        "a forked child of a dead rank lives on, same host",
        "`PeerLost`",
        "free when the kernel has reported the rank's end, and no connection holds bytes of it",
        "go on",
        ("tests/faults/test_kill.py::test_a_forked_child_of_the_dead_keeps_no_pages",),
    ),
    Outcome(
        "an instance leaves",
        "fails, unless it was complete",
        "free at once",
        "go on",
        (
            "tests/faults/test_simulated_joins.py::test_a_job_that_closes_is_forgotten_although_nobody_sees_its_processes_end",
        ),
    ),
    Outcome(
        "a group is destroyed",
        "fails",
        "quarantined by the process until its writers answer or end",
        "of other groups: go on",
        ("tests/group/test_lives.py::test_destroying_a_group_fails_what_waits_on_it",),
    ),
    Outcome(
        "the staging ring is full",
        "`send_pages` takes another path; `staged_put` fails with `RingExhausted`",
        "free when drained",
        "go on",
        ("tests/group/test_full_ring.py::test_send_pages_takes_another_path",),
    ),
    Outcome(
        "`/dev/shm` is full",
        "nothing: torchkv's memory is not there. `register` raises `TransportUnavailable` if UCX may use nothing else",
        "",
        "go on",
        (
            "tests/group/test_full_shm.py::test_requests_succeed",
            "tests/group/test_full_shm.py::test_a_transport_that_needs_it_says_so",
        ),
    ),
    Outcome(
        "the process forks",
        "the child's verbs raise `ProtocolError`, the parent's go on",
        "",
        "go on",
        ("tests/group/test_fork.py::test_a_forked_child_is_nobody",),
    ),
)


def table() -> list[str]:
    lines = ["| fault | the receive | its pages | other requests | tests |", "| --- | --- | --- | --- | --- |"]
    for outcome in OUTCOMES:
        names = ", ".join(f"`{path}::{name}`" for path, _, name in (test.partition("::") for test in outcome.tests))
        cells = (outcome.fault, outcome.receive, outcome.pages, outcome.others, names)
        lines.append("|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|")
    return lines


def campaigns() -> list[str]:
    lines = ["| campaign | what runs | schedules in every run of the tests |", "| --- | --- | --- |"]
    for campaign in CAMPAIGNS.values():
        lines.append(f"| `{campaign.name}` | {campaign.about} | {campaign.schedules:,} |")
    return lines


def written(page: str) -> str:
    """``page`` with the tables as they are to be."""
    before, _, rest = page.partition(BEGINS)
    _, _, after = rest.partition(ENDS)
    return "\n".join([before + BEGINS, "", *table(), "", *campaigns(), "", ENDS + after])


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
