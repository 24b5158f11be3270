"""Requests on the resident loop, at either side, and their rounds.

All fields are int64, unless they are arrays: see `world`.
"""

from __future__ import annotations

from typing import TypedDict

from torchkv.arrays import Int64Array
from torchkv.core.loop.state.peers import Record

__all__ = ["Op", "Receive", "Repeat", "Round", "Send", "Unpacking", "Way", "Writer"]


class Way(TypedDict):
    """What sends of one plan to one peer have in common: fields of `Send`. Python's, in memory of its own."""

    peer: int
    max_page: int
    max_slot: int
    geometry: int
    kernels: int
    state_kernels: int
    packs: int
    src_page: int
    dst_page: int
    staged: int


class Repeat(TypedDict):
    """What an op has in common with one that differs in its layers and its gate alone: fields of `Op`. Python's.

    checked, given: address and number of the page ids that its caller gave, of which ``ids`` are those to be copied.
    """

    flow: int
    checked: int
    given: int
    ids: int
    count: int
    start: int
    verb: int
    staged: int


class Send(TypedDict):
    """A sender request that waits for its grant, or is bound to it. ``peer`` is the receiver, ``peer_flow`` its flow.

    geometry, ids: addresses of the plan's segments and of the granted page ids, behind which lies the receiver's state
    slot if it is owed any state. granted: tokens. prefix: tokens before them that the receiver holds. src_page,
    dst_page: page sizes in tokens. running: ops that have not ended. finish: pages that the caller's ``finish`` says,
    and num_pages: the same once the loop knows; -1 before. aux, aux_nbytes: address and length of its bytes. due: 1
    once the seal is. started: 1 after its first op. moved: bytes so far.

    Of one that waits: hash0, hash1, writers: as the grant must have them. max_page: the receiver's pages are below
    this, and its state slots below max_slot, which is 0 if it is owed no state. next: flow + 1 of the next send of its
    bucket. first, last: its ops, -1 if there is none. reach: the highest page of them, or -1.

    network: 1 if the pages are put through the network, 2 if that needs no driving. staged: 1 if they are packed into a
    standing stage there, unless an op says otherwise. promise: 1 once the receiver is to be promised that nothing is
    written but to the stage, 2 once it was.

    For the `journal`: serial: names the request to Python, or 0. verb: FINISH if ``finish`` is to be recorded, and
    operation: its number. begun, finished: when the first verb was called and ``finish`` was taken, in nanoseconds.

    On a GPU: kernels, state_kernels: addresses of the plan's launch tables, if kernels copy the pages and the state,
    and packs: of its pack table, if they pack the pages; else 0. gated: grows with each look at a shut gate. flying:
    ops whose kernels are enqueued. hinted: 1 while its receiver is told that the seal comes soon. Of the send's part of
    the `World`'s ``ids``: ids_used: words that are taken, 0 before the first launch. src_at, src_count: where the page
    ids of the latest op lie in it. ids_posted: what the completion word will be once nobody reads this part any more;
    it outlives the send.
    """

    state: int
    peer: int
    peer_flow: int
    generation: int
    geometry: int
    ids: int
    granted: int
    prefix: int
    src_page: int
    dst_page: int
    running: int
    finish: int
    num_pages: int
    aux: int
    aux_nbytes: int
    due: int
    started: int
    moved: int
    hash0: int
    hash1: int
    writers: int
    max_page: int
    max_slot: int
    next: int
    first: int
    last: int
    reach: int
    network: int
    staged: int
    promise: int
    kernels: int
    state_kernels: int
    packs: int
    gated: int
    flying: int
    hinted: int
    ids_used: int
    src_at: int
    src_count: int
    ids_posted: int
    serial: int
    verb: int
    operation: int
    begun: int
    finished: int


