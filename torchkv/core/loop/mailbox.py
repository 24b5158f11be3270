"""Mailboxes: how the loops of two ranks of one host exchange records, without system calls.

Each rank owns a segment of shared memory, which the kernel frees with its last user:

    bell | heads: one line per peer | mailbox of peer 0 | mailbox of peer 1 | ... | grants: a slot per receive

Which peer is the k-th the owner says: see `torchkv.core.peers.LoopPeers.reserve_slot`. The loops know peers by these
numbers.

A *mailbox* is a ring of `MAILBOX_RECORDS` records with one writer, the peer that it is kept for, and one reader, the
segment's owner. The writer copies a record and then stores its ``seq``, the count of records so far; the reader loads
``seq``, copies the record and checks its copy. The reader's *head* says how many it has read, so the writer knows how
much room there is. What finds no room stays due: a full mailbox delays, and loses nothing.

Behind the head on a peer's line lies a word that the peer sets once it reads what this rank writes to it. Before that
nothing is written, so that no record waits for a reader that could not map its mailbox. Behind that lies its count of
seals that are due here as soon as its kernels end: until they come, the owner's loop does not sleep for long.

The *bell* is `ASLEEP` while the owner's loop sleeps, and `NAPPING` while it soon wakes by itself. Who has stored
something for it fences, and looks at the bell; the owner stores to the bell, fences, and looks for work. So one of the
two sees the other. It is `ATTENDED` while a caller runs the loop, instead of its thread: then nobody has to be woken.

What a mailbox proves: its segment can be mapped by processes of this user that know its random name, as the pages can
that the records speak of. So records carry no MAC. The reader checks every field of each: bounds, that the flow is in
use under this generation, and that the mailbox's owner is one of its writers. What fails is left to Python.
"""

from __future__ import annotations

from torchkv.core.loop.codes import HEARD, OPEN, SEAL, SYSCALL
from torchkv.core.loop.limits import (
    DUE,
    GRANTED_IDS,
    LINE,
    MAILBOX_RECORDS,
    MAX_FLOWS,
    MAX_NAME,
    MAX_PEERS,
    RECORD_NBYTES,
)
from torchkv.core.loop.network import record_room, send
from torchkv.core.loop.state.peers import Peer, Record
from torchkv.core.loop.state.world import GRANT_NBYTES, World, word_at
from torchkv.host.atomics import exchange_if, fence, load, store
from torchkv.host.copy_loops import copy_bytes
from torchkv.host.futex import futex_wake
from torchkv.host.jit import compiled

__all__ = [
    "ASLEEP",
    "ATTENDED",
    "GRANTS_AT",
    "GRANT_SLOT",
    "MAILBOX_NBYTES",
    "NAPPING",
    "READS_AT",
    "SEALS_AT",
    "SEGMENT_NBYTES",
    "count_seals",
    "look",
    "mailbox_at",
    "mark_heard",
    "may_run",
    "owe",
    "ring",
    "room",
    "seal_if_done",
    "take",
    "tell",
    "tell_brief",
    "waiting",
    "write_brief",
]

ASLEEP, NAPPING, ATTENDED = 1, 2, 3  # of a bell; 0 while the loop's thread is awake
_HEAD, _SEQ = 0, 56  # offsets of a record's ``head`` and ``seq``
_RECORD = word_at("record")

READS_AT = 8  # offset of the word that says that a rank reads, from its head
SEALS_AT = 16  # and of the one that says how many of its seals are due soon
MAILBOX_NBYTES = MAILBOX_RECORDS * RECORD_NBYTES
GRANTS_AT = (1 + MAX_PEERS) * LINE + MAX_PEERS * MAILBOX_NBYTES
GRANT_SLOT = GRANT_NBYTES + 8 * GRANTED_IDS + MAX_NAME
SEGMENT_NBYTES = GRANTS_AT + MAX_FLOWS * GRANT_SLOT  # the kernel commits what is used


def mailbox_at(slot: int) -> tuple[int, int]:
    """Offsets of the head and of the mailbox of the writer that has this slot in a segment."""
    return (1 + slot) * LINE, (1 + MAX_PEERS) * LINE + slot * MAILBOX_NBYTES


@compiled
def may_run(world: World) -> bool:
    """Whether callers may run the loop: where cores are so few that it does not spin, and it enqueues no kernels.

    These take a CUDA context, which is its thread's. Where it spins it is quicker than any caller.
    """
    return bool(world["spin"] == 0 and world["word"] == 0)


