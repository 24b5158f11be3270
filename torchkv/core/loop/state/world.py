"""The state of the resident loop: structured arrays that compiled code and plain Python read alike.

All state of one loop is a single record, `World`, so that a compiled function takes one pointer. The classes, here and
in `requests` and `peers`, give the fields to mypy; the dtypes below are made of the same classes. All fields are int64,
unless they are arrays.

Who writes what. Callers (under the GIL and the engine's lock, so one at a time) write commands, new flows, new ops,
``event_head``, and what is unclaimed. The loop writes everything else; while a caller holds ``lock``, the loop writes
nothing. Peers write their own mailbox and the bell, which lie in shared memory (see `mailbox`).

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
    LINE,
    MAX_AUX,
    MAX_COPIERS,
    MAX_EVENTS,
    MAX_FLOWS,
    MAX_OPS,
    MAX_PEERS,
    MAX_ROUNDS,
    MAX_UNCLAIMED,
    MAX_WRITERS,
    MESSAGE_NBYTES,
    PARAM_WORDS,
    RECORD_NBYTES,
    SCRATCH,
    UNPACKINGS,
)
from torchkv.core.loop.state.copying import Copier, Job
from torchkv.core.loop.state.peers import Grant, Peer, Record
from torchkv.core.loop.state.requests import Op, Receive, Repeat, Round, Send, Unpacking, Way, Writer
from torchkv.observe.histogram import BOUNDS

__all__ = [
    "AUX_AT",
    "COPIER_NBYTES",
    "EVENT",
    "GRANT_NBYTES",
    "RECORD",
    "REPEAT",
    "WAY",
    "WORLD",
    "Event",
    "World",
    "copier_word_at",
    "grant_word_at",
    "job_word_at",
    "receive_word_at",
    "word_at",
]


class Event(TypedDict):
    """What Python should know. index: of an op or a flow; source: the rank that a STRAY record came from."""

    kind: int
    index: int
    source: int
    record: Record


class World(TypedDict):
    """Everything. address: its own. rank: of this loop. bell: address of this rank's, which the loop sleeps on.

    driver_fd, driver_word: wake Python's thread, while it sleeps or rests. eager: whether it is woken for every event,
    because somebody waits for more than the end of a request. news: changes with each event that is not `QUIET`, and
    with each call that Python completes; roused: whether something comes for the loop soon; sleepers: callers that
    sleep until there are news. listeners: callers that wait for quiet events, too: then none is. lock, wanted: a caller
    that wants the loop to stand still sets ``wanted`` and takes ``lock``. heed: whether Python's thread is woken for
    grants that are not bound here. attending: callers that run the loop, or are about to. granted: ``event_tail`` after
    the last of them. unclaimed: those that Python has seen among the events, and has left for the verbs that begin
    their requests, from ``unclaimed_head`` to ``unclaimed_tail``. granted_ids: address of int64 ``[MAX_FLOWS,
    GRANTED_IDS]``, of sends that were bound here. buckets: flow + 1 of the first waiting send of each, by hash. due:
    messages that wait for room: (kind | rank << 8, flow, generation). queue: ops that copy. unfinished: sends of which
    more ops are expected. turn: bytes that a thread copies in one step: how long a message may wait. window: records
    that may wait in a mailbox. one: the word 1. record, src, dst, length: scratch. Of the instance that this rank
    leads, by peer and flow: votes: generation of the latest complete part; awaited, rounds_of: the generation that a
    round waits for, and the round + 1, or 0.

    Of `copying`: copiers: threads that copy with the loop. chunk: bytes that one thread claims at a time. job: an array
    of one. copier: what each thread has to say.

    Of the `journal`: operations: address of its ring of ``recorded``, which may be 0; operation: number of the last
    one. phases: for each of `PHASES` how many durations lie in each bucket of a histogram, and their sum in
    nanoseconds. clock: scratch.

    Of a rank whose pages lie on a GPU (see `launching`): stream: on which everything is enqueued. word, word_device:
    addresses of the completion word, here and there; posted: the number of the latest kernel, which it writes there.
    ids, ids_device: addresses of int64 ``[MAX_GPU_SENDS, IDS]``. flying: ops whose kernels are enqueued. seals: peers
    that soon send a seal, when the loop looked last. broken: the driver's error code, negative until Python is told of
    it; or 0. steps: so far; gate_streams, gate_numbers, gate_steps: in which step an event of a stream had not
    happened. Of its `unpacking`: unpackings: those from ``unpack_head`` to ``unpack_tail`` wait. unpack_ids,
    unpack_ids_device: addresses of int64 ``[UNPACK_IDS]``, of which positions from ``unpack_ids_head`` to
    ``unpack_ids_tail`` are in use.

    Of a rank that reaches peers through the network: native, worker, put_params, params: see
    `torchkv.transport.NativeChannel`; key_at: address of the word in ``put_params``. lanes: such peers. stages: peers
    that have granted a standing stage; untold: pieces in these that the peers were not told of. network: flows
    with them. under_way: peers to which puts are, or of which a flush is awaited. driving: whether the loop alone
    drives the transport; else Python's thread does, too, and wakes the loop if something has come. message, inbox: of
    the message that has come; a longer one than a record is in ``long_inbox``. late: request of one of which pieces may
    still come there, or 0. part: bytes behind the record of one message.
    """

    # Set once, or seldom.
    address: int
    rank: int
    bell: int
    num_peers: int
    driver_fd: int
    driver_word: int
    futex: int
    spin: int
    turn: int
    copiers: int
    chunk: int
    window: int
    functions: Int64Array
    granted_ids: int
    one: int
    stream: int
    word: int
    word_device: int
    ids: int
    ids_device: int
    unpack_ids: int
    unpack_ids_device: int
    driver: Int64Array
    worker: int
    key_at: int
    native: Int64Array
    part: int
    lanes: int
    stages: int
    network: int
    driving: int
    operations: int
    recorded: int
    eager: int
    heed: int
    stop: int
    broken: int
    # By callers, at every verb or wait.
    command_tail: int
    event_head: int
    unclaimed_head: int
    unclaimed_tail: int
    roused: int
    sleepers: int
    attending: int
    listeners: int
    # By the loop, when it has something to tell them.
    command_head: int
    event_tail: int
    news: int
    granted: int
    # By the loop, at every step, or for itself.
    lock: int
    wanted: int
    steps: int
    seals: int
    flying: int
    unfinished: int
    due_head: int
    due_tail: int
    queue_head: int
    queue_tail: int
    untold: int
    under_way: int
    late: int
    posted: int
    operation: int
    unpack_head: int
    unpack_tail: int
    unpack_ids_head: int
    unpack_ids_tail: int
    gate_streams: Int64Array
    gate_numbers: Int64Array
    gate_steps: Int64Array
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
    job: list[Job]
    copier: list[Copier]
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
    unpackings: list[Unpacking]
    events: list[Event]
    unclaimed: list[Event]


def _words(record: type, *, multiple: int = 8) -> np.dtype[np.void]:
    """multiple: of its size in bytes."""
    names = list(record.__annotations__)
    nbytes = -(-8 * len(names) // multiple) * multiple
    return np.dtype({"names": names, "formats": ["i8"] * len(names), "itemsize": nbytes})


RECORD = _words(Record)
_WRITER = _words(Writer)
_SEND, _PEER, _ROUND = _words(Send), _words(Peer), _words(Round)
# Callers write one while the loop works on the next.
_OP = _words(Op, multiple=LINE)
_ARRAYS: dict[str, tuple[object, int | tuple[int, int]]] = {
    "functions": ("i8", 5),
    "driver": ("i8", 3),
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
    "job": (_words(Job), 1),
    "rounds": (_ROUND, MAX_ROUNDS),
    "peers": (_PEER, MAX_PEERS),
    "sends": (_SEND, MAX_FLOWS),
    "ops": (_OP, MAX_OPS),
    "writers": (_WRITER, MAX_WRITERS),
    "aux": ("i8", MAX_WRITERS * MAX_AUX // 8),
    "rest": ("i8", 14),
}
# Each of these begins a cache line, so that a core does not fetch again and again what another one has written beside
# what it wants: that takes a tenth of a microsecond, and a loop that spins writes some of its words all the time.
_APART = ("command_tail", "command_head", "lock", "src", "job", "copier", "commands", "ops", "unpackings")


def _dtype(record: type) -> np.dtype[np.void]:
    fields: list[object] = []
    for name in record.__annotations__:
        if name in _APART and (behind := -np.dtype(fields).itemsize % LINE):
            fields.append((f"_{name}", "i8", behind // 8))
        if name == "record":
            fields.append((name, RECORD))
        elif name in _ARRAYS:
            kind, count = _ARRAYS[name]
            fields.append((name, kind, count))
        else:
            fields.append((name, "i8"))
    return np.dtype(fields)


_RECEIVE, EVENT = _dtype(Receive), _dtype(Event)
_COPIER = _dtype(Copier)
_ARRAYS["receives"] = (_RECEIVE, MAX_FLOWS)
_ARRAYS["copier"] = (_COPIER, MAX_COPIERS)
_ARRAYS["events"] = (EVENT, MAX_EVENTS)
_ARRAYS["unclaimed"] = (EVENT, MAX_UNCLAIMED)
_ARRAYS["unpackings"] = (_dtype(Unpacking), UNPACKINGS)
WORLD = _dtype(World)
WAY, REPEAT = _words(Way), _words(Repeat)


def _offset(dtype: np.dtype[np.void], name: str) -> int:
    assert dtype.fields is not None
    return int(dtype.fields[name][1])


def word_at(name: str) -> int:
    """Offset in bytes of a field of `World`."""
    return _offset(WORLD, name)


def receive_word_at(name: str) -> int:
    """The word of `Receive` at which a field begins."""
    return _offset(_RECEIVE, name) // 8


def job_word_at(name: str) -> int:
    """Offset in bytes of a field of the `World`'s `Job`."""
    return word_at("job") + 8 * list(Job.__annotations__).index(name)


def copier_word_at(name: str) -> int:
    """Offset in bytes of a field of `Copier`."""
    return _offset(_COPIER, name)


def grant_word_at(name: str) -> int:
    """Offset in bytes of a field of `Grant`."""
    return 8 * list(Grant.__annotations__).index(name)


GRANT_NBYTES = _words(Grant).itemsize
COPIER_NBYTES = _COPIER.itemsize
AUX_AT = word_at("record") + _offset(RECORD, "lo")  # where the bytes of an AUX record begin
