"""What the resident loop knows of a peer, and what goes between them.

All fields are int64, unless they are arrays: see `world`.
"""

from __future__ import annotations

from typing import TypedDict

__all__ = ["Grant", "Peer", "Record"]


class Record(TypedDict):
    """A message to a peer, 64 bytes. ``seq`` is written last, and says that the rest is there.

    head: kind | first << 8 | last << 32, where [first, last) are positions among the plan's layers. flows: the
    addressee's flow | the sender's own flow << 32. WRITTEN: tokens [lo, hi) and their bytes. AUX: ``first`` bytes of
    aux, in the three words from ``lo`` on and ``spare``. SEAL: ``lo`` pages, and ``hi`` bytes of aux in all. GRANT: of
    the sender's own flow; the rest is its `Grant`, of which through the network bytes from ``lo`` on, of ``hi``, follow
    the record. POSTED: of the sender's own flow, too; its name's hashes, ``nbytes`` tokens of prefix, ``spare`` pages,
    and in the head, from bit 8 on, the `Receive`'s ``told``. DONE: of the sender's own flow. DECIDED: of the
    addressee's. HELLO: ``lo``: whether the sender wants to know that the addressee hears it, ``hi``: whether it has
    heard the addressee; -1: it has missed a message. STAGED: as WRITTEN, but the bytes lie in the standing stage, from
    the position ``spare`` on. CREDIT: the addressee's pieces up to the position ``lo`` have been unpacked. PROMISE: the
    sender writes to its standing stage only, and to no pages of this request.
    """

    head: int
    flows: int
    generation: int
    lo: int
    hi: int
    nbytes: int
    spare: int
    seq: int


class Grant(TypedDict):
    """The body of a grant, in its receiver's segment. Behind it lie the name and the ids: `grants`.

    hash0, hash1: of the name. writers: a bit for each. prefix: tokens. name_nbytes: of the name in UTF-8. num_slots: 1
    if a state slot is granted, too, else 0.
    """

    generation: int
    hash0: int
    hash1: int
    writers: int
    prefix: int
    num_pages: int
    name_nbytes: int
    num_slots: int


class Peer(TypedDict):
    """A peer. inbox: address of the mailbox that it writes to, here; outbox, bell: of those that this rank writes to,
    there; 0 if there is none. inbox_head, outbox_head: of the words that say how far they were read. read, written:
    records so far. grants: address of its grants. seals: that are due to it soon, see `mailbox.count_seals`.

    Of a peer that is reached through the network (see `network`) the first five are 0. endpoint: 0 for others, and once
    it is cut. functions: address of the table of `torchkv.transport.NativeChannel`. tag_in, tag_out: of the records
    that it sends, and that it takes. memory: address of `NETWORK_NBYTES`. returned: records whose memory is free again.
    head, requests, pending: puts that have not ended: the first in their ring, how many, and bytes. puts: the number of
    the last one; those up to the number ``flushed`` have arrived; of those up to ``flushing`` the request ``flush``
    will tell; and those up to ``wanted`` somebody waits for. failed: the status of the first failure; reported: 1 once
    Python knows of it.

    See `grants`: hears: 1 once it is known to take messages of `MESSAGE_NBYTES` from here, 2 when it has missed one;
    heard: 1 once such a one has come from it; missed: 1 if one was missed, of which it is not told yet; greeting: 1
    while a HELLO is due. arrivals: address of what has come of its grants, or 0. part_flow, part_generation, part_at:
    of the grant of which ``part_at`` bytes have come; -1 if none goes on.

    See `staging`: stage, stage_nbytes: address and length of this rank's half of the standing stage that the peer has
    granted, or of the stage itself if that is mapped; stage_key, there, there_key: its key, and address and key of the
    stage, or 0. packed: positions that are taken;
    freed: those that the peer has given back. pieces: address of `PIECES_NBYTES`; those from ``piece_head`` to
    ``piece_tail`` are packed and not told, and from ``piece_put`` on not put. See `unpacking`: ring, ring_nbytes: of
    the standing stage that this rank has granted. reached: positions of which records have come. taken: those that were
    unpacked. crediting: 1 while a CREDIT is due.
    """

    inbox: int
    inbox_head: int
    outbox: int
    outbox_head: int
    bell: int
    read: int
    written: int
    grants: int
    seals: int
    endpoint: int
    functions: int
    tag_in: int
    tag_out: int
    memory: int
    returned: int
    head: int
    requests: int
    pending: int
    puts: int
    flushed: int
    flushing: int
    flush: int
    wanted: int
    failed: int
    reported: int
    hears: int
    heard: int
    missed: int
    greeting: int
    arrivals: int
    part_flow: int
    part_generation: int
    part_at: int
    stage: int
    stage_nbytes: int
    stage_key: int
    there: int
    there_key: int
    packed: int
    freed: int
    pieces: int
    piece_head: int
    piece_put: int
    piece_tail: int
    ring: int
    ring_nbytes: int
    reached: int
    taken: int
    crediting: int