@compiled
def ring(world: World, bell: int) -> None:
    """After a store that the bell's owner should see. A system call only if its loop sleeps."""
    if bell == 0:  # of a peer that is reached through the network
        return
    fence()
    state = load(bell)
    if state != 0 and state != ATTENDED and exchange_if(bell, state, 0) == state:
        futex_wake(world["functions"][SYSCALL], world["futex"], bell)


@compiled
def count_seals(world: World, peer: Peer, more: int) -> None:
    """So many more seals, or less, are due to the peer soon. Wakes its loop for the first one."""
    peer["seals"] += more
    if peer["outbox_head"] != 0:
        store(peer["outbox_head"] + SEALS_AT, peer["seals"])
        if more == peer["seals"]:
            ring(world, peer["bell"])


@compiled
def room(world: World, peer: Peer) -> int:
    """Records that fit into the peer's mailbox, or its share of the network, now."""
    if peer["outbox"] == 0:
        return record_room(world, peer)
    free: int = world["window"] - (peer["written"] - load(peer["outbox_head"]))
    return free


@compiled
def tell(world: World, peer: Peer) -> None:
    """Puts ``world["record"]`` into the peer's mailbox, in which there must be room. Ring its bell afterwards."""
    if peer["outbox"] == 0:
        send(world, peer, 0, 0)
        return
    to = peer["outbox"] + (peer["written"] & (MAILBOX_RECORDS - 1)) * RECORD_NBYTES
    copy_bytes(to, world["address"] + _RECORD, _SEQ)
    peer["written"] += 1
    store(to + _SEQ, peer["written"])


@compiled
def write_brief(world: World, kind: int, flow: int, generation: int) -> None:
    """Makes ``world["record"]`` one that says no more than this."""
    record: Record = world["record"]
    record["head"], record["flows"], record["generation"] = kind, flow, generation
    record["lo"] = record["hi"] = record["nbytes"] = record["spare"] = 0


@compiled
def tell_brief(world: World, rank: int, kind: int, flow: int, generation: int) -> bool:
    """Sends such a record to another rank; False where its mailbox is full."""
    peer = world["peers"][rank]
    if room(world, peer) < 1:
        return False
    write_brief(world, kind, flow, generation)
    tell(world, peer)
    ring(world, peer["bell"])
    return True


@compiled
def owe(world: World, kind: int, rank: int, flow: int, generation: int) -> None:
    """Notes that a message is due. What takes in records never sends, so that a full mailbox never stops an inbox."""
    due = world["due"][world["due_tail"] & (DUE - 1)]
    due[0], due[1], due[2] = kind | rank << 8, flow, generation
    world["due_tail"] += 1


@compiled
def seal_if_done(world: World, flow: int) -> None:
    """Once the caller has finished and every op has ended, the seal is due."""
    send = world["sends"][flow]
    if send["state"] == OPEN and send["num_pages"] >= 0 and send["running"] == 0 and send["due"] == 0:
        send["due"] = 1
        owe(world, SEAL, 0, flow, send["generation"])


@compiled
def _inbox_at(peer: Peer, number: int) -> int:
    """Address of a record in the peer's mailbox here."""
    at: int = peer["inbox"] + (number & (MAILBOX_RECORDS - 1)) * RECORD_NBYTES
    return at


@compiled
def waiting(peer: Peer, number: int) -> bool:
    """Whether there is a record in the peer's mailbox here behind ``number`` others."""
    return bool(load(_inbox_at(peer, number) + _SEQ) == number + 1)


@compiled
def take(world: World, peer: Peer) -> bool:
    """Takes the next record of the peer's mailbox into ``world["record"]``; False if there is none."""
    if not waiting(peer, peer["read"]):
        return False
    look(world, peer, peer["read"])
    peer["read"] += 1
    return True


@compiled
def look(world: World, peer: Peer, number: int) -> int:
    """Copies a record that is `waiting` into ``world["record"]``. Its kind."""
    copy_bytes(world["address"] + _RECORD, _inbox_at(peer, number), _SEQ)
    kind: int = world["record"]["head"] & 0xFF
    return kind


@compiled
def mark_heard(peer: Peer, number: int) -> None:
    """A record that is `waiting` says nothing when its turn comes."""
    store(_inbox_at(peer, number) + _HEAD, HEARD)
