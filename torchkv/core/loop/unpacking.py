"""Staging at the receiver: pieces in the standing stages of its writers are unpacked into pages. Compiled.

See `staging`. A record is the word of its writer and nobody else's, so all that it can do is name bytes of this
writer's own stage, and pages that this writer was granted. What does not fit is not unpacked; Python judges it.

The processor unpacks a piece in the same step in which its record is taken, so nothing of a request is unpacked while
the loop stands still. Whoever takes a request back and goes on with it lets its pieces be unpacked (``unpacks``), and
is told of them as of written pages; whoever fails it does not. In both cases the stage is given back.

On a GPU kernels unpack, and end later. So such pieces wait in a queue, in the order of their kernels, and count when
the completion word says that they are there: for the request, and as room in the stage. What else comes for a request
of which pieces wait, comes behind them (`follow`): its seal may not overtake them. A request that fails meanwhile keeps
its pages until they have landed, which an event tells (``stopped``).
"""

from __future__ import annotations

from torchkv.core.loop.codes import CREDIT, LANDED, SEAL, STRAY, WRITTEN
from torchkv.core.loop.copying import convert_rows
from torchkv.core.loop.events import copy_record, emit, event_room
from torchkv.core.loop.launching import launch_piece, report_broken, upload
from torchkv.core.loop.limits import GRAIN, MAX_FLOWS, MAX_GRANTED, SCRATCH, SEGMENT_FIELDS, UNPACK_IDS, UNPACKINGS
from torchkv.core.loop.mailbox import owe, ring, room, tell, write_brief
from torchkv.core.loop.receiving import on_record, writer_of
from torchkv.core.loop.staging import merged, staged_nbytes
from torchkv.core.loop.state.peers import Record
from torchkv.core.loop.state.requests import Receive, Unpacking, Writer
from torchkv.core.loop.state.world import World
from torchkv.core.loop.stripes import converts, owed_pairs, place_pairs, segments, sizes
from torchkv.host.atomics import load
from torchkv.host.copy_loops import copy_bytes, pairs_at
from torchkv.host.jit import compiled

__all__ = ["follow", "forget_source", "land", "on_staged", "pay_credit", "unpack_room"]

_NEVER = 1 << 62  # the completion word of kernels of which the driver has refused the last


@compiled
def on_staged(world: World, source: int) -> bool:
    """Takes in the piece that ``world["record"]`` speaks of. False if the record is Python's to judge.

    Then it is a WRITTEN one if the piece was unpacked.
    """
    record, peer = world["record"], world["peers"][source]
    at, nbytes, size = record["spare"], record["nbytes"], peer["ring_nbytes"]
    if peer["ring"] == 0 or at < peer["reached"] or at - peer["taken"] > size or not 0 <= nbytes <= size:
        return True  # not of its stage: nothing that could be given back
    if at % size + nbytes > size or at - peer["taken"] + nbytes > size:
        return True
    if world["word"] != 0 and (at | nbytes) % GRAIN != 0:
        return True
    peer["reached"] = at + nbytes
    where = peer["ring"] + at % size
    if world["word"] != 0:
        return _enqueue(world, source, where, at + nbytes)
    known = True
    if record["generation"] != 0:
        known = _unpack(world, source, where)
    _give_back(world, source, at + nbytes)
    return known


@compiled
def _give_back(world: World, source: int, position: int) -> None:
    peer = world["peers"][source]
    peer["taken"] = position
    if peer["crediting"] == 0:
        peer["crediting"] = 1
        owe(world, CREDIT, source, 0, 0)


@compiled
def _writer(world: World, source: int, grain: int) -> int:
    """The number of the writer, in its receive, whose piece the record speaks of; -1 if that may not be unpacked.

    grain: see `staged_nbytes`. The record then has the bytes of the pages, instead of those in the stage.
    """
    record = world["record"]
    flow = record["flows"] & 0xFFFFFFFF
    if flow >= MAX_FLOWS:
        return -1
    receive = world["receives"][flow]
    number = writer_of(receive, source)
    if receive["unpacks"] == 0 or receive["generation"] != record["generation"] or number < 0:
        return -1
    writer = receive["writers"][number]
    first, last = record["head"] >> 8 & 0xFFFFFF, record["head"] >> 32
    page, most = writer["page_size"], receive["num_tokens"] + max(writer["page_size"], receive["page_size"])
    if writer["geometry"] == 0 or writer["sealed"] >= 0 or not 0 <= first < last <= writer["layers"]:
        return -1
    if not 0 <= record["lo"] <= record["hi"] <= most or record["lo"] % page != 0 or record["hi"] % page != 0:
        return -1
    granted, start, count = receive["num_tokens"], record["lo"] // page, (record["hi"] - record["lo"]) // page
    nbytes = payload = 0
    for position in range(first, last):
        to_page = receive["page_size"]
        of_layer = staged_nbytes(writer["geometry"], position, granted, page, to_page, start, count, grain)
        nbytes += of_layer[0]
        payload += of_layer[1]
    if nbytes != record["nbytes"]:
        return -1
    record["nbytes"] = payload
    return number


