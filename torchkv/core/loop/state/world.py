"""The state of the resident loop: structured arrays that compiled code and plain Python read alike.

All state of one loop is a single record, `World`, so that a compiled function takes one pointer. The classes give the
fields to mypy; the dtypes below them are made of the same classes. All fields are int64, unless they are arrays.

Who writes what. Callers (under the GIL and the engine's lock, so one at a time) write commands, new flows, new ops and
``event_head``. The loop writes everything else; while a caller holds ``lock``, the loop writes nothing. Peers write
their own mailbox and the bell, which lie in shared memory (see `mailbox`).

A flow or an op is the loop's from the moment at which a caller opens it until the event that ends it, and not longer:
after that event a caller may use its slot for another one.
"""

from __future__ import annotations

from typing import TypedDict

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.core.loop.codes import PHASES
from torchkv.core.loop.limits import (
    BUCKETS,
    COMMANDS,
    DUE,
    GATES,
    MAX_AUX,
    MAX_EVENTS,
    MAX_FLOWS,
    MAX_OPS,
    MAX_PEERS,
    MAX_ROUNDS,
    MAX_WRITERS,
    MESSAGE_NBYTES,
    PARAM_WORDS,
    RECORD_NBYTES,
    SCRATCH,
)
from torchkv.observe.histogram import BOUNDS

__all__ = [
    "AUX_AT",
    "EVENT",
    "GRANT_NBYTES",
    "RECORD",
    "WORLD",
    "Event",
    "Grant",
    "Op",
    "Peer",
    "Receive",
    "Record",
    "Round",
    "Send",
    "World",
    "Writer",
    "grant_word_at",
    "receive_word_at",
    "word_at",
]


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
    the position ``spare`` on. CREDIT: the addressee's pieces up to the position ``lo`` have been unpacked.
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
    """The body of a grant, in its receiver's segment. Behind it lie the name and the page ids: `grants`.

    hash0, hash1: of the name. writers: a bit for each. prefix: tokens. name_nbytes: of the name in UTF-8.
    """

    generation: int
    hash0: int
    hash1: int
    writers: int
    prefix: int
    num_pages: int
    name_nbytes: int
    spare: int