class Op(TypedDict):
    """A verb towards one receiver: pages [start, start + count) with the ids at the address ``ids``.

    of_state: 1 if it is of layers' states: then ``ids`` has the slot, which is treated as a page of one token.

    positions: address of the verb's layers, as positions among the plan's, ascending; how many of them. at, segment,
    ordinal: what is copied next. arrived: positions whose bytes are in the receiver's pages. told: those that it knows
    of. group: bytes since then. next: the op after it, while they wait for the grant, or -1. verb: which it is, if it
    is to be recorded in the `journal`, and operation: its number there; else 0.

    Through the network: posted: the number of its last put, or 0. Once puts up to the number ``mark`` have arrived, the
    positions before ``until`` have; 0 if none are awaited.

    staged: 1 if the pages are packed into a standing stage. Then ordinal: pages of the layer at ``at`` that are packed
    already. pieces: that are packed, and not told. piece: bytes of one, about, once that is known. spared: bytes that
    did not cross, because the stage holds a narrower dtype than the receiver's pages.

    On a GPU: gate: a CUevent that must have happened before the pages are read, or 0; gate_stream: the stream that it
    was recorded on, or -1 if that is not known; gate_number: grows with the events of a stream. posted: what the
    completion word will be once the layers before ``until`` have arrived; 0 if nothing is enqueued.
    """

    flow: int
    of_state: int
    positions: int
    num_positions: int
    ids: int
    count: int
    start: int
    at: int
    segment: int
    ordinal: int
    arrived: int
    told: int
    group: int
    nbytes: int
    runs: int
    next: int
    gate: int
    gate_stream: int
    gate_number: int
    posted: int
    until: int
    mark: int
    verb: int
    operation: int
    staged: int
    pieces: int
    piece: int
    spared: int


class Writer(TypedDict):
    """A writer of a receive. layers: that it owes; their positions come first. states: layers whose state it owes;
    theirs come behind. page_size: its own. sealed: pages of its seal, or -1.

    flow: its own, which the seal tells. aux_nbytes: that have come. told: 1 once its grant has gone into the network.
    geometry: address of the plan's segments, if its pieces may be unpacked here, else 0. kernels: of the pack table, if
    kernels do that. sealing: 1 once its seal waits behind pieces. ring_only: 1 once it has promised to write to the
    stage only.
    """

    rank: int
    layers: int
    states: int
    page_size: int
    sealed: int
    flow: int
    aux_nbytes: int
    told: int
    geometry: int
    kernels: int
    sealing: int
    ring_only: int


class Receive(TypedDict):
    """A receive. cover: address of int64 ``[writers, positions, 1 + 2 * MAX_INTERVALS]``: a count, then the intervals.

    leader: of the instance, `ALONE` or `NOBODY`. told: messages that Python had sent to the leader before this request
    was posted. page_size: of this rank. nbytes: that have arrived. ids: address of its page ids. unpacks: whether
    pieces of its writers are unpacked. That outlives ``state``: Python may serve the request, until it has failed.
    pieces: that were unpacked. unpacking: of the queue of `unpacking`, entries of this receive. stopped: 1 while Python
    waits for the last of them.

    For the `journal`: serial: names the request to Python, or 0. operation: its number. begun: when its grant was
    taken, in nanoseconds.
    """

    state: int
    generation: int
    num_tokens: int
    page_size: int
    leader: int
    told: int
    positions: int
    cover: int
    num_writers: int
    nbytes: int
    serial: int
    operation: int
    begun: int
    ids: int
    unpacks: int
    pieces: int
    unpacking: int
    stopped: int
    writers: list[Writer]
    aux: Int64Array


class Unpacking(TypedDict):
    """A piece that kernels unpack, or a record of its receive that has come behind it.

    source: the writer, or -1 once it has ended. flow: of the receive, or -1: the piece holds nothing. launched: what
    the completion word will be once it is unpacked; 0: it is. behind: the position behind it in its stage; -1 for a
    record. ids: how far the page ids in ``unpack_ids`` are free again then.
    """

    source: int
    flow: int
    launched: int
    behind: int
    ids: int
    record: Record


class Round(TypedDict):
    """A request of which all ranks of this instance have posted their parts; this rank leads it.

    members: address of int64 ``[num_members, 4]``: rank, flow, generation, and whether Python knows it is complete.
    missing: members that are not complete. next: the first that has not been told of the success.
    """

    state: int
    members: int
    num_members: int
    missing: int
    next: int