@compiled
def _unpack(world: World, source: int, at: int) -> bool:
    """The processor unpacks a piece."""
    record: Record = world["record"]
    number = _writer(world, source, 1)
    if number < 0:
        return False
    receive = world["receives"][record["flows"] & 0xFFFFFFFF]
    writer = receive["writers"][number]
    first, last, page = record["head"] >> 8 & 0xFFFFFF, record["head"] >> 32, writer["page_size"]
    start, count = record["lo"] // page, (record["hi"] - record["lo"]) // page
    for position in range(first, last):
        at = _scatter(world, receive, writer, position, start, count, at)
    receive["pieces"] += 1
    record["head"] = WRITTEN | first << 8 | last << 32
    return on_record(world, source)


@compiled
def _scatter(world: World, receive: Receive, writer: Writer, position: int, start: int, count: int, at: int) -> int:
    """Unpacks the writer's pages [start, start + count) of one layer from the address ``at``. The address behind."""
    src, dst = world["src"], world["dst"]
    granted, src_page, dst_page = receive["num_tokens"], writer["page_size"], receive["page_size"]
    seg, end = segments(writer["geometry"], position)
    while seg < end:
        begin, stop = owed_pairs(granted, src_page, dst_page, start, count, seg + 120)
        n0, d0, n1, d1, run = merged(load(seg + 64), load(seg + 80), load(seg + 88), load(seg + 104), load(seg + 112))
        _, there, in_stage = sizes(seg)
        packed = run // there * in_stage
        nbytes = n0 * n1 * packed
        while begin < stop:
            pairs = min(SCRATCH, stop - begin)
            place_pairs(dst, seg, 1, receive["ids"], 0, dst_page, begin, pairs)
            for i in range(pairs):
                src[i] = i * nbytes
            if converts(seg) and in_stage < there:
                convert_rows(seg, at, load(seg + 8), src, dst, 0, pairs, n0, n1 * packed, d0, n1, packed, d1, run)
            else:
                pairs_at(at, load(seg + 8), src, dst, 0, pairs, n0, n1 * packed, d0, n1, packed, d1, run)
            begin += pairs
            at += pairs * nbytes
        seg += 8 * SEGMENT_FIELDS
    return at


@compiled
def pay_credit(world: World, rank: int) -> bool:
    """Tells a writer how far its pieces have been unpacked; False where there is no room. A later lane tells it."""
    peer = world["peers"][rank]
    if (peer["endpoint"] != 0 and peer["failed"] == 0) or peer["outbox"] != 0:
        if room(world, peer) < 1:
            return False
        write_brief(world, CREDIT, 0, 0)
        world["record"]["lo"] = peer["taken"]
        tell(world, peer)
        ring(world, peer["bell"])
    peer["crediting"] = 0
    return True


# ---------------------------------------------------------------- on a GPU


@compiled
def unpack_room(world: World) -> bool:
    """Whether one more record may be taken, whatever it says. If not, kernels are under way that make room."""
    if world["broken"] != 0:
        return True  # nothing is launched any more, and what waits need not be waited for
    queued, ids = world["unpack_tail"] - world["unpack_head"], world["unpack_ids_tail"] - world["unpack_ids_head"]
    return bool(queued < UNPACKINGS and ids <= UNPACK_IDS - 2 * MAX_GRANTED)


@compiled
def _enqueue(world: World, source: int, at: int, behind: int) -> bool:
    """As `_unpack` and `_give_back`, by kernels. False if the record is Python's to judge."""
    record, known, launched, ids = world["record"], True, 0, world["unpack_ids_tail"]
    flow = -1
    if record["generation"] != 0:
        number = _writer(world, source, GRAIN)
        known = number >= 0 and world["receives"][record["flows"] & 0xFFFFFFFF]["writers"][number]["sealing"] == 0
        if known:
            launched, ids = _launch(world, source, number, at)
            report_broken(world)
            known = launched >= 0
    if known and record["generation"] != 0:
        flow = record["flows"] & 0xFFFFFFFF
        record["head"] = WRITTEN | record["head"] >> 8 << 8
    if world["unpack_tail"] - world["unpack_head"] == UNPACKINGS:  # only where the GPU is broken
        return known
    _queue(world, source, flow, max(launched, 0), behind, ids)
    return known