class Send(TypedDict):
    """A sender request that waits for its grant, or is bound to it. ``peer`` is the receiver, ``peer_flow`` its flow.

    geometry, ids: addresses of the plan's segments and of the granted page ids. granted: tokens. src_page, dst_page:
    page sizes in tokens. running: ops that have not ended. finish: pages that the caller's ``finish`` says, and
    num_pages: the same once the loop knows; -1 before. aux, aux_nbytes: address and length of its bytes. due: 1 once
    the seal is. started: 1 after its first op. moved: bytes so far.

    Of one that waits: hash0, hash1, writers: as the grant must have them. max_page: the receiver's pages are below
    this. next: flow + 1 of the next send of its bucket. first, last: its ops, -1 if there is none. reach: the highest
    page of them, or -1.

    network: 1 if the pages are put through the network. staged: 1 if they are through a standing stage there.

    For the `journal`: serial: names the request to Python, or 0. verb: FINISH if ``finish`` is to be recorded, and
    operation: its number. begun, finished: when the first verb was called and ``finish`` was taken, in nanoseconds.

    On a GPU: kernels: address of the plan's launch table, else 0. gated: grows with each look at a shut gate. Of the
    send's part of the `World`'s ``ids``: ids_used: words that are taken, 0 before the first launch. src_at, src_count:
    where the page ids of the latest op lie in it. ids_posted: what the completion word will be once nobody reads this
    part any more; it outlives the send.
    """

    state: int
    peer: int
    peer_flow: int
    generation: int
    geometry: int
    ids: int
    granted: int
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
    next: int
    first: int
    last: int
    reach: int
    network: int
    staged: int
    kernels: int
    gated: int
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

    positions: address of the verb's layers, as positions among the plan's, ascending; how many of them. at, segment,
    ordinal: what is copied next. arrived: positions whose bytes are in the receiver's pages. told: those that it knows
    of. group: bytes since then. next: the op after it, while they wait for the grant, or -1. verb: which it is, if it
    is to be recorded in the `journal`, and operation: its number there; else 0.

    Through the network: posted: the number of its last put, or 0. Once puts up to the number ``mark`` have arrived, the
    positions before ``until`` have; 0 if none are awaited.

    Staged: ordinal: pages of the layer at ``at`` that are packed already. pieces: that are packed, and not told.

    On a GPU: gate: a CUevent that must have happened before the pages are read, or 0; gate_stream: the stream that it
    was recorded on, or -1 if that is not known; gate_number: grows with the events of a stream. posted: what the
    completion word will be once the layers before ``until`` have arrived; 0 if nothing is enqueued.
    """

    flow: int
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
    pieces: int


class Writer(TypedDict):
    """A writer of a receive. layers: that it owes. page_size: its own. sealed: pages of its seal, or -1.

    flow: its own, which the seal tells. aux_nbytes: that have come. told: 1 once its grant has gone into the network.
    geometry: address of the plan's segments, if its pieces may be unpacked here, else 0.
    """

    rank: int
    layers: int
    page_size: int
    sealed: int
    flow: int
    aux_nbytes: int
    told: int
    geometry: int


class Receive(TypedDict):
    """A receive. cover: address of int64 ``[writers, layers, 1 + 2 * MAX_INTERVALS]``: a count, then the intervals.

    leader: of the instance, `ALONE` or `NOBODY`. told: messages that Python had sent to the leader before this request
    was posted. page_size: of this rank. nbytes: that have arrived. ids: address of its page ids. unpacks: whether
    pieces of its writers are unpacked. That outlives ``state``: Python may serve the request, until it has failed.
    pieces: that were unpacked.

    For the `journal`: serial: names the request to Python, or 0. operation: its number. begun: when its grant was
    taken, in nanoseconds.
    """

    state: int
    generation: int
    num_tokens: int
    page_size: int
    leader: int
    told: int
    layers: int
    cover: int
    num_writers: int
    nbytes: int
    serial: int
    operation: int
    begun: int
    ids: int
    unpacks: int
    pieces: int
    writers: list[Writer]
    aux: Int64Array


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


class Peer(TypedDict):
    """A peer. inbox: address of the mailbox that it writes to, here; outbox, bell: of those that this rank writes to,
    there; 0 if there is none. inbox_head, outbox_head: of the words that say how far they were read. read, written:
    records so far. grants: address of its grants.

    Of a peer that is reached through the network (see `network`) the first five are 0. endpoint: 0 for
    others, and once it is cut. tag_in, tag_out: of the records that it sends, and that it takes. memory: address of
    `NETWORK_NBYTES`. returned: records whose memory is free again. head, requests, pending: puts that have not ended:
    the first in their ring, how many, and bytes. puts: the number of the last one; those up to the number ``flushed``
    have arrived; of those up to ``flushing`` the request ``flush`` will tell; and those up to ``wanted`` somebody waits
    for. failed: the status of the first failure; reported: 1 once Python knows of it.

    See `grants`: hears: 1 once it is known to take messages of `MESSAGE_NBYTES` from here, 2 when it has missed one;
    heard: 1 once such a one has come from it; missed: 1 if one was missed, of which it is not told yet; greeting: 1
    while a HELLO is due. arrivals: address of what has come of its grants, or 0. part_flow, part_generation, part_at:
    of the grant of which ``part_at`` bytes have come; -1 if none goes on.

    See `staging`: stage, stage_nbytes: address and length of this rank's half of the standing stage that the peer has
    granted; stage_key, there, there_key: its key, and address and key of the stage. packed: positions that are taken;
    freed: those that the peer has given back. pieces: address of `PIECES_NBYTES`; those from ``piece_head`` to
    ``piece_tail`` are packed and not told. See `unpacking`: ring, ring_nbytes: of the standing stage that this rank has
    granted. taken: positions that were unpacked. crediting: 1 while a CREDIT is due.
    """

    inbox: int
    inbox_head: int
    outbox: int
    outbox_head: int
    bell: int
    read: int
    written: int
    grants: int
    endpoint: int
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
    piece_tail: int
    ring: int
    ring_nbytes: int
    taken: int
    crediting: int


class Event(TypedDict):
    """What Python should know. index: of an op or a flow; source: the rank that a STRAY record came from."""

    kind: int
    index: int
    source: int
    record: Record


class World(TypedDict):
    """Everything. address: its own. rank: of this loop. bell: address of this rank's, which the loop sleeps on.

    driver_fd, driver_word: wake Python's thread, while it sleeps or rests. eager: whether it is woken for every event,
    because somebody waits for more than the end of a request. news: changes with each event, and with each call that
    Python completes; sleepers: callers that sleep until then. lock, wanted: a caller that wants the loop to stand still
    sets ``wanted`` and takes ``lock``. heed: whether Python's thread is woken for grants that are not bound here.
    granted: ``event_tail`` after the last of them. granted_ids: address of int64 ``[MAX_FLOWS, MAX_GRANTED]``, the page
    ids of sends that were bound here. buckets: flow + 1 of the first waiting send of each, by hash. due: messages that
    wait for room: (kind | rank << 8, flow, generation). queue: ops that copy. unfinished: sends of which more ops are
    expected. turn: bytes that one step copies: how long a message may wait. window: records that may wait in a mailbox.
    one: the word 1. record, src, dst, length: scratch. Of the instance that this rank leads, by peer and flow:
    votes: generation of the latest complete part; awaited, rounds_of: the generation that a round waits for, and the
    round + 1, or 0.

    Of the `journal`: operations: address of its ring of ``recorded``, which may be 0; operation: number of the last
    one. phases: for each of `PHASES` how many durations lie in each bucket of a histogram, and their sum in
    nanoseconds. clock: scratch.

    Of a rank whose pages lie on a GPU (see `launching`): stream: on which everything is enqueued. word,
    word_device: addresses of the completion word, here and there; posted: the last value that the stream was told to
    write to it. ids, ids_device: addresses of int64 ``[MAX_GPU_SENDS, IDS]``. flying: ops whose kernels are enqueued.
    broken: the driver's error code, negative until Python is told of it; or 0. steps: so far; gate_streams,
    gate_numbers, gate_steps: in which step an event of a stream had not happened.

    Of a rank that reaches peers through the network: native, worker, put_params, params: see
    `torchkv.transport.NativeChannel`; key_at: address of the word in ``put_params``. lanes: such peers. network: flows
    with them. under_way: peers to which puts are, or of which a flush is awaited. driving: whether the loop alone
    drives the transport; else Python's thread does, too, and wakes the loop if something has come. message, inbox: of
    the message that has come; a longer one than a record is in ``long_inbox``. late: request of one of which pieces may
    still come there, or 0. part: bytes behind the record of one message.
    """

    address: int
    rank: int
    bell: int
    num_peers: int
    driver_fd: int
    driver_word: int
    futex: int
    spin: int
    turn: int
    window: int
    functions: Int64Array
    command_tail: int
    event_head: int
    eager: int
    heed: int
    stop: int
    command_head: int
    event_tail: int
    news: int
    sleepers: int
    lock: int
    wanted: int
    due_head: int
    due_tail: int
    queue_head: int
    queue_tail: int
    unfinished: int
    granted: int
    granted_ids: int
    one: int
    stream: int
    word: int
    word_device: int
    posted: int
    ids: int
    ids_device: int
    worker: int
    key_at: int
    lanes: int
    network: int
    under_way: int
    driving: int
    late: int
    part: int
    flying: int
    broken: int
    steps: int
    operations: int
    recorded: int
    operation: int
    driver: Int64Array
    gate_streams: Int64Array
    gate_numbers: Int64Array
    gate_steps: Int64Array
    native: Int64Array
    put_params: Int64Array
    params: Int64Array
    message: Int64Array
    inbox: Int64Array
    long_inbox: Int64Array
    clock: Int64Array
    phases: Int64Array
    record: Record
    src: Int64Array
    dst: Int64Array
    length: Int64Array
    commands: Int64Array
    due: Int64Array
    buckets: Int64Array
    queue: Int64Array
    votes: Int64Array
    awaited: Int64Array
    rounds_of: Int64Array
    peers: list[Peer]
    sends: list[Send]
    receives: list[Receive]
    rounds: list[Round]
    ops: list[Op]
    events: list[Event]


def _words(record: type) -> np.dtype[np.void]:
    return np.dtype([(name, "i8") for name in record.__annotations__])


RECORD = _words(Record)
_WRITER = _words(Writer)
_SEND, _OP, _PEER, _ROUND = _words(Send), _words(Op), _words(Peer), _words(Round)
_ARRAYS: dict[str, tuple[object, int | tuple[int, int]]] = {
    "functions": ("i8", 4),
    "driver": ("i8", 4),
    "gate_streams": ("i8", GATES),
    "gate_numbers": ("i8", GATES),
    "gate_steps": ("i8", GATES),
    "native": ("i8", 8),
    "put_params": ("i8", PARAM_WORDS),
    "params": ("i8", PARAM_WORDS),
    "message": ("i8", 8),
    "inbox": ("i8", RECORD_NBYTES // 8),
    "long_inbox": ("i8", MESSAGE_NBYTES // 8),
    "clock": ("i8", 2),
    "phases": ("i8", (len(PHASES), len(BOUNDS) + 2)),
    "src": ("i8", SCRATCH),
    "dst": ("i8", SCRATCH),
    "length": ("i8", SCRATCH),
    "commands": ("i8", COMMANDS),
    "due": ("i8", (DUE, 3)),
    "buckets": ("i8", BUCKETS),
    "queue": ("i8", MAX_OPS),
    "votes": ("i8", (MAX_PEERS, MAX_FLOWS)),
    "awaited": ("i8", (MAX_PEERS, MAX_FLOWS)),
    "rounds_of": ("i8", (MAX_PEERS, MAX_FLOWS)),
    "rounds": (_ROUND, MAX_ROUNDS),
    "peers": (_PEER, MAX_PEERS),
    "sends": (_SEND, MAX_FLOWS),
    "ops": (_OP, MAX_OPS),
    "writers": (_WRITER, MAX_WRITERS),
    "aux": ("i8", MAX_WRITERS * MAX_AUX // 8),
}
# Words that one side writes often lie on cache lines of their own: 128 bytes before each of these.
_APART = ("command_tail", "command_head", "due_head", "src")


def _dtype(record: type) -> np.dtype[np.void]:
    fields: list[object] = []
    for name in record.__annotations__:
        if name in _APART:
            fields.append((f"_{name}", "i8", (16,)))
        if name == "record":
            fields.append((name, RECORD))
        elif name in _ARRAYS:
            kind, count = _ARRAYS[name]
            fields.append((name, kind, count))
        else:
            fields.append((name, "i8"))
    return np.dtype(fields)


_RECEIVE, EVENT = _dtype(Receive), _dtype(Event)
_ARRAYS["receives"] = (_RECEIVE, MAX_FLOWS)
_ARRAYS["events"] = (EVENT, MAX_EVENTS)
WORLD = _dtype(World)


def _offset(dtype: np.dtype[np.void], name: str) -> int:
    assert dtype.fields is not None
    return int(dtype.fields[name][1])


def word_at(name: str) -> int:
    """Offset in bytes of a field of `World`."""
    return _offset(WORLD, name)


def receive_word_at(name: str) -> int:
    """The word of `Receive` at which a field begins."""
    return _offset(_RECEIVE, name) // 8


def grant_word_at(name: str) -> int:
    """Offset in bytes of a field of `Grant`."""
    return 8 * list(Grant.__annotations__).index(name)


GRANT_NBYTES = _words(Grant).itemsize
AUX_AT = word_at("record") + _offset(RECORD, "lo")  # where the bytes of an AUX record begin