@compiled
def _queue(world: World, source: int, flow: int, launched: int, behind: int, ids: int) -> None:
    """Adds ``world["record"]`` to the queue. The rest: see `Unpacking`."""
    entry = world["unpackings"][world["unpack_tail"] & (UNPACKINGS - 1)]
    entry["source"], entry["flow"], entry["launched"] = source, flow, launched
    entry["behind"], entry["ids"] = behind, ids
    copy_record(entry["record"], world["record"])
    world["unpack_tail"] += 1
    world["unpack_ids_tail"] = ids
    if flow >= 0:
        world["receives"][flow]["unpacking"] += 1


@compiled
def _launch(world: World, source: int, number: int, at: int) -> tuple[int, int]:
    """Enqueues the kernels for a piece at the address ``at``, and the page ids that they need.

    Returns what the completion word will be once the piece is unpacked, 0 where there is nothing to unpack, -1 if
    nothing is enqueued because the driver refuses it; and how far the page ids have come.
    """
    record: Record = world["record"]
    receive = world["receives"][record["flows"] & 0xFFFFFFFF]
    writer = receive["writers"][number]
    first, last, page = record["head"] >> 8 & 0xFFFFFF, record["head"] >> 32, writer["page_size"]
    granted, to_page = receive["num_tokens"], receive["page_size"]
    low, high = record["lo"] // to_page, (min(record["hi"], granted) + to_page - 1) // to_page
    position = world["unpack_ids_tail"]
    if record["nbytes"] == 0 or high <= low:
        return 0, position
    if world["broken"] != 0:
        return -1, position
    count = high - low
    if position % UNPACK_IDS + count > UNPACK_IDS:
        position += UNPACK_IDS - position % UNPACK_IDS
    offset = 8 * (position % UNPACK_IDS)
    here, there = world["unpack_ids"] + offset, world["unpack_ids_device"] + offset
    copy_bytes(here, receive["ids"] + 8 * low, 8 * count)
    if not upload(world, there, here, 8 * count):
        return -1, position
    extent = first, last, record["lo"] // page, (record["hi"] - record["lo"]) // page, granted, page, to_page
    launched = launch_piece(world, writer["kernels"], extent, 0, 0, there - 8 * low, at)
    if launched == -1:
        return -1, position
    return world["posted"] if launched > 0 else _NEVER, position + count


@compiled
def follow(world: World, source: int) -> bool:
    """Takes ``world["record"]`` in, behind the pieces of its receive that wait. False if it is Python's to judge."""
    record = world["record"]
    flow = record["flows"] & 0xFFFFFFFF
    if flow >= MAX_FLOWS or world["receives"][flow]["unpacking"] == 0:
        return on_record(world, source)
    receive = world["receives"][flow]
    number = writer_of(receive, source)
    if receive["generation"] != record["generation"] or number < 0:
        return on_record(world, source)
    if world["unpack_tail"] - world["unpack_head"] == UNPACKINGS:
        return True  # the GPU is broken: see `unpack_room`. The request fails by its timeout
    if record["head"] & 0xFF == SEAL:
        receive["writers"][number]["sealing"] = 1
    _queue(world, source, flow, 0, -1, world["unpack_ids_tail"])
    return True


@compiled
def land(world: World) -> bool:
    """Takes in what has been unpacked, and what came behind it. Whether there was anything."""
    landed = False
    while world["unpack_head"] != world["unpack_tail"] and event_room(world):
        entry = world["unpackings"][world["unpack_head"] & (UNPACKINGS - 1)]
        if entry["launched"] != 0 and load(world["word"]) < entry["launched"]:
            break
        world["unpack_head"] += 1
        world["unpack_ids_head"] = entry["ids"]
        if entry["flow"] >= 0:
            _count(world, entry)
        if entry["behind"] >= 0 and entry["source"] >= 0:
            _give_back(world, entry["source"], entry["behind"])
        landed = True
    return landed


@compiled
def _count(world: World, entry: Unpacking) -> None:
    """A piece is unpacked, or what came behind it has its turn."""
    receive = world["receives"][entry["flow"]]
    receive["unpacking"] -= 1
    is_piece = entry["behind"] >= 0
    copy_record(world["record"], entry["record"])
    if is_piece:
        receive["pieces"] += 1
    wanted = entry["source"] >= 0 and (receive["unpacks"] != 0 or not is_piece)
    if wanted and not on_record(world, entry["source"]):
        emit(world, STRAY, 0, entry["source"])
    if receive["unpacking"] == 0 and receive["stopped"] != 0:
        receive["stopped"] = 0
        emit(world, LANDED, entry["flow"], 0)


@compiled
def forget_source(world: World, source: int) -> None:
    """The peer has ended: what is unpacked of it counts for nobody. For a caller that holds the lock."""
    for number in range(world["unpack_head"], world["unpack_tail"]):
        entry = world["unpackings"][number & (UNPACKINGS - 1)]
        if entry["source"] == source:
            entry["source"] = -1
